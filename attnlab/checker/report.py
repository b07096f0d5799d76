"""Report: the findings of a library, built from the outcomes of the tasks of a check."""

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.op_arguments import NONE
from attnlab.case.shown import Document, Shown
from attnlab.checker.case_run import forms_of, lab_of
from attnlab.checker.coverage import OpCoverage, op_coverage
from attnlab.checker.finding import (
    KINDS,
    Finding,
    KnownFinding,
    Location,
    case_of,
    location_of,
    merged_findings,
    split_known,
)
from attnlab.checker.plan import (
    FAULTS,
    Group,
    Outcomes,
    Plan,
    groups,
    has_run,
    is_case,
    named_outcomes,
    naming_tasks,
    op_of,
    shrink_key,
    why_not_run,
)
from attnlab.diagnosis.claims import KernelLine
from attnlab.diagnosis.lines import locate_lines
from attnlab.diagnosis.repair_check import with_confirmation
from attnlab.diagnosis.trials import Limit
from attnlab.kernels.backend import Backend, OnStep, ignore_step
from attnlab.kernels.plugin import NO_INTERPRETER
from attnlab.lab.lab import Lab
from attnlab.tasks.run import Remaining, TaskRun, kept_run
from attnlab.tasks.store import ALL, Header, Shard
from attnlab.tasks.task import Engine, InProcess, Outcome, Stop, Task, never

