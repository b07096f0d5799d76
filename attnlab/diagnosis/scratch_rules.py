"""Rules about scratch memory: the results of parts of a sequence, stored or read at wrong addresses.

``unified_attention`` stores, for each row, head and segment, an output before the division, a maximum and a
sum. ``decode_attention_fwd`` stores, for each split, an output and its log-sum-exp. A second kernel merges
them. The lab fills scratch memory with NaN, so an entry that was not stored gives NaN.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlab.case.ops import DECODE_FWD, UNIFIED
from attnlab.defects.attention_inputs import Predicted, scores_of
from attnlab.defects.defect import Defect
from attnlab.defects.problem import Problem
from attnlab.defects.row_slices import all_rows
from attnlab.diagnosis.address_memory import TensorMemory, Term, sizes_of
from attnlab.diagnosis.address_rules import FAMILY, OWN, AddressRule, rules_of
from attnlab.diagnosis.output_rules import MOST_ELEMENTS, computed, features_of_rows, right_output
from attnlab.diagnosis.rule_defect import rule_defect
from attnlab.diagnosis.softmax_divisions import Division, divisions

_MOST_DIVISIONS = 2  # segments of tiles of 16 and 32, as the kernels of vLLM use
_SCALAR_TERMS: tuple[Term, ...] = (("row", "stride 0"), ("head", "stride 1"), ("part", "stride 2"))
_TERMS: tuple[Term, ...] = (*_SCALAR_TERMS, ("d", "stride 3"))
_OUTPUTS, _MAXIMA, _SUMS, _LOGS = (
    "outputs of the parts",
    "maxima of the parts",
    "sums of the parts",
    "log-sum-exps of the parts",
)
_SCALARS = "maxima and sums of the parts"
_UNSCALED = {  # what equal maxima or log-sum-exps of all parts amount to
    _MAXIMA: "neither the outputs nor the sums of the parts are rescaled",
    _LOGS: "the outputs of the parts are added with equal weights",
}
_LONGEST = 8  # new tokens of a sequence up to which unified_attention of 0.33.0 uses segments


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """What the first kernel stores: by tensor, [rows, heads, parts, 1 or head_size], NaN where there is no
    part; and ``count``, the number of parts of each row."""

    numbers: dict[str, torch.Tensor]
    count: torch.Tensor


@dataclass(frozen=True, slots=True)
class ScratchRule:
    """One tensor of the parts is ``stored`` or read at wrong addresses; ``rule``: at which.

    ``tensors``: those that the rule is about. Maxima and sums share an address.
    """

    rule: AddressRule
    tensors: tuple[str, ...]
    stored: bool
    division: Division
    slots: int

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        found = _stored(problem, self.division, self.slots)
        memory = _memory(problem, self.slots, problem.call.op)
        read = {}
        for name, numbers in found.numbers.items():
            rule = self.rule if name in self.tensors else OWN
            read[name] = self._through(memory[name], numbers, rule, problem)
        output = _merged(read, found.count, problem.call.op)
        right = right_output(problem)
        size = output.abs().nan_to_num(0.0, 0.0, 0.0).amax(2, True).clamp(min=1)
        bound = 2 * right.bound.amax(0).amax(1)[None, :, None] * size
        return Predicted(output=output, bound=bound.expand_as(output))

    def _through(
        self, memory: TensorMemory, numbers: torch.Tensor, rule: AddressRule, problem: Problem
    ) -> torch.Tensor:
        """Return what is read after numbers were stored; outside of the tensor, 0 is read."""
        features = _features(problem, numbers.shape)
        sizes = dict(memory.strides) | sizes_of(problem.call)
        to, at = (
            (one.address(memory.terms, features, sizes) + memory.base).expand(numbers.shape)
            for one in ((rule, OWN) if self.stored else (OWN, rule))
        )
        flat = memory.flat.clone()
        inside = (to >= 0) & (to < len(flat)) & ~numbers.isnan()
        flat[to[inside]] = numbers[inside]
        is_in = (at >= 0) & (at < len(flat))
        return torch.where(is_in, flat[at.clamp(0, len(flat) - 1)], 0.0)


def scratch_defects(problem: Problem) -> list[Defect]:
    """Return the rules about scratch memory that a call allows, each as a defect."""
    call = problem.call
    if call.op not in (UNIFIED, DECODE_FWD) or call.buffer.numel() > MOST_ELEMENTS:
        return []
    if max(map(problem.query_len, problem.computed_seqs())) > _LONGEST:
        return []
    return [
        rule_defect(
            FAMILY,
            f"{rule.rule.name} {rule.stored} {rule.division.text}",
            text,
            computed(rule),
        )
        for rule, text in _rules(problem)
    ]


def _rules(problem: Problem) -> Iterator[tuple[ScratchRule, str]]:
    """Yield the rules and their texts; of divisions with the same parts, the first."""
    seen = set[str]()
    for division in divisions(problem):
        parts = [_ends(division, problem, seq) for seq in problem.computed_seqs()]
        if not division.merge or str(parts) in seen or max(map(len, parts)) < 2:
            continue
        if len(seen) == _MOST_DIVISIONS:
            return
        seen.add(str(parts))
        slots = max(division.slots, *map(len, parts))
        every = dict(_memory(problem, slots, problem.call.op))
        groups: dict[str, tuple[str, ...]] = {name: (name,) for name in every}
        if _MAXIMA in every:
            every[_SCALARS], groups[_SCALARS] = every[_MAXIMA], (_MAXIMA, _SUMS)
        for name, memory in every.items():
            sizes = dict(memory.strides) | sizes_of(problem.call)
            for rule in rules_of(name, memory, sizes):
                for stored, verb in ((False, "are read at"), (True, "are stored at")):
                    text = rule.text(memory.terms).replace("are read at", verb)
                    if not stored and name in _UNSCALED and _is_one_address(rule, memory, problem):
                        text = f"{_UNSCALED[name]}; or, which no output distinguishes, {text}"
                    yield ScratchRule(rule, groups[name], stored, division, slots), text


def _is_one_address(rule: AddressRule, memory: TensorMemory, problem: Problem) -> bool:
    """Answer whether all parts of a row and head are read at one address, so that their factors are 1."""
    shape = torch.Size((*problem.call.query.shape[:2], 2, 1))
    sizes = dict(memory.strides) | sizes_of(problem.call)
    at = rule.address(memory.terms, _features(problem, shape), sizes) + torch.zeros(
        shape, dtype=torch.int64
    )
    return bool((at[:, :, 0] == at[:, :, 1]).all())


def _ends(division: Division, problem: Problem, seq: int) -> list[tuple[int, int]]:
    return [(tiles[0][0], tiles[-1][1]) for tiles in division.parts(problem, seq)]


@lru_cache(maxsize=4)
def _stored(problem: Problem, division: Division, slots: int) -> _Stored:
    """Return what the first kernel stores."""
    call = problem.call
    rows, heads, head_size = call.query.shape
    shape = (rows, heads, slots)
    outputs = torch.full((*shape, head_size), math.nan, dtype=torch.float64)
    maxima, sums = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2))
    count = torch.zeros(rows, dtype=torch.int64)
    for row_slice in all_rows(problem):
        inputs, at = problem.attention_inputs(row_slice), problem.rows(row_slice)
        scores, ends = scores_of(inputs), _ends(division, problem, row_slice.seq)
        count[at] = len(ends)
        for part, (start, stop) in enumerate(ends):
            tile = scores[..., start:stop]
            highest = tile.amax(-1)
            if part == 0 and inputs.sinks is not None:
                highest = torch.maximum(highest, inputs.sinks[:, None])
            exps = (tile - highest.clamp(min=-1e30)[..., None]).exp()
            total = exps.sum(-1)
            if part == 0 and inputs.sinks is not None:
                total = total + (inputs.sinks[:, None] - highest).exp()
            mixed = (exps @ inputs.value[start:stop].transpose(0, 1)).transpose(0, 1)
            outputs[at, :, part], maxima[at, :, part] = mixed, highest.T
            sums[at, :, part] = total.T
    if call.op == UNIFIED:
        numbers = {_OUTPUTS: outputs, _MAXIMA: maxima[..., None], _SUMS: sums[..., None]}
    else:
        logs = (maxima + sums.log())[..., None]
        numbers = {_OUTPUTS: outputs / sums[..., None], _LOGS: logs}
    return _Stored(numbers, count)


@lru_cache(maxsize=2)
def _memory(problem: Problem, slots: int, op: str) -> dict[str, TensorMemory]:
    """Return the tensors of the parts, full of NaN."""
    rows, heads, head_size = problem.call.query.shape

    def memory(size: int, terms: tuple[Term, ...], base: int = 0) -> TensorMemory:
        tensor = torch.full((rows, heads, slots, size), math.nan, dtype=torch.float64)
        strides = {f"stride {i}": tensor.stride(i) for i in range(len(terms))}
        return TensorMemory(flat=tensor.flatten(), base=base, terms=terms, strides=strides)

    if op == DECODE_FWD:  # the log-sum-exp follows the output
        return {
            _OUTPUTS: memory(head_size + 1, _TERMS),
            _LOGS: memory(head_size + 1, _SCALAR_TERMS, head_size),
        }
    padded = 1 << (head_size - 1).bit_length()
    return {
        _OUTPUTS: memory(padded, _TERMS),
        _MAXIMA: memory(1, _SCALAR_TERMS),
        _SUMS: memory(1, _SCALAR_TERMS),
    }


def _features(problem: Problem, shape: torch.Size) -> dict[str, torch.Tensor]:
    """Return the features of the numbers of a tensor: tensors that broadcast to its shape."""
    found = {
        name: one[..., None] if one.ndim == 3 else one[:, None] if one.ndim == 2 else one
        for name, one in features_of_rows(problem).items()
    }
    found["head"], found["part"] = torch.arange(shape[1])[:, None, None], torch.arange(shape[2])
    found["part"] = found["part"][:, None]
    if shape[3] == 1:
        found["d"] = torch.tensor(0)
    return found


def _merged(read: dict[str, torch.Tensor], count: torch.Tensor, op: str) -> torch.Tensor:
    """Return the merged output, [rows, heads, head_size]."""
    outputs = read[_OUTPUTS]
    is_part = torch.arange(outputs.shape[2]) < count[:, None]
    is_part = is_part[:, None, :, None].expand(*outputs.shape[:3], 1)
    highest = read[_MAXIMA if op == UNIFIED else _LOGS].masked_fill(~is_part, -math.inf)
    sums = read[_SUMS] if op == UNIFIED else torch.ones_like(highest)
    scale = (highest - highest.amax(2, True)).exp().masked_fill(~is_part, 0.0)
    total = (sums.masked_fill(~is_part, 0.0) * scale).sum(2)
    return (outputs.masked_fill(~is_part, 0.0) * scale).sum(2) / total
