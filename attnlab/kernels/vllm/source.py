"""Source: the vLLM, or another package, whose kernels run: installed, a wheel, an sdist or a checkout.

A Source is only read: nothing of it is imported, installed or changed here. From an archive, the Python
files of the attention ops, and of vLLM the attention files of csrc, are unpacked into a cache folder that is
named by the hash of the archive.
"""

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from attnlab.case.errors import AttnLabError, InvalidCase, Unavailable, Unsupported
from attnlab.case.fields import refuse
from attnlab.kernels.cache_folder import cache_folder, check_private, private_folder, writing
from attnlab.kernels.child_process import ending_with_parent
from attnlab.library.op import Package, package_of

VLLM = package_of("vllm")
OPS_FOLDERS = VLLM.folders
# Limits of what is unpacked. 0.11.2 and 0.33.0 have at most 46 such files with 0.9 MiB in all.
_MOST_FILES = 500
_MOST_BYTES = 32 << 20
_MOST_UNPACKED = 4 << 30  # of all members of a tar file, which must be decompressed to be skipped
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)
_FILE_VERSION = re.compile(r"^__version__ = [^'\"\n]*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_VERSION_FILES = (
    ("PKG-INFO", _VERSION),
    ("METADATA", _VERSION),
    ("{name}/_version.py", _FILE_VERSION),
    ("{name}/version.py", _FILE_VERSION),
)


@cache
def _kept(package: Package) -> re.Pattern[str]:
    """Return which files of an archive are unpacked: modules of ops, further files, and its metadata.

    Of a package without a record, all modules and JSON files.
    """
    names = "|".join(
        name.replace("-", "[-_]") for name in sorted({package.name, *package.distributions})
    )
    top, folders = rf"(?:{names})-[^/]*/", "|".join(package.folders)
    further = rf"|(?:{top})?({package.further})" if package.further else ""
    files = rf"(?:{folders})/\w+\.py"
    if package.is_whole:
        top, files, further = r"[^/]*-[^/]*/", rf"{package.name}/.*\.(?:py|json)", ""
    return re.compile(
        rf"(?:{top})?({files})|{top}(PKG-INFO){further}"
        rf"|(?:{names})[\w.+]*-[^/]*\.dist-info/(METADATA)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A package, by default vLLM, whose files can be read.

    - ``path``: the path that was given or found; ``root``: the folder that contains ``vllm/``.
    - ``version``: the version in its metadata; "unknown" for a checkout without metadata.
    """

    kind: str
    path: Path
    root: Path
    version: str
    package: Package = VLLM

    @property
    def ops_folders(self) -> tuple[str, ...]:
        """Return the folders of attention ops that exist in this source, the newer layout first."""
        return tuple(name for name in self.package.folders if (self.root / name).is_dir())

    def op_file(self, name: str) -> Path:
        """Return the file of the op module ``name``; raise Unsupported if the release has none."""
        for folder in self.ops_folders:
            if (file := self.root / folder / f"{name}.py").is_file():
                return file
        text = f"{self.package.title} {self.version} has no attention op {name}"
        raise Unsupported(f"{text} ({self.path})")

    @property
    def rules(self) -> str | None:
        """Return the release of vLLM whose rules the lab applies; None if it is unknown, or not a vLLM.

        The lab has rules for two releases: 0.11.2 (used up to 0.11) and 0.33.0 (used for all later ones).
        A release between them follows each in part: see :func:`attnlab.case.fields.difference`.
        """
        match = re.match(r"(\d+)\.(\d+)", self.version)
        if match is None or self.package is not VLLM:
            return None
        return "0.11.2" if (int(match[1]), int(match[2])) <= (0, 11) else "0.33.0"

    def text(self) -> str:
        """Return the source as text for a result, for example "vllm 0.33.0"."""
        return f"{self.package.name} {self.version}"


def find_source(path: Path | str | None = None, package: Package = VLLM) -> Source:
    """Return the package at ``path``: a wheel, an sdist or a folder; None means the installed one.

    Raises InvalidCase if ``path`` is not a vLLM, or not the package, and Unavailable if none is installed.
    """
    if path is None:
        return _installed(package)
    path = Path(path).expanduser()
    if path.is_dir():
        return _checkout(path, package)
    if not path.is_file():
        refuse("source", "a wheel, an sdist or a folder that exists", str(path))
    return _archive(path, package)


def fetch(version: str, package: Package = VLLM) -> Path:
    """Return the wheel of a release; download it with pip into the cache folder if it is not there.

    A wheel of vLLM has 250 to 500 MB. Raises InvalidCase if ``version`` is not a version, and Unavailable if
    pip cannot download it.
    """
    check_release(version)
    name = _release_name(version, package)
    folder = cache_folder() / "releases" / name
    if not _wheels(folder, version, package):
        folder = private_folder("releases", name)
        with writing(), FileLock(folder.parent / f"{name}.lock"):
            if not _wheels(folder, version, package):
                _download(version, folder, package)
    return _wheels(folder, version, package)[0]


def _release_name(version: str, package: Package) -> str:
    """Return the name of the folder of a release in the cache folder; that of a vLLM is its version."""
    return version if package is VLLM else f"{package.name}-{version}"


def _download(version: str, folder: Path, package: Package) -> None:
    """Download a wheel with pip into ``folder``; a partial download leaves nothing there."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", partial]
        name = f"{package.distributions[0]}=={version}"
        command = ending_with_parent([*command, name])
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not _wheels(Path(partial), version, package):
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no wheel"]
            raise Unavailable(f"pip cannot download {name}: {lines[0]}")
        for wheel in _wheels(Path(partial), version, package):
            os.replace(wheel, folder / wheel.name)


