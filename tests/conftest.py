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
_WRITES_NONE, sys.dont_write_bytecode = sys.dont_write_bytecode, False
import_jsonschema()  # before nbformat does it with a parser that takes more than a second

# Files whose tests take the most time: they start first, so that the processes end together.
START_FIRST = (
    "reports/test_notebooks.py",
    "notebooks/test_production.py",
    "vllm/test_agreement.py",
    "tasks/test_ray.py",  # the processes take no tests from the front, so one of them starts a cluster
)


# Tests that need ten seconds to ten minutes each. They get the marker `long`, and CI leaves them out.
LONG = (
    "test_triton_versions.py::test_the_findings_do_not_depend_on_triton[0.33.0-all cases]",
    "test_triton_versions.py::test_the_findings_do_not_depend_on_triton[0.20.2-all cases]",
    "test_triton_versions.py::test_the_findings_do_not_depend_on_triton[0.11.2-all cases]",
    "test_notebooks.py::test_every_verdict_is_as_expected[gfx1100, other lengths]",
    "test_notebooks.py::test_every_verdict_is_as_expected[Triton decodes]",
    "test_notebooks.py::test_every_verdict_is_as_expected[gfx942 of 0.11.2]",
    "test_notebooks.py::test_every_verdict_is_as_expected_on_the_rocm_source[0.11.2]",
    "test_notebooks.py::test_production_is_as_expected[decodes alone]",
    "test_agreement.py::test_model_agrees_with_the_real_kernel[0.11.2]",
    "test_further_ops.py::test_model_agrees_with_the_real_kernel[0.11.2]",
    "test_far.py::test_its_script_needs_a_gpu_or_int64_strides",
    "test_far.py::test_it_takes_little_memory[0.11.2]",
    "test_far.py::test_it_takes_little_memory[0.33.0]",
    "test_library.py::test_a_release[0.11.2]",
    "test_upstream.py::test_a_script_of_an_overflow",
    "test_upstream.py::test_a_script_of_alibi_with_sinks[0.11.2]",
    "test_upstream.py::test_the_exit_code_of_a_script[freed blocks]",
    "test_upstream.py::test_the_exit_code_of_a_script[NaN of a freed block is multiplied by 0]",
    "test_library.py::test_the_older_models_faults_are_found",
    "test_bench_diagnosis.py::test_the_diagnosis_names_planted_defects",
    "test_xray.py::test_two_faults_are_described_together",
    "test_browser.py::test_the_main_parts_are_on_one_screen",
    "test_browser.py::test_a_panel_in_a_notebook",
    "test_claims.py::test_the_engine_itself_decides",
    "test_upstream.py::test_a_script_fails_before_and_passes_after[unwritten slots]",
    "test_upstream.py::test_a_script_of_alibi_with_sinks[0.33.0]",
)

# Tests of more than about a second, or that share a fixture of several seconds: functions, or one of their
# parameters. They get the marker `slow`: `make test` leaves them out.
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())

# torch makes its thread pool anew in a forked child. If two threads of the child do that at once, it fails.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark the tests of LONG and SLOW, and, after all other plugins, move those of START_FIRST to the front.

    Where a test names the parameters that are quick, one of each kind, those with the others are slow, and CI
    leaves them out.
    """
    unseen: dict[str, set[str]] = {}
    names = {name for item in items for name in (item.nodeid, item.nodeid.partition("[")[0])}
    files = {name.partition("::")[0] for name in names}
    unseen["slow.txt"] = {one for one in SLOW - names if one.partition("::")[0] in files}
    for item in items:
        if item.nodeid.endswith(LONG):
            item.add_marker("long")
        if not SLOW.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker("slow")
        quick = item.get_closest_marker("quick")
        if quick is not None:
            unseen.setdefault(item.originalname, {*quick.args}).discard(item.callspec.id)
            if item.callspec.id not in quick.args:
                item.add_marker("slow")
                item.add_marker("long")
    if any(unseen.values()) and not any("::" in name for name in config.args):
        raise pytest.UsageError(f"quick and slow.txt must name tests that there are, got {unseen}")
    yield
    last = len(START_FIRST)
    rank = {name: place for place, name in enumerate(START_FIRST)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), last))


def pytest_collection_finish() -> None:
    """Let garbage collections leave out what exists before the first test, which takes most of their time.

    Modules that tests write are not kept compiled: a test may write one twice in a second.
    """
    sys.dont_write_bytecode = _WRITES_NONE
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
