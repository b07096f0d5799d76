"""The kernel models agree with exact attention within the bound of their rounding."""

import dataclasses

import pytest
import torch
from helpers.bounds import bound
from helpers.cases import call_of, decode_rows, hostile, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.case.ops import PREFILL, RELEASES
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.lab.lab import Lab
from attnlab.lab.reference import reference
from attnlab.tensors.batch import make_batch
from attnlab.tensors.formats import FORMATS


def outside(case, output):
    """Return which elements are NaN or differ from exact attention by more than the bound."""
    batch = make_batch(case)
    exact = reference(case.replace(reference_dtype="float64"), batch)
    return ~((output.double() - exact).abs() <= bound(case, batch))


def run_directly(case):
    """Return the output of the Case's kernels, run without a Lab."""
    call, _ = call_of(case)
    model.run(call, Target.of(case), decide(case).kernels)
    return call.output


@st.composite
def grid(draw, platforms, head_sizes, dtypes):
    """Return a random Case with a scale, because the default scale of 0.11.2 is wrong."""
    group, count = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    alibi = draw(st.booleans())
    fp8 = draw(st.sampled_from(["auto", "auto", "fp8", "fp8_e5m2"]))
    platform = draw(st.sampled_from(platforms))
    if platform == "gfx942" and fp8 == "fp8_e5m2":
        fp8 = "fp8"  # the ROCm kernel rejects e5m2
    return hostile(
        platform=platform,
        release=draw(st.sampled_from(RELEASES)),
        num_heads=group * draw(st.integers(1, 2)),
        num_queries_per_kv=group,
        head_size=(head_size := draw(st.sampled_from(head_sizes))),
        x=8 if head_size == 24 else None,
        block_size=draw(st.sampled_from([16, 32])),
        dtype=draw(st.sampled_from(dtypes)),
        kv_cache_dtype=fp8,
        k_scale=draw(st.sampled_from([1.0, 0.02, 0.37])),
        v_scale=draw(st.sampled_from([1.0, 0.05, 2.0])),
        alibi=alibi,
        sinks=platform != "gfx942" and not alibi and draw(st.booleans()),
        sliding_window=0 if platform == "gfx942" else draw(st.sampled_from([0, 1, 16, 300])),
        sm_scale=draw(st.sampled_from([head_size**-0.5, 0.05])),
        query_lens=tuple(draw(st.sampled_from([1, 1, 2, 17, 129])) for _ in range(count)),
        ctx_lens=tuple(draw(st.sampled_from([0, 1, 15, 16, 255, 256, 511])) for _ in range(count)),
        fill=draw(st.sampled_from(["decode_rows", "all_rows"])),
        seed=draw(st.integers(0, 999)),
    )  # fmt: skip


TRITON = grid(["sm_90", "gfx1100"], [24, 64, 128], ["float16", "bfloat16", "float32"])
ROCM = grid(["gfx942"], [64, 128], ["float16", "bfloat16"])


@given(TRITON)
@settings(max_examples=30, deadline=None)
def test_prefill_and_triton_decode_are_attention(case):
    """Every row is within the bound, with NaN in every unwritten slot and row."""
    assert decide(case).decode == TRITON_DECODE
    if case.release == "0.11.2":
        case = case.replace(empty_slots="garbage")  # it reads the tail of the last block
    assert not outside(case, run_directly(case)).any()


@given(ROCM)
@settings(max_examples=30, deadline=None)
def test_prefill_and_rocm_decode_are_attention(case):
    """Every row is within the bound, with one partition and with several."""
    assert decide(case).decode == ROCM_DECODE
    if case.release == "0.11.2":
        case = case.replace(empty_slots="garbage")
    assert not outside(case, run_directly(case)).any()


@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize("op", ["chunked_prefill_paged_decode", "context_attention_fwd"])
def test_the_hostile_batch_through_a_lab(platform, group, op):
    """Lab.run gives the bits of the kernels, and they are correct."""
    case = hostile(platform=platform, num_queries_per_kv=group, op=op)
    result = Lab().run(case)
    assert result.decision.kernels[0] == PREFILL
    assert same_bits(result.call.output, run_directly(case))
    assert not outside(case, result.call.output).any()


@pytest.mark.parametrize("output", ["recycled", "nan"])
@pytest.mark.parametrize("kernel", [PREFILL, TRITON_DECODE, ROCM_DECODE])
def test_rows_of_others_keep_their_bits(kernel, output):
    """Each kernel writes every element of its rows and no other row."""
    case = hostile(output_init=output)
    call, _ = call_of(case)
    before = call.output.clone()
    model.run(call, Target.of(case), (kernel,))
    own = decode_rows(case) if kernel != PREFILL else ~decode_rows(case)
    assert same_bits(call.output[~own], before[~own])
    assert not call.output[own].isnan().any()
    assert (call.output[own] != before[own]).any(2).all()


@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
def test_kernels_change_nothing_but_the_output(platform):
    """Kernels do not write query, keys, caches or index tensors, in float32 either."""
    case = hostile(platform=platform, dtype="float32", alibi=True)
    call, _ = call_of(case)
    tensors = {
        f.name: getattr(call, f.name).clone()
        for f in dataclasses.fields(call)
        if isinstance(getattr(call, f.name), torch.Tensor) and f.name != "output"
    }
    model.run(call, Target.of(case), decide(case).kernels)
    for name, before in tensors.items():
        assert same_bits(getattr(call, name), before), name


def _scale(real):
    return lambda call, target: real(call, target) * 1.1


def _other_head(real):
    return lambda cache, blocks, heads: real(cache, blocks, heads).flip(0)


def _as_fn(real):
    return lambda call, target: FORMATS["fp8_e4m3fn"]


def _block_less(real):
    def read(terms, call, name):
        tensor = real(terms, call, name)
        return (tensor - call.block_size).clamp(min=1) if wrong(terms, name) else tensor

    def wrong(terms, name):
        return name == "seq_lens" and terms.name == ROCM_DECODE

    return read


def _no_rescale(real):
    def merge(call, scratch, seq, seq_len):
        flat = dataclasses.replace(scratch, largest=torch.zeros_like(scratch.largest))
        return real(call, flat, seq, seq_len)

    return merge


def _no_k_scale(real):
    return lambda call, target, *rest: real(dataclasses.replace(call, k_scale=1.0), target, *rest)


MUTANTS = [
    (model, "scale_of", _scale),
    (model, "keys", _other_head),
    (model, "values", _other_head),
    (model, "format_of", _as_fn),
    (model, "as_read", _block_less),
    (model, "_merge", _no_rescale),
    (model, "_scores", _no_k_scale),
]


@pytest.mark.parametrize(("module", "name", "mutate"), MUTANTS)
def test_a_broken_kernel_leaves_the_bound(monkeypatch, module, name, mutate):
    """A wrong scale, KV head, format, length or merge is outside of what rounding allows."""
    case = hostile(kv_cache_dtype="fp8", k_scale=0.02, v_scale=0.02, head_size=64)
    assert not outside(case, run_directly(case)).any()
    monkeypatch.setattr(module, name, mutate(getattr(module, name)))
    assert outside(case, run_directly(case)).any()


def test_a_window_off_by_one_leaves_the_bound():
    """One key more or less in the window shows in prefill rows and in decode rows."""
    case = hostile(sliding_window=16)
    wrong = outside(case, run_directly(case.replace(sliding_window=17))).any(2).any(1)
    assert wrong[decode_rows(case)].any()
    assert wrong[~decode_rows(case)].any()
