"""Rule: one way in which a kernel differs from a right one, as a change of a Plan; edges and constants."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Any

import torch

from attnlab.case.shown import json_fields
from attnlab.weights.plan import Plan, right_plan
from attnlab.weights.setup import AttentionSetup, one_number

PARTS = {"cache": "keys from the cache", "new": "new keys", "all": "keys"}


class Rule(ABC):
    """A change of a Plan that depends on the setup only, so that it predicts other calls, too."""

    @property
    def complexity(self) -> int:
        """Return a number: of two rules that fit, the one with the lower number is stated.

        A rule about a part of the keys has one more, and so has one with a fitted number.
        """
        is_fitted = not getattr(self, "factor", _NAMED).name
        return 1 + (getattr(self, "part", "all") != "all") + is_fitted

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """Return the plan under this rule."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Return the rule as a clause."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A position of each row's sequence, [R].

    - ``feature``: "start", "context" (the end of the context), "cache end" (the end of what the row sees in
      the cache), "row" (after its own position), "sequence" (its end), "window" (the window's first key).
    - ``down``, ``up``: round to a multiple. ``shift``: add this. ``within``: but not beyond the tile of so
      many keys that the feature's last key is in. 0 means none of these. ``inside``: at most the sequence's
      end.
    """

    feature: str
    shift: int = 0
    down: int = 0
    up: int = 0
    within: int = 0
    inside: bool = False

    def at(self, setup: AttentionSetup, part: str) -> torch.Tensor:
        """Return the positions, [R] int64; new keys are counted from the end of the context."""
        origin = setup.ctx_len if part == "new" else torch.zeros_like(setup.ctx_len)
        base = _FEATURES[self.feature](setup) - origin
        found = base
        if self.down:
            found = base // self.down * self.down
        if self.up:
            found = -(-base // self.up) * self.up
        found = found + self.shift
        if self.within and self.shift > 0:
            found = torch.minimum(found, -(-base // self.within) * self.within)
        if self.within and self.shift < 0:
            found = torch.maximum(found, base // self.within * self.within)
        found = found + origin
        return torch.minimum(found, setup.seq_len) if self.inside else found

    @property
    def text(self) -> str:
        """Return the edge in words."""
        words = _WORDS[self.feature]
        if self.feature == "start":
            return f"position {self.shift}"
        if self.up and self.shift == -self.up:
            return f"the start of the tile of {self.up} keys with {words}"
        if self.down:
            words = f"the last multiple of {self.down} before {words}"
        if self.up:
            words = f"the next multiple of {self.up} after {words}"
        if self.shift:
            words += f" {'+' if self.shift > 0 else '-'} {abs(self.shift)}"
        return words + (" (inside its tile)" if self.within else "")


def _window(setup: AttentionSetup) -> torch.Tensor:
    window = setup.call.sliding_window
    return setup.position - window + 1 if window else torch.zeros_like(setup.position)


_FEATURES: dict[str, Callable[[AttentionSetup], torch.Tensor]] = {
    "start": lambda setup: torch.zeros_like(setup.position),
    "context": lambda setup: setup.ctx_len,
    "cache end": lambda setup: torch.minimum(setup.cached, setup.position + 1),
    "row": lambda setup: setup.position + 1,
    "sequence": lambda setup: setup.seq_len,
    "window": _window,
}
_WORDS = {
    "start": "the first key",
    "context": "the end of the context",
    "cache end": "the last cached key that the row sees",
    "row": "the row's own position",
    "sequence": "the end of the sequence",
    "window": "the start of the window",
}


@dataclass(frozen=True, slots=True)
class Constant:
    """A factor: an expression of the call's scales, or a number if ``name`` is empty."""

    name: str = ""
    number: float = 1.0

    def of(self, setup: AttentionSetup) -> float:
        """Return the value for a call."""
        return CONSTANTS[self.name](setup) if self.name else self.number

    @property
    def text(self) -> str:
        """Return the expression, or the number."""
        return self.name or f"{self.number:.4g}"


def _sizes(setup: AttentionSetup) -> tuple[float, float]:
    """Return head_size and num_heads."""
    return float(setup.call.query.shape[2]), float(setup.call.query.shape[1])


def _k(setup: AttentionSetup) -> float:
    return one_number(setup.call.k_scale)


def _v(setup: AttentionSetup) -> float:
    return one_number(setup.call.v_scale)


_NAMED = Constant("2")
CONSTANTS: dict[str, Callable[[AttentionSetup], float]] = {
    "log2(e)": lambda setup: math.log2(math.e),
    "ln(2)": lambda setup: math.log(2),
    "2": lambda setup: 2.0,
    "1/2": lambda setup: 0.5,
    "0": lambda setup: 0.0,
    "-1": lambda setup: -1.0,
    "k_scale": _k,
    "1/k_scale": lambda setup: 1 / _k(setup),
    "v_scale": _v,
    "1/v_scale": lambda setup: 1 / _v(setup),
    "v_scale/k_scale": lambda setup: _v(setup) / _k(setup),
    "k_scale/v_scale": lambda setup: _k(setup) / _v(setup),
    "sm_scale": lambda setup: setup.sm_scale,  # first, because its default is 1/sqrt(head_size)
    "1/sm_scale": lambda setup: 1 / setup.sm_scale,
    "sqrt(head_size)": lambda setup: _sizes(setup)[0] ** 0.5,
    "1/sqrt(head_size)": lambda setup: _sizes(setup)[0] ** -0.5,
    "sqrt(head_size/num_heads)": lambda setup: truediv(*_sizes(setup)) ** 0.5,
    "1/(sm_scale*sqrt(head_size))": lambda setup: 1 / (setup.sm_scale * _sizes(setup)[0] ** 0.5),
}


def constants_near(value: float, setup: AttentionSetup, tolerance: float) -> list[Constant]:
    """Return the expressions whose value is within a relative tolerance of ``value``, then the number."""
    named = [
        Constant(name)
        for name, compute in CONSTANTS.items()
        if abs(compute(setup) - value) <= tolerance * max(abs(value), 1e-3)
    ]
    return [*named, Constant("", value)]


# Description: rules and the rows and heads that they concern; predicts weights and outputs.


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
        rules = [{"rule": type(rule).__name__, "text": rule.text} for rule in self.rules]
        return {"text": self.text, "rules": rules, **json_fields(self.scope)}


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
