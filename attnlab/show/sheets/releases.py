"""Sheet of the faults of many releases."""

from typing import TYPE_CHECKING

from attnlab.show.sheets.sheet import Grid, Part, Row, Sheet, Words

if TYPE_CHECKING:
    from attnlab.checker.release_table import ReleaseTable


def release_table(one: "ReleaseTable") -> Sheet:
    """Return a row per fault with its first and last release, and what did not run."""
    count = "1 fault" if len(one.faults) == 1 else f"{len(one.faults)} faults"
    line = (
        f"{one.releases[0]} to {one.releases[-1]}: {count} in {len(one.releases)} releases; "
        f"{one.cases_run} cases in {one.seconds:.0f} s"
    )
    is_native_tried = any(fault.native for fault in one.faults)
    rows: list[Row] = [
        [
            fault.finding.op,
            fault.finding.kind,
            fault.finding.title,
            fault.releases[0],
            fault.releases[-1],
            len(fault.releases),
            *([fault.is_native] if is_native_tried else []),
        ]
        for fault in one.faults
    ]
    parts: list[Part] = []
    if rows:
        columns = ["op", "kind", "diagnosis", "first", "last", "releases"]
        columns += ["on a GPU"] if is_native_tried else []
        parts.append(Grid(columns, rows, "faults", most=len(rows)))
    if one.not_run:
        lines: list[Row] = [[entry.op, entry.cases, entry.reason] for entry in one.not_run]
        parts.append(Grid(["release and op", "cases", "reason"], lines, "not run"))
    tone = {0: "good", 3: "warn"}.get(one.exit_code, "bad")
    return Sheet(
        kind="ReleaseTable",
        line=f"<ReleaseTable: {line}>",
        head=Words(line, tone),  # type: ignore[arg-type]
        parts=parts,
    )
