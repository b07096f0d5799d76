"""Sheets of the results of a run: Violations, ErrorMap, Result, StageTable and DecodedError."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlab.show.sheets.inputs import describe, sizes
from attnlab.show.sheets.sheet import (
    Cell,
    Command,
    Facts,
    Folded,
    Grid,
    Lines,
    Part,
    Row,
    Sheet,
    Tone,
    Value,
    Words,
)

if TYPE_CHECKING:
    from attnlab.contracts.violation import Violation, Violations
    from attnlab.diagnosis.other_run import OtherRun
    from attnlab.lab.decode_error import DecodedError
    from attnlab.lab.error_answer import ErrorAnswer
    from attnlab.lab.error_map import ErrorMap, Place
    from attnlab.lab.result import Result
    from attnlab.lab.stage_table import Cell as StageCell
    from attnlab.lab.stage_table import StageTable

STATUS: dict[str, Tone] = {"match": "good", "mismatch": "bad", "rejected": "odd"}
_EFFECT: dict[str, Tone] = {"rejected": "odd", "silent": "bad", "harmless": "quiet"}


def violations(found: "Violations") -> Sheet:
    """Return a row for each violation."""
    count = _count(len(found), "violation", "violations")
    kinds = ", ".join(dict.fromkeys(f"{one.effect} {one.kind}" for one in found))
    return Sheet(
        kind="Violations",
        line=f"<Violations: {count}{': ' + kinds if kinds else ''}>",
        head=Words(count if found else "none", "bad" if is_serious(found) else "good"),
        parts=[_violation_grid(found)] if found else [],
    )


def is_serious(found: Sequence["Violation"]) -> bool:
    """Return whether any violation can change the output."""
    return any(one.effect != "harmless" for one in found)


def _violation_grid(found: Sequence["Violation"], title: str = "") -> Grid:
    rows: list[Row] = [
        [Words(one.effect, _EFFECT[one.effect]), one.subject, one.text] for one in found
    ]
    return Grid(["effect", "subject", "violation"], rows, title)


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def errors(one: "ErrorMap") -> Sheet:
    """Return the number of wrong elements and their errors, in total and for each sequence."""
    count = f"{one.mismatched} of {one.total} elements differ by more than {_allowed(one)}"
    return Sheet(
        kind="ErrorMap",
        line=f"<ErrorMap: {count}, largest {one.greatest_abs.value:.4g}>",
        head=Words(count, "bad" if one.mismatched else "good"),
        parts=[Facts(_error_facts(one)), _seq_grid(one)],
    )


def _allowed(one: "ErrorMap") -> str:
    """Return the tolerance as text."""
    bound = f"the rounding bound of each element (at most {one.atol:.2g})"
    relative = f" + {one.rtol:g} × |expected|" if one.rtol else ""
    return (bound if one.is_derived else f"{one.atol:g}") + relative


def beyond_rounding(one: "Result") -> str:
    """Return how many elements rounding does not explain, and what the tolerance makes of them."""
    assert one.errors is not None
    beyond, mismatched = one.beyond_rounding, one.errors.mismatched
    note = ""
    if mismatched and not beyond:
        note = "; rounding explains every mismatch"
    elif beyond and not mismatched:
        note = "; the tolerance accepts them"
    return f"{beyond} of {one.errors.total}{note}"


def _error_facts(one: "ErrorMap") -> list[tuple[str, Cell]]:
    facts: list[tuple[str, Cell]] = [
        (f"largest {name} error", f"{greatest.value:.4g} at {greatest.index}")
        for name, greatest in (("absolute", one.greatest_abs), ("relative", one.greatest_rel))
    ]
    if one.first_index is not None:
        facts.append(("first mismatch", str(one.first_index)))
    if one.nan_elements:
        facts.append(("NaN", Words(f"{one.nan_elements} elements", "bad")))
    for name, span in (("heads", one.heads), ("rows", one.rows)):
        if span is not None:
            facts.append((f"{name} that ran", f"{span.start} to {span.stop - 1}"))
    return facts


def _seq_grid(one: "ErrorMap") -> Grid:
    """Return a row for each sequence: wrong rows, wrong elements and the largest error."""
    lens = one.lengths
    wrong = one.mismatches.sum(1).split(list(lens.query_lens))
    rows: list[Row] = []
    for seq, (elements, error) in enumerate(zip(wrong, one.seq_error(), strict=True)):
        wrong_rows, count = int((elements > 0).sum()), int(elements.sum())
        size = "not run" if error == float("-inf") else f"{error:.3g}"
        rows.append(
            [
                seq,
                lens.ctx_lens[seq],
                lens.query_lens[seq],
                wrong_rows,
                count,
                Words(size, "bad" if count else "quiet" if size == "not run" else "good"),
            ]
        )
    columns = ["sequence", "ctx_len", "query_len", "wrong rows", "wrong elements", "largest error"]
    return Grid(columns, rows)


def result(one: "Result") -> Sheet:
    """Return which kernels ran and why, the violations, and the errors with their places."""
    decision = one.decision
    facts: list[tuple[str, Cell | Sequence[Cell]]] = [
        ("case", describe(one.case)),
        ("kernels", f"{', then '.join(decision.kernels)} (backend {one.backend})"),
        ("why", [str(reason) for reason in decision.reasons]),
    ]
    if one.errors is not None:
        greatest = one.errors.greatest_abs
        size = f"largest {greatest.value:.4g} at {greatest.index}"
        lines = [f"{size}; tolerance {_allowed(one.errors)}"]
        if one.case.has_own_tolerance:
            lines.append(f"beyond rounding: {beyond_rounding(one)}")
        facts.append(("error", lines))
        if places := one.places():
            facts.append(("places", place_lines(places)))
        facts += _side_facts(one)
    notes: tuple[tuple[str, Sequence[str], Tone], ...] = (
        ("slot reads", one.memory.lines() if one.memory is not None else [], ""),
        ("launches", one.launches, ""),
        ("int32 overflow", one.wraps, "warn"),
        ("out of bounds", one.outside, "warn"),
    )
    facts += [(name, [Words(line, tone) for line in lines]) for name, lines, tone in notes if lines]
    outcome = one.verdict if one.errors is None else f"{one.status}: {one.verdict}"
    return Sheet(
        kind="Result",
        line=f"<Result: {outcome}>",
        head=Words(outcome, STATUS[one.status]),
        parts=[Facts(facts), *_result_violations(one), *_result_folds(one)],
    )


def _side_facts(one: "Result") -> list[tuple[str, Value]]:
    """Return a row for each output in addition to the main one: what is wrong with it, or that it matches."""
    titles = {"lse": "log-sum-exp", "padding": "padding"}
    wrong = {error.subject: error.text() for error in one.side_errors}
    return [
        (titles[name], Words(wrong.get(name, "matches"), "bad" if name in wrong else ""))
        for name in one.side_outputs
    ]


def place_lines(places: Sequence["Place"], most: int = 8) -> list[str]:
    """Return a line for each of the first ``most`` places, and the number of the others."""
    lines = [
        f"sequence {p.seq}, token {p.token} of {p.query_len} (row {p.row}), "
        f"{head_range(p.heads)}: {_count(p.elements, 'element', 'elements')}"
        for p in places[:most]
    ]
    if len(places) > most:
        lines.append(f"… and {len(places) - most} more rows")
    return lines


def head_range(heads: Sequence[int]) -> str:
    """Return heads as "head 3", "heads 0–63" or "heads 0, 2, 5"."""
    if len(heads) == 1:
        return f"head {heads[0]}"
    if heads[-1] - heads[0] == len(heads) - 1:
        return f"heads {heads[0]}–{heads[-1]}"
    return "heads " + ", ".join(map(str, heads))


def _result_violations(one: "Result") -> list[Part]:
    if not one.violations:
        return [Lines([Words("no violations", "good")])]
    return [_violation_grid(one.violations, "violations, found without running the kernel")]


def _result_folds(one: "Result") -> list[Part]:
    spent = ", ".join(f"{step} {s:.2f}" for step, s in one.seconds.items())
    last = Lines([Words(f"seconds: {spent}", "quiet")])
    return [last] if one.errors is None else [last, Folded("by sequence", [_seq_grid(one.errors)])]


def other_run(one: "OtherRun") -> Sheet:
    """Return which rows differ in a second run with changed fields."""
    outcome = "the same bits" if one.is_equal else "other bits"
    if one.error is not None:
        outcome = "rejected"
    return Sheet(
        kind="Second run",
        line=f"<OtherRun: {one.text()}>",
        head=Words(outcome, "good" if one.is_equal else "warn"),
        parts=[Lines([one.text()])],
    )


def stages(table: "StageTable") -> Sheet:
    """Return a row for each stage and a column for each platform; each cell has the outcome."""
    platforms = list(dict.fromkeys(cell.platform for cell in table))
    names = list(dict.fromkeys(cell.stage for cell in table))
    at = {(cell.stage, cell.platform): cell for cell in table}
    wrong = sum(cell.status != "match" for cell in table)
    count = (
        f"{len(names)} stages on {', '.join(platforms)}: {wrong} of {len(table)} runs do not match"
    )
    rows: list[Row] = [
        [
            name,
            *(_stage_cell(at[name, platform]) for platform in platforms if (name, platform) in at),
        ]
        for name in names
    ]
    notes = [Words("errors are the largest of decode rows and of prefill rows", "quiet")]
    if (case := table.case) is not None:
        run = f"{case.op}, vLLM {case.release}, backend {case.backend}; {sizes(case)}"
        notes.insert(0, Words(run, "quiet"))
    return Sheet(
        kind="Stages",
        line=f"<StageTable: {count}>",
        head=count,
        parts=[Grid(["stage", *platforms], rows, most=len(rows)), Lines(notes)],
    )


def _stage_cell(cell: "StageCell") -> list[Cell]:
    errors = [
        f"{name} {error:.1e}"
        for name, error in (("decode", cell.decode_error), ("prefill", cell.prefill_error))
        if error is not None
    ]
    outcome: list[Cell] = [Words(cell.verdict, STATUS[cell.status])]
    return outcome + ([Words(", ".join(errors), "quiet")] if errors else [])


def decoded_error(one: "DecodedError") -> Sheet:
    """Return the sequence, the token and the kernel of an assertion's largest difference."""
    place = f"sequence {one.seq}, token {one.token} of {one.query_len} (row {one.row})"
    assumed = f"; platform {one.platform} is assumed" if one.platform_by == "assumed" else ""
    return Sheet(
        kind="Decoded error",
        line=f"<DecodedError: {place}, head {one.head}>",
        head=place + assumed,
        parts=[Lines(one.sentences())],
    )


def error_answer(one: "ErrorAnswer") -> Sheet:
    """Return what follows from a text that has no place in an attention output."""
    heads = {
        "dtype": "a dtype that a kernel rejects",
        "allclose": "a failed torch.allclose",
        "cache": "a place in the cache",
    }
    return Sheet(
        kind="Decoded error",
        line=f"<ErrorAnswer: {heads[one.kind]}>",
        head=heads[one.kind],
        parts=[
            Lines(one.sentences()),
            *([] if one.command is None else [Command(one.command, "to see it")]),
            Facts([("case", describe(one.case))]),
        ],
    )
