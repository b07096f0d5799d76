"""Judgement: the candidates heard on the evidence, and what follows from it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.contracts.kernel_contracts import contracts_of
from attnlab.contracts.rows import unwritten_rows
from attnlab.contracts.violation import Violation, Violations
from attnlab.defects import Defect
from attnlab.defects.problem import Problem
from attnlab.diagnosis.candidates import Candidate, Confirmed, confirm, is_by_chance, screen
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.locate import ErrorLocations
from attnlab.diagnosis.reruns import rows_equal
from attnlab.diagnosis.row_sample import Sample, choose

_VERDICTS = ("explains", "less likely", "excluded by place", "excluded by value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """All that is known before the candidates are heard."""

    problem: Problem
    output: torch.Tensor
    found: ErrorLocations
    violations: Sequence[Violation]
    unwritten: torch.Tensor
    unwritten_by: str


def gather(
    problem: Problem, output: torch.Tensor, found: ErrorLocations, violations: Sequence[Violation]
) -> Evidence:
    """Return the evidence, with the rows that nobody wrote by the best means there is without a run."""
    if problem.before is not None and _is_telling(problem.before):
        same = rows_equal(output, problem.before)
        unwritten, how = torch.nonzero(same).flatten(), "they hold what the buffer held"
    else:
        terms = contracts_of(problem.kernels, problem.target, problem.call.op)
        nobody = unwritten_rows(terms, problem.call) & found.touched.any(1)
        unwritten, how = torch.nonzero(nobody).flatten(), "by the kernels' contracts"
    return Evidence(
        problem=problem,
        output=output,
        found=found,
        violations=violations,
        unwritten=unwritten,
        unwritten_by=how if len(unwritten) else "",
    )


def _is_telling(before: torch.Tensor) -> bool:
    """Answer whether a buffer's contents give a row away that kept them: zeros and NaN do not."""
    return bool(before.isfinite().all()) and bool(before.count_nonzero() == before.numel())


def judge(evidence: Evidence, catalogue: Sequence[Defect], heads: range | None) -> Diagnosis:
    """Hear the candidates and return the verdict."""
    problem, found, output = evidence.problem, evidence.found, evidence.output
    facts = _facts(evidence)
    if not bool(found.touched.any()):
        return Diagnosis(status="nothing wrong", **facts)  # type: ignore[arg-type]
    kinds = {violation.kind for violation in evidence.violations if violation.effect == "silent"}
    left = found.touched_rows[~torch.isin(found.touched_rows, evidence.unwritten)]
    known = any(defect.name == "rows_never_written" for defect in catalogue)
    if len(left) == 0 and problem.before is None and known:
        return _never_written(evidence, catalogue, kinds, facts, heads)
    ignore = evidence.unwritten[
        : len(evidence.unwritten) if problem.before is None and len(left) else 0
    ]
    sample = choose(problem, found, ignore, heads)
    heard = screen(problem, output, sample.first, catalogue)
    heard, explanations = _weigh(evidence, sample, heard, kinds)
    cause = decided(explanations)
    if len(ignore) and cause is not None:
        cause, explanations = (
            None,
            [],
        )  # rows are unwritten besides: one defect does not explain both
    status = "unexplained" if not explanations else "ambiguous" if cause is None else "explained"
    return Diagnosis(
        status=status,
        cause=cause,
        explanations=explanations,
        candidates=heard,
        looked_at=(sum(len(row_slice.tokens) for row_slice in sample.many), len(output)),
        **facts,  # type: ignore[arg-type]
    )


def _facts(evidence: Evidence) -> dict[str, object]:
    """Return the fields of a Diagnosis that do not depend on the candidates."""
    found, problem = evidence.found, evidence.problem
    num_heads = found.ratio.shape[1]
    place, largest = None, 0.0
    if bool(found.touched.any()):
        worst = int(found.ratio.argmax())
        row, head = divmod(worst, num_heads)
        row_slice = problem.spot_of_row(row, torch.tensor([head]))
        place = {"seq": row_slice.seq, "token": int(row_slice.tokens[0]), "row": row, "head": head}
        largest = float(found.error[row, head])
    return {
        "wrong_rows": len(found.touched_rows),
        "wrong_heads": int(found.touched.any(0).sum()),
        "place": place,
        "largest": largest,
        "unwritten": evidence.unwritten.tolist(),
        "unwritten_by": evidence.unwritten_by,
        "violations": Violations(evidence.violations),
    }


