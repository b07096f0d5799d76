"""Source lines whose bad access or overflow recurs wherever the output of a further case is wrong."""

import dataclasses
from collections.abc import Callable, Iterable

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.examination import examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.second_case import further_cases
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result


def with_bad_lines(
    lab: Lab, case: Case, diagnosis: Diagnosis, run: Callable[[Case], Result]
) -> Diagnosis:
    """Return the diagnosis with the lines of ``wraps`` and ``outside`` that further cases confirm.

    An access that does not recur where an output is wrong is no description of the fault. ``lab`` has its
    tensors on the CPU; ``run`` runs the kernels. If nothing else explains the output, the status is
    "described".
    """
    is_known = (
        diagnosis.explanations or diagnosis.rule is not None or diagnosis.accesses is not None
    )
    if is_known or diagnosis.bad_lines or not diagnosis.wrong_rows:
        return diagnosis
    left, cases = lines_of((*diagnosis.outside, *diagnosis.wraps)), 0
    for other in further_cases(case) if left else ():
        try:
            ran = run(other)
            if ran.status == "rejected":
                continue
            found = examine(lab, other, ran.output.cpu(), (), Pattern())
        except AttnLabError:
            continue
        if len(found.evidence.locations.wrong_rows):
            left, cases = left & lines_of((*ran.outside, *ran.wraps)), cases + 1
    if not left or not cases:
        return diagnosis
    status = "described" if diagnosis.status == "unexplained" else diagnosis.status
    return dataclasses.replace(diagnosis, status=status, bad_lines=tuple(sorted(left)))


def lines_of(texts: Iterable[str]) -> set[str]:
    """Return the lines, "file:line", of texts of bad accesses."""
    return {text.split()[0] for text in texts}
