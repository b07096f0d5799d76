"""Rules about whole outputs: rows written to wrong addresses, and parts of a merge read from wrong ones."""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from attnlab.case.ops import MERGE
from attnlab.defects.attention_inputs import Predicted, concatenate
from attnlab.defects.defect import Compute, Defect
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.defects.row_slices import all_rows
from attnlab.diagnosis.address_memory import (
    LSE_TERMS,
    ROW_TERMS,
    TensorMemory,
    memory_of,
    row_features,
    sizes_of,
)
from attnlab.diagnosis.address_rules import FAMILY, OWN, AddressRule, rules_of
from attnlab.diagnosis.rows_of_rule import ALL, parts_of, rows_of, text_of
from attnlab.diagnosis.rule_defect import rule_defect
from attnlab.kernels.model.merge import partials
from attnlab.tensors.call import KernelCall
from attnlab.tensors.layout import presented

MOST_ELEMENTS = 1 << 20  # of an output that is predicted as a whole
_PARTS = ("prefix_output", "suffix_output", "prefix_lse", "suffix_lse")


@dataclass(frozen=True, slots=True)
class OutputRule:
    """The output is written to wrong addresses: an element of the rule's address gets the right number.

    If several rows or heads write an element, the last one wins, those of the ``part`` after all others. One
    that none writes keeps its contents.
    """

    rule: AddressRule
    part: str = ALL

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        right, before = right_output(problem), problem.before
        if before is None:
            return right
        memory = TensorMemory.of(before, ROW_TERMS)
        features, sizes = features_of_rows(problem), _sizes(problem, memory)
        to = self.rule.address(ROW_TERMS, features, sizes).expand(right.output.shape) + memory.base
        own = OWN.address(ROW_TERMS, features, sizes).expand(right.output.shape) + memory.base
        inside = (to >= 0) & (to < len(memory.flat))
        flat, bound = memory.flat.double().clone(), torch.full((len(memory.flat),), 1e-30).double()
        is_moved = rows_of(problem, self.part)[:, None, None].expand_as(inside)
        for at, chosen in ((own, ~is_moved), (to, is_moved & inside)):
            flat[at[chosen]], bound[at[chosen]] = right.output[chosen], right.bound[chosen]
        return Predicted(output=flat[own], bound=bound[own])


@dataclass(frozen=True, slots=True)
class MergeRule:
    """A merge reads one of its four inputs at wrong addresses, in the rows of a ``part``."""

    rule: AddressRule
    part: str = ALL

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        right, shape = right_output(problem), problem.call.query.shape[:2]
        memory = _merge_memory(problem.call, problem)
        read = {}
        for name, one in memory.items():
            rule = self.rule if name == self.rule.tensor else OWN
            features, sizes = features_of_rows(problem), _sizes(problem, one)
            stored, inside = one.read(rule.address(one.terms, features, sizes))
            read[name] = torch.where(inside, stored.double(), 0.0)
        lse = torch.stack([read[name].expand(*shape, 1) for name in ("prefix_lse", "suffix_lse")])
        weights = (lse - lse.amax(0)).exp()
        weights = (weights / weights.sum(0)).nan_to_num(0.0)
        output = weights[0] * read["prefix_output"] + weights[1] * read["suffix_output"]
        bound = 2 * right.bound.amax(0).amax(1)[None, :, None].expand_as(output)
        is_part = rows_of(problem, self.part)[:, None, None]
        return Predicted(
            output=torch.where(is_part, output, right.output),
            bound=torch.where(is_part, bound, right.bound),
        )


