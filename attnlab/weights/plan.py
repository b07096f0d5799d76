"""Plan: how a kernel attends, as data; the weights that follow from it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.tensors.case_visibility import mask_of
from attnlab.tensors.visibility import SequenceMask
from attnlab.weights.setup import AttentionSetup

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


# Partition: how a kernel divides the keys of a row into steps: tiles, blocks, splits or segments.

LAST, LAST_SEEN = (
    -1,
    -2,
)  # the last step of the sequence, and the last one in which the row sees a key


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


# Rescale: partial sums of a softmax that are rescaled wrongly when the maximum rises or parts are merged.


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
