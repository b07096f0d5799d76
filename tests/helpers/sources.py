"""vLLM releases for the tests: downloaded once, or the test skips with the reason."""

import functools
import os
from importlib.util import find_spec

import pytest

from attnlab.case.errors import Unavailable
from attnlab.kernels.rocm.build import find_compiler
from attnlab.kernels.vllm.sdist import fetch_sdist
from attnlab.kernels.vllm.source import Source, fetch, find_source


@functools.cache
def sdist_or_reason(version: str) -> Source | str:
    """Return a release's sdist, downloaded once, or why csrc/rocm's kernels cannot be had here."""
    try:
        find_compiler(os.environ.get("CXX"))
        return find_source(fetch_sdist(version))
    except Unavailable as error:
        return str(error)


def sdist(version: str) -> Source:
    """Return a release's sdist; skip the test where it, or a compiler, cannot be had."""
    found = sdist_or_reason(version)
    if isinstance(found, str):
        pytest.skip(found)
    return found


RELEASES = ("0.11.2", "0.33.0")


@functools.cache
def release(version: str) -> Source | str:
    """Return a release's Source, its wheel downloaded once, or why it cannot be had."""
    try:
        return find_source(fetch(version))
    except Unavailable as error:
        return str(error)


def of_release(version: str) -> Source:
    """Return a release's Source, or skip."""
    found = release(version)
    if isinstance(found, str):
        pytest.skip(found)
    return found


needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="vLLM's kernels need the triton extra"
)
