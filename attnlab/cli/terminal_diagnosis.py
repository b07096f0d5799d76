"""What the commands that conclude something print for a person."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnlab.diagnosis.diagnosis import CANDIDATE_COLUMNS, Diagnosis, candidate_cells

if TYPE_CHECKING:
    from attnlab.mutation.power import MutationReport
    from attnlab.study.claims import Finding

_STATUS = {
    "nothing wrong": "green",
    "explained": "yellow",
    "ambiguous": "magenta",
    "unexplained": "red",
    "rejected": "magenta",
}
_OUTCOME = {"killed": "green", "survived": "red", "equivalent": "dim"}
_VERDICT = {"holds": "green", "fails": "red", "cannot be decided": "magenta"}


def show_diagnosis(console: Console, told: Diagnosis, most: int = 60) -> None:
    """Print what explains an output, and the candidates with their sizes, the first ``most``."""
    console.print(f"[{_STATUS[told.status]} bold]{told.status}[/]")
    for sentence in told.sentences():
        console.print(escape(sentence))
    if told.candidates:
        title = "candidates at the failing place: sizes are largest absolute errors"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
        for name in CANDIDATE_COLUMNS:
            table.add_column(name, overflow="fold", no_wrap=name == "candidate")
        for candidate in told.candidates[:most]:
            table.add_row(*map(escape, candidate_cells(candidate)))
        console.print(table)
        if len(told.candidates) > most:
            console.print(f"[dim]and {len(told.candidates) - most} more, all excluded[/]")
    console.print(
        f"[dim]looked at {told.looked_at[0]} of {told.looked_at[1]} rows, {told.seconds:.1f} s[/]"
    )


def show_power(console: Console, told: "MutationReport") -> None:
    """Print which defects a test would notice, and what would make it notice the others."""
    table = Table(box=None, padding=(0, 2))
    for name in (
        "defect",
        "outcome",
        "moves the output by",
        "of what is allowed",
        "cheapest change",
    ):
        table.add_column(name, overflow="fold")
    for one in told.mutants:
        colour = _OUTCOME[one.outcome]
        table.add_row(
            one.name,
            f"[{colour}]{one.outcome}[/]",
            f"{one.effect:.3g}",
            f"{one.margin:.3g}",
            escape(one.remedy_text),
        )
    console.print(table)
    for sentence in told.sentences():
        console.print(escape(sentence))


def show_claims(console: Console, findings: Sequence["Finding"]) -> None:
    """Print the ledger: each claim, its verdict and the evidence."""
    table = Table()
    for name in ("", "claim", "verdict", "evidence"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        claim = finding.claim
        table.add_row(
            claim.number,
            escape(claim.text),
            f"[{_VERDICT[finding.verdict]}]{finding.verdict}[/]",
            escape(finding.reading),
        )
    console.print(table)


def show_bench_diagnose(console: Console, figures: dict[str, Any]) -> None:
    """Print how the diagnosis does on planted defects."""
    table = Table(box=None, padding=(0, 2))
    for name in ("what", "figure"):
        table.add_column(name)
    named, without = figures["named"], figures["without"]
    rows = {
        "planted defects that are visible": figures["trials"],
        "of these distinguishable": figures["distinguishable"],
        "named first, of the distinguishable": f"{figures['top_1']:.1%}",
        "false explanations": len(figures["false_explanations"]),
        "what was named": ", ".join(f"{name} {n}" for name, n in named.items()),
        "with the planted defect left out": ", ".join(f"{n} {k}" for n, k in without.items()),
        "sound runs, and alarms in them": f"{figures['sound']}, {len(figures['alarms'])}",
        "seconds, median and most": f"{figures['median_seconds']:.2f}, "
        f"{figures['most_seconds']:.2f}",
    }
    for name, figure in rows.items():
        table.add_row(name, str(figure))
    console.print(table)
