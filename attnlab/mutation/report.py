"""MutationReport: which mutants a test notices."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.json import json_number
from attnlab.case.shown import Shown
from attnlab.mutation.remedies import changes_text

OUTCOMES = ("killed", "survived", "equivalent")
_RAN = {True: "passes", False: "does not pass", None: "was not run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mutant and what the test does with it.

    - ``outcome``: "killed", "survived" or "equivalent".
    - ``effect``: the largest absolute change of an element of the sample; ``margin``: the largest ratio
      of a change to what the test allows there. Above 1 the test notices it; infinite for NaN.
    - ``margins``: the same ratio over the rows of each kernel, "decode" and "prefill".
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
        """Return the kernels in which a killed mutant would survive alone: it changes their rows, but by no
        more than the test allows."""
        if self.outcome != "killed":
            return ()
        return tuple(kernel for kernel, margin in self.margins.items() if 0 < margin <= 1)

    @property
    def outcome_text(self) -> str:
        """Return the outcome in words."""
        alone = self.survives_in
        return f"killed; survives in {alone[0]} alone" if alone else self.outcome

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
        """Return the mutants that are killed only because more than one kernel has them."""
        return [mutant for mutant in self.mutants if mutant.survives_in]

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
        for kernel in ("decode", "prefill"):
            alone = [mutant.name for mutant in self.partly_killed if kernel in mutant.survives_in]
            if alone:
                sentences.append(
                    f"{len(alone)} of the killed would survive if only the {kernel} kernel had the fault: "
                    f"{', '.join(alone)}"
                )
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
    values = dataclasses.asdict(mutant) | {"survives_in": list(mutant.survives_in)}
    values["margins"] = {kernel: json_number(n) for kernel, n in mutant.margins.items()}
    return values | {"effect": json_number(mutant.effect), "margin": json_number(mutant.margin)}
