"""Predict the output of a call under a description."""

import torch

from attnlab.case.case import Case
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.kernels.model.cache_reads import format_of
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import interleaved
from attnlab.tensors.call import KernelCall
from attnlab.weights.description import Description
from attnlab.weights.setup import AttentionSetup, has_new_slots, make_setup, one_number


def predict_case(description: Description, case: Case, lab: Lab) -> torch.Tensor:
    """Return the output that a description predicts for a Case, [num_tokens, num_heads, head_size]
    float64."""
    return predict_output(description, lab.call(case), Target.of(case), decide(case).kernels)


def predict_output(
    description: Description, call: KernelCall, target: Target, kernels: tuple[str, ...]
) -> torch.Tensor:
    """Return the output that a description predicts for a call, [num_tokens, num_heads, head_size] float64.

    A key or value that is not finite makes the rows NaN that give it a weight.
    """
    rows, heads = torch.arange(call.query.shape[0]), torch.arange(call.query.shape[1])
    setup = make_setup(call, target, kernels, rows, heads)
    weights = description.weights(setup).transpose(0, 1)
    values = slot_values(setup)[:, setup.kv_head].transpose(0, 1)
    output = weights @ values.nan_to_num(0.0, 0.0, 0.0)
    reached = (weights != 0).double() @ (~values.isfinite()).double() > 0
    return output.masked_fill(reached, torch.nan).transpose(0, 1)


def slot_values(setup: AttentionSetup) -> torch.Tensor:
    """Return the values of all slots as a right kernel reads them, [N, num_kv_heads, head_size] float64."""
    call, format = setup.call, format_of(setup.call, setup.target)
    cache = interleaved(call.value_cache, back=True) if call.interleave_v else call.value_cache
    stored = cache.cpu().permute(0, 3, 1, 2).flatten(0, 1).contiguous()
    value = format.decode(stored, one_number(call.v_scale)).double()
    return torch.cat([value, call.value.cpu().double()]) if has_new_slots(call) else value
