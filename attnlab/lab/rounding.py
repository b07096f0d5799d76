"""How far a kernel's output may be from exact attention, derived from what the kernel rounds.

Exact means attention in float64 on the stored bytes. Let u be half the spacing of numbers at 1 in the
query's dtype, t its smallest subnormal number, w the exact weights of a row (with a sink their sum is below
1), o its output, A = Σ w·|v| its attention over the magnitudes of the values, n the longest sequence.

Worst case. Each output element is off by at most the sum of:

- weights, rounded to the dtype: u·A; subnormal weights by a fixed step: n·t·max|v|;
- values of an FP8 cache, multiplied by their scale and rounded to the dtype (Triton's kernels only): u·A;
- partial outputs, rounded to the dtype. ROCm rounds once per partition: u·A. With up to 4 query heads per
  KV head on CDNA it rounds once per warp of 64 tokens and once for each of three additions: 4·u·A, or
  7·u·A in bfloat16, whose additions truncate. merge_attn_states rounds its two parts: u·A;
- the output, rounded to the dtype: u·A + t;
- sums in float32: n·2⁻²³·A. ROCm adds 1e-6 twice to a sum, which is at least 1: 2e-6·A. The CPU op adds
  nothing, but its exp is a polynomial of degree 5 with a relative error of at most 1e-7. Its argument is
  reduced by a multiple, up to 126, of ln 2 in float32, which is off by 2e-9. With two roundings that is
  5e-7, once in a weight and once in the sum: 1e-6·A;
- scores, off by at most s. An error of s scales each weight by at most exp(2·s): (exp(2·s) − 1)·A. A score
  is a sum of head_size products in float32, off by at most (head_size + 4)·2⁻²⁴ times |q|·|k|·scale plus
  the ALiBi bias. Keys of an FP8 cache, rounded to the dtype, add u·|q|·|k|·scale. A soft cap c, whose slope
  is at most 1, adds c·2⁻²⁰: its tanh is computed from an exp with a relative error of 5e-7, which moves it
  by 5e-7·(1 − tanh²), and rounded four times. decode_attention_fwd with one query head per KV head multiplies
  without tl.dot: its products, and each level of tl.sum, which keeps their dtype, are rounded to it:
  (1 + log2 head_size)·u·|q|·|k|·scale more.

Likely case. In the worst case all roundings have one direction. If values cancel, o is far below A, and so
is the error. If the errors of different keys are independent with mean 0 (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019), Hoeffding's inequality bounds Σ η·w·v with |η| ≤ e by
λ·e·√(Σ w²·v²), except with probability 2·exp(−λ²/2). LIKELY is the λ for a probability of 1e-18 per element.
The likely bound is the sum of:

- weights, FP8 values and scores: LIKELY·e·(√(Σ w²·v²) + √(Σ w²)·|o|), where e is u or 2·u plus
  exp(2·s) − 1; the second term is for the sum by which the output is divided;
- the output: u·|o| + t; partial outputs: u, 4·u or 7·u times the sum of |Σ w·v| over the warps;
- sums in float32: LIKELY·√n·2⁻²³·A, and 2e-6·A as above; subnormal weights: LIKELY·√n·t·max|v|.

The smaller of the two bounds applies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.case.ops import CPU_ATTENTION, DECODE_FWD, MERGE
from attnlab.contracts.target import ROCM_DECODE, Target
from attnlab.tensors.call import KernelCall

LIKELY = math.sqrt(2 * math.log(2e18))
WARP = 64  # tokens that ROCm's kernel sums before it rounds the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What the kernels of a call round to the query's dtype, and how often.

    - ``unit``: half the spacing of the dtype at 1; ``step``: its smallest subnormal number.
    - ``terms``: roundings of each key's contribution: of its weight, and of its value if that was decoded
      from FP8.
    - ``parts``: roundings of partial outputs.
    - ``keys``: whether keys are rounded after they were decoded from FP8.
    - ``products``: roundings of the products of query and key.
    """

    unit: float
    step: float
    terms: int
    parts: int
    keys: bool
    products: int = 0

    @property
    def times(self) -> int:
        """Return how often a value is rounded on its way to the output, the output included."""
        return 1 + self.terms + self.parts

    @classmethod
    def of(cls, call: KernelCall, target: Target, kernels: Sequence[str]) -> "Rounding":
        """Return what ``kernels`` round in a call: for each field the most of any of them."""
        info = torch.finfo(call.query.dtype)
        is_fp8 = call.kv_cache_dtype != "auto"
        parts, terms = 0, 1 + int(is_fp8)
        if ROCM_DECODE in kernels:  # it multiplies by v_scale after the sum, in float32
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
        """Return by how much a score may be off.

        ``query`` and ``key`` are the largest norms of a query and a key, ``bias`` the largest ALiBi bias,
        ``softcap`` the cap, 0 for none.
        """
        size = query * key * abs(scale)
        error = (head_size + 4) * 2.0**-24 * (size + bias) + 2.0**-20 * softcap
        return error + self.unit * size * (self.keys + self.products)

    def relative(self, length: int, score_error: float) -> float:
        """Return the error of an output element as a fraction of A.

        It is infinite if the scores are so large that their error determines the weights.
        """
        if score_error > 20.0:
            return math.inf
        return self.times * self.unit + length * 2.0**-23 + 2e-6 + math.expm1(2 * score_error)

    def fixed(self, length: int, largest: float) -> float:
        """Return the absolute part of the bound: subnormal weights and outputs."""
        return self.step * (1 + length * largest)

    def bound(
        self, weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor, score_error: float
    ) -> torch.Tensor:
        """Return the bound of each output element: the smaller of the worst and the likely case.

        ``weights``: [heads, rows, keys]; ``value``: [heads, keys, head_size], finite; ``output`` and the
        result: [heads, rows, head_size].
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
    """Return the sum over warps of the magnitude of each warp's part of the output."""
    total = torch.zeros(*weights.shape[:2], value.shape[2], dtype=value.dtype)
    for first in range(0, value.shape[1], WARP):
        warp = slice(first, first + WARP)
        total += (weights[:, :, warp] @ value[:, warp]).abs()
    return total
