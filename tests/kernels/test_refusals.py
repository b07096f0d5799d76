"""Refusals of the real kernels that their models reproduce."""

import pytest
from helpers.cases import call_of, decode_rows, hostile, same_bits

from attnlab.case.errors import KernelRejected
from attnlab.case.ops import PREFILL, RELEASES
from attnlab.contracts.contract import TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.kernels.model import paged_attention_rocm

REFUSALS = [
    ("Unsupported KV cache dtype: fp8_e5m2", {"kv_cache_dtype": "auto"}),
    ("Unsupported data type: float", {"dtype": "float16"}),
    ("Unsupported head size: 96", {"head_size": 64}),
    ("Unsupported block size: 64", {"block_size": 32}),
    ("expected scalar type Int but found Long", {"block_table_dtype": "int32"}),
    ("expected scalar type Int but found Long", {"seq_lens_dtype": "int32"}),
    ("Unsupported gqa ratio: 17", {"num_heads": 8, "num_queries_per_kv": 8}),
]


@pytest.mark.parametrize("release", RELEASES)
def test_refusals_in_their_order(release):
    """A call violates every check; correcting one violation leads to the next refusal."""
    case = hostile(
        release=release,
        kv_cache_dtype="fp8_e5m2",
        dtype="float32",
        head_size=96,
        block_size=64,
        stage="int64",
        num_heads=17,
        num_queries_per_kv=17,
        num_blocks=600,
        output_init="recycled",
    )
    for text, corrected in REFUSALS:
        call, _ = call_of(case)
        before = call.output.clone()
        with pytest.raises(KernelRejected) as caught:
            paged_attention_rocm(call, Target.of(case))
        assert str(caught.value) == text
        assert same_bits(call.output, before)
        case = case.replace(**corrected)
    paged_attention_rocm(call_of(case)[0], Target.of(case))


def test_a_rejected_decode_keeps_the_rows_of_the_prefill():
    """The prefill kernel runs before the decode kernel is refused."""
    case = hostile(stage="int64")
    call, _ = call_of(case)
    with pytest.raises(KernelRejected):
        model.run(call, Target.of(case), decide(case).kernels)
    decodes = decode_rows(case)
    assert call.output[decodes].isnan().all()
    assert not call.output[~decodes].isnan().any()


@pytest.mark.parametrize("kernel", [PREFILL, TRITON_DECODE])
def test_triton_has_no_e4m3_below_compute_capability_8_9(kernel):
    """An A100 cannot compile the conversion of e4m3; it can compile that of e5m2."""
    case = hostile(platform="sm_80", kv_cache_dtype="fp8")
    with pytest.raises(KernelRejected, match="fp8e4nv not supported"):
        model.run(call_of(case)[0], Target.of(case), (kernel,))
    case = hostile(platform="sm_80", kv_cache_dtype="fp8_e5m2")
    model.run(call_of(case)[0], Target.of(case), (kernel,))
