"""The logarithms of sums that two ops give beside their output, held to float64; and rows of padding.

A later merge weighs an output by its logarithm: one that is wrong, or NaN, spoils what is right so far.
"""

import torch

from attnlab.case.case import Case
from attnlab.case.ops import MERGE
from attnlab.contracts.dispatch import Target, decide
from attnlab.lab.lab import Lab
from attnlab.lab.reference import seen
from attnlab.lab.rounding import Rounding


def wrong_sums(lab: Lab, case: Case, lse: torch.Tensor) -> str:
    """Return in words which rows of ``lse`` [rows, num_heads] are off by more than rounding; or "".

    The bound: scores may be off by s, so the logarithm by s; n products and sums of float32 by
    (n + 8)·2⁻²³; the result, and its two parts where it was merged, are rounded, 3·2⁻²⁴ of it.
    """
    expected, bound = expected_sums(lab, case)
    off = (lse[: len(expected)].double() - expected).abs().nan_to_num(torch.inf, torch.inf)
    rows = torch.nonzero((off > bound).any(1)).flatten()
    if not len(rows):
        return ""
    row = int(rows[0])
    head = int((off[row] > bound[row]).nonzero()[0])
    return (
        f"the logarithm of the sum of row {row}, head {head} is {float(lse[row, head]):.6g}, "
        f"not {float(expected[row, head]):.6g} (and {len(rows) - 1} more rows)"
    )


def wrong_padding(case: Case, padded: torch.Tensor, lse: torch.Tensor | None) -> str:
    """Return in words what is wrong with the rows that pad a merge, whose parts are both empty; or "".

    Such a row is 0 with a logarithm of -inf, so that a further merge leaves it out: so vLLM's CUDA
    kernel since 0.11.1 (csrc/attention/merge_attn_states.cu) and its Triton kernel since 0.27.
    """
    if case.op != MERGE:
        return ""
    if not bool((padded == 0).all()):
        at = int((padded != 0).flatten(1).any(1).nonzero()[0])
        return f"a row whose parts are both empty is {float(padded[at].flatten()[0]):.3g}, not 0"
    if lse is not None and not bool((lse[-len(padded) :] == -torch.inf).all()):
        return "a row whose parts are both empty has a logarithm of the sum that is not -inf"
    return ""


def expected_sums(lab: Lab, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithms and by how much they may be off, each [num_tokens, num_heads] float64."""
    batch = lab.batch(case)
    rounding = Rounding.of(lab.call(case), Target.of(case), decide(case).kernels)
    group, scale = case.num_queries_per_kv, case.sm_scale or case.head_size**-0.5
    logs, bounds = list[torch.Tensor](), list[torch.Tensor]()
    rows, tokens = batch.token_start_loc, batch.kv_start_loc
    cached_lens = batch.lengths.cached_lens(case.spec.fill_read)
    for i, (ctx_len, cached) in enumerate(zip(batch.lengths.ctx_lens, cached_lens, strict=True)):
        query = batch.query[rows[i] : rows[i + 1]].double()
        key = seen(case, batch.key[tokens[i] : tokens[i + 1]], cached, case.k_scale).double()
        scores = torch.einsum("qhd,khd->qhk", query, key.repeat_interleave(group, 1)) * scale
        if case.softcap is not None:
            scores = (scores / case.softcap).tanh() * case.softcap
        away = torch.arange(len(key)) - torch.arange(ctx_len, len(key))[:, None]
        if batch.alibi_slopes is not None:
            scores += batch.alibi_slopes.double()[None, :, None] * away[:, None]
        hidden = (away > 0) | (away <= -(case.sliding_window or len(key)))
        log = scores.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
        long_query, long_key = (float(t.norm(dim=2).max()) for t in (query, key))
        slope = 0.0 if batch.alibi_slopes is None else float(batch.alibi_slopes.max())
        cap = case.softcap or 0.0
        error = rounding.score_error(
            long_query, long_key, case.head_size, scale, slope * len(key), cap
        )
        logs.append(log)
        bounds.append(error + (len(key) + 8) * 2.0**-23 + 3 * 2.0**-24 * log.abs())
    return torch.cat(logs), torch.cat(bounds)
