"""Models and vLLM's own kernels on the same call, and how far they may differ."""

import dataclasses

import torch

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import written_format

ROUNDOFF = {torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def real(case: Case, source: Source) -> KernelCall:
    """Return the call after vLLM's kernels ran."""
    call = Lab().call(case)
    vllm_ops.run(call, Target.of(case), decide(case).kernels, source)
    return call


def modelled(case: Case, absolute: bool = False) -> KernelCall:
    """Return the call after the models ran, on absolute values if asked."""
    call = Lab().call(case)
    if absolute:
        fp8 = case.is_fp8
        cache = call.value_cache & 0x7F if fp8 else call.value_cache.abs()
        call = dataclasses.replace(call, value=call.value.abs(), value_cache=cache)
    model.run(call, Target.of(case), decide(case).kernels)
    return call


def bound(case: Case) -> torch.Tensor:
    """Return how far model and kernel may be apart, of the output's shape; NaN where it is NaN."""
    call, target = modelled(case, absolute=True), Target.of(case)
    format = written_format(case)
    key = format.decode(call.key_cache, call.k_scale).permute(0, 1, 3, 2, 4).flatten(3)
    value = format.decode(call.value_cache, call.v_scale)
    longest = max(key.nan_to_num().norm(dim=-1).max(), call.key.float().norm(dim=-1).max())
    score = call.query.float().norm(dim=-1).max() * longest * model.scale_of(call, target)
    e = case.head_size * 2.0**-22 * score
    largest = max(value.nan_to_num().abs().max(), call.value.float().abs().max())
    small = max(case.lengths.seq_lens) * 2.0**-23 * largest
    return call.output.float() * (4 * ROUNDOFF[call.query.dtype] + 2 * e) + small


def agrees(one: torch.Tensor, other: torch.Tensor, within: torch.Tensor) -> bool:
    """Answer whether two outputs have NaN at the same places and elsewhere differ by the bound."""
    same_nan = torch.equal(one.isnan(), other.isnan())
    close = (one.float() - other.float()).abs() <= within
    return same_nan and bool((close | one.isnan()).all())