def check_release(version: str) -> None:
    """Raise InvalidCase if ``version`` is not the version of a release."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.\d+)?(\.?(post|rc)\d+)?", version):
        refuse("release", "a version such as 0.11.2", version)


def fetched_wheel(version: str, package: Package = VLLM) -> Path | None:
    """Return the wheel of a release that was downloaded earlier, or None."""
    folder = cache_folder() / "releases" / _release_name(version, package)
    return next(iter(_wheels(folder, version, package)), None)


def fetched(version: str, package: Package = VLLM) -> Path | None:
    """Return the wheel of a release that was downloaded earlier, or else the folder of its ops, or None."""
    folder = cache_folder() / "releases" / _release_name(version, package) / "ops"
    return fetched_wheel(version, package) or (folder if folder.is_dir() else None)


def source_path(text: str, package: Package = VLLM) -> Path:
    """Return the path of a source that exists: itself, or what was downloaded of a version."""
    path = Path(text).expanduser()
    if path.exists():
        return path
    if re.fullmatch(r"\d+\.\d+[\w.]*", text):
        found = fetched(text, package)
        if found is None:
            words = text if package is VLLM else f"--library {package.name} {text}"
            raise InvalidCase(
                f"source must be a release that was downloaded, got {text}; run attnlab fetch {words}"
            )
        return found
    refuse("source", "a wheel, an sdist or a folder that exists, or a version", text)


def _wheels(folder: Path, version: str, package: Package) -> list[Path]:
    name = package.distributions[0].replace("-", "_")
    return sorted(folder.glob(f"{name}-{version}-*.whl"))


def _installed(package: Package) -> Source:
    for name in package.distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        spec = importlib.util.find_spec(package.name)  # does not import it
        if spec is not None and spec.submodule_search_locations:
            path = Path(next(iter(spec.submodule_search_locations)))
            return Source(
                kind="installed", path=path, root=path.parent, version=version, package=package
            )
    download = (
        ""
        if package is not VLLM
        else (", or download one with attnlab fetch 0.33.0 (add --sdist for backend rocm)")
    )
    raise Unavailable(
        f"no {package.title} is installed: give one with --source PATH (a wheel, an sdist or a "
        f"checkout){download}"
    )


def _checkout(path: Path, package: Package) -> Source:
    name = package.name
    root = path.parent if path.name == name and not (path / name).is_dir() else path
    version = "unknown"
    for file, pattern in _VERSION_FILES:
        path_of_version = root / file.format(name=name)
        if path_of_version.is_file() and (match := pattern.search(path_of_version.read_text())):
            version = match[1]
    source = Source(
        kind="checkout", path=path, root=root.absolute(), version=version, package=package
    )
    if not source.ops_folders:
        raise InvalidCase(_no_ops(path, package), field="source")
    return source


def _no_ops(path: Path, package: Package) -> str:
    folders = ", ".join(package.folders)
    title = f"{'the package' if package.is_whole else 'a'} {package.title}"
    return f"source must be {title}: {path} contains none of {folders}"


def _archive(path: Path, package: Package) -> Source:
    """Return the Source of a wheel or an sdist; unpack its ops into the cache folder."""
    facts = path.stat()
    key = _hash(path.resolve(), facts.st_mtime_ns, facts.st_size)
    layout = hashlib.sha256(_kept(package).pattern.encode()).hexdigest()[:4]
    # A change of what is kept unpacks archives again.
    root = private_folder("sources") / f"{key}-{layout}"
    if not root.is_dir():
        with writing():
            unpack(_members(path, package), root, path, package)
    check_private(root)
    metadata = next(root.glob("METADATA"), None) or root / "PKG-INFO"
    match = _VERSION.search(metadata.read_text()) if metadata.is_file() else None
    kind = "wheel" if zipfile.is_zipfile(path) else "sdist"
    version = match[1] if match else "unknown"
    return Source(kind=kind, path=path, root=root, version=version, package=package)


@cache
def _hash(path: Path, changed: int, size: int) -> str:
    """Return the hash of an archive of some hundred megabytes, computed once until it changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def unpack(
    members: Iterable[tuple[str, bytes]], root: Path, path: Path, package: Package = VLLM
) -> None:
    """Write the kept files of an archive to ``root`` in one step: a failure leaves nothing there."""
    partial = Path(tempfile.mkdtemp(dir=root.parent))
    try:
        found, files, size = False, 0, 0
        for name, data in members:
            files, size = files + 1, size + len(data)
            if (files > _MOST_FILES and not package.is_whole) or size > _MOST_BYTES:
                raise InvalidCase(_too_large(path, package), field="source")
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(data)
            found = found or name.startswith(package.folders)
        if not found:
            raise InvalidCase(_no_ops(path, package), field="source")
        try:
            os.replace(partial, root)
        except OSError:
            if not root.is_dir():  # otherwise another process has unpacked the same files
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _too_large(path: Path, package: Package) -> str:
    return (
        f"source must be a wheel or an sdist of {package.title}, got {path}: its attention ops exceed "
        f"{_MOST_FILES} files or {_MOST_BYTES >> 20} MiB"
    )


