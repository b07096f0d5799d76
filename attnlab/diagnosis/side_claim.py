"""SideClaim: what is wrong with the log-sum-exp and with rows of padding, as far as further cases confirm."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.claims import PatternClaim, claim_of
from attnlab.diagnosis.describe import sizes_of
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import further_cases
from attnlab.diagnosis.rules.outputs import highest_of_parts, is_address, wrong_addresses
from attnlab.lab.error_map import as_slice
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.lab.result import LSE, Result

_FACTORS = {
    "ln(2)": 0.6931471805599453,
    "log2(e)": 1.4426950408889634,
    "-1": -1.0,
    "2": 2.0,
    "1/2": 0.5,
}
_CLOSE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SideClaim:
    """One wrong side output.

    - ``subject``, ``quantity``: as in :class:`attnlab.lab.result.SideError`.
    - ``laws``: what all wrong places hold, such as "NaN" or "the right one + ln(2)", in all ways that fit;
      the first says most.
    - ``places``: where a log-sum-exp is wrong; None for rows of padding.
    - ``text``: the first error in words.
    """

    subject: str
    quantity: str
    laws: tuple[str, ...]
    places: PatternClaim | None
    text: str

    @property
    def what(self) -> str:
        """Return the first of the laws, or ""."""
        return self.laws[0] if self.laws else ""

    @property
    def is_rule(self) -> bool:
        """Answer whether the claim says more than that something is wrong."""
        return bool(self.what) or (self.places is not None and self.places.is_rule)

    @property
    def sentence(self) -> str:
        """Return the claim in words."""
        if self.subject != LSE:
            name = "log-sum-exp" if self.quantity == "lse" else "output"
            return f"the {name} of padding rows, whose parts are both empty, is {self.what}"
        where = "" if self.places is None else f"; {self.places.text}"
        return f"the log-sum-exp is {self.what or 'wrong'}{where}"

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
        return SideClaim(
            subject=self.subject, quantity=self.quantity, laws=laws, places=places, text=self.text
        )


def side_claims(lab: Lab, case: Case, ran: Result) -> tuple[SideClaim, ...]:
    """Return one claim for each wrong side output of a run."""
    lse = None if ran.lse is None else ran.lse.cpu()
    padded = None if ran.padded is None else ran.padded.cpu()
    found = []
    for error in lab.side_errors(case, lse, padded):
        laws: tuple[str, ...] = (_word(error.value),)
        places = None
        if error.subject == LSE:
            assert lse is not None
            laws, places = _lse(lab, case, lse)
        found.append(
            SideClaim(
                subject=error.subject,
                quantity=error.quantity,
                laws=laws,
                places=places,
                text=error.text(),
            )
        )
    return tuple(found)


def confirmed_side_claims(
    lab: Lab, case: Case, claims: tuple[SideClaim, ...], run: Callable[[Case], Result]
) -> tuple[SideClaim, ...]:
    """Return what of the claims holds in further cases; none if one does not hold.

    ``lab`` has its tensors on the CPU; ``run`` runs the kernels.
    """
    cases = 0
    for other in further_cases(case):
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


def _lse(lab: Lab, case: Case, lse: torch.Tensor) -> tuple[tuple[str, ...], PatternClaim | None]:
    """Return what the wrong log-sum-exps hold, and where they are."""
    expected, bound = lab.expected_lse(case)
    expected, bound = expected.cpu().double(), bound.cpu().double()
    values = lse[: len(expected)].double()
    wrong = ~((values - expected).abs() <= bound)
    rows, heads = case.query_rows, case.query_heads
    ran = torch.zeros_like(wrong)
    ran[as_slice(rows), as_slice(heads)] = True
    wrong &= ran
    if not bool(wrong.any()):
        return (), None
    problem = Problem.of_case(case, lab.batch(case), lab.call(case))
    ran_heads = list(heads or range(problem.num_heads))
    places = claim_of(wrong, ran_heads, sizes_of(problem), Pattern())
    laws = _laws(values[wrong], expected[wrong], highest_of_parts(problem)[wrong])
    return (*wrong_addresses(problem, values, expected, bound), *laws), places


def _laws(values: torch.Tensor, expected: torch.Tensor, highest: torch.Tensor) -> Iterator[str]:
    """Yield what wrong numbers have in common; ``highest``: the maximum that was subtracted."""
    words = {_word(value) for value in values.tolist()}
    if len(words) == 1 and (word := words.pop()) != "a number":
        yield word
    if not bool(values.isfinite().all()):
        return
    difference, ratio = values - expected, values / expected
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
        "the maximum plus the logarithm of the sum to base 2": highest + sums.log2(),
        "the maximum plus the sum without its logarithm": highest + sums,
        "the maximum minus the logarithm of the sum": highest - sums.log(),
    }
    for name, law in laws.items():
        if bool(((values - law).abs() <= _CLOSE * (1 + law.abs())).all()):
            yield name


def _word(value: float) -> str:
    """Return "NaN", "inf", "-inf", "0" or "a number"."""
    if value != value:
        return "NaN"
    if value in (float("inf"), -float("inf"), 0.0):
        return f"{value:g}"
    return "a number"
