"""conclude: an XRay from a measurement: search for a description, confirm it on another case, state it."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnlab.case.case import Case, as_case
from attnlab.case.errors import AttnLabError, InvalidCall, InvalidCase, NotDeterministic
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.case.ops import check_weighs_values
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide, kernels_of
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend, RunOptions
from attnlab.kernels.control import controlled, is_controlled
from attnlab.kernels.run_call import for_call
from attnlab.lab.lab import Lab, default_lab
from attnlab.lab.products import check_memory
from attnlab.tensors.cache import NOBODY
from attnlab.tensors.call import KernelCall
from attnlab.weights.codes import SlotOwners, num_slots
from attnlab.weights.fit import (
    SLACK,
    Law,
    Magnitudes,
    compare,
    explained,
    fit_law,
    fit_magnitudes,
    pattern,
    some_rows,
    too_coarse,
)
from attnlab.weights.measurement import (
    COARSE_VALUES,
    MOST_RUNS,
    NUMBERS,
    Examined,
    Subject,
    check_numbers,
    examine,
    is_coarse,
    runner,
)
from attnlab.weights.plan import Constant, Description, Plan, Rule, numbers, right_plan
from attnlab.weights.rules import Gain, HeadFactors, KeyHead, Power, ScoreFactor, TileTimes
from attnlab.weights.search import MAX_RULES, Found, Search
from attnlab.weights.setup import (
    AttentionSetup,
    check_readable,
    device_for,
    moved,
    near_slots,
    value_scales,
)
from attnlab.weights.xray import ValueFaults, XRay, predicts_values, value_faults

# Another Case for a description: odd scales, other lengths and other numbers, on the same kernels.
_OTHER_SCALE = 1.17  # of the scores, in units of the first: no constant of a rule


def if_allowed(case: Case, **changes: Any) -> Case | None:
    """Return a Case with changes, or None if it does not allow them."""
    with suppress(InvalidCase):
        return case.replace(**changes)
    return None


def other_case(case: Case) -> Case | None:
    """Return a small Case that runs the same kernels as ``case``; None if none is found.

    It has context lengths at and around multiples of blocks and tiles, and scales that are no powers of two.
    """
    lengths = case.lengths
    decodes, prefills = 1 in lengths.query_lens, max(lengths.query_lens) > 1
    size, window = case.block_size, case.sliding_window
    far = min(max(lengths.seq_lens), 600) + 3
    pairs: list[tuple[int, int]] = []
    if decodes:
        pairs += [(1, 2 * size - 1), (1, 37), (1, 64), (1, far)]
    if prefills or not decodes:
        wide = min(window + 5, 40) if window else 37  # past a tile of 32
        pairs += [(3, size), (wide, 2 * size + 5), (5, 128), (4, 96), (2, 47 + window)]
        pairs += [(21, 0)] if 0 in lengths.ctx_lens else []
    changes = {
        "query_lens": tuple(query for query, _ in pairs),
        "ctx_lens": tuple(ctx for _, ctx in pairs),
        "seed": case.seed + 11,
        "distribution": "normal",
        "stage": "sound",
        **dict.fromkeys(("block_table", "num_blocks", "seq_range")),
        "max_blocks_per_seq": _columns(case, pairs),
        **dict.fromkeys(("max_query_len", "max_seq_len", "fill", *DATA_OF_LENGTHS)),
        "first_block": 0,
        "freed": "kept",
        "cache_write": "scaled",
        "cache_format": None,
    }
    if case.sm_scale is not None:  # else a factor 1/sm_scale is sqrt(head_size) in both cases
        changes["sm_scale"] = round(case.sm_scale * _OTHER_SCALE, 6)
    if case.is_fp8:
        changes |= {"k_scale": case.k_scale * 1.3, "v_scale": case.v_scale * 0.7}
    other = if_allowed(case, **changes)
    return other if other and decide(other).kernels == decide(case).kernels else None


_MOST_HEADS = 32  # of a Case that gets a case with more


def with_more_heads(case: Case) -> Case:
    """Return a Case with three KV heads more: a rule may hold with two of them alone."""
    if case.kv_head_range is not None or case.num_heads > _MOST_HEADS:
        return case
    return if_allowed(case, num_heads=case.num_heads + 3 * case.num_queries_per_kv) or case


def _columns(case: Case, pairs: list[tuple[int, int]]) -> int | None:
    """Return the number of columns of the block table: at least the Case's, if that gives one."""
    if case.max_blocks_per_seq is None:
        return None
    longest = max(query + ctx for query, ctx in pairs)
    return max(case.max_blocks_per_seq, -(-longest // case.block_size))


@dataclass(frozen=True, eq=False)
class UsableRows:
    """Rows of a measurement.

    - ``rows``: [n] indices into those of the measurement; ``setup``, ``measured``, ``expected``: of them.
    - ``is_all``: whether they are all rows of the measurement.
    """

    rows: torch.Tensor
    setup: AttentionSetup
    measured: torch.Tensor
    expected: torch.Tensor
    owners: SlotOwners
    is_all: bool

    @cached_property
    def _fitted(self) -> tuple[Plan, torch.Tensor] | None:
        """Return the right plan and the weights of some rows of a large call, of all of a small one."""
        if not len(self.rows):
            return None
        some = some_rows(self.setup)
        if len(some) == len(self.rows):
            return right_plan(self.setup), self.measured
        return right_plan(self.setup.take(some)), self.measured[some]

    @cached_property
    def law(self) -> Law | None:
        """Return the fit of the log weights; None if there are too few."""
        return None if self._fitted is None else fit_law(*self._fitted)

    @cached_property
    def magnitudes(self) -> Magnitudes | None:
        """Return the fit of the factors, on the CPU; None if there are too few weights."""
        found = None if self._fitted is None else fit_magnitudes(*self._fitted)
        return None if found is None else moved(found, "cpu")

    def are_within(self, slack: float) -> bool:
        """Answer whether all weights are right up to so many bounds."""
        return bool(explained(self.setup, self.measured, self.expected, slack).all())

    @property
    def is_coarse(self) -> bool:
        """Answer whether rounding to bfloat16 explains what is wrong with the weights."""
        return is_coarse(self.setup, self.measured, self.expected)

    @property
    def zero(self) -> torch.Tensor:
        """Return which rows are 0 although they have keys, [n] bool."""
        has_keys = (self.expected.sum(-1) > 0).any(1)
        is_zero: torch.Tensor = (self.measured == 0).all(-1).all(-1) & has_keys
        return is_zero

    def take(self, keep: torch.Tensor) -> "UsableRows":
        """Return some of the rows; ``keep``: [n] bool."""
        setup, is_all = self.setup.take(torch.nonzero(keep).flatten()), bool(keep.all())
        weights = self.measured[keep], self.expected[keep]
        return UsableRows(self.rows[keep], setup, *weights, self.owners, self.is_all and is_all)


_MANY = 4096  # slots, beyond which those that no row reads or may read are left out


def usable_rows(found: Examined, *, every_slot: bool = True) -> UsableRows:
    """Return the rows whose query and output are finite.

    Without ``every_slot``, slots of a large cache are left out that have no weight and are far from the
    blocks of all sequences.
    """
    finite = found.measurement.finite & found.setup.query.isfinite().flatten(1).all(1)
    rows = torch.nonzero(finite).flatten()
    setup, measured, expected = found.setup, found.measurement.weights, found.expected
    owners, is_all = found.owners, bool(finite.all())
    if not is_all:
        setup, measured, expected = setup.take(rows), measured[rows], expected[rows]
    if not every_slot and setup.num_slots > _MANY and len(rows):
        kept = near_slots(setup, (measured != 0).any(0).any(0))
        measured, expected = measured[..., kept], expected[..., kept]
        setup, owners = setup.with_slots(kept), owners.take(kept)
    return UsableRows(rows, setup, measured, expected, owners, is_all)


def with_elements(found: Examined, elements: torch.Tensor | None) -> Examined:
    """Return a measurement whose outputs are read in the order ``elements``, [head_size], or as they are."""
    if elements is None:
        return found
    return dataclasses.replace(
        found, measurement=found.measurement.reordered(found.setup, elements)
    )


# How often an X-ray runs the kernel.

# With random values, and where a row may be unwritten or a value come from another head.
_FURTHER = 5


def most_runs(case: Case) -> int:
    """Return the number of runs that an X-ray of a wrong kernel makes, with a second Case.

    A right kernel needs those for shared lanes only.
    """
    other = other_case(case)
    slots = case.total_blocks * case.block_size
    resolving = _runs(case, slots)
    if resolving > MOST_RUNS:
        resolving = _runs(case, NUMBERS)
    of_other = 0 if other is None else _runs(other, _lanes(other))
    return _runs(case, _lanes(case)) + resolving + of_other + _FURTHER


def _runs(case: Case, numbers: int) -> int:
    return -(-numbers // case.head_size)


def _lanes(case: Case) -> int:
    """Return the number of lanes that sequences share: positions in the cache, and new tokens."""
    longest = max(case.lengths.seq_lens, default=0)
    cached = -(-longest // case.block_size) * case.block_size
    new = 0 if case.spec.new_tokens_from == "cache" else max(case.lengths.query_lens, default=0)
    return cached + new


Other = Callable[[tuple[int, ...] | None, bool, bool], Subject | None]


class SecondCase:
    """Measures another case when it is needed, once for the same heads.

    ``other`` returns another subject on the same backend, or None. Its arguments: the query heads that a
    description concerns (None for all), whether every head is needed, and whether more heads are.
    """

    def __init__(self, other: Other | None) -> None:
        self._other = other
        self._known: dict[tuple[tuple[int, ...] | None, bool, bool], Examined | None] = {}

    def examined(
        self, heads: tuple[int, ...] | None, *, every_head: bool, more_heads: bool = False
    ) -> Examined | None:
        """Return the sums of the lanes of another case; None without one."""
        for key in ((None, True, more_heads), (heads, every_head, more_heads)):
            if key in self._known:
                return self._known[key]
        subject = None if self._other is None else self._other(heads, every_head, more_heads)
        found = None
        if subject is not None:
            with suppress(AttnLabError):
                found = examine(subject, resolve=False, values=every_head)
        self._known[heads, every_head, more_heads] = found
        return found

    def confirmed(self, search: Found, faults: ValueFaults) -> tuple[Found, bool | None]:
        """Return the descriptions that predict the other case's weights, and whether there was one."""
        first = search.descriptions[0]
        rules = [rule for one in search.descriptions for rule in one.rules]
        more_heads = any(isinstance(rule, KeyHead) for rule in rules)
        every_head = more_heads or faults.is_rule
        every_head |= any(isinstance(rule, HeadFactors) for rule in rules)
        heads = None if more_heads else first.scope.heads
        found = self.examined(heads, every_head=every_head, more_heads=more_heads)
        if found is None:
            return search, None
        found = with_elements(found, faults.elements)
        usable, lanes = usable_rows(found), found.measurement.lanes
        if not len(usable.rows):
            return search, None
        folded = found.measurement.folded[usable.rows]
        kept = [
            one
            for one in search.descriptions
            if compare(usable.setup, folded, lanes.fold(one.weights(usable.setup))).complete
        ]
        return dataclasses.replace(search, descriptions=tuple(kept)), bool(kept)

    def confirms_values(self, faults: ValueFaults) -> bool | None:
        """Answer whether the faults predict the output of another case; None without one."""
        found = self.examined(None, every_head=True, more_heads=bool(faults.form))
        if found is None or not bool(found.measurement.finite.any()):
            return None
        found = with_elements(found, faults.elements)
        rows: torch.Tensor = predicts_values(found.setup, found.measurement, faults)
        return bool(rows[found.measurement.finite].all())


_NOTHING = Found(descriptions=(), tried=0)
_ZERO_S = 2.0  # time for the search for a rule of rows of zeros


_COARSE_S = 4.0  # time for the search where rounding may be the cause
_CLEAR = 2 * SLACK  # bounds; a rule leaves up to half of that
_WEIGHTS_EACH = 8  # wrong weights for each part of a rule that one call shows
_NEARLY_ONE = 0.01  # a factor that differs from 1 by less is rounding of a constant


def xray_of(subject: Subject, other: Other | None = None, limit_s: float = 10.0) -> XRay:
    """Measure a subject and conclude.

    ``other``: as in :class:`attnlab.weights.conclude.SecondCase`.
    ``limit_s`` bounds the search for a description. Wrong weights of a kernel that may not be
    deterministic are measured again, each run twice. Raises what the backend raises,
    NotDeterministic, InvalidCase for an op without values, InvalidCall for a call that is too large.
    """
    began = time.perf_counter()
    found = examine(subject)
    if found.is_right or subject.backend.is_deterministic or is_controlled():
        return _concluded(subject, found, other, limit_s, began)
    with controlled() as control:
        seen = _concluded(subject, examine(subject), other, limit_s, began)
    if control.found is not None:
        raise NotDeterministic(control.found.text)
    return seen


def _concluded(
    subject: Subject, found: Examined, other: Other | None, limit_s: float, began: float
) -> XRay:
    """Return the X-ray of a measurement."""
    if not found.is_right:  # the search for rules is one of the CPU
        found = found.on_cpu
    run = runner(subject, "cpu")
    usable, second = usable_rows(found, every_slot=False), SecondCase(other)
    verdict = _Verdict(status="unreadable")
    if len(usable.rows):
        coarse = usable.are_within(1.0) or usable.is_coarse
        faults = value_faults(found.setup, found.measurement, run, COARSE_VALUES if coarse else 0.0)
        if faults.elements is not None:
            found = with_elements(found, faults.elements)
            usable = usable_rows(found, every_slot=False)
        verdict = _judge_all(usable, faults, second, limit_s)
    setup, measurement = found.setup, found.measurement
    codes = f" with one-hot{' and random signed' if measurement.error else ''} codes"
    lines = [
        f"{measurement.runs} runs{codes} over {setup.num_slots} slots; a weight is known to "
        f"{float(setup.relative.max()):.1g} of it plus {float(setup.fixed.max()):.1g}"
    ]
    if found.drawn:
        lines.append(
            "query and keys were drawn from N(0, 1): the scores of the case differ too little"
        )
    return XRay(
        status=_status_of_all(verdict.status, found, usable),
        case=subject.case,
        backend=subject.backend.text(subject.kernels, subject.target),
        examined=found,
        descriptions=verdict.search.descriptions,
        confirmed=verdict.confirmed,
        law=usable.law,
        magnitudes=usable.magnitudes,
        sentences=(*_unreadable(found, usable.rows), *verdict.sentences, *lines),
        tried=verdict.search.tried,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Verdict:
    """A status, the descriptions, whether the first was confirmed, and the sentences."""

    status: str
    search: Found = _NOTHING
    confirmed: bool | None = None
    sentences: tuple[str, ...] = ()


def _judge_all(
    usable: UsableRows, faults: ValueFaults, second: SecondCase, limit_s: float
) -> _Verdict:
    """Return what the finite rows show; rows of zeros apart, unless a rule explains them with the others."""
    zero = usable.zero
    if not bool(zero.any()) or bool(zero.all()):
        return _judge(usable, faults, second, limit_s)
    verdict = _judge(usable.take(~zero), faults, second, limit_s)
    rest = verdict.search.descriptions
    if rest and compare(usable.setup, usable.measured, rest[0].weights(usable.setup)).complete:
        return verdict
    if verdict.status == "right":
        again = _judge(usable, faults, second, min(limit_s, _ZERO_S), 1)
        if again.status == "described":
            return again
    words = f"{_rows_are(usable.setup.rows[zero])} 0 in every head"
    status = "undecided" if verdict.status == "undecided" else "described"
    prefix = "" if verdict.status == "right" else "other rows: "
    lines = (
        f"{words}: no key has a weight",
        *(f"{prefix}{one}" for one in verdict.sentences[:1]),
    )
    return dataclasses.replace(verdict, status=status, sentences=(*lines, *verdict.sentences[1:]))


def _judge(
    usable: UsableRows,
    faults: ValueFaults,
    second: SecondCase,
    limit_s: float,
    max_rules: int = MAX_RULES,
) -> _Verdict:
    """Return what the finite rows show."""
    setup, measured, expected = usable.setup, usable.measured, usable.expected
    holds = second.confirms_values(faults) if faults.is_rule else None
    about_values = _about_values(faults, holds)
    if usable.are_within(1.0):
        hidden = too_coarse(setup, expected)
        if not about_values and bool(hidden.any()):
            return _Verdict(status="undecided", sentences=(_not_decided(hidden),))
        if not about_values:
            which = "every row" if usable.is_all else "every other row"
            words = f"{which} attends to its keys with the right weights, within the precision"
            return _Verdict(status="right", sentences=(words,))
        lines = (*about_values, "the weights themselves are right")
        status = "undecided" if holds is False else "described"
        return _Verdict(status=status, confirmed=holds, sentences=lines)
    coarse = usable.is_coarse
    limits = (_COARSE_S, 1) if coarse else (limit_s, max_rules)
    search = Search(setup, measured, *limits).run()
    plain = (*about_values, *pattern(setup, measured, expected, usable.owners, usable.law))
    if not coarse and usable.magnitudes is not None and usable.magnitudes.text:
        plain = (*plain, usable.magnitudes.text)
    if search.descriptions and not _is_rounding(search.descriptions[0], setup):
        kept, confirmed = second.confirmed(search, faults)
        first = search.descriptions[0].text
        why = _why_not_stated(usable, search.descriptions[0], confirmed)
        if why and not coarse:
            words = f"cannot decide: the weights fit “{first}”, but {why}"
            return _Verdict(status="undecided", search=search, sentences=(words, *plain))
        if kept.descriptions and not why:
            lines = (*_stated(kept, confirmed, setup), *plain)
            return _Verdict(status="described", search=kept, confirmed=confirmed, sentences=lines)
        if not coarse:
            words = f"cannot decide: the weights fit “{first}” here, but not in another case"
            return _Verdict(
                status="undecided", search=kept, confirmed=False, sentences=(words, *plain)
            )
    if coarse:
        words = rounding_text(_largest_rounding(measured, expected))
        return _Verdict(status="precision", sentences=(words, *plain[:1]))
    words = (
        f"cannot decide: none of {search.tried} descriptions explains the weights within the bound"
    )
    return _Verdict(status="undecided", search=search, sentences=(words, *plain))


def _is_rounding(one: Description, setup: AttentionSetup) -> bool:
    """Answer whether a description only has factors that are 1 up to the rounding of a constant."""
    return all(
        (factors := _factors(rule)) and all(abs(f.of(setup) - 1) < _NEARLY_ONE for f in factors)
        for rule in one.rules
    )


def _why_not_stated(usable: UsableRows, one: Description, confirmed: bool | None) -> str:
    """Return why a description that fits is not stated, or ""."""
    if usable.are_within(_CLEAR):
        return f"each is within {_CLEAR:g} bounds of the right weight, where other rules fit, too"
    if confirmed is None and not _is_over_determined(usable, one):
        return "so few weights fit other rules, too, and no other call confirms it"
    return ""


def _is_over_determined(usable: UsableRows, one: Description) -> bool:
    """Answer whether one call shows a description: one rule, with many more wrong weights than parts."""
    error = (usable.measured - usable.expected).abs()
    wrong = int((error > usable.setup.bound(usable.expected)).sum())
    return len(one.rules) == 1 and wrong >= _WEIGHTS_EACH * one.rules[0].complexity


def _about_values(faults: ValueFaults, holds: bool | None) -> tuple[str, ...]:
    """Return the sentences about values; ``holds``: whether another case confirms the rules."""
    ending = {True: " (confirmed on another case)", None: " (not confirmed on another case)"}
    if holds is False:
        return (f"{faults.rules[0]}: so it seems here, but not in another case", *faults.limits)
    return (*(rule + ending[holds] for rule in faults.rules), *faults.limits)


def _status_of_all(status: str, found: Examined, usable: UsableRows) -> str:
    """Return the status with the rows that are not finite: unwritten rows are a description of their own."""
    if len(usable.rows) == len(found.setup.rows):
        return status
    left = torch.ones_like(found.measurement.unwritten)
    left[usable.rows] = False
    if bool(found.measurement.unwritten[left].all()):
        return status if status == "undecided" else "described"
    return "undecided" if len(usable.rows) else "unreadable"


def _factors(rule: Rule) -> tuple[Constant, ...]:
    """Return the factors that a rule consists of, none for one that says more."""
    if isinstance(rule, Gain | Power | ScoreFactor):
        return (rule.factor,)
    if isinstance(rule, HeadFactors):
        return tuple(factor for _, factor in rule.factors)
    return (rule.times,) if isinstance(rule, TileTimes) else ()


def _stated(found: Found, confirmed: bool | None, setup: AttentionSetup) -> list[str]:
    """Return the sentences of the descriptions, and whether other kinds of sequences did not run."""
    first = found.descriptions[0]
    rest = [one for one in found.descriptions[1:] if not one.is_fitted or first.is_fitted]
    ending = {True: "confirmed on another case", None: "not confirmed on another case"}
    words = [ending[confirmed]] if confirmed in ending else []
    if setup.call.spec.prefill and bool((setup.query_len == 1).all()):
        words.append("only decodes ran")
    lines = [first.text + (f" ({'; '.join(words)})" if words else "")]
    others = sorted({one.text for one in rest} - {first.text}, key=len)
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(f"the same weights follow from: {'; or '.join(others[:3])}{more}")
    return lines


def _not_decided(hidden: torch.Tensor) -> str:
    """Return that rows and heads, [R, H] bool, are measured too coarsely to be called right."""
    rows = int(hidden.any(1).sum())
    return (
        f"not decided: precision: in {rows} of {len(hidden)} rows, the largest weight is known to no better "
        "than 25 % of it; no weight is beyond this bound"
    )


def _largest_rounding(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Return by how much of it a weight is off at most, of those that are not tiny."""
    large = expected > 1e-3
    relative = ((measured - expected).abs() / expected.clamp(min=1e-12))[large]
    return float(relative.max()) if relative.numel() else 0.0


def rounding_text(largest: float) -> str:
    """Return that weights are off by rounding, by up to ``largest`` of them."""
    return (
        f"precision: every key has about its weight, off by up to {largest:.2g} of it, which is more than "
        "the kernel's dtype explains and no more than rounding to bfloat16"
    )


def measured_weights(case: Case, lab: Lab) -> Examined:
    """Return the weights of a Case, on the CPU, without a search for what explains them. Raises as
    :func:`xray`."""
    return examine(_on_fastest(_of_case(case, lab, lab.backend(case)), lab.device)).on_cpu


def rounding_of(case: Case, lab: Lab) -> float | None:
    """Measure the weights of a Case, and return by how much of it one is off at most; 0 if all are right.

    None if rounding to bfloat16 does not explain every weight. Raises as :func:`xray`.
    """
    usable = usable_rows(measured_weights(case, lab))
    if not usable.is_all or bool(usable.zero.any()) or not usable.is_coarse:
        return None
    return 0.0 if usable.are_within(1.0) else _largest_rounding(usable.measured, usable.expected)


def _rows_are(rows: torch.Tensor) -> str:
    """Return "row 3 is" or "rows 3–5 are"."""
    noun, verb = ("row", "is") if len(rows) == 1 else ("rows", "are")
    return f"{noun} {numbers(rows.tolist())} {verb}"


def _unreadable(found: Examined, usable: torch.Tensor) -> list[str]:
    """Return what cannot be read."""
    setup, lines = found.setup, []
    unwritten = found.measurement.unwritten
    if bool(unwritten.any()):
        which = _rows_are(setup.rows[unwritten])
        lines.append(f"{which} not written: the output buffer keeps its contents")
    left = torch.ones_like(unwritten)
    left[usable] = False
    left &= ~unwritten
    if bool(left.any()):
        rows = setup.rows[left].tolist()
        why = "query" if not bool(setup.query[left].isfinite().all()) else "output"
        lines.append(
            f"{len(rows)} of {len(setup.rows)} rows ({numbers(rows)}) cannot be read: "
            f"their {why} is not finite"
        )
    if found.measurement.needs_values:
        lines.append(
            "with random values they are finite: the kernel inspects V, for example to scale it by a "
            "maximum, which is 0 here; the weights cannot be read with values of 0 and 1"
        )
    return lines


NO_RUNNER = (
    "backend must be given to X-ray a saved call, which holds no kernel: --kernel mine.py:my_attention, "
    "--source VLLM, or --backend (model measures attnlab's own model)"
)


def xray(
    case: Case | KernelCall | str,
    *,
    backend: str | Backend | None = None,
    confirm: bool = True,
    limit_s: float = 10.0,
    lab: Lab | None = None,
    **changes: Any,
) -> XRay:
    """Measure the effective attention weights of a kernel, and describe how they differ from the right ones.

    The unmodified kernel runs with coded values; keys of empty slots are replaced by finite ones.

    - ``case``: a Case, a pytest id, or a KernelCall such as a captured one.
    - ``backend``: whose kernel runs: a name as in ``Case.backend``, such as "mine.py:fn", or a Backend.
      Default: the Case's. A KernelCall holds no kernel, so it needs a backend.
    - ``confirm``: a description must also predict another Case, which is measured if one is found. A
      KernelCall has no other Case.
    - ``limit_s``: time for the search for a description, in seconds.
    - ``changes``: fields of the Case; of a KernelCall, where it ran, for example ``platform="sm_90"``.

    Raises InvalidCase for an op without values (a cache write) and for a KernelCall without a backend, and
    InvalidCall for a call that is too large, and NotDeterministic if equal runs of the kernel differ.
    """
    lab = lab or default_lab()
    if isinstance(case, KernelCall):
        if call_platform := case.origin.platform:
            changes.setdefault("platform", call_platform)
        chosen = backend if backend is not None else changes.pop("backend", None)
        if chosen is None:
            raise InvalidCase(NO_RUNNER, field="backend")
        return xray_of_call(case, Case(**changes), chosen, lab=lab, limit_s=limit_s)
    if isinstance(backend, str):
        changes["backend"] = backend
    case = as_case(case, **changes)
    found = backend if isinstance(backend, Backend) else lab.backend(case)

    def other(heads: tuple[int, ...] | None, every_head: bool, more_heads: bool) -> Subject | None:
        second = other_case(case)
        if second is None:
            return None
        second = with_more_heads(second) if more_heads else second
        part = second if every_head else _of_one_head(second, found, heads)
        return _of_case(part, lab, found)

    subject = _on_fastest(_of_case(case, lab, found), lab.device)
    return xray_of(subject, other if confirm else None, limit_s)


def _of_one_head(case: Case, backend: Backend, heads: tuple[int, ...] | None) -> Case:
    """Return the Case with the KV head of one of the query heads to run, if the backend can run a part."""
    kv_head = (case.num_heads - 1 if heads is None else heads[-1]) // case.num_queries_per_kv
    try:
        part = case.replace(kv_head_range=(kv_head, kv_head + 1))
        backend.check(part)
    except AttnLabError:
        return case
    return part


def xray_of_call(
    call: KernelCall, ran: Case, backend: str | Backend | None = None, *, lab: Lab, limit_s: float
) -> XRay:
    """Return the X-ray of a call; ``ran`` has the platform, the release and, by default, the backend."""
    found = backend
    if not isinstance(found, Backend):
        found = find_backend(found or ran.backend, lab.source, lab.device)
    found = for_call(call, found)
    return xray_of(_on_fastest(_of_call(call, ran, found), lab.device), limit_s=limit_s)


def _on_fastest(subject: Subject, requested: str | None) -> Subject:
    """Return the subject with the device that computes its weights fastest."""
    weights = len(subject.rows) * len(subject.heads) * num_slots(subject.call)
    return dataclasses.replace(subject, device=device_for(weights, requested))


def _of_case(case: Case, lab: Lab, backend: Backend) -> Subject:
    """Return what is measured of a Case: the rows and heads that it runs."""
    check_weighs_values(case.spec)
    check_readable(case)
    check_memory(case, backend.cache_copies)
    backend.check(case)
    rows = case.query_rows or range(case.lengths.num_tokens)
    heads = case.query_heads or range(case.num_heads)
    slots = case.total_blocks * case.block_size
    check_numbers(len(rows), len(heads), slots)
    call, provenance = lab.call(case), lab.cache(case).provenance
    options = RunOptions.of(case)
    if case.argument.cache is not None:
        options = dataclasses.replace(options, value_scale=value_scales(call))
    if lab.on_step is not None:
        options = dataclasses.replace(options, on_step=lab.on_step)
    return Subject(
        call=call,
        target=Target.of(case),
        kernels=decide(case).kernels,
        backend=backend,
        options=options,
        rows=torch.arange(rows.start, rows.stop),
        heads=torch.arange(heads.start, heads.stop),
        written=(provenance.seq != NOBODY).flatten(),
        case=case,
    )


def _of_call(call: KernelCall, ran: Case, backend: Backend) -> Subject:
    """Return what is measured of a call: every row of its sequences, and every head."""
    if call.op not in backend.ops:
        allowed = " or ".join(backend.ops)
        raise InvalidCall(f"op must be {allowed} with backend {backend.name}, got {call.op}")
    return Subject(
        call=call,
        target=Target.of(ran),
        kernels=kernels_of(ran, call),
        backend=backend,
        options=RunOptions(),
        rows=torch.arange(int(call.query_start_loc[0]), int(call.query_start_loc[-1])),
        heads=torch.arange(call.query.shape[1]),
    )
