"""Rules about whole outputs: rows written to wrong addresses, and parts of a merge read from wrong ones."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from attnlab.case.ops import DECODE_FWD, MERGE, UNIFIED, WRAPPER
from attnlab.defects.edit import Compute, Defect
from attnlab.diagnosis.address_rules import (
    FAMILY,
    LSE_TERMS,
    ROW_TERMS,
    AddressRule,
    TensorMemory,
    Term,
    address_of,
    memory_of,
    row_features,
    rules_of,
    sizes_of,
    terms_of,
)
from attnlab.diagnosis.divisions import Division, divisions
from attnlab.kernels.model import partials
from attnlab.lab.problem import Predicted, Problem, RowSlice, all_rows, concatenate, scores_of
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import presented

# Rows that one part of an op computes alone, so that a fault of the part concerns only them.

ALL = ""
DECODES = "for decodes"
NO_CONTEXT = "for the last tokens, which have no context"


def parts_of(problem: Problem) -> tuple[str, ...]:
    """Return which rows a rule may concern alone, in words; "" are all.

    chunked_prefill_paged_decode computes decodes in a kernel of its own. merge_attn_states copies the suffix
    of the last tokens if its argument prefill_tokens_with_context says that they have no context.
    """
    names = {WRAPPER: (DECODES,), MERGE: (NO_CONTEXT,)}.get(problem.call.op, ())
    masks = {name: rows_of(problem, name) for name in names}
    return (ALL, *(name for name, rows in masks.items() if rows.any() and not rows.all()))


def rows_of(problem: Problem, part: str) -> torch.Tensor:
    """Return which rows belong to a part, [num_tokens] bool."""
    rows, starts = torch.zeros(len(problem.call.query), dtype=torch.bool), problem.row_starts()
    seqs = range(problem.num_seqs)
    if part == DECODES:
        chosen = [seq for seq in seqs if problem.is_decode(seq)]
    elif part == NO_CONTEXT:
        has_context = [problem.seq_len(seq) > problem.query_len(seq) for seq in seqs]
        chosen = [seq for seq in seqs if not any(has_context[seq:])]
    else:
        chosen = list(seqs)
    for seq in chosen:
        rows[starts[seq] : starts[seq + 1]] = True
    return rows


def text_of(part: str, text: str) -> str:
    """Return the text of a rule that concerns a part."""
    return f"{part}, {text}" if part else text


def is_about_part(name: str) -> bool:
    """Answer whether the name of a rule says that it concerns a part, as :func:`text_of` writes it."""
    return name.startswith((DECODES, NO_CONTEXT))


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

    @property
    def name(self) -> str:
        """Return a name that no other rule has."""
        return text_of(self.part, self.rule.name)

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        right, before = right_output(problem), problem.before
        if before is None:
            return right
        memory = TensorMemory.of(before, ROW_TERMS)
        features, sizes = features_of_rows(problem), _sizes(problem, memory)
        to, own = (address_of(one, features, sizes) for one in (self.rule.terms, ROW_TERMS))
        is_moved = rows_of(problem, self.part)[:, None, None].expand_as(right.output)
        output = memory.after(right.output, to, own, is_moved)
        bound = memory.full(1e-30).after(right.bound, to, own, is_moved)
        return Predicted(output=output, bound=bound)


@dataclass(frozen=True, slots=True)
class MergeRule:
    """A merge reads one of its four inputs at wrong addresses, in the rows of a ``part``; or it weights its
    parts wrongly: ``kind`` is a key of ``MERGE_LAWS`` or ``_WEIGHTS_ADDED``."""

    rule: AddressRule | None = None
    part: str = ALL
    kind: str = ""

    @property
    def name(self) -> str:
        """Return a name for a rule about addresses; "" for another one."""
        return "" if self.rule is None else text_of(self.part, self.rule.name)

    def predict(self, problem: Problem) -> Predicted:
        """Return the whole output under the rule."""
        right, shape = right_output(problem), problem.call.query.shape[:2]
        read = {}
        for name, one in _merge_memory(problem.call, problem).items():
            is_wrong = self.rule is not None and self.rule.tensors == (name,)
            terms = self.rule.terms if self.rule and is_wrong else one.terms
            address = address_of(terms, features_of_rows(problem), _sizes(problem, one))
            read[name] = one.read(address).double()
        lse = torch.stack([read[name].expand(*shape, 1) for name in ("prefix_lse", "suffix_lse")])
        parts = [read["prefix_output"], read["suffix_output"]]
        if self.kind in _WEIGHTS_ADDED:
            lost = _WEIGHTS_ADDED[self.kind]
            parts[lost] = torch.ones_like(parts[lost])
        weights = MERGE_LAWS.get(self.kind, _scaled())(lse)
        weights = weights if self.kind else weights.nan_to_num(0.0)
        output = weights[0] * parts[0] + weights[1] * parts[1]
        bound = 2 * right.bound.amax(0).amax(1)[None, :, None]
        if self.kind:
            bound = bound * output.abs().amax(2, True).clamp(min=1)
        is_part = rows_of(problem, self.part)[:, None, None]
        return Predicted(
            output=torch.where(is_part, output, right.output),
            bound=torch.where(is_part, bound, right.bound),
        )


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


def _shares(prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    """Return the scales of both parts from the exponents of their weights."""
    exps = torch.stack([prefix, suffix]).exp()
    return exps / exps.sum(0)


def _divided(prefix: int, suffix: int) -> Scales:
    """Return the scales of both parts, divided so many times by the sum of their weights."""

    def scales(lse: torch.Tensor) -> torch.Tensor:
        exps = (lse - lse.amax(0)).exp()
        return torch.stack(
            [one / exps.sum(0) ** n for one, n in zip(exps, (prefix, suffix), strict=True)]
        )

    return scales


_LN_2 = math.log(2)
MERGE_LAWS: dict[str, Scales] = {
    "exp2 is used instead of exp in the weight of the prefix": _scaled(prefix=_LN_2),
    "exp2 is used instead of exp in the weight of the suffix": _scaled(suffix=_LN_2),
    "exp2 is used instead of exp in the weights of both parts": _scaled(_LN_2, _LN_2),
    "the exponent of the weight of the prefix is halved": _scaled(prefix=0.5),
    "the exponent of the weight of the suffix is halved": _scaled(suffix=0.5),
    "the exponents of both weights are halved": _scaled(0.5, 0.5),
    "the exponents of both weights are doubled": _scaled(2.0, 2.0),
    "the exponents of both weights are multiplied by log2(e)": _scaled(1 / _LN_2, 1 / _LN_2),
    "tokens without context, whose suffix must be copied, are merged": _scaled(),
    "the denominator lacks the prefix": _scaled(counts=(0.0, 1.0)),
    "the denominator lacks the suffix": _scaled(counts=(1.0, 0.0)),
    "the denominator subtracts the suffix": _scaled(counts=(1.0, -1.0)),
    "the prefix is missing": _scaled(adds=(0.0, 1.0)),
    "the suffix is missing": _scaled(adds=(1.0, 0.0)),
    "the suffix is subtracted": _scaled(adds=(1.0, -1.0)),
    "the weight of the prefix has the wrong sign in its exponent": _scaled(prefix=-1.0),
    "the weight of the suffix has the wrong sign in its exponent": _scaled(suffix=-1.0),
    "the weights are not divided by their sum": _divided(0, 0),
    "the weights are divided by their sum twice": _divided(2, 2),
    "the prefix is not divided by the sum": _divided(0, 1),
    "the suffix is not divided by the sum": _divided(1, 0),
    "the prefix is divided by the sum twice": _divided(2, 1),
    "the suffix is divided by the sum twice": _divided(1, 2),
    "the prefix has the weight 1": lambda lse: torch.cat(
        [torch.ones_like(lse[:1]), _scaled()(lse)[1:]]
    ),
    "the suffix has the weight 1": lambda lse: torch.cat(
        [_scaled()(lse)[:1], torch.ones_like(lse[1:])]
    ),
    "the suffix has the rest of the prefix's weight before its division by the sum": lambda lse: (
        torch.stack([_scaled()(lse)[0], 1 - (lse - lse.amax(0)).exp()[0]])
    ),
    "the prefix has the rest of the suffix's weight before its division by the sum": lambda lse: (
        torch.stack([1 - (lse - lse.amax(0)).exp()[1], _scaled()(lse)[1]])
    ),
    "the smaller log-sum-exp is subtracted in place of the larger": _scaled(top="min"),
    "the log-sum-exp of the suffix is subtracted in the weight of the prefix, or the exponent of the "
    "weight of the suffix is doubled: both give the same weights": lambda lse: _shares(
        lse[0] - lse[1], lse[1] - lse.amax(0)
    ),
    "the log-sum-exp of the prefix is subtracted in the weight of the suffix, or, if no prefix is "
    "empty, the exponent of the weight of the prefix is doubled": lambda lse: _shares(
        lse[0] - lse.amax(0), lse[1] - lse[0]
    ),
    "the exponent of the weight of the prefix is doubled": _scaled(prefix=2.0),
    "the shifted log-sum-exp of the prefix is subtracted in the weight of the suffix": (
        lambda lse: _shares(lse[0] - lse.amax(0), lse[1] - (lse[0] - lse.amax(0)))
    ),
}


# The part whose output is taken for 1.
_WEIGHTS_ADDED = {
    "the weight of the prefix is added in place of its weighted output": 0,
    "the weight of the suffix is added in place of its weighted output": 1,
}


Predict = Callable[[Problem], Predicted]  # a whole output


def output_defects(problem: Problem) -> list[Defect]:
    """Return the rules about whole outputs that a call allows, each as a defect."""
    call = problem.call
    if call.buffer.numel() > MOST_ELEMENTS or call.spec.writes_cache:
        return []
    return [
        Defect(family=FAMILY, name=rule.name or text, text=text, compute=computed(rule.predict))
        for rule, text in _rules(problem)
    ]


def _rules(problem: Problem) -> Iterator[tuple[OutputRule | MergeRule, str]]:
    call = problem.call
    memory = TensorMemory.of(call.buffer, ROW_TERMS)
    others, parts = _other_strides(problem), parts_of(problem)
    for rule in rules_of("output", memory, _sizes(problem, memory), others):
        for part in parts:
            yield OutputRule(rule, part), text_of(part, rule.text)
    if call.spec.merges:
        for kind in (*MERGE_LAWS, *_WEIGHTS_ADDED):
            yield MergeRule(kind=kind), f"in the merge, {kind}"
        for name, one in _merge_memory(call, problem).items():
            for rule in rules_of(name, one, _sizes(problem, one), others):
                for part in parts:
                    yield MergeRule(rule, part), text_of(part, rule.text)


def computed(predict: Predict) -> Compute:
    """Return the ``compute`` of a rule about whole outputs: some rows of the output."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        whole, rows = _predicted(predict, problem), problem.rows(row_slice)
        return Predicted(
            output=whole.output[rows][:, row_slice.heads],
            bound=whole.bound[rows][:, row_slice.heads],
        )

    return compute


