"""The oracle: attention in float32 or float64 on the stored bytes.

For every query row only the visible keys are multiplied, in tiles of rows: the work is the causal
triangle, not the square, and the scores of a tile stay in the processor's cache. The oracle shares no code
with the kernel models except the rules of masks (:mod:`attnlab.tensors.visibility`); tests compare it with
torch's ``scaled_dot_product_attention`` in float64.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlab.case.case import Case
from attnlab.kernels.backend import counted
from attnlab.tensors.batch import Batch
from attnlab.tensors.case_visibility import visibility_of
from attnlab.tensors.formats import store, written_format
from attnlab.tensors.visibility import SequenceMask, Visibility

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
            return _masked(self.mask, like, position, rows, begin, end)
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


def _masked(
    mask: SequenceMask, like: torch.Tensor, position: int, rows: int, begin: int, end: int
) -> torch.Tensor:
    """Return the bias of visible keys and -inf for hidden ones under any mask, [rows, end - begin]."""
    positions = torch.arange(position, position + rows, device=like.device)
    bias = mask.bias(positions, begin, end)
    if bias is None:
        bias = torch.zeros(rows, end - begin, device=like.device)
    hidden = ~mask.visible(positions, begin, end)
    return bias.to(like.dtype).masked_fill_(hidden, float("-inf"))


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


def visible_flops(case: Case) -> int:
    """Return the floating-point operations of the two matrix products, counting visible keys only."""
    pairs, visibility = 0, visibility_of(case)
    lens = zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)
    for seq, (query_len, ctx_len) in enumerate(lens):
        seq_len = ctx_len + query_len
        if visibility.is_plain:
            window = case.sliding_window or seq_len
            pairs += sum(min(ctx_len + i + 1, window) for i in range(query_len))
        else:
            rows = torch.arange(ctx_len, seq_len)
            pairs += int(visibility.of_seq(seq, ctx_len, seq_len).visible(rows).sum())
    return pairs * case.num_heads * case.head_size * 2 * 2
