"""Plan: how a kernel attends, as data; the weights that follow from it."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Any, ClassVar

import torch

from attnlab.case.shown import json_fields
from attnlab.tensors.case_call import mask_of
from attnlab.tensors.visibility import SequenceMask
from attnlab.weights.setup import AttentionSetup, one_number

# The mask of a call, for the entries of an AttentionSetup.


def visible_entries(setup: AttentionSetup) -> torch.Tensor:
    """Return which entries each row sees by their positions, [R, E] bool."""
    at, position = setup.entry_position, setup.position[:, None]
    if setup.call.visibility.is_plain:
        window = setup.call.sliding_window
        return (at <= position) & (at > position - window) if window else at <= position
    seen = _by_sequence(setup, lambda mask, rows: mask.visible(rows).double())
    return seen > 0


def biased_entries(setup: AttentionSetup) -> torch.Tensor | None:
    """Return what the mask adds to the score of each entry, [R, E] float64, or None for nothing."""
    if setup.call.qq_bias is None:
        return None
    return _by_sequence(setup, lambda mask, rows: mask.bias(rows))


def _by_sequence(
    setup: AttentionSetup,
    values_of: Callable[[SequenceMask, torch.Tensor], torch.Tensor | None],
) -> torch.Tensor:
    """Return values of rows and positions for the entries, 0 for entries outside the sequence.

    ``values_of`` returns [rows, seq_len] for the positions of some rows of one sequence.
    """
    at, seqs, position = (one.cpu() for one in (setup.entry_position, setup.seq, setup.position))
    found = torch.zeros(at.shape, dtype=torch.float64)
    for seq in seqs.unique().tolist():
        rows, mask = seqs == seq, mask_of(setup.call, seq)
        values, keys = values_of(mask, position[rows]), at[rows]
        assert values is not None
        inside = (keys >= 0) & (keys < mask.seq_len)
        found[rows] = values.double().gather(1, keys.clamp(0, mask.seq_len - 1)) * inside
    return found.to(setup.device)


# The last step of the sequence, and the last one in which the row sees a key.
LAST, LAST_SEEN = -1, -2


@dataclass(frozen=True, slots=True)
class Partition:
    """Steps of the keys of each row.

    - ``tile``: keys per step. ``parts``: if not 0, each sequence has at most so many steps, of equally many
      tiles. ``loop``: the steps concerned, "all", "context" or "new". ``only``: one of them, counted from 0,
      LAST, LAST_SEEN, or None for all.
    """

    tile: int
    parts: int = 0
    loop: str = "all"
    only: int | None = None

    def steps(self, setup: AttentionSetup) -> torch.Tensor:
        """Return the step of each entry, [R, E] int64; those of new keys follow those of the cache."""
        is_new = setup.is_new
        old = int((~is_new).sum())
        index = torch.arange(len(is_new)).expand_as(setup.entry_position)
        if self.parts:
            size = -(-setup.seq_len // (self.parts * self.tile)) * self.tile
            return torch.minimum(index // size[:, None].clamp(min=1), index[:, -1:])
        return torch.where(
            is_new, self.first_new(old) + (index - old) // self.tile, index // self.tile
        )

    def first_new(self, old: int) -> int:
        """Return the first step of new keys after ``old`` entries of the cache."""
        return -(-old // self.tile)

    def concerned(self, setup: AttentionSetup, has_keys: torch.Tensor) -> torch.Tensor:
        """Return which steps are concerned, in the shape of ``has_keys`` [..., steps] bool."""
        numbers = torch.arange(has_keys.shape[-1])
        before = self.first_new(int((~setup.is_new).sum())) if not self.parts else len(numbers)
        inside = torch.ones_like(numbers, dtype=torch.bool)
        if self.loop != "all":
            inside = numbers >= before if self.loop == "new" else numbers < before
        inside = inside.expand(has_keys.shape)
        if self.only is None:
            return inside
        if self.only == LAST:
            length = setup.cached if self.loop == "context" else setup.seq_len
            at = (setup.entry_position < length[:, None]) & (setup.entry_slot >= 0)
            if self.loop == "context":
                at &= ~setup.is_new
            last = torch.where(at, self.steps(setup), -1).amax(-1, keepdim=True)
            return inside & (numbers == last[:, None] if has_keys.ndim == 3 else numbers == last)
        if self.only == LAST_SEEN:
            last = torch.where(inside & has_keys, numbers, -1).amax(-1, keepdim=True)
            return numbers == last
        return inside & (numbers == self.only + (before if self.loop == "new" else 0))

    @property
    def keys(self) -> str:
        """Return the size of the steps in words."""
        if self.parts:
            of = f" of tiles of {self.tile}" if self.tile > 1 else ""
            return f"up to {self.parts} parts{of}"
        return f"tiles of {self.tile} keys"

    @property
    def which(self) -> str:
        """Return the steps that are concerned in words, such as "tile 1 (tiles of 32 keys)"."""
        noun = "part" if self.parts else "tile"
        where = {"all": "", "context": " of the cached keys", "new": " of the new keys"}[self.loop]
        one = {LAST: f"the last {noun}", LAST_SEEN: f"the last {noun} that the row sees"}.get(
            self.only or 0, f"{noun} {self.only}"
        )
        return f"{one}{where} ({self.keys})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """Partial sums are rescaled by exp(power × rise of the running maximum); 1 is right, 0 is not at all.

    - ``of``: what is rescaled so: "values", "sum", or "both".
    - ``steps``: the keys of each step, and the steps that are affected.
    - ``split``: steps have maxima of their own and are merged; else they run on.
    - ``inner``: the exponential of score minus running maximum has this power.
    """

    of: str
    steps: Partition
    power: float
    split: bool = False
    inner: float = 1.0

    def log_factor(self, setup: AttentionSetup, logits: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the factor that each entry lacks, [R, H, E]; logits are -inf if hidden."""
        steps = self.steps.steps(setup)
        at = steps[:, None].expand(logits.shape)
        tops = logits.new_full((*logits.shape[:2], int(steps.max()) + 1), -torch.inf)
        tops.scatter_reduce_(2, at, logits, "amax")
        concerned = self.steps.concerned(setup, tops > -torch.inf)
        if self.split:
            rest = tops.amax(-1, keepdim=True) - tops
            lacks = torch.where(concerned, (1 - self.power) * rest, 0.0)
            return lacks.nan_to_num(0.0, 0.0, 0.0).gather(2, at)
        running = tops.cummax(-1).values
        rises = running.diff(dim=-1, prepend=running[..., :1]).nan_to_num(0.0, 0.0, 0.0)
        rises = torch.where(concerned, rises, 0.0)
        after = rises.flip(-1).cumsum(-1).flip(-1) - rises
        found = (1 - self.power) * after.gather(2, at)
        if self.inner == 1.0:
            return found
        depth = (logits - running.gather(2, at)).nan_to_num(0.0, 0.0, 0.0)
        return found + torch.where(concerned.gather(2, at), (self.inner - 1) * depth, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What a kernel reads and computes for the rows of a setup; rules change it.

    - ``key_slot``, ``value_slot``: [R, E] int64, -1 for none.
    - ``visible``, ``counted``: [R, E] float64, how often a key counts in the numerator and in the
      denominator.
    - ``query_head``: [H] indices into the setup's heads, ``kv_head``: [H], whose key is used.
    - ``factor``: of the scaled scores, for keys from the cache and for new tokens.
    - ``power``: of the exponential at the end, 1 is exp.
    - ``softcap``, ``cap_place``: "score", "after bias" or "before scale".
    - ``slopes``: [H] or None; ``alibi_from``: "query" or "first new token".
    - ``zero_keys``: [R], keys of score 0 and value 0 in the denominator. ``sinks``: [H] or None.
    - ``gain``: of the values, from the cache and from new tokens.
    - ``head_factor``, ``head_gain``: [H], of the scores and of the output of each head; or None.
    - ``entry_factor``: [H, E], of the scores; or None. ``value_gain``: [H, N], of the value of each slot; or
      None.
    - ``fixed_logit``: [R, E], logits that do not depend on the key, NaN for those that do; or None.
    """

    setup: AttentionSetup
    key_slot: torch.Tensor
    value_slot: torch.Tensor
    visible: torch.Tensor
    counted: torch.Tensor
    query_head: torch.Tensor
    kv_head: torch.Tensor
    factor: tuple[float, float] = (1.0, 1.0)
    power: float = 1.0
    softcap: float | None
    cap_place: str = "score"
    slopes: torch.Tensor | None
    alibi_from: str = "query"
    sinks: torch.Tensor | None
    rescale: tuple[Rescale, ...] = ()
    zero_keys: torch.Tensor
    gain: tuple[float, float] = (1.0, 1.0)
    fixed_logit: torch.Tensor | None = None
    head_factor: torch.Tensor | None = None
    head_gain: torch.Tensor | None = None
    entry_factor: torch.Tensor | None = None
    value_gain: torch.Tensor | None = None

    def weights(self) -> torch.Tensor:
        """Return the weight of each slot, [R, H, N] float64; 0 for a row that sees no key."""
        entries = self.entry_weights()
        slots = self.value_slot[:, None].expand_as(entries)
        found = entries.new_zeros(*entries.shape[:2], self.setup.num_slots + 1)
        found.scatter_add_(2, torch.where(slots < 0, self.setup.num_slots, slots), entries)
        found = found[..., :-1]
        return found if self.value_gain is None else (found * self.value_gain).nan_to_num(0.0)

    def entry_weights(self) -> torch.Tensor:
        """Return the weight of each entry, [R, H, E] float64."""
        logits = self.logits()
        used = ((self.visible > 0) | (self.counted > 0))[:, None]
        masked = logits.masked_fill(~used, -torch.inf)
        largest = masked.amax(-1, keepdim=True).clamp(min=-1e30)
        if self.sinks is not None:
            largest = torch.maximum(largest, self.sinks[:, None])
        exps = (masked - largest).exp()
        values, sums = exps, exps
        for one in self.rescale:
            rise = one.log_factor(self.setup, masked).exp()
            values = values * rise if one.of != "sum" else values
            sums = sums * rise if one.of != "values" else sums
        total = (sums * self.counted[:, None]).sum(-1, keepdim=True)
        total = total + self.zero_keys[:, None, None] * (-largest).exp()
        if self.sinks is not None:
            total = total + (self.sinks[:, None] - largest).exp()
        found = values * self.visible[:, None] / total
        found = found * torch.where(self.setup.is_new, self.gain[1], self.gain[0])
        if self.head_gain is not None:
            found = found * self.head_gain[:, None]
        return found.nan_to_num(0.0, 0.0, 0.0)

    def scores(self) -> torch.Tensor:
        """Return the scaled scores of each entry, before soft cap and bias, [R, H, E]."""
        setup = self.setup
        default = torch.arange(len(setup.heads), device=setup.device)
        if torch.equal(self.query_head, default) and torch.equal(self.kv_head, setup.kv_head):
            products = setup.products
        else:
            products = setup.products_of(self.query_head, self.kv_head)
        slots = self.key_slot.clamp(min=0)[:, None].expand(-1, products.shape[1], -1)
        scores = products.gather(2, slots) * setup.sm_scale
        scores = scores * torch.where(setup.is_new, self.factor[1], self.factor[0])
        if self.entry_factor is not None:
            scores = scores * self.entry_factor
        return scores if self.head_factor is None else scores * self.head_factor[:, None]

    def logits(self) -> torch.Tensor:
        """Return what the exponential is taken of, [R, H, E], hidden keys included."""
        scores, cap = self.scores(), self.softcap
        if cap is not None and self.cap_place == "score":
            scores = cap * (scores / cap).tanh()
        elif cap is not None and self.cap_place == "before scale":
            scale = self.setup.sm_scale
            scores = cap * (scores / scale / cap).tanh() * scale
        if self.slopes is not None:
            scores = scores + self.slopes[:, None] * self.distance()[:, None]
        added = biased_entries(self.setup)
        if added is not None:
            scores = scores + added[:, None]
        if cap is not None and self.cap_place == "after bias":
            scores = cap * (scores / cap).tanh()
        logits = scores * self.power
        if self.fixed_logit is not None:
            fixed = self.fixed_logit[:, None]
            logits = torch.where(fixed.isnan(), logits, fixed)
        return logits

    def distance(self) -> torch.Tensor:
        """Return what ALiBi multiplies, [R, E] float64."""
        setup = self.setup
        origin = setup.position if self.alibi_from == "query" else setup.ctx_len
        return (setup.entry_position - origin[:, None]).double()

    def change(self, **changes: object) -> "Plan":
        """Return the plan with changed fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


_LEAST = 200.0  # a weight is used if it is so many times the absolute precision


def usable(plan: Plan, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the measured weight of each entry [R, H, E], and whether it is large enough for a fit."""
    setup = plan.setup
    slots = plan.value_slot.clamp(min=0)[:, None].expand(-1, weights.shape[1], -1)
    measured = weights.gather(2, slots)
    floor = setup.fixed[:, None, None] * _LEAST
    seen = (plan.visible == 1) & (plan.value_slot >= 0)
    return measured, seen[:, None] & (measured > floor)


def right_plan(setup: AttentionSetup) -> Plan:
    """Return the plan of a correct kernel."""
    visible = right_keys(setup).double()
    return Plan(
        setup=setup,
        key_slot=setup.entry_slot,
        value_slot=setup.entry_slot,
        visible=visible,
        counted=visible,
        query_head=torch.arange(len(setup.heads), device=setup.device),
        kv_head=setup.kv_head,
        softcap=setup.softcap,
        slopes=setup.slopes,
        sinks=setup.sinks,
        zero_keys=torch.zeros(len(setup.rows), dtype=torch.float64, device=setup.device),
    )


def right_keys(setup: AttentionSetup) -> torch.Tensor:
    """Return which entries each row must see, [R, E] bool."""
    return read_entries(setup) & visible_entries(setup)


def read_entries(setup: AttentionSetup) -> torch.Tensor:
    """Return which entries are read where a correct kernel reads them, hidden ones included, [R, E] bool."""
    cached = setup.entry_position < setup.cached[:, None]
    return torch.where(setup.is_new, ~cached, cached) & (setup.entry_slot >= 0)


PARTS = {"cache": "keys from the cache", "new": "new keys", "all": "keys"}


class Rule(ABC):
    """A change of a Plan that depends on the setup only, so that it predicts other calls, too."""

    words: ClassVar[str]  # the rule as a clause, with its fields as of {0}

    @property
    def complexity(self) -> int:
        """Return a number: of two rules that fit, the one with the lower number is stated.

        A rule about a part of the keys has one more, and so has one with a fitted number.
        """
        return 1 + (getattr(self, "part", "all") != "all") + self.is_fitted

    @property
    def is_fitted(self) -> bool:
        """Answer whether the rule has a fitted number."""
        return not getattr(self, "factor", _NAMED).name

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """Return the plan under this rule."""

    @property
    def text(self) -> str:
        """Return the rule as a clause."""
        return self.words.format(self)


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

    @property
    def is_fitted(self) -> bool:
        """Answer whether a rule has a fitted number."""
        return any(rule.is_fitted for rule in self.rules)

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
