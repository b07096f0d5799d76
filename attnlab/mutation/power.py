"""power: find the defects that a test would notice, given its data, tolerance, cache and output buffer.

Each defect of the catalogue is a mutant of the correct output. A mutant is killed if an element leaves the
test's tolerance, survives if none does, and is equivalent if no data would show it. No kernel runs: the
mutants' outputs are computed, on a sample of each sequence's rows and heads.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnlab.case.case import Case, as_case
from attnlab.case.ops import check_scored
from attnlab.case.shown import json_value
from attnlab.defects import Defect
from attnlab.kernels.backend import OnStep, cell_steps, ignore_step
from attnlab.lab.lab import Lab
from attnlab.mutation.report import (
    MUTANTS,
    NO_REMEDIES,
    ChangedTest,
    Mutant,
    MutationReport,
    Score,
    Scored,
    is_equivalent,
    ladder,
    passes,
)
from attnlab.tasks.store import ALL, Header, Shard
from attnlab.tasks.task import Job, Outcome, Task

__all__ = ["Mutant", "MutationReport", "power"]


def measure_power(
    case: Case,
    *,
    mutants: Iterable[Defect] = MUTANTS,
    remedies: bool = True,
    on_step: OnStep | None = None,
) -> MutationReport:
    """Return which mutants a test with the Case's data and tolerance would notice.

    With ``remedies``, search for the cheapest change of the test that kills each survivor and for one set
    of changes that kills as many as possible, and run the models under that set. Raises InvalidCase for
    a cache write. ``on_step``: default, a line in the cell of a notebook.
    """
    began, on_step = time.perf_counter(), on_step or cell_steps()
    check_scored(case.spec)
    on_step("the test's own data")
    tests, scores = _Tests(case), {}
    named = {one.name: one for one in mutants if one.applies(tests.own.problem)}
    for i, (name, mutant) in enumerate(named.items()):
        on_step("mutants", i, len(named))
        scores[name] = tests.own.score(mutant)
    scored = Scored(
        case=case,
        mutants=list(named.values()),
        scores=scores,
        sampled=tests.own.sampled,
        changes=lambda number: tests.changed(number).changes,
        kills=lambda number, name: tests.changed(number).kills(named[name]),
        equivalent=lambda name: is_equivalent(case, named[name]),
        passes=lambda number: passes(tests.changed(number).case),
    )
    return scored.report(scored.remedies(on_step) if remedies else NO_REMEDIES, began)


# power as tasks: one for each mutant, and one for each change of the test, so that it can be sharded.

_NAMED = {mutant.name: mutant for mutant in MUTANTS}
_CHANGE = "change"
_CHANGE_COST = 4.0  # of running the backend, in times of a mutant


@dataclass(frozen=True, kw_only=True)
class PowerJob(Job):
    """Scores mutants of a test, and runs its backend under changes of the test."""

    case: Case

    def open(self) -> "_Tests":
        return _Tests(self.case)

    def run(self, state: "_Tests", payload: dict[str, Any]) -> dict[str, Any]:
        if _CHANGE in payload:
            changed = state.changed(payload[_CHANGE]).case
            verdict = {"atol": changed.atol, "passes": passes(changed)}
        else:
            verdict = state.mutant_verdict(_NAMED[payload["mutant"]])
        found: dict[str, Any] = json_value(verdict)
        return found


class _Tests:
    """The test and its changes, each made when it is first needed."""

    def __init__(self, case: Case) -> None:
        self._case, self._ladder = case, list(ladder(case))
        self._lab = Lab(keep=1, device="cpu")  # most changes of a test leave its batch
        self._made: dict[int, ChangedTest] = {}

    @cached_property
    def own(self) -> ChangedTest:
        """Return the test itself, with its own tolerance."""
        return ChangedTest.of(self._case, {}, self._lab)

    def changed(self, number: int) -> ChangedTest:
        """Return the test with the changes of a number."""
        if number not in self._made:
            self._made[number] = ChangedTest.of(self._case, self._ladder[number], self._lab)
        return self._made[number]

    def mutant_verdict(self, mutant: Defect) -> dict[str, Any]:
        """Return the score of a mutant and, if it survives, which changes kill it."""
        own = self.own
        if not mutant.applies(own.problem):
            return {"applies": False, "sampled": own.sampled}
        found, killed = own.score(mutant), []
        if not found.is_killed:
            killed = [self.changed(i).kills(mutant) for i in range(len(self._ladder))]
        excluded = not found.is_killed and not any(killed) and is_equivalent(self._case, mutant)
        return {
            "applies": True,
            "sampled": own.sampled,
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
    scores = {
        name: Score(
            effect=float(verdict["effect"]),
            margins={n: float(v) for n, v in verdict["margins"].items()},
        )
        for name, verdict in of_mutants.items()
        if verdict["applies"]
    }
    changes = list(ladder(case))
    of_changes = [verdicts[f"{_CHANGE}/{number}"] for number in range(len(changes))]
    rows, heads = next(iter(of_mutants.values()))["sampled"]
    scored = Scored(
        case=case,
        mutants=[_NAMED[name] for name in scores],
        scores=scores,
        sampled=(rows, heads),
        changes=lambda number: {**changes[number], "atol": float(of_changes[number]["atol"])},
        kills=lambda number, name: bool(of_mutants[name]["killed"][number]),
        equivalent=lambda name: bool(of_mutants[name]["equivalent"]),
        passes=lambda number: bool(of_changes[number]["passes"]),
    )
    return scored.report(scored.remedies(ignore_step), began)


# The part of ``import attnlab`` that scores a test.


def power(case: Case | str, *, remedies: bool = True, **changes: Any) -> MutationReport:
    """Return which defects a test with the Case's data and tolerance detects.

    With ``remedies``, also search the cheapest change of the test that detects each survivor.
    """
    return measure_power(as_case(case, **changes), remedies=remedies)
