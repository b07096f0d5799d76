"""Labels of wrong outputs by evidence: a rule that explained one case's output is tried on the next first.

Two faults with different rules get different labels, and one fault that shows in several cases gets one,
which the name that an output alone suggests does not ensure.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.checker.case_run import run_case
from attnlab.defects import Defect
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.examination import examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.rule_search import find_rule, is_general
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab

MOST_SEARCHES = 4  # for rules, of one op in one process


class Rules:
    """The rules that were confirmed for one op of one backend in this process; it is mutated by ``label``."""

    def __init__(self) -> None:
        self.found: list[Defect] = []
        self.searches = 0

    def label(
        self, lab: Lab, case: Case, output: torch.Tensor, rerun: Callable[[Case], torch.Tensor]
    ) -> str:
        """Return the text of the rule that explains an output, known or found now, or ""."""
        for known in self.found:
            seen = examine(lab, case, output, (known,), Pattern()).diagnosis
            if any(is_general(one) for one in seen.explanations):
                return known.text
        if self.searches >= MOST_SEARCHES:
            return ""
        self.searches += 1
        rule = find_rule(lab, case, rerun)
        if rule is None:
            return ""
        self.found.append(rule.candidate.defect)
        return rule.candidate.text


@lru_cache(maxsize=16)
def _rules_of(backend: Backend, op: str) -> Rules:
    return Rules()


def evidence_label(
    lab: Lab, backend: Backend, case: Case, output: torch.Tensor, diagnosis: Diagnosis
) -> str:
    """Return the label of a wrong output: a rule that further cases confirm, else the name of its cause,
    else the status of its diagnosis.

    A search for a rule runs the kernel about three times. It is made if the output alone has no explanation.
    """
    name = diagnosis.cause.name if diagnosis.cause is not None else ""
    if name:
        return name
    try:
        rule = _rules_of(backend, case.op).label(
            lab, case, output, lambda one: run_case(lab, backend, one).output
        )
    except AttnLabError:
        rule = ""
    return rule or diagnosis.status
