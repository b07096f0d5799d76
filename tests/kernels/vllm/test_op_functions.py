"""The functions of an op: those that it can reach, in its module and in others of the folder."""

from pathlib import Path

import pytest
from helpers.sources import of_release

from attnlab.case.ops import TRITON_OPS
from attnlab.kernels.vllm.features import Function, op_functions
from attnlab.kernels.vllm.source import Source

OP = """
import torch
from vllm.v1.attention.ops.helpers import scale as scaled
from .more import other
from vllm.logger import init_logger

@triton.jit
def kernel(x, FLAG: tl.constexpr):
    if FLAG:
        x = scaled(x)
    return x

def unused():
    return 1

def unified_attention(q, k, *, out=None):
    from vllm.v1.attention.ops.later import far
    kernel[(1,)](q)
    other(q)
"""


def made(folder: Path) -> Source:
    """Return a vLLM with one op."""
    ops = folder / "vllm/v1/attention/ops"
    ops.mkdir(parents=True)
    (ops / "triton_unified_attention.py").write_text(OP)
    (ops / "helpers.py").write_text("def scale(x):\n    return x\n\ndef rest(x):\n    return 0\n")
    (ops / "more.py").write_text("def other(x):\n    return scale(x)\n")
    (ops / "later.py").write_text("def far(x):\n    return x\n")
    return Source(kind="checkout", path=folder, root=folder, version="0.33.0")


def test_reached_functions_are_found(tmp_path):
    found = op_functions(made(tmp_path), "unified_attention")
    names = [(one.file.name, one.name, one.is_kernel) for one in found]
    assert names == [
        ("helpers.py", "scale", False),
        ("more.py", "other", False),
        ("triton_unified_attention.py", "kernel", True),
        ("triton_unified_attention.py", "unified_attention", False),
    ]
    kernel, op = found[2:]
    assert kernel.statements == {9, 10, 11}
    assert kernel.branches["9.0"].text == "FLAG"
    assert op.parameters == ("q", "k", "out")
    assert op_functions(made(tmp_path / "b"), "merge_attn_states") == []


def test_functions_as_json(tmp_path):
    source = made(tmp_path)
    for one in op_functions(source, "unified_attention"):
        fields = one.to_dict(source.root)
        assert not Path(fields["file"]).is_absolute()
        again = Function.of_dict(fields)
        assert (again.statements, again.branches) == (one.statements, one.branches)
        assert (again.name, again.text) == (one.name, one.text)


@pytest.mark.releases
def test_the_functions_of_a_release():
    source = of_release("0.33.0")
    found = {op: {one.name for one in op_functions(source, op)} for op in TRITON_OPS}
    assert {"unified_attention", "kernel_unified_attention", "reduce_segments"} <= found[
        "unified_attention"
    ]
    assert "apply_softcap" in found["unified_attention"]
    assert {"_fwd_kernel", "_fwd_kernel_alibi"} <= found["chunked_prefill_paged_decode"]
    assert "unified_attention_int4" not in found["unified_attention"]
