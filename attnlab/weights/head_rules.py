"""Rules with a constant for each head."""

from dataclasses import dataclass

import torch

from attnlab.weights.plan import Plan
from attnlab.weights.rule import Constant, Rule

Factors = tuple[tuple[int, Constant], ...]


@dataclass(frozen=True, slots=True)
class HeadScore(Rule):
    """The scores of query heads have factors of their own; heads that are not listed have 1."""

    factors: Factors

    complexity = 3

    def apply(self, plan: Plan) -> Plan:
        found = _by_head(self.factors, plan)
        return plan.change(
            head_factor=found if plan.head_factor is None else plan.head_factor * found
        )

    @property
    def text(self) -> str:
        return (
            f"the scores are multiplied by a further constant for each head: {_text(self.factors)}"
        )


@dataclass(frozen=True, slots=True)
class HeadGain(Rule):
    """The output of query heads has factors of its own; heads that are not listed have 1."""

    factors: Factors

    complexity = 3

    def apply(self, plan: Plan) -> Plan:
        found = _by_head(self.factors, plan)
        return plan.change(head_gain=found if plan.head_gain is None else plan.head_gain * found)

    @property
    def text(self) -> str:
        return (
            f"the output is multiplied by a further constant for each head: {_text(self.factors)}"
        )


def _by_head(factors: Factors, plan: Plan) -> torch.Tensor:
    """Return the factor of each head of a plan, [H] float64."""
    known = {head: constant.of(plan.setup) for head, constant in factors}
    return torch.tensor(
        [known.get(head, 1.0) for head in plan.setup.heads.tolist()], dtype=torch.float64
    )


def _text(factors: Factors) -> str:
    """Return the heads of each factor in words."""
    groups: dict[str, list[str]] = {}
    for head, constant in factors:
        groups.setdefault(constant.text, []).append(str(head))
    return "; ".join(
        f"{'head' if len(heads) == 1 else 'heads'} {', '.join(heads)} × {text}"
        for text, heads in groups.items()
    )
