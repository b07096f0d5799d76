"""Sheets of replays."""

from typing import TYPE_CHECKING

from attnlab.replay.replay_call import CANNOT_RUN, MATCH, MISMATCH, REJECTED, UNSTABLE
from attnlab.show.sheets.sheet import Facts, Grid, Lines, Part, Row, Sheet, Tone, Words

if TYPE_CHECKING:
    from attnlab.replay.probe import Probe, Variation
    from attnlab.replay.replay_call import Difference, Replay, Replays
    from attnlab.replay.shrinking import Shrunk

_TONES: dict[str, Tone] = {
    **{MATCH: "good", MISMATCH: "bad", UNSTABLE: "bad"},
    **{REJECTED: "odd", CANNOT_RUN: "quiet"},
}
_COLUMNS = ("target", "kernels", "verdict", "beyond rounding", "largest error", "recorded bits")


def replays(one: "Replays") -> Sheet:
    """Return what each backend made of a call, one row each."""
    tone: Tone = "good" if one.exit_code == 0 else "bad" if one.exit_code == 1 else "warn"
    facts: list[tuple[str, str]] = [("op", one.op), ("recorded on", one.origin)]
    if one.recorded_error is not None:
        facts.append(("recorded output", f"{one.recorded}: {_beyond(one.recorded_error)}"))
    else:
        facts.append(("recorded output", one.recorded))
    parts: list[Part] = [
        Facts(facts),
        Grid(_COLUMNS, [_row(each) for each in one.replays], most=len(one.replays)),
    ]
    if one.assumed:
        parts.append(Lines([Words(f"assumed: {text}", "quiet") for text in one.assumed]))
    return Sheet(
        kind="Replays",
        line=f"<Replays of {one.call}: {one.sentence()}>",
        head=Words(one.sentence(), tone),
        parts=parts,
    )


def _row(one: "Replay") -> Row:
    verdict = Words(one.status, _TONES[one.status])
    kernels = "" if one.backend == one.target else one.backend  # a function's name is both
    if one.error is None:
        return [one.target, kernels, verdict, one.reason, "", ""]
    error = one.error
    size = f"{error.largest:.3g}, {error.in_bounds:.3g} bounds"
    return [one.target, kernels, verdict, _beyond(error), size, _bits(one.from_recorded)]


def _beyond(error: "Difference") -> str:
    """Return how many elements and rows are beyond rounding."""
    if not error.elements:
        return "none"
    return f"{error.elements} of {error.total}, in {error.rows} of {error.num_rows} rows"


def _bits(found: "Difference | None") -> str:
    """Return how an output agrees with the recorded one."""
    if found is None:
        return "unknown"
    if not found.other_bits:
        return "the same"
    return f"{found.other_bits} differ, by up to {found.in_bounds:.3g} bounds"


def shrunk(one: "Shrunk") -> Sheet:
    """Return the sizes of a call before and after shrinking, and the steps."""
    rows: list[Row] = [[name, size, one.after[name]] for name, size in one.before.items()]
    first, *others = one.sentences()
    parts: list[Part] = [Lines([first, *others])]
    if one.is_failing:
        parts.append(Grid(("size", "before", "after"), rows, most=len(rows)))
    if one.steps:
        parts.append(Grid(("steps",), [[step] for step in one.steps], most=4))
    return Sheet(
        kind="Shrunk",
        line=f"<Shrunk: {one.status}, {one.after['rows']} rows of {one.before['rows']}>",
        head=Words(one.status, _TONES[one.status]),
        parts=parts,
    )


def probe(one: "Probe") -> Sheet:
    """Return what the variations of a call changed."""
    columns = ("variation", "changed bits", "largest change", "wrong elements")
    tone: Tone = "bad" if one.is_wrong else "good"
    return Sheet(
        kind="Probe",
        line=f"<Probe: {one.conclusion}>",
        head=Words(one.verdict, tone),
        parts=[
            Lines([one.conclusion]),
            Facts(
                [
                    ("kernels", one.backend),
                    ("first run", f"wrong: {_beyond(one.error)}"),
                    ("recorded bits", _bits(one.from_recorded)),
                ]
            ),
            Grid(columns, [_variation(each) for each in one.variations], most=16),
        ],
    )


def _variation(one: "Variation") -> Row:
    if one.change is None:
        return [one.name, Words(f"cannot run: {one.reason}", "quiet"), "", ""]
    change = one.change
    bits = f"{change.other_bits} of {change.total} elements" if change.other_bits else "none"
    size = f"{change.in_bounds:.3g} bounds" if change.other_bits else ""
    return [one.name, bits, size, one.wrong or "none"]
