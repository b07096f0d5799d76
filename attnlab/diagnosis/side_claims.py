"""SideClaim: what is wrong with a log-sum-exp and with rows of padding, as far as further cases confirm."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.claims import PatternClaim, claim_of
from attnlab.diagnosis.describe import sizes_of
from attnlab.diagnosis.output_rules import highest_of_parts, is_address, wrong_addresses
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import few_keys, further_cases
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.lab.result import LSE, Result, as_slice

_FACTORS = {
    "ln(2)": math.log(2),
    "log2(e)": 1 / math.log(2),
    "ln(2)²": math.log(2) ** 2,  # where it was to be divided by ln(2)
    "log2(e)²": math.log(2) ** -2,
    "-1": -1.0,
    "2": 2.0,
    "1/2": 0.5,
}
# Factors of the two terms of a log-sum-exp: of the exponent's base, and a maximum that is added twice.
_TERMS = {"": 1.0, "ln(2) times ": math.log(2), "log2(e) times ": 1 / math.log(2), "2 times ": 2.0}
_CLOSE = 1e-3
# Rounding units of formats shorter than that of a log-sum-exp, the smallest first.
_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_PARTS = 16  # parts of a sequence whose log-sum-exps may be rounded before they are merged
_ROUNDED = "right up to rounding to "
_TOO_LARGE, _TOO_SMALL = "too large", "too small"
_UNSIZED = (_ROUNDED, _TOO_LARGE, _TOO_SMALL)  # laws that do not say by how much


@dataclass(frozen=True, slots=True, kw_only=True)
class SideClaim:
    """One wrong side output.

    - ``subject``, ``quantity``: as in :class:`attnlab.lab.result.SideError`.
    - ``laws``: what all wrong places hold, such as "NaN" or "the right one + ln(2)", in all ways that fit;
      the first says most.
    - ``places``: where a log-sum-exp is wrong; None for rows of padding.
    - ``text``: the first error in words. ``largest``, ``ratio``: the largest error of a log-sum-exp, and in
      rounding bounds; 0 if one is not finite.
    """

    subject: str
    quantity: str
    laws: tuple[str, ...]
    places: PatternClaim | None
    text: str
    largest: float = 0.0
    ratio: float = 0.0

    @property
    def what(self) -> str:
        """Return the first of the laws, or ""."""
        return self.laws[0] if self.laws else ""

    @property
    def is_rule(self) -> bool:
        """Answer whether the claim says more than that something is wrong."""
        return bool(self.what) or (self.places is not None and self.places.is_rule)

    @property
    def said(self) -> str:
        """Return the claim in words, without the size of the errors."""
        return self._said("")

    @property
    def sentence(self) -> str:
        """Return the claim in words, with the size of the errors if that says more than the law."""
        is_size = self.largest and (not self.what or self.what.startswith(_UNSIZED))
        size = f", off by up to {self.largest:.2g} ({self.ratio:.3g} rounding bounds)"
        return self._said(size if is_size else "")

    def _said(self, size: str) -> str:
        if self.subject != LSE:
            name = "log-sum-exp" if self.quantity == "lse" else "output"
            return f"the {name} of padding rows, whose parts are both empty, is {self.what}"
        places = self.places
        where = f"; {places.text}" if places is not None and places.is_rule else ""
        return f"the log-sum-exp is {self.what or 'wrong'}{size}{where}"

    def common(self, other: "SideClaim") -> "SideClaim | None":
        """Return what two cases support, or None if they differ."""
        same = (self.subject, self.quantity) == (other.subject, other.quantity)
        laws = tuple(law for law in self.laws if law in other.laws)
        if not same or (self.subject != LSE and not laws):
            return None
        places = None
        if self.places is not None and other.places is not None:
            places = self.places.common(other.places)
        if laws and is_address(laws[0]):
            places = None  # they follow from the addresses
        return dataclasses.replace(
            self,
            laws=laws,
            places=places,
            largest=max(self.largest, other.largest),
            ratio=max(self.ratio, other.ratio),
        )


def side_claims(lab: Lab, case: Case, ran: Result) -> tuple[SideClaim, ...]:
    """Return one claim for each wrong side output of a run."""
    lse = None if ran.lse is None else ran.lse.cpu()
    padded = None if ran.padded is None else ran.padded.cpu()
    found = []
    for error in lab.side_errors(case, lse, padded):
        claim = SideClaim(
            subject=error.subject,
            quantity=error.quantity,
            laws=(_word(error.value),),
            places=None,
            text=error.text(),
        )
        if error.subject == LSE:
            assert lse is not None
            claim = _of_lse(lab, case, lse, claim)
        found.append(claim)
    return tuple(found)


def confirmed_side_claims(
    lab: Lab, case: Case, claims: tuple[SideClaim, ...], run: Callable[[Case], Result]
) -> tuple[SideClaim, ...]:
    """Return what of the claims holds in further cases; none if one does not hold.

    ``lab`` has its tensors on the CPU; ``run`` runs the kernels.
    """
    cases = 0
    for other in (*further_cases(case), *few_keys(case)):
        try:
            again = side_claims(lab, other, run(other))
        except AttnLabError:
            continue
        if not again:
            continue
        left = common_claims(claims, again)
        if not left:
            return ()
        claims, cases = left, cases + 1
    return claims if cases and all(one.is_rule for one in claims) else ()


def common_claims(
    claims: tuple[SideClaim, ...], others: tuple[SideClaim, ...]
) -> tuple[SideClaim, ...]:
    """Return what two cases support of each claim; none if they have other subjects."""
    pairs = [
        one.common(other) for one in claims for other in others if one.subject == other.subject
    ]
    left = tuple(one for one in pairs if one is not None)
    return left if len(left) == len(claims) else ()


def _of_lse(lab: Lab, case: Case, lse: torch.Tensor, claim: SideClaim) -> SideClaim:
    """Return the claim with what the wrong log-sum-exps hold, where they are, and the size of the errors."""
    expected, bound = lab.expected_lse(case)
    expected, bound = expected.cpu().double(), bound.cpu().double()
    values = lse[: len(expected)].double()
    wrong = ~((values - expected).abs() <= bound)
    rows, heads = case.query_rows, case.query_heads
    ran = torch.zeros_like(wrong)
    ran[as_slice(rows), as_slice(heads)] = True
    wrong &= ran
    if not bool(wrong.any()):
        return dataclasses.replace(claim, laws=())
    problem = Problem.of_case(case, lab.batch(case), lab.call(case))
    ran_heads = list(heads or range(problem.num_heads))
    places = claim_of(wrong, ran_heads, sizes_of(problem), Pattern())
    error = (values - expected)[wrong].abs()
    laws = _laws(values[wrong], expected[wrong], highest_of_parts(problem)[wrong], bound[wrong])
    is_finite = bool(error.isfinite().all())
    return dataclasses.replace(
        claim,
        laws=(*wrong_addresses(problem, values, expected, bound), *laws),
        places=places,
        largest=float(error.max()) if is_finite else 0.0,
        ratio=float((error / bound[wrong]).max()) if is_finite else 0.0,
    )


def _laws(
    values: torch.Tensor, expected: torch.Tensor, highest: torch.Tensor, bound: torch.Tensor
) -> Iterator[str]:
    """Yield what wrong numbers have in common; ``highest``: the maximum that was subtracted.

    Laws that leave errors of up to ``_CLOSE`` say nothing about errors of that size, which may be rounding.
    """
    words = {_word(value) for value in values.tolist()}
    if len(words) == 1 and (word := words.pop()) != "a number":
        yield word
    if not bool(values.isfinite().all()):
        return
    difference, ratio = values - expected, values / expected
    yield from _roundings(difference, expected, bound)
    if bool((difference.abs() <= 2 * _CLOSE * (1 + expected.abs())).all()):
        return
    for name, factor in _FACTORS.items():
        if bool(((ratio - factor).abs() <= _CLOSE).all()):
            yield f"{name} times the right one"
    if float(difference.max() - difference.min()) <= _CLOSE:
        yield f"the right one {float(difference.mean()):+.3f}"
    sums = (expected - highest).exp()
    laws = {
        "the logarithm of the sum minus the maximum": sums.log() - highest,
        "the logarithm of the sum without the maximum": sums.log(),
        "the maximum without the logarithm of the sum": highest,
        "the maximum plus the sum without its logarithm": highest + sums,
        "the maximum minus the logarithm of the sum": highest - sums.log(),
    } | {
        f"{first}the maximum plus {second}the logarithm of the sum": a * highest + b * sums.log()
        for (first, a), (second, b) in permutations(_TERMS.items(), 2)
    }
    for name, law in laws.items():
        if bool(((values - law).abs() <= _CLOSE * (1 + law.abs())).all()):
            yield name
    if bool((difference > 0).all()) or bool((difference < 0).all()):
        yield _TOO_LARGE if float(difference[0]) > 0 else _TOO_SMALL


def _roundings(
    difference: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> Iterator[str]:
    """Yield the formats whose rounding explains all errors: of the number itself, or of those of parts that
    are merged, whose mean size is larger by their entropy at most."""
    size = expected.abs() + math.log(_PARTS)
    for name, unit in _UNITS.items():
        if bool((difference.abs() <= unit * size + bound).all()):
            yield f"{_ROUNDED}{name}, which is more than its dtype explains"


def _word(value: float) -> str:
    """Return "NaN", "inf", "-inf", "0" or "a number"."""
    if value != value:
        return "NaN"
    if value in (float("inf"), -float("inf"), 0.0):
        return f"{value:g}"
    return "a number"
