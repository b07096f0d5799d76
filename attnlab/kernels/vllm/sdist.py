"""Download the sdist of a vLLM release from the package index that pip is configured for.

``pip download`` of an sdist runs its build to read the metadata, and vLLM's build needs a GPU tool chain.
So pip only reports its configured indexes, and unearth downloads the file.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from attnlab.case.errors import Unavailable
from attnlab.kernels.cache_folder import cache_folder, private_folder, writing
from attnlab.kernels.child_process import ending_with_parent
from attnlab.kernels.vllm.source import check_release

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
                    fetched = _download(version, Path(work))
                whole = shutil.copyfile(fetched, Path(work) / "whole")
                os.replace(whole, found)
    return found


def _download(version: str, folder: Path) -> Path:
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
