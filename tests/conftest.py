"""Fixtures and rules that all tests share.

A test that needs a release of vLLM has the marker `releases`; other tests cannot download anything.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers.notebooks import NOTEBOOKS, SMALL
from helpers.products import sharing_products
from helpers.sources import RELEASES, downloads, of_release, refuse_downloads, sdist

from attnlab.kernels import child_process
from attnlab.kernels.vllm.source import Source
from attnlab.reports.investigate import import_jsonschema

# Keep the tests and attnlab compiled, for the processes that tests start and for the next run.
sys.dont_write_bytecode = False
import_jsonschema()  # before nbformat does it with a parser that takes more than a second

# Files whose tests take the most time: they start first, so that the processes end together.
START_FIRST = (
    "reports/test_notebooks.py",
    "notebooks/test_production.py",
    "vllm/test_agreement.py",
    "tasks/test_ray.py",  # the processes take no tests from the front, so one of them starts a cluster
)


# Tests of more than about a second, or that share a fixture of several seconds: functions, or one of their
# parameters. They get the marker `slow`: `make test` leaves them out. Those that need ten seconds to ten
# minutes, and whose subject other tests have, too, get the marker `long`: CI leaves them out.
LISTED = {
    name: frozenset((Path(__file__).parent / f"{name}.txt").read_text().splitlines())
    for name in ("slow", "long")
}

# torch makes its thread pool anew in a forked child. If two threads of the child do that at once, it fails.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark the tests of LISTED, and, after all other plugins, move those of START_FIRST to the front.

    Where a test names the parameters that are quick, one of each kind, those with the others are slow, and CI
    leaves them out.
    """
    unseen: dict[str, set[str]] = {}
    names = {name for item in items for name in (item.nodeid, item.nodeid.partition("[")[0])}
    files = {name.partition("::")[0] for name in names}
    for mark, listed in LISTED.items():
        unseen[f"{mark}.txt"] = {one for one in listed - names if one.partition("::")[0] in files}
    for item in items:
        for mark, listed in LISTED.items():
            if not listed.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
                item.add_marker(mark)
        quick = item.get_closest_marker("quick")
        if quick is not None:
            unseen.setdefault(item.originalname, {*quick.args}).discard(item.callspec.id)
            if item.callspec.id not in quick.args:
                item.add_marker("slow")
                item.add_marker("long")
    if any(unseen.values()) and not any("::" in name for name in config.args):
        raise pytest.UsageError(
            f"quick, slow.txt and long.txt must name tests that there are, got {unseen}"
        )
    yield
    last = len(START_FIRST)
    rank = {name: place for place, name in enumerate(START_FIRST)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), last))


def pytest_collection_finish() -> None:
    """Let garbage collections leave out what exists before the first test, which takes most of their time.

    Modules that tests write are not kept compiled: a test may write one twice in a second.
    """
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Limit torch to one thread: on tensors this small, more threads are slower."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers as copies of this process: a new process needs seconds to import torch.

    The tests of the engine in tests/tasks, and those that start commands, start them as users do.
    """
    if request.path.parent.name != "tasks":
        monkeypatch.setattr(child_process, "START_METHOD", "fork")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Permit downloads while a test with the marker `releases` is set up and runs."""
    with downloads(allowed=item.get_closest_marker("releases") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def no_downloads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, run_folder: Path
) -> None:
    """Hide the downloaded releases from a test without the marker `releases`, and let downloads fail.

    The processes of a run share the cache folder, so that each covering design is made once.
    """
    if request.node.get_closest_marker("releases") is None:
        cache = run_folder / "cache"
        monkeypatch.setenv("ATTNLAB_CACHE", str(cache))
        refuse_downloads(monkeypatch, cache)


@pytest.fixture(params=[pytest.param(v, marks=pytest.mark.releases) for v in RELEASES])
def rocm(request: pytest.FixtureRequest) -> Source:
    """Return the sdist of each release in turn."""
    return sdist(request.param)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return the temporary folder of this run of pytest, which all of its processes share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture
def shared_products(run_folder: Path) -> Iterator[None]:
    """Share large products with the notebooks and the other tests that ask for this."""
    with sharing_products(run_folder):
        yield


@pytest.fixture(scope="session", params=[pytest.param("small", marks=pytest.mark.releases)])
def small_run(run_folder: Path) -> Path:
    """Run all notebooks once, as committed but at a reduced size; return the folder of the reports.

    Under pytest-xdist the first process that asks runs them, and the others wait. Notebook 08 downloads
    an sdist.
    """
    from attnlab.reports.investigate import find_notebooks, investigate

    reports = run_folder / "small_run"
    with FileLock(run_folder / "small_run.lock"), sharing_products(run_folder):
        if not (reports / "verdicts.json").exists():
            paths = find_notebooks([], NOTEBOOKS)
            investigate(paths, parameters=SMALL, reports=reports, timeout_s=600, jobs=2)
    return reports


@pytest.fixture(params=[pytest.param(v, marks=pytest.mark.releases) for v in RELEASES])
def source(request: pytest.FixtureRequest) -> Source:
    """Return each release in turn; skip if its wheel cannot be downloaded."""
    return of_release(request.param)
