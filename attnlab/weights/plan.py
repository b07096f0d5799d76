"""Plan: how a kernel attends, as data; the weights that follow from it."""

import dataclasses
from dataclasses import dataclass

import torch

from attnlab.weights.mask_entries import biased_entries, visible_entries
from attnlab.weights.setup import AttentionSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """Partial sums are rescaled by exp(power × rise of the running maximum); 1 is right, 0 is not at all.

    - ``of``: what is rescaled so: "values", "sum", or "both".
    - ``tile``: keys per step. ``loop``: the steps that are affected, "all", "context" or "new".
    - ``split``: parts of ``tile`` keys have maxima of their own and are merged; else they run on.
    - ``inner``: the exponential of score minus running maximum has this power.
    """

    of: str
    tile: int
    power: float
    loop: str = "all"
    split: bool = False
    inner: float = 1.0


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

    def weights(self) -> torch.Tensor:
        """Return the weight of each slot, [R, H, N] float64; 0 for a row that sees no key."""
        entries = self.entry_weights()
        slots = self.value_slot[:, None].expand_as(entries)
        found = entries.new_zeros(*entries.shape[:2], self.setup.num_slots + 1)
        found.scatter_add_(2, torch.where(slots < 0, self.setup.num_slots, slots), entries)
        return found[..., :-1]

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
            rise = self._rise(masked, one).exp()
            values = values * rise if one.of != "sum" else values
            sums = sums * rise if one.of != "values" else sums
        total = (sums * self.counted[:, None]).sum(-1, keepdim=True)
        total = total + self.zero_keys[:, None, None] * (-largest).exp()
        if self.sinks is not None:
            total = total + (self.sinks[:, None] - largest).exp()
        found = values * self.visible[:, None] / total
        found = found * torch.where(self.setup.is_new, self.gain[1], self.gain[0])
        return found.nan_to_num(0.0, 0.0, 0.0)

    def scores(self) -> torch.Tensor:
        """Return the scaled scores of each entry, before soft cap and bias, [R, H, E]."""
        setup = self.setup
        default = torch.arange(len(setup.heads))
        if torch.equal(self.query_head, default) and torch.equal(self.kv_head, setup.kv_head):
            products = setup.products
        else:
            products = setup.products_of(self.query_head, self.kv_head)
        slots = self.key_slot.clamp(min=0)[:, None].expand(-1, products.shape[1], -1)
        scores = products.gather(2, slots) * setup.sm_scale
        return scores * torch.where(setup.is_new, self.factor[1], self.factor[0])

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

    def _rise(self, logits: torch.Tensor, one: Rescale) -> torch.Tensor:
        """Return the logarithm of the factor that each entry lacks, [R, H, E]."""
        steps, in_loop = self._steps(one)
        count = int(steps.max()) + 1
        tops = logits.new_full((*logits.shape[:2], count), -torch.inf)
        tops.scatter_reduce_(2, steps.expand(logits.shape), logits, "amax")
        if one.split:
            rest = tops.amax(-1, keepdim=True) - tops
            return ((1 - one.power) * rest).nan_to_num(0.0, 0.0, 0.0)[..., steps]
        running = tops.cummax(-1).values
        rises = running.diff(dim=-1, prepend=running[..., :1]).nan_to_num(0.0, 0.0, 0.0)
        rises = torch.where(in_loop, rises, 0.0)
        after = rises.flip(-1).cumsum(-1).flip(-1) - rises
        found = (1 - one.power) * after[..., steps]
        if one.inner == 1.0:
            return found
        depth = (logits - running[..., steps]).nan_to_num(0.0, 0.0, 0.0)
        return found + torch.where(in_loop[steps], (one.inner - 1) * depth, 0.0)

    def _steps(self, one: Rescale) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step of each entry [E], and whether each step is affected [steps]."""
        is_new = self.setup.is_new
        old = int((~is_new).sum())
        before = -(-old // one.tile)
        index = torch.arange(len(is_new))
        steps = torch.where(is_new, before + (index - old) // one.tile, index // one.tile)
        numbers = torch.arange(int(steps.max()) + 1)
        if one.loop == "all":
            return steps, torch.ones_like(numbers, dtype=torch.bool)
        return steps, numbers >= before if one.loop == "new" else numbers < before

    def change(self, **changes: object) -> "Plan":
        """Return the plan with changed fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def right_plan(setup: AttentionSetup) -> Plan:
    """Return the plan of a correct kernel."""
    visible = right_keys(setup).double()
    return Plan(
        setup=setup,
        key_slot=setup.entry_slot,
        value_slot=setup.entry_slot,
        visible=visible,
        counted=visible,
        query_head=torch.arange(len(setup.heads)),
        kv_head=setup.kv_head,
        softcap=setup.softcap,
        slopes=setup.slopes,
        sinks=setup.sinks,
        zero_keys=torch.zeros(len(setup.rows), dtype=torch.float64),
    )


def right_keys(setup: AttentionSetup) -> torch.Tensor:
    """Return which entries each row must see, [R, E] bool."""
    at = setup.entry_position
    source = torch.where(setup.is_new, at >= setup.cached[:, None], at < setup.cached[:, None])
    return source & (setup.entry_slot >= 0) & visible_entries(setup)
