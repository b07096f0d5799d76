"""describe: the pattern of an error, from its places to the change of the weights that fits it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.defects.edit import TILES, Rows
from attnlab.diagnosis.candidates import (
    CLEAR,
    Cells,
    ErrorLocations,
    Part,
    RowSample,
    cells_of,
    fits,
    is_over_determined,
    limit_of,
    num_cells,
    ratio_of,
    sample_output,
    wrong_parts,
)
from attnlab.diagnosis.pattern import (
    Fact,
    Pattern,
    Sizes,
    element_facts,
    move_facts,
    place_facts,
    region_text,
)
from attnlab.lab.problem import Problem, score_error, scores_of, softmax

# What the wrong numbers are: constants, multiples of the correct output, or the results of other cells.
#
# The tests run from the most to the least specific one, and each cell counts for the first that it passes.

_CLEAR = 4.0  # a cell is compared with others if its size exceeds this many rounding bounds
SMALL = 0.03  # of the size of the output, up to which errors are small
_SHARE = 0.1  # a rule must reproduce this share of the wrong cells that are left
_MOST_FACTORS = 4  # distinct factors that are listed one by one
_SHORT_FORMATS = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")


def value_facts(cells: Cells, dtype: torch.dtype) -> tuple[list[Fact], torch.Tensor]:
    """Return constants, factors and sums that reproduce wrong cells, and the precision of the numbers.

    The second value is the mask of the wrong cells that they do not reproduce, [n] bool.
    """
    left = cells.is_wrong.clone()
    facts: list[Fact] = []
    is_clear = bool((cells.ratio[left] > CLEAR).any())
    rules = (_factor, _added, _reordered) if is_clear else ()  # any rule fits errors near rounding
    for find in (_nonfinite, _constant, *rules):
        for fact, mask in find(cells, left):
            facts.append(fact)
            left &= ~mask
    return [*facts, *_rounded_to_shorter_format(cells, dtype)], left


def _nonfinite(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells with NaN or infinite elements."""
    found = []
    is_nan, is_inf = cells.output.isnan(), cells.output.isinf()
    for name, mask in (("NaN", is_nan), ("infinite", is_inf & ~is_nan.any(1, keepdim=True))):
        whole, part = mask.all(1) & left, mask.any(1) & ~mask.all(1) & left
        for cells_mask, what in (
            (whole, f"all elements are {name}"),
            (part, f"some elements are {name}"),
        ):
            if bool(cells_mask.any()):
                found.append(
                    _cell_fact(
                        "nonfinite",
                        cells,
                        cells_mask,
                        what,
                        accounts=what[0] == "a",
                    )
                )
    return found


