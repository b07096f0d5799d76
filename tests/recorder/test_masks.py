"""Captured calls with a mask have a reference: they are found correct, and wrong without their mask."""

import dataclasses

import pytest
import torch
from helpers.masked_cases import random_case
from helpers.sources import needs_triton, of_release

import attnlab
from attnlab.contracts.contract import Target
from attnlab.kernels.binding import bind
from attnlab.kernels.vllm.backend import load
from attnlab.lab.lab import Lab
from attnlab.recorder.arguments import call_of_reading, read_arguments
from attnlab.recorder.ops import vllm_ops
from attnlab.tensors.call import Origin
from attnlab.tensors.visibility import Visibility

pytestmark = [needs_triton, pytest.mark.releases]
FIELDS = [field.name for field in dataclasses.fields(Visibility)]


@pytest.mark.parametrize(
    ("mask", "data"),
    [
        ("bidirectional", {"causal": True}),
        ("causal_by_sequence", {"causal": True}),
        ("ranges", {"mm_prefix_range": None}),
        ("ranges_in_window", {"mm_prefix_clamp_sliding_window": False}),
        ("prefix_and_window", {"rswa_prefix_lens": None}),
        ("chunks", {"chunk_lookback": -1}),
        ("tree", {"qq_bias": None}),
    ],
)
def test_arguments_become_the_same_mask(mask, data):
    """The arguments that the op of 0.33.0 gets are read back, and the call is diagnosed."""
    changes = {"query_lens": (19, 3, 2), "ctx_lens": (20, 0, 37), "mm_prefix_range": None}
    changes |= dict.fromkeys(("causal_seqs", "rswa_prefix_lens", "tree_parents", "chunk_lookback"))
    changes |= {"sliding_window": 6, "dtype": "float32", "block_size": 16}
    case = random_case(mask, 2, **changes)
    lab = Lab()
    call = lab.call(case)
    call.output.copy_(lab.reference(case).to(call.output.dtype))
    source, target = of_release("0.33.0"), Target.of(case)
    function = load(source, target.platform, "cpu").function(case.op)
    reading = read_arguments(bind(function, call, target))
    next(op for op in vllm_ops() if op.op == case.op).adjust(bind(function, call, target), reading)
    for name in ("causal", "mm_prefix_range", "rswa_prefix_lens"):
        given = reading.fields.get(name)
        if isinstance(given, torch.Tensor):  # an engine's buffer, with room for more sequences
            reading.fields[name] = torch.cat([given, given])
    again = call_of_reading(reading, Origin(release="0.33.0"), op=case.op, layout="flash")
    assert again.unmodelled == ()
    for name in FIELDS:
        one, other = getattr(call, name), getattr(again, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
    assert attnlab.diagnose(again).status == "nothing wrong"
    assert attnlab.diagnose(dataclasses.replace(again, **data)).status != "nothing wrong"
