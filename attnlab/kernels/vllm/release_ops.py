"""The attention ops of vLLM's releases, without their wheels.

A wheel is a zip file of 250 to 500 MB, and its op files have 1 MB. An index that supports range requests
provides them alone: remotezip reads the directory at the end of the wheel, then the files.
"""

import io
import re
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.fields import refuse
from attnlab.kernels.cache_folder import cache_folder, check_private, private_folder, writing
from attnlab.kernels.vllm.sdist import package_finder
from attnlab.kernels.vllm.source import check_release, fetch, fetched_wheel, unpack, wheel_members


def order(version: str) -> tuple[int, ...]:
    """Return what sorts releases by age: their numbers."""
    return tuple(map(int, re.findall(r"\d+", version)))


def releases_between(first: str, last: str) -> list[str]:
    """Return the releases that the package index has from ``first`` to ``last``, the oldest first.

    Release candidates are left out. Raises InvalidCase for a release that the index does not have, and
    Unavailable if the index cannot be read.
    """
    found = sorted({package.version for package in _packages()}, key=order)
    for version in (first, last):
        if version not in found:
            near = [v for v in found if order(v)[:2] == order(version)[:2]] or found[-1:]
            refuse("release", f"one that the package index has, such as {', '.join(near)}", version)
    return [version for version in found if order(first) <= order(version) <= order(last)]


def fetch_ops(version: str) -> Path:
    """Return a folder with the op files of a release; download them into the cache folder if missing.

    Downloads the whole wheel if the index does not support range requests. Raises InvalidCase if
    ``version`` is not a release, and Unavailable if it cannot be downloaded.
    """
    check_release(version)
    folder = cache_folder() / "releases" / version / "ops"
    if not folder.is_dir():
        parent = private_folder("releases", version)
        with writing(), FileLock(parent.parent / f"{version}.ops.lock"):
            if not folder.is_dir():
                _download(version, folder)
    check_private(folder)
    return folder


def _download(version: str, folder: Path) -> None:
    """Write the op files of a release to ``folder`` in one step."""
    wheel = fetched_wheel(version)
    if wheel is None:
        links = [package.link for package in _packages() if package.version == version]
        if not links:
            refuse("release", "one that the package index has", version)
        if _read_remotely(links[0], folder):
            return
        wheel = fetch(version)
    with zipfile.ZipFile(wheel) as archive:
        unpack(wheel_members(archive, wheel), folder, wheel)


def _read_remotely(link: Any, folder: Path) -> bool:
    """Write the op files of a wheel on the index to ``folder``; return False without range requests."""
    from remotezip import RemoteZip, RemoteZipError

    wheel = Path(link.filename)
    try:
        with RemoteZip(
            link.normalized, session=_finder().session, fetcher=_range_fetcher()
        ) as archive:
            unpack(wheel_members(archive, wheel), folder, wheel)
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


@lru_cache(maxsize=1)
def _finder() -> Any:
    return package_finder(only_binary=["vllm"])


@lru_cache(maxsize=1)
def _packages() -> list[Any]:
    """Return the wheels of all releases; raise Unavailable if the index cannot be read."""
    try:
        found = list(_finder().find_all_packages("vllm", allow_yanked=True))
    except AttnLabError:
        raise
    except Exception as error:
        raise _unreadable("the package index cannot be read", error) from error
    return [package for package in found if re.fullmatch(r"[\d.]+(post\d+)?", package.version)]


def _unreadable(text: str, error: Exception) -> Unavailable:
    return Unavailable(f"{text}: {' '.join(str(error).split()) or type(error).__name__}")
