"""Compare a Case and further ones with finite numbers and with NaN in their unwritten slots."""

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.examination import examine
from attnlab.diagnosis.leak_claim import LeakClaim
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import Rerun
from attnlab.diagnosis.second_case import further_cases
from attnlab.lab.lab import Lab


def confirmed_leak(lab: Lab, case: Case, rerun: Rerun) -> LeakClaim | None:
    """Return the claim if it holds for the Case and for all further cases, else None."""
    if leak_of(lab, case, rerun) is not True:
        return None
    found = [leak_of(lab, other, rerun) for other in further_cases(case)]
    if False in found or True not in found:
        return None
    return LeakClaim(cases=found.count(True))


def leak_of(lab: Lab, case: Case, rerun: Rerun) -> bool | None:
    """Answer whether NaN in unwritten slots, and it alone, makes the output of a Case wrong.

    None if the output is right with NaN, too, or if the kernel rejects the Case.
    """
    finite, nan = (case.replace(empty_slots=fill) for fill in ("garbage", "nan"))
    try:
        if examine(lab, finite, rerun(finite), (), Pattern()).diagnosis.is_wrong:
            return False
        return True if examine(lab, nan, rerun(nan), (), Pattern()).diagnosis.is_wrong else None
    except AttnLabError:
        return None
