"""The worst-case bound of :mod:`attnlab.lab.reference` for all rows of a Case."""

import dataclasses

import torch

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.lab.reference import Rounding, reference
from attnlab.tensors.cache import Batch, make_cache
from attnlab.tensors.case_call import make_call, make_output


def bound(case: Case, batch: Batch) -> torch.Tensor:
    """Return the largest error that each output element may have, of the output's shape, float64."""
    call = make_call(case, batch, make_cache(case, batch), make_output(case))
    rounding = Rounding.of(call, Target.of(case), decide(case).kernels)
    magnitudes = dataclasses.replace(batch, value=batch.value.abs())
    mixed = reference(case.replace(reference_dtype="float64"), magnitudes)
    longest = max(case.lengths.seq_lens)
    share = rounding.relative(longest, score_error(case, batch, rounding))
    return mixed * share + rounding.fixed(longest, float(batch.value.abs().max()))


def score_error(case: Case, batch: Batch, rounding: Rounding) -> float:
    """Return the largest error of a score."""
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    query, key = (float(one.double().norm(dim=2).max()) for one in (batch.query, batch.key))
    key *= 1 + 2.0**-3 * case.is_fp8  # a stored key may be larger than the key by an FP8 rounding
    bias = 0.0
    if batch.alibi_slopes is not None:
        bias = float(batch.alibi_slopes.max()) * max(case.lengths.seq_lens)
    return rounding.score_error(query, key, case.head_size, scale, bias, case.softcap or 0.0)
