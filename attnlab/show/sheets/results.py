"""Sheets of the results of a run: Violations, ErrorMap, Result, StageTable and DecodedError."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnlab.case.masks import CAUSAL
from attnlab.show.sheets.sheet import (
    Bar,
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
    import torch

    from attnlab.case.case import Case
    from attnlab.checker.matrix import MatrixRow, MatrixTable
    from attnlab.contracts.contract import Contract
    from attnlab.contracts.dispatch import Decision
    from attnlab.contracts.violations import Violation, Violations
    from attnlab.diagnosis.diagnosis import OtherRun
    from attnlab.lab.decode_error import DecodedError, ErrorAnswer
    from attnlab.lab.lab import Cell as StageCell
    from attnlab.lab.lab import StageTable
    from attnlab.lab.result import ErrorMap, Place, Result
    from attnlab.tensors.cache import Batch, PagedCache, Provenance
    from attnlab.tensors.call import KernelCall

_MOST_ELEMENTS = 16  # of an index tensor that are written out
_MOST_WITH_NAN = 1 << 24  # elements of a tensor with NaN whose range is computed
_NONE_TEXT = {
    "sm_scale": "None: the op's default",
    "alibi_slopes": "None: no ALiBi",
    "sinks": "None: no sinks",
    "softcap": "None: no soft cap",
    "output": "None: not recorded",
}
_RARE = (
    "before",
    "slot_mapping",
    "lse",
    "q_scale",
    "output_scale",
    "block_ids",
    "unmodelled",
    "unknown_arguments",
    "read_as",
)  # shown if given


def batch(one: "Batch") -> Sheet:
    """Return the lengths and the tensors of a batch."""
    lens = one.lengths
    heads, kv_heads = one.query.shape[1], one.key.shape[1]
    text = (
        f"{len(lens.query_lens)} sequences, {lens.num_tokens} new tokens, {sum(lens.ctx_lens)} tokens of "
        f"context; {heads} heads of {one.query.shape[2]}, {heads // kv_heads} per KV head, "
        f"{_dtype(one.query)}"
    )
    return Sheet.of("Batch", text, lengths_grid(lens.query_lens, lens.ctx_lens), _tensors(one))


def lengths_grid(query_lens: Sequence[int], ctx_lens: Sequence[int]) -> Grid:
    """Return a row for each sequence, with a bar of its context and its new tokens."""
    longest = max(q + c for q, c in zip(query_lens, ctx_lens, strict=True))
    rows: list[Row] = [
        [i, c, q, q + c, Bar(c, q, longest, f"{c} tokens of context, {q} new")]
        for i, (q, c) in enumerate(zip(query_lens, ctx_lens, strict=True))
    ]
    return Grid(["sequence", "ctx_len", "query_len", "seq_len", "context, then new tokens"], rows)


def provenance(one: "Provenance") -> Sheet:
    """Return how many slots are written, and by which sequence."""
    written = int((one.seq >= 0).sum())
    text = f"{written} of {one.seq.numel()} slots written, {len(one.block_table)} sequences"
    return Sheet.of("Provenance", text, _owners(one), _tensors(one))


def cache(one: "PagedCache") -> Sheet:
    """Return a cache's layout, format and scales, and how many slots each sequence wrote."""
    num_blocks, kv_heads, _, block_size, x = one.key.shape
    written = int((one.provenance.seq >= 0).sum())
    text = (
        f"{num_blocks} blocks of {block_size} tokens, {kv_heads} KV heads of {one.value.shape[2]}, "
        f"x = {x}, {one.format.name}; {written} of {num_blocks * block_size} slots written"
    )
    size = sum(t.numel() * t.element_size() for t in (one.key, one.value))
    facts = Facts(
        [
            ("scales", f"k_scale {one.k_scale:g}, v_scale {one.v_scale:g}"),
            ("memory", f"{size / 1e6:.3g} MB"),
        ]
    )
    return Sheet.of("PagedCache", text, facts, _owners(one.provenance), _tensors(one))


