"""Sheet of a run of the notebooks: their verdicts, and the changes since a baseline."""

from collections.abc import Sequence

from attnlab.reports.baseline import Change
from attnlab.reports.notebook_result import Outcome, Results
from attnlab.show.notebook import as_text
from attnlab.show.sheets.sheet import Grid, Lines, Part, Row, Sheet, Tone, Words
from attnlab.show.sheets.verdicts import row

_STATUS: dict[str, Tone] = {"passed": "good", "unavailable": "warn", "interrupted": "warn"}


def results(one: Results) -> Sheet:
    """Return a row for each notebook and each of its verdicts, and the changes since the baseline."""
    verdicts = [verdict for outcome in one for verdict in outcome.verdicts]
    right = sum(verdict.ok for verdict in verdicts)
    passed = sum(outcome.status == "passed" for outcome in one)
    unavailable = sum(outcome.status == "unavailable" for outcome in one)
    cannot = f", {unavailable} cannot run here" if unavailable else ""
    summary = (
        f"{passed} of {one.total} notebooks passed{cannot}, "
        f"{right} of {len(verdicts)} verdicts as expected"
    )
    rows = [line for outcome in one for line in _outcome_rows(outcome)]
    columns = ["notebook", "verdict", "expected", "found"]
    parts: list[Part] = [Grid(columns, rows, most=len(rows))] if rows else []
    return Sheet(
        kind="Notebooks",
        line=f"<Results: {summary}>",
        head=Words(summary, "good" if one.ok else "bad"),
        parts=[*parts, *_changes(one.changes, one.baseline)],
    )


def _outcome_rows(outcome: Outcome) -> list[Row]:
    tone = _STATUS.get(outcome.status, "bad")
    status = f"{outcome.status} in {outcome.seconds:.0f} s"
    rows: list[Row] = [[Words(outcome.name), Words(status, tone), "", ""]]
    rows += [["", *row(verdict)] for verdict in outcome.verdicts]
    if outcome.message:
        rows.append(["", Words(outcome.message, tone), "", ""])
    return rows


def _changes(changes: Sequence[Change] | None, baseline: str) -> list[Part]:
    """Return the changes since a baseline; nothing if there is no baseline."""
    if changes is None:
        return []
    if not changes:
        return [Lines([f"no change since {baseline}"])]
    rows: list[Row] = [
        [
            change.notebook,
            change.verdict,
            Words(change.kind, "bad" if change.is_loss else ""),
            as_text(change.before),
            as_text(change.after),
        ]
        for change in changes
    ]
    columns = ["notebook", "verdict", "change", "before", "now"]
    return [Grid(columns, rows, f"changes since {baseline}", most=len(rows))]
