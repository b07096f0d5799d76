"""conclude: an XRay from a measurement: search for a description, confirm it on another case, state it."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.case.errors import AttnLabError
from attnlab.weights.description import Description, numbers
from attnlab.weights.evidence import compare
from attnlab.weights.examine import Examined, Subject, examine, is_coarse
from attnlab.weights.fit import Law, fit_law
from attnlab.weights.measurement import runner, unfolded
from attnlab.weights.pattern import pattern
from attnlab.weights.plan import right_plan
from attnlab.weights.rule import Constant
from attnlab.weights.score_rules import Gain, Power, ScoreFactor
from attnlab.weights.search import Found, describe
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.slot_owner import SlotOwners
from attnlab.weights.values import ValueFaults, reordered, value_faults
from attnlab.weights.xray import XRay

Other = Callable[[tuple[int, ...] | None], Subject | None]
_NOTHING = Found(descriptions=(), tried=0)
_COARSE_S = 4.0  # time for the search where rounding may be the cause
_NEARLY_ONE = 0.01  # a factor that differs from 1 by less is rounding of a constant


def xray_of(subject: Subject, other: Other | None = None, limit_s: float = 10.0) -> XRay:
    """Measure a subject and conclude.

    ``other`` returns another subject on the same backend, on which a description of some query heads (None:
    of all) must hold, too, or None.
    ``limit_s`` bounds the search for a description. Raises what the backend raises, InvalidCase for an op
    without values, InvalidCall for a call that is too large.
    """
    began = time.perf_counter()
    found = examine(subject)
    run = runner(subject.backend, subject.target, subject.kernels, subject.options)
    usable = _usable(found)
    verdict = _Verdict(status="unreadable")
    if len(usable.rows):
        coarse = is_coarse(usable.setup, usable.measured, usable.expected)
        faults = value_faults(found.setup, found.measurement, run, 0.05 if coarse else 0.0)
        if faults.elements is not None:
            read = reordered(found.measurement.read, faults.elements)
            lanes = found.measurement.lanes
            weights = unfolded(found.setup, lanes, read[..., : lanes.count])
            measurement = dataclasses.replace(found.measurement, read=read, weights=weights)
            found = dataclasses.replace(found, measurement=measurement)
            usable = _usable(found)
        verdict = _judge(usable, faults, other, limit_s)
    return XRay(
        status=_status_of_all(verdict.status, found, usable),
        case=subject.case,
        backend=subject.backend.text(subject.kernels, subject.target),
        setup=found.setup,
        measurement=found.measurement,
        expected=found.expected,
        owners=found.owners,
        descriptions=verdict.search.descriptions,
        confirmed=verdict.confirmed,
        law=usable.law,
        sentences=(*_unreadable(found, usable.rows), *verdict.sentences, *_limits(found)),
        drawn=found.drawn,
        tried=verdict.search.tried,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Usable:
    """The finite rows of a measurement: their indices, and what belongs to them."""

    rows: torch.Tensor
    setup: AttentionSetup
    measured: torch.Tensor
    expected: torch.Tensor
    owners: SlotOwners
    law: Law | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Verdict:
    """A status, the descriptions, whether the first was confirmed, and the sentences."""

    status: str
    search: Found = _NOTHING
    confirmed: bool | None = None
    sentences: tuple[str, ...] = ()


def _usable(found: Examined) -> _Usable:
    """Return the rows that are finite, with their weights and the fit of their law."""
    finite = found.measurement.finite & found.setup.query.isfinite().flatten(1).all(1)
    rows = torch.nonzero(finite).flatten()
    setup = found.setup.take(rows, torch.arange(len(found.setup.heads)))
    measured, law = found.measurement.weights[rows], None
    if len(rows):
        plan = right_plan(setup)
        law = fit_law(plan, measured, with_distance=plan.slopes is not None)
    return _Usable(
        rows=rows,
        setup=setup,
        measured=measured,
        expected=found.expected[rows],
        owners=found.owners,
        law=law,
    )


def _judge(usable: _Usable, faults: ValueFaults, other: Other | None, limit_s: float) -> _Verdict:
    """Return what the finite rows show."""
    setup, measured, expected = usable.setup, usable.measured, usable.expected
    if compare(setup, measured, expected, 1.0).complete:
        if not faults.sentences:
            words = "every row attends to its keys with the right weights, within the precision"
            return _Verdict(status="right", sentences=(words,))
        lines = (*faults.sentences, "the weights themselves are right")
        return _Verdict(status="described", sentences=lines)
    coarse = is_coarse(setup, measured, expected)
    search = describe(setup, measured, *((_COARSE_S, 1) if coarse else (limit_s,)))
    plain = (
        *faults.sentences,
        *pattern(setup, measured, expected, usable.owners, usable.law),
    )
    if search.descriptions and not _is_rounding(search.descriptions[0], setup):
        kept, confirmed = _confirmed(search, other)
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


def _status_of_all(status: str, found: Examined, usable: _Usable) -> str:
    """Return the status with the rows that are not finite: unwritten rows are a description of their own."""
    if len(usable.rows) == len(found.setup.rows):
        return status
    left = torch.ones(len(found.setup.rows), dtype=torch.bool)
    left[usable.rows] = False
    if bool(found.measurement.unwritten[left].all()):
        return status if status == "undecided" else "described"
    return "undecided" if len(usable.rows) else "unreadable"


def _is_rounding(one: Description, setup: AttentionSetup) -> bool:
    """Answer whether a description is only a factor that is 1 up to the rounding of a constant."""
    return all(
        isinstance(rule, Gain | Power | ScoreFactor)
        and abs(rule.factor.of(setup) - 1) < _NEARLY_ONE
        for rule in one.rules
    )


def _confirmed(search: Found, other: Other | None) -> tuple[Found, bool | None]:
    """Return the descriptions that predict another subject's weights, and whether there was one."""
    subject = None if other is None else other(search.descriptions[0].scope.heads)
    if subject is None:
        return search, None
    try:
        found = examine(subject, resolve=False)
    except AttnLabError:
        return search, None
    usable, lanes = _usable(found), found.measurement.lanes
    if not len(usable.rows):
        return search, None
    folded = found.measurement.folded[usable.rows]
    kept = [
        one
        for one in search.descriptions
        if compare(usable.setup, folded, lanes.fold(one.weights(usable.setup))).complete
    ]
    return dataclasses.replace(search, descriptions=tuple(kept)), bool(kept)


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
    left = torch.ones(len(setup.rows), dtype=torch.bool)
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
