"""How far a kernel's output may be from exact attention, derived from what the kernel rounds.

Exact is attention in float64 on the stored bytes. Let u be half the spacing of numbers at 1 in the
query's dtype, w the exact weights of a row (which a sink leaves less than 1), o its output, A = Σ w·|v|
its attention over the values' magnitudes, n the longest sequence. Then each output element is off by at
most the sum of

- weights rounded to the dtype, each by u of itself: u·A; subnormal ones by a fixed step t: n·t·max|v|;
- values of an FP8 cache, times their scale, rounded to the dtype (Triton's kernels alone): u·A;
- partial outputs rounded to the dtype (ROCm): once for a partition, u·A, or, up to 4 query heads a KV
  head on CDNA, once for each warp of 64 tokens and once for each of three additions: 4·u·A, or
  7·u·A in bfloat16, whose additions cut off what does not fit; merge_attn_states rounds its two parts: u·A;
- the output rounded to the dtype: u·A + t;
- sums of float32: n·2⁻²³·A, and the 1e-6 that ROCm adds to a sum, which is at least 1, twice: 2e-6·A;
  the CPU's op has none of that, but its exp is a polynomial of degree 5, off by at most 1e-7 where it
  is used, of an argument reduced by a multiple, up to 126, of ln 2 rounded to float32, 2e-9 off: 4e-7,
  with a rounding or two 5e-7, in a weight and in the sum: 1e-6·A;
- scores off by at most s, which scales each weight by at most exp(2·s): (exp(2·s) − 1)·A. A score is
  head_size products of float32, off by at most (head_size + 4)·2⁻²⁴ times |q|·|k|·scale and the
  ALiBi bias; keys of an FP8 cache that are rounded to the dtype add u·|q|·|k|·scale. A soft cap c, whose
  slope is at most 1, adds its own c·2⁻²⁰: tanh from an exp that is off by 5e-7 of itself at most, which
  moves it by 5e-7 · (1 − tanh²), and four roundings. decode_attention_fwd multiplies by hand where each
  query head has keys of its own: its products, and the levels of their sum, which tl.sum leaves in their
  dtype, are rounded to it: (1 + log2 head_size)·u·|q|·|k|·scale more.

That is the worst case: every rounding in one direction. Where values cancel, o is far below A and so is
the error. If the errors of different keys are independent with mean 0 (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019), Hoeffding's inequality bounds Σ η·w·v, |η| ≤ e, by
λ·e·√(Σ w²·v²) but for a chance of 2·exp(−λ²/2); LIKELY is the λ of a chance of 1e-18 an element. So the
likely bound has

- (2 roundings or 1) and scores: LIKELY·e·(√(Σ w²·v²) + √(Σ w²)·|o|), e = u or 2·u, plus exp(2·s) − 1,
  the second term for the sum that they are divided by;
- the output: u·|o| + t; partial outputs: u, 4·u or 7·u of the sum of the warps' own |Σ w·v|;
- sums of float32: LIKELY·√n·2⁻²³·A, the 2e-6 as above, subnormal weights LIKELY·√n·t·max|v|.

The smaller of the two bounds holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.case.ops import CPU_ATTENTION, DECODE_FWD, MERGE
from attnlab.contracts.dispatch import ROCM_DECODE, Target
from attnlab.tensors.call import KernelCall

LIKELY = math.sqrt(2 * math.log(2e18))
WARP = 64  # tokens that ROCm's kernel sums before it rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What the kernels of a call round, and how often.

    - ``unit``: half the spacing at 1 in the query's dtype; ``step``: its smallest subnormal number.
    - ``terms``: how often each key's share is rounded to that dtype: its weight, and its value where
      that was decoded from FP8; ``parts``: how often partial outputs are.
    - ``keys``: whether keys are rounded to it too, after they were decoded from FP8; ``products``: how
      often the products of query and key are.
    """

    unit: float
    step: float
    terms: int
    parts: int
    keys: bool
    products: int = 0

    @property
    def times(self) -> int:
        """Return how often a value on its way to the output is rounded, the output included."""
        return 1 + self.terms + self.parts

    @classmethod
    def of(cls, call: KernelCall, target: Target, kernels: Sequence[str]) -> "Rounding":
        """Return what ``kernels`` round of a call, the most that any of them does."""
        info = torch.finfo(call.query.dtype)
        is_fp8 = call.kv_cache_dtype != "auto"
        parts, terms = 0, 1 + int(is_fp8)
        if ROCM_DECODE in kernels:  # it multiplies v_scale after the sum, in float32
            by_warp = target.platform.family == "cdna" and call.num_queries_per_kv <= 4
            warps = 7 if call.query.dtype == torch.bfloat16 else 4
            parts = warps if by_warp else 1
            terms = 1 if len(kernels) == 1 else terms
        if MERGE in kernels:
            parts = 1
        if kernels == (CPU_ATTENTION,):
            terms = 0  # weights and values stay float32
        by_hand = DECODE_FWD in kernels and call.num_queries_per_kv == 1
        products = 1 + (call.query.shape[2] - 1).bit_length() if by_hand else 0
        step = float(info.smallest_normal * info.eps)
        unit = float(info.eps) / 2
        return cls(unit=unit, step=step, terms=terms, parts=parts, keys=is_fp8, products=products)

    def score_error(
        self,
        query: float,
        key: float,
        head_size: int,
        scale: float,
        bias: float,
        softcap: float = 0.0,
    ) -> float:
        """Return by how much a score may be off, from the largest norms of a query and a key, the
        largest ALiBi bias and the soft cap; 0 is none."""
        size = query * key * abs(scale)
        error = (head_size + 4) * 2.0**-24 * (size + bias) + 2.0**-20 * softcap
        return error + self.unit * size * (self.keys + self.products)

    def relative(self, length: int, score_error: float) -> float:
        """Return the share of A that an output element may be off by; infinity where scores are so
        large that their own error says nothing of the weights."""
        if score_error > 20.0:
            return math.inf
        return self.times * self.unit + length * 2.0**-23 + 2e-6 + math.expm1(2 * score_error)

    def fixed(self, length: int, largest: float) -> float:
        """Return the part of the bound that is no share of A: subnormal weights and outputs."""
        return self.step * (1 + length * largest)

    def bound(
        self, weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor, score_error: float
    ) -> torch.Tensor:
        """Return the most that each output element may be off by, the worst or the likely case,
        whichever is less.

        ``weights``: [heads, rows, keys]; ``value``: [heads, keys, head_size], finite; ``output`` and
        the result: [heads, rows, head_size].
        """
        length, size = value.shape[1], value.abs()
        largest = float(size.max()) if size.numel() else 0.0
        magnitude = weights @ size
        worst = magnitude * self.relative(length, score_error) + self.fixed(length, largest)
        if math.isinf(self.relative(length, score_error)):
            return worst
        each = self.terms * self.unit + math.expm1(2 * score_error)
        squares = weights.square()
        spread = (squares @ value.square()).sqrt()
        spread = spread + squares.sum(-1, keepdim=True).sqrt() * output.abs()
        likely = LIKELY * each * spread + self.unit * output.abs() + self.step
        likely += (LIKELY * length**0.5 * 2.0**-23 + 2e-6) * magnitude
        likely += LIKELY * length**0.5 * self.step * largest
        if self.parts:
            likely += self.parts * self.unit * _by_warp(weights, value)
        return torch.minimum(worst, likely)


def _by_warp(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the sum over warps of the magnitude of each one's share of the output."""
    total = torch.zeros(*weights.shape[:2], value.shape[2], dtype=value.dtype)
    for first in range(0, value.shape[1], WARP):
        some = slice(first, first + WARP)
        total += (weights[:, :, some] @ value[:, some]).abs()
    return total
