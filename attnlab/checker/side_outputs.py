"""Check what two ops return in addition to their output: the log-sum-exp, and the rows of padding.

A later merge weights an output by its LSE. A wrong LSE, or NaN in it, makes a correct output useless.
"""

import torch

from attnlab.case.case import Case
from attnlab.case.ops import MERGE
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.lab.lab import Lab
from attnlab.lab.reference import stored_tokens
from attnlab.lab.rounding import Rounding


def wrong_lse(lab: Lab, case: Case, lse: torch.Tensor) -> str:
    """Return which rows of ``lse`` [rows, num_heads] are off by more than rounding, in words; else ""."""
    expected, bound = expected_lse(lab, case)
    error = (lse[: len(expected)].double() - expected).abs().nan_to_num(torch.inf, torch.inf)
    rows = torch.nonzero((error > bound).any(1)).flatten()
    if not len(rows):
        return ""
    row = int(rows[0])
    head = int((error[row] > bound[row]).nonzero()[0])
    return (
        f"the log-sum-exp of row {row}, head {head} is {float(lse[row, head]):.6g}, "
        f"not {float(expected[row, head]):.6g} (and {len(rows) - 1} more rows)"
    )


def wrong_padding(case: Case, padded: torch.Tensor, lse: torch.Tensor | None) -> str:
    """Return what is wrong with the rows of padding of a merge, whose parts are both empty; else "".

    Such a row must be 0 with an LSE of -inf, so that a further merge ignores it: vLLM's CUDA kernel does
    so since 0.11.1 (csrc/attention/merge_attn_states.cu), its Triton kernel since 0.27.
    """
    if case.op != MERGE:
        return ""
    if not bool((padded == 0).all()):
        row = int((padded != 0).flatten(1).any(1).nonzero()[0])
        return f"a row whose parts are both empty is {float(padded[row].flatten()[0]):.3g}, not 0"
    if lse is not None and not bool((lse[-len(padded) :] == -torch.inf).all()):
        return "a row whose parts are both empty has a log-sum-exp that is not -inf"
    return ""


def expected_lse(lab: Lab, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the right LSE and by how much a kernel's may be off, each [num_tokens, num_heads] float64.

    The bound: scores are off by at most s, so the LSE is off by s; n products and sums of float32 add
    (n + 8)·2⁻²³; rounding the result, and its two parts in a merge, adds 3·2⁻²⁴ of it.
    """
    case = case if case.reference_dtype == "float64" else case.replace(reference_dtype="float64")
    expected, batch = lab.lse(case), lab.batch(case)
    rounding = Rounding.of(lab.call(case), Target.of(case), decide(case).kernels)
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    slope = 0.0 if batch.alibi_slopes is None else float(batch.alibi_slopes.max())
    rows, tokens = batch.token_start_loc, batch.kv_start_loc
    bound = torch.empty_like(expected)
    for i, cached in enumerate(batch.lengths.cached_lens(case.spec.fill_read)):
        here = slice(rows[i], rows[i + 1])
        key = stored_tokens(case, batch.key[tokens[i] : tokens[i + 1]], cached, case.k_scale)
        query_norm, key_norm = (
            float(t.double().norm(dim=2).max()) for t in (batch.query[here], key)
        )
        error = rounding.score_error(
            query_norm, key_norm, case.head_size, scale, slope * len(key), case.softcap or 0.0
        )
        bound[here] = error + (len(key) + 8) * 2.0**-23 + 3 * 2.0**-24 * expected[here].abs()
    return expected, bound
