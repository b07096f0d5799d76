"""conclude: an XRay from a measurement: search for a description, confirm it on another case, state it."""

import dataclasses
import time
from dataclasses import dataclass

import torch

from attnlab.case.errors import NotDeterministic
from attnlab.kernels.control import controlled, is_controlled
from attnlab.weights.confirmation import Other, SecondCase
from attnlab.weights.description import Description, numbers
from attnlab.weights.evidence import compare, explained, too_coarse
from attnlab.weights.examine import COARSE_VALUES, Examined, Subject, examine, is_coarse
from attnlab.weights.head_rules import HeadGain, HeadScore
from attnlab.weights.measurement import runner
from attnlab.weights.pattern import pattern
from attnlab.weights.rule import Constant, Rule
from attnlab.weights.score_rules import Gain, Power, ScoreFactor
from attnlab.weights.search import MAX_RULES, Found, describe
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.tile_rules import TileTimes
from attnlab.weights.usable import UsableRows, usable_rows, with_elements
from attnlab.weights.values import ValueFaults, value_faults
from attnlab.weights.xray import XRay

_NOTHING = Found(descriptions=(), tried=0)
_ZERO_S = 2.0  # time for the search for a rule of rows of zeros
_BE = {False: "is", True: "are"}
_COARSE_S = 4.0  # time for the search where rounding may be the cause
_WEIGHTS_EACH = 8  # wrong weights for each part of a rule that one call shows
_NEARLY_ONE = 0.01  # a factor that differs from 1 by less is rounding of a constant


