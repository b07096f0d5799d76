"""The pytest plugin of tools/vllm_tests.py: it lets vLLM's own test files run outside of vLLM's repository.

It replaces what vLLM's top conftest.py and its compiled extension would give, as far as these files need it:

- an empty module for ``vllm._C_stable_libtorch``, which vllm.platforms.cuda imports and which is built for
  another torch. Tests of the extension's ops are skipped.
- the markers ``optional`` (skipped, as without vLLM's --optional) and ``skip_global_cleanup``.

It also draws a sample of the tests, puts a folder of changed kernels first, switches attnlab's plugin on and
off, and writes one JSON line per execution of a test.
"""

import copy
import json
import random
import re
import sys
import time
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

COMPILED = "vllm._C_stable_libtorch"
NEEDS_COMPILED = re.compile(
    r"test_merge_attn_states\[|test_merge_attn_states_both_empty\[.*merge_attn_states0"
)
LOST = ("CUDA error", "illegal memory access", "misaligned address", "unspecified launch failure")
sys.modules.setdefault(COMPILED, types.ModuleType(COMPILED))  # before any conftest.py is imported
ATTNLAB = "attnlab-session"  # the name under which attnlab's plugin registers its session
WARM_UPS = 2
MOST_ROUNDS = {"test_prefix_prefill.py": 2}  # its tests take half a second each


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("vLLM's tests")
    group.addoption("--records", help="write a JSON line per execution of a test to this file")
    group.addoption("--per-test", type=int, help="draw so many ids of each test function")
    group.addoption("--draw", type=int, default=0, help="seed of the draw")
    group.addoption("--ids", help="run only the ids in this file, one a line")
    group.addoption("--except-ids", help="leave out the ids in this file, one a line")
    group.addoption("--data-seeds", default="0", help="add each of these to the seeds of the tests")
    group.addoption("--ops-folder", help="a folder with changed copies of vllm/v1/attention/ops")
    group.addoption(
        "--rounds",
        type=int,
        help="run each test to warm up, then so often without and with attnlab",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the stand-in, and put the changed kernels first."""
    for marker in ("optional: run only on request", "skip_global_cleanup: of vLLM's conftest.py"):
        config.addinivalue_line("markers", marker)
    if folder := config.getoption("ops_folder"):
        import vllm.v1.attention.ops

        vllm.v1.attention.ops.__path__.insert(0, folder)
    seeds = [int(one) for one in config.getoption("data_seeds").split(",")]
    if records := config.getoption("records"):
        config.pluginmanager.register(Records(config, Path(records), seeds), "vllm-tests-records")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run, and keep the requested ids or a sample."""
    for item in items:
        if item.get_closest_marker("optional"):
            item.add_marker(pytest.mark.skip(reason="optional"))
        if NEEDS_COMPILED.match(item.name):
            item.add_marker(pytest.mark.skip(reason="needs vLLM's compiled extension"))
    kept = list(items)
    if ids := config.getoption("ids"):
        wanted = Path(ids).read_text().splitlines()
        kept = [item for item in items if item.nodeid in wanted]
    if count := config.getoption("per_test"):
        required = [item for item in items if not item.get_closest_marker("optional")]
        kept = sample(required, count, config.getoption("draw"))
    if ids := config.getoption("except_ids"):
        wanted = Path(ids).read_text().splitlines()
        kept = [item for item in kept if item.nodeid not in wanted]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    rounds = config.getoption("rounds")
    seeds = len(config.getoption("data_seeds").split(","))
    items[:] = [
        one
        for item in kept
        for one in [item, *(again(item) for _ in range(executions(item, rounds or 0, seeds) - 1))]
    ]


def executions(item: pytest.Item, rounds: int, seeds: int) -> int:
    """Return how often a test runs: as a warm-up without and with attnlab and then by rounds, or per seed."""
    if not rounds:
        return seeds
    return WARM_UPS + 2 * min(rounds, MOST_ROUNDS.get(item.path.name, rounds))


def again(item: pytest.Item) -> pytest.Item:
    """Return an item that runs the same test once more, with fixtures of its own."""
    other = copy.copy(item)
    other.user_properties = []
    other._initrequest()
    return other


def sample(items: list[pytest.Item], count: int, seed: int) -> list[pytest.Item]:
    """Draw ``count`` items of each test function, more if they are needed for every parameter's values.

    First the item with the most values that no drawn item has, until none is left out; then any.
    """
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    drawn: set[str] = set()
    for name, group in by_test.items():
        group = sorted(group, key=lambda item: item.nodeid)
        random.Random(f"{seed} {name}").shuffle(group)
        missing = set().union(*map(values_of, group))
        chosen: list[pytest.Item] = []
        while group and (missing or len(chosen) < count):
            best = max(group, key=lambda item: len(values_of(item) & missing))
            group.remove(best)
            chosen.append(best)
            missing -= values_of(best)
        drawn |= {item.nodeid for item in chosen}
    return [item for item in items if item.nodeid in drawn]


def values_of(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the (parameter, value) pairs of an item."""
    callspec = getattr(item, "callspec", None)
    return set() if callspec is None else {(k, repr(v)) for k, v in callspec.params.items()}


class Records:
    """Writes one line per execution: outcome, seconds, peak of GPU memory, error, attnlab's properties."""

    def __init__(self, config: pytest.Config, path: Path, seeds: list[int]) -> None:
        self._config, self._path, self._seeds = config, path, seeds
        self._judgements: list[dict[str, Any]] = []
        self._add_to_seeds = 0
        if seeds != [0]:
            self._patch_seed()
        self._rounds = config.getoption("rounds") or 0
        self._executions: dict[str, int] = {}
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._began: dict[str, float] = {}
        self._session: Any = None
        self._is_worker = hasattr(config, "workerinput")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Switch attnlab's plugin, and take the time of the whole protocol."""
        execution = self._executions.get(item.nodeid, 0)
        self._executions[item.nodeid] = execution + 1
        if self._rounds:
            self._switch(is_with(execution))
        else:
            self._add_to_seeds = self._seeds[execution % len(self._seeds)]
        self._judgements.clear()
        synchronize(reset=True)
        self._began[item.nodeid] = time.perf_counter()
        result = yield
        if any(word in self._error(item.nodeid) for word in LOST):
            item.session.shouldstop = "the GPU's context is lost"
        if not self._is_worker:
            self._write(item.nodeid, execution)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the reports of the phases; with pytest-xdist, write when the last has come."""
        self._reports.setdefault(report.nodeid, []).append(report)
        is_controller = bool(getattr(self._config.option, "numprocesses", None))
        if is_controller and not self._is_worker and report.when == "teardown":
            self._write(report.nodeid, 0)

    def _write(self, nodeid: str, execution: int) -> None:
        began = self._began.pop(nodeid, None)
        peak = synchronize()
        reports = self._reports.get(nodeid, [])
        outcomes = [report.outcome for report in reports]
        outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
        properties = {k: v for report in reports for k, v in report.user_properties}
        line = {
            "id": nodeid,
            "outcome": outcome,
            "seconds": None if began is None else round(time.perf_counter() - began, 5),
            "call_s": round(sum(one.duration for one in reports if one.when == "call"), 5),
            "peak": peak,
            "error": self._error(nodeid),
            "properties": properties,
            "calls": self._calls(),
            "judgements": list(self._judgements),
            "data_seed": self._add_to_seeds,
        }
        if self._rounds:
            line["with"], line["is_timed"] = is_with(execution), execution >= WARM_UPS
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._reports.pop(nodeid, None)

    def _error(self, nodeid: str) -> str:
        """Return the message of a failed test's exception, or the reason of a skipped one."""
        for report in self._reports.get(nodeid, []):
            if report.skipped and isinstance(report.longrepr, tuple):
                return report.longrepr[2][:300]
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                text = str(report.longrepr) if crash is None else crash.message
                return " ".join(text.split())[:600]
        return ""

    def pytest_sessionstart(self) -> None:
        """Keep what attnlab concludes, as data."""
        if self._config.pluginmanager.get_plugin(ATTNLAB) is None:
            return
        from attnlab.recorder import failure_report

        judge = failure_report.judge

        def kept(call: Any, comparison: Any, **more: Any) -> Any:
            began = time.perf_counter()
            judgement = judge(call, comparison, **more)
            self._judgements.append(facts_of(judgement, time.perf_counter() - began))
            return judgement

        failure_report.judge = kept

    def _patch_seed(self) -> None:
        """Let vLLM's set_random_seed add a number to the seed of a test."""
        import vllm.utils.torch_utils as torch_utils

        original = torch_utils.set_random_seed
        torch_utils.set_random_seed = lambda seed: original(seed + self._add_to_seeds)

    def _calls(self) -> int:
        """Return how many calls attnlab recorded in this test."""
        session = self._config.pluginmanager.get_plugin(ATTNLAB)
        return 0 if session is None else session._capture.calls.seen

    def _switch(self, on: bool) -> None:
        """Register or unregister attnlab's session, with the functions that it has wrapped."""
        manager = self._config.pluginmanager
        if self._session is None:
            self._session = manager.get_plugin(ATTNLAB)
        session, is_on = self._session, manager.get_plugin(ATTNLAB) is not None
        if on == is_on:
            return
        if on:
            manager.register(session, ATTNLAB)
            session._capture.start()
            session._comparisons.start()
        else:
            session.pytest_unconfigure()
            session._capture.calls.clear()
            session._comparisons.last.clear()
            manager.unregister(session)


def facts_of(judgement: Any, seconds: float) -> dict[str, Any]:
    """Return a judgement as JSON-able values."""
    diagnosis = judgement.diagnosis
    return {
        "side": judgement.side,
        "evidence": judgement.evidence,
        "status": diagnosis.status,
        "names": [one.name for one in diagnosis.explanations],
        "cause": None if diagnosis.cause is None else diagnosis.cause.name,
        "rules": [[fact.kind, fact.sentence] for fact in diagnosis.pattern.rules],
        "wrong_rows": diagnosis.wrong_rows,
        "sentences": diagnosis.sentences(),
        "seconds": round(seconds, 2),
    }


def is_with(execution: int) -> bool:
    """Answer whether an execution is one with attnlab: the first two are a warm-up without and with it, then
    without, with, with, without, and so on."""
    return execution == 1 or (execution >= WARM_UPS and (execution - WARM_UPS) % 4 in (1, 2))


def synchronize(reset: bool = False) -> int:
    """Wait for the GPU; return the peak of its memory since the last reset, in bytes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    try:
        torch.cuda.synchronize()
        peak: int = torch.cuda.max_memory_allocated()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return peak
    except RuntimeError:  # a lost context
        return 0