def _owners(one: "Provenance") -> Grid:
    """Return a row for each sequence: its tokens in the cache, and their blocks."""
    block_size = one.seq.shape[1]
    counts = [int((one.seq == seq).sum()) for seq in range(len(one.block_table))]
    rows: list[Row] = []
    for seq, count in enumerate(counts):
        blocks = one.block_table[seq, : -(-count // block_size)].tolist()
        shown = ", ".join(map(str, blocks[:6])) + (", …" if len(blocks) > 6 else "")
        bar = Bar(count, 0, max(counts), f"{count} tokens in the cache")
        rows.append([seq, count, len(blocks), shown, bar])
    columns = ["sequence", "tokens in the cache", "blocks", "first blocks", "tokens"]
    return Grid(columns, rows)


def call(one: "KernelCall") -> Sheet:
    """Return a call's tensors, with dtypes and strides, and its other arguments."""
    text = (
        f"{one.op}: {len(one.seq_lens)} sequences, {one.query.shape[0]} new tokens, "
        f"{one.query.shape[1]} heads of {one.query.shape[2]}, {one.num_queries_per_kv} per KV head"
    )
    values = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    scalars = [
        (name, _NONE_TEXT.get(name, "None") if value is None else str(value))
        for name, value in values.items()
        if name != "op"
        and not hasattr(value, "shape")
        and (name not in _RARE or value not in (None, (), ""))
    ]
    return Sheet.of("KernelCall", text, _tensors(one), Facts(scalars))


def _tensors(noun: Any) -> Grid:
    """Return a row for each tensor field of a noun: shape, dtype, strides and contents.

    Tensors of one number, which stand for new tokens that an op reads from the cache, have no row.
    """
    rows: list[Row] = []
    for field in dataclasses.fields(noun):
        tensor = getattr(noun, field.name)
        if hasattr(tensor, "stride") and (tensor.dim() < 3 or any(tensor.stride())):
            strides = Words(", ".join(map(str, tensor.stride())), "quiet")
            shape = " × ".join(map(str, tensor.shape))
            rows.append([field.name, shape, _dtype(tensor), strides, contents(tensor)])
    return Grid(["tensor", "shape", "dtype", "strides", "contents"], rows)


def _dtype(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def contents(tensor: "torch.Tensor") -> str:
    """Return the numbers of a short one-dimensional tensor, or the range of any other."""
    if tensor.numel() == 0:
        return "no elements"
    if tensor.dim() == 1 and tensor.numel() <= _MOST_ELEMENTS:
        numbers = tensor.tolist()
        return ", ".join(f"{n:.4g}" if isinstance(n, float) else str(n) for n in numbers)
    if not tensor.is_floating_point():
        return f"{int(tensor.min())} to {int(tensor.max())}"
    if tensor.element_size() == 1:  # FP8 has no minimum in torch
        tensor = tensor.float()
    least, most = (float(value) for value in tensor.aminmax())
    if least == most == 0:
        return "zeros"
    if least == least:
        return f"{least:.3g} to {most:.3g}"
    return _contents_with_nan(tensor)


def _contents_with_nan(tensor: "torch.Tensor") -> str:
    if tensor.numel() > _MOST_WITH_NAN:
        return "NaN and other numbers"
    is_nan = tensor.isnan()
    if bool(is_nan.all()):
        return "NaN everywhere"
    numbers = tensor[~is_nan]
    return f"{float(numbers.min()):.3g} to {float(numbers.max()):.3g}; {int(is_nan.sum())} NaN"


_MOST_NUMBERS = 16  # of a tuple that are written out


def case(one: "Case") -> Sheet:
    """Return the fields that differ from the defaults, the command line, and, folded, every field."""
    changes = one.changes()
    changed = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    parts: list[Part] = [Facts([(name, value_text(value)) for name, value in changes.items()])]
    if not changes:
        parts = [Lines([Words("every field has its default", "quiet")])]
    return Sheet(
        kind="Case",
        line=f"Case({changed})",
        head=describe(one),
        parts=[
            *parts,
            Lines([Words(one.to_cli(), code=True)]),
            Folded("lengths", [lengths_grid(one.lengths.query_lens, one.lengths.ctx_lens)]),
            Folded("every field", [_all_fields(one)]),
        ],
    )


def rules_text(case: "Case") -> str:
    """Return the release of vLLM whose rules a Case follows, as ", vLLM 0.33.0"; "" for another library."""
    return f", vLLM {case.release}" if case.spec.library == "vllm" else ""


def describe(case: "Case") -> str:
    """Return the Case in one line: op, stage, platform, release and sizes."""
    where = f"{case.op} at stage {case.stage} on {case.platform}{rules_text(case)}"
    masked = "" if case.mask == CAUSAL else f"; mask {case.mask}"
    return f"{where}; {sizes(case)}{masked}"


def sizes(case: "Case") -> str:
    """Return the sizes and dtypes of a Case in one line."""
    lengths = case.lengths
    return (
        f"{case.num_heads} heads of {case.head_size}, {case.num_queries_per_kv} per KV head, "
        f"{case.dtype}, KV cache {case.kv_cache_dtype}; {len(lengths.query_lens)} sequences, "
        f"{lengths.num_tokens} new tokens"
    )


def _all_fields(one: "Case") -> Grid:
    rows: list[Row] = []
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        tone: Tone = "warn" if value != field.default else ""
        meaning = Words(field.metadata["help"], "quiet")
        rows.append([field.name, Words(value_text(value), tone), meaning])
    return Grid(["field", "value", "meaning"], rows, most=len(rows))


def value_text(value: object) -> str:
    """Return the value of a field as text; a long tuple is shortened."""
    if isinstance(value, tuple) and len(value) > _MOST_NUMBERS:
        return f"{', '.join(map(str, value[:_MOST_NUMBERS]))}, … ({len(value)} in total)"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def decision(one: "Decision") -> Sheet:
    """Return which kernels run, and each term of the dispatch predicate."""
    kernels = f"{', then '.join(one.kernels)} on {one.platform}"
    rows: list[Row] = [
        [
            Words("yes", "good") if term.holds else Words("no", "bad"),
            term.name,
            term.value,
            term.allowed,
        ]
        for term in one.terms
    ]
    columns = ["holds", "term", "value", "required by the ROCm kernel"]
    return Sheet.of(
        "Decision",
        kernels,
        Grid(columns, rows, most=len(rows)),
        Lines([*map(Words, one.reasons), Words(one.source, "quiet")]),
    )


def contract(one: "Contract") -> Sheet:
    """Return the terms of a contract, without empty ones."""
    fields = [f.name for f in dataclasses.fields(one) if f.name not in ("name", "source")]
    terms = {name: getattr(one, name) for name in fields}
    rows = [(name, _term(term)) for name, term in terms.items() if term not in (None, (), {})]
    return Sheet.of(
        "Contract",
        one.name,
        Facts(rows),
        Lines([Words(one.source, "quiet")]),
        line=f"{one.name}, {one.source}",
    )


def _term(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {what}" for name, what in value.items())
    return value_text(value)


STATUS: dict[str, Tone] = {"match": "good", "mismatch": "bad", "rejected": "odd"}
_EFFECT: dict[str, Tone] = {"rejected": "odd", "silent": "bad", "harmless": "quiet"}


def violations(found: "Violations") -> Sheet:
    """Return a row for each violation."""
    count = _count(len(found), "violation", "violations")
    kinds = ", ".join(dict.fromkeys(f"{one.effect} {one.kind}" for one in found))
    return Sheet.of(
        "Violations",
        count if found else "none",
        _violation_grid(found),
        tone="bad" if any(one.effect != "harmless" for one in found) else "good",
        line=f"{count}{': ' + kinds if kinds else ''}",
    )


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
    return Sheet.of(
        "ErrorMap",
        count,
        Facts(facts),
        _seq_grid(one),
        tone="bad" if one.mismatched else "good",
        line=f"{count}, largest {one.greatest_abs.value:.4g}",
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
        titles = {"lse": "log-sum-exp", "padding": "padding"}
        wrong = {error.subject: error.text() for error in one.side_errors}
        facts += [
            (titles[name], Words(wrong.get(name, "matches"), "bad" if name in wrong else ""))
            for name in one.side_outputs
        ]
    notes: tuple[tuple[str, Sequence[str], Tone], ...] = (
        ("slot reads", one.memory.lines() if one.memory is not None else [], ""),
        ("launches", one.launches, ""),
        ("one program at a time", one.alone, ""),
        ("int32 overflow", one.wraps, "warn"),
        ("out of bounds", one.outside, "warn"),
    )
    facts += [(name, [Words(line, tone) for line in lines]) for name, lines, tone in notes if lines]
    outcome = one.verdict if one.errors is None else f"{one.status}: {one.verdict}"
    spent = ", ".join(f"{step} {s:.2f}" for step, s in one.seconds.items())
    last = Lines([Words(f"seconds: {spent}", "quiet")])
    return Sheet.of(
        "Result",
        outcome,
        Facts(facts),
        _violation_grid(one.violations, "violations, found without running the kernel")
        if one.violations
        else Lines([Words("no violations", "good")]),
        *([last] if one.errors is None else [last, Folded("by sequence", [_seq_grid(one.errors)])]),
        tone=STATUS[one.status],
    )


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


def other_run(one: "OtherRun") -> Sheet:
    """Return which rows differ in a second run with changed fields."""
    outcome = "the same bits" if one.is_equal else "other bits"
    if one.error is not None:
        outcome = "rejected"
    return Sheet.of(
        "Second run",
        outcome,
        Lines([one.text()]),
        tone="good" if one.is_equal else "warn",
        name="OtherRun",
        line=one.text(),
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
        run = f"{case.op}{rules_text(case)}, backend {case.backend}; {sizes(case)}"
        notes.insert(0, Words(run, "quiet"))
    return Sheet.of(
        "Stages",
        count,
        Grid(["stage", *platforms], rows, most=len(rows)),
        Lines(notes),
        name="StageTable",
    )


def matrix(table: "MatrixTable") -> Sheet:
    """Return the ids that do not match, and a grid for each test of the parameters that differ."""
    from attnlab.checker.matrix import outcome_text

    counts = ", ".join(f"{count} {status}" for status, count in table.counts.items())
    head = f"{counts}, of {len(table.rows)} ids"
    bad = [row for row in table.rows if row.status != "match"]
    groups: dict[tuple[str, str], list[str]] = {}
    for row in bad:
        groups.setdefault((row.status, outcome_text(row)), []).append(row.id)
    rows: list[Row] = [
        [[Words(one, code=True) for one in ids], Words(text, STATUS.get(status, "quiet"))]
        for (status, text), ids in groups.items()
    ]
    grids = [_matrix_grid(*grid) for grid in table.grids()]
    kernels = dict.fromkeys(kernel for row in table.rows for kernel in row.kernels)
    facts: list[tuple[str, Value]] = [("kernels", ", ".join(kernels)), ("backend", table.backend)]
    if table.changes:
        facts.append(("case", ", ".join(f"{n}={one}" for n, one in table.changes.items())))
    facts.append(("time", f"{table.seconds:.1f} s of all workers together"))
    tone: Tone = ("good", "bad", "odd", "warn")[table.exit_code]
    ids = Grid(["id", "outcome"], rows, "ids that do not match")
    return Sheet.of("Matrix", head, ids, *grids, Facts(facts), tone=tone)


def _matrix_grid(test: str, columns: list[str], cells: "dict[str, dict[str, MatrixRow]]") -> Grid:
    """Return the outcomes of a test; the last parameters that differ name the columns."""

    def cell(row: "MatrixRow | None") -> Cell:
        if row is None:
            return ""
        short = f"{float(row.greatest_abs or 0):.1e}" if row.total else row.status
        return Words(short, STATUS.get(row.status, "quiet"))

    rows: list[Row] = [
        [key, *(cell(found.get(one)) for one in columns)] for key, found in cells.items()
    ]
    title = f"{test}: largest absolute error"
    return Grid(["parameters", *columns], rows, title, most=len(rows))


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
    return Sheet.of(
        "Decoded error",
        place,
        Lines(one.sentences()),
        name="DecodedError",
        line=f"{place}, head {one.head}",
    )


def error_answer(one: "ErrorAnswer") -> Sheet:
    """Return what follows from a text that has no place in an attention output."""
    heads = {
        "dtype": "a dtype that a kernel rejects",
        "allclose": "a failed torch.allclose",
        "cache": "a place in the cache",
    }
    return Sheet.of(
        "Decoded error",
        heads[one.kind],
        Lines(one.sentences()),
        None if one.command is None else Command(one.command, "to see it"),
        Facts([("case", describe(one.case))]),
        name="ErrorAnswer",
    )