@dataclass(frozen=True, slots=True)
class MergeLaw:
    """A merge weights its two parts wrongly; ``kind`` is a key of ``MERGE_LAWS`` or ``_WEIGHTS_ADDED``."""

    kind: str

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the law."""
        right, memory = right_output(problem), _merge_memory(problem.call, problem)
        read = {}
        for name, one in memory.items():
            address = OWN.address(one.terms, features_of_rows(problem), _sizes(problem, one))
            read[name] = one.read(address)[0].double()
        lse = torch.stack([read["prefix_lse"], read["suffix_lse"]])
        parts = [read["prefix_output"], read["suffix_output"]]
        if self.kind in _WEIGHTS_ADDED:
            scales, lost = _scaled()(lse), _WEIGHTS_ADDED[self.kind]
            parts[lost] = torch.ones_like(parts[lost])
        else:
            scales = MERGE_LAWS[self.kind](lse)
        output = scales[0] * parts[0] + scales[1] * parts[1]
        bound = (
            2 * right.bound.amax(0).amax(1)[None, :, None] * output.abs().amax(2, True).clamp(min=1)
        )
        return Predicted(output=output, bound=bound.expand_as(output))


Scales = Callable[[torch.Tensor], torch.Tensor]


def _scaled(
    prefix: float = 1.0,
    suffix: float = 1.0,
    counts: tuple[float, float] = (1.0, 1.0),
    adds: tuple[float, float] = (1.0, 1.0),
    top: str = "max",
) -> Scales:
    """Return the scales of both parts: exponents times ``prefix`` and ``suffix``, denominators with
    ``counts`` of both, sums with ``adds`` of both; ``top`` is what is subtracted."""

    def scales(lse: torch.Tensor) -> torch.Tensor:
        highest = {"max": lse.amax(0), "min": lse.amin(0), "none": torch.zeros(())}[top]
        powers = torch.tensor([prefix, suffix], dtype=torch.float64)[:, None, None, None]
        exps = ((lse - highest) * powers).exp()
        total = (exps * torch.tensor(counts, dtype=torch.float64)[:, None, None, None]).sum(0)
        return exps * torch.tensor(adds, dtype=torch.float64)[:, None, None, None] / total

    return scales


_LN_2 = math.log(2)
MERGE_LAWS: dict[str, Scales] = {
    "exp2 is used instead of exp in the weight of the prefix": _scaled(prefix=_LN_2),
    "exp2 is used instead of exp in the weight of the suffix": _scaled(suffix=_LN_2),
    "exp2 is used instead of exp in the weights of both parts": _scaled(_LN_2, _LN_2),
    "the denominator lacks the prefix": _scaled(counts=(0.0, 1.0)),
    "the denominator lacks the suffix": _scaled(counts=(1.0, 0.0)),
    "the denominator subtracts the suffix": _scaled(counts=(1.0, -1.0)),
    "the prefix is missing": _scaled(adds=(0.0, 1.0)),
    "the suffix is missing": _scaled(adds=(1.0, 0.0)),
    "the suffix is subtracted": _scaled(adds=(1.0, -1.0)),
    "the weight of the prefix has the wrong sign in its exponent": _scaled(prefix=-1.0),
    "the weight of the suffix has the wrong sign in its exponent": _scaled(suffix=-1.0),
    "the weights are not divided by their sum": lambda lse: (lse - lse.amax(0)).exp(),
    "the prefix has the weight 1": lambda lse: torch.cat(
        [torch.ones_like(lse[:1]), _scaled()(lse)[1:]]
    ),
    "the suffix has the weight 1": lambda lse: torch.cat(
        [_scaled()(lse)[:1], torch.ones_like(lse[1:])]
    ),
    "the prefix is not divided by the sum": lambda lse: torch.cat(
        [(lse - lse.amax(0)).exp()[:1], _scaled()(lse)[1:]]
    ),
    "the suffix is not divided by the sum": lambda lse: torch.cat(
        [_scaled()(lse)[:1], (lse - lse.amax(0)).exp()[1:]]
    ),
    "the smaller log-sum-exp is subtracted in place of the larger": _scaled(top="min"),
}


# The part whose output is taken for 1.
_WEIGHTS_ADDED = {
    "the weight of the prefix is added in place of its weighted output": 0,
    "the weight of the suffix is added in place of its weighted output": 1,
}


class WholeRule(Hashable, Protocol):
    """A rule that predicts a whole output."""

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        ...


def output_defects(problem: Problem) -> list[Defect]:
    """Return the rules about whole outputs that a call allows, each as a defect."""
    call = problem.call
    if call.buffer.numel() > MOST_ELEMENTS or call.spec.writes_cache:
        return []
    return [
        rule_defect(
            FAMILY,
            text if isinstance(rule, MergeLaw) else text_of(rule.part, rule.rule.name),
            text,
            computed(rule),
        )
        for rule, text in _rules(problem)
    ]


def _rules(problem: Problem) -> Iterator[tuple[OutputRule | MergeRule | MergeLaw, str]]:
    call = problem.call
    memory = TensorMemory.of(call.buffer, ROW_TERMS)
    others, parts = _other_strides(problem), parts_of(problem)
    for rule in rules_of("output", memory, _sizes(problem, memory), others):
        for part in parts:
            yield OutputRule(rule, part), text_of(part, rule.text(ROW_TERMS))
    if call.op == MERGE:
        yield from (
            (MergeLaw(kind), f"in the merge, {kind}") for kind in (*MERGE_LAWS, *_WEIGHTS_ADDED)
        )
        for name, one in _merge_memory(call, problem).items():
            for rule in rules_of(name, one, _sizes(problem, one), others):
                for part in parts:
                    yield MergeRule(rule, part), text_of(part, rule.text(one.terms))


def computed(rule: WholeRule) -> Compute:
    """Return the ``compute`` of a rule about whole outputs: some rows of the output."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        whole, rows = _predicted(rule, problem), problem.rows(row_slice)
        return Predicted(
            output=whole.output[rows][:, row_slice.heads],
            bound=whole.bound[rows][:, row_slice.heads],
        )

    return compute