def xray_of(subject: Subject, other: Other | None = None, limit_s: float = 10.0) -> XRay:
    """Measure a subject and conclude.

    ``other``: as in :class:`attnlab.weights.confirmation.SecondCase`.
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
    run = runner(subject.backend, subject.target, subject.kernels, subject.options)
    usable, second = usable_rows(found, every_slot=False), SecondCase(other)
    verdict = _Verdict(status="unreadable")
    if len(usable.rows):
        three = usable.setup, usable.measured, usable.expected
        coarse = bool(explained(*three, 1.0).all()) or is_coarse(*three)
        faults = value_faults(found.setup, found.measurement, run, COARSE_VALUES if coarse else 0.0)
        if faults.elements is not None:
            found = with_elements(found, faults.elements)
            usable = usable_rows(found, every_slot=False)
        verdict = _judge_all(usable, faults, second, limit_s)
    return XRay(
        status=_status_of_all(verdict.status, found, usable),
        case=subject.case,
        backend=subject.backend.text(subject.kernels, subject.target),
        examined=found,
        descriptions=verdict.search.descriptions,
        confirmed=verdict.confirmed,
        law=usable.law,
        magnitudes=usable.magnitudes,
        sentences=(*_unreadable(found, usable.rows), *verdict.sentences, *_limits(found)),
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
    rows = usable.setup.rows[zero].tolist()
    words = f"{'row' if len(rows) == 1 else 'rows'} {numbers(rows)} {_BE[len(rows) > 1]} 0 in every head"
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
    if bool(explained(setup, measured, expected, 1.0).all()):
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
    coarse = is_coarse(setup, measured, expected)
    search = describe(setup, measured, *((_COARSE_S, 1) if coarse else (limit_s, max_rules)))
    plain = (*about_values, *pattern(setup, measured, expected, usable.owners, usable.law))
    if not coarse and usable.magnitudes is not None and usable.magnitudes.text:
        plain = (*plain, usable.magnitudes.text)
    if search.descriptions and not _is_rounding(search.descriptions[0], setup):
        kept, confirmed = second.confirmed(search, faults)
        if confirmed is None and not _is_over_determined(usable, search.descriptions[0]):
            words = (
                f"cannot decide: the weights fit “{search.descriptions[0].text}”, but so few weights fit "
                "other rules, too, and no other call confirms it"
            )
            return _Verdict(status="undecided", search=search, sentences=(words, *plain))
        if kept.descriptions:
            lines = (*_stated(kept, confirmed, setup), *plain)
            return _Verdict(status="described", search=kept, confirmed=confirmed, sentences=lines)
        if not coarse:
            first = search.descriptions[0].text
            words = f"cannot decide: the weights fit “{first}” here, but not in another case"
            return _Verdict(
                status="undecided", search=kept, confirmed=False, sentences=(words, *plain)
            )
    if coarse:
        words = _precision(measured, expected)
        return _Verdict(status="precision", sentences=(words, *plain[:1]))
    words = (
        f"cannot decide: none of {search.tried} descriptions explains the weights within the bound"
    )
    return _Verdict(status="undecided", search=search, sentences=(words, *plain))


def _is_over_determined(usable: UsableRows, one: Description) -> bool:
    """Answer whether one call shows a description: one rule, with many more wrong weights than parts."""
    setup, expected = usable.setup, usable.expected
    bound = expected * setup.relative[:, None, None] + setup.fixed[:, None, None]
    wrong = int(((usable.measured - expected).abs() > bound).sum())
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


def _is_rounding(one: Description, setup: AttentionSetup) -> bool:
    """Answer whether a description only has factors that are 1 up to the rounding of a constant."""
    return all(
        (factors := _factors(rule)) and all(abs(f.of(setup) - 1) < _NEARLY_ONE for f in factors)
        for rule in one.rules
    )


def _factors(rule: Rule) -> tuple[Constant, ...]:
    """Return the factors that a rule consists of, none for one that says more."""
    if isinstance(rule, Gain | Power | ScoreFactor):
        return (rule.factor,)
    if isinstance(rule, HeadGain | HeadScore):
        return tuple(factor for _, factor in rule.factors)
    return (rule.times,) if isinstance(rule, TileTimes) else ()


def _stated(found: Found, confirmed: bool | None, setup: AttentionSetup) -> list[str]:
    """Return the sentences of the descriptions, and whether other kinds of sequences did not run."""
    first = found.descriptions[0]
    rest = [one for one in found.descriptions[1:] if not _has_number(one) or _has_number(first)]
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


def _has_number(one: Description) -> bool:
    """Answer whether a description has a factor that is a fitted number."""
    factors = [getattr(rule, "factor", None) for rule in one.rules]
    return any(isinstance(factor, Constant) and not factor.name for factor in factors)


def _not_decided(hidden: torch.Tensor) -> str:
    """Return that rows and heads, [R, H] bool, are measured too coarsely to be called right."""
    rows = int(hidden.any(1).sum())
    return (
        f"not decided: precision: in {rows} of {len(hidden)} rows, the largest weight is known to no better "
        "than 25 % of it; no weight is beyond this bound"
    )


def _precision(measured: torch.Tensor, expected: torch.Tensor) -> str:
    """Return how large the rounding is."""
    large = expected > 1e-3
    relative = ((measured - expected).abs() / expected.clamp(min=1e-12))[large]
    worst = float(relative.max()) if relative.numel() else 0.0
    return (
        f"precision: every key has about its weight, off by up to {worst:.2g} of it, which is more than the "
        "kernel's dtype explains and no more than rounding to bfloat16"
    )


def _unreadable(found: Examined, usable: torch.Tensor) -> list[str]:
    """Return what cannot be read."""
    setup, lines = found.setup, []
    unwritten = found.measurement.unwritten
    if bool(unwritten.any()):
        rows = setup.rows[unwritten].tolist()
        noun = "row" if len(rows) == 1 else "rows"
        verb = "is" if len(rows) == 1 else "are"
        lines.append(
            f"{noun} {numbers(rows)} {verb} not written: the output buffer keeps its contents"
        )
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


def _limits(found: Examined) -> list[str]:
    """Return how precise the weights are, and what was replaced."""
    setup, measurement = found.setup, found.measurement
    codes = (
        " with one-hot codes" if not measurement.error else " with one-hot and random signed codes"
    )
    lines = [
        f"{measurement.runs} runs{codes} over {setup.num_slots} slots; a weight is known to "
        f"{float(setup.relative.max()):.1g} of it plus {float(setup.fixed.max()):.1g}"
    ]
    if found.drawn:
        lines.append(
            "query and keys were drawn from N(0, 1): the scores of the case differ too little"
        )
    return lines