# What no case of a check has, by the field that is the usual one, or other strides, in all of them.
NOT_COVERED = {
    "op_argument": "output scales; scales per token and head",
    "mask": "bidirectional masks",
}
_STOPPED = "the check was stopped before"
_READS = "slot reads, which are traced only of Triton kernels under the lab's interpreter"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """Cases of an op that could not run, or were not reached.

    ``reason``: one line; ``cases``: their number; ``run``: the command line of the first.
    """

    op: str
    reason: str
    cases: int
    run: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Document, Shown):
    """The findings of a library.

    - ``source``, ``version``: the path of the vLLM or the plugin, and its version in words.
    - ``cases``, ``cases_run``: the number of cases of all ops, and of those that ran; a case that violates
      a contract or that the kernel states not to support counts in ``cases`` only.
    - ``ops``: the number of cases that ran, for each op that was to be checked.
    - ``locations``: where each op is defined, as {file, line}; ops without a file are left out.
    - ``seconds``: the time that the check took; in a merged report, the sum.
    - ``findings``, ``observations``: one per group, each at its smallest Case. ``findings`` are all faults,
      expected ones included.
    - ``known``: those of ``findings`` that a list of known findings names; ``missing``: the entries of the
      list that did not appear although all cases of their op ran.
    - ``reads``: per op, the number of slots that its kernels read, by kind
      (:mod:`attnlab.lab.result`); only ops whose reads were traced.
    - ``reads_allowed``: per op, the kinds that the contracts of its kernels allow.
    - ``forms``: per op, the number of cases by the kernels that they launched (Triton's interpreter).
    - ``reports``: the paths of the files written for the findings.
    - ``coverage``: per op, the lines and branches that the cases reached, if that was measured.
    - ``not_run``: the cases that did not run although the kernel may support them, and why.
    - ``left_out``: limits that kernels state, features that the ops lack ("not applicable"), and what a check
      does not cover.
    """

    source: str
    version: str
    cases_run: int
    seconds: float
    cases: int = 0
    ops: dict[str, int] = field(default_factory=dict)
    locations: dict[str, Location] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    observations: list[Finding] = field(default_factory=list)
    known: list[KnownFinding] = field(default_factory=list)
    missing: list[KnownFinding] = field(default_factory=list)
    reads: dict[str, dict[str, int]] = field(default_factory=dict)
    reads_allowed: dict[str, list[str]] = field(default_factory=dict)
    forms: dict[str, dict[str, int]] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)
    coverage: dict[str, OpCoverage] = field(default_factory=dict)
    not_run: list[NotRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def unexpected(self) -> list[Finding]:
        """Return the findings that are not known."""
        known = {entry.finding.group for entry in self.known if entry.finding is not None}
        return [finding for finding in self.findings if finding.group not in known]

    @property
    def exit_code(self) -> int:
        """Return 1 for an unexpected or a missing finding, 3 if cases did not run, else 0."""
        if self.unexpected or self.missing:
            return 1
        return 3 if self.not_run else 0

    def location(self, finding: Finding) -> Location | None:
        """Return the line of a finding, or the definition of its op; None if it has no file."""
        if finding.lines:
            return Location(file=finding.lines[0].file, line=finding.lines[0].line)
        return location_of(finding.op, finding.evidence, self.locations)

    def warnings(self) -> list[str]:
        """Return what did not run, one line for each op and reason; empty if all cases ran."""
        return [
            f"{entry.op}: {entry.cases} {'case' if entry.cases == 1 else 'cases'} did not run: "
            f"{entry.reason}"
            for entry in self.not_run
        ]


def build_report(
    header: Header,
    tasks: Sequence[Task],
    outcomes: Outcomes,
    *,
    seconds: float = 0.0,
    stopped: str = _STOPPED,
    known: Sequence[KnownFinding] = (),
) -> Report:
    """Return the report of some tasks of a plan.

    - ``header``: that of the plan; ``tasks``: those that were to run, in the plan's order.
    - ``outcomes``: by key, also those of shrinking; a group that was not shrunk keeps its first case.
    - ``stopped``: the reason for a task without an outcome; ``known``: the expected findings.
    """
    library = header["library"]
    found = [
        dataclasses.replace(finding, flags=(*library["flags"], *finding.flags))
        for op in header["options"]["ops"]
        for finding in sorted(_findings(tasks, outcomes, op), key=lambda finding: finding.order)
    ]
    faults = [finding for finding in found if finding.is_fault]
    not_run = not_run_of(tasks, outcomes, stopped)
    reads = _reads(tasks, outcomes)
    incomplete = {entry.op for entry in not_run}
    complete = {op_of(task) for task in tasks} - incomplete if header["shard"] == "1/1" else set()
    expected, missing = split_known(known, faults, complete)
    ran = Counter(op_of(t) for t in tasks if is_case(t) and has_run(outcomes.get(t.key)))
    return Report(
        source=library["source"],
        version=library["version"],
        cases=sum(map(is_case, tasks)),
        cases_run=ran.total(),
        ops={op: ran[op] for op in header["options"]["ops"]},
        locations={op: Location(**place) for op, place in library["locations"].items()},
        seconds=seconds,
        findings=faults,
        observations=[finding for finding in found if not finding.is_fault],
        known=expected,
        missing=missing,
        reads={op: counts for op, (counts, _) in reads.items()},
        reads_allowed={op: sorted(allowed) for op, (_, allowed) in reads.items()},
        forms=forms_of(_verdicts(tasks, outcomes)),
        coverage=_coverage(header, tasks, outcomes),
        not_run=not_run,
        left_out=[
            *_limits(tasks, outcomes, header["options"]["ops"], reads),
            *library.get("not_applicable", ()),
            *library["blind_spots"],
            *(
                text
                for field, text in NOT_COVERED.items()
                if all(task.payload["case"].get(field, "gaps") == "gaps" for task in tasks)
            ),
        ],
    )


def _findings(tasks: Sequence[Task], outcomes: Outcomes, op: str) -> list[Finding]:
    """Return one finding for each group of an op, at its smallest Case."""
    of_op = [task for task in tasks if op_of(task) == op]
    return merged_findings(
        [_smallest(group, outcomes) for group in groups(of_op, outcomes).values()]
    )


def _smallest(group: Group, outcomes: Outcomes) -> Finding:
    """Return the finding of a group at the Case that shrinking found, if there is one."""
    finding = dataclasses.replace(group.own.joined(group.finding), seen=group.seen)
    shrunk = outcomes.get(shrink_key(group.task, group.own))
    if shrunk is None or shrunk.verdict is None:
        return finding
    small = Finding.from_verdict(shrunk.verdict["finding"])
    if small.names and finding.names and not set(small.names) & set(finding.names):
        return finding  # the smaller Case has another name than the group
    first = None if small.case == finding.case else finding.case
    return dataclasses.replace(small.joined(finding), seen=group.seen, first=first)


def _reads(tasks: Sequence[Task], outcomes: Outcomes) -> dict[str, tuple[dict[str, int], set[str]]]:
    """Return the slots read and the states that are allowed, by op, of the cases that were traced."""
    found: dict[str, tuple[dict[str, int], set[str]]] = {}
    for verdict, op in _verdicts(tasks, outcomes):
        if verdict["reads"] is not None:
            counts, allowed = found.setdefault(op, ({}, set()))
            for state, count in verdict["reads"].items():
                counts[state] = counts.get(state, 0) + count
            allowed |= set(verdict["allowed"])
    return found


def _coverage(header: Header, tasks: Sequence[Task], outcomes: Outcomes) -> dict[str, OpCoverage]:
    """Return the coverage of each op that has functions to measure."""
    verdicts = [*_verdicts(tasks, outcomes)]
    found = {
        op: op_coverage(
            op,
            functions,
            [verdict["points"] for verdict, of in verdicts if of == op],
            [verdict["arguments"] for verdict, of in verdicts if of == op],
        )
        for op, functions in header.get("functions", {}).items()
        if functions
    }
    for op, one in found.items():
        one.combinations = header.get("combinations", {}).get(op, {})
    return found


def _verdicts(tasks: Sequence[Task], outcomes: Outcomes) -> Iterable[tuple[Mapping[str, Any], str]]:
    for task in tasks:
        outcome = outcomes.get(task.key)
        if outcome is not None and outcome.verdict is not None:
            yield outcome.verdict, op_of(task)


def _limits(
    tasks: Sequence[Task], outcomes: Outcomes, ops: Sequence[str], reads: Mapping[str, Any]
) -> list[str]:
    """Return the limits that kernels state, each once, and the ops whose reads were not traced."""
    found = list[str]()
    for op in ops:
        texts = [v["unsupported"] for v, of in _verdicts(tasks, outcomes) if of == op]
        found += [f"{op}: {text}" for text in dict.fromkeys(texts) if text]
        has_tasks = any(op_of(task) == op for task in tasks)
        found += [f"{op}: {_READS}"] if has_tasks and op not in reads else []
    return found


def not_run_of(
    tasks: Sequence[Task], outcomes: Outcomes, stopped: str, name: Callable[[Task], str] = op_of
) -> list[NotRun]:
    """Return the cases that did not run although the op may support them, by ``name`` and reason."""
    reasons = ((task, why_not_run(outcomes.get(task.key), stopped)) for task in tasks)
    return counted((name(task), reason, task) for task, reason in reasons if reason)


def counted(entries: Iterable[tuple[str, str, Task]]) -> list[NotRun]:
    """Return one entry for each name and reason of some (name, reason, task)."""
    found: dict[tuple[str, str], list[Task]] = {}
    for name, reason, task in entries:
        found.setdefault((name, reason), []).append(task)
    return [
        NotRun(
            op=name,
            reason=reason,
            cases=len(of),
            run=case_of(op_of(of[0]), of[0].payload["case"]).to_cli(),
        )
        for (name, reason), of in found.items()
    ]


# Check a kernel library: run the tasks of a plan on an engine, shrink the findings, and report.

__all__ = ["NotRun", "Progress", "Report", "check_library"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a check has come.

    - ``step``: "cases", "naming" or "shrinking"; ``done``, ``total``: its tasks.
    - ``ops_done``, ``ops``: ops all of whose cases have a verdict, and all ops.
    - ``findings``: cases with a fault so far; ``remaining_s``: estimate for this step, None at first.
    """

    step: str
    done: int
    total: int
    ops_done: int
    ops: int
    findings: int
    remaining_s: float | None


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Do nothing: the ``on_progress`` of a check that reports no progress."""


def check_library(
    plan: Plan,
    engine: Engine | None = None,
    *,
    seconds: float | None = None,
    shard: Shard = ALL,
    out: Path | None = None,
    known: Sequence[KnownFinding] = (),
    on_progress: OnProgress = ignore_progress,
    stop: Stop = never,
) -> Report:
    """Run the cases of a plan, or a shard of them, and return the report.

    - ``engine``: default this process; it is not closed here.
    - ``seconds``: start no further case after this time; default: run all cases.
    - ``out``: folder of a store. Cases with an outcome there do not run again.
    - ``known``: expected findings. ``stop``: return True to end early; the report has what ran.

    Raises what the backend raises if it cannot run at all, and InvalidCase or Unavailable for ``out``.
    A user's kernel that no process can launch raises Unavailable: the environment must change.
    """
    began = time.perf_counter()
    all_tasks = plan.tasks()
    header, tasks = plan.header(all_tasks, shard), shard.of(all_tasks)
    with contextlib.ExitStack() as stack:
        engine = engine or stack.enter_context(InProcess())
        run = stack.enter_context(kept_run(engine, plan.job(), header, out, stop, seconds))
        run.run(scheduled(tasks, seconds is not None), watching("cases", tasks, on_progress))
        name_outputs(run, tasks, on_progress)
        shrinking = scheduled(plan.shrink_tasks(tasks, run.outcomes, shard), is_limited=False)
        run.run(shrinking, watching("shrinking", shrinking, on_progress))
    report = build_report(
        header,
        tasks,
        run.outcomes,
        seconds=time.perf_counter() - began,
        stopped="the check was interrupted" if stop() else "the time was up",
        known=known,
    )
    reasons = [entry.reason for entry in report.not_run if NO_INTERPRETER in entry.reason]
    if reasons and not report.cases_run:
        raise Unavailable(reasons[0])
    return report


def name_outputs(run: TaskRun, tasks: Sequence[Task], on_progress: OnProgress) -> None:
    """Look for what explains the wrong outputs of cases that ran, also when the time for cases is up."""
    naming = scheduled(naming_tasks(tasks, run.outcomes), is_limited=False)
    of_key, note = {task.key: task for task in naming}, watching("naming", naming, on_progress)

    def keep(outcome: Outcome) -> None:
        for one in named_outcomes(of_key[outcome.key], outcome, run.outcomes):
            run.keep(one)
        note(outcome)

    if naming:
        run.engine.run(run.job, naming, keep, run.stop)


def scheduled(tasks: Sequence[Task], is_limited: bool) -> list[Task]:
    """Return the tasks in the order in which they shall start.

    The longest first, so that the workers end together. With a time limit, the most informative first, of
    all ops in turn.
    """
    if not is_limited:
        return sorted(tasks, key=lambda task: -task.cost_s)
    counts: dict[str, int] = {}
    rank = {}
    for task in tasks:
        op = task.payload["case"].get("op", "")
        rank[task.key] = counts[op] = counts.get(op, 0) + 1
    return sorted(tasks, key=lambda task: rank[task.key])


def watching(
    step: str, tasks: Sequence[Task], on_progress: OnProgress
) -> Callable[[Outcome], None]:
    """Return a function of an outcome that reports the progress of a step."""
    remaining, findings, done = Remaining(tasks), 0, 0
    op_of = {task.key: _op(task) for task in tasks}
    left = {op: [*op_of.values()].count(op) for op in op_of.values()}

    def note(outcome: Outcome) -> None:
        nonlocal findings, done
        done += 1
        findings += is_fault(outcome)
        left[op_of[outcome.key]] -= 1
        on_progress(
            Progress(
                step=step,
                done=done,
                total=len(tasks),
                ops_done=sum(not count for count in left.values()),
                ops=len(left),
                findings=findings,
                remaining_s=remaining.seconds(outcome),
            )
        )

    return note


def _op(task: Task) -> str:
    if "case" in task.payload:
        return str(task.payload["case"].get("op", ""))
    return str((task.payload.get("finding") or task.payload["findings"][0])["op"])


def is_fault(outcome: Outcome) -> bool:
    """Answer whether a case showed a fault."""
    if outcome.verdict is None:
        return outcome.status in FAULTS
    return any(found["kind"] in KINDS for found in outcome.verdict.get("findings", ()))


# Merge the stores of the shards of a check into one report.


def merged_check(
    header: Header, outcomes: Mapping[str, Outcome], known: Sequence[KnownFinding] = ()
) -> Report:
    """Return the report of a check from what :func:`attnlab.tasks.store.merged_stores` returns.

    It equals that of a check in one piece, except that ``seconds`` is the sum of the cases' times, and that
    each shard has named the wrong outputs of its own cases.
    """
    limit_s = header["options"]["case_seconds"]
    return build_report(
        header,
        [Task(**fields, limit_s=limit_s) for fields in header["cases"]],
        outcomes,
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        stopped="its shard was stopped before",
        known=known,
    )


# The source lines of findings: where in a kernel the fault of a finding may be.

LIMIT = Limit(edits=600, seconds=30.0)  # of one finding
_KINDS = (
    "wrong_output",
    "wrong_bytes",
    "rows_not_written",
    "reads_unwritten_slots",
    "reads_freed_blocks",
)  # faults that show in the output


def with_source_lines(report: Report, backend: Backend, on_step: OnStep = ignore_step) -> Report:
    """Return the report with the source lines of its faults; the Cases run again.

    Files are relative to the root of the source, as in :class:`attnlab.checker.finding.Location`.
    """
    lab, found = lab_of(backend, "cpu"), []
    for i, finding in enumerate(report.findings):
        on_step("locating the faults", i, len(report.findings))
        found.append(_located(lab, backend, finding))
    return dataclasses.replace(report, findings=merged_by_line(found))


def merged_by_line(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; of those that one edit of the same lines repairs, only the first.

    One fault may have different names in different cases, but it has one place.
    """
    merged: dict[object, Finding] = {}
    for i, finding in enumerate(findings):
        places = tuple((one.file, one.line) for one in finding.lines if one.evidence == "edit")
        key = (finding.op, finding.kind, places) if places else i
        if (first := merged.get(key)) is not None:
            finding = dataclasses.replace(first, seen=first.seen + finding.seen)
        merged[key] = finding
    return list(merged.values())


def _located(lab: Lab, backend: Backend, finding: Finding) -> Finding:
    if finding.horizon:
        return finding
    if finding.case.op_argument != NONE:
        return dataclasses.replace(finding, no_lines="an op argument is passed")
    if finding.kind not in _KINDS:
        return dataclasses.replace(finding, no_lines="the fault does not show in an output")
    case = finding.case.replace(backend=backend.name)
    try:
        place = with_confirmation(lab, case, locate_lines(lab, case, None, LIMIT))
    except AttnLabError as error:
        return dataclasses.replace(finding, no_lines=str(error))
    lines = tuple(_relative(line, backend) for line in place.confirmed_lines)
    why = "" if lines else place.why_none or "further cases confirm no trial edit"
    return dataclasses.replace(finding, lines=lines, no_lines=why)


def _relative(line: KernelLine, backend: Backend) -> KernelLine:
    """Return a line with its file relative to the root of a source, or to the current folder."""
    path, source = Path(line.file), backend.op_source
    if source is not None and path.is_relative_to(source.root):
        return dataclasses.replace(line, file=path.relative_to(source.root).as_posix())
    return dataclasses.replace(line, file=Path(os.path.relpath(path)).as_posix())
