"""Wrong addresses of a log-sum-exp: to which it is stored, or from which a merge reads those of its parts."""

import math
from collections.abc import Iterator

import torch

from attnlab.case.ops import MERGE
from attnlab.defects.problem import Problem
from attnlab.diagnosis.address_memory import LSE_TERMS, ROW_TERMS, TensorMemory, sizes_of
from attnlab.diagnosis.address_rules import OWN, rules_of
from attnlab.diagnosis.output_rules import features_of_rows
from attnlab.diagnosis.rows_of_rule import parts_of, rows_of, text_of
from attnlab.kernels.model.merge import partials
from attnlab.tensors.layout import presented

_ADDRESS = "a wrong address"
_LSES = ("prefix_lse", "suffix_lse")


def is_address(law: str) -> bool:
    """Answer whether a law is about addresses, from which the wrong places follow."""
    return _ADDRESS in law


def wrong_addresses(
    problem: Problem, values: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> Iterator[str]:
    """Yield the rules of wrong addresses that give the log-sum-exps, each in words after "it is".

    ``values``: as a kernel returns them; ``expected``, ``bound``: the right ones and their rounding bound;
    each [num_tokens, num_heads] float64.
    """
    yield from _stored(problem, values, expected, bound)
    if problem.call.op == MERGE:
        yield from _read(problem, values, bound)


def _stored(
    problem: Problem, values: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> Iterator[str]:
    """Yield the rules under which the right ones are stored elsewhere; an element of none is NaN.

    That they are outside of the memory comes first: numbers do not distinguish such rules.
    """
    rows, heads = expected.shape
    is_merge = (
        problem.call.op == MERGE
    )  # it stores [heads, rows], decode_attention_fwd [rows, heads]
    strides = (1, rows) if is_merge else (heads, 1)
    memory = TensorMemory(
        flat=torch.full((rows * heads,), math.nan, dtype=torch.float64),
        base=0,
        terms=ROW_TERMS[:2],
        strides={"stride 0": strides[0], "stride 1": strides[1]},
    )
    features, factors = _features(problem), dict(memory.strides) | sizes_of(problem.call)
    own = OWN.address(memory.terms, features, factors).expand(expected.shape)
    outside, found = list[str](), list[str]()
    for rule in rules_of("lse", memory, factors):
        to = rule.address(memory.terms, features, factors).expand(expected.shape)
        for part in parts_of(problem):
            is_moved = rows_of(problem, part)[:, None].expand(expected.shape)
            flat, allowed = memory.flat.clone(), memory.flat.clone()
            inside = (to >= 0) & (to < rows * heads)
            for at, chosen in ((own, ~is_moved), (to, is_moved & inside)):
                flat[at[chosen]], allowed[at[chosen]] = expected[chosen], bound[chosen]
            if _is_same(values, flat[own], allowed[own]):
                where = f" ({part})" if part else ""
                found.append(rule.text(memory.terms).removeprefix("the log-sum-exp is ") + where)
                if not bool((is_moved & inside).any()):
                    outside.append(f"written to {_ADDRESS} outside of its memory{where}")
    yield from dict.fromkeys(outside)
    yield from found


def _read(problem: Problem, values: torch.Tensor, bound: torch.Tensor) -> Iterator[str]:
    """Yield the rules under which a merge reads the log-sum-exp of a part at a wrong address."""
    parts = partials(presented(problem.call), problem.target)
    memory = {name: TensorMemory.of(getattr(parts, name), LSE_TERMS) for name in _LSES}
    features = _features(problem)
    right = {
        name: one.read(OWN.address(one.terms, features, dict(one.strides)))[0].double()
        for name, one in memory.items()
    }
    merged = torch.logaddexp(*right.values())
    for name, one in memory.items():
        factors = dict(one.strides) | sizes_of(problem.call)
        for rule in rules_of(name, one, factors):
            stored, inside = one.read(rule.address(one.terms, features, factors))
            read = torch.where(inside, stored.double(), 0.0).expand(values.shape)
            found = torch.logaddexp(*(right | {name: read}).values())
            for part in parts_of(problem):
                given = torch.where(rows_of(problem, part)[:, None], found, merged)
                if _is_same(values, given, bound.amax()):
                    yield f"wrong: {text_of(part, rule.text(one.terms))}"


def _is_same(values: torch.Tensor, given: torch.Tensor, bound: torch.Tensor) -> bool:
    is_equal = (values == given) | (values.isnan() & given.isnan())
    return bool((is_equal | ((values - given).abs() <= bound)).all())


def _features(problem: Problem) -> dict[str, torch.Tensor]:
    """Return the features of rows and heads, which broadcast to [rows, heads]."""
    found = dict(features_of_rows(problem))
    found["d"] = torch.tensor(0)
    return {name: one[..., 0] if one.ndim else one for name, one in found.items()}
