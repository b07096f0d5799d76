"""KernelCall.from_tensors: both layouts of vLLM give the same call, and each misfit is one line."""

import dataclasses

import pytest
import torch
from helpers.cases import call_of, hostile, same_bits

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import PREFILL, UNIFIED, WRAPPER, WRITE
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import find_violations
from attnlab.kernels import model
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import presented

TENSORS = ("query", "block_table", "seq_lens", "query_start_loc", "key", "value")
LENS = {"query_lens": (1, 6, 2), "ctx_lens": (33, 4, 20)}


def plain(case):
    """Return the Case's call, and the arguments of from_tensors in the layout x-split."""
    call, _ = call_of(case)
    given = {name: getattr(call, name) for name in TENSORS}
    given |= {"key_cache": call.key_cache, "value_cache": call.value_cache, "op": call.op}
    return call, given


def in_flash(given):
    """Return the arguments with the cache as [num_blocks, block_size, num_kv_heads, head_size]."""
    key = given["key_cache"].permute(0, 3, 1, 2, 4).flatten(3).contiguous()
    value = given["value_cache"].permute(0, 3, 1, 2).contiguous()
    return {**given, "key_cache": key, "value_cache": value}


def in_hnd(given):
    flash = in_flash(given)
    names = ("key_cache", "value_cache")
    return {**flash, **{name: flash[name].transpose(1, 2).contiguous() for name in names}}


LAYOUTS = {"x-split": lambda given: given, "flash": in_flash, "HND": in_hnd}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [WRAPPER, PREFILL, UNIFIED])
def test_layouts_give_the_same_bits(op, layout, explicit):
    """The models' outputs and the violations are those of the call that was built from the Case."""
    case = hostile(op=op, **LENS, fill="all_rows", sm_scale=0.125)
    expected, given = plain(case)
    name = {"layout": layout} if explicit else {}
    call = KernelCall.from_tensors(**LAYOUTS[layout](given), **name, sm_scale=0.125).with_buffer()
    for one in ("key_cache", "value_cache", "query", "key", "value"):
        assert same_bits(getattr(call, one), getattr(expected, one)), one
    assert (call.max_query_len, call.max_seq_len) == (6, 34)
    target, kernels = Target.of(case), decide(case).kernels
    for one in (call, expected):
        model.run(one, target, kernels)
    assert same_bits(call.output, expected.output)
    assert not call.output.isnan().any()
    assert find_violations(call, target, kernels) == find_violations(expected, target, kernels)


def test_a_layout_read_as_another_gives_other_bits():
    """The comparison above can fail: with layout HND instead of flash the cache is another."""
    expected, given = plain(hostile(op=UNIFIED, **LENS, num_heads=16, num_queries_per_kv=1))
    call = KernelCall.from_tensors(**in_flash(given), layout="HND")
    assert not same_bits(call.key_cache, expected.key_cache)


@pytest.mark.parametrize(
    ("dtype", "stored", "name"),
    [
        ("fp8", torch.uint8, "fp8"),
        ("fp8", torch.float8_e4m3fnuz, None),
        ("fp8_e5m2", torch.float8_e5m2, None),
    ],
)
def test_fp8_caches(dtype, stored, name):
    """FP8 bytes arrive as uint8, and x is 16."""
    expected, given = plain(hostile(kv_cache_dtype=dtype, **LENS))
    given = in_flash(given)
    for cache in ("key_cache", "value_cache"):
        given[cache] = given[cache].view(stored)
    call = KernelCall.from_tensors(**given, kv_cache_dtype=name, k_scale=0.5)
    assert (call.kv_cache_dtype, call.k_scale) == (dtype, 0.5)
    assert same_bits(call.key_cache, expected.key_cache)
    assert same_bits(call.value_cache, expected.value_cache)


