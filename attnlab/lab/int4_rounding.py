"""How far attention over an INT4 cache may be from exact attention on the stored bytes.

The terms are those of :mod:`attnlab.lab.rounding` and these. Let R be the rotation of size b
(:mod:`attnlab.tensors.int4`), d the head size, n the longest sequence, r the largest stored number times its
scale, 15·scale, of a key or a value.

- Rotations. On a GPU they take and give bfloat16, with half spacing e = 2⁻⁹; under the interpreter they add
  in float32, and e = b·2⁻²⁴. R enlarges norms by √b. So the rotated query is off by at most
  (2·e + u)·√b·|q|, and a score by (2·e + u)·|q|·|k|·scale.
- Sums of a score. The kernel multiplies the numbers 0 … 15 and subtracts the zero point times the sum of the
  query. Each sum is off by (d + 8)·2⁻²⁴ of its magnitudes, which are at most √(d·b)·|q|·r. Together, divided
  by b: (d + 8)·2⁻²³·√(d/b)·|q|·r·scale.
- Weights stay float32; a GPU rounds them to TF32. f is 2⁻¹⁰ there, else 2⁻²³. The numbers 0 … 15 are
  multiplied before the zero point is subtracted. Rotated back, the error of a weight is that of attention
  over the values, and f times the zero point and the scale in the first element of each b: f·A and f·Σ w·r,
  likely LIKELY·f·√(Σ w²·r²) in place of the second.
- The rotated output is off by n·2⁻²³·Σ w·r, and rounded to the query's dtype and to bfloat16:
  (u + e)·|õ|. Each element of the output is the sum of b rotated ones, divided by b, so it is off by the mean
  of their errors, and by b·2⁻²⁴ of the mean magnitude. It is rounded twice more: (u + e)·|o| + t.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch

from attnlab.lab.rounding import LIKELY, Rounding
from attnlab.tensors.int4 import rotate, rotation_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Rounding:
    """What the kernels of a call round in addition to ``rounding``.

    ``rotation``: e of a rotation of size 1; ``grows``: whether e is that times b. ``weight``: f.
    """

    rounding: Rounding
    rotation: float
    grows: bool
    weight: float

    @classmethod
    def of(cls, rounding: Rounding, is_native: bool) -> "Int4Rounding":
        """Return what is rounded on a GPU, or under Triton's interpreter."""
        if is_native:
            return cls(rounding=rounding, rotation=2.0**-9, grows=False, weight=2.0**-10)
        return cls(rounding=rounding, rotation=2.0**-24, grows=True, weight=2.0**-23)

    def score_error(
        self, query: float, key: float, key_range: float, head_size: int, scale: float
    ) -> float:
        """Return by how much a score may be off in addition to :meth:`Rounding.score_error`.

        ``query``, ``key``: the largest norms; ``key_range``: the largest r of a key.
        """
        size = rotation_size(head_size)
        rotations = (2 * self._rotation(size) + self.rounding.unit) * key
        sums = (head_size + 8) * 2.0**-23 * math.sqrt(head_size / size) * key_range
        return (rotations + sums) * query * abs(scale)

    def bound(
        self,
        weights: torch.Tensor,
        value: torch.Tensor,
        value_range: torch.Tensor,
        score_error: float,
    ) -> torch.Tensor:
        """Return the bound of each output element, [heads, rows, head_size].

        ``weights``: [heads, rows, keys]; ``value``: [heads, keys, head_size] as the reference has them, not
        rotated; ``value_range``: [heads, keys], r of each value.
        """
        size, keys = rotation_size(value.shape[-1]), value.shape[1]
        output, rotated = weights @ value, (weights @ rotate(value)).abs()
        exact = dataclasses.replace(self.rounding, unit=self.weight, terms=1, parts=0, keys=False)
        found = exact.bound(weights, value, output, score_error)
        whole = weights @ value_range[..., None]
        likely = LIKELY * (weights.square() @ value_range.square()[..., None]).sqrt()
        found = found + self.weight * torch.minimum(whole, likely) + keys * 2.0**-23 * whole
        mean = rotated.unflatten(-1, (-1, size)).mean(-1, keepdim=True)
        mean = mean.expand(*mean.shape[:-1], size).flatten(-2)
        last: torch.Tensor = self.output_error(size) * mean
        return found + self._rotation(size) * output.abs() + last

    def output_error(self, size: int) -> float:
        """Return by how much an output may be off, over the mean magnitude of the rotated ones.

        ``size``: of the rotation.
        """
        return self.rounding.unit + self._rotation(size) + size * 2.0**-24

    def _rotation(self, size: int) -> float:
        """Return e of a rotation."""
        return self.rotation * (size if self.grows else 1)
