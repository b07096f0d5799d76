"""Run the tasks of a command, or a shard of them, with a store and a progress bar."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.flags import given_fields
from attnlab.case.ops import check_scored
from attnlab.case.output_file import check_output_file, write_text
from attnlab.case.pytest_id import vllm_test_ids
from attnlab.cli import command
from attnlab.cli.command import case_of_flags, notice, print_json, progress, put, runs, show
from attnlab.tasks.run import TaskRun, check_engine, find_engine, interruptible
from attnlab.tasks.store import Header, Shard, Store
from attnlab.tasks.task import InProcess, Job, Outcome, Task

if TYPE_CHECKING:
    from attnlab.case.case import Case
    from attnlab.checker.report import Report
    from attnlab.mutation.power import MutationReport


def run_sharded(
    title: str,
    job: Job,
    tasks: Sequence[Task],
    header: Header,
    shard: Shard,
    out: Path | None,
    engine: str | None = None,
) -> tuple[dict[str, Outcome], int]:
    """Run the tasks of a shard; return the outcomes, and the exit code of a signal or 0."""
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
        raise InvalidCase("out must be given with shard, for attnlab merge")
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


def check_ci_files(args: argparse.Namespace) -> None:
    """Raise InvalidCase if a file of --junit or --sarif cannot be written, before anything runs."""
    for field in ("junit", "sarif"):
        if getattr(args, field) is not None:
            check_output_file(getattr(args, field), field)


def write_ci_files(args: argparse.Namespace, report: "Report") -> None:
    """Write the files of --junit and --sarif, and append to the summary of a CI job."""
    from attnlab.reports.check_pages import append_summary, junit, sarif

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


@runs("power")
def _run(args: argparse.Namespace) -> int:
    case = case_of_flags(args)
    check_scored(case.spec)
    if args.engine is not None:
        check_engine(args.engine)
    if args.out is not None or args.shard != "1/1" or args.engine is not None:
        return _run_tasks(args, case)
    from attnlab.mutation.power import measure_power as power

    with progress("planting defects") as on_step:
        report = power(case, on_step=on_step)
    return print_power(report, args.json)


def _run_tasks(args: argparse.Namespace, case: "Case") -> int:
    """Score the mutants one by one, with a store."""
    from attnlab.checker.case_run import versions
    from attnlab.mutation.power import PowerJob, power_header, power_report, power_tasks

    shard = check_flags(args.shard, args.out)
    tasks, header = power_tasks(case), power_header(case, versions(), shard)
    job = PowerJob(case=case)
    outcomes, code = run_sharded(
        "planting defects", job, tasks, header, shard, args.out, args.engine
    )
    if code or shard.count > 1 or any(one.verdict is None for one in outcomes.values()):
        return print_shard(shard, outcomes, args.json) or code
    seconds = sum(one.seconds for one in outcomes.values())
    return print_power(power_report(case, outcomes, seconds), args.json)


def print_power(report: "MutationReport", as_json: bool) -> int:
    """Print a report and return the exit code."""
    put(report, as_json)
    return 1 if report.survivors else 0


_ID = re.compile(r"\w+\[.*\]")
_COLLECT_S = 600  # pytest imports vLLM


def read_ids(words: Sequence[str], standard_input: Iterable[str]) -> list[str]:
    """Return the test ids that words name, without repetitions.

    A word is an id, a pytest node that ends with one, a file with one of these per line, "-" for standard
    input, or a test file, whose ids pytest collects. Raises InvalidCase for anything else, and Unavailable
    if pytest cannot collect a test file.
    """
    found: list[str] = []
    for word in words:
        if _ID.search(word):
            found.append(_id_of(word))
        elif word == "-":
            found += [_id_of(line) for line in standard_input if line.strip()]
        elif Path(word).suffix == ".py" and Path(word).is_file():
            found += _collected(Path(word))
        elif Path(word).is_file():
            lines = Path(word).read_text(errors="replace").splitlines()
            found += [_id_of(line) for line in lines if line.strip()]
        else:
            raise InvalidCase(
                f"id must be a test id, a file of ids, a test file or -, got {word!r}"
            )
    if not found:
        raise InvalidCase("id must name at least one test, got none")
    return list(dict.fromkeys(found))


def _id_of(line: str) -> str:
    """Return the id in a line of pytest, such as tests/test_a.py::test_b[c]."""
    match = _ID.search(line)
    if match is None:
        raise InvalidCase(f"id must be like test_name[…], got {line.strip()!r}")
    return match[0]


def _collected(file: Path) -> list[str]:
    """Return the ids that pytest collects from a test file."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(file)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_COLLECT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pytest collects no tests from {file} in {_COLLECT_S} s") from error
    found = [_id_of(line) for line in done.stdout.splitlines() if "::" in line and _ID.search(line)]
    if not found:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
        raise Unavailable(f"pytest collects no test with parameters from {file}: {lines[-1]}")
    return found


@runs("matrix", fields=FIELDS)
def _run_matrix(args: argparse.Namespace) -> int:
    changes = given_fields(args, FIELDS)
    for name, value in changes.items():
        field_type(name).check(name, value)
    if args.engine is not None:
        check_engine(args.engine)
    command.check_share_flags(args)
    if args.junit is not None:
        check_output_file(args.junit, "junit")
    if args.source is not None and changes.get("backend") not in ("vllm", "rocm", "cuda"):
        raise InvalidCase(
            "source must be given with --backend vllm, rocm or cuda, got "
            f"{changes.get('backend', 'model')}"
        )
    shard = check_flags(args.shard, args.out)
    ids = read_ids(args.ids, sys.stdin) if args.ids else vllm_test_ids()

    from attnlab.checker.matrix import matrix_header, matrix_job, matrix_table, matrix_tasks

    job = matrix_job(changes, args.source, args.device)
    tasks = matrix_tasks(ids, changes)
    header = matrix_header(ids, changes, job.versions, shard)
    engine = args.engine or (None if job.device == "cuda" or len(tasks) == 1 else "local")
    outcomes, code = run_sharded("running the ids", job, tasks, header, shard, args.out, engine)
    if shard.count > 1:
        return print_shard(shard, outcomes, args.json) or code
    table = matrix_table(
        ids, [(one, outcomes.get(one.key)) for one in tasks], changes, job.versions["backend"]
    )
    if args.junit is not None:
        write_text(args.junit, table.junit())
    command.share(args, table, draw=lambda pages: pages.matrix_pictures(table))
    put(table, args.json)
    return code or table.exit_code