def wheel_members(
    wheel: zipfile.ZipFile, path: Path, package: Package = VLLM
) -> Iterator[tuple[str, bytes]]:
    """Yield each file of the wheel ``path`` to keep, as :func:`_members`."""
    for info in wheel.infolist():
        if match := _kept(package).fullmatch(info.filename):
            if info.file_size > _MOST_BYTES:
                raise InvalidCase(_too_large(path, package), field="source")
            yield match[match.lastindex or 0], wheel.read(info)


def _members(path: Path, package: Package) -> Iterator[tuple[str, bytes]]:
    """Yield each file to keep: its name relative to the archive's top folder, and its bytes."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                yield from wheel_members(wheel, path, package)
            return
        with tarfile.open(path) as sdist:
            unpacked = 0
            for member in sdist:
                unpacked += member.size
                if unpacked > _MOST_UNPACKED:
                    raise InvalidCase(_too_large(path, package), field="source")
                match = _kept(package).fullmatch(member.name) if member.isreg() else None
                if match and member.size > _MOST_BYTES:
                    raise InvalidCase(_too_large(path, package), field="source")
                if match and (file := sdist.extractfile(member)):
                    yield match[match.lastindex or 0], file.read()
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        why = " ".join(str(error).split())
        raise InvalidCase(
            f"source must be a wheel or an sdist of {package.title}, got {path}: {why}"
        ) from error


# Download the sdist of a vLLM release from the package index that pip is configured for.
#
# ``pip download`` of an sdist runs its build to read the metadata, and vLLM's build needs a GPU tool chain.
# So pip only reports its configured indexes, and unearth downloads the file.

_SETTING = re.compile(r"^(\S+)\.([\w-]+)='(.*)'$", re.MULTILINE)
_SECTIONS = (":env:", "download", "global")  # the first section that sets a value wins, as in pip
_DEFAULT = re.compile(r"\(default\s+(https?://[^\s)]+)\)")


def fetch_sdist(version: str) -> Path:
    """Return the sdist of a vLLM release; download it into the cache folder if it is not there.

    An sdist has 10 to 50 MB. Raises InvalidCase if ``version`` is not a version, and Unavailable if it
    cannot be downloaded.
    """
    check_release(version)
    folder = cache_folder() / "releases" / version
    found = folder / f"vllm-{version}.tar.gz"
    if not found.is_file():
        folder = private_folder("releases", version)
        with (
            writing(),
            FileLock(folder.parent / f"{version}.sdist.lock"),
            tempfile.TemporaryDirectory(dir=folder.parent) as work,
        ):
            if not found.is_file():
                with writing():  # unearth sets the umask to 0 while it unpacks
                    fetched = _sdist_download(version, Path(work))
                whole = shutil.copyfile(fetched, Path(work) / "whole")
                os.replace(whole, found)
    return found


def _sdist_download(version: str, folder: Path) -> Path:
    finder = package_finder(no_binary=["vllm"])
    try:
        best = finder.find_best_match(f"vllm=={version}", allow_prereleases=True).best
        if best is None:
            raise Unavailable(f"the package index has no sdist of vllm {version}")
        hashes = {name: [digest] for name, digest in (best.link.hashes or {}).items()}
        finder.download_and_unpack(best.link, folder / "unpacked", folder, hashes)
    except Unavailable:
        raise
    except Exception as error:  # unearth and its HTTP client document no exception types
        why = " ".join(str(error).split()) or type(error).__name__
        raise Unavailable(f"the sdist of vllm {version} cannot be downloaded: {why}") from error
    path: Path = best.link.file_path if best.link.is_file else folder / best.link.filename
    return path


def package_finder(**options: Any) -> Any:
    """Return unearth's PackageFinder of pip's package locations; raise Unavailable without unearth."""
    try:
        from unearth import PackageFinder
    except ImportError as error:
        raise Unavailable(
            f"finding a release needs unearth: pip install unearth ({error})"
        ) from error
    settings = pip_settings()
    return PackageFinder(
        index_urls=settings["index-url"] + settings["extra-index-url"],
        find_links=settings["find-links"],
        trusted_hosts=settings["trusted-host"],
        ignore_compatibility=True,
        **options,
    )


def pip_settings() -> dict[str, list[str]]:
    """Return pip's package locations by the names of its options; the default index if none is set."""
    listed = _pip("config", "list")
    found: dict[str, list[str]] = {}
    for name in ("index-url", "extra-index-url", "find-links", "trusted-host"):
        by_section = {s: v for s, n, v in _SETTING.findall(listed) if n == name}
        value = next((by_section[s] for s in _SECTIONS if s in by_section), "")
        found[name] = value.replace("\\n", " ").split()
    if not found["index-url"]:
        default = _DEFAULT.search(" ".join(_pip("download", "--help").split()))
        found["index-url"] = [default[1]] if default else []
    return found


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check"]
    return subprocess.run(ending_with_parent(command), capture_output=True, text=True).stdout


