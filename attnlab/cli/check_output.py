"""The flags and the output that ``attnlab check`` and ``attnlab merge`` share."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.output_file import check_output_file, write_text
from attnlab.cli.output import print_json, show

if TYPE_CHECKING:
    from attnlab.checker.report import Report

CHECK_CODES = (
    "0 all cases ran, without findings; 1 findings that are not in --known, or a finding of --known that "
    "no longer appears;\n  3 no findings, but cases did not run; 128 + n stopped by signal n"
)


def add_scaling(group: Any) -> None:
    """Add the flags of commands that run many tasks: engine, shard, store and times."""
    add_engine(group, "default: local, one per core, or per GPU")
    add_shard(group)
    group.add_argument(
        "--times",
        type=Path,
        metavar="DIR",
        help="divide the shards by the times in this store; all shards need the same (default: times that "
        "come with attnlab)",
    )


def add_engine(group: Any, default: str) -> None:
    """Add --engine; ``default`` describes what runs the tasks without it."""
    group.add_argument(
        "--engine",
        metavar="ENGINE",
        help="local or local:N, N worker processes on this machine; ray, a Ray cluster: that of RAY_ADDRESS, "
        f"or a local one that is started; ray://HOST:PORT, another ({default})",
    )


def add_shard(group: Any) -> None:
    """Add --shard and --out."""
    group.add_argument(
        "--shard",
        default="1/1",
        metavar="I/N",
        help="run only part I of N; attnlab merge joins the stores of all parts",
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="keep each verdict in this folder as it arrives; the same command continues there",
    )


def add_known(group: Any) -> None:
    """Add --known."""
    group.add_argument(
        "--known",
        type=Path,
        metavar="FILE",
        help="expected findings, which do not count: one OP KIND [DIAGNOSIS] LINK per line, or JSON",
    )


def add_ci_files(group: Any) -> None:
    """Add --junit and --sarif."""
    group.add_argument(
        "--junit",
        type=Path,
        metavar="FILE",
        help="JUnit XML: a test suite per op, a test case per kind of fault",
    )
    group.add_argument(
        "--sarif",
        type=Path,
        metavar="FILE",
        help="SARIF 2.1.0 for code scanning: each finding with its file and line",
    )


def check_ci_files(args: argparse.Namespace) -> None:
    """Raise InvalidCase if a file of --junit or --sarif cannot be written, before anything runs."""
    for field in ("junit", "sarif"):
        if getattr(args, field) is not None:
            check_output_file(getattr(args, field), field)


def write_ci_files(args: argparse.Namespace, report: "Report") -> None:
    """Write the files of --junit and --sarif, and append to the summary of a CI job."""
    from attnlab.reports.check_junit import junit
    from attnlab.reports.check_sarif import sarif
    from attnlab.reports.check_summary import append_summary

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
