"""MutationReport: which mutants a test notices."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.json import json_number
from attnlab.case.shown import Shown
from attnlab.mutation.remedies import changes_text
from attnlab.mutation.score import kernels_where

OUTCOMES = ("killed", "survived", "equivalent")
_RAN = {True: "passes", False: "does not pass", None: "was not run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mutant and what the test does with it.

    - ``outcome``: "killed" in each kernel whose rows it changes; "survived" if it survives in one; or
      "equivalent".
    - ``effect``: the largest absolute change of an element of the sample.
    - ``margins``: by kernel, "decode" and "prefill", the largest ratio of a change of an element to what the
      test allows there; infinite for NaN. ``margin``: the smallest of the kernels that it changes. Above 1
      the test notices it.
    - ``remedy``: the cheapest change of the test that kills the mutant, or None.
    """

    name: str
    text: str
    outcome: str
    effect: float
    margin: float
    margins: dict[str, float] = field(default_factory=dict)
    remedy: dict[str, Any] | None = None

    @property
    def survives_in(self) -> tuple[str, ...]:
        """Return the kernels whose rows the mutant changes by no more than the test allows."""
        return kernels_where(self.margins, killed=False)

    @property
    def killed_in(self) -> tuple[str, ...]:
        """Return the kernels in whose rows the test notices the mutant."""
        return kernels_where(self.margins, killed=True)

    @property
    def outcome_text(self) -> str:
        """Return the outcome in words, such as "survived (decode; killed in prefill)"."""
        if not (self.survives_in and self.killed_in):
            return self.outcome
        where, killed = (" and ".join(names) for names in (self.survives_in, self.killed_in))
        return f"{self.outcome} ({where}; killed in {killed})"

    @property
    def remedy_text(self) -> str:
        """Return the remedy in words; "" if the mutant did not survive."""
        if self.outcome != "survived":
            return ""
        return "none found" if self.remedy is None else changes_text(self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MutationReport(Shown):
    """Which mutants a test notices.

    - ``mutants``: by margin, the largest first.
    - ``proposal``: the changes of the test that kill the most survivors, or None; ``left``: mutants that
      still survive them; ``models_pass``: whether the Case's backend passes the changed test, None if it
      was not run.
    - ``sampled``: (rows computed, all rows); ``heads``: number of heads computed for each row.
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
        """Return the mutants that the test does not notice."""
        return self.of("survived")

    @property
    def partly_killed(self) -> list[Mutant]:
        """Return the mutants that the test notices in one kernel and not in the other."""
        return [mutant for mutant in self.mutants if mutant.survives_in and mutant.killed_in]

    def counts_by_kernel(self) -> dict[str, dict[str, int]]:
        """Return, for the rows of each kernel, how many mutants that change them are killed and survive."""
        return {
            kernel: {
                "killed": sum(kernel in mutant.killed_in for mutant in self.mutants),
                "survived": sum(kernel in mutant.survives_in for mutant in self.mutants),
            }
            for kernel in dict.fromkeys(name for one in self.mutants for name in one.margins)
        }

    def named(self, names: Sequence[str]) -> list[Mutant]:
        """Return the mutants with these names, in their order, without those that do not apply."""
        by_name = {mutant.name: mutant for mutant in self.mutants}
        return [by_name[name] for name in names if name in by_name]

    def counts(self) -> dict[str, int]:
        """Return the number of mutants by outcome."""
        return {outcome: len(self.of(outcome)) for outcome in OUTCOMES}

    def sentences(self) -> list[str]:
        """Return the report in words."""
        counts = self.counts()
        rows, all_rows = self.sampled
        sentences = [
            f"{counts['killed']} mutants killed, {counts['survived']} survived, "
            f"{counts['equivalent']} equivalent (no data can show them); computed on {rows} of "
            f"{all_rows} rows, {self.heads} heads each"
        ]
        kernels = self.counts_by_kernel()
        if len(kernels) > 1:
            parts = (
                f"{kernel} rows: {one['killed']} killed, {one['survived']} survived"
                for kernel, one in kernels.items()
            )
            sentences.append(f"by kernel, of the mutants that change its rows: {'; '.join(parts)}")
        if self.proposal is not None and self.survivors:
            left = (
                f"{', '.join(self.left)} still survive" if self.left else "all of them are killed"
            )
            changes = changes_text(self.proposal)
            sentences.append(
                f"with {changes}, {left} and {_backend_text(self.case)} {_RAN[self.models_pass]}"
            )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values; NaN and infinity are strings."""
        return {
            "case": self.case.changes(),
            "mutants": [_mutant_dict(mutant) for mutant in self.mutants],
            "counts": self.counts(),
            "counts_by_kernel": self.counts_by_kernel(),
            "proposal": self.proposal,
            "left": self.left,
            "models_pass": self.models_pass,
            "sampled": list(self.sampled),
            "sentences": self.sentences(),
            "seconds": self.seconds,
        }


def _backend_text(case: Case) -> str:
    """Return what ran the proposal, in words."""
    return "the lab's model" if case.backend == "model" else f"backend {case.backend}"


def _mutant_dict(mutant: Mutant) -> dict[str, Any]:
    values = dataclasses.asdict(mutant)
    values |= {"survives_in": list(mutant.survives_in), "killed_in": list(mutant.killed_in)}
    values["margins"] = {kernel: json_number(n) for kernel, n in mutant.margins.items()}
    return values | {"effect": json_number(mutant.effect), "margin": json_number(mutant.margin)}
