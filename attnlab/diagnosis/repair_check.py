"""Confirm edits of a kernel in further cases, so that an edit that repairs one call by chance is no claim."""

import dataclasses
import linecache
import time
from collections.abc import Callable, Iterator, Sequence

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.kernel_location import KernelLocation
from attnlab.diagnosis.kernel_trials import Repair
from attnlab.diagnosis.repair_claim import RepairClaim
from attnlab.diagnosis.second_case import further_cases
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.lab.lab import Lab

_MOST_EDITS = 6  # that are compared with each other
_MOST_S = 12.0  # processor time; edits that are not confirmed by then are no claim
# It holds wherever rows are not written, so it does not say which rows are wrong.
_WITHOUT_RULE = frozenset({"rows_never_written"})
_OBSERVED = ("leak", "accesses", "claim")


def is_right(lab: Lab, case: Case, repair: Repair | None = None) -> bool | None:
    """Answer whether a Case's output and side outputs are right up to rounding, with an edit.

    None if the kernel raises.
    """
    try:
        with probing(Probe(edited={} if repair is None else repair.edited())):
            ran = lab.run(case.replace(atol=None, rtol=0.0))
    except AttnLabError:
        return None
    return None if ran.status == "rejected" else ran.status == "match"


def find_claim(lab: Lab, case: Case, repairs: Sequence[Repair]) -> RepairClaim | None:
    """Return the claim of the first edit that holds in a Case and in all of its further cases, or None.

    ``repairs``: edits that make a smaller run of the Case right, the best first.
    """
    verdicts = _Verdicts(lab=lab, left=list(repairs[:_MOST_EDITS]))
    end = time.process_time() + _MOST_S
    for at, one in enumerate([case, *further_cases(case)]):
        if not verdicts.left:
            return None
        if time.process_time() > end:
            return None
        verdicts.see(one, is_further=at > 0)
    if not verdicts.left or not verdicts.cases:
        return None
    first, *others = verdicts.left
    file, line = first.line
    return RepairClaim(
        repair=first,
        source=linecache.getline(file, line).strip(),
        cases=verdicts.cases,
        only_finite=verdicts.leaks,
        others=tuple(others),
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class _Verdicts:
    """What the cases leave of some edits. ``leaks``: NaN in slots without a token makes all of them wrong."""

    lab: Lab
    left: list[Repair]
    cases: int = 0
    leaks: bool = False

    def see(self, case: Case, *, is_further: bool) -> None:
        """Run a case with finite numbers and with NaN in slots without a token; drop the edits that fail.

        A case in which the kernel raises with and without an edit says nothing.
        """
        finite = case.replace(empty_slots="garbage", output_init="recycled")
        with_nan = finite.replace(empty_slots="nan")
        was_right = is_right(self.lab, finite)
        found = [(one, is_right(self.lab, finite, one)) for one in self.left]
        if was_right is None and all(right is None for _, right in found):
            return
        self.left = [one for one, right in found if right]
        if not self.left:
            return
        right_with_nan = is_right(self.lab, with_nan)
        found = [(one, is_right(self.lab, with_nan, one)) for one in self.left]
        if any(right for _, right in found) or right_with_nan:
            self.left = [one for one, right in found if right]
            was_right = was_right and right_with_nan is True
        else:
            self.leaks = True
        self.cases += is_further and was_right is not True


def with_repair(lab: Lab, case: Case, diagnosis: Diagnosis, repairs: Sequence[Repair]) -> Diagnosis:
    """Return the diagnosis with the edit that repairs the kernel, if further cases confirm one.

    Names, rules and weights predict numbers and stay first. What else describes the output becomes an
    observation about this call.
    """
    claim = find_claim(lab, case, repairs) if repairs else None
    if claim is None:
        return diagnosis
    diagnosis = dataclasses.replace(diagnosis, repair=claim, location=_first(diagnosis, claim))
    names = {one.name for one in diagnosis.explanations}
    if names and names <= _WITHOUT_RULE:
        why = f"{', '.join(sorted(names))} is withdrawn: it does not say which rows are wrong"
        withdrawn = (*diagnosis.withdrawn, why)
        diagnosis = dataclasses.replace(diagnosis, cause=None, explanations=[], withdrawn=withdrawn)
    if not diagnosis.is_by_repair:
        return diagnosis
    return dataclasses.replace(
        diagnosis,
        status="described",
        observed=tuple(_observed(diagnosis)),
        leak=None,
        accesses=None,
        claim=None,
        bad_lines=(),
    )


def _observed(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what is observed in this call and is weaker than a repair."""
    if diagnosis.accesses is not None:
        yield from diagnosis.accesses.facts
    if diagnosis.leak is not None:
        yield "the output is right with finite numbers in slots without a token"
    for one in diagnosis.side_errors:
        yield one.sentence


def _first(diagnosis: Diagnosis, claim: RepairClaim) -> KernelLocation | None:
    """Return the location with the line of the claim first."""
    place = diagnosis.location
    if place is None:
        return None
    is_claimed: Callable[[str, int], bool] = lambda file, line: (file, line) == claim.repair.line  # noqa: E731
    lines = sorted(place.lines, key=lambda one: not is_claimed(one.file, one.line))
    return dataclasses.replace(place, lines=tuple(lines))
