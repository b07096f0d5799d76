"""The kernel models agree with exact attention within the bound of their rounding."""

import dataclasses

import pytest
import torch
from helpers.bounds import bound
from helpers.cases import call_of, decode_rows, hostile, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected
from attnlab.case.ops import PREFILL, RELEASES
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.kernels.model import paged_attention_rocm, scale_of
from attnlab.lab.lab import Lab
from attnlab.lab.reference import attend, reference
from attnlab.tensors.cache import make_batch
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


@given(st.one_of(TRITON, ROCM))
@settings(max_examples=60, deadline=None)
def test_prefill_and_decode_are_attention(case):
    """Every row is within the bound, with NaN in unwritten slots and rows, and with several partitions."""
    assert decide(case).decode == (ROCM_DECODE if case.platform == "gfx942" else TRITON_DECODE)
    if case.release == "0.11.2":
        case = case.replace(empty_slots="garbage")  # it reads the tail of the last block
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


# Behaviour of the real kernels that their models reproduce.


DECODES = {"query_lens": (1,) * 8, "ctx_lens": (3, 17, 300, 40, 255, 256, 5, 31)}
KERNEL = {"gfx942": ROCM_DECODE, "sm_90": TRITON_DECODE}


def decoded(case, **changes):
    """Return the output of the Case's decode kernel alone, on a call with ``changes``."""
    call = dataclasses.replace(call_of(case)[0], **changes)
    model.run(call, Target.of(case), (KERNEL[case.platform],))
    return call.output


# int64 index tensors.


def test_int64_query_start_loc_writes_no_row_of_the_seed_batch():
    """Read as int32, no two neighbours of query_start_loc differ by 1: the kernel writes nothing."""
    case = Case(
        num_heads=2,
        head_size=64,
        query_start_loc_dtype="int32_before_cumsum",
        output_init="recycled",
    )
    call, _ = call_of(case)
    before = call.output.clone()
    paged_attention_rocm(call, Target.of(case))
    assert same_bits(call.output, before)
    call = dataclasses.replace(call, query_start_loc=call.query_start_loc.int())
    paged_attention_rocm(call, Target.of(case))
    assert torch.nonzero((call.output != before).any(2).any(1)).flatten().tolist() == [5336]


def test_int64_query_start_loc_of_eight_decodes():
    """0 … 8 as int64 reads as 0 0 1 0 2 0 3 0 4: only sequence 1 runs, with query and output row 0."""
    case = hostile(**DECODES, query_start_loc_dtype="int64", output_init="recycled")
    call, _ = call_of(case)
    before, batch = call.output.clone(), make_batch(case)
    paged_attention_rocm(call, Target.of(case))
    assert same_bits(call.output[1:], before[1:])
    own = slice(batch.kv_start_loc[1], batch.kv_start_loc[2])
    expected = torch.empty(1, 6, 64, dtype=torch.float64)
    attend(batch.query[:1], batch.key[own], batch.value[own], 64**-0.5, expected)
    torch.testing.assert_close(call.output[:1].double(), expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["block_table", "seq_lens", "query_start_loc"])
def test_triton_reads_int64_as_it_is(name, release):
    """In Triton the dtype of an index tensor changes no bit."""
    case = hostile(platform="sm_90", release=release, empty_slots="garbage")
    wide = case.replace(**{f"{name}_dtype": "int64"})
    assert same_bits(*[Lab().run(c).call.output for c in (case, wide)])


def test_a_cast_in_the_wrapper_gives_the_bits_of_int32():
    case = hostile()
    wide = hostile(stage="wrapper_cast", fill="all_rows")
    assert same_bits(Lab().run(case).call.output, Lab().run(wide).call.output)


# The effect of unwritten slots.


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("platform", KERNEL)
@pytest.mark.parametrize("group", [2, 6])
def test_nan_in_the_newest_slot(platform, release, group):
    """Without the new tokens in a cache of NaN, the decode rows are NaN and no others."""
    case = hostile(
        platform=platform, release=release, num_queries_per_kv=group, fill="context_only"
    )
    output = Lab().run(case).call.output
    assert output[decode_rows(case)].isnan().all()
    assert not output[~decode_rows(case)].isnan().any()


