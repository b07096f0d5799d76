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

Queries in FP8 (unified_attention 0.33.0, FlashAttention 3). u and t are those of FP8 for weights. Keys and
values are multiplied as they are stored, and all scales after the sum, so neither is rounded. Weights are
multiplied by a power of two before they are rounded, 256 in e4m3fn and 128 in e4m3fnuz, so t is that much
smaller. The matrix units of NVIDIA GPUs add FP8 products with 14 bits (DeepSeek-V3 Technical Report, section
3.3.2, about compute capability 9.0; assumed of the others). There a sum of n products is off by n·2⁻¹³ times
the sum of magnitudes, likely by (LIKELY·√n + n/32)·2⁻¹³ times it, because it truncates once per 32 products.
Kernels that read no scale of the query round keys and values to FP8, too.

Outputs of another dtype, or divided by output_scale. u and t of the output are those of its dtype, t times
the scale. The op clamps to the finite range of FP8 before it rounds; clamping both sides makes no error
larger. With FP8, both bounds are multiplied by (1 + u) of the weights and of the output, for products of two
errors.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.case.ops import CPU_ATTENTION, DECODE_FWD, MERGE, UNIFIED
from attnlab.contracts.target import ROCM_DECODE, Target
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import Formats

LIKELY = math.sqrt(2 * math.log(2e18))
# By what unified_attention and FlashAttention 3 multiply a weight before they round it to FP8.
_WEIGHT_FACTOR = {
    torch.float8_e4m3fn: 256.0,
    torch.float8_e4m3fnuz: 128.0,
    torch.float8_e5m2: 128.0,
}
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
    - ``output_unit``, ``output_step``: unit and step of the output's dtype.
    - ``sums``: the rounding of a sum, for each product in it; ``chunk``: how many products are added before
      one truncation, or None where sums round to nearest.
    """

    unit: float
    step: float
    terms: int
    parts: int
    keys: bool
    products: int = 0
    output_unit: float
    output_step: float
    sums: float = 2.0**-23
    chunk: int | None = None

    @classmethod
    def of(
        cls,
        call: KernelCall,
        target: Target,
        kernels: Sequence[str],
        formats: Formats | None = None,
    ) -> "Rounding":
        """Return what ``kernels`` round in a call: for each field the most of any of them.

        ``formats``: of the call as it was recorded, if its tensors were converted.
        """
        formats = formats or Formats.of(call, target.platform.fp8_e4m3)
        info = torch.finfo(formats.query)
        output = torch.finfo(formats.output)
        is_fp8 = call.kv_cache_dtype != "auto"
        parts, terms = 0, 1 + int(is_fp8)
        if ROCM_DECODE in kernels:  # it multiplies by v_scale after the sum, in float32
            by_warp = target.platform.family == "cdna" and call.num_queries_per_kv <= 4
            warps = 7 if formats.query == torch.bfloat16 else 4
            parts = warps if by_warp else 1
            terms = 1 if len(kernels) == 1 else terms
        if MERGE in kernels:
            parts = 1
        if kernels == (CPU_ATTENTION,):
            terms = 0  # weights and values stay float32
        by_hand = DECODE_FWD in kernels and call.num_queries_per_kv == 1
        products = 1 + (call.query.shape[2] - 1).bit_length() if by_hand else 0
        rounding = cls(
            unit=float(info.eps) / 2,
            step=float(info.smallest_normal * info.eps),
            terms=terms,
            parts=parts,
            keys=is_fp8,
            products=products,
            output_unit=float(output.eps) / 2,
            output_step=float(output.smallest_normal * output.eps) * formats.output_scale,
        )
        return rounding._of_fp8_query(target, kernels, formats)

    def _of_fp8_query(self, target: Target, kernels: Sequence[str], formats: Formats) -> "Rounding":
        """Return the rounding of a call with its query in FP8; itself for another query."""
        if not formats.has_fp8_query:
            return self
        found = self
        if tuple(kernels) == (UNIFIED,):
            found = dataclasses.replace(
                self, terms=1, keys=False, step=self.step / _WEIGHT_FACTOR[formats.query]
            )
        if target.platform.family == "cuda":
            found = dataclasses.replace(found, sums=2.0**-13, chunk=32)
        return found

    @property
    def growth(self) -> float:
        """Return by what factor products of two roundings enlarge the bound; below 1 % in 16 bits."""
        is_coarse = max(self.unit, self.output_unit) > 2.0**-8
        return (1 + self.unit) * (1 + self.output_unit) if is_coarse else 1.0

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
        error = (head_size + 4) * self.sums / 2 * (size + bias) + 2.0**-20 * softcap
        return error + self.unit * size * (self.keys + self.products)

    def relative(self, length: int, score_error: float) -> float:
        """Return the error of an output element as a fraction of A.

        It is infinite if the scores are so large that their error determines the weights.
        """
        if score_error > 20.0:
            return math.inf
        rounded = (self.terms + self.parts) * self.unit + self.output_unit
        first = rounded + length * self.sums + 2e-6 + math.expm1(2 * score_error)
        return first * self.growth

    def fixed(self, length: int, largest: float) -> float:
        """Return the absolute part of the bound: subnormal weights and outputs."""
        return self.output_step + self.step * length * largest

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
        relative, fixed = self.relative(length, score_error), self.fixed(length, largest)
        if math.isinf(relative):
            return magnitude * relative + fixed
        each = self.terms * self.unit + math.expm1(2 * score_error)
        biased = 0.0 if self.chunk is None else length / self.chunk
        squares, output = weights.square(), output.abs()
        # The sums are accumulated in place: a bound has as many elements as all keys' weights.
        likely = (squares @ size.square_()).sqrt_()
        likely.addcmul_(squares.sum(-1, keepdim=True).sqrt_(), output).mul_(LIKELY * each)
        likely.add_(output, alpha=self.output_unit)
        likely.add_(magnitude, alpha=(LIKELY * length**0.5 + biased) * self.sums + 2e-6).add_(
            self.output_step + LIKELY * length**0.5 * self.step * largest
        )
        if self.parts:
            likely.add_(_by_warp(weights, value), alpha=self.parts * self.unit)
        return torch.minimum(magnitude.mul_(relative).add_(fixed), likely.mul_(self.growth))


def _by_warp(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the sum over warps of the magnitude of each warp's part of the output."""
    total = torch.zeros(*weights.shape[:2], value.shape[2], dtype=value.dtype)
    for first in range(0, value.shape[1], WARP):
        warp = slice(first, first + WARP)
        total += (weights[:, :, warp] @ value[:, warp]).abs()
    return total
