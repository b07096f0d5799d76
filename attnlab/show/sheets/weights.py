"""Sheet of an XRay."""

from typing import TYPE_CHECKING

from attnlab.show.sheets.sheet import Facts, Grid, Lines, Part, Row, Sheet, Tone, Words

if TYPE_CHECKING:
    from attnlab.weights.xray import XRay

_STATUS: dict[str, Tone] = {
    "right": "good",
    "precision": "warn",
    "described": "bad",
    "undecided": "odd",
    "unreadable": "odd",
}


def xray(one: "XRay") -> Sheet:
    """Return the conclusion, the fitted law, and the sums of the rows that are wrong."""
    setup, wrong = one.setup, one.wrong
    rows: list[Row] = []
    for index in wrong.any(1).nonzero().flatten().tolist():
        sums = one.weights[index].sum(-1)
        least, most = float(sums.min()), float(sums.max())
        text = (
            f"{least:.4g}" if most - least < 1e-4 or most != most else f"{least:.4g} to {most:.4g}"
        )
        rows.append(
            [
                int(setup.rows[index]),
                int(setup.seq[index]),
                int(setup.position[index]),
                setup.kernels[index],
                f"{int(wrong[index].sum())} of {len(setup.heads)}",
                text,
            ]
        )
    columns = ["row", "sequence", "position", "kernel", "wrong heads", "sum of weights"]
    parts: list[Part] = [Lines(list(one.sentences)), Facts(_facts(one))]
    if rows:
        parts.append(Grid(columns, rows, "rows with wrong weights", most=8))
    return Sheet(
        kind="XRay",
        line=f"<XRay: {one.status}>",
        head=Words(one.status, _STATUS[one.status]),
        parts=parts,
    )


def _facts(one: "XRay") -> list[tuple[str, str]]:
    """Return the backend, and the fit of the log weights."""
    facts = [("backend", one.backend)]
    if one.law is not None:
        facts.append(
            (
                "log weight",
                f"{one.law.score:.4g} ± {one.law.score_error:.1g} × score, "
                f"spread {one.law.spread:.2g} ({one.law.count} weights)",
            )
        )
    return [*facts, ("seconds", f"{one.seconds:.2f}")]
