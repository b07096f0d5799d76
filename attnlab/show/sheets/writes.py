"""Sheet of a report of cache writes."""

from typing import TYPE_CHECKING

from attnlab.show.sheets.sheet import Facts, Grid, Row, Sheet, Tone, Words

if TYPE_CHECKING:
    from attnlab.lab.writes.write_report import WriteReport

_TONES: dict[str, Tone] = {
    "match": "good",
    "mismatch": "bad",
    "failed": "bad",
    "unavailable": "odd",
}


def write_report(one: "WriteReport") -> Sheet:
    """Return a row for each hostile write."""
    rows: list[Row] = []
    for result in one.results:
        wrong = ", ".join(f"{count} {kind}" for kind, count in result.wrong.items())
        rows.append(
            [result.name, Words(result.status, _TONES[result.status]), result.error or wrong]
        )
    head = f"{len(one.findings)} findings in {len(one.results)} writes"
    columns = ["write", "result", "wrong"]
    return Sheet(
        kind="Cache writes",
        line=f"<WriteReport: {head}>",
        head=Words(head, "bad" if one.findings else "good"),
        parts=[Facts([("ops", one.backend)]), Grid(columns, rows, most=len(rows))],
    )