def _constant(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells whose elements are all the same number."""
    output = cells.output
    same = left & output.isfinite().all(1) & (output == output[:, :1]).all(1)
    if output.shape[1] == 1:
        return []
    found = []
    for value in output[same, 0].unique().tolist()[:_MOST_FACTORS]:
        mask = same & (output[:, 0] == value)
        what = "all zeros" if value == 0 else f"every element is {value:.4g}"
        found.append(
            _cell_fact("zeros" if value == 0 else "constant", cells, mask, what, value=value)
        )
    return found


def _clear(cells: Cells, left: torch.Tensor) -> torch.Tensor:
    """Return which cells are finite and well above their rounding bound."""
    size = cells.correct.abs().amax(1)
    finite = cells.output.isfinite().all(1) & cells.bound.isfinite().all(1)
    return left & finite & (size > _CLEAR * cells.bound.amax(1))


def _factor(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells that are a multiple of the correct output."""
    if cells.output.shape[1] < 4:
        return []
    correct = cells.correct
    output = cells.output.nan_to_num(0.0, 0.0, 0.0)
    squares = correct.square().sum(1).clamp(min=1e-300)
    factor = (output * correct).sum(1) / squares
    bound = cells.bound * factor.abs().clamp(min=1.0)[:, None]
    fits = _clear(cells, left) & _equal(cells, factor[:, None] * correct, bound)
    fits &= factor.abs() * correct.abs().amax(1) > _CLEAR * cells.bound.amax(1)
    if not bool(fits.any()):
        return []
    spread = 3 * bound.norm(dim=1) / squares.sqrt() / correct.shape[1] ** 0.5 + 1e-9
    moves = fits & ((factor - 1).abs() > spread)
    if int(moves.sum()) < _SHARE * int(left.sum()):
        return []
    groups = _grouped(factor, spread, moves)
    if len(groups) <= _MOST_FACTORS:
        return [
            _cell_fact(
                "factor",
                cells,
                mask | (left & _equal(cells, value * correct, bound)),
                f"{_times(value)} the correct output",
                value=value,
            )
            for value, mask in groups
        ]
    low, high = float(factor[fits].min()), float(factor[fits].max())
    what = (
        f"multiples of the correct output, by factors from {low:.3g} to {high:.3g} that differ between "
        "rows or heads"
    )
    return [_cell_fact("factors", cells, fits, what, low=low, high=high)]


def _equal(cells: Cells, expected: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return which cells equal ``expected`` [n, head_size] within ``bound``, [n] bool, and not within what
    covers their error (:func:`attnlab.diagnosis.candidates.limit_of`)."""
    limit = limit_of(bound, cells.output, cells.correct, cells.bound)
    return ratio_of(cells.output - expected, limit) <= 1


def _grouped(
    values: torch.Tensor, spread: torch.Tensor, chosen: torch.Tensor
) -> list[tuple[float, torch.Tensor]]:
    """Group the chosen cells by value: a cell joins a group if it is within the cell's ``spread``."""
    groups: list[tuple[float, torch.Tensor]] = []
    left = chosen.clone()
    while bool(left.any()) and len(groups) <= _MOST_FACTORS:
        sharpest = int(torch.where(left, spread, torch.inf).argmin())
        mask = left & ((values - values[sharpest]).abs() <= spread + spread[sharpest])
        weight = spread[mask].clamp(min=1e-300).reciprocal().square()
        groups.append((float((values[mask] * weight).sum() / weight.sum()), mask))
        left &= ~mask
    return groups


def _times(value: float) -> str:
    """Return a factor in words; factors near simple numbers are named."""
    names = {0.5: "half of", 2.0: "twice", -1.0: "the negative of", 0.25: "a quarter of"}
    for number, name in names.items():
        if abs(value - number) < 2e-3 * abs(number):
            return name
    return f"{value:.4g} times"


def _added(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells in which one number was added to every element of the correct output."""
    if cells.output.shape[1] < 4:
        return []
    output = cells.output.nan_to_num(0.0, 0.0, 0.0)
    difference = output - cells.correct
    mean = difference.mean(1)
    # the kernel rounds the shifted number, so half a step of a short format is allowed in addition
    bound = cells.bound + output.abs() * 2.0**-10
    finite = cells.output.isfinite().all(1) & cells.bound.isfinite().all(1)
    equal = left & finite & _equal(cells, cells.correct + mean[:, None], bound)
    equal &= mean.abs() > 2 * bound.amax(1)
    # a head whose correct elements are nearly equal shows no pattern, and contradicts none
    fits = equal & (cells.correct.amax(1) - cells.correct.amin(1) > _CLEAR * bound.amax(1))
    if not bool(fits.any()):
        return []
    groups = _grouped(mean, bound.amax(1), fits)
    if int(fits.sum()) < _SHARE * int(left.sum()):
        return []
    if len(groups) <= _MOST_FACTORS:
        groups = [
            (value, mask | left & _equal(cells, cells.correct + value, bound))
            for value, mask in groups
        ]
        return [
            _cell_fact("added", cells, mask, f"{value:.4g} is added to every element", value=value)
            for value, mask in groups
        ]
    what = "one number is added to all elements of a head; it differs between rows or heads"
    return [_cell_fact("added", cells, equal, what)]


def _reordered(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells that hold the correct elements in another order."""
    head_size = cells.output.shape[1]
    if head_size < 8:
        return []
    order, half = torch.arange(head_size), head_size // 2
    orders = (
        {
            "in reverse order": order.flip(0),
            "with the halves exchanged": order.roll(half),
            "one element late": order.roll(1),
            "one element early": order.roll(-1),
            "with even elements before odd ones": torch.cat([order[::2], order[1::2]]),
            "with the halves interleaved": order.view(2, half).T.flatten(),
            "with neighbours exchanged": order.view(-1, 2).flip(1).flatten(),
        }
        if head_size % 2 == 0
        else {"in reverse order": order.flip(0)}
    )
    clear = _clear(cells, left)
    for text, index in orders.items():
        fits = clear & _equal(cells, cells.correct[:, index], cells.bound[:, index])
        if bool(fits.any()):
            what = f"the correct elements of the head, {text}"
            return [_cell_fact("reordered", cells, fits, what)]
    return []


def _rounded_to_shorter_format(cells: Cells, dtype: torch.dtype) -> list[Fact]:
    """Return the fact that every number is one of a format shorter than ``dtype``."""
    wrong = cells.output[cells.is_wrong]
    numbers = wrong[wrong.isfinite() & (wrong != 0)]
    if len(numbers) < 64:
        return []
    for name in _SHORT_FORMATS:
        short = getattr(torch, name)
        if short.itemsize > dtype.itemsize or torch.finfo(short).eps <= torch.finfo(dtype).eps:
            continue  # a longer fraction holds all numbers of the dtype that are in its range
        if bool((numbers.to(short).double() == numbers).all()) and len(numbers.unique()) > 8:
            what = (
                f"the wrong numbers are all {name} numbers, although the output is {str(dtype)[6:]}"
            )
            return [Fact("format", what, values={"format": name})]
    return []


def _cell_fact(
    kind: str, cells: Cells, mask: torch.Tensor, what: str, accounts: bool = True, **values: float
) -> tuple[Fact, torch.Tensor]:
    """Return a fact about the cells in ``mask``, and the mask."""
    rows = {
        "rows": cells.row[mask].unique().tolist()[:1000],
        "heads": cells.head[mask].unique().tolist(),
    }
    accounts_for = int(mask.sum()) if accounts else 0
    fact = Fact(kind, what, region_text(cells, mask), {**values, **rows}, accounts_for)
    return fact, mask


def size_fact(cells: Cells, has_rule: bool) -> Fact | None:
    """Return how large the errors are; with no rule, whether they are small and everywhere."""
    wrong = cells.select(cells.is_wrong)
    finite = wrong.output.isfinite().all(1)
    if not bool(finite.any()):
        return None
    error = wrong.output[finite] - wrong.correct[finite]
    largest = float(error.abs().max())
    relative = float(error.norm() / wrong.correct[finite].norm().clamp(min=1e-300))
    ratio = float(wrong.ratio[finite].max())
    what = (
        f"the errors are {relative:.2g} of the size of the correct output, at most {ratio:.3g} rounding "
        "bounds"
    )
    is_precision = not has_rule and _is_precision(cells, relative)
    if is_precision:
        seqs = len(wrong.seq.unique()), len(cells.seq.unique())
        what += f"; they are small, in {seqs[0]} of {seqs[1]} sequences"
    values = {"largest": largest, "ratio": ratio, "relative": relative}
    kind = "precision" if is_precision else "size"
    return Fact(kind, what, values=values)


def _is_precision(cells: Cells, relative: float) -> bool:
    """Answer whether errors are below 3 % of the output, in half of the sequences, and without direction."""
    seqs, wrong_seqs = cells.seq.unique(), cells.seq[cells.is_wrong].unique()
    error = (cells.output - cells.correct).nan_to_num(0.0, 0.0, 0.0)
    share = float((cells.ratio > 0.5).double().mean())
    mean = float(error.mean().abs() / error.square().mean().sqrt().clamp(min=1e-300))
    return relative < SMALL and len(wrong_seqs) * 2 >= len(seqs) and share > 0.25 and mean < 0.1


# The one scale of the scores that reproduces the wrong cells, if there is one.

_OCTAVES, _STEPS = 8, 4  # of the search for a scale: 2^-8 to 2^8 times the correct one
_REFINEMENTS = 40
_GOLDEN = (5**0.5 - 1) / 2
_KNOWN = 1.05  # a scale that may be larger or smaller by this factor is not known


def scale_fact(problem: Problem, worst: Sequence[Part], many: Sequence[Part]) -> Fact | None:
    """Find one scale of the scores that fits every wrong cell.

    ``worst``: a few parts, for the search; ``many``: those on which the fit is confirmed.
    """
    if not is_over_determined(many):
        return (
            None  # one key has weight 1 at any scale, and two keys have any weights at some scale
        )
    if all(_fits(part, 0.0) for part in [*worst, *many]):
        what = "every visible key has the same weight: the scores have no effect"
        return _scale_fact(what, many, {"scale": 0.0, "ratio": 0.0, "names": ["no scores"]})
    scale = fitted_scale(worst, problem.sm_scale)
    if not all(_fits(part, scale) for part in [*worst, *many]):
        return None
    if any(all(_fits(part, scale * f) for part in many) for f in (_KNOWN, 1 / _KNOWN)):
        return None
    ratio = scale / problem.sm_scale
    names = _names(problem, scale)
    what = (
        f"a softmax scale of {scale:.4g} fits; the correct scale is {problem.sm_scale:.4g} "
        f"(ratio {ratio:.4g}{''.join(f', {name}' for name in names)})"
    )
    return _scale_fact(what, many, {"scale": scale, "ratio": ratio, "names": names})


_EVERYWHERE = "every wrong row and head"


def _scale_fact(what: str, many: Sequence[Part], values: dict[str, Any]) -> Fact:
    return Fact("softmax_scale", what, _EVERYWHERE, values, num_cells(many))


def fitted_scale(parts: Sequence[Part], correct: float) -> float:
    """Return the scale with the smallest error, by a grid and golden-section search in its logarithm."""

    def loss(exponent: float, some: Sequence[Part], sign: float) -> float:
        return sum(_loss(part, sign * correct * 2.0**exponent) for part in some)

    grid = [i / _STEPS for i in range(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1)]
    best, sign = min(
        ((exponent, sign) for exponent in grid for sign in (1.0, -1.0)),
        key=lambda one: loss(one[0], parts[:1], one[1]),
    )
    low, high = best - 1 / _STEPS, best + 1 / _STEPS
    for _ in range(_REFINEMENTS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if loss(left, parts, sign) < loss(right, parts, sign):
            high = right
        else:
            low = left
    return sign * correct * math.exp2((low + high) / 2)


def _loss(part: Part, scale: float) -> float:
    """Return the squared error of the wrong cells under a scale, in units of the rounding bound."""
    inputs = part.at.change(sm_scale=scale)
    weights = softmax(scores_of(inputs), inputs.sinks)
    output = (weights @ inputs.value.transpose(0, 1)).transpose(0, 1)
    ratio = ((part.output - output) / part.bound)[part.is_wrong]
    return float(ratio.square().sum().nan_to_num(1e300))


def _fits(part: Part, scale: float) -> bool:
    predicted = part.at.problem.predict(part.at.change(sm_scale=scale))
    return fits(part, part.output - predicted.output, predicted.bound)


def _names(problem: Problem, scale: float) -> list[str]:
    """Return simple expressions that equal the scale to half a percent."""
    head_size, correct = problem.call.query.shape[2], problem.sm_scale
    names = {
        "1 / head_size": 1 / head_size,
        "1 / sqrt(head_size)": head_size**-0.5,
        "1 / sqrt(num_heads)": problem.num_heads**-0.5,
        "no scale": 1.0,
        "twice": 2 * correct,
        "half": correct / 2,
        "log2(e) times": correct * math.log2(math.e),
        "ln(2) times": correct * math.log(2),
        "the scale applied twice": correct**2,
        "the opposite sign": -correct,
    }
    k_scale, v_scale = problem.call.k_scale, problem.call.v_scale
    if not isinstance(k_scale, torch.Tensor) and not isinstance(v_scale, torch.Tensor):
        names |= {
            "k_scale applied once more": correct * k_scale,
            "k_scale not applied": correct / k_scale,
            "v_scale in place of k_scale": correct / k_scale * v_scale,
        }
    return [
        name
        for name, value in names.items()
        if abs(scale - value) < 5e-3 * abs(value) and not math.isclose(value, correct)
    ]


# KeyRule: a set of keys of each row, stated as a rule, such as "the keys of the last block".

_MOST_BLOCKS = 64  # blocks of a sequence that are tried one by one
_MOST_POSITIONS = 256  # positions that are tried one by one


Members = Callable[[Rows], torch.Tensor]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Some keys of each row.

    - ``text``: the rule in words, as the subject of a sentence in the plural.
    - ``members``: returns the keys, [keys] or [rows, keys] bool.
    - ``hidden``: the rule is about keys that the rows must not see.
    """

    text: str
    members: Members
    hidden: bool = False


_ENDS: dict[str, Members] = {
    "the newest keys of the sequences": lambda at: at.keys == len(at.keys) - 1,
    "the keys of the rows' own tokens": lambda at: at.after == 0,
    "the first keys of the sequences": lambda at: at.keys == 0,
    "the keys of the context": lambda at: at.keys < at.ctx_len,
    "the keys of the new tokens": lambda at: at.keys >= at.ctx_len,
    "the last keys of the context": lambda at: at.keys == at.ctx_len - 1,
    "the cached keys after the last full block of {size}": lambda at: (
        (at.keys >= at.cached - at.cached % at.call.block_size) & (at.keys < at.cached)
    ),
}
_OF_WINDOW: dict[str, Members] = {
    "the oldest keys of the window": lambda at: at.after == 1 - at.call.sliding_window
}
_HIDDEN: dict[str, Members] = {
    "the keys right after the rows' own tokens": lambda at: at.after == 1,
    "all later keys": lambda at: at.after > 0,
}
_BEFORE_WINDOW: dict[str, Members] = {
    "the keys right before the window": lambda at: at.after == -at.call.sliding_window,
    "all keys before the window": lambda at: at.after <= -at.call.sliding_window,
    "the keys of the context before the window": lambda at: (
        (at.after <= -at.call.sliding_window) & (at.keys < at.ctx_len)
    ),
    "the new keys before the window": lambda at: (
        (at.after <= -at.call.sliding_window) & (at.keys >= at.ctx_len)
    ),
}


def key_rules(problem: Problem) -> Iterator[KeyRule]:
    """Yield the rules, the simplest first."""
    size, has_window = problem.call.block_size, bool(problem.call.sliding_window)
    for text, members in (_ENDS | (_OF_WINDOW if has_window else {})).items():
        yield KeyRule(text.format(size=size), members)
    for text, members in (_HIDDEN | (_BEFORE_WINDOW if has_window else {})).items():
        yield KeyRule(text, members, hidden=True)
    units = {size: "block", problem.partition_size: "partition"}
    units |= {tile: "tile" for tile in TILES if tile != size}
    last = {unit: f"the last {name} of {unit}{_of_cached(problem)}" for unit, name in units.items()}
    for unit, text in last.items():
        yield KeyRule(f"the keys of {text}", _last_of(unit))
    longest = max(map(problem.seq_len, problem.computed_seqs()))
    for unit, name in units.items():  # each block, tile or partition of the longest sequence
        for i in range(min(_MOST_BLOCKS, -(-longest // unit))):
            start, stop = i * unit, (i + 1) * unit
            text = f"the keys at positions {start}–{stop - 1} ({name} {i} of {unit})"
            yield KeyRule(text, _between(start, stop))
    for unit, text in last.items():
        yield KeyRule(f"all keys but the first {unit}", _not(_between(0, unit)))
        yield KeyRule(f"all keys but those of {text}", _not(_last_of(unit)))
    yield KeyRule("the keys at odd positions", _each(2, 1))
    yield KeyRule("the keys at even positions", _each(2, 0))
    for rest in (size - 1, *range(size - 1)) if size > 2 else ():
        yield KeyRule(f"the keys in slot {rest} of every block of {size}", _each(size, rest))
    for at in range(min(_MOST_POSITIONS, longest)):
        yield KeyRule(f"the keys at position {at}", _between(at, at + 1))


def _each(size: int, rest: int) -> Members:
    return lambda at: at.keys % size == rest


def _between(start: int, stop: int) -> Members:
    return lambda at: (at.keys >= start) & (at.keys < stop)


def _last_of(unit: int) -> Members:
    """Return the members of the last block, tile or partition of the cached keys."""
    return lambda at: (at.keys >= (at.cached - 1) // unit * unit) & (at.keys < at.cached)


def _not(members: Members) -> Members:
    return lambda at: ~members(at)


def _of_cached(problem: Problem) -> str:
    """Return whose keys the last tile of the cached keys holds, in words: "" if all keys are cached."""
    seqs = problem.computed_seqs()
    if all(problem.cached_len(seq) == problem.seq_len(seq) for seq in seqs):
        return ""
    if all(problem.cached_len(seq) == problem.ctx_len(seq) for seq in seqs):
        return " of the context"
    return " of the cached keys"


# Keys that are missing, extra or weighted wrongly, and terms that the sum of the softmax has too much.
#
# If the weights of some keys are multiplied by m, the output O becomes (O + (m - 1) p) / (1 + (m - 1) w),
# with w the sum of their weights and p their part of O. This is linear in m, so each wrong cell gives its
# own m by least squares, and the residual decides whether the rule of keys fits. For keys that a row must
# not see, w is exp(score - log-sum-exp), and m - 1 is replaced by m.


def keys_fact(problem: Problem, worst: Sequence[Part], many: Sequence[Part]) -> Fact | None:
    """Find the simplest rule of keys that fits every wrong cell.

    ``worst``: a few parts, for the search; ``many``: those on which the fit is confirmed.
    """
    if not is_over_determined(many, fitted=1):
        return None
    weights = [_weights(part) for part in worst]
    all_weights: list[torch.Tensor] = []
    for rule in key_rules(problem):
        if _changes(worst, weights, rule) is None:
            continue
        all_weights = all_weights or [_weights(part) for part in many]
        changes = _changes(many, all_weights, rule)
        if changes is not None:
            return _fact(rule, changes, num_cells(many))
    return None


def _weights(part: Part) -> torch.Tensor:
    """Return exp(score - log-sum-exp) of all keys, also of those that a row must not see,
    [heads, rows, keys]; the sum over visible keys is 1, less the sink's weight."""
    scores = scores_of(part.at.change(visible=torch.ones_like(part.at.visible)))
    return (scores - _log_sum(part, scores)[..., None]).exp()


def _log_sum(part: Part, scores: torch.Tensor) -> torch.Tensor:
    """Return the correct log-sum-exp of each head and row, with the sink if any."""
    seen = scores.masked_fill(~part.at.inputs.visible, -torch.inf)
    log_sum = seen.logsumexp(-1)
    if part.at.inputs.sinks is None:
        return log_sum
    return torch.logaddexp(log_sum, part.at.inputs.sinks.to(log_sum.dtype)[:, None])


def _changes(
    parts: Sequence[Part], weights: Sequence[torch.Tensor], rule: KeyRule
) -> torch.Tensor | None:
    """Return by how much the multiplier of the keys changes in each clearly wrong cell, [n], or None if
    there is none or the rule does not fit a wrong cell."""
    found = []
    for part, weight in zip(parts, weights, strict=True):
        seen = part.at.visible
        chosen = rule.members(part.at) & (~seen if rule.hidden else seen)
        some = weight * chosen
        total = some.sum(-1).transpose(0, 1)[..., None]  # [rows, heads, 1]
        partial = (some @ part.at.inputs.value.transpose(0, 1)).transpose(0, 1)
        direction, difference = total * part.output - partial, part.correct - part.output
        change = (direction * difference).sum(2) / direction.square().sum(2).clamp(min=1e-300)
        normaliser = 1 + change[..., None] * total
        residual = difference - change[..., None] * direction
        is_possible = (normaliser[..., 0] > 1e-9) & (change > (-0.1 if rule.hidden else -1.1))
        if not bool(is_possible[part.is_wrong].all()):
            return None
        residual = residual / normaliser.clamp(min=1e-9)
        if not fits(part, residual, _bound(part, weight, some, change)):
            return None
        found.append(change[part.is_clear])
    changes = torch.cat(found)
    return changes if len(changes) else None


def _bound(
    part: Part, weight: torch.Tensor, some: torch.Tensor, change: torch.Tensor
) -> torch.Tensor:
    """Return the rounding bound of the changed output, [rows, heads, head_size]; at least the correct
    one's. ``some``: the weights of the chosen keys."""
    changed = weight * part.at.inputs.visible + change.transpose(0, 1)[..., None] * some
    changed = changed.clamp(min=0.0)
    changed /= changed.sum(-1, keepdim=True).clamp(min=1e-300)
    value = part.at.inputs.value.transpose(0, 1)
    output = changed @ value
    bound = part.at.inputs.rounding.bound(changed, value, output, score_error(part.at.inputs))
    return torch.maximum(bound.transpose(0, 1), part.bound)


def _fact(rule: KeyRule, changes: torch.Tensor, count: int) -> Fact:
    multipliers = changes if rule.hidden else 1 + changes
    middle = float(multipliers.median())
    low, high = (float(multipliers.quantile(at)) for at in (0.02, 0.98))
    values = {"keys": rule.text, "multiplier": middle, "low": low, "high": high}
    return Fact("keys", _text(rule, multipliers, low, middle, high), _EVERYWHERE, values, count)


def _text(rule: KeyRule, multipliers: torch.Tensor, low: float, middle: float, high: float) -> str:
    """Return what happens to the keys of a rule, in words."""

    def is_near(value: float) -> bool:
        return bool(((multipliers - value).abs() < 0.1).double().mean() > 0.9)

    if rule.hidden:
        if is_near(1.0):
            return f"{rule.text} are attended to, although they must not be"
        return f"{rule.text} are attended to, with {low:.3g} to {high:.3g} times the weight of a visible key"
    if is_near(0.0):
        return f"{rule.text} are missing"
    if is_near(2.0):
        return f"{rule.text} count twice"
    if high - low < 0.1 * abs(middle):
        return f"the weights of {rule.text} are multiplied by {middle:.3g}"
    return (
        f"the weights of {rule.text} are multiplied by factors from {low:.3g} to {high:.3g} that differ "
        "between rows or heads"
    )


def sum_fact(many: Sequence[Part]) -> Fact | None:
    """Find the constant that the sum of the softmax has too much, if every wrong cell is a multiple of the
    correct output. The sum counts exp(score), so one more key with score 0 and value 0 adds 1."""
    terms = []
    for part in many:
        squares = part.correct.square().sum(2).clamp(min=1e-300)
        factor = (part.output * part.correct).sum(2) / squares
        limit = part.bound * factor.abs().clamp(min=1.0)[..., None]
        is_multiple = fits(part, part.output - factor[..., None] * part.correct, limit)
        if not is_multiple or bool((factor[part.is_wrong] <= 0).any()):
            return None
        log_sum = _log_sum(part, scores_of(part.at.inputs)).transpose(0, 1)
        weight = (factor * part.bound.norm(dim=2) / squares.sqrt()).reciprocal()
        added = (1 / factor - 1) * log_sum.exp()
        terms.append(torch.stack([added, weight / log_sum.exp()])[:, part.is_wrong])
    added, weight = torch.cat(terms, 1)
    constant = float((added * weight.square()).sum() / weight.square().sum())
    if abs(constant) < 1e-6 or not bool(((added - constant).abs() * weight <= 3).all()):
        return None
    what = f"the sum of the softmax is {'larger' if constant > 0 else 'smaller'} by {abs(constant):.3g}"
    if constant > 0 and abs(constant - round(constant)) < 0.02 * constant:
        count = round(constant)
        keys = "one more key" if count == 1 else f"{count} more keys"
        what += f", as {keys} with score 0 and value 0 would make it"
    return Fact("sum", what, _EVERYWHERE, {"added": constant}, num_cells(many))


_SINGULAR = ("nonfinite", "zeros")  # kinds of facts next to which a change of the weights is tried


def describe(
    problem: Problem, output: torch.Tensor, locations: ErrorLocations, heads: range | None = None
) -> Pattern:
    """Return the pattern of an output's errors; empty if nothing is wrong.

    ``output``: [num_tokens, num_heads, head_size]; ``heads``: the query heads that ran, None for all.
    """
    if not len(locations.wrong_rows):
        return Pattern()
    ran = range(problem.num_heads) if heads is None else heads
    cells = cells_of(problem, output, locations.ratio, heads)
    places = place_facts(locations.is_wrong, list(ran), sizes_of(problem))
    wrong = int(cells.is_wrong.sum())
    if not wrong:
        return Pattern(facts=tuple(places))
    values, left = value_facts(cells, output.dtype)
    is_clear = bool((cells.ratio[left] > CLEAR).any())  # else any rule fits
    if is_clear:
        values += move_facts(cells, problem.row_starts(), left)
    only_singular = all(fact.kind in _SINGULAR for fact in values if fact.accounts_for)
    if (only_singular and is_clear) or any(fact.kind == "factors" for fact in values):
        sample = sample_output(problem, locations, torch.arange(0), heads)
        values = _with_weights(problem, output, sample, values, int(left.sum()))
    has_rule = any(fact.accounts_for for fact in values)
    size = size_fact(cells, has_rule)
    sizes = [] if size is None else [size]
    elements = [] if has_rule else element_facts(cells)
    return Pattern(facts=(*places, *elements, *sizes, *values), wrong_cells=wrong)


def _with_weights(
    problem: Problem, output: torch.Tensor, sample: RowSample, values: list[Fact], left: int
) -> list[Fact]:
    """Return the facts with the change of the weights that reproduces the ``left`` finite wrong cells,
    if there is one."""
    worst = wrong_parts(problem, output, sample.worst)
    many = wrong_parts(problem, output, sample.many)
    if not worst or not many:
        return values
    factors = [fact for fact in values if fact.kind == "factors"]
    if factors:
        fact = sum_fact(many)
        count = factors[0].accounts_for
        rest = [one for one in values if one.kind != "factors"]
    else:
        fact = scale_fact(problem, worst, many) or keys_fact(problem, worst, many)
        count, rest = left, values
    return values if fact is None else [*rest, dataclasses.replace(fact, accounts_for=count)]


def sizes_of(problem: Problem) -> Sizes:
    """Return the lengths and sizes of a problem."""
    query_lens = [problem.query_len(seq) for seq in range(problem.num_seqs)]
    return Sizes(
        seqs=tuple(seq for seq in problem.computed_seqs()),
        query_lens=tuple(query_lens),
        ctx_lens=tuple(problem.seq_len(seq) - n for seq, n in enumerate(query_lens)),
        row_starts=tuple(problem.row_starts()),
        block_size=problem.call.block_size,
        num_queries_per_kv=problem.call.num_queries_per_kv,
        partition_size=problem.partition_size,
        takes_prefills=problem.call.spec.prefill,
    )
