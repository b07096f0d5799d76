"""Fixtures and rules that all tests share.

A test that needs a release of vLLM has the marker `releases`; other tests cannot download anything.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers.notebooks import NOTEBOOKS, SMALL
from helpers.sources import RELEASES, downloads, of_release, refuse_downloads, sdist

from attnlab.kernels.vllm.source import Source


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Limit torch to one thread: on tensors this small, more threads are slower."""
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Permit downloads while a test with the marker `releases` is set up and runs."""
    with downloads(allowed=item.get_closest_marker("releases") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def no_downloads(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Hide the downloaded releases from a test without the marker `releases`, and let downloads fail."""
    if request.node.get_closest_marker("releases") is None:
        cache = tmp_path_factory.getbasetemp() / "cache"
        monkeypatch.setenv("ATTNLAB_CACHE", str(cache))
        refuse_downloads(monkeypatch, cache)


@pytest.fixture(params=[pytest.param(v, marks=pytest.mark.releases) for v in RELEASES])
def rocm(request: pytest.FixtureRequest) -> Source:
    """Return the sdist of each release in turn."""
    return sdist(request.param)


@pytest.fixture(scope="session", params=[pytest.param("small", marks=pytest.mark.releases)])
def small_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Run all notebooks once, as committed but at a reduced size; return the folder of the reports.

    Under pytest-xdist the first process that asks runs them, and the others wait. Notebook 08 downloads
    an sdist.
    """
    from attnlab.reports.investigate import find_notebooks, investigate

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    reports = shared / "small_run"
    with FileLock(shared / "small_run.lock"):
        if not (reports / "verdicts.json").exists():
            paths = find_notebooks([], NOTEBOOKS)
            investigate(paths, parameters=SMALL, reports=reports, timeout_s=600, jobs=2)
    return reports


@pytest.fixture(params=[pytest.param(v, marks=pytest.mark.releases) for v in RELEASES])
def source(request: pytest.FixtureRequest) -> Source:
    """Return each release in turn; skip if its wheel cannot be downloaded."""
    return of_release(request.param)
