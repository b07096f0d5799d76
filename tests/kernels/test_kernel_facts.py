"""Behaviour of the real kernels that their models reproduce."""

import dataclasses

import pytest
import torch
from helpers.cases import call_of, decode_rows, hostile, same_bits

from attnlab.case.case import Case
from attnlab.case.ops import RELEASES
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.kernels.model import paged_attention_rocm, scale_of
from attnlab.lab.lab import Lab
from attnlab.lab.reference import attend
from attnlab.tensors.batch import make_batch

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
    changed = (call.output != before).any(2).any(1)
    assert torch.nonzero(changed).flatten().tolist() == [5336]


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
    results = [Lab().run(c).call.output for c in (case, wide)]
    assert same_bits(*results)


def test_a_cast_in_the_wrapper_gives_the_bits_of_int32():
    case = hostile()
    wide = hostile(stage="wrapper_cast", fill="all_rows")
    assert same_bits(Lab().run(case).call.output, Lab().run(wide).call.output)


# What the host code of the ROCm kernel refuses, in its order.


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
    native = decoded(case)
    assert (native - right).abs().max() < 0.05


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