def _never_written(
    evidence: Evidence,
    catalogue: Sequence[Defect],
    kinds: set[str],
    facts: dict[str, object],
    heads: range | None,
) -> Diagnosis:
    """Return the diagnosis where all wrong rows are rows that nobody wrote."""
    sample = choose(evidence.problem, evidence.found, torch.arange(0), heads)
    heard = screen(evidence.problem, evidence.output, sample.first, catalogue)
    known = next(defect for defect in catalogue if defect.name == "rows_never_written")
    own = [candidate for candidate in heard if candidate.name == known.name]
    rows = evidence.unwritten.tolist()
    seqs = {evidence.problem.spot_of_row(row, torch.arange(0)).seq for row in rows}
    cause = own[0] if own else _unheard(known, evidence)
    cause = dataclasses.replace(
        cause,
        verdict="explains",
        scope="sequences " + ", ".join(map(str, sorted(seqs)[:8])),
        rows=len(evidence.found.touched_rows),
        linked=_linked(known, kinds),
    )
    others = [
        dataclasses.replace(candidate, verdict="less likely")
        if candidate.verdict == "explains"
        else candidate
        for candidate in heard
        if candidate.name != known.name
    ]
    return Diagnosis(
        status="explained",
        cause=cause,
        explanations=[cause],
        candidates=_sorted([cause, *others]),
        **facts,  # type: ignore[arg-type]
    )


def _unheard(defect: Defect, evidence: Evidence) -> Candidate:
    """Return rows never written as a candidate where the buffer is not known: any size is theirs."""
    size = float(evidence.found.error[evidence.found.touched].max())
    return Candidate(
        name=defect.name,
        text=defect.text,
        seen_in=defect.seen_in,
        verdict="explains",
        predicted=size,
        observed=size,
        residual=0.0,
        ratio=0.0,
        defect=defect,
    )


def _weigh(
    evidence: Evidence, sample: Sample, heard: Sequence[Candidate], kinds: set[str]
) -> tuple[list[Candidate], list[Candidate]]:
    """Confirm those that survived, and set aside what is less likely than the best of them."""
    left = [candidate for candidate in heard if candidate.verdict == "explains"]
    confirmed = confirm(evidence.problem, evidence.output, sample, evidence.found, left)
    good = [one for one in confirmed if one.candidate.verdict == "explains"]
    good.sort(key=lambda one: one.squares / max(1, one.freedom))
    kept: list[Confirmed] = [one for one in good if one is good[0] or is_by_chance(good[0], one)]
    told = {
        one.candidate.name: dataclasses.replace(
            one.candidate,
            verdict="explains" if one in kept else "less likely",
            linked=_linked(one.candidate.defect, kinds),
        )
        if one.candidate.verdict == "explains"
        else one.candidate
        for one in confirmed
    }
    everyone = [told.get(candidate.name, candidate) for candidate in heard]
    return _sorted(everyone), [told[one.candidate.name] for one in kept]


def _linked(defect: Defect, kinds: set[str]) -> tuple[str, ...]:
    return tuple(kind for kind in defect.links if kind in kinds)


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda one: (_VERDICTS.index(one.verdict), one.ratio))


def decided(explanations: Sequence[Candidate]) -> Candidate | None:
    """Return the one candidate; or, among several, the one that a violation of the call would cause.

    Where violations would cause several, the one goes before that says of itself which rows it touches,
    instead of being fitted to the rows that are wrong.
    """
    if len(explanations) == 1:
        return explanations[0]
    linked = [candidate for candidate in explanations if candidate.linked]
    widest = min((_width(candidate.scope) for candidate in linked), default=0)
    fewest = [candidate for candidate in linked if _width(candidate.scope) == widest]
    return fewest[0] if len(fewest) == 1 else None


def _width(scope: str) -> int:
    """Return how much of a scope was fitted: nothing, the kernel, or the sequences."""
    return 0 if scope == "all" else 1 if scope in ("decode", "prefill") else 2
