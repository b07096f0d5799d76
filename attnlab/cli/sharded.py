"""Run the tasks of a command, or a shard of them, with a store and a progress bar."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnlab.case.errors import InvalidCase
from attnlab.cli.output import notice, print_json, progress
from attnlab.tasks.engine import InProcess
from attnlab.tasks.engines import find_engine
from attnlab.tasks.interrupts import interruptible
from attnlab.tasks.run import TaskRun
from attnlab.tasks.shard import Shard
from attnlab.tasks.store import Header, Store
from attnlab.tasks.task import Job, Outcome, Task


def run_sharded(
    title: str,
    job: Job,
    tasks: Sequence[Task],
    header: Header,
    shard: Shard,
    out: Path | None,
    engine: str | None = None,
) -> tuple[dict[str, Outcome], int]:
    """Run the tasks of a shard; return the outcomes, and the exit code of a signal or 0.

    ``header``: that of the shard's store; ``engine``: a name, None for this process.
    """
    chosen = shard.of(tasks)
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(interruptible())
        on_step = stack.enter_context(progress(title))
        found = InProcess() if engine is None else find_engine(engine, job.device, interrupt)
        workers = stack.enter_context(found)
        store = None if out is None else stack.enter_context(Store(out, header))
        run = TaskRun(engine=workers, job=job, store=store, stop=interrupt)
        count = iter(range(1, len(chosen) + 1))
        run.run(chosen, lambda outcome: on_step(title, next(count), len(chosen)))
    if interrupt():
        notice("interrupted")
    return run.outcomes, interrupt.exit_code


def check_flags(shard: str, out: Path | None) -> Shard:
    """Return the shard of --shard. Raises InvalidCase if its outcomes would be lost."""
    parsed = Shard.parse(shard)
    if parsed.count > 1 and out is None:
        raise InvalidCase("out must be given with shard, for attnlab merge", field="out")
    return parsed


def print_shard(shard: Shard, outcomes: Mapping[str, Outcome], as_json: bool) -> int:
    """Print what a shard ran; return 3 if a task has no verdict, else 0."""
    failed = {key: one.text for key, one in outcomes.items() if one.verdict is None}
    if as_json:
        print_json({"shard": str(shard), "tasks": len(outcomes), "failed": failed})
    else:
        print(f"shard {shard}: {len(outcomes)} tasks, {len(failed)} without a verdict")
        for key, text in failed.items():
            print(f"  {key}: {text}")
    return 3 if failed else 0