# The attention ops of vLLM's releases, without their wheels.
#
# A wheel is a zip file of 250 to 500 MB, and its op files have 1 MB. An index that supports range requests
# provides them alone: remotezip reads the directory at the end of the wheel, then the files.


def order(version: str) -> tuple[int, ...]:
    """Return what sorts releases by age: their numbers."""
    return tuple(map(int, re.findall(r"\d+", version)))


def releases_between(first: str, last: str, package: Package = VLLM) -> list[str]:
    """Return the releases that the package index has from ``first`` to ``last``, the oldest first.

    Release candidates are left out. Raises InvalidCase for a release that the index does not have, and
    Unavailable if the index cannot be read.
    """
    found = sorted({one.version for one in _packages(package.distributions[0])}, key=order)
    for version in (first, last):
        if version not in found:
            near = [v for v in found if order(v)[:2] == order(version)[:2]] or found[-1:]
            refuse("release", f"one that the package index has, such as {', '.join(near)}", version)
    return [version for version in found if order(first) <= order(version) <= order(last)]


def fetch_ops(version: str, package: Package = VLLM) -> Path:
    """Return a folder with the op files of a release; download them into the cache folder if missing.

    Downloads the whole wheel if the index does not support range requests. Raises InvalidCase if
    ``version`` is not a release, and Unavailable if it cannot be downloaded.
    """
    check_release(version)
    name = _release_name(version, package)
    folder = cache_folder() / "releases" / name / "ops"
    if not folder.is_dir():
        parent = private_folder("releases", name)
        with writing(), FileLock(parent.parent / f"{name}.ops.lock"):
            if not folder.is_dir():
                _ops_download(version, folder, package)
    check_private(folder)
    return folder


