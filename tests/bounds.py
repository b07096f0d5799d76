"""How far a kernel's output may be from exact attention, derived from what the kernel rounds.

Exact is attention in float64 on the stored bytes. Let u be half the spacing of numbers at 1 in the
query's dtype, w the exact weights of a row, A = Σ w·|v| its attention over the values' magnitudes, n
the longest sequence. Then each output element is off by at most the sum of

- weights rounded to the dtype, each by u of itself: u·A; subnormal ones by a fixed step t: n·t·max|v|;
- values of an FP8 cache, times their scale, rounded to the dtype (Triton's kernels alone): u·A;
- partial outputs rounded to the dtype (ROCm): once for a partition, u·A, or, up to 4 query heads a KV
  head on CDNA, once for each warp of 64 tokens and once for each of three additions: 4·u·A, or
  7·u·A in bfloat16, whose additions cut off what does not fit;
- the output rounded to the dtype: u·A + t;
- sums of float32: n·2⁻²³·A, and the 1e-6 that ROCm adds to a sum, which is at least 1, twice: 2e-6·A;
  the CPU's op has none of that, but its exp is a polynomial of degree 5, off by at most 1e-7 where it
  is used, of an argument reduced by a multiple, up to 126, of ln 2 rounded to float32, 2e-9 off: 4e-7,
  with a rounding or two 5e-7, in a weight and in the sum: 1e-6·A;
- scores off by at most s, which scales each weight by at most exp(2·s): (exp(2·s) − 1)·A. A score is
  head_size products of float32, off by at most (head_size + 4)·2⁻²⁴ times |q|·|k|·scale and the
  ALiBi bias; keys of an FP8 cache that are rounded to the dtype add u·|q|·|k|·scale.

A is computed by the reference itself, on the magnitudes of the values.
"""

import dataclasses
import math

import torch

from attnlab.batch import Batch
from attnlab.case import Case
from attnlab.dispatch import CPU_ATTENTION, ROCM_DECODE, decide
from attnlab.formats import FORMATS
from attnlab.reference import reference


def bound(case: Case, batch: Batch) -> torch.Tensor:
    """Return the largest error that each output element may have, of the output's shape, float64."""
    info = torch.finfo(FORMATS[case.dtype].dtype)
    u, step = info.eps / 2, info.smallest_normal * info.eps
    magnitudes = dataclasses.replace(batch, value=batch.value.abs())
    mixed = reference(case.replace(oracle="float64"), magnitudes)
    longest = max(case.lengths.seq_lens)
    rows = (
        roundings(case) * u
        + longest * 2.0**-23
        + 2e-6
        + math.expm1(2 * score_error(case, batch, u))
    )
    return mixed * rows + step * (1 + longest * float(batch.value.abs().max()))


def roundings(case: Case) -> int:
    """Return how often a value on its way to the output is rounded to the query's dtype."""
    if case.op == CPU_ATTENTION:
        return 1  # the output; weights stay float32
    always = 2  # weights and output
    if decide(case).decode != ROCM_DECODE:
        return always + int(case.is_fp8)
    by_warp = case.machine.family == "cdna" and case.num_queries_per_kv <= 4
    partial = (7 if case.dtype == "bfloat16" else 4) if by_warp else 1
    return always + max(partial, int(case.is_fp8))  # prefill rows are Triton's


def score_error(case: Case, batch: Batch, u: float) -> float:
    """Return by how much a score may be off."""
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    size = (
        float(batch.query.double().norm(dim=2).max() * batch.key.double().norm(dim=2).max()) * scale
    )
    size *= 1 + 2.0**-3 * case.is_fp8  # a stored key may be larger than the key by an FP8 rounding
    bias = 0.0
    if batch.alibi_slopes is not None:
        bias = float(batch.alibi_slopes.max()) * max(case.lengths.seq_lens)
    return (case.head_size + 4) * 2.0**-24 * (size + bias) + (u * size if case.is_fp8 else 0.0)
