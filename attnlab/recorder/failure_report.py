"""The report of a failing test: a section of at most 15 lines, properties, the saved call and a page."""

import contextlib
import dataclasses
import hashlib
import re
import shlex
import signal
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCall
from attnlab.case.output_file import write_text
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import list_text
from attnlab.kernels.child_process import can_copy, run_in_copy
from attnlab.kernels.triton.interpreter import limit_processes
from attnlab.recorder.arguments import LAUNCH
from attnlab.recorder.capture import Recorded, from_here, not_recording
from attnlab.recorder.failing_side import (
    CHAIN,
    TORCHS,
    UNRECORDED,
    Comparison,
    Judgement,
    agrees,
    judge,
    match_of,
    output_matches,
    stand_in,
)
from attnlab.reports.pages import render_page
from attnlab.reports.shared_page import call_pictures
from attnlab.show import sheets

MOST_LINES = 15
_WIDTH = 100
_WALL = 4  # seconds for each second of processor time
_MOST_NAME = 120  # characters of a folder's name


@dataclass(slots=True, kw_only=True)
class FailureReport:
    """What is reported about a failing test: ``facts`` are (label, text) in the order of reading."""

    facts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, label: str, text: str) -> None:
        """Add a fact; changes the report."""
        self.facts.append((label, " ".join(text.split())))

    def lines(self) -> list[str]:
        """Return at most 15 lines. The paths at the end are never cut."""
        wrapped = [self._wrapped(label, text) for label, text in self.facts]
        budget = MOST_LINES - len(wrapped)
        lines = []
        for part in wrapped:
            shown = part[: 1 + budget] if len(part) > 1 + budget else part
            budget -= len(shown) - 1
            if len(shown) < len(part):
                shown = [*shown[:-1], f"{shown[-1][: _WIDTH - 2]} …"]
            lines += shown
        return lines

    @staticmethod
    def _wrapped(label: str, text: str) -> list[str]:
        indent = " " * 12
        if label in ("call", "next", "page"):
            return [f"{label:<12}{text}"]
        return textwrap.wrap(
            text, _WIDTH, initial_indent=f"{label:<12}", subsequent_indent=indent
        ) or [label]

    def properties(self) -> list[tuple[str, str]]:
        """Return the facts as JUnit properties."""
        return [(f"attnlab_{label.replace(' ', '_')}", text) for label, text in self.facts]


def report_failure(
    node_id: str,
    recorded: Sequence[Recorded],
    comparisons: Sequence[Comparison],
    folder: Path,
    seconds: float = 0.0,
    left_out: str = "",
) -> FailureReport:
    """Return the report of a failing test, and write its call and page to ``folder``/<node id>/.

    ``recorded`` must not be empty; attention that was written out in torch comes last. A call that cannot be
    read or written is reported in one line. ``seconds``: of processor time, for runs of the kernel.
    ``left_out``: the calls that were not recorded, and why.
    """
    report = FailureReport()
    try:
        _fill(report, node_id, recorded, comparisons, folder, seconds)
        if left_out:
            report.facts.insert(1, ("not read", left_out))
    except RuntimeError as error:  # torch's, after a kernel has broken the GPU's context
        lost = FailureReport()
        lost.add("op", f"{recorded[-1].origin.op}, the last of {len(recorded)} calls")
        lost.add("diagnosis", f"none: {_first_line(error)}")
        lost.add(
            "advice", "--attnlab-host keeps calls in CPU memory, which a GPU error leaves alone"
        )
        return lost
    return report


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _fill(
    report: FailureReport,
    node_id: str,
    recorded: Sequence[Recorded],
    comparisons: Sequence[Comparison],
    folder: Path,
    seconds: float,
) -> None:
    """Add all facts to a report, and write its files."""
    one, comparison = _call_and_comparison(recorded, comparisons)
    if one.is_guess and comparison is not None:
        one, comparison = _as_meant(one, comparison, recorded, comparisons)
    judgement, failure = None, None
    try:
        one, judgement = _judged(one, comparison, recorded)
    except AttnLabError as error:
        failure = error
    alike = [other for other in recorded if other.is_chain == one.is_chain] or list(recorded)
    number = next((n for n, other in enumerate(alike, 1) if other.is_same(one)), len(alike))
    unknown = () if judgement is None else judgement.diagnosis.undecided_by
    if unknown:
        report.add("not decided", f"because of {', '.join(unknown)}, unknown to attnlab")
    report.add("op", f"{one.origin.op}, call {number} of the last {len(alike)}")
    if judgement is not None and one.is_guess and not _confirms_reading(judgement):
        is_named = not (one.origin.op or "").startswith((CHAIN, LAUNCH))
        report.add("not decided", _NO_ATTENTION.format(one.kernel) if is_named else _NOT_CONFIRMED)
        judgement = None
    found = None
    if judgement is not None:
        found = _by_runs(one, judgement.diagnosis, seconds)
        _add_judgement(report, judgement, found)
    if isinstance(failure, InvalidCall) and failure.field == "block_table":
        report.add("wrong side", "the arguments of the call")
    if one.rejection and judgement is None:
        report.add("evidence", f"the op raised: {one.rejection}")
    if failure is not None:
        report.add("diagnosis", f"none: {failure}")
    if isinstance(failure, InvalidCall) and failure.field == "output" and not one.outputs:
        report.add("advice", "return the output, or name its argument output, out or o")
    _write(report, node_id, one, judgement, found, folder)


