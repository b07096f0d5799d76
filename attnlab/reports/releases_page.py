"""The page of ``attnlab releases``: a row per fault, a column per release."""

import re
import shlex
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from attnlab.case.output_file import write_text
from attnlab.checker.finding import KINDS
from attnlab.checker.release_table import FINDING, STATES, Fault, ReleaseTable
from attnlab.reports.pages import render_page

SIGNS = {"finding": "●", "sound": "·", "other fault": "○", "absent": "", "not run": "?"}
NATIVE_SIGNS = {"yes": "✓", "no": "✗", "not runnable": "–", "not tried": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fault as the page shows it.

    ``spans``: the releases that have it, as ranges without gaps; ``kind``: in words; ``command``: runs its
    smallest case in the first release.
    """

    number: int
    fault: Fault
    spans: str
    kind: str
    command: str


def write_releases(path: Path, table: ReleaseTable) -> None:
    """Write the table as one self-contained HTML page."""
    rows = [_row(table, number, fault) for number, fault in enumerate(table.faults, 1)]
    by_op = [(op, [*group]) for op, group in groupby(rows, lambda row: row.fault.finding.op)]
    page = render_page(
        "releases.html.j2",
        title=f"Faults of vLLM's attention ops, {table.releases[0]} to {table.releases[-1]}",
        table=table,
        rows=rows,
        by_op=by_op,
        minors=[(name, [*group]) for name, group in groupby(table.releases, _minor)],
        signs=SIGNS,
        native_signs=NATIVE_SIGNS,
        is_native_tried=any(fault.native for fault in table.faults),
        states=STATES,
        command=shlex.join(["attnlab", *sys.argv[1:]]),
    )
    write_text(path, page)


def _row(table: ReleaseTable, number: int, fault: Fault) -> Row:
    finding, first = fault.finding, fault.releases[0]
    source = f" --source $(attnlab fetch --ops {first})" if finding.case.backend == "vllm" else ""
    return Row(
        number=number,
        fault=fault,
        spans=spans(table.releases, fault),
        kind=KINDS[finding.kind],
        command=finding.case.to_cli() + source,
    )


def spans(releases: list[str], fault: Fault) -> str:
    """Return the releases that have a fault as ranges, such as "0.9.0 to 0.11.2, 0.30.0"."""
    parts = []
    for has_fault, group in groupby(releases, lambda version: fault.cells[version] == FINDING):
        found = [*group]
        if has_fault:
            parts.append(found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}")
    return ", ".join(parts)


def _minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(re.findall(r"\d+", version)[:2])
