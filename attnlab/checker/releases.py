"""Check many releases of vLLM in one run."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from attnlab.checker.library import OnProgress, ignore_progress, watching
from attnlab.checker.release_plan import ReleasePlan
from attnlab.checker.release_results import build_table, native_tasks
from attnlab.checker.release_rows import fault_rows
from attnlab.checker.release_table import ReleaseTable
from attnlab.tasks.engine import Engine, Stop, never
from attnlab.tasks.run import TaskRun, deadline
from attnlab.tasks.shard import ALL, Shard
from attnlab.tasks.store import Header, Store
from attnlab.tasks.task import Task


def check_releases(
    plan: ReleasePlan,
    engine: Engine,
    *,
    native: Engine | None = None,
    shard: Shard = ALL,
    out: Path | None = None,
    on_progress: OnProgress = ignore_progress,
    seconds: float | None = None,
    stop: Stop = never,
) -> ReleaseTable:
    """Run the cases of a plan, or a shard of them, and return the table.

    ``native``: an engine of a GPU, which then runs the smallest Case of each fault, too. The other arguments
    are those of :func:`attnlab.checker.library.check_library`.
    """
    began = time.perf_counter()
    all_tasks = plan.tasks()
    header, tasks = plan.header(all_tasks, shard), shard.of(all_tasks)
    is_late = deadline(seconds)
    with contextlib.ExitStack() as stack:
        store = None if out is None else stack.enter_context(Store(out, header))
        run = TaskRun(engine=engine, job=plan.job(), store=store, stop=stop, is_late=is_late)
        run.run(_by_release(tasks), watching("cases", tasks, on_progress))
        _run_rows(run, header, tasks, on_progress)
        if native is not None:
            run.engine, run.job = native, plan.job("cuda")
            on_gpu = native_tasks(header, tasks, run.outcomes)
            run.run(on_gpu, watching("native", on_gpu, on_progress))
    stopped = "the check was interrupted" if stop() else "the time was up"
    return build_table(
        header, tasks, run.outcomes, seconds=time.perf_counter() - began, stopped=stopped
    )


def _run_rows(run: TaskRun, header: Header, tasks: Sequence[Task], on_progress: OnProgress) -> None:
    """Shrink each fault and run its smallest Case in every release, until all rows are decided."""
    while True:
        pending = list(fault_rows(header, tasks, run.outcomes).pending.values())
        if not pending:
            return
        run.run(pending, watching("shrinking", pending, on_progress))
        if any(task.key not in run.outcomes for task in pending):
            return  # interrupted, or the time is up


def _by_release(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks release by release, the longest first: a worker keeps what a release's cases share."""
    order = {version: i for i, version in enumerate(task.payload["library"] for task in tasks)}
    return sorted(tasks, key=lambda task: (order[task.payload["library"]], -task.cost_s))
