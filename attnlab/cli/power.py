"""The command ``attnlab power``."""

import argparse
from typing import TYPE_CHECKING

from attnlab.case.flags import add_case_flags
from attnlab.case.ops import check_scored
from attnlab.cli.command import Command, case_of_flags, progress, put
from attnlab.cli.sharded import add_engine, add_shard
from attnlab.tasks.run import check_engine

if TYPE_CHECKING:
    from attnlab.case.case import Case
    from attnlab.mutation.power import MutationReport


def _add_flags(parser: argparse.ArgumentParser) -> None:
    place = parser.add_argument_group("where to run it")
    add_engine(place, "default: this process")
    add_shard(place)
    add_case_flags(parser)


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
    from attnlab.cli.sharded import check_flags, print_shard, run_sharded
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


COMMAND = Command(
    name="power",
    purpose="Report which defects a test with the Case's data and tolerance detects.",
    examples=("attnlab power --test-id 'test_contexted_kv_attention[…]'",),
    exit_codes="0 it detects every defect that any data can show, in each kernel; "
    "1 some survive in one; with "
    "--shard, 0 the shard ran, 3 not all of it",
    add_flags=_add_flags,
    run=_run,
    notes="For each defect that survives, the report has the cheapest change of the test that detects it.",
)
