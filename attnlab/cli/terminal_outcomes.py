"""What ``attnlab investigate`` prints: how each notebook ended, and what changed since a baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnlab.show.notebook import as_text

if TYPE_CHECKING:
    from attnlab.reports.baseline import Change
    from attnlab.reports.notebook_result import Outcome, Results

_COLOURS = {"passed": "green", "unavailable": "yellow", "interrupted": "yellow"}


def show_outcomes(console: Console, results: "Results", reports: Path) -> None:
    """Print how each notebook ended, with its verdicts, and where the reports are."""
    table = Table()
    for name in ("notebook", "verdict", "expected", "found"):
        table.add_column(name, overflow="fold")
    for outcome in results:
        _add_outcome(table, outcome)
    console.print(table)
    if results.changes is not None:
        _show_changes(console, results.changes, results.baseline)
    verdicts = [verdict for outcome in results for verdict in outcome.verdicts]
    right = sum(verdict.ok for verdict in verdicts)
    passed = sum(outcome.status == "passed" for outcome in results)
    lacking = sum(outcome.status == "unavailable" for outcome in results)
    unavailable = f", {lacking} cannot run here" if lacking else ""
    console.print(
        f"{passed} of {results.total} notebooks passed{unavailable}, "
        f"{right} of {len(verdicts)} verdicts as expected"
    )
    console.print(f"reports: {reports / 'index.html'}", soft_wrap=True)


def _add_outcome(table: Table, outcome: "Outcome") -> None:
    colour = _COLOURS.get(outcome.status, "red")
    table.add_section()
    head = f"[{colour}]{outcome.status}[/] in {outcome.seconds:.0f} s"
    table.add_row(f"[bold]{escape(outcome.name)}[/]", head)
    for verdict in outcome.verdicts:
        found = escape(as_text(verdict.found))
        table.add_row(
            "",
            escape(verdict.name),
            escape(as_text(verdict.expected)),
            f"[green]{found}[/]" if verdict.ok else f"[red]{found}[/]",
        )
    if outcome.message:
        table.add_row("", f"[{colour}]{escape(outcome.message)}[/]")


def _show_changes(console: Console, changes: Sequence["Change"], baseline: str) -> None:
    """Print what changed since the baseline, losses in red."""
    if not changes:
        console.print(f"nothing changed since {escape(baseline)}", soft_wrap=True)
        return
    table = Table(title=f"since {escape(baseline)}", title_justify="left")
    for name in ("notebook", "verdict", "is", "before", "now"):
        table.add_column(name, overflow="fold")
    for change in changes:
        colour = "red" if change.is_loss else "green" if change.kind == "fixed" else "default"
        table.add_row(
            escape(change.notebook),
            escape(change.verdict),
            f"[{colour}]{change.kind}[/]",
            escape(as_text(change.before)),
            escape(as_text(change.after)),
        )
    console.print(table)
