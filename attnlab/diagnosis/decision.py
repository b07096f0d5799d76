"""The decision: which candidates explain an output, and whether one of them is the cause."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCall
from attnlab.contracts.contract import contracts_of
from attnlab.contracts.slot_states import unwritten_rows
from attnlab.contracts.violations import Violation, Violations
from attnlab.defects import Defect
from attnlab.defects.edit import compute_of
from attnlab.diagnosis.candidates import (
    Candidate,
    ErrorLocations,
    RowSample,
    Scope,
    confirm,
    is_by_chance,
    locate,
    sample_output,
    screen,
    wrong_parts,
)
from attnlab.diagnosis.describe import describe, fitted_scale
from attnlab.diagnosis.diagnosis import Diagnosis, ErrorPlace
from attnlab.diagnosis.pattern import Pattern
from attnlab.kernels.control import rows_equal
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem

_VERDICTS = (
    "explains",
    "less likely",
    "excluded by run",
    "excluded by rerun",
    "excluded by place",
    "excluded by inputs",
    "excluded by value",
)
NEVER_WRITTEN = "rows_never_written"
_MISREAD = "query_start_loc_as_int32"
_OF_CONSTANTS = ("scores", "softmax", "decoding")  # families of factors of the scores
_RIVAL = "a fitted scale"
_FITS_BETTER = 0.95  # of the squares that a constant leaves; a fitted number leaves some less


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """What is known about an output before any candidate is compared with it.

    ``unwritten``: [n] int64, rows that no kernel wrote; ``unwritten_by``: how that is known, "buffer",
    "contracts" or "" if there are none. ``heads``: the query heads that ran, None for all.
    """

    problem: Problem
    output: torch.Tensor
    locations: ErrorLocations
    violations: Sequence[Violation]
    unwritten: torch.Tensor
    unwritten_by: str
    heads: range | None

    def linked(self, defect: Defect) -> tuple[str, ...]:
        """Return the kinds of the violations that would cause a defect and that a kernel does not report."""
        kinds = {violation.kind for violation in self.violations if violation.effect == "silent"}
        return tuple(kind for kind in defect.links if kind in kinds)


def collect_evidence(
    problem: Problem,
    output: torch.Tensor,
    locations: ErrorLocations,
    violations: Sequence[Violation],
    heads: range | None = None,
) -> Evidence:
    """Return the evidence. Unwritten rows are the wrong ones that keep the buffer's previous contents, if
    these are known and unlike a result, else the wrong ones that the kernels' contracts leave out."""
    is_wrong = locations.is_wrong.any(1)
    if problem.before is not None and _is_recognisable(problem.before):
        unwritten, source = rows_equal(output, problem.before) & is_wrong, "buffer"
    else:
        contracts = contracts_of(problem.kernels, problem.target, problem.call.op)
        unwritten = unwritten_rows(contracts, problem.call) & is_wrong
        source = "contracts"
    rows = torch.nonzero(unwritten).flatten()
    return Evidence(
        problem=problem,
        output=output,
        locations=locations,
        violations=violations,
        unwritten=rows,
        unwritten_by=source if len(rows) else "",
        heads=heads,
    )


def _cause_of_unwritten_rows(evidence: Evidence, defects: Sequence[Defect]) -> Defect | None:
    """Return the defect that leaves rows unwritten: the misread of query_start_loc if the call violates
    its dtype, else that no kernel writes them."""
    is_misread = any(
        violation.kind == "index_dtype"
        and violation.effect == "silent"
        and violation.subject == "query_start_loc"
        for violation in evidence.violations
    )
    name = _MISREAD if is_misread else NEVER_WRITTEN
    return next((defect for defect in defects if defect.name == name), None)


def _is_recognisable(before: torch.Tensor) -> bool:
    """Answer whether a row that keeps these contents can be recognised: not if they are zeros or NaN."""
    return bool(before.isfinite().all()) and bool(before.count_nonzero() == before.numel())


