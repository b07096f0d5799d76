"""How far a kernel's output may be from exact attention, derived from what the kernel rounds.

Exact is attention in float64 on the stored bytes. Let u be half the spacing of numbers at 1 in the
query's dtype, w the exact weights of a row, A = Σ w·|v| its attention over the values' magnitudes, n
the longest sequence. Then each output element is off by at most the sum of

- weights rounded to the dtype, each by u of itself: u·A; subnormal ones by a fixed step t: n·t·max|v|;
- values of an FP8 cache, times their scale, rounded to the dtype (Triton's kernels alone): u·A;
- partial outputs rounded to the dtype (ROCm): once for a partition, u·A, or, up to 4 query heads a KV
  head on CDNA, once for each warp of 64 tokens and once for each of three additions: 4·u·A;
- the output rounded to the dtype: u·A + t;
- sums of float32: n·2⁻²³·A, and the 1e-6 that ROCm adds to a sum, which is at least 1, twice: 2e-6·A;
- scores off by at most s, which scales each weight by at most exp(2·s): (exp(2·s) − 1)·A. A score is
  head_size products of float32, off by at most (head_size + 4)·2⁻²⁴ times |q|·|k|·scale and the
  ALiBi bias; keys of an FP8 cache that are rounded to the dtype add u·|q|·|k|·scale.

A is computed by whoever asks, on the magnitudes of the values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.call import KernelCall
from attnlab.dispatch import ROCM_DECODE, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What the kernels of a call round, and how often.

    - ``unit``: half the spacing at 1 in the query's dtype; ``step``: its smallest subnormal number.
    - ``times``: how often a value on its way to the output is rounded to that dtype.
    - ``keys``: whether keys are rounded to it too, after they were decoded from FP8.
    """

    unit: float
    step: float
    times: int
    keys: bool

    @classmethod
    def of(cls, call: KernelCall, setting: Setting, kernels: Sequence[str]) -> "Rounding":
        """Return what ``kernels`` round of a call, the most that any of them does."""
        info = torch.finfo(call.query.dtype)
        is_fp8 = call.kv_cache_dtype != "auto"
        times = 2 + int(is_fp8)  # weights, output, values that were decoded
        if ROCM_DECODE in kernels:
            by_warp = setting.platform.family == "cdna" and call.num_queries_per_kv <= 4
            times = 2 + max(4 if by_warp else 1, int(is_fp8))
        step = float(info.smallest_normal * info.eps)
        return cls(unit=float(info.eps) / 2, step=step, times=times, keys=is_fp8)

    def score_error(
        self, query: float, key: float, head_size: int, scale: float, bias: float
    ) -> float:
        """Return by how much a score may be off, from the largest norms of a query and a key and the
        largest ALiBi bias."""
        size = query * key * abs(scale)
        error = (head_size + 4) * 2.0**-24 * (size + bias)
        return error + (self.unit * size if self.keys else 0.0)

    def relative(self, length: int, score_error: float) -> float:
        """Return the share of A that an output element may be off by; infinity where scores are so
        large that their own error says nothing of the weights."""
        if score_error > 20.0:
            return math.inf
        return self.times * self.unit + length * 2.0**-23 + 2e-6 + math.expm1(2 * score_error)

    def fixed(self, length: int, largest: float) -> float:
        """Return the part of the bound that is no share of A: subnormal weights and outputs."""
        return self.step * (1 + length * largest)