_NOT_CONFIRMED = (
    "the test compares its output with nothing recognised as the attention of its arguments"
)
_NO_ATTENTION = (
    "the function has the arguments of attention, but the test compares its output with nothing that was "
    "recognised as the attention of these arguments; if it is meant to be: -o attnlab_ops={}"
)


def _as_meant(
    one: Recorded,
    comparison: Comparison,
    recorded: Sequence[Recorded],
    comparisons: Sequence[Comparison],
) -> tuple[Recorded, Comparison | None]:
    """Return an undeclared call in its first reading that agrees with the test's values.

    That is one for which the expected value is exact, or else one for which the output is. Without one,
    return the call of a known function that the test compares, or else the call as it is.
    """
    known = [call for call in recorded if not call.is_guess]
    chains = [call for call in recorded if call.is_chain and call is not one]
    readings = [way for call in (one, *chains) for way in (call, *call.other_readings())]
    for exactly in (True, False):
        for other in readings:
            with contextlib.suppress(AttnLabError):
                again, compared = _call_and_comparison([other, *known], comparisons)
                is_read = again is other and compared is not None
                if is_read and not other.call.unknown_arguments:
                    assert compared is not None
                    if agrees(other.call, compared, exactly=exactly):
                        return other, compared
    with contextlib.suppress(AttnLabError):
        again, compared = _call_and_comparison(known, comparisons) if known else (one, None)
        if compared is not None:
            return again, compared
    return one, comparison


def _confirms_reading(one: Judgement) -> bool:
    """Answer whether a test's values agree with how a call was read that nobody said is attention."""
    if not one.diagnosis.is_wrong or one.diagnosis.status == "rejected":
        return True
    return one.comparison is not None and one.side != "the kernel and the expected value"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundByRuns:
    """What runs of the kernel showed: the conclusion and the sheet, or why there is neither.

    ``unknown``: what they leave open, such as that the kernel gives another output now.
    """

    conclusion: str = ""
    unknown: tuple[str, ...] = ()
    sheet: str = ""
    why_none: str = ""


def _by_runs(one: Recorded, alone: Diagnosis, seconds: float) -> FoundByRuns | None:
    """Diagnose a wrong output by runs of its kernel, in a copy of this process.

    None if there is nothing to do.
    A kernel may end its process, or hang with other lengths: the copy is ended after ``seconds`` of processor
    time, or four times as long. No copy of a process that uses a GPU could use it.
    """
    decided = alone.is_wrong and alone.status not in ("rejected", "not decided")
    if seconds <= 0 or not decided or one.is_write or _is_torch(one) or one.function is None:
        return None
    if not can_copy():
        return FoundByRuns(why_none="this process uses a GPU")
    found: list[FoundByRuns] = []

    def diagnose(send: Callable[[FoundByRuns], object]) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)
        limit_processes(1)
        with not_recording():
            again = diagnose_captured(one.call, Case(), runner=one.runner, limit=None)
        unknown = tuple(one for one in again.unknown if one not in alone.unknown)
        send(FoundByRuns(conclusion=_conclusion(again), unknown=unknown, sheet=sheets.html(again)))

    try:
        ended = run_in_copy(diagnose, found.append, seconds)
    except Exception as error:  # of the test's own kernel
        return FoundByRuns(why_none=_first_line(error))
    if not found and ended in ("SIGXCPU", "SIGALRM", "SIGKILL"):
        return FoundByRuns(why_none=f"they take more than {seconds:g} s")
    return found[0] if found else FoundByRuns(why_none=f"they end with {ended}")