def conclude(
    evidence: Evidence, defects: Iterable[Defect], pattern: Pattern | None = None
) -> Diagnosis:
    """Compare the defects with the output and return the diagnosis; ``pattern`` if it is known already."""
    defects = tuple(defects)
    diagnosis = _without_candidates(evidence)
    if not len(evidence.locations.wrong_rows):
        return diagnosis
    if pattern is None:
        pattern = describe(evidence.problem, evidence.output, evidence.locations, evidence.heads)
    diagnosis = dataclasses.replace(diagnosis, pattern=pattern)
    problem, wrong_rows = evidence.problem, evidence.locations.wrong_rows
    ignored = torch.arange(0)
    if problem.before is None:  # the buffer is unknown, so no candidate can predict unwritten rows
        never_written = if_all_unwritten(evidence, diagnosis, defects)
        if never_written is not None:
            return never_written
        if not bool(torch.isin(wrong_rows, evidence.unwritten).all()):
            ignored = evidence.unwritten
    sample = sample_output(problem, evidence.locations, ignored, evidence.heads)
    candidates = screen(problem, evidence.output, sample.worst, defects)
    rivals = _fitted_scales(evidence, sample, candidates)
    candidates += screen(problem, evidence.output, sample.worst, rivals)
    candidates, explanations = _weigh(evidence, sample, candidates)
    cause = select_cause(explanations)
    if len(ignored) and cause is not None:
        cause, explanations = None, []  # one defect does not explain the unwritten rows as well
    if cause is not None and not cause.linked and _is_degenerate(cause, pattern):
        cause, explanations = None, []
    return dataclasses.replace(
        diagnosis,
        status=status_of(cause, explanations, pattern),
        cause=cause,
        explanations=explanations,
        candidates=candidates,
        looked_at=(sum(len(row_slice.tokens) for row_slice in sample.many), len(evidence.output)),
    )


def _fitted_scales(
    evidence: Evidence, sample: RowSample, candidates: Sequence[Candidate]
) -> list[Defect]:
    """Return a scale that is fitted to the output, as the rival of candidates with a constant, such as base 2
    in place of e: if it fits much better, the constant is another."""
    has_constant = any(
        one.verdict == "explains" and one.defect.family in _OF_CONSTANTS for one in candidates
    )
    parts = wrong_parts(evidence.problem, evidence.output, sample.worst) if has_constant else []
    if not parts:
        return []
    scale = fitted_scale(parts, evidence.problem.sm_scale)
    compute = compute_of(lambda at: at.change(sm_scale=scale))
    return [Defect(family=_RIVAL, name=_RIVAL, text=_RIVAL, compute=compute)]


def _is_degenerate(cause: Candidate, pattern: Pattern) -> bool:
    """Answer whether the cause is a wrong scale that the numbers of the call give several readings, such as
    half of 1, which is also 1 / sqrt(4 heads)."""
    readings = [fact.values["names"] for fact in pattern.of("softmax_scale")]
    return cause.defect.family in ("scores", "decoding") and any(len(n) > 1 for n in readings)


def if_all_unwritten(
    evidence: Evidence, diagnosis: Diagnosis, defects: Sequence[Defect]
) -> Diagnosis | None:
    """Return the diagnosis of an output whose wrong rows are all unwritten, with an unknown buffer; None if
    some wrong rows are written or the defects lack the cause.

    The cause, whatever its reason, explains any contents of the buffer, so no number decides against it.
    """
    only_unwritten = bool(torch.isin(evidence.locations.wrong_rows, evidence.unwritten).all())
    never_written = _cause_of_unwritten_rows(evidence, defects)
    if not only_unwritten or never_written is None:
        return None
    problem = evidence.problem
    sample = sample_output(problem, evidence.locations, torch.arange(0), evidence.heads)
    candidates = screen(problem, evidence.output, sample.worst, defects)
    error = float(evidence.locations.error[evidence.locations.is_wrong].max())
    rows = evidence.unwritten.tolist()
    seqs = {problem.row_slice_of(row, torch.arange(0)).seq for row in rows}
    cause = Candidate(
        name=never_written.name,
        text=never_written.text,
        seen_in=never_written.seen_in,
        verdict="explains",
        predicted=error,
        observed=error,
        residual=0.0,
        ratio=0.0,
        scope=Scope(rows="sequences", sequences=tuple(sorted(seqs))),
        rows=len(evidence.locations.wrong_rows),
        shown=len(rows),
        linked=evidence.linked(never_written),
        defect=never_written,
    )
    others = [
        dataclasses.replace(one, verdict="less likely") if one.verdict == "explains" else one
        for one in candidates
    ]
    return dataclasses.replace(
        diagnosis,
        status="explained",
        cause=cause,
        explanations=[cause],
        candidates=_sorted([cause, *others]),
        looked_at=(len(evidence.output), len(evidence.output)),
    )


def status_of(cause: Candidate | None, explanations: Sequence[Candidate], pattern: Pattern) -> str:
    """Return the status of a wrong output with this cause, these explanations and this pattern."""
    if not explanations:
        return "described" if pattern.is_complete else "unexplained"
    return "ambiguous" if cause is None else "explained"


