"""The command ``attnlab merge``."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnlab.case.errors import InvalidCase
from attnlab.cli.command import put, runs
from attnlab.cli.releases import check_page, print_table
from attnlab.cli.sharded import (
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


@runs("merge")
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
    from attnlab.checker.report import merged_check

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
