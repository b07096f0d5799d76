"""The part of the pytest plugin that records: it is imported only if an option asks for it.

Under pytest-xdist, the workers record, diagnose and write; the controller only collects what the tests'
reports carry.
"""

import importlib.util
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.output_file import write_text
from attnlab.diagnosis.captured import check_diagnosable, problem_of
from attnlab.lab.problem import Problem
from attnlab.mutation.power import HEADS, MUTANTS, CorrectSample, sample_correct, score
from attnlab.recorder.capture import Capture, Recorded
from attnlab.recorder.failing_side import (
    TORCHS,
    Comparison,
    Comparisons,
    agrees,
    match_of,
    output_matches,
)
from attnlab.recorder.failure_report import FailureReport, report_failure
from attnlab.recorder.ops import ops_in
from attnlab.recorder.snapshot import owned_slots
from attnlab.recorder.watch import Projection, Watch
from attnlab.tensors.call import KernelCall, Origin
from attnlab.tensors.quantised import FP8_DTYPES

# Which defects of the catalogue a test's comparison would not notice, on the test's data and tolerance.
#
# A defect is noticed if it moves an element of the correct output by more than atol + rtol × |element|.
# Rows and heads are sampled, as for ``attnlab power``.

_SHOWN = 3  # survivors in a row of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPower:
    """The power of one comparison: the names of the defects that it notices (``killed``) or not.

    ``cheapest``: by the name of a defect that it does not notice, the first change of the test that does, of
    those that :func:`_changed_tests` tries; without one, no change does.
    ``with_itself``: the expected value is the output of another call of the same op, so a defect that both
    calls have is not noticed, whatever the names say.
    """

    __test__ = False  # not a class of tests

    node_id: str
    op: str
    atol: float
    rtol: float
    killed: tuple[str, ...]
    survived: tuple[str, ...]
    cheapest: dict[str, str] = field(default_factory=dict)
    with_itself: bool = False

    @classmethod
    def of_json(cls, text: str) -> "TestPower":
        """Return what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        for name in ("killed", "survived"):
            values[name] = tuple(values[name])
        return cls(**values)

    def to_json(self) -> str:
        """Return the power as one line of JSON."""
        return json.dumps(asdict(self))


def powers_of(
    node_id: str, recorded: Sequence[Recorded], comparisons: Iterable[Comparison]
) -> list[TestPower]:
    """Return the power of each passed comparison of a call's output; of a repeated one only the last."""
    found: dict[tuple[str, float, float], TestPower] = {}
    for comparison in comparisons:
        if not comparison.passed:
            continue
        # A test may pass the output as the expected value.
        both = (comparison, comparison.exchanged())
        own = [one for one in recorded if not (one.origin.op or "").startswith(TORCHS)]
        calls = (recorded, own)  # attention of torch is what a kernel is compared with
        ways = (
            (r, s)
            for c, of in zip(both, calls, strict=True)
            for r in reversed(of)
            for s in r.shaped(c)
        )
        for one, shaped in ways:
            try:
                call = one.call
                if not output_matches(call, shaped.actual):
                    continue
                power = _power(node_id, call, shaped)
            except AttnLabError:
                continue
            others = [other for other in recorded if other is not one]
            same = any(_made(other, power.op, shaped.expected) for other in others)
            found[power.op, power.atol, power.rtol] = replace(power, with_itself=same)
            break
    return list(found.values())


def _made(one: Recorded, op: str, tensor: torch.Tensor) -> bool:
    """Answer whether a tensor is the output of a call of an op."""
    try:
        return one.origin.op == op and output_matches(one.call, tensor)
    except AttnLabError:
        return False


def _power(node_id: str, call: KernelCall, comparison: Comparison) -> TestPower:
    check_diagnosable(call, unknown=agrees(call, comparison, exactly=True))
    problem, projection = problem_of(call.cpu()), comparison.projection
    sample = _sample(problem, projection)
    compared = None if projection is None else projection.of
    match = match_of(call, comparison.actual)
    factor = 1.0 if match is None else match.factor
    if projection is not None and not _keeps_rows(call, comparison, projection):
        raise InvalidCase("a product must be one of the output's rows, got one of another order")
    tolerances = Case().replace(atol=comparison.atol * factor, rtol=comparison.rtol)
    scores = {
        mutant.name: score(problem, sample, mutant, tolerances, compared)
        for mutant in MUTANTS
        if mutant.applies(problem)
    }
    survived = tuple(name for name, one in scores.items() if not one.is_killed)
    return TestPower(
        node_id=node_id,
        op=call.origin.op or call.op,
        atol=comparison.atol,
        rtol=comparison.rtol,
        killed=tuple(name for name, one in scores.items() if one.is_killed),
        survived=survived,
        cheapest=_cheapest(call.cpu(), survived, projection),
    )


def _sample(problem: Problem, projection: Projection | None) -> CorrectSample:
    """Return a sample of rows with some heads, with all of them if they are multiplied by a matrix."""
    return sample_correct(problem, HEADS if projection is None else problem.num_heads)