def _judged(
    one: Recorded, comparison: Comparison | None, recorded: Sequence[Recorded]
) -> tuple[Recorded, Judgement]:
    """Return the call to report, and the judgement of it.

    If the test compared the outputs of two calls, that is the one that is wrong; if it compared no output,
    the last call that is wrong.
    """
    others = [
        other for other in reversed(recorded) if other is not one and not _is_reference(other)
    ]
    if comparison is None:
        found = one, judge(one.call, None)
        for other in others:
            if found[1].diagnosis.is_wrong:
                break
            with contextlib.suppress(AttnLabError):
                judged = judge(other.call, None)
                found = (other, judged) if judged.diagnosis.is_wrong else found
        return found
    makers = [
        other
        for other in reversed(recorded)
        if other is not one and not other.is_chain and _is_part(other, comparison.expected)
    ]
    maker = makers[-1] if makers else None
    judgement = judge(
        one.call, comparison, maker=None if maker is None else maker.call, is_guess=one.is_guess
    )
    if maker is not None and judgement.side == "the expected value" and not _is_torch(maker):
        with contextlib.suppress(AttnLabError):
            exchanged = judge(
                maker.call, comparison.exchanged(), maker=one.call, is_guess=maker.is_guess
            )
            if exchanged.diagnosis.is_wrong:
                return maker, exchanged
    return one, judgement


def _call_and_comparison(
    recorded: Sequence[Recorded], comparisons: Sequence[Comparison]
) -> tuple[Recorded, Comparison | None]:
    """Return the call whose output was compared last, failed comparisons first, and its comparison.

    Of several calls with this output, the first is returned: only its buffer did not hold the output before.
    If none was compared, return the last attention call that is not the test's own reference.
    """
    ordered = sorted(reversed(comparisons), key=lambda one: (one.passed, one.is_measured))
    pairs = [(r, s) for c in ordered for r in recorded for s in r.shaped(c)]
    for is_compared in (_is_output, _is_part):
        for one, shaped in pairs:
            if is_compared(one, shaped.actual):
                return one, shaped
            if is_compared(one, shaped.expected) and not _is_reference(one):
                return one, shaped.exchanged()
    for one, shaped in pairs:
        if _is_reference(one) and _is_output(one, shaped.expected):
            found = _with_other_output(one, shaped)
            if found is not None:
                return found, shaped
    own = [one for one in recorded if not _is_reference(one)]
    attention = [one for one in own if not one.is_write]
    called = [one for one in recorded if not one.is_chain]
    return (attention or own or called or list(recorded))[-1], None


def _is_torch(one: Recorded) -> bool:
    return (one.origin.op or "").startswith("torch.")


def _is_reference(one: Recorded) -> bool:
    """Answer whether a call is attention of torch, which tests compare kernels with."""
    return (one.origin.op or "").startswith(TORCHS)


def _with_other_output(one: Recorded, comparison: Comparison) -> Recorded | None:
    """Return an exact call of torch's with the output that a test compares with its own, or None."""
    for reading in (one, *one.other_readings()):
        with contextlib.suppress(AttnLabError):
            call = stand_in(reading.call, comparison)
            if call is not None:
                origin = dataclasses.replace(
                    call.origin, op=f"{UNRECORDED}, compared with {one.origin.op}"
                )
                call = dataclasses.replace(call, origin=origin)
                return dataclasses.replace(
                    reading, origin=origin, function=None, is_guess=False, _call=call
                )
    return None


def _is_output(one: Recorded, tensor: torch.Tensor) -> bool:
    try:
        return output_matches(one.call, tensor)
    except InvalidCall:
        return False


def _is_part(one: Recorded, tensor: torch.Tensor) -> bool:
    try:
        return not one.is_write and match_of(one.call, tensor) is not None
    except InvalidCall:
        return False