def _ops_download(version: str, folder: Path, package: Package) -> None:
    """Write the op files of a release to ``folder`` in one step."""
    wheel = fetched_wheel(version, package)
    if wheel is None:
        name = package.distributions[0]
        links = [one.link for one in _packages(name) if one.version == version]
        if not links:
            refuse("release", "one that the package index has", version)
        if _read_remotely(links[0], folder, package):
            return
        wheel = fetch(version, package)
    with zipfile.ZipFile(wheel) as archive:
        unpack(wheel_members(archive, wheel, package), folder, wheel, package)


def _read_remotely(link: Any, folder: Path, package: Package) -> bool:
    """Write the op files of a wheel on the index to ``folder``; return False without range requests."""
    from remotezip import RemoteZip, RemoteZipError

    wheel = Path(link.filename)
    try:
        with RemoteZip(
            link.normalized,
            session=_finder(package.distributions[0]).session,
            fetcher=_range_fetcher(),
        ) as archive:
            unpack(wheel_members(archive, wheel, package), folder, wheel, package)
    except AttnLabError:
        raise
    except RemoteZipError:
        return False
    except Exception as error:  # the HTTP client documents no exception types
        raise _unreadable(f"{wheel} cannot be read", error) from error
    return True


def _range_fetcher() -> Any:
    """Return remotezip's fetcher with unearth's HTTP client, which has pip's proxies, hosts and logins."""
    from remotezip import PartialBuffer, RangeNotSupported, RemoteFetcher

    class Fetcher(RemoteFetcher):  # type: ignore[misc]
        """Fetches a range of bytes of one file."""

        def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> Any:
            headers = {"Range": self.build_range_header(*data_range), "Accept-Encoding": "identity"}
            with self._session.stream(
                "GET", self._url, headers=headers, follow_redirects=True
            ) as answer:
                answer.raise_for_status()
                if answer.status_code != 206:
                    raise RangeNotSupported(self._url)
                data = answer.read()
                first, _ = self.parse_range_header(answer.headers["content-range"])
            return PartialBuffer(io.BytesIO(data), first, len(data), stream)

    return Fetcher


@lru_cache(maxsize=4)
def _finder(name: str) -> Any:
    return package_finder(only_binary=[name])


@lru_cache(maxsize=4)
def _packages(name: str) -> list[Any]:
    """Return the wheels of all releases of a distribution; raise Unavailable if the index cannot be read."""
    try:
        found = list(_finder(name).find_all_packages(name, allow_yanked=True))
    except AttnLabError:
        raise
    except Exception as error:
        raise _unreadable("the package index cannot be read", error) from error
    return [package for package in found if re.fullmatch(r"[\d.]+(post\d+)?", package.version)]


def _unreadable(text: str, error: Exception) -> Unavailable:
    return Unavailable(f"{text}: {' '.join(str(error).split()) or type(error).__name__}")
