"""The variants of the hostile cases: changed fields of a Case, each with its reason (variants.toml)."""

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from attnlab.case.declaration import field_type
from attnlab.case.masks import CAUSAL, MASKS
from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.case.ops import OPS, Op


@dataclass(frozen=True, slots=True)
class Variant:
    """The fields of a Case that a variant changes, and why kernels get them wrong.

    ``ops``: the ops that it is for, by name or by what their records state; empty for all that support it.
    """

    fields: dict[str, Any]
    reason: str
    ops: tuple[str, ...] | Callable[[Op], bool] = ()

    def is_for(self, op: str) -> bool:
        """Answer whether the variant is for an op."""
        if callable(self.ops):
            return self.ops(OPS[op])
        return not self.ops or op in self.ops


def _scoring(op: Op) -> bool:
    """Answer whether an op computes, or merges, attention of several new tokens."""
    return op.prefill and op.is_triton and not op.writes_cache


def _splitting(op: Op) -> bool:
    """Answer whether an op splits sequences."""
    return op.num_splits is not None


_TABLES = tomllib.loads((files(__package__) / "variants.toml").read_text(encoding="utf-8"))
_SORTS = {"scoring": _scoring, "splitting": _splitting}
_ROW = re.compile(r"(?:\[([^]]*)\])?(.*)")


def _fields(text: str) -> dict[str, Any]:
    """Return the fields of a Case that the words of a row set."""
    fields: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals:
            fields[name] = field_type(name).check(name, field_type(name).parse(name, value))
        elif word != "plain":
            fields |= _fields(_TABLES["words"][word])
    return fields


def _table(name: str) -> Iterator[Variant]:
    """Yield the variants of a table."""
    for row, reason in _TABLES[name].items():
        match = _ROW.fullmatch(row)
        assert match is not None
        ops = match[1] or ""
        yield Variant(_fields(match[2]), reason, _SORTS.get(ops, tuple(ops.split())))


# Query and context lengths around the edges of blocks, tiles and partitions.
LENGTHS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 5, 1), (16, 15, 31)),
    ((1, 17), (15, 0)),
    ((2, 1, 1), (33, 63, 1)),
    ((1, 9), (64, 40)),
    ((1, 1), (129, 1)),
    ((19, 1), (0, 48)),
)
VARIANTS = (*_table("first"),)
# Of each op in benchmarks: all variants, so that the further ones run, too, and rows of the covering design.
DEFAULT_CASES = len(VARIANTS) + 5
_LENGTHS = _fields("lengths")
LATE_VARIANTS = (
    *_table("late"),
    *(
        Variant({**_LENGTHS, "op_argument": name}, f"Other strides: {one.summary}.")
        for name, one in OP_ARGUMENTS.items()
        if one.strided is not None
    ),
    *_table("late_segments"),
)
_STATED = (*_table("values"), *_table("stated"), *LATE_VARIANTS, *_table("last"))
# All of them: an op argument or a mask without a variant of its own has the plain one.
ARGUMENT_VARIANTS = (
    *_STATED,
    *(
        Variant({**_LENGTHS, **one.needs, "op_argument": name}, one.summary)
        for name, one in OP_ARGUMENTS.items()
        if name not in {variant.fields.get("op_argument") for variant in _STATED}
    ),
    *(
        Variant(
            {**_LENGTHS, "mask": name, **({"sliding_window": 5} if one.needs_window else {})},
            one.summary,
        )
        for name, one in MASKS.items()
        if name != CAUSAL and name not in {variant.fields.get("mask") for variant in _STATED}
    ),
)
