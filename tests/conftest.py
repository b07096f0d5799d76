"""What the tests share: one small case that is as hostile as a real batch, and helpers to look at it."""

from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers.notebooks import NOTEBOOKS, SMALL
from helpers.sources import RELEASES, release, sdist

from attnlab.kernels.vllm.source import Source


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Keep torch to one thread: for tensors this small more of them cost time."""
    torch.set_num_threads(1)


@pytest.fixture(params=("0.11.2", "0.33.0"))
def rocm(request: pytest.FixtureRequest) -> Source:
    """Give the sdist of one release after the other."""
    return sdist(request.param)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Run all notebooks as committed but for their size, once for all tests; give the reports' folder.

    Under pytest-xdist the first process that asks runs them, and the others wait.
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


@pytest.fixture(params=RELEASES)
def source(request: pytest.FixtureRequest) -> Source:
    """Give one release after the other; skip where its wheel cannot be had."""
    found = release(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found
