"""Power of a test: which defects it would notice with its data, tolerance, cache and buffer.

Each defect of the catalogue is a mutant of the right output. It is killed where some element leaves the
test's tolerance, survives where none does, and is equivalent where no data would show it. Nothing is run:
the mutants are computed, on a sample of each sequence's rows and heads.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.fields import refuse
from attnlab.case.shown import Shown
from attnlab.defects import Defect
from attnlab.diagnosis.diagnosis import number
from attnlab.diagnosis.distinguish import problem_of
from attnlab.mutation.mutants import MUTANTS
from attnlab.mutation.remedies import changes_text, find_remedies, score, take


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """What a test does with one defect.

    - ``outcome``: "killed", "survived" or "equivalent".
    - ``effect``: how far it moves any element of the sample; ``margin``: the same in units of what the
      test allows there, above 1 it is seen; infinite for NaN.
    - ``remedy``: the cheapest change of the test that kills it, or None.
    """

    name: str
    text: str
    outcome: str
    effect: float
    margin: float
    remedy: dict[str, Any] | None = None

    @property
    def remedy_text(self) -> str:
        """Return the remedy in words; "" where none is needed."""
        if self.outcome != "survived":
            return ""
        if self.remedy is None:
            return "none found"
        return changes_text(self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MutationReport(Shown):
    """What a test would notice.

    - ``proposal``: the least set of changes under which every mutant dies that any data can show, or
      None; ``models_pass``: whether the lab's models still pass then.
    - ``sampled``: rows that were looked at, of how many; ``heads``: how many heads of each.
    """

    case: Case
    mutants: list[Mutant]
    proposal: dict[str, Any] | None = None
    left: list[str] = field(default_factory=list)
    models_pass: bool | None = None
    sampled: tuple[int, int] = (0, 0)
    heads: int = 0
    seconds: float = 0.0

    def of(self, outcome: str) -> list[Mutant]:
        """Return the mutants with an outcome."""
        return [mutant for mutant in self.mutants if mutant.outcome == outcome]

    @property
    def survivors(self) -> list[Mutant]:
        """Return what the test would not notice."""
        return self.of("survived")

    def named(self, names: Sequence[str]) -> list[Mutant]:
        """Return the mutants of these names, in their order, those that the test can have."""
        by_name = {mutant.name: mutant for mutant in self.mutants}
        return [by_name[name] for name in names if name in by_name]

    def sentences(self) -> list[str]:
        """Return what a person wants to know, a sentence each."""
        killed, survived, same = (len(self.of(o)) for o in ("killed", "survived", "equivalent"))
        told = [
            f"{killed} killed, {survived} survived, {same} equivalent, which no data can show "
            f"(computed on {self.sampled[0]} of {self.sampled[1]} rows, {self.heads} heads of each)"
        ]
        if self.proposal is not None and survived:
            passes = {True: "the models pass", False: "the models do not pass", None: "not run"}
            rest = f"; {', '.join(self.left)} survive" if self.left else "; all of them die"
            told.append(f"with {changes_text(self.proposal)}{rest}, and {passes[self.models_pass]}")
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the power as JSON-able values."""
        rows = [
            {name: number(v) if isinstance(v, float) else v for name, v in row.items()}
            for row in map(dataclasses.asdict, self.mutants)
        ]
        return {
            "case": self.case.changes(),
            "mutants": rows,
            "counts": {o: len(self.of(o)) for o in ("killed", "survived", "equivalent")},
            "proposal": self.proposal,
            "left": self.left,
            "models_pass": self.models_pass,
            "sampled": list(self.sampled),
            "sentences": self.sentences(),
            "seconds": self.seconds,
        }


def power(
    case: Case,
    *,
    mutants: Sequence[Defect] = MUTANTS,
    remedies: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
) -> MutationReport:
    """Return which defects a test with the Case's data and tolerance would notice.

    With ``remedies``, look for the cheapest change that kills each survivor and for the least set of
    changes that kills all, and run the models under it.
    """
    began = time.perf_counter()
    if case.spec.writes_cache:
        refuse("op", "an attention op to be scored", case.op)
    on_step("the test's own data")
    problem = problem_of(case)
    row_slices = take(problem)
    scores = {
        one.name: score(problem, row_slices, one, case) for one in mutants if one.applies(problem)
    }
    known = [one for one in mutants if one.name in scores]
    alive = {one.name: one for one in known if scores[one.name][1] <= 1}
    sampled = (sum(len(row_slice.tokens) for row_slice, _ in row_slices), case.lengths.num_tokens)
    told: dict[str, Any] = {}
    cures: dict[str, dict[str, Any]] = {}
    if remedies and alive:
        cures, told = find_remedies(case, alive, on_step)
    rows = [
        Mutant(
            name=one.name,
            text=one.text,
            outcome="killed"
            if one.name not in alive
            else "equivalent"
            if one.name in told.get("equivalent", ())
            else "survived",
            effect=scores[one.name][0],
            margin=scores[one.name][1],
            remedy=cures.get(one.name),
        )
        for one in known
    ]
    return MutationReport(
        case=case,
        mutants=sorted(rows, key=lambda row: -row.margin),
        proposal=told.get("proposal"),
        left=told.get("left", []),
        models_pass=told.get("models_pass"),
        sampled=sampled,
        heads=max(len(row_slice.heads) for row_slice, _ in row_slices),
        seconds=time.perf_counter() - began,
    )
