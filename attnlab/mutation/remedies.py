"""Remedies: changes of a test's data, cache and tolerance that kill its surviving mutants."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.defects import Defect
from attnlab.defects.problem import Problem, make_problem
from attnlab.diagnosis.distinction import find_distinction
from attnlab.diagnosis.second_case import SECOND_SCALES
from attnlab.lab.lab import Lab
from attnlab.mutation.mutants import CORRECT
from attnlab.mutation.score import (
    CorrectSample,
    derived_tolerance,
    sample_correct,
    score,
)

_SHORT = {  # contexts so short that each key counts, and longer ones with several blocks and partitions
    "query_lens": (1, 1, 17, 40),
    "ctx_lens": (3, 300, 260, 0),
    "max_query_len": None,
    "max_seq_len": None,
    "block_table": None,
    "num_blocks": None,
    "max_blocks_per_seq": None,
    **dict.fromkeys(DATA_OF_LENGTHS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What kills the survivors of a test.

    - ``cheapest``: by name, the cheapest changes that kill a mutant.
    - ``equivalent``: names of mutants that no data can show.
    - ``proposal``: the changes that kill the most survivors; ``left``: the names of the others;
      ``models_pass``: whether the Case's backend passes the test with the proposal.
    """

    cheapest: dict[str, dict[str, Any]] = field(default_factory=dict)
    equivalent: frozenset[str] = frozenset()
    proposal: dict[str, Any] | None = None
    left: list[str] = field(default_factory=list)
    models_pass: bool | None = None


NO_REMEDIES = Remedies()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A changed test and the names of the survivors that it kills or excludes.

    ``changes`` have the derived atol, and ``case`` has it, too.
    """

    changes: dict[str, Any]
    case: Case
    killed: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTest:
    """A changed test with its derived atol, ready to score mutants."""

    changes: dict[str, Any]
    case: Case
    problem: Problem
    sample: CorrectSample

    @classmethod
    def of(cls, case: Case, changes: dict[str, Any], lab: Lab) -> "ChangedTest":
        """Return the test with changes of :func:`ladder`; ``lab`` makes the batch."""
        changed = case.replace(**{name: v for name, v in changes.items() if name != "atol"})
        problem = make_problem(changed, lab.batch(changed))
        sample = sample_correct(problem)
        changed = changed.replace(atol=derived_tolerance(sample))
        changes = {**changes, "atol": changed.atol}
        return cls(changes=changes, case=changed, problem=problem, sample=sample)

    def kills(self, mutant: Defect) -> bool:
        """Answer whether the changed test kills or excludes a mutant."""
        if not mutant.applies(self.problem):
            return True
        return score(self.problem, self.sample, mutant, self.case).is_killed


def find_remedies(
    case: Case, survivors: dict[str, Defect], lab: Lab, on_step: Callable[[str], None]
) -> Remedies:
    """Try changes of a test, from the cheapest to all of them, until one kills all ``survivors``.

    ``lab`` makes the batches.
    """
    attempts: list[Attempt] = []
    for changes in ladder(case):
        on_step(changes_text(changes))
        test = ChangedTest.of(case, changes, lab)
        killed = frozenset(name for name, mutant in survivors.items() if test.kills(mutant))
        attempts.append(Attempt(changes=test.changes, case=test.case, killed=killed))
        if len(killed) == len(survivors):
            break
    return remedies_of(
        attempts, survivors, lambda name: is_equivalent(case, survivors[name]), passes, on_step
    )


def remedies_of(
    attempts: Sequence[Attempt],
    survivors: Collection[str],
    equivalent: Callable[[str], bool],
    models_pass: Callable[[Attempt], bool],
    on_step: Callable[[str], None] = lambda step: None,
) -> Remedies:
    """Return the remedies that attempts at killing the survivors of a test have shown.

    ``equivalent`` is asked about mutants that no attempt kills, ``models_pass`` about the best attempt.
    """
    best = max(attempts, key=lambda attempt: len(attempt.killed))
    cheapest = {
        name: next(attempt.changes for attempt in attempts if name in attempt.killed)
        for name in survivors
        if any(name in attempt.killed for attempt in attempts)
    }
    on_step("mutants that no data can show")
    excluded = {name for name in survivors if name not in cheapest and equivalent(name)}
    on_step("the backend with the proposal")
    return Remedies(
        cheapest=cheapest,
        equivalent=frozenset(excluded),
        proposal=best.changes,
        left=sorted({*survivors} - best.killed - excluded),
        models_pass=models_pass(best),
    )


def passes(attempt: Attempt) -> bool:
    """Run the backend of a changed test, and answer whether it passes."""
    return Lab().run(attempt.case).status == "match"


def is_equivalent(case: Case, mutant: Defect) -> bool:
    """Answer whether a mutant gives the correct output under all changes of the Case that are tried."""
    stored = case.replace(cache_write="scaled")
    return find_distinction(stored, mutant, CORRECT, same_kernels=False).case is None


def ladder(case: Case) -> Iterator[dict[str, Any]]:
    """Yield changes of a test, from the cheapest to all of them.

    Each sets atol to None, which stands for the derived tolerance, the smallest under which correct
    kernels pass. Under it a decode kernel must find the newest token in the cache, so each also writes
    that token if the test does not.
    """
    always: dict[str, Any] = {"atol": None}
    if case.staging.fill == "context_only" and decide(case).decode is not None:
        always = {"fill": "decode_rows", **always}
    has_old_scale = case.sm_scale is None and case.release == "0.11.2"
    scale = {"sm_scale": case.head_size**-0.5} if has_old_scale else {}
    data: dict[str, Any] = {"distribution": "normal"}
    poison = {"empty_slots": "garbage" if _reads_tail(case) else "nan"}
    steps: list[dict[str, Any]] = [{}, data, {**data, **poison}]
    if case.is_fp8:
        store = {"cache_write": "scaled", **SECOND_SCALES, "x": None}
        steps += [{**store, **data}, {**store, **data, **poison}]
    steps.append({**steps[-1], **_SHORT})
    yielded: list[dict[str, Any]] = []
    for step in steps:
        changes = {n: v for n, v in {**scale, **step}.items() if getattr(case, n) != v}
        if changes not in yielded:
            yielded.append(changes)
            yield {**changes, **always}


def _reads_tail(case: Case) -> bool:
    """Answer whether a kernel of the Case reads slots after a sequence's last token, where NaN leaks."""
    contracts = decide(case).contracts(Target.of(case), case.op)
    return any(terms.reads_tail != "nothing" for terms in contracts)


def changes_text(changes: dict[str, Any]) -> str:
    """Return changes in words, such as "distribution=normal, atol=0.0021"."""
    return ", ".join(_change_text(name, value) for name, value in changes.items())


def _change_text(name: str, value: object) -> str:
    if name == "atol" and value is None:
        return "atol derived"
    return f"{name}={value:.2g}" if isinstance(value, float) else f"{name}={value}"
