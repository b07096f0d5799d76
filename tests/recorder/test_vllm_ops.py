"""vLLM's own Triton ops, of two releases and under the interpreter, are recorded and found correct."""

import sys

import pytest
import torch
from helpers.cases import hostile, same_bits
from helpers.sources import RELEASES, needs_triton, release

import attnlab
from attnlab.case.ops import DECODE_FWD, OPS, PREFILL, UNIFIED, WRAPPER
from attnlab.kernels.vllm.backend import load
from attnlab.lab.lab import Lab

pytestmark = [needs_triton, pytest.mark.releases]
FOLDERS = {"0.11.2": "vllm.attention.ops"}
LENS = {
    WRAPPER: {"query_lens": (5, 1), "ctx_lens": (20, 33)},
    PREFILL: {"query_lens": (5, 3), "ctx_lens": (20, 33)},
    UNIFIED: {"query_lens": (5, 1), "ctx_lens": (20, 33)},
    DECODE_FWD: {"query_lens": (1, 1), "ctx_lens": (20, 33)},
}
SAME = ("query", "key_cache", "value_cache", "block_table", "seq_lens", "query_start_loc")


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("op", LENS)
def test_a_recorded_call_is_the_call(monkeypatch, op, version):
    """Its tensors are those that the lab passed, and its output has nothing wrong; a changed one has."""
    source = release(version)
    if isinstance(source, str):
        pytest.skip(source)
    case = hostile(
        op=op,
        backend="vllm",
        release=version,
        platform="sm_90",
        output_init="recycled",
        empty_slots="zeros",  # 0.11.2 multiplies NaN in the tail of a block by 0
        sm_scale=0.2,
        **LENS[op],
    )
    module = load(source, case.machine, "cpu").loader.load(OPS[op].module)
    folder = FOLDERS.get(version, "vllm.v1.attention.ops")
    monkeypatch.setitem(sys.modules, f"{folder}.{OPS[op].module}", module)
    lab = Lab(source=source.path, device="cpu")
    with attnlab.capture() as calls:
        result = lab.run(case)
    (call,) = calls
    assert (call.op, call.origin.program, call.sm_scale) == (op, "vllm", 0.2)
    assert (call.unknown_arguments, call.read_as, call.is_foreign) == ((), (), False)
    for name in SAME:
        assert same_bits(getattr(call, name), getattr(result.call, name)), name
    assert same_bits(call.output, result.call.output)
    assert not torch.equal(call.before, call.output)
    assert attnlab.diagnose(call, platform="sm_90", release=version).status == "nothing wrong"
    wrong = call.output.clone()
    wrong[-1] *= 2
    assert attnlab.diagnose(call, wrong, platform="sm_90", release=version).wrong_rows == 1