def with_tail(case, name, value):
    """Return the Case's key or value cache with ``value`` after seq_len in each last block."""
    call, cache = call_of(case)
    tensor = getattr(call, name).clone()
    tail = tail_slots(case, cache)
    order = (0, 3, 1, 2, 4) if name == "key_cache" else (0, 3, 1, 2)
    tensor.permute(order)[tail[:, 0], tail[:, 1]] = value
    return tensor


def tail_slots(case, cache):
    """Return (block, offset) of every slot after seq_len in a sequence's last block, [n, 2]."""
    return torch.tensor(
        [
            cache.provenance.slot(seq, pos)
            for seq, n in enumerate(case.lengths.seq_lens)
            for pos in range(n, -(-n // case.block_size) * case.block_size)
        ]
    )


NAN, INF = float("nan"), float("inf")
TAILS = [  # platform, release, cache, value: the output's bits, or NaN
    ("gfx942", "0.11.2", "key_cache", NAN, "bits"),
    ("gfx942", "0.11.2", "value_cache", NAN, "nan"),
    ("gfx942", "0.11.2", "value_cache", INF, "nan"),
    ("gfx942", "0.11.2", "value_cache", 6e4, "bits"),
    ("gfx942", "0.33.0", "key_cache", NAN, "bits"),
    ("gfx942", "0.33.0", "value_cache", NAN, "bits"),
    ("gfx942", "0.33.0", "value_cache", INF, "bits"),
    ("sm_90", "0.11.2", "key_cache", NAN, "nan"),
    ("sm_90", "0.11.2", "value_cache", NAN, "nan"),
    ("sm_90", "0.11.2", "value_cache", 6e4, "bits"),
    ("sm_90", "0.33.0", "key_cache", NAN, "bits"),
    ("sm_90", "0.33.0", "value_cache", NAN, "bits"),
]


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize(("platform", "release", "name", "value", "effect"), TAILS)
def test_the_tail_of_the_last_block(platform, release, name, value, effect, group):
    """Whether slots after seq_len affect the output depends on kernel and release."""
    case = hostile(
        **DECODES, platform=platform, release=release, empty_slots="zeros", num_queries_per_kv=group
    )
    before = decoded(case)
    after = decoded(case, **{name: with_tail(case, name, value)})
    full = torch.tensor([n % case.block_size == 0 for n in case.lengths.seq_lens])
    assert 0 < full.sum() < len(full)
    assert same_bits(after[full], before[full])
    if effect == "bits":
        assert same_bits(after, before)
    else:
        assert after[~full].isnan().all()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("platform", KERNEL)
def test_unneeded_block_table_entries_are_not_read(platform, release):
    case = hostile(platform=platform, release=release, empty_slots="garbage")
    call, _ = call_of(case)
    wild = call.block_table.clone()
    for seq, n in enumerate(case.lengths.seq_lens):
        wild[seq, -(-n // case.block_size) :] = 2**30
    other = dataclasses.replace(call, block_table=wild, output=call.output.clone())
    for one in (call, other):
        model.run(one, Target.of(case), decide(case).kernels)
    assert same_bits(call.output, other.output)


# Partitions, formats and scales.


def test_a_max_seq_len_one_partition_too_small():
    """No error: each head is merged with partition 0 of the next head, the last with garbage."""
    case = hostile(query_lens=(1,), ctx_lens=(299,), max_seq_len=256)
    output = decoded(case)[0].double()
    batch = make_batch(case)
    key, value = (t[:256].double().transpose(0, 1) for t in (batch.key, batch.value))
    query = batch.query[0].double().view(3, 2, 64)
    weights = (query @ key.transpose(1, 2) * 64**-0.5).exp().flatten(0, 1)
    sums = weights.sum(1, keepdim=True)
    alone = (weights.view(3, 2, -1) @ value).flatten(0, 1)
    merged = (alone[:-1] + alone[1:]) / (sums[:-1] + sums[1:])
    torch.testing.assert_close(output[:-1], merged, atol=2e-3, rtol=0)
    assert output[-1].isfinite().all()
    sound = decoded(case.replace(max_seq_len=257))[0].double()
    assert (output - sound).abs().amax(1).min() > 1e-2


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("max_seq_len", [257, 512, 1000, 131_072])
def test_a_max_seq_len_too_large_changes_no_bit(max_seq_len, group):
    """The kernel does not read scratch that it does not need."""
    case = hostile(query_lens=(1, 1), ctx_lens=(256, 20), num_queries_per_kv=group)
    assert same_bits(decoded(case), decoded(case.replace(max_seq_len=max_seq_len)))


def test_bytes_written_as_fn_mean_half_on_gfx942():
    """With almost equal weights the output is half: gfx942 decodes each value as half of it."""
    fields = {"sm_scale": 1e-6, "kv_cache_dtype": "fp8", "v_scale": 0.02, "k_scale": 0.02}
    case = hostile(query_lens=(1, 1), ctx_lens=(9, 20), **fields)
    wrong = decoded(case.replace(cache_format="fp8_e4m3fn"))
    right = decoded(case.replace(platform="sm_90"))
    torch.testing.assert_close(wrong, right / 2, atol=2e-4, rtol=2e-3)
    assert right.abs().max() > 0.1
    assert (decoded(case) - right).abs().max() < 0.05


def test_fp8_keys_split_by_8_are_misread_on_rocm():
    """The ROCm kernel assumes that x is 16 bytes; Triton reads x from the shape."""
    for platform, status in (("gfx942", "mismatch"), ("sm_90", "match")):
        case = hostile(kv_cache_dtype="fp8", x=8, platform=platform, atol=0.02)
        assert Lab().run(case).status == status
    assert Lab().run(hostile(kv_cache_dtype="fp8", x=16, atol=0.02)).status == "match"


@pytest.mark.parametrize("platform", KERNEL)
def test_scales_of_a_16_bit_cache_are_not_used(platform):
    """With kv_cache_dtype auto no kernel multiplies by k_scale or v_scale."""
    case = hostile(platform=platform)
    scaled = case.replace(k_scale=0.1, v_scale=3.0)
    assert same_bits(decoded(case), decoded(scaled))


@pytest.mark.parametrize(
    ("release", "op", "scale"),
    [
        ("0.11.2", "chunked_prefill_paged_decode", 6**-0.5),  # by the number of heads
        ("0.11.2", "context_attention_fwd", 64**-0.5),
        ("0.33.0", "chunked_prefill_paged_decode", 64**-0.5),
        ("0.33.0", "context_attention_fwd", 64**-0.5),
    ],
)
def test_the_default_scale(release, op, scale):
    """The default scale of 0.11.2's op uses the number of heads instead of the head size."""
    case = hostile(release=release, op=op, empty_slots="garbage", atol=0.01)
    assert scale_of(call_of(case)[0], Target.of(case)) == pytest.approx(scale)
    assert Lab().run(case).status == ("match" if scale == 64**-0.5 else "mismatch")
    assert Lab().run(case.replace(sm_scale=64**-0.5)).status == "match"


def test_cdna_and_rdna_round_differently():
    """For up to 4 query heads per KV head gfx9 adds warps in float16; gfx11 does not."""
    fields = {"head_size": 128, "num_heads": 8, "num_queries_per_kv": 4}
    call, _ = call_of(hostile(**DECODES, **fields))
    outputs = []
    for name in ("gfx942", "gfx1100"):
        one = dataclasses.replace(call, output=call.output.clone())
        paged_attention_rocm(one, Target(platform=PLATFORMS[name]))
        outputs.append(one.output)
    assert not same_bits(*outputs)
    torch.testing.assert_close(*outputs, atol=3e-3, rtol=0)


# Refusals of the real kernels that their models reproduce.


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