def select_cause(explanations: Sequence[Candidate]) -> Candidate | None:
    """Return the only explanation, or else the one that a violation of the call would cause, or None.

    It must be established: an output that shows nothing of a defect, and only does not contradict it, has
    no cause. One NaN, one key or one number near a limit of a format names nothing.

    If violations would cause several, the one with the smallest ``Scope.degree`` is selected: a defect
    that occurs in all rows explains more than one that was fitted to the wrong rows.
    """
    if len(explanations) == 1:
        return explanations[0] if explanations[0].is_established else None
    linked = [candidate for candidate in explanations if candidate.linked]
    degrees = [0 if one.scope is None else one.scope.degree for one in linked]
    is_only = degrees.count(min(degrees, default=0)) == 1
    return linked[degrees.index(min(degrees))] if is_only else None


def with_explanations(diagnosis: Diagnosis, explanations: list[Candidate]) -> Diagnosis:
    """Return the diagnosis with other explanations, and the cause and the status that follow from them."""
    cause = select_cause(explanations)
    return dataclasses.replace(
        diagnosis,
        status=status_of(cause, explanations, diagnosis.pattern),
        cause=cause,
        explanations=explanations,
    )


def without_guess(diagnosis: Diagnosis) -> Diagnosis:
    """Return a diagnosis of one output without the cause that its rows are not written, unless it is proved.

    Rows that equal what the buffer held may be unwritten, or be written with the same numbers: another
    buffer, or a violated contract, tells. The name stays among the explanations.
    """
    cause = diagnosis.cause
    is_proved = diagnosis.unwritten_by == "contracts" or (cause is not None and cause.linked)
    if cause is None or cause.name != NEVER_WRITTEN or is_proved:
        return diagnosis
    return dataclasses.replace(diagnosis, status="ambiguous", cause=None)