@lru_cache(maxsize=4)
def _predicted(predict: Predict, problem: Problem) -> Predicted:
    return predict(problem)


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
    own = dict(memory.strides) | dict(memory.contiguous)
    return own | sizes_of(problem.call) | _other_strides(problem)


@lru_cache(maxsize=2)
def _other_strides(problem: Problem) -> dict[str, int]:
    """Return the strides of the op's tensors, which may be taken for those of another tensor."""
    call = problem.call
    memory = dict(_merge_memory(call, problem)) if call.spec.merges else dict(memory_of(call))
    memory["output"] = TensorMemory.of(call.buffer, ROW_TERMS)
    found = {f"{name} {key}": n for name, one in memory.items() for key, n in one.strides.items()}
    heads = call.query.shape[1]  # kernels compute the stride of a row from that of a head
    return found | {f"num_heads × {name}": heads * n for name, n in found.items()}


# Wrong addresses of a log-sum-exp: to which it is stored, or from which a merge reads those of its parts.

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
    if problem.call.spec.merges:
        yield from _read(problem, values, bound)


def _stored(
    problem: Problem, values: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> Iterator[str]:
    """Yield the rules under which the right ones are stored elsewhere; an element of none is NaN.

    That they are outside of the memory comes first: numbers do not distinguish such rules.
    """
    rows, heads = expected.shape
    is_merge = problem.call.spec.merges  # which stores [heads, rows], others [rows, heads]
    memory = TensorMemory(
        flat=torch.full((rows * heads,), math.nan, dtype=torch.float64),
        base=0,
        terms=LSE_TERMS if is_merge else ROW_TERMS[:2],
        strides={"stride 0": rows if is_merge else heads, "stride 1": 1},
    )
    features, factors = _features(problem), dict(memory.strides) | sizes_of(problem.call)
    own = address_of(memory.terms, features, factors)
    outside, found = list[str](), list[str]()
    for rule in rules_of("lse", memory, factors):
        to = address_of(rule.terms, features, factors)
        inside = ((to >= 0) & (to < rows * heads)).expand(expected.shape)
        for part in parts_of(problem):
            is_moved = rows_of(problem, part)[:, None].expand(expected.shape)
            given, allowed = (memory.after(one, to, own, is_moved) for one in (expected, bound))
            if _is_same(values, given, allowed):
                where = f" ({part})" if part else ""
                found.append(rule.text.removeprefix("the log-sum-exp is ") + where)
                if not bool((is_moved & inside).any()):
                    outside.append(f"written to {_ADDRESS} outside of its memory{where}")
    yield from dict.fromkeys(outside)
    yield from found


def _read(problem: Problem, values: torch.Tensor, bound: torch.Tensor) -> Iterator[str]:
    """Yield the rules under which a merge reads the log-sum-exp of a part at a wrong address."""
    memory = {name: _merge_memory(problem.call, problem)[name] for name in _LSES}
    features = _features(problem)
    right = {
        name: one.read(address_of(one.terms, features, one.strides)).double()
        for name, one in memory.items()
    }
    merged = torch.logaddexp(*right.values())
    for name, one in memory.items():
        factors = dict(one.strides) | sizes_of(problem.call)
        for rule in rules_of(name, one, factors):
            read = one.read(address_of(rule.terms, features, factors)).double()
            read = read.expand(values.shape)
            found = torch.logaddexp(*(right | {name: read}).values())
            for part in parts_of(problem):
                given = torch.where(rows_of(problem, part)[:, None], found, merged)
                if _is_same(values, given, bound.amax()):
                    yield f"wrong: {text_of(part, rule.text)}"


def _is_same(values: torch.Tensor, given: torch.Tensor, bound: torch.Tensor) -> bool:
    is_equal = (values == given) | (values.isnan() & given.isnan())
    return bool((is_equal | ((values - given).abs() <= bound)).all())


def _features(problem: Problem) -> dict[str, torch.Tensor]:
    """Return the features of rows and heads, which broadcast to [rows, heads]."""
    found = dict(features_of_rows(problem))
    found["d"] = torch.tensor(0)
    return {name: one[..., 0] if one.ndim else one for name, one in found.items()}


# Rules about scratch memory: the results of parts of a sequence, stored or read at wrong addresses.
#
# ``unified_attention`` stores, for each row, head and segment, an output before the division, a maximum and
# a sum. ``decode_attention_fwd`` stores, for each split, an output and its log-sum-exp. A second kernel
# merges them. The lab fills scratch memory with NaN, so an entry that was not stored gives NaN.

_MOST_DIVISIONS = 2  # segments of tiles of 16 and 32, as the kernels of vLLM use
_TERMS = terms_of("row", "head", "part", "d")
_SCALAR_TERMS = _TERMS[:3]
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
        found = _stored_scratch(problem, self.division, self.slots)
        memory = _memory(problem, self.slots, problem.call.op)
        read = {}
        for name, numbers in found.numbers.items():
            terms = (self.rule if name in self.tensors else memory[name]).terms
            read[name] = self._through(memory[name], numbers, terms, problem)
        output = _merged(read, found.count, problem.call.op)
        right = right_output(problem)
        size = output.abs().nan_to_num(0.0, 0.0, 0.0).amax(2, True).clamp(min=1)
        bound = 2 * right.bound.amax(0).amax(1)[None, :, None] * size
        return Predicted(output=output, bound=bound.expand_as(output))

    def _through(
        self,
        memory: TensorMemory,
        numbers: torch.Tensor,
        terms: tuple[Term, ...],
        problem: Problem,
    ) -> torch.Tensor:
        """Return what is read after numbers were stored."""
        features = _scratch_features(problem, numbers.shape)
        sizes = dict(memory.strides) | sizes_of(problem.call)
        to, at = (
            address_of(one, features, sizes).expand(numbers.shape)
            for one in ((terms, memory.terms) if self.stored else (memory.terms, terms))
        )
        flat, to = memory.flat.clone(), to + memory.base
        inside = (to >= 0) & (to < len(flat)) & ~numbers.isnan()
        flat[to[inside]] = numbers[inside]
        return replace(memory, flat=flat).read(at)


def scratch_defects(problem: Problem) -> list[Defect]:
    """Return the rules about scratch memory that a call allows, each as a defect."""
    call = problem.call
    if call.op not in (UNIFIED, DECODE_FWD) or call.buffer.numel() > MOST_ELEMENTS:
        return []
    if max(map(problem.query_len, problem.computed_seqs())) > _LONGEST:
        return []
    return [
        Defect(
            family=FAMILY,
            name=f"{rule.rule.name} {rule.stored} {rule.division.text}",
            text=text,
            compute=computed(rule.predict),
        )
        for rule, text in _scratch_rules_of(problem)
    ]


def _scratch_rules_of(problem: Problem) -> Iterator[tuple[ScratchRule, str]]:
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
                    text = rule.text.replace("are read at", verb)
                    if not stored and name in _UNSCALED and _is_one_address(rule, memory, problem):
                        text = f"{_UNSCALED[name]}; or, which no output distinguishes, {text}"
                    yield ScratchRule(rule, groups[name], stored, division, slots), text


def _is_one_address(rule: AddressRule, memory: TensorMemory, problem: Problem) -> bool:
    """Answer whether all parts of a row and head are read at one address, so that their factors are 1."""
    shape = torch.Size((*problem.call.query.shape[:2], 2, 1))
    sizes = dict(memory.strides) | sizes_of(problem.call)
    at = address_of(rule.terms, _scratch_features(problem, shape), sizes).expand(shape)
    return bool((at[:, :, 0] == at[:, :, 1]).all())


def highest_of_parts(problem: Problem) -> torch.Tensor:
    """Return the highest log-sum-exp of merged parts, [rows, heads] float64; NaN for other ops."""
    call = problem.call
    if call.spec.merges:
        parts = partials(call, problem.target)
        return torch.maximum(parts.prefix_lse, parts.suffix_lse).T.double()
    splits = [one for one in divisions(problem) if one.merge == "running"]
    if not splits:
        return torch.full(call.query.shape[:2], math.nan, dtype=torch.float64)
    logs = _stored_scratch(problem, splits[0], splits[0].slots).numbers[_LOGS][..., 0]
    return logs.nan_to_num(-math.inf, neginf=-math.inf).amax(2)


def _ends(division: Division, problem: Problem, seq: int) -> list[tuple[int, int]]:
    return [(tiles[0][0], tiles[-1][1]) for tiles in division.parts(problem, seq)]


@lru_cache(maxsize=4)
def _stored_scratch(problem: Problem, division: Division, slots: int) -> _Stored:
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


def _scratch_features(problem: Problem, shape: torch.Size) -> dict[str, torch.Tensor]:
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
