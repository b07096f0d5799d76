"""Check a kernel library: run the tasks of a plan on an engine, shrink the findings, and report."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.op_arguments import NONE
from attnlab.checker.case_run import lab_of
from attnlab.checker.finding import KINDS, Finding, KnownFinding
from attnlab.checker.plan import FAULTS, Plan, named_outcomes, naming_tasks
from attnlab.checker.report import NotRun, Report, build_report
from attnlab.diagnosis.claims import KernelLine
from attnlab.diagnosis.lines import locate_lines
from attnlab.diagnosis.repair_check import with_confirmation
from attnlab.diagnosis.trials import Limit
from attnlab.kernels.backend import Backend, OnStep, ignore_step
from attnlab.kernels.plugin import NO_INTERPRETER
from attnlab.lab.lab import Lab
from attnlab.tasks.run import Remaining, TaskRun, deadline
from attnlab.tasks.store import ALL, Header, Shard, Store
from attnlab.tasks.task import Engine, InProcess, Outcome, Stop, Task, never

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
    is_late = deadline(seconds)
    with contextlib.ExitStack() as stack:
        store = None if out is None else stack.enter_context(Store(out, header))
        engine = engine or stack.enter_context(InProcess())
        run = TaskRun(engine=engine, job=plan.job(), store=store, stop=stop, is_late=is_late)
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
    if finding.kind not in _KINDS or finding.case.spec.writes_cache:
        return dataclasses.replace(
            finding, no_lines="the fault does not show in an output of attention"
        )
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