def _without_candidates(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis "nothing wrong", with all facts that do not depend on candidates."""
    locations, problem = evidence.locations, evidence.problem
    sizes: dict[str, Any] = {}
    if len(locations.wrong_rows):
        at, at_ratio = (locations.largest(in_bounds=one) for one in (False, True))
        sizes = {
            **{"largest": float(locations.error[at]), "place": _place(problem, *at)},
            "largest_in_bounds": float(locations.ratio[at_ratio]),
            "place_in_bounds": _place(problem, *at_ratio),
        }
    return Diagnosis(
        status="nothing wrong",
        wrong_rows=len(locations.wrong_rows),
        wrong_heads=int(locations.is_wrong.any(0).sum()),
        **sizes,
        unwritten=evidence.unwritten.tolist(),
        unwritten_by=evidence.unwritten_by,
        violations=Violations(evidence.violations),
        looked_at=(0, len(evidence.output)),
    )


def _place(problem: Problem, row: int, head: int) -> ErrorPlace:
    """Return the place of a row and a head."""
    row_slice = problem.row_slice_of(row, torch.tensor([head]))
    return ErrorPlace(seq=row_slice.seq, token=int(row_slice.tokens[0]), row=row, head=head)


def _weigh(
    evidence: Evidence, sample: RowSample, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[Candidate]]:
    """Confirm the candidates that explain the worst rows.

    Returns all candidates, with their final verdicts, and the explanations, the best fit first: the
    confirmed candidates that the best of them does not make less likely.
    """
    remaining = [candidate for candidate in candidates if candidate.verdict == "explains"]
    confirmations = confirm(
        evidence.problem, evidence.output, sample, evidence.locations, remaining
    )
    every = [one for one in confirmations if one.candidate.verdict == "explains"]
    every.sort(key=lambda one: one.squares / max(1, one.freedom))
    rival = next((one for one in every if one.candidate.name == _RIVAL), None)
    confirmed = [one for one in every if one is not rival]
    candidates = [one for one in candidates if one.name != _RIVAL]
    final = {one.candidate.text: one.candidate for one in confirmations}
    explanations: list[Candidate] = []
    for one in confirmed:
        explains = one is confirmed[0] or is_by_chance(confirmed[0], one)
        if rival is not None and rival.squares < _FITS_BETTER * one.squares:
            explains = explains and is_by_chance(rival, one)
        candidate = dataclasses.replace(
            one.candidate,
            verdict="explains" if explains else "less likely",
            linked=evidence.linked(one.candidate.defect),
        )
        final[candidate.text] = candidate
        if explains and candidate.name not in [other.name for other in explanations]:
            explanations.append(candidate)
    return _sorted([final.get(candidate.text, candidate) for candidate in candidates]), explanations


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates by verdict, then by ratio; the best come first, of variants only the best."""
    ordered = sorted(candidates, key=lambda one: (_VERDICTS.index(one.verdict), one.ratio))
    best: dict[str, Candidate] = {}
    for candidate in ordered:
        best.setdefault(candidate.name, candidate)
    return list(best.values())


# Withdrawal: explanations that evidence other than the output contradicts.
#
# An output may agree with a defect by its numbers although the run shows another fault: an overflowing
# product, a dependence on slots that the defect does not read, or a second case that the defect does not
# explain.

# The kind of empty slots whose contents reach the output under a defect.
SLOTS_OF = {"tail_leaked": "tail", "tail_attended": "tail", "freed_leaked": "freed"}


def withdraw(
    diagnosis: Diagnosis, is_refuted: Callable[[Candidate], bool], verdict: str, reason: str
) -> Diagnosis:
    """Return the diagnosis without the explanations that are refuted; ``verdict`` is what they become.

    ``reason``: a sentence with "{names}" for the names of the withdrawn explanations.
    """
    refuted = [one.name for one in diagnosis.explanations if is_refuted(one)]
    if not refuted:
        return diagnosis
    explanations = [one for one in diagnosis.explanations if one.name not in refuted]
    candidates = [
        dataclasses.replace(one, verdict=verdict) if one.name in refuted else one
        for one in diagnosis.candidates
    ]
    return dataclasses.replace(
        with_explanations(diagnosis, explanations),
        candidates=candidates,
        withdrawn=(*diagnosis.withdrawn, reason.format(names=", ".join(refuted))),
    )


def with_run_faults(
    diagnosis: Diagnosis, wraps: Collection[str], outside: Collection[str]
) -> Diagnosis:
    """Return the diagnosis with the faults that the run reported.

    Lines with int32 overflow or out-of-bounds access explain why other slots were read, so no defect that
    reads other slots is named besides.
    """
    diagnosis = dataclasses.replace(diagnosis, wraps=tuple(wraps), outside=tuple(outside))
    if not diagnosis.is_wrong or not (wraps or outside):
        return diagnosis
    what = "the product overflows" if wraps else "an access is out of bounds"
    return withdraw(
        diagnosis,
        lambda one: one.defect.family == "reads",
        "excluded by run",
        f"{{names}} would give the same output, but in the run {what}",
    )


def with_slot_kinds(diagnosis: Diagnosis, kinds: dict[str, list[int]]) -> Diagnosis:
    """Return the diagnosis without leaks of slots whose contents change no row; ``kinds`` maps kinds of
    slots to the rows that depend on them."""
    diagnosis = dataclasses.replace(diagnosis, slot_kinds=kinds)
    return withdraw(
        diagnosis,
        lambda one: one.name in SLOTS_OF and SLOTS_OF[one.name] not in kinds,
        "excluded by run",
        "{names} is withdrawn: no row depends on the slots that it reads",
    )


# Examine one output of a Case without running anything.


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
    native = lab.is_native_run(case)
    problem = Problem.of_case(case, lab.batch(case), call, call.output, is_native=native)
    violations = lab.violations(case, call)
    locations = locate(problem, output, case.query_heads, lab.reference(case))
    evidence = collect_evidence(problem, output, locations, violations, case.query_heads)
    return Examination(evidence=evidence, diagnosis=conclude(evidence, defects, pattern))


def examined(
    lab: Lab,
    cases: Iterable[Case],
    rerun: Callable[[Case], torch.Tensor],
    *,
    describes: bool = False,
) -> Iterator[tuple[Case, torch.Tensor, Examination]]:
    """Yield each case that runs, with its output and the examination of that by no defect.

    ``describes``: with the pattern of its errors.
    """
    for case in cases:
        try:
            output = rerun(case)
            found = examine(lab, case, output, (), None if describes else Pattern())
        except AttnLabError:
            continue
        yield case, output, found


def check_output(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise InvalidCall if an output has another shape or dtype than the call's."""
    if output.shape != expected.shape:
        raise InvalidCall(
            f"output must have shape {tuple(expected.shape)}, got {tuple(output.shape)}"
        )
    if output.dtype != expected.dtype:
        raise InvalidCall(f"output must have dtype {expected.dtype}, got {output.dtype}")
