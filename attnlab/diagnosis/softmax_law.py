"""SoftmaxLaw: a running softmax, and a merge of its parts, in which one step is wrong.

A tile with maximum b after one with maximum a multiplies the sum and the accumulator by exp(a - b), and adds
exp(score - b). A law changes these exponents, what is there before the first tile, or the merge of the parts.
All weights are linear in the values, so a law gives the weight of each key.
"""

from dataclasses import dataclass

import torch

from attnlab.diagnosis.softmax_divisions import Parts

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
      exponents of the weights, and of both rescalings. ``sum_is_one``, ``output_is_one``: the sum or the
      accumulator of earlier tiles counts as 1. ``added_sum``: the factor of a tile's sum when it is added.
    - ``divides``: whether the output of a part is divided by its sum. ``log_of_sum``: the factor of the
      logarithm of a part's sum in its log-sum-exp, of a running merge.
    - ``padding``: the slots of a tile after its last key count with score 0 and value 0; at most so many.
    - ``merge_sum``, ``merge_output``: factors of the exponents in the merge; ``merge_new``: in a running
      merge, that of the part that is added.
    - ``left_out``: parts that the merge leaves out, "first" or "last"; ``in_sum``, ``in_output``: of what.
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
    sum_is_one: bool = False
    output_is_one: bool = False
    added_sum: float = 1.0
    divides: bool = True
    log_of_sum: float = 1.0
    padding: int = 0
    merge_sum: float = 1.0
    merge_output: float = 1.0
    merge_new: float = 1.0
    left_out: str = ""
    in_sum: bool = True
    in_output: bool = True
    start: int = 0
    stop: int = 0

    @property
    def is_of_every_tile(self) -> bool:
        """Answer whether a tile without a key that a row sees changes the row's results."""
        changed = (self.keep_sum, self.keep_output, self.sum_minus, self.output_minus)
        is_one = self.sum_is_one or self.output_is_one
        return changed != (True, True, 1.0, 1.0) or is_one

    def weights(
        self,
        scores: torch.Tensor,
        parts: Parts,
        merge: str,
        sinks: torch.Tensor | None,
        stops: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weights of the keys, [heads, rows, keys], from their scores; ``sinks``: [heads].

        ``stops``: [rows, 1], the slot from which on no tile of a row begins, or None for no limit. All
        weights of a row are 0 if all of its tiles are lost. With ``output_is_one``, one more column, at the
        end, holds what is added to each element of the output.
        """
        found = [
            _Part.of(self, scores, tiles, sinks if i == 0 else None, stops)
            for i, tiles in enumerate(self._moved(parts, scores.shape[-1]))
        ]
        if merge == "running":
            return self._merged_one_by_one(found)
        return self._merged_at_once(found)

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

    def _merged_at_once(self, parts: "list[_Part]") -> torch.Tensor:
        highest = torch.stack([part.maximum for part in parts]).amax(0)
        output, total = torch.zeros_like(parts[0].weights), torch.zeros_like(highest)
        for i, part in enumerate(parts):
            in_sum, in_output = self._shares(i, len(parts))
            total = total + in_sum * part.total * _exp(part.maximum - highest, self.merge_sum)
            scale = _exp(part.maximum - highest, self.merge_output)
            output = output + in_output * part.weights * scale
        return _quotient(output, total) if self.divides else output

    def _merged_one_by_one(self, parts: "list[_Part]") -> torch.Tensor:
        output, total = torch.zeros_like(parts[0].weights), torch.zeros_like(parts[0].total)
        highest = torch.full_like(total, _LOWEST)
        for i, part in enumerate(parts):
            in_sum, in_output = self._shares(i, len(parts))
            log_sum = part.maximum + self.log_of_sum * part.total.clamp(min=1e-300).log()
            higher = torch.maximum(highest, log_sum)
            new = _exp(log_sum - higher, self.merge_new)
            total = total * _exp(highest - higher, self.merge_sum) + in_sum * new
            output = output * _exp(highest - higher, self.merge_output)
            divisor = part.total.clamp(min=1e-300) if self.divides else 1.0
            output = output + in_output * new * part.weights / divisor
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
        exps = _exp(scores - step.weight_minus * higher, step.weight)
        before = torch.ones_like(self.total) if step.sum_is_one else self.total
        total = before * _exp(self.maximum - step.sum_minus * higher, step.rescale_sum)
        total = total * step.keep_sum + step.added_sum * exps.sum(-1, keepdim=True)
        if slots:
            total = total + slots * _exp(-step.weight_minus * higher, step.weight)
        scale = _exp(self.maximum - step.output_minus * higher, step.rescale_output)
        earlier = self.weights
        if step.output_is_one:
            earlier = torch.zeros_like(earlier)
            earlier[..., -1] = 1.0
        weights = earlier * (scale * step.keep_output)
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


def _exp(difference: torch.Tensor, factor: float) -> torch.Tensor:
    """Return exp(factor × difference); 1 for factor 0."""
    return (difference * factor).exp() if factor else torch.ones_like(difference)


_RIGHT = SoftmaxLaw()  # of the tiles of other loops