@lru_cache(maxsize=4)
def _predicted(rule: WholeRule, problem: Problem) -> Predicted:
    return rule.predict(problem)


@lru_cache(maxsize=2)
def right_output(problem: Problem) -> Predicted:
    """Return the right output of all rows, which lie in the order of their sequences."""
    return concatenate([problem.correct(row_slice) for row_slice in all_rows(problem)])


@lru_cache(maxsize=2)
def features_of_rows(problem: Problem) -> dict[str, torch.Tensor]:
    """Return the features of all rows."""
    parts = [
        row_features(problem, row_slice.seq, row_slice.tokens, row_slice.heads)
        for row_slice in all_rows(problem)
        if len(row_slice.tokens)
    ]
    lengths = [len(part["row"]) for part in parts]
    found = dict(parts[0])
    for name in ("row", "new token of the sequence", "sequence", "first token of the sequence"):
        found[name] = torch.cat(
            [part[name].expand(n, 1, 1) for part, n in zip(parts, lengths, strict=True)]
        )
    return found


@lru_cache(maxsize=2)
def _merge_memory(call: KernelCall, problem: Problem) -> dict[str, TensorMemory]:
    """Return the inputs of a merge as the lab gives them to the op."""
    parts = partials(presented(call), problem.target)
    terms = dict(zip(_PARTS, (ROW_TERMS, ROW_TERMS, LSE_TERMS, LSE_TERMS), strict=True))
    return {name: TensorMemory.of(getattr(parts, name), terms[name]) for name in _PARTS}


def _sizes(problem: Problem, memory: TensorMemory) -> dict[str, int]:
    """Return the strides of a tensor, the sizes of the call, and the strides of other tensors."""
    return dict(memory.strides) | sizes_of(problem.call) | _other_strides(problem)


@lru_cache(maxsize=2)
def _other_strides(problem: Problem) -> dict[str, int]:
    """Return the strides of the op's tensors, which may be taken for those of another tensor."""
    call = problem.call
    memory = dict(_merge_memory(call, problem)) if call.op == MERGE else dict(memory_of(call))
    memory["output"] = TensorMemory.of(call.buffer, ROW_TERMS)
    found = {f"{name} {key}": n for name, one in memory.items() for key, n in one.strides.items()}
    heads = call.query.shape[1]  # kernels compute the stride of a row from that of a head
    return found | {f"num_heads × {name}": heads * n for name, n in found.items()}
