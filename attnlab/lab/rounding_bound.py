"""The rounding bound of every output element of a Case: the default tolerance of a comparison.

:mod:`attnlab.lab.rounding` derives the bound. The worst case is computed for all elements. The likely case is
often far smaller, but it needs all weights of a row at once. It is computed for every row of the sequences
that are cheapest, up to a limit of work, and for a few rows of the others.
"""

import torch

from attnlab.case.case import Case
from attnlab.case.ops import PREFILL
from attnlab.contracts.target import Target
from attnlab.lab.reference import attend, stored_tokens
from attnlab.lab.rounding import Rounding
from attnlab.tensors.batch import Batch
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_visibility import visibility_of
from attnlab.tensors.visibility import SequenceMask

_EXACT_ELEMENTS = 1 << 22  # up to this size of an output, the bound is computed in float64
_SHARP_WORK = (
    1 << 28
)  # products of a weight and a value, over the sequences with a likely case in every row
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
            Rounding.of(call, Target.of(case), _serving(kernels, query_len)),
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


def _serving(kernels: tuple[str, ...], query_len: int) -> tuple[str, ...]:
    """Return the kernels that compute a sequence with ``query_len`` new tokens."""
    if PREFILL in kernels and (query_len > 1 or kernels == (PREFILL,)):
        return (PREFILL,)
    return tuple(name for name in kernels if name != PREFILL)


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