def _keeps_rows(call: KernelCall, comparison: Comparison, projection: Projection) -> bool:
    """Answer whether each row that is multiplied by a matrix is one of the output, as it is."""
    match, width = match_of(call, comparison.actual), projection.weight.shape[1]
    if match is None or match.factor != 1.0 or width != call.buffer[0].numel():
        return False
    return bool((match.index.view(-1, width) % width == torch.arange(width)).all())


def _cheapest(
    call: KernelCall, names: Iterable[str], projection: Projection | None
) -> dict[str, str]:
    """Return, by defect, the first change of a test on this call that notices it."""
    left, found = set(names), dict[str, str]()
    compared = None if projection is None else projection.of
    for text, changed in _changed_tests(call):
        problem = problem_of(changed)
        sample = _sample(problem, projection)
        bounds = (
            one.bound if projection is None else projection.bound(one.bound, one.output)
            for _, one in sample
        )
        bound = max(float(one.max()) for one in bounds)
        atol = float(f"{1.06 * bound:.2g}")  # as it is printed, and not below the bound
        tolerances = Case().replace(atol=atol, rtol=0.0)
        for mutant in (one for one in MUTANTS if one.name in left and one.applies(problem)):
            if score(problem, sample, mutant, tolerances, compared).is_killed:
                left.remove(mutant.name)
                found[mutant.name] = f"{text}atol={atol:.2g}, rtol=0"
        if not left:
            break
    return found


def _changed_tests(call: KernelCall) -> Iterator[tuple[str, KernelCall]]:
    """Yield a call with other contents for another test, the cheapest first, and what is changed, in words.

    The tolerance is that of the rounding of the kernel, which a reference in float32 or more allows. The
    contents are numbers of N(0, 1), then with those of attnlab's own tests in slots without a token.
    """
    yield "", call
    if call.kv_cache_dtype != "auto" or call.query.dtype in FP8_DTYPES:
        return
    generator = torch.Generator().manual_seed(0)
    names = ("query", "key", "value", "key_cache", "value_cache")
    normal: dict[str, Any] = {
        name: torch.randn(one.shape, generator=generator).to(one.dtype)
        for name, one in ((name, getattr(call, name)) for name in names)
    }
    yield "data of N(0, 1), ", replace(call, **normal)
    poison = float("nan") if call.spec.poison == "nan" else 100.0
    for name in ("key_cache", "value_cache"):
        normal[name].movedim(3, 1)[~owned_slots(call)] = poison
    what = "NaN" if call.spec.poison == "nan" else "large numbers"
    yield f"data of N(0, 1), {what} in empty slots, ", replace(call, **normal)


def table(powers: Sequence[TestPower]) -> list[str]:
    """Return the lines of the table: per test, how many defects it notices, and some that it does not."""
    if not powers:
        return ["no passing test compared the output of a recorded call"]
    lines = [f"{'notices':>9}  test; defects that it would not notice"]
    for one in sorted(powers, key=lambda one: (len(one.killed), one.node_id)):
        total = len(one.killed) + len(one.survived)
        lines.append(f"{len(one.killed):>4} of {total:<3} {one.node_id}")
        if one.with_itself:
            lines.append(
                f"{'':12}compares the op with itself: a defect of both calls is not noticed"
            )
        if one.survived:
            more = len(one.survived) - _SHOWN
            rest = f" and {more} more" if more > 0 else ""
            lines.append(f"{'':12}{', '.join(one.survived[:_SHOWN])}{rest}")
            changes = Counter(one.cheapest.get(name, "") for name in one.survived)
            lines += [
                f"{'':12}with {text}: {count} of these" for text, count in changes.items() if text
            ]
    return lines


_log = logging.getLogger("attnlab.recorder")
_ADD = "-o attnlab_ops=MODULE:FUNCTION"
_TESTS = 6  # failing tests that may use all of their time
_POWER = "attnlab_power"  # the property that carries a test's power


