"""The command ``attnlab merge``."""

import argparse
from pathlib import Path

from attnlab.case.errors import InvalidCase
from attnlab.cli.check_output import CHECK_CODES, add_known, print_report
from attnlab.cli.command import Command


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="the store of a shard; one of each is needed",
    )
    add_known(parser)


def _run(args: argparse.Namespace) -> int:
    from attnlab.checker.known import read_known
    from attnlab.checker.merge import merged_check
    from attnlab.tasks.merge import merged_stores

    header, outcomes = merged_stores(args.dir)
    known = [] if args.known is None else read_known(args.known)
    if header["command"] != "check":
        raise InvalidCase(f"dir must be stores of attnlab check, got {header['command']}")
    report = merged_check(header, outcomes, known)
    print_report(report, args.json)
    return report.exit_code


COMMAND = Command(
    name="merge",
    purpose="Join the stores of a sharded command into one report.",
    arguments="DIR…",
    examples=("attnlab merge shard-1 shard-2 shard-3",),
    exit_codes=CHECK_CODES,
    add_flags=_add_flags,
    run=_run,
    notes="The stores must come from the same command, sources and versions, and every shard must be given "
    "once.\n--json prints the same document as the command that made the stores.",
)
