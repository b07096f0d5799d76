"""Rules about one step of the keys: a tile, block or part that counts a constant number of times."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnlab.case.ops import DECODE_FWD, UNIFIED
from attnlab.weights.fit import usable
from attnlab.weights.partition import LAST, LAST_SEEN, Partition
from attnlab.weights.plan import Plan
from attnlab.weights.rule import Constant, Rule
from attnlab.weights.setup import AttentionSetup

_OF = {"both": "", "values": " in the weighted sum only", "sum": " in the denominator only"}
_WHICH = (0, 1, 2, 3, LAST, LAST_SEEN)
_SPREAD = 0.01  # of the logarithm of a factor, if it is a constant
_PARTS = {UNIFIED: 16, DECODE_FWD: 4}  # if a call does not state how many


@dataclass(frozen=True, slots=True)
class TileTimes(Rule):
    """The keys of one step count a constant number of times.

    ``of``: "values" (the weighted sum), "sum" (the denominator) or "both".
    """

    steps: Partition
    times: Constant
    of: str = "both"

    complexity = 3

    def mask(self, plan: Plan) -> torch.Tensor:
        """Return which entries the rule concerns, [R, E] bool."""
        return mask_of(self.steps, plan)

    def apply(self, plan: Plan) -> Plan:
        times = torch.where(self.mask(plan), self.times.of(plan.setup), 1.0)
        visible, counted = plan.visible, plan.counted
        return plan.change(
            visible=visible if self.of == "sum" else visible * times,
            counted=counted if self.of == "values" else counted * times,
        )

    @property
    def text(self) -> str:
        return f"the keys of {self.steps.which} count {self.times.text} times{_OF[self.of]}"


def mask_of(steps: Partition, plan: Plan) -> torch.Tensor:
    """Return which entries that count are in the steps concerned, [R, E] bool."""
    setup = plan.setup
    at, counts = steps.steps(setup), (plan.visible > 0) | (plan.counted > 0)
    has_keys = torch.zeros(len(at), int(at.max()) + 1)
    has_keys.scatter_add_(1, at, counts.float())
    return counts & steps.concerned(setup, has_keys > 0).gather(1, at)


def partitions(
    setup: AttentionSetup, tiles: tuple[int, ...], which: tuple[int | None, ...]
) -> Iterator[Partition]:
    """Yield the ways in which the kernels of a call may divide the keys."""
    cached = bool((setup.cached > 0).any())
    loops = (
        ("context", "new") if cached and bool((setup.cached < setup.seq_len).any()) else ("all",)
    )
    parts = _PARTS.get(setup.call.op, 0) if setup.call.num_splits is None else setup.call.num_splits
    longest = int(setup.seq_len.max())
    for only in which:
        for tile in tiles:
            for loop in loops:
                yield Partition(tile, loop=loop, only=only)
        for tile in ((1,) if setup.call.op == DECODE_FWD else tiles) if parts > 1 else ():
            if longest > parts * tile:  # else they are the tiles
                yield Partition(tile, parts=parts, only=only)


def fitted_tiles(plan: Plan, weights: torch.Tensor, tiles: tuple[int, ...]) -> Iterator[TileTimes]:
    """Yield one step with the constant that the measured weights [R, H, N] give it, if it is one."""
    measured, used = usable(plan, weights)
    ratio = torch.where(used, (measured / plan.entry_weights()).log(), torch.nan)
    total = weights.sum(-1)
    is_whole = bool(((total - plan.weights().sum(-1)).abs() < _SPREAD).all())
    known: dict[tuple[bool, ...], tuple[tuple[float, str], ...]] = {}
    for steps in partitions(plan.setup, tiles, _WHICH):
        mask = mask_of(steps, plan)
        key = tuple(mask.flatten().tolist())
        if key not in known:
            known[key] = tuple(_fits(plan, mask, ratio, is_whole=is_whole))
        yield from (TileTimes(steps, Constant("", times), of) for times, of in known[key])


def _fits(
    plan: Plan, mask: torch.Tensor, ratio: torch.Tensor, *, is_whole: bool
) -> Iterator[tuple[float, str]]:
    """Yield how often the keys of a mask [R, E] count, and in what, if that is one number.

    ``ratio``: the logarithm of measured over predicted weights [R, H, E]; ``is_whole``: the sums are right.
    """
    if not bool(mask.any()):
        return
    inside = torch.where(mask[:, None], ratio, torch.nan)
    outside = torch.where(mask[:, None], torch.nan, ratio)
    of_rest = outside.nanmedian(-1, keepdim=True).values
    times = _constant(inside - of_rest)
    if times is not None and _is_near(outside - of_rest):
        yield from ((times, of) for of in (("both",) if is_whole else ("both", "values")))
    elif (times := _of_sum(plan, mask, ratio)) is not None:
        yield times, "sum"


def _constant(logs: torch.Tensor) -> float | None:
    """Return the factor whose logarithm all numbers are; None if they differ or it is 1."""
    known = logs[logs.isfinite()]
    if not known.numel():
        return None
    middle = float(known.median())
    if abs(middle) < 4 * _SPREAD or float((known - middle).abs().max()) > _SPREAD:
        return None
    return float(known.mean().exp())


def _is_near(logs: torch.Tensor) -> bool:
    known = logs[logs.isfinite()]
    return not known.numel() or float(known.abs().max()) < _SPREAD


def _of_sum(plan: Plan, mask: torch.Tensor, ratio: torch.Tensor) -> float | None:
    """Return how often the step counts in the denominator, from what the weights of each row lack."""
    of_row = ratio.nanmedian(-1).values  # [R, H]
    share = (plan.entry_weights() * mask[:, None]).sum(-1)
    seen = (share > 0.05) & of_row.isfinite()
    if not bool(seen.any()):
        return None
    times = 1 + ((-of_row).exp() - 1)[seen] / share[seen]
    middle = float(times.median())
    is_one = float((times - middle).abs().max()) < _SPREAD * max(1.0, abs(middle))
    return middle if is_one and abs(middle - 1) > _SPREAD and middle > -0.01 else None