def _add_judgement(report: FailureReport, judgement: Judgement, found: FoundByRuns | None) -> None:
    diagnosis = judgement.diagnosis
    report.add("wrong side", judgement.side)
    by_runs = "" if found is None else found.conclusion
    report.add("diagnosis", by_runs or _conclusion(diagnosis))
    if found is not None and found.why_none:
        report.add("not run", f"the kernel, again and varied: {found.why_none}")
    for text in () if found is None else found.unknown:
        report.add("unknown", text)
    report.add("evidence", judgement.evidence)
    parts = []
    if diagnosis.place is not None:
        parts.append(
            f"{diagnosis.wrong_rows} of {diagnosis.looked_at[1]}; the largest absolute error is in "
            f"{diagnosis.place.text}"
        )
    if diagnosis.unwritten:
        known_by = "as before the call" if diagnosis.unwritten_by == "buffer" else "not written"
        parts.append(f"{known_by}: {list_text('row', diagnosis.unwritten)}")
    rows = "; ".join(parts)
    if rows:
        report.add("wrong rows", rows)
    if judgement.read_as:
        report.add("read as", "; ".join(judgement.read_as))
    for violation in diagnosis.violations[:2]:
        if violation.effect != "harmless":
            report.add("violation", violation.text)


def _conclusion(diagnosis: Diagnosis) -> str:
    if diagnosis.cause is not None:
        return f"{diagnosis.status}: {diagnosis.cause.name}: {diagnosis.cause.text}"
    names = ", ".join(one.name for one in diagnosis.explanations)
    is_said = diagnosis.status == "described" or diagnosis.observed
    text = names or (diagnosis.conclusion if is_said else "")
    return f"{diagnosis.status}: {text}" if text else diagnosis.status


def _write(
    report: FailureReport,
    node_id: str,
    one: Recorded,
    judgement: Judgement | None,
    found: FoundByRuns | None,
    folder: Path,
) -> None:
    """Write the call and the page; add their paths, or the reason why they are missing."""
    target = folder / folder_name(node_id)
    try:
        target.mkdir(parents=True, exist_ok=True)
        call = one.call
        call.save(target / "call.safetensors")
        report.add("call", str(target / "call.safetensors"))
        if judgement is not None and judgement.diagnosis.is_wrong and one.function is not None:
            call_file = shlex.quote(from_here(target / "call.safetensors"))
            report.add("next", f"attnlab page {call_file}{_kernel_flag(one)}")
        write_text(target / "report.html", page(node_id, report, one, judgement, found))
        report.add("page", str(target / "report.html"))
    except (AttnLabError, OSError) as error:
        report.add("not written", str(error))


def folder_name(node_id: str) -> str:
    """Return a node id as the name of a folder: at most 120 characters, unique."""
    name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", node_id).strip("_.") or "test"
    if len(name) <= _MOST_NAME and name == node_id:
        return name
    digest = hashlib.sha256(node_id.encode()).hexdigest()[:8]
    return f"{name[: _MOST_NAME - 9]}-{digest}"


def page(
    node_id: str,
    report: FailureReport,
    recorded: Recorded,
    judgement: Judgement | None,
    found: FoundByRuns | None = None,
) -> str:
    """Return the report as one self-contained HTML page, with the diagnosis and the call."""
    facts, call = list(report.facts), recorded.call
    if judgement is not None and judgement.comparison is not None:
        one = judgement.comparison
        facts.append(("tolerance", f"atol {one.atol:g}, rtol {one.rtol:g}"))
    facts.append(("origin", str(call.origin)))
    nouns = [] if judgement is None else [sheets.html(judgement.diagnosis)]
    if found is not None and found.sheet:
        nouns = [found.sheet]
    return render_page(
        "failure.html.j2",
        title=node_id,
        facts=facts,
        drawn=[] if judgement is None else call_pictures(call),
        sheets=[*nouns, sheets.html(call)],
        command=f"attnlab page call.safetensors{_kernel_flag(recorded)}",
    )


def _kernel_flag(one: Recorded) -> str:
    """Return the flag of a command that runs the function of a call again, or ""."""
    if not one.call.is_foreign:
        return " --source VLLM"
    return "" if one.function is None or one.is_write else f" --kernel {shlex.quote(one.spec)}"
