"""Plan: how a kernel attends, as data; the weights that follow from it."""

import dataclasses
from dataclasses import dataclass

import torch

from attnlab.weights.mask_entries import biased_entries, visible_entries
from attnlab.weights.rescale import Rescale
from attnlab.weights.setup import AttentionSetup


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
    at = setup.entry_position
    source = torch.where(setup.is_new, at >= setup.cached[:, None], at < setup.cached[:, None])
    return source & (setup.entry_slot >= 0) & visible_entries(setup)
