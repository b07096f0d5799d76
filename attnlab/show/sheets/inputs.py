"""Sheets of what determines a run: Case, Decision and Contract."""

import dataclasses
from typing import TYPE_CHECKING

from attnlab.case.masks import CAUSAL
from attnlab.show.sheets.sheet import Facts, Folded, Grid, Lines, Part, Row, Sheet, Tone, Words
from attnlab.show.sheets.tensors import lengths_grid

if TYPE_CHECKING:
    from attnlab.case.case import Case
    from attnlab.contracts.contract import Contract
    from attnlab.contracts.dispatch import Decision

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


def describe(case: "Case") -> str:
    """Return the Case in one line: op, stage, platform, release and sizes."""
    where = f"{case.op} at stage {case.stage} on {case.platform}, vLLM {case.release}"
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
    return Sheet(
        kind="Decision",
        line=f"<Decision: {kernels}>",
        head=kernels,
        parts=[
            *([Grid(columns, rows, most=len(rows))] if rows else []),
            Lines([*map(Words, one.reasons), Words(one.source, "quiet")]),
        ],
    )


def contract(one: "Contract") -> Sheet:
    """Return the terms of a contract, without empty ones."""
    fields = [f.name for f in dataclasses.fields(one) if f.name not in ("name", "source")]
    terms = {name: getattr(one, name) for name in fields}
    rows = [(name, _term(term)) for name, term in terms.items() if term not in (None, (), {})]
    return Sheet(
        kind="Contract",
        line=f"<Contract: {one.name}, {one.source}>",
        head=one.name,
        parts=[Facts(rows), Lines([Words(one.source, "quiet")])],
    )


def _term(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {what}" for name, what in value.items())
    return value_text(value)
