"""The command ``attnlab merge``."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.errors import InvalidCase
from attnlab.cli.command import Command, put
from attnlab.cli.releases import add_page, check_page, print_table
from attnlab.cli.sharded import (
    CHECK_CODES,
    add_ci_files,
    add_known,
    check_ci_files,
    print_power,
    print_report,
    print_shard,
    write_ci_files,
)

if TYPE_CHECKING:
    from attnlab.tasks.task import Outcome

Outcomes = Mapping[str, "Outcome"]
# Flags, and the command whose stores they need.
_OWNERS = {
    "known": ("check",),
    "junit": ("check",),
    "sarif": ("check",),
    "page": ("releases", "atlas"),
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="the store of a shard; one of each is needed",
    )
    add_known(parser)
    add_ci_files(parser)
    add_page(parser)


def _run(args: argparse.Namespace) -> int:
    from attnlab.tasks.store import merged_stores

    check_ci_files(args)
    check_page(args)
    header, outcomes = merged_stores(args.dir)
    command = header["command"]
    for field, owners in _OWNERS.items():
        if getattr(args, field) is not None and command not in owners:
            raise InvalidCase(f"{field} must not be given with {command}", field=field)
    runs = {
        "check": _check,
        "power": _power,
        "releases": _releases,
        "atlas": _releases,
        "matrix": _matrix,
    }
    run = runs.get(command)
    if run is None:
        raise InvalidCase(f"dir must be stores that merge can join, got {command}")
    return run(args, header, outcomes)


def _check(args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes) -> int:
    from attnlab.checker.finding import read_known
    from attnlab.checker.library import merged_check

    known = [] if args.known is None else read_known(args.known)
    report = merged_check(header, outcomes, known)
    write_ci_files(args, report)
    print_report(report, args.json)
    return report.exit_code


def _releases(args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes) -> int:
    from attnlab.checker.atlas import merged_atlas
    from attnlab.checker.releases import merged_releases

    merged = {"releases": merged_releases, "atlas": merged_atlas}
    table = merged[header["command"]](header, outcomes)
    print_table(args, table)
    return table.exit_code


def _power(args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes) -> int:
    from attnlab.case.case import Case
    from attnlab.mutation.power import power_report, power_tasks
    from attnlab.tasks.store import ALL
    from attnlab.tasks.task import NOT_RUN, Outcome

    case = Case.from_dict(header["case"])
    found = {
        task.key: outcomes.get(task.key)
        or Outcome(key=task.key, status=NOT_RUN, text="its shard was stopped before")
        for task in power_tasks(case)
    }
    if any(one.verdict is None for one in found.values()):
        return print_shard(ALL, found, args.json)
    seconds = sum(one.seconds for one in found.values())
    return print_power(power_report(case, found, seconds), args.json)


def _matrix(args: argparse.Namespace, header: dict[str, Any], outcomes: Outcomes) -> int:
    from attnlab.checker.matrix import merged_matrix

    table = merged_matrix(header, outcomes)
    put(table, args.json)
    return table.exit_code


COMMAND = Command(
    name="merge",
    purpose="Join the stores of a sharded command into one report.",
    arguments="DIR…",
    examples=("attnlab merge shard-1 shard-2 shard-3",),
    exit_codes=f"{CHECK_CODES}\n  (of check; of power, those of power)",
    add_flags=_add_flags,
    run=_run,
    notes="The stores must come from the same command, sources and versions, and every shard must be given "
    "once.\n--json prints the same document as the command that made the stores.",
)
