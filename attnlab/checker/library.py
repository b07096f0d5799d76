"""Check a kernel library: run the tasks of a plan on an engine, shrink the findings, and report."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlab.case.errors import Unavailable
from attnlab.checker.finding import KINDS
from attnlab.checker.known import KnownFinding
from attnlab.checker.plan import FAULTS, Plan
from attnlab.checker.report import NotRun, Report, build_report
from attnlab.kernels.plugin import NO_INTERPRETER
from attnlab.tasks.engine import Engine, InProcess, Stop, never
from attnlab.tasks.run import Remaining, TaskRun, deadline
from attnlab.tasks.shard import ALL, Shard
from attnlab.tasks.store import Store
from attnlab.tasks.task import Outcome, Task

__all__ = ["NotRun", "Progress", "Report", "check_library"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a check has come.

    - ``step``: "cases" or "shrinking"; ``done``, ``total``: its tasks.
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
        shrinking = plan.shrink_tasks(tasks, run.outcomes)
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
    fields = task.payload.get("case") or task.payload["finding"]["case"]
    return str(fields.get("op", ""))


def is_fault(outcome: Outcome) -> bool:
    """Answer whether a case showed a fault."""
    if outcome.verdict is None:
        return outcome.status in FAULTS
    return any(found["kind"] in KINDS for found in outcome.verdict.get("findings", ()))
