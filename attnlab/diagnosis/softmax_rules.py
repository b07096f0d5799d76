"""SoftmaxLaw: a running softmax, and a merge of its parts, in which one step is wrong.

A tile with maximum b after one with maximum a multiplies the sum and the accumulator by exp(a - b), and adds
exp(score - b). A law changes these exponents, what is there before the first tile, or the merge of the parts.
All weights are linear in the values, so a law gives the weight of each key.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attnlab.defects.edit import Compute, Defect, Rows, compute_of
from attnlab.diagnosis.divisions import LOOPS, Division, Parts, divisions, with_tiles_to
from attnlab.lab.problem import AttentionInputs, Predicted, Problem, RowSlice, scores_of

ALL_KEYS = 1 << 40  # more keys than any sequence has
_LOWEST = -1e30  # in place of -inf, so that differences are defined


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxLaw:
    """The factors of the exponents and what else may be wrong; the defaults are right.

    - ``weight``, ``rescale_sum``, ``rescale_output``: factors of the exponents of a tile's weights, and of
      the rescaling of the sum and of the accumulator: 1 for base e, ln(2) for base 2, 0 for none.
    - ``keep_sum``, ``keep_output``: whether the sum and the accumulator of earlier tiles are kept at all.
    - ``loop``: the loop in which they hold, None for all; it is right in the others.
    - ``first_sum``: the sum before the first tile; ``first_max``: the maximum before it, None for none.
    - ``weight_minus``, ``sum_minus``, ``output_minus``: how often the new maximum is subtracted in the
      exponents of the weights, and of both rescalings. ``of_tile``: from the scores, the maximum of their own
      tile is subtracted. ``sum_is_one``, ``output_is_one``: the sum or the
      accumulator of earlier tiles counts as 1. ``added_sum``: the factor of a tile's sum when it is added.
    - ``scaled_sum``, ``scaled_output``: what the rescaling multiplies: "earlier" (tiles), "added" (the tile
      that is added), or "both". ``spares_first``: the first tile is not multiplied. ``by_sums``: the
      accumulator of earlier tiles is also multiplied by the quotient of the old sum and the new one.
    - ``divides``: whether the output of a part is divided by its sum. ``log_of_sum``: the factor of the
      logarithm of a part's sum in its log-sum-exp, of a running merge.
    - ``padding``: the slots of a tile after its last key count with score 0 and value 0; at most so many.
    - ``unscaled``: the maximum that a part stores, alone or in its log-sum-exp, lacks the softmax scale.
    - ``max_plus_log``: how often the logarithm of a part's sum is added to the maximum that it stores, of a
      merge at once.
    - ``merge_sum``, ``merge_output``: factors of the exponents in the merge; ``merge_new``: in a running
      merge, that of the part that is added. ``merged_sum``, ``merged_output``: what its rescaling multiplies,
      as ``scaled_sum``.
    - ``left_out``: parts that the merge leaves out, "first" or "last"; ``in_sum``, ``in_output``: of what.
    - ``all_sinks``: each part begins with the sinks, not the first alone.
    - ``start``, ``stop``: keys by which each part begins or ends later; it stays within the sequence.
    """

    weight: float = 1.0
    rescale_sum: float = 1.0
    rescale_output: float = 1.0
    keep_sum: bool = True
    keep_output: bool = True
    loop: int | None = None
    first_sum: float = 0.0
    first_max: float | None = None
    weight_minus: float = 1.0
    sum_minus: float = 1.0
    output_minus: float = 1.0
    of_tile: bool = False
    sum_is_one: bool = False
    output_is_one: bool = False
    added_sum: float = 1.0
    scaled_sum: str = "earlier"
    scaled_output: str = "earlier"
    spares_first: bool = False
    by_sums: bool = False
    divides: bool = True
    log_of_sum: float = 1.0
    unscaled: bool = False
    max_plus_log: float = 0.0
    padding: int = 0
    merge_sum: float = 1.0
    merge_output: float = 1.0
    merge_new: float = 1.0
    merged_sum: str = "earlier"
    merged_output: str = "earlier"
    left_out: str = ""
    in_sum: bool = True
    in_output: bool = True
    all_sinks: bool = False
    start: int = 0
    stop: int = 0

    @property
    def is_of_every_tile(self) -> bool:
        """Answer whether a tile without a key that a row sees changes the row's results."""
        changed = (self.keep_sum, self.keep_output, self.sum_minus, self.output_minus)
        is_one = self.sum_is_one or self.output_is_one
        return changed != (True, True, 1.0, 1.0) or is_one

    def is_shown(self, division: Division, problem: Problem, seqs: Sequence[int]) -> bool:
        """Answer whether rows of some sequences can show the law.

        One about earlier tiles needs a part with two tiles: with sinks, it changes the first tile, too.
        """
        if all(getattr(self, name) == getattr(_RIGHT, name) for name in _OF_EARLIER_TILES):
            return True
        return any(
            self.loop in (None, loop)
            for seq in seqs
            for tiles in division.parts(problem, seq)
            for *_, loop in tiles[1:]
        )

    def weights(
        self,
        scores: torch.Tensor,
        parts: Parts,
        merge: str,
        sinks: torch.Tensor | None,
        stops: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Return the weights of the keys, [heads, rows, keys], from their scores; ``sinks``: [heads].

        ``stops``: [rows, 1], the slot from which on no tile of a row begins, or None for no limit;
        ``scale``: that of the scores, which the stored maxima of parts may lack. All
        weights of a row are 0 if all of its tiles are lost. With ``output_is_one``, one more column, at the
        end, holds what is added to each element of the output.
        """
        found = [
            _Part.of(self, scores, tiles, sinks if i == 0 or self.all_sinks else None, stops)
            for i, tiles in enumerate(self._moved(parts, scores.shape[-1]))
        ]
        lost = scale if self.unscaled else 1.0
        if merge == "running":
            return self._merged_one_by_one(found, lost)
        return self._merged_at_once(found, lost)

    def _moved(self, parts: Parts, length: int) -> Parts:
        """Return the parts with other ends."""
        if not (self.start or self.stop):
            return parts
        moved = []
        for tiles in parts:
            first = max(0, tiles[0][0] + self.start)
            last = min(tiles[-1][1] + self.stop, length)
            moved.append([(first, last, 0, 0)] if first < last else [(0, 0, 0, 0)])
        return moved

    def _shares(self, index: int, count: int) -> tuple[float, float]:
        """Return how often a part counts in the sum and in the output of a merge, 0 or 1."""
        place = {"first": 0, "last": count - 1}.get(self.left_out, -1)
        is_out = index == place and count > 1
        return float(not (is_out and self.in_sum)), float(not (is_out and self.in_output))

    def _merged_at_once(self, parts: "list[_Part]", lost: float) -> torch.Tensor:
        stored = [
            part.maximum / lost + self.max_plus_log * part.total.clamp(min=1e-300).log()
            for part in parts
        ]
        highest = torch.stack(stored).amax(0)
        output, total = torch.zeros_like(parts[0].weights), torch.zeros_like(highest)
        for i, (part, maximum) in enumerate(zip(parts, stored, strict=True)):
            in_sum, in_output = self._shares(i, len(parts))
            total = total + in_sum * part.total * _exp(maximum - highest, self.merge_sum)
            scale = _exp(maximum - highest, self.merge_output)
            output = output + in_output * part.weights * scale
        return _quotient(output, total) if self.divides else output

    def _merged_one_by_one(self, parts: "list[_Part]", lost: float) -> torch.Tensor:
        output, total = torch.zeros_like(parts[0].weights), torch.zeros_like(parts[0].total)
        highest = torch.full_like(total, _LOWEST)
        for i, part in enumerate(parts):
            in_sum, in_output = self._shares(i, len(parts))
            log_sum = part.maximum / lost + self.log_of_sum * part.total.clamp(min=1e-300).log()
            higher = torch.maximum(highest, log_sum)
            new = _exp(log_sum - higher, self.merge_new)
            scale = _exp(highest - higher, self.merge_sum)
            total = _added_to(total, in_sum * new, scale, self.merged_sum)
            divisor = part.total.clamp(min=1e-300) if self.divides else 1.0
            scale = _exp(highest - higher, self.merge_output)
            added = in_output * new * part.weights / divisor
            output = _added_to(output, added, scale, self.merged_output)
            highest = higher
        return _quotient(output, total)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The result of a part: ``weights`` [heads, rows, keys] before the division; ``maximum`` and ``total``
    [heads, rows, 1]."""

    weights: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(
        cls,
        law: SoftmaxLaw,
        scores: torch.Tensor,
        tiles: list[tuple[int, int, int, int]],
        sinks: torch.Tensor | None,
        stops: torch.Tensor | None = None,
    ) -> "_Part":
        """Return the result of the tiles under a law."""
        weights = scores.new_zeros(*scores.shape[:2], scores.shape[2] + law.output_is_one)
        start = _LOWEST if law.first_max is None else law.first_max
        maximum = torch.full_like(scores[..., :1], start)
        total = torch.full_like(maximum, law.first_sum)
        if sinks is not None:
            maximum = sinks.to(scores.dtype)[:, None, None].expand_as(maximum)
            total = torch.ones_like(maximum)
        found = cls(weights, maximum, total)
        for first, last, slots, loop in tiles:
            if last == 0:
                continue
            step = law if law.loop is None or law.loop == loop else _RIGHT
            after = found.with_tile(step, scores[..., first:last], first, min(slots, step.padding))
            if stops is not None and not bool((stops > first).all()):
                after = after.where(stops > first, found)
            found = after
        return found

    def with_tile(self, step: SoftmaxLaw, scores: torch.Tensor, first: int, slots: int) -> "_Part":
        """Return the result after one more tile, with ``slots`` of padding that count."""
        higher = self.maximum
        if scores.shape[-1]:
            higher = torch.maximum(higher, scores.amax(-1, keepdim=True))
        if slots:
            higher = higher.clamp(min=0.0)
        subtracted = step.weight_minus * higher
        if step.of_tile and scores.shape[-1]:
            # Most rows do not visit a tile in which no key is seen; one that does becomes NaN.
            subtracted = scores.amax(-1, keepdim=True).clamp(min=_LOWEST)
        exps = _exp(scores - subtracted, step.weight)
        before = torch.ones_like(self.total) if step.sum_is_one else self.total
        scale = _exp(self.maximum - step.sum_minus * higher, step.rescale_sum)
        added = step.added_sum * exps.sum(-1, keepdim=True)
        total = _added_to(before * step.keep_sum, added, scale, step.scaled_sum)
        if slots:
            total = total + slots * _exp(-step.weight_minus * higher, step.weight)
        scale = _exp(self.maximum - step.output_minus * higher, step.rescale_output)
        earlier = self.weights
        if step.output_is_one:
            earlier = torch.zeros_like(earlier)
            earlier[..., -1] = 1.0
        if step.by_sums:
            scale = scale * self.total / total.clamp(min=1e-300)
        weights = earlier * step.keep_output
        if step.scaled_output != "added":
            weights = weights * scale
        if step.scaled_output != "earlier":
            is_scaled = (earlier != 0).any(-1, keepdim=True) | (not step.spares_first)
            exps = torch.where(is_scaled, exps * scale, exps)
        weights[..., first : first + scores.shape[-1]] += exps
        return _Part(weights, higher, total)

    def where(self, is_visited: torch.Tensor, other: "_Part") -> "_Part":
        """Return the result in rows that visit the tile, [rows, 1] bool, and another one elsewhere."""
        return _Part(
            torch.where(is_visited, self.weights, other.weights),
            torch.where(is_visited, self.maximum, other.maximum),
            torch.where(is_visited, self.total, other.total),
        )


def _quotient(output: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the output divided by the sum; 0 where both are 0."""
    return (output / total).masked_fill((output == 0) & (total == 0), 0.0)


def _added_to(
    earlier: torch.Tensor, added: torch.Tensor, scale: torch.Tensor, scaled: str
) -> torch.Tensor:
    """Return earlier + added, with one of them ("earlier", "added") or "both" multiplied by ``scale``."""
    return (earlier if scaled == "added" else earlier * scale) + (
        added if scaled == "earlier" else added * scale
    )


def _exp(difference: torch.Tensor, factor: float) -> torch.Tensor:
    """Return exp(factor × difference); 1 for factor 0."""
    return (difference * factor).exp() if factor else torch.ones_like(difference)


_RIGHT = SoftmaxLaw()  # of the tiles of other loops
_OF_EARLIER_TILES = (
    *("rescale_sum", "rescale_output", "keep_sum", "keep_output", "sum_minus", "output_minus"),
    *("of_tile", "sum_is_one", "output_is_one", "scaled_sum", "scaled_output", "spares_first"),
    "by_sums",
)


# Rules about scores that are wrong in one of two loops: over the context, or over the new tokens.
#
# A change of all scores, such as a constant added to them, would have no effect if both loops had it.

FAMILY = "loops"
_Edits = dict[str, Callable[[Rows], AttentionInputs]]


def loop_defects(problem: Problem) -> list[Defect]:
    """Return the rules about one loop that a call allows, each as a defect."""
    call, seqs = problem.call, problem.computed_seqs()
    if call.spec.merges or not call.visibility.is_plain:
        return []
    has_alibi, has_sinks = call.alibi_slopes is not None, call.sinks is not None
    found: dict[int | None, _Edits] = {
        None: (_edits(_ADDED) if has_sinks else {}) | (_CLAMPED if has_alibi else {})
    }
    if any(0 < problem.cached_len(seq) < problem.seq_len(seq) for seq in seqs):
        edits = _edits(_ADDED) | _SCALED
        edits |= _edits(_MOVED) | _ALIBI if has_alibi else {}
        edits |= _WINDOW if call.sliding_window > 1 else {}
        for loop in (0, 1):
            of_numbers: _Edits = {_NUMBERS[loop]: partial(_of_numbers, loop)}
            found[loop] = edits | (of_numbers if call.sliding_window else {})
    return [
        Defect(family=FAMILY, name=text, text=text, compute=_in_loop(edit, loop))
        for loop, laws in found.items()
        for words, edit in laws.items()
        for text in _texts(words, loop, has_sinks=has_sinks)
    ]


def _texts(words: str, loop: int | None, *, has_sinks: bool) -> list[str]:
    """Return the text of an edit in a loop, none if the other loop has a rule that is the same.

    The weights of a row do not change with what is added to all of its scores, unless there are sinks. So a
    constant that is added in one loop is the same as its opposite in the other: the text has both.
    """
    if loop is None or has_sinks or words not in _OPPOSITES:
        return [f"{LOOPS[loop]}{words}"]
    if loop == 1:
        return []
    other = f"{LOOPS[1]}{_OPPOSITES[words]}"
    return [f"{LOOPS[0]}{words}, or {other}: both give the same weights"]


def _in_loop(edit: Callable[[Rows], AttentionInputs], loop: int | None) -> Compute:
    """Return the ``compute`` of an edit that only the keys of a loop have."""

    def mixed(at: Rows) -> AttentionInputs:
        other, is_wrong = edit(at), torch.ones(at.seq_len, dtype=torch.bool)
        if loop is not None:
            is_wrong = (at.keys >= at.cached) == bool(loop)
        found = torch.where(is_wrong, scores_of(other), scores_of(at.inputs))
        visible = torch.where(is_wrong, other.visible, at.visible)
        return at.change(visible=visible, weigh=lambda scores: at.softmax(found.to(scores.dtype)))

    return compute_of(mixed)


# Edits that are added to scores: the text, that of the opposite, and the edit with the sign 1 or -1.
_Signed = tuple[tuple[str, str, Callable[[Rows, int], AttentionInputs]], ...]
_ADDED: _Signed = (
    (
        "the products of queries and keys begin at 1 in place of 0",
        "the products of queries and keys begin at -1 in place of 0",
        lambda at, sign: _plus(at, sign * at.inputs.sm_scale),
    ),
    (
        "1 is added to the scores",
        "1 is subtracted from the scores",
        lambda at, sign: _plus(at, sign),
    ),
)
_MOVED: _Signed = (
    (
        "ALiBi distances are larger by 1",
        "ALiBi distances are smaller by 1",
        lambda at, sign: at.change(alibi_shift=-sign),
    ),
    (
        "ALiBi distances lack the length of the context",
        "ALiBi distances count the length of the context twice",
        lambda at, sign: at.change(alibi_shift=sign * at.ctx_len),
    ),
    (
        "ALiBi distances lack the position of the row",
        "ALiBi distances count the position of the row twice",
        lambda at, sign: at.change(alibi_shift=sign * at.inputs.position[:, None]),
    ),
)
_OPPOSITES = {
    text: other for one, two, _ in _ADDED + _MOVED for text, other in ((one, two), (two, one))
}
_SCALED: _Edits = {
    "the scores are not scaled": lambda at: at.change(sm_scale=1.0),
    "the scores are scaled twice": lambda at: at.change(sm_scale=at.inputs.sm_scale**2),
}
_ALIBI: _Edits = {
    "ALiBi is missing": lambda at: at.change(alibi_slopes=None),
    "ALiBi has the opposite sign": lambda at: at.slope(lambda slopes: -slopes[at.heads]),
}
_CLAMPED: _Edits = {
    "ALiBi does not grow in the context": lambda at: at.change(
        alibi_shift=-(at.keys - at.ctx_len).clamp(max=0)
    ),
    "ALiBi does not grow among the new tokens": lambda at: at.change(
        alibi_shift=-(at.keys - at.ctx_len).clamp(min=0)
    ),
}
_WINDOW: _Edits = {
    "the window is one key longer": lambda at: at.change(visible=at.window(1)),
    "the window is one key shorter": lambda at: at.change(visible=at.window(-1)),
}
_NUMBERS = tuple(
    f"the window counts {what} without the length of the context" for what in ("rows", "keys")
)


def _edits(signed: _Signed) -> _Edits:
    """Return each edit with both signs, by its text."""
    return {
        text: lambda at, edit=edit, sign=sign: edit(at, sign)  # type: ignore[misc]
        for *texts, edit in signed
        for text, sign in zip(texts, (1, -1), strict=True)
    }


def _plus(at: Rows, number: float) -> AttentionInputs:
    """Return the inputs with a number that is added to all scores."""
    return at.change(key_bias=torch.full((at.seq_len,), number, dtype=torch.float64))


def _of_numbers(loop: int, at: Rows) -> AttentionInputs:
    """Return the inputs if the window counts rows or keys of a loop by their numbers among the new tokens.

    Over the context these are rows without the length of the context, over the new tokens keys without it.
    """
    lost = at.ctx_len if loop == 0 else -at.ctx_len
    is_near = -at.after - lost < at.call.sliding_window
    return at.change(visible=at.seen_under(sliding_window=0) & is_near)


# Rules about the softmax: one wrong step of a running softmax, or of the merge of its parts.
#
# They go beyond the catalogue by the tiles, loops and parts in which a step may be wrong. Each is a Defect
# that is made for a call, compared with an output and confirmed on further cases.

SOFTMAX_FAMILY = "running softmax"
_LN_2 = math.log(2)
# What the rescaling of the sum and of the accumulator multiplies, when a tile or a part is added.
_SCALED_INSTEAD = {
    "the accumulator is rescaled after a {} is added": ("earlier", "both"),
    "the sum is rescaled after a {} is added": ("both", "earlier"),
    "the sum and the accumulator are rescaled after a {} is added": ("both", "both"),
    "each {}, not the accumulator of earlier {}, is rescaled": ("earlier", "added"),
    "the sum of each {}, not that of earlier {}, is rescaled": ("added", "earlier"),
    "each {} and its sum, not earlier {}, are rescaled": ("added", "added"),
}
# What a tile does wrongly.
_STEPS: dict[str, SoftmaxLaw] = {
    "exp2 is used instead of exp in the weights": SoftmaxLaw(weight=_LN_2),
    "exp2 is used instead of exp in the weights and the rescaling": SoftmaxLaw(
        weight=_LN_2, rescale_sum=_LN_2, rescale_output=_LN_2
    ),
    "exp2 is used instead of exp in the rescaling of earlier tiles": SoftmaxLaw(
        rescale_sum=_LN_2, rescale_output=_LN_2
    ),
    "exp2 is used instead of exp in the rescaling of the sum": SoftmaxLaw(rescale_sum=_LN_2),
    "exp2 is used instead of exp in the rescaling of the accumulator": SoftmaxLaw(
        rescale_output=_LN_2
    ),
    "the exponents of the rescaling of earlier tiles are doubled": SoftmaxLaw(
        rescale_sum=2.0, rescale_output=2.0
    ),
    "the exponents of the rescaling of earlier tiles are halved": SoftmaxLaw(
        rescale_sum=0.5, rescale_output=0.5
    ),
    "the exponents of the rescaling of earlier tiles have the wrong sign": SoftmaxLaw(
        rescale_sum=-1.0, rescale_output=-1.0
    ),
    "the weights of each tile are relative to its own maximum": SoftmaxLaw(of_tile=True),
    "the sum of earlier tiles is not rescaled": SoftmaxLaw(rescale_sum=0.0),
    "the sum of earlier tiles, which begins at 1, is not rescaled": SoftmaxLaw(
        rescale_sum=0.0, first_sum=1.0
    ),
    "the accumulator of earlier tiles is not rescaled": SoftmaxLaw(rescale_output=0.0),
    "the accumulator is rescaled after a tile is added, except after the first": SoftmaxLaw(
        scaled_output="both", spares_first=True
    ),
    "the accumulator of earlier tiles is also multiplied by the quotient of the old sum and the new one": (
        SoftmaxLaw(by_sums=True)
    ),
    **{
        text.format("tile", "tiles"): SoftmaxLaw(scaled_sum=of_sum, scaled_output=of_output)
        for text, (of_sum, of_output) in _SCALED_INSTEAD.items()
    },
    "the sum of earlier tiles is lost": SoftmaxLaw(keep_sum=False),
    "the accumulator of earlier tiles is lost": SoftmaxLaw(keep_output=False),
    "earlier tiles are lost": SoftmaxLaw(keep_sum=False, keep_output=False),
    "earlier tiles are not rescaled": SoftmaxLaw(rescale_sum=0.0, rescale_output=0.0),
    "the sum of earlier tiles is rescaled by exp(old maximum)": SoftmaxLaw(sum_minus=0.0),
    "the accumulator of earlier tiles is rescaled by exp(old maximum)": SoftmaxLaw(
        output_minus=0.0
    ),
    "earlier tiles are rescaled by exp(old maximum)": SoftmaxLaw(sum_minus=0.0, output_minus=0.0),
    "earlier tiles are rescaled by exp(old maximum + new maximum)": SoftmaxLaw(
        sum_minus=-1.0, output_minus=-1.0
    ),
    "the weights lack the maximum in their exponent": SoftmaxLaw(weight_minus=0.0),
    "the maximum is added in the exponent of the weights": SoftmaxLaw(weight_minus=-1.0),
    "the sum of earlier tiles is taken for 1": SoftmaxLaw(sum_is_one=True),
    "the accumulator of earlier tiles is taken for 1": SoftmaxLaw(output_is_one=True),
    "the sums of the tiles are not added": SoftmaxLaw(added_sum=0.0),
    "the sums of the tiles are subtracted": SoftmaxLaw(added_sum=-1.0),
    "the slots of a tile after its last key count with score 0 and value 0": SoftmaxLaw(
        padding=ALL_KEYS
    ),
    "the first slot of a tile after its last key counts with score 0 and value 0": SoftmaxLaw(
        padding=1
    ),
}
# What a part begins with, or where it ends.
_PARTS: dict[str, SoftmaxLaw] = {
    "the maximum of each part begins at 0 and its sum at 1": SoftmaxLaw(
        first_max=0.0, first_sum=1.0
    ),
    "each part lacks its first key": SoftmaxLaw(start=1),
    "each part lacks its last key": SoftmaxLaw(stop=-1),
    "the first key of each part also counts in the part before": SoftmaxLaw(stop=1),
    "each part goes on to the end of the sequence": SoftmaxLaw(stop=ALL_KEYS),
    "each part begins at the first key": SoftmaxLaw(start=-ALL_KEYS),
}
# What a merge does wrongly.
_MERGES: dict[str, SoftmaxLaw] = {
    "exp2 is used instead of exp to rescale the sums of the parts": SoftmaxLaw(merge_sum=_LN_2),
    "exp2 is used instead of exp to rescale the outputs of the parts": SoftmaxLaw(
        merge_output=_LN_2
    ),
    "exp2 is used instead of exp to rescale the parts": SoftmaxLaw(
        merge_sum=_LN_2, merge_output=_LN_2
    ),
    "the exponents of the factors of the parts are multiplied by log2(e)": SoftmaxLaw(
        merge_new=1 / _LN_2, merge_sum=1 / _LN_2, merge_output=1 / _LN_2
    ),
    "the maxima of the parts lack the softmax scale": SoftmaxLaw(unscaled=True),
    "the sums of the parts are not rescaled": SoftmaxLaw(merge_sum=0.0),
    "the outputs of the parts are not rescaled": SoftmaxLaw(merge_output=0.0),
    "the parts are not rescaled": SoftmaxLaw(merge_sum=0.0, merge_output=0.0),
    "the parts are rescaled with the opposite sign": SoftmaxLaw(merge_sum=-1.0, merge_output=-1.0),
    "the first part is missing": SoftmaxLaw(left_out="first"),
    "the last part is missing": SoftmaxLaw(left_out="last"),
    "the first part is missing in the sum": SoftmaxLaw(left_out="first", in_output=False),
    "the first part is missing in the output": SoftmaxLaw(left_out="first", in_sum=False),
    "the last part is missing in the sum": SoftmaxLaw(left_out="last", in_output=False),
    "the last part is missing in the output": SoftmaxLaw(left_out="last", in_sum=False),
}
_AT_ONCE: dict[str, SoftmaxLaw] = {
    "each part stores its log-sum-exp in place of its maximum": SoftmaxLaw(max_plus_log=1.0),
    "the sinks count in each part": SoftmaxLaw(all_sinks=True),
}
_RUNNING: dict[str, SoftmaxLaw] = {
    "exp2 is used instead of exp in the weight of the part that is added": SoftmaxLaw(
        merge_new=_LN_2
    ),
    "exp2 is used instead of exp in all weights of the parts": SoftmaxLaw(
        merge_new=_LN_2, merge_sum=_LN_2, merge_output=_LN_2
    ),
    "the part that is added has the weight 1": SoftmaxLaw(merge_new=0.0),
    "the outputs of the parts are not divided by their sums": SoftmaxLaw(divides=False),
    "the log-sum-exps of the parts lack the logarithm of the sum": SoftmaxLaw(log_of_sum=0.0),
    "the log-sum-exps of the parts subtract the logarithm of the sum": SoftmaxLaw(log_of_sum=-1.0),
    "the log-sum-exps of the parts have the logarithm of the sum to base 2": SoftmaxLaw(
        log_of_sum=1.0 / _LN_2
    ),
    **{
        text.format("part", "parts"): SoftmaxLaw(merged_sum=of_sum, merged_output=of_output)
        for text, (of_sum, of_output) in _SCALED_INSTEAD.items()
    },
}


def softmax_defects(problem: Problem) -> list[Defect]:
    """Return the rules about the softmax that a call allows, each as a defect."""
    if problem.call.spec.merges or not problem.call.visibility.is_plain:
        return []
    return [
        Defect(
            family=SOFTMAX_FAMILY,
            name=text,
            text=text,
            compute=_computed(law, division),
            is_shown=partial(law.is_shown, division),
        )
        for division in divisions(problem)
        for text, law in _rules(division)
        if problem.call.sinks is not None or not law.all_sinks
    ]


def _rules(division: Division) -> Iterator[tuple[str, SoftmaxLaw]]:
    """Yield the laws of a division, each with its text."""
    for loop, where in LOOPS.items():
        if loop is None or division.has_loops:
            for text, law in _STEPS.items():
                if division.repeats and not law.is_of_every_tile:
                    continue
                yield f"with {division.text}, {where}{text}", dataclasses.replace(law, loop=loop)
    if division.text_of_parts:
        laws = _PARTS | _MERGES | (_RUNNING if division.merge == "running" else _AT_ONCE)
        for text, law in laws.items():
            yield f"with {division.text_of_parts}, {text}", law


def _computed(law: SoftmaxLaw, division: Division) -> Compute:
    """Return the ``compute`` of a law."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        inputs, parts = problem.attention_inputs(row_slice), division.parts(problem, row_slice.seq)
        stops, is_empty = None, torch.zeros(len(row_slice.tokens), dtype=torch.bool)
        added = torch.zeros(len(row_slice.tokens), len(row_slice.heads), 1, dtype=torch.float64)
        if division.visited is not None and law.is_of_every_tile:
            stops = division.visited(problem, row_slice).stop
            parts = with_tiles_to(parts, int(stops.max()))

        def weigh(scores: torch.Tensor) -> torch.Tensor:
            found = law.weights(scores, parts, division.merge, inputs.sinks, stops, inputs.sm_scale)
            is_empty.copy_((found == 0).all(-1).all(0))
            if law.output_is_one:
                added.copy_(found[..., -1:].transpose(0, 1))
            return found[..., : scores.shape[-1]]

        predicted = problem.predict(dataclasses.replace(inputs, weigh=weigh))
        if law.output_is_one:
            error = 2 * inputs.rounding.unit * added.abs()
            predicted = dataclasses.replace(
                predicted, output=predicted.output + added, bound=predicted.bound + error
            )
        if not bool(is_empty.any()):
            return predicted
        # such a row is 0, or the quotient of 0 and 0
        return dataclasses.replace(predicted, sees_nothing=is_empty)

    return compute