def test_defaults_of_a_batch_of_decodes():
    """Without query_start_loc each sequence has one new token; its key is read from the cache."""
    _, given = plain(hostile(query_lens=(1, 1), ctx_lens=(5, 20), fill="all_rows"))
    names = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
    paged = KernelCall.from_tensors(**{name: given[name] for name in names})
    assert paged.op == WRAPPER
    assert paged.query_start_loc.tolist() == [0, 1, 2]
    assert paged.output is None
    assert paged.with_buffer().buffer.isnan().all()
    flash = in_flash(given)
    call = KernelCall.from_tensors(**{name: flash[name] for name in names}, layout="flash")
    assert call.op == UNIFIED


def test_the_output_of_a_cache_write():
    call = KernelCall.from_tensors(**{**plain(hostile(**LENS))[1], "op": WRITE})
    blocks, kv_heads, head_size, block_size = call.value_cache.shape
    assert call.with_buffer().buffer.shape == (blocks * block_size, kv_heads, 2 * head_size)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


half = lambda *shape: torch.zeros(shape, dtype=torch.float16)  # noqa: E731
# Arguments that replace right ones of a flash cache [14, 16, 3, 64] with 9 new tokens, 6 heads and
# 3 sequences of 34, 10 and 22 tokens; the argument that is named; a part of the text.
WRONG = [
    ({"query": [1.0]}, "query", "must be a tensor, got list"),
    ({"query": half(9, 64)}, "query", "must have 3 dimensions"),
    ({"query": half(9, 7, 64)}, "query", "multiple of 3 heads"),
    ({"query": half(9, 6, 32)}, "key_cache", "head_size 32"),
    ({"query": half(8, 6, 64)}, "query_start_loc", "at most 8"),
    ({"key_cache": None}, "key_cache", "must be a tensor"),
    ({"key_cache": half(14, 16, 192)}, "key_cache", "num_blocks, block_size"),
    ({"key_cache": half(14, 16, 3, 63)}, "key_cache", "head_size 64"),
    ({"key_cache": half(14, 16, 4, 64)}, "key_cache", "num_kv_heads 3"),
    ({"key_cache": half(13, 16, 3, 64)}, "value_cache", "(13, 16, 3, 64)"),
    ({"key_cache": half(14, 3, 7, 16, 8)}, "key_cache", "64 elements"),
    ({"key_cache": half(14, 3, 8, 16, 8)}, "value_cache", "(14, 3, 64, 16)"),
    ({"key_cache": half(14, 16, 3, 64).float()}, "value_cache", "float32"),
    ({"value_cache": half(14, 16, 3, 32)}, "value", "(9, 3, 32)"),
    ({"value_cache": half(14, 3, 16, 64)}, "value_cache", "(14, 16, 3, 64)"),
    ({"value_cache": half(14, 16, 3, 64).bfloat16()}, "value_cache", "float16"),
    ({"block_table": int32(1, 2, 3)}, "block_table", "2 dimensions"),
    ({"block_table": int32(1, 2, 3)[:, None]}, "block_table", "3 columns"),
    ({"block_table": int32(*[14] * 9).view(3, 3)}, "block_table", "from 0 to 13, got 14"),
    ({"block_table": -int32(*[1] * 9).view(3, 3)}, "block_table", "got -1"),
    ({"block_table": torch.zeros(3, 3)}, "block_table", "int32 or int64"),
    ({"seq_lens": int32(34, 10)}, "seq_lens", "shape (3,)"),
    ({"seq_lens": int32(34, 5, 22)}, "seq_lens", "seq_lens[1] must be at least its query_len 6"),
    ({"seq_lens": torch.ones(3)}, "seq_lens", "int32 or int64"),
    ({"query_start_loc": None}, "query_start_loc", "9 new tokens of 3 sequences"),
    ({"query_start_loc": int32(0, 1, 7)}, "query_start_loc", "shape (4,)"),
    ({"query_start_loc": int32(1, 2, 7, 9)}, "query_start_loc", "rise from 0"),
    ({"query_start_loc": int32(0, 7, 1, 9)}, "query_start_loc", "rise from 0"),
    ({"query_start_loc": torch.ones(4)}, "query_start_loc", "int32 or int64"),
    ({"key": None}, "key", "given with value"),
    ({"value": None}, "value", "given with key"),
    ({"key": None, "value": None, "op": PREFILL, "layout": "flash"}, "key", PREFILL),
    ({"key": half(9, 64)}, "key", "3 dimensions"),
    ({"key": half(8, 3, 64)}, "key", "(9, 3, 64)"),
    ({"value": half(9, 3, 65)}, "value", "(9, 3, 64)"),
    ({"output": half(9, 6, 63)}, "output", "(9, 6, 64)"),
    ({"output": half(9, 6, 64).to("meta")}, "output", "on cpu"),
    ({"op": "nonsense"}, "op", "one of"),
    ({"layout": "NHD"}, "layout", "x-split, flash, HND"),
    ({"layout": "x-split"}, "key_cache", "5 dimensions"),
    ({"layout": "HND"}, "query", "multiple of 16 heads"),
    ({"kv_cache_dtype": "int8"}, "kv_cache_dtype", "one of"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "auto"),
    ({"sinks": half(5)}, "sinks", "(6,)"),
    ({"window": 3}, "window", "sliding_window"),
]


