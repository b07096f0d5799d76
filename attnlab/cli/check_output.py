"""The flags and the output that ``attnlab check`` and ``attnlab merge`` share."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.cli.output import print_json, show

if TYPE_CHECKING:
    from attnlab.checker.report import Report

CHECK_CODES = (
    "0 all cases ran, without findings; 1 findings that are not in --known, or a finding of --known that "
    "no longer appears;\n  3 no findings, but cases did not run; 128 + n stopped by signal n"
)


def add_scaling(group: Any) -> None:
    """Add the flags of commands that run many tasks: engine, shard, store and times."""
    group.add_argument(
        "--engine",
        metavar="ENGINE",
        help="local or local:N, N worker processes on this machine (default: one per core, or per GPU)",
    )
    add_shard(group)
    group.add_argument(
        "--times",
        type=Path,
        metavar="DIR",
        help="divide the shards by the times in this store; all shards need the same (default: times that "
        "come with attnlab)",
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