class Session:
    """Records the calls and comparisons of each test, and reports on it. An error inside is logged once,
    and the test run continues as without attnlab."""

    def __init__(self, config: pytest.Config) -> None:
        self._reports = bool(config.getoption("attnlab"))
        self._json = config.getoption("attnlab_power_json")
        self._scores = bool(config.getoption("attnlab_power") or self._json)
        self._folder = Path(config.getoption("attnlab_dir")).absolute()
        self._seconds = config.getoption("attnlab_seconds")
        self._seconds_left = _TESTS * self._seconds  # of all tests
        self._powers: list[TestPower] = []
        self._is_controller = bool(getattr(config.option, "numprocesses", None)) and not hasattr(
            config, "workerinput"
        )
        keep = config.getoption("attnlab_keep")
        host = bool(config.getoption("attnlab_host"))
        self._ops = [str(text) for text in config.getini("attnlab_ops")]
        self._capture = Capture(keep=keep, ops=self._ops, host=host)
        self._comparisons = Comparisons(
            keep=keep, sizes=self._sizes, on_error=self._failed, host=host
        )
        self._watch = Watch(self._capture.follow, self._comparisons.follow)
        self._logged = False

    @classmethod
    def start(cls, config: pytest.Config) -> None:
        """Register a session and start to record. Raises pytest.UsageError for a wrong option."""
        try:
            session = cls(config)
        except InvalidCase as error:
            raise pytest.UsageError(f"attnlab: {error}") from error
        config.pluginmanager.register(session, "attnlab-session")
        if not session._is_controller:
            session._capture.start()
            session._comparisons.start()
            session._watch.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the project's own functions that look like attention, beside those of attnlab_ops.

        The test modules are imported by now, and what they put on the path is known. Raises pytest.UsageError
        for an entry of attnlab_ops that names no function.
        """
        for text in self._ops:
            module, _, function = text.partition(":")
            loaded = sys.modules.get(module)
            try:
                is_known = loaded is not None or importlib.util.find_spec(module) is not None
            except (ImportError, ValueError):
                is_known = False
            if not is_known or (loaded is not None and not hasattr(loaded, function)):
                what = f"a function {function!r} of {module}" if is_known else f"a module {module}"
                raise pytest.UsageError(
                    f"attnlab: attnlab_ops must name {what} that exists, got {text}"
                )
        if not self._is_controller:
            tests = {
                item.module.__name__ for item in session.items if isinstance(item, pytest.Function)
            }
            self._capture.add(ops_in(session.config.rootpath, tests))

    def pytest_unconfigure(self) -> None:
        """Put the wrapped functions back."""
        if not self._is_controller:
            self._watch.stop()
            self._comparisons.stop()
            self._capture.stop()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Forget the calls of the previous test."""
        self._capture.calls.clear()
        self._capture.chains.clear()
        self._comparisons.last.clear()
        self._comparisons.measured.clear()
        self._capture.left_out.clear()
        self._comparisons.has_failed = False
        self._capture.origin = Origin(test_id=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the section and the properties to the report of a test."""
        report = yield
        is_reported = self._reports and report.failed
        is_scored = self._scores and report.passed and report.when == "call"
        if is_reported and not self._recorded():
            report.sections += self._why_silent()
            return report
        if not is_reported and not is_scored:
            return report
        try:
            # Without Watch, which takes most of the time, and without a default device of the test.
            with torch._C.DisableTorchFunction(), self._comparisons.paused():
                if is_reported:
                    began = time.perf_counter()
                    found: FailureReport = report_failure(
                        item.nodeid,
                        self._recorded(),
                        [*self._comparisons.measured, *self._comparisons.last],
                        self._folder,
                        self._seconds if self._seconds_left > 0 else 0.0,
                        self._left_out(),
                    )
                    self._seconds_left -= time.perf_counter() - began
                    report.sections.append(("attnlab", "\n".join(found.lines())))
                    self._add_properties(item, report, found.properties())
                else:
                    calls = list(self._capture.calls.recorded)
                    powers = powers_of(item.nodeid, calls, self._comparisons.last)
                    self._add_properties(item, report, [(_POWER, one.to_json()) for one in powers])
        except Exception as error:
            self._failed(item.nodeid, error)
            if is_reported:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                report.sections.append(("attnlab", f"no report, because of an error: {text:.300}"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the power of the tests, those of other processes, too."""
        if report.when == "call":
            found = [str(value) for name, value in report.user_properties if name == _POWER]
            powers = map(TestPower.of_json, found)
            # The report of a subtest has the properties of those before it.
            self._powers += [one for one in powers if one not in self._powers]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table of powers, and write it."""
        if not self._scores:
            return
        terminalreporter.section("attnlab power")
        for line in table(self._powers):
            terminalreporter.line(line)
        if self._json is None:
            return
        try:
            found = json.dumps([asdict(one) for one in self._powers], indent=1)
            write_text(Path(self._json), found + "\n")
        except AttnLabError as error:
            terminalreporter.line(f"attnlab: {error}")

    def _why_silent(self) -> list[tuple[str, str]]:
        """Return a section of one line for a failed test that compares tensors or calls an op left out."""
        seen = self._left_out()
        if not seen and not self._comparisons.has_failed:
            return []
        what = f"not recorded: {seen}" if seen else "no function that attnlab knows was called"
        line = f"no attention call: {what}; add the function that computes attention: {_ADD}"
        return [("attnlab", line)]

    @staticmethod
    def _add_properties(
        item: pytest.Item, report: pytest.TestReport, properties: list[tuple[str, str]]
    ) -> None:
        """Add properties to this report, and to the last one of the test, which the JUnit file takes."""
        report.user_properties.extend(properties)
        item.user_properties.extend(properties)

    def _recorded(self) -> list[Recorded]:
        """Return the calls that were recorded, with attention that was written out in torch at the end."""
        return [*self._capture.calls.recorded, *self._capture.chains]

    def _left_out(self) -> str:
        """Return the calls that were not recorded, and why."""
        return "; ".join(f"{name} ({why})" for name, why in self._capture.left_out.items())

    def _sizes(self) -> set[int]:
        """Return the numbers of elements of the recorded outputs."""
        return {output.numel() for one in self._recorded() for output in one.outputs}

    def _failed(self, what: str, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            text = " ".join(str(error).split())
            _log.warning("attnlab failed in %s: %s: %s", what, type(error).__name__, text)
