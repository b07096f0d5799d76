"""vLLM releases for the tests: downloaded once, or the test skips with the reason.

Only a test with the marker `releases` may ask for one.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from attnlab.case.errors import Unavailable
from attnlab.kernels.rocm.device import find_compiler
from attnlab.kernels.vllm import source as downloading
from attnlab.kernels.vllm.source import Source, fetch, fetch_sdist, find_source

RELEASES = ("0.11.2", "0.33.0")
REFUSED = "a test that downloads a release of vLLM needs @pytest.mark.releases"
_allowed = False


@contextmanager
def downloads(*, allowed: bool) -> Iterator[None]:
    """Permit or refuse releases while the block runs."""
    global _allowed
    before, _allowed = _allowed, allowed
    try:
        yield
    finally:
        _allowed = before


def check_allowed() -> None:
    """Fail the running test unless it has the marker `releases`."""
    if not _allowed:
        pytest.fail(REFUSED)


def refuse_downloads(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let `fetch` and `fetch_sdist` fail the test instead of downloading to ``cache``.

    Tests of the download itself use a package index and a cache folder of their own.
    """
    for name in ("_download", "_sdist_download"):
        download = getattr(downloading, name)

        def guarded(version: str, folder: Path, download=download):
            if folder.is_relative_to(cache):
                pytest.fail(REFUSED)
            return download(version, folder)

        monkeypatch.setattr(downloading, name, guarded)


def sdist_or_reason(version: str) -> Source | str:
    """Return a release's sdist, downloaded once, or the reason why it cannot be used here."""
    check_allowed()
    return _sdist(version)


@functools.cache
def _sdist(version: str) -> Source | str:
    try:
        find_compiler(os.environ.get("CXX"))
        return find_source(fetch_sdist(version))
    except Unavailable as error:
        return str(error)


def sdist(version: str) -> Source:
    """Return a release's sdist; skip the test if it, or a compiler, is unavailable."""
    found = sdist_or_reason(version)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def release(version: str) -> Source | str:
    """Return a release's Source, its wheel downloaded once, or the reason why it is unavailable."""
    check_allowed()
    return _release(version)


@functools.cache
def _release(version: str) -> Source | str:
    try:
        return find_source(fetch(version))
    except Unavailable as error:
        return str(error)


def of_release(version: str) -> Source:
    """Return a release's Source; skip the test if it is unavailable."""
    found = release(version)
    if isinstance(found, str):
        pytest.skip(found)
    return found


needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="vLLM's kernels need the extra triton"
)
