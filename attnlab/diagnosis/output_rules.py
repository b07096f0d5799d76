"""Rules about whole outputs: rows written to wrong addresses, and parts of a merge read from wrong ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlab.case.ops import MERGE
from attnlab.defects.attention_inputs import Predicted, concatenate
from attnlab.defects.defect import Compute, Defect, always
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.defects.row_slices import all_rows
from attnlab.diagnosis.address_memory import (
    LSE_TERMS,
    ROW_TERMS,
    TensorMemory,
    row_features,
    sizes_of,
)
from attnlab.diagnosis.address_rules import FAMILY, AddressRule, rules_of
from attnlab.kernels.model.merge import partials
from attnlab.tensors.call import KernelCall
from attnlab.tensors.layout import presented

_MOST_ELEMENTS = 1 << 20  # of an output that is predicted as a whole
_PARTS = ("prefix_output", "suffix_output", "prefix_lse", "suffix_lse")


@dataclass(frozen=True, slots=True)
class OutputRule:
    """The output is written to wrong addresses: an element of the rule's address gets the right number.

    An element that several rows or heads write is unknown; one that none writes keeps the buffer's contents.
    """

    rule: AddressRule

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        right, before = _right(problem), problem.before
        if before is None:
            return right
        memory = TensorMemory.of(before, ROW_TERMS)
        features, sizes = _row_features(problem), _sizes(problem.call, memory)
        to = self.rule.address(ROW_TERMS, features, sizes).expand(right.output.shape) + memory.base
        own = _OWN.address(ROW_TERMS, features, sizes).expand(right.output.shape) + memory.base
        inside = (to >= 0) & (to < len(memory.flat))
        to, count = to[inside], torch.zeros(len(memory.flat), dtype=torch.int64)
        count.index_add_(0, to, torch.ones_like(to))
        flat, bound = memory.flat.double().clone(), torch.full((len(memory.flat),), 1e-30).double()
        flat[to], bound[to] = right.output[inside], right.bound[inside]
        bound[count > 1] = torch.inf
        if float((count[own] > 1).double().mean()) > _MOST_UNKNOWN:
            return right
        return Predicted(output=flat[own], bound=bound[own])


@dataclass(frozen=True, slots=True)
class MergeRule:
    """A merge reads one of its four inputs at wrong addresses."""

    rule: AddressRule

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        right, shape = _right(problem), problem.call.query.shape[:2]
        memory = _merge_memory(problem.call, problem)
        read = {}
        for name, one in memory.items():
            rule = self.rule if name == self.rule.tensor else _OWN
            features, sizes = _row_features(problem), _sizes(problem.call, one)
            stored, inside = one.read(rule.address(one.terms, features, sizes))
            read[name] = torch.where(inside, stored.double(), 0.0)
        lse = torch.stack([read[name].expand(*shape, 1) for name in ("prefix_lse", "suffix_lse")])
        weights = (lse - lse.amax(0)).exp()
        weights = (weights / weights.sum(0)).nan_to_num(0.0)
        output = weights[0] * read["prefix_output"] + weights[1] * read["suffix_output"]
        bound = 2 * right.bound.amax(0).amax(1)[None, :, None].expand_as(output)
        return Predicted(output=output.expand_as(right.output), bound=bound)


_OWN = AddressRule("", -1)
_MOST_UNKNOWN = 0.5
WholeRule = OutputRule | MergeRule


def output_defects(problem: Problem) -> list[Defect]:
    """Return the rules about whole outputs that a call allows, each as a defect."""
    call = problem.call
    if call.output.numel() > _MOST_ELEMENTS or call.spec.writes_cache:
        return []
    return [
        Defect(
            name=rule.rule.name,
            family=FAMILY,
            text=text,
            seen_in=(),
            touches="all",
            compute=_computed(rule),
            applies=always,
        )
        for rule, text in _rules(problem)
    ]


def _rules(problem: Problem) -> Iterator[tuple[WholeRule, str]]:
    call = problem.call
    memory = TensorMemory.of(call.output, ROW_TERMS)
    for rule in rules_of("output", memory, _sizes(call, memory)):
        yield OutputRule(rule), rule.text(ROW_TERMS)
    if call.op == MERGE:
        for name, one in _merge_memory(call, problem).items():
            for rule in rules_of(name, one, _sizes(call, one)):
                yield MergeRule(rule), rule.text(one.terms)


def _computed(rule: WholeRule) -> Compute:
    """Return the ``compute`` of a rule: some rows of the whole output."""

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
def _right(problem: Problem) -> Predicted:
    """Return the right output of all rows, which lie in the order of their sequences."""
    return concatenate([problem.correct(row_slice) for row_slice in all_rows(problem)])


@lru_cache(maxsize=2)
def _row_features(problem: Problem) -> dict[str, torch.Tensor]:
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


def _sizes(call: KernelCall, memory: TensorMemory) -> dict[str, int]:
    return dict(memory.strides) | sizes_of(call)