@pytest.mark.parametrize(
    ("changes", "field", "words"), WRONG, ids=lambda v: v if isinstance(v, str) else ""
)
def test_each_misfit_is_one_line_that_names_the_argument(changes, field, words):
    given = in_flash(plain(hostile(op=UNIFIED, num_blocks=14, **LENS))[1])
    KernelCall.from_tensors(**given)
    with pytest.raises(InvalidCall) as caught:
        KernelCall.from_tensors(**{**given, **changes})
    text = str(caught.value)
    assert caught.value.field == field
    assert words in text
    assert ", got " in text
    assert "\n" not in text


def test_a_uint8_cache_needs_its_format():
    given = in_flash(plain(hostile(kv_cache_dtype="fp8", **LENS))[1])
    with pytest.raises(InvalidCall) as caught:
        KernelCall.from_tensors(**given)
    assert caught.value.field == "kv_cache_dtype"


def test_an_ambiguous_layout_is_named():
    """16 slots and 8 heads, or 8 slots and 16 heads: without key the shapes do not decide."""
    cache = half(9, 16, 8, 64)
    given = {
        "query": half(2, 32, 64),
        "key_cache": cache,
        "value_cache": cache,
        "block_table": int32(0, 1, 2, 3).view(2, 2),
        "seq_lens": int32(5, 9),
    }
    with pytest.raises(InvalidCall) as caught:
        KernelCall.from_tensors(**given)
    assert caught.value.field == "layout"
    flash = KernelCall.from_tensors(**given, layout="flash")
    assert (flash.block_size, flash.num_queries_per_kv) == (16, 4)
    hnd = KernelCall.from_tensors(**given, layout="HND")
    assert (hnd.block_size, hnd.num_queries_per_kv) == (8, 2)
    longer = {**given, "seq_lens": int32(5, 17)}  # two blocks of 8 do not hold 17 tokens
    assert KernelCall.from_tensors(**longer).block_size == 16


def test_padding_of_a_call_without_new_tokens():
    """Its keys and values are one zero, expanded; the padding tokens are NaN."""
    _, given = plain(hostile(op=UNIFIED, **LENS))
    given = {name: one for name, one in in_flash(given).items() if name not in ("key", "value")}
    call = KernelCall.from_tensors(**given)
    padded = presented(dataclasses.replace(call, padding=3))
    assert padded.key.shape[0] == call.key.shape[0] + 3
    assert not padded.key[:-3].any()
    assert padded.key[-3:].isnan().all()
