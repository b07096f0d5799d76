"""Run the tasks of a command, or a shard of them, with a store and a progress bar."""

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.errors import InvalidCase
from attnlab.case.flags import flag
from attnlab.case.output_file import check_output_file, write_text
from attnlab.cli.command import notice, print_json, progress, show
from attnlab.tasks.interrupts import interruptible
from attnlab.tasks.run import TaskRun, find_engine
from attnlab.tasks.store import Header, Shard, Store
from attnlab.tasks.task import InProcess, Job, Outcome, Task

if TYPE_CHECKING:
    from attnlab.checker.report import Report


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


# The flags and the output that ``attnlab check`` and ``attnlab merge`` share.

CHECK_CODES = (
    "0 all cases ran, without findings; 1 findings that are not in --known, or a finding of --known that "
    "no longer appears;\n  3 no findings, but cases did not run; 128 + n stopped by signal n"
)


def add_scaling(group: Any) -> None:
    """Add the flags of commands that run many tasks: engine, shard, store and times."""
    add_engine(group, "default: local, one per core; on GPUs as many as their memory allows")
    add_shard(group)
    flag(
        group,
        "--times DIR",
        "divide the shards by the times in this store; all shards need the same (default: times that "
        "come with attnlab)",
    )


def add_engine(group: Any, default: str) -> None:
    """Add --engine; ``default`` describes what runs the tasks without it."""
    flag(
        group,
        "--engine ENGINE",
        "local or local:N, N worker processes on this machine; ray, a Ray cluster: that of RAY_ADDRESS, "
        f"or a local one that is started; ray://HOST:PORT, another ({default})",
    )


def add_shard(group: Any) -> None:
    """Add --shard and --out."""
    flag(
        group,
        "--shard I/N",
        "run only part I of N; attnlab merge joins the stores of all parts",
        default="1/1",
    )
    flag(
        group,
        "--out DIR",
        "keep each verdict in this folder as it arrives; the same command continues there",
    )


def add_known(group: Any) -> None:
    """Add --known."""
    flag(
        group,
        "--known FILE",
        "expected findings, which do not count: one OP KIND [DIAGNOSIS] LINK per line, or JSON",
    )


def add_ci_files(group: Any) -> None:
    """Add --junit and --sarif."""
    flag(group, "--junit FILE", "JUnit XML: a test suite per op, a test case per kind of fault")
    flag(
        group, "--sarif FILE", "SARIF 2.1.0 for code scanning: each finding with its file and line"
    )


def check_ci_files(args: argparse.Namespace) -> None:
    """Raise InvalidCase if a file of --junit or --sarif cannot be written, before anything runs."""
    for field in ("junit", "sarif"):
        if getattr(args, field) is not None:
            check_output_file(getattr(args, field), field)


def write_ci_files(args: argparse.Namespace, report: "Report") -> None:
    """Write the files of --junit and --sarif, and append to the summary of a CI job."""
    from attnlab.reports.check_files import append_summary, junit, sarif

    if args.junit is not None:
        write_text(args.junit, junit(report))
    if args.sarif is not None:
        write_text(args.sarif, json.dumps(sarif(report), indent=1) + "\n")
    append_summary(report)


def print_report(report: "Report", as_json: bool, page: Path | None = None) -> None:
    """Print a report; as text, its last line names what did not run. ``page``: that of --pictures."""
    if as_json:
        print_json({**report.to_dict(), **({} if page is None else {"pictures": str(page)})})
        return
    show(report)
    if page is not None:
        print(f"pictures: {page}")
    if report.not_run:
        print(f"not run: {'; '.join(report.warnings())}")
