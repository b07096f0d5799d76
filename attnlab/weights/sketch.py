"""Sketch: find which slots of a large cache have a weight, with few runs of random signed codes.

A lane measures the sum of its slots. Where it deviates, slots outside the row's sequence have a weight. Each
slot then gets ±1 in every element of every run; 1 and -1 are exact in float16, bfloat16 and FP8. With M
numbers per row, the weights of up to M / 2 such slots follow from them: those that correlate with what the
lanes do not explain.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.tensors.call import KernelCall
from attnlab.weights.codes import num_slots
from attnlab.weights.lanes import Lanes
from attnlab.weights.setup import AttentionSetup, places

NUMBERS = 1024  # M, about
_ROUNDS = 24  # of slots that are added
_AT_ONCE = 32  # slots that a round adds at most
_LEAST_EXPLAINED = 16  # rows and heads in which a round looks for slots
_ERRORS = 10.0
_SMALL = (
    0.25  # an error of a weight, in units of its relative precision, that leaves nothing to explain
)
_CHANCE = 5.0  # a correlation of so many standard deviations is none of chance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketch:
    """Runs with signed codes.

    - ``codes``: [N, M] float32, the stored codes times the scale of the values.
    - ``outputs``: [R, H, M] float32, what the runs gave.
    """

    codes: torch.Tensor
    outputs: torch.Tensor


def sketch_runs(call: KernelCall) -> int:
    """Return the number of runs with signed codes."""
    return -(-NUMBERS // call.query.shape[2])


def signed_codes(call: KernelCall, run: int) -> torch.Tensor:
    """Return ±1 for every slot and element, the same for all KV heads, [N, num_kv_heads, head_size] int8."""
    generator = torch.Generator().manual_seed(100 + run)
    slots, head_size = num_slots(call), call.query.shape[2]
    signs = torch.randint(0, 2, (slots, 1, head_size), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).expand(-1, call.key.shape[1], -1).contiguous()


def solve_near(
    setup: AttentionSetup,
    outputs: torch.Tensor,
    codes_of: Callable[[torch.Tensor], torch.Tensor],
    folded: torch.Tensor,
    lanes: Lanes,
    own: torch.Tensor,
    near: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """Return weights [R, H, N] as :func:`solve` does, from few slots if these explain the outputs.

    - ``outputs``: [R, H, M], what the runs gave. ``codes_of``: returns the codes of some slots, [n, M].
    - ``near``: the slots to try first, [n] ascending, with all of ``own``; then all slots are tried.
    """
    every = torch.arange(len(lanes.of))
    for kept in (near, every):
        part = dataclasses.replace(lanes, of=lanes.of[kept])
        sketch = Sketch(codes=codes_of(kept), outputs=outputs)
        weights, error = solve(sketch, folded, part, places(kept, own), setup.seq)
        if error <= _SMALL * float(setup.relative.max()):
            break
    found = weights.new_zeros(*weights.shape[:2], len(every))
    found[..., kept] = weights
    found[weights.isnan().flatten(1).all(1)] = torch.nan
    return found, error


def solve(
    sketch: Sketch, folded: torch.Tensor, lanes: Lanes, own: torch.Tensor, seq: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return weights [R, H, N] that explain lanes and sketch, and the largest error of a weight.

    - ``folded``: [R, H, lanes], the measured sums. ``own``: [R, lanes], the slot of each lane that the row's
      sequence has, -1 for none. ``seq``: [R].

    The error is ten standard deviations of what the weights leave unexplained: it holds for the largest of
    many weights, whose errors are not independent. Rows that are not finite stay NaN.
    """
    weights = folded.new_full((*folded.shape[:2], len(lanes.of)), torch.nan)
    folded = folded.float()
    error = 0.0
    readable = (folded.isfinite().all(-1) & sketch.outputs.isfinite().all(-1)).all(-1)
    for one in seq[readable].unique().tolist():
        rows = torch.nonzero((seq == one) & readable).flatten()
        part, deviation = _solve(
            sketch.codes,
            sketch.outputs[rows].flatten(0, 1),
            folded[rows].flatten(0, 1),
            lanes,
            own[rows[0]],
        )
        weights[rows] = part.view(len(rows), -1, part.shape[1]).double()
        error = max(error, _ERRORS * deviation)
    return weights, error


def _solve(
    codes: torch.Tensor,
    outputs: torch.Tensor,
    folded: torch.Tensor,
    lanes: Lanes,
    own: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """Return the weights [n, N] of n rows and heads of a sequence, and the standard deviation of one."""
    with_dummy = torch.cat([codes, codes.new_zeros(1, codes.shape[1])])
    # a weight of another slot is missing in the lane's own slot
    moved = codes - with_dummy[own][lanes.of]
    target = outputs - folded @ with_dummy[own]
    is_own = torch.zeros(len(codes) + 1, dtype=torch.bool).index_fill(0, own, True)[:-1]
    size, used = moved.square().sum(1).sqrt().clamp(min=1e-12), torch.zeros_like(is_own)
    foreign, rest = _fit(moved, target, used)
    for _ in range(_ROUNDS):
        spread = rest.square().mean(1).sqrt().clamp(min=1e-12)
        least = spread.topk(min(_LEAST_EXPLAINED, len(rest))).indices
        scores = ((rest / spread[:, None])[least] @ moved.T / size).abs().amax(0)
        new = (scores > _CHANCE) & ~used & ~is_own
        # slots of one lane correlate with each other: the best come first
        best = scores.masked_fill(~new, 0.0).topk(min(_AT_ONCE, int(new.sum())))
        if not len(best.indices) or int(used.sum()) + len(best.indices) > codes.shape[1] // 2:
            break
        used[best.indices[best.values >= best.values[0] / 2]] = True
        foreign, rest = _fit(moved, target, used)
    # what was added by chance has the weight 0 up to the error
    error = float(rest.square().mean(1).sqrt().max() / size.median())
    foreign, rest = _fit(moved, target, used & (foreign.abs().amax(0) > _CHANCE * error))
    weights = torch.cat([foreign, foreign.new_zeros(len(foreign), 1)], 1)
    lane_own = folded.new_zeros(folded.shape).index_add(1, lanes.of, foreign)
    weights[:, own] += folded - lane_own
    deviation = float(rest.square().mean(1).sqrt().max() / size.median())
    return weights[:, :-1], deviation


def _fit(
    codes: torch.Tensor, target: torch.Tensor, used: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [n, N] of the used slots that fit the target [n, M] best, and what is left."""
    slots = torch.nonzero(used).flatten()
    weights = target.new_zeros(len(target), len(codes))
    if not len(slots):
        return weights, target
    solution = torch.linalg.lstsq(codes[slots].T, target.T).solution.T
    return weights.index_copy(1, slots, solution), target - solution @ codes[slots]
