"""Confirm edits of a kernel in further cases, so that an edit that repairs one call by chance is no claim."""

import dataclasses
import linecache
import time
from collections.abc import Iterator, Sequence

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.kernel_location import KernelLocation
from attnlab.diagnosis.kernel_trials import Repair
from attnlab.diagnosis.repair_claim import RepairClaim
from attnlab.diagnosis.second_case import further_cases
from attnlab.kernels.triton.limits import Budget, TooLong
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.lab.lab import Lab

_MOST_EDITS = 6  # that are compared with each other
_MOST_S = 20.0  # processor time; edits that are not confirmed by then are no claim
_MOST_OTHERS_S = 6.0  # for others, which the claim mentions
# Of a run with an edit; a case that takes longer without it is not used (attnlab.diagnosis.kernel_lines).
_MOST_OPERATIONS, _MOST_RUN_S = 2_000_000, 10.0
# It holds wherever rows are not written, so it does not say which rows are wrong.
_WITHOUT_RULE = frozenset({"rows_never_written"})
_OBSERVED = ("leak", "accesses", "claim")


def is_right(lab: Lab, case: Case, repair: Repair | None = None) -> bool | None:
    """Answer whether a Case's output and side outputs are right up to rounding, with an edit.

    None if the kernel raises; False for an edit with which it takes too long.
    """
    probe = Probe()
    if repair is not None:
        limit = Budget(operations=_MOST_OPERATIONS, seconds=_MOST_RUN_S)
        probe = Probe(edited=repair.edited(), budget=limit)
    try:
        with probing(probe):
            ran = lab.run(case.replace(atol=None, rtol=0.0))
    except TooLong:
        return False
    except AttnLabError:
        return None
    return None if ran.status == "rejected" else ran.status == "match"


def with_contents(case: Case, slots: str) -> Case:
    """Return a Case with these contents of empty slots, and with an output buffer that can be recognised.

    An op argument may ask for a buffer of its own, which stays.
    """
    known = case.replace(empty_slots=slots)
    try:
        return known.replace(output_init="recycled")
    except InvalidCase:
        return known


def find_claim(lab: Lab, case: Case, repairs: Sequence[Repair]) -> RepairClaim | None:
    """Return the claim of the first edit that holds in a Case and in all of its further cases, or None.

    ``repairs``: edits that make a smaller run of the Case right, the best first.
    """
    end, others = time.process_time() + _MOST_S, list[Repair]()
    further = sorted(further_cases(case), key=lambda one: one.lengths.num_tokens)
    proofs = [_Proof(lab=lab, case=one) for one in (case, *further)]
    claim: RepairClaim | None = None
    for repair in repairs[:_MOST_EDITS]:
        if claim is None:
            claim = _claim_of(proofs, repair, end)
            end = min(end, time.process_time() + _MOST_OTHERS_S)
        elif (other := _claim_of(proofs, repair, end)) is not None:
            others += [repair] if other.only_finite == claim.only_finite else []
        if time.process_time() > end:
            break
    return None if claim is None else dataclasses.replace(claim, others=tuple(others))


def _claim_of(proofs: Sequence["_Proof"], repair: Repair, end: float) -> RepairClaim | None:
    """Return the claim of an edit, or None if it is refuted, if no further case is wrong without it, or if
    the processor time is over."""
    cases, leaks = 0, False
    for at, proof in enumerate(proofs):
        if time.process_time() > end or not proof.accepts(repair):
            return None
        cases += at > 0 and proof.is_decisive(repair)
        leaks = leaks or proof.leaks(repair)
    file, line = repair.line
    source = linecache.getline(file, line).strip()
    if not cases:
        return None
    return RepairClaim(repair=repair, source=source, cases=cases, only_finite=leaks)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Proof:
    """A case in which edits must hold, with finite numbers and with NaN in slots without a token.

    ``verdicts``: what :func:`is_right` answered, by the contents of the slots and the edit.
    """

    lab: Lab
    case: Case
    verdicts: dict[tuple[str, int | None], bool | None] = dataclasses.field(default_factory=dict)

    def _is_right(self, slots: str, repair: Repair | None) -> bool | None:
        key = (slots, None if repair is None else id(repair))
        if key not in self.verdicts:
            self.verdicts[key] = is_right(self.lab, with_contents(self.case, slots), repair)
        return self.verdicts[key]

    def accepts(self, repair: Repair) -> bool:
        """Answer whether the outputs are right with an edit, or the kernel raises with and without it.

        With NaN, outputs may stay wrong if they are so without the edit: that is another fault.
        """
        right = self._is_right("garbage", repair)
        if not right:
            return right is None and self._is_right("garbage", None) is None
        return self._is_right("nan", repair) is True or self._is_right("nan", None) is not True

    def is_decisive(self, repair: Repair) -> bool:
        """Answer whether the kernel is wrong without an edit that makes it right."""
        return any(
            self._is_right(slots, repair) and not self._is_right(slots, None)
            for slots in ("garbage", "nan")
        )

    def leaks(self, repair: Repair) -> bool:
        """Answer whether NaN makes an output wrong that is right with finite numbers."""
        return bool(self._is_right("garbage", repair)) and not self._is_right("nan", repair)


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
    lines = sorted(place.lines, key=lambda one: (one.file, one.line) != claim.repair.line)
    return dataclasses.replace(place, lines=tuple(lines))
