"""Examine one output of a Case without running anything."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.contracts.violations import find_violations
from attnlab.defects import Defect
from attnlab.defects.problem import Problem
from attnlab.diagnosis.decision import Evidence, collect_evidence, conclude
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.error_location import locate
from attnlab.diagnosis.pattern import Pattern
from attnlab.lab.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examination:
    """A diagnosis and the evidence that it rests on."""

    evidence: Evidence
    diagnosis: Diagnosis

    @property
    def problem(self) -> Problem:
        """Return the problem that was diagnosed."""
        return self.evidence.problem


def examine(
    lab: Lab,
    case: Case,
    output: torch.Tensor,
    defects: Iterable[Defect],
    pattern: Pattern | None = None,
) -> Examination:
    """Diagnose one output of a Case without running anything; ``pattern`` is its pattern, if known."""
    call = lab.call(case)
    check_output(output, call.buffer)
    problem = Problem.of_case(case, lab.batch(case), call, call.output)
    violations = find_violations(call, problem.target, problem.kernels, lab.cache(case).provenance)
    locations = locate(problem, output, case.query_heads, lab.reference(case))
    evidence = collect_evidence(problem, output, locations, violations, case.query_heads)
    return Examination(evidence=evidence, diagnosis=conclude(evidence, defects, pattern))


def check_output(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise InvalidCall if an output has another shape or dtype than the call's."""
    if output.shape != expected.shape:
        raise InvalidCall(
            f"output must have shape {tuple(expected.shape)}, got {tuple(output.shape)}"
        )
    if output.dtype != expected.dtype:
        raise InvalidCall(f"output must have dtype {expected.dtype}, got {output.dtype}")
