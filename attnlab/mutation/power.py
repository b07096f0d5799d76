"""power: find the defects that a test would notice, given its data, tolerance, cache and output buffer.

Each defect of the catalogue is a mutant of the correct output. A mutant is killed if an element leaves the
test's tolerance, survives if none does, and is equivalent if no data would show it. No kernel runs: the
mutants' outputs are computed, on a sample of each sequence's rows and heads.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnlab.case.case import Case, as_case
from attnlab.case.ops import check_scored
from attnlab.case.shown import json_value
from attnlab.defects import Defect
from attnlab.defects.problem import make_problem
from attnlab.lab.lab import Lab
from attnlab.mutation.report import (
    MUTANTS,
    NO_REMEDIES,
    Attempt,
    ChangedTest,
    CorrectSample,
    Mutant,
    MutationReport,
    Remedies,
    Score,
    find_remedies,
    is_equivalent,
    ladder,
    passes,
    remedies_of,
    sample_correct,
    score,
)
from attnlab.tasks.store import ALL, Header, Shard
from attnlab.tasks.task import Job, Outcome, Task

__all__ = ["Mutant", "MutationReport", "power"]


def measure_power(
    case: Case,
    *,
    mutants: Iterable[Defect] = MUTANTS,
    remedies: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
) -> MutationReport:
    """Return which mutants a test with the Case's data and tolerance would notice.

    With ``remedies``, search for the cheapest change of the test that kills each survivor and for one set
    of changes that kills as many as possible, and run the models under that set. Raises InvalidCase for
    a cache write.
    """
    began = time.perf_counter()
    check_scored(case.spec)
    on_step("the test's own data")
    lab = Lab(keep=1, device="cpu")  # most changes of a test leave its batch
    problem = make_problem(case, lab.batch(case))
    sample = sample_correct(problem)
    applicable = [mutant for mutant in mutants if mutant.applies(problem)]
    scores = {mutant.name: score(problem, sample, mutant, case) for mutant in applicable}
    alive = {mutant.name: mutant for mutant in applicable if not scores[mutant.name].is_killed}
    found = find_remedies(case, alive, lab, on_step) if remedies and alive else NO_REMEDIES
    return report_of(case, applicable, scores, found, sampled_of(sample), began)


def report_of(
    case: Case,
    applicable: Sequence[Defect],
    scores: Mapping[str, Score],
    found: Remedies,
    sampled: tuple[int, int],
    began: float,
) -> MutationReport:
    """Return the report of the applicable mutants; ``sampled``: see :func:`sampled_of`."""
    rows = [_mutant(mutant, scores[mutant.name], found) for mutant in applicable]
    return MutationReport(
        case=case,
        mutants=sorted(rows, key=lambda row: -row.margin),
        proposal=found.proposal,
        left=found.left,
        models_pass=found.models_pass,
        sampled=(sampled[0], case.lengths.num_tokens),
        heads=sampled[1],
        seconds=time.perf_counter() - began,
    )


def sampled_of(sample: CorrectSample) -> tuple[int, int]:
    """Return the number of rows of a sample, and the largest number of heads of a row."""
    rows = sum(len(part.tokens) for part, _ in sample)
    return rows, max(len(part.heads) for part, _ in sample)


def _mutant(mutant: Defect, mutant_score: Score, found: Remedies) -> Mutant:
    outcome = "survived"
    if mutant_score.is_killed:
        outcome = "killed"
    elif mutant.name in found.equivalent:
        outcome = "equivalent"
    return Mutant(
        name=mutant.name,
        text=mutant.text,
        outcome=outcome,
        effect=mutant_score.effect,
        margin=mutant_score.margin,
        margins=mutant_score.margins,
        remedy=found.cheapest.get(mutant.name),
    )


# power as tasks: one for each mutant, and one for each change of the test, so that it can be sharded.

_NAMED = {mutant.name: mutant for mutant in MUTANTS}
_CHANGE = "change"
_CHANGE_COST = 4.0  # of running the backend, in times of a mutant


@dataclass(frozen=True, kw_only=True)
class PowerJob(Job):
    """Scores mutants of a test, and runs its backend under changes of the test."""

    case: Case

    def open(self) -> "_State":
        return _State(self.case)

    def run(self, state: "_State", payload: dict[str, Any]) -> dict[str, Any]:
        if _CHANGE in payload:
            test = state.changed[payload[_CHANGE]]
            verdict = {"atol": test.case.atol, "passes": passes(state.attempt(payload[_CHANGE]))}
        else:
            verdict = state.mutant_verdict(_NAMED[payload["mutant"]])
        found: dict[str, Any] = json_value(verdict)
        return found


class _State:
    """The test and its changes, each made when it is first needed."""

    def __init__(self, case: Case) -> None:
        self._case, self._lab = case, Lab(keep=1, device="cpu")

    @cached_property
    def own(self) -> ChangedTest:
        """Return the test itself, with its own tolerance."""
        from attnlab.defects.problem import make_problem

        problem = make_problem(self._case, self._lab.batch(self._case))
        sample = sample_correct(problem)
        return ChangedTest(changes={}, case=self._case, problem=problem, sample=sample)

    @cached_property
    def changed(self) -> list[ChangedTest]:
        return [ChangedTest.of(self._case, changes, self._lab) for changes in ladder(self._case)]

    def attempt(self, index: int) -> Attempt:
        test = self.changed[index]
        return Attempt(changes=test.changes, case=test.case, killed=frozenset())

    def mutant_verdict(self, mutant: Defect) -> dict[str, Any]:
        """Return the score of a mutant and, if it survives, which changes kill it."""
        own = self.own
        sampled = sampled_of(own.sample)
        if not mutant.applies(own.problem):
            return {"applies": False, "sampled": sampled}
        found = score(own.problem, own.sample, mutant, own.case)
        killed = [] if found.is_killed else [test.kills(mutant) for test in self.changed]
        excluded = not found.is_killed and not any(killed) and is_equivalent(self._case, mutant)
        return {
            "applies": True,
            "sampled": sampled,
            "effect": found.effect,
            "margins": found.margins,
            "killed": killed,
            "equivalent": excluded,
        }


def power_tasks(case: Case) -> list[Task]:
    """Return the tasks of scoring a test. Raises InvalidCase for a cache write."""
    check_scored(case.spec)
    changes = range(len(list(ladder(case))))
    return [
        *(Task(key=f"mutant/{name}", payload={"mutant": name}) for name in _NAMED),
        *(Task(key=f"{_CHANGE}/{i}", payload={_CHANGE: i}, cost_s=_CHANGE_COST) for i in changes),
    ]


def power_header(case: Case, versions: Mapping[str, str], shard: Shard = ALL) -> Header:
    """Return the header of a store of the tasks; ``versions``: of all that decides the verdicts."""
    text = case.to_json()
    return {
        "command": "power",
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        "case": json_value(case.changes()),
        "versions": dict(versions),
        "shard": str(shard),
    }


def power_report(case: Case, outcomes: Mapping[str, Outcome], seconds: float) -> MutationReport:
    """Return the report that ``power`` gives, from the outcomes of all tasks."""
    began = time.perf_counter() - seconds
    verdicts = {key: outcome.verdict or {} for key, outcome in outcomes.items()}
    of_mutants = {name: verdicts[f"mutant/{name}"] for name in _NAMED}
    applicable = [_NAMED[name] for name, verdict in of_mutants.items() if verdict["applies"]]
    scores = {
        mutant.name: Score(
            effect=float(of_mutants[mutant.name]["effect"]),
            margins={n: float(v) for n, v in of_mutants[mutant.name]["margins"].items()},
        )
        for mutant in applicable
    }
    alive = [mutant.name for mutant in applicable if not scores[mutant.name].is_killed]
    found = NO_REMEDIES
    if alive:
        attempts = _attempts(case, verdicts, alive)
        found = remedies_of(
            attempts,
            alive,
            lambda name: bool(of_mutants[name]["equivalent"]),
            lambda best: bool(verdicts[f"{_CHANGE}/{attempts.index(best)}"]["passes"]),
        )
    rows, heads = next(iter(of_mutants.values()))["sampled"]
    return report_of(case, applicable, scores, found, (rows, heads), began)


def _attempts(
    case: Case, verdicts: Mapping[str, Mapping[str, Any]], alive: Sequence[str]
) -> list[Attempt]:
    """Return the attempts up to the first that kills all survivors."""
    attempts = []
    for i, changes in enumerate(ladder(case)):
        killed = frozenset(name for name in alive if verdicts[f"mutant/{name}"]["killed"][i])
        changes = {**changes, "atol": float(verdicts[f"{_CHANGE}/{i}"]["atol"])}
        attempts.append(Attempt(changes=changes, case=case, killed=killed))
        if len(killed) == len(alive):
            break
    return attempts


# The part of ``import attnlab`` that scores a test.


def power(case: Case | str, *, remedies: bool = True, **changes: Any) -> MutationReport:
    """Return which defects a test with the Case's data and tolerance detects.

    With ``remedies``, also search the cheapest change of the test that detects each survivor.
    """
    return measure_power(as_case(case, **changes), remedies=remedies)
