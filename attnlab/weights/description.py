"""Description: rules and the rows and heads that they concern; predicts weights and outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.weights.plan import Plan, right_plan
from attnlab.weights.rule import Rule
from attnlab.weights.setup import AttentionSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Rows and heads: of some kernels, query heads and sequences; None means all."""

    kernels: tuple[str, ...] | None = None
    heads: tuple[int, ...] | None = None
    seqs: tuple[int, ...] | None = None

    def rows_of(self, setup: AttentionSetup) -> torch.Tensor:
        """Return which rows of a setup are in the scope, [R] bool."""
        rows = torch.ones(len(setup.rows), dtype=torch.bool)
        if self.kernels is not None:
            rows &= torch.tensor([name in self.kernels for name in setup.kernels])
        if self.seqs is not None:
            rows &= torch.isin(setup.seq, torch.tensor(self.seqs))
        return rows

    def heads_of(self, setup: AttentionSetup) -> torch.Tensor:
        """Return which heads of a setup are in the scope, [H] bool."""
        if self.heads is None:
            return torch.ones(len(setup.heads), dtype=torch.bool)
        return torch.isin(setup.heads, torch.tensor(self.heads))

    @property
    def text(self) -> str:
        """Return the scope as the begin of a sentence, empty for everything."""
        words = []
        if self.kernels is not None:
            words.append(f"rows of {' and '.join(self.kernels)}")
        if self.seqs is not None:
            words.append(f"{_plural('sequence', self.seqs)} {numbers(self.seqs)}")
        if self.heads is not None:
            words.append(f"{_plural('head', self.heads)} {numbers(self.heads)}")
        return ", ".join(words)


EVERYTHING = Scope()


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a kernel does: the rules, in the rows and heads of the scope; elsewhere it is right."""

    rules: tuple[Rule, ...]
    scope: Scope = EVERYTHING

    @property
    def complexity(self) -> int:
        """Return a number by which simpler descriptions come first."""
        scope = self.scope
        parts = (scope.kernels, scope.heads, scope.seqs)
        return 2 * sum(rule.complexity for rule in self.rules) + sum(p is not None for p in parts)

    def weights(self, setup: AttentionSetup) -> torch.Tensor:
        """Return the weights that the description predicts for a setup, [R, H, N] float64."""
        plan = right_plan(setup)
        if not self.rules:
            return plan.weights()
        changed = self.plan(plan)
        if self.scope == EVERYTHING:
            return changed.weights()
        rows, heads = self.scope.rows_of(setup), self.scope.heads_of(setup)
        inside = rows[:, None, None] & heads[None, :, None]
        return torch.where(inside, changed.weights(), plan.weights())

    def plan(self, plan: Plan) -> Plan:
        """Return a plan with the rules applied."""
        for rule in self.rules:
            plan = rule.apply(plan)
        return plan

    @property
    def text(self) -> str:
        """Return the description as one sentence without a full stop."""
        words = "; ".join(rule.text for rule in self.rules) or "the weights are right"
        return f"{self.scope.text}: {words}" if self.scope != EVERYTHING else words

    def to_dict(self) -> dict[str, Any]:
        """Return the description as values of JSON."""
        return {
            "text": self.text,
            "rules": [{"rule": type(rule).__name__, "text": rule.text} for rule in self.rules],
            "kernels": None if self.scope.kernels is None else list(self.scope.kernels),
            "heads": None if self.scope.heads is None else list(self.scope.heads),
            "seqs": None if self.scope.seqs is None else list(self.scope.seqs),
        }


def numbers(found: Sequence[int], most: int = 6) -> str:
    """Return ascending numbers as text, runs as "3–7"."""
    runs: list[list[int]] = []
    for number in found:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{a}" if a == b else f"{a}–{b}" for a, b in runs[:most]]
    return ", ".join(words) + (", …" if len(runs) > most else "")


def _plural(noun: str, found: Sequence[int]) -> str:
    return noun if len(found) == 1 else f"{noun}s"
