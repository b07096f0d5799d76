"""KernelCall: its index tensors, the shapes that it refuses, and its file."""

import dataclasses
import json

import pytest
import torch
from helpers.cases import call_of, hostile, same_bits
from safetensors.torch import save_file

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.ops import DECODE_FWD, ENCODER, OPS, TRITON_OPS, WRITE
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import hollow_call, make_output, make_query_start_loc

INDEX = ("block_table", "seq_lens", "query_start_loc")


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("int64", torch.int64),
        ("int32_before_cumsum", torch.int64),  # torch.cumsum undoes the cast
        ("int32", torch.int32),
    ],
)
def test_query_start_loc_is_made_as_the_test_made_it(how, dtype):
    """torch.cumsum of int32 returns int64; only a cast after it gives int32."""
    starts = make_query_start_loc((880, 410, 1), how)
    assert starts.dtype == dtype
    assert starts.tolist() == [0, 880, 1290, 1291]


@pytest.mark.parametrize("name", INDEX)
def test_each_index_tensor_is_int64_by_itself(name):
    """Each field changes the dtype of one tensor, and no number."""
    call, _ = call_of(hostile(**{f"{name}_dtype": "int64"}))
    sound, _ = call_of(hostile())
    for other in INDEX:
        tensor = getattr(call, other)
        assert tensor.dtype == (torch.int64 if other == name else torch.int32)
        assert torch.equal(tensor.long(), getattr(sound, other).long())


def test_a_call_has_the_values_of_its_case():
    case = hostile(k_scale=0.5, v_scale=2.0, kv_cache_dtype="fp8", alibi=True, sm_scale=0.3)
    call, _ = call_of(case)
    assert (call.num_queries_per_kv, call.block_size) == (2, 16)
    assert (call.k_scale, call.v_scale, call.sm_scale) == (0.5, 2.0, 0.3)
    assert call.query_lens.tolist() == list(case.query_lens)
    assert call.seq_lens.tolist() == list(case.lengths.seq_lens)
    assert (call.max_query_len, call.max_seq_len) == (40, 301)
    assert call.alibi_slopes.shape == (6,)
    assert call.key.shape == (case.lengths.num_tokens, 3, 64)


def test_what_the_test_passes_as_lengths():
    """A drawn Case passes the test's constants; given fields override them."""
    case = Case(num_heads=1, head_size=8, num_seqs=2, draw_max_query_len=30, draw_max_ctx_len=20)
    call, _ = call_of(case)
    assert (call.max_query_len, call.max_seq_len) == (30, 20)
    call, _ = call_of(case.replace(max_query_len=5, max_seq_len=7))
    assert (call.max_query_len, call.max_seq_len) == (5, 7)


@pytest.mark.parametrize("output", ["nan", "zeros", "recycled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_output_buffers(output, dtype):
    """The buffer has the contents of output_init, in the model's dtype."""
    buffer = make_output(hostile(output_init=output, dtype=dtype))
    assert buffer.dtype == getattr(torch, dtype)
    assert buffer.isnan().all() == (output == "nan")
    assert (buffer == 0).all() == (output == "zeros")
    if output == "recycled":
        assert (buffer.abs() >= 0.5).all()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"alibi": True},
        {"sinks": True},
        {"op": "unified_attention", "softcap": 30.0},
        {"kv_cache_dtype": "fp8", "k_scale": 0.1, "sm_scale": 0.2},
        {"stage": "int64", "sliding_window": 3, "dtype": "bfloat16"},
    ],
)
def test_saved_and_loaded_bit_by_bit(tmp_path, changes):
    """A call that is read back has the same bits, dtypes and numbers, NaN and None included."""
    call, _ = call_of(hostile(**changes))
    call.save(tmp_path / "call.safetensors")
    again = KernelCall.load(tmp_path / "call.safetensors")
    for field in dataclasses.fields(KernelCall):
        one, other = getattr(call, field.name), getattr(again, field.name)
        if isinstance(one, torch.Tensor):
            assert same_bits(one, other), field.name
        else:
            assert one == other, field.name


def wrong_files(call):
    """Yield (name, tensors, metadata) of files that are not a call."""
    tensors = {
        f.name: getattr(call, f.name).contiguous()
        for f in dataclasses.fields(call)
        if isinstance(getattr(call, f.name), torch.Tensor)
    }
    scalars = {"op": call.op, "kv_cache_dtype": "auto", "max_seq_len": 9, "max_query_len": 9}
    yield "no metadata", tensors, None
    yield "metadata of something else", tensors, {"other": "1"}
    yield "no JSON", tensors, {"attnlab_call": "{"}
    yield "a list", tensors, {"attnlab_call": "[1]"}
    yield "a scalar too many", tensors, {"attnlab_call": json.dumps(scalars | {"nonsense": 1})}
    del scalars["op"]
    yield "a scalar too few", tensors, {"attnlab_call": json.dumps(scalars)}
    scalars["op"] = call.op
    good = {"attnlab_call": json.dumps(scalars)}
    yield "a tensor too many", tensors | {"nonsense": torch.zeros(1)}, good
    yield "a tensor too few", {n: t for n, t in tensors.items() if n != "value"}, good
    yield "a flat query", tensors | {"query": torch.zeros(5)}, good
    yield "no KV heads", tensors | {"key": call.key[:, :0], "value": call.value[:, :0]}, good
    yield "float lengths", tensors | {"seq_lens": call.seq_lens.float()}, good


def test_files_that_hold_no_call(tmp_path):
    """Each raises InvalidCall with one line."""
    call, _ = call_of(hostile(query_lens=(1, 2), ctx_lens=(3, 4)))
    path = tmp_path / "call.safetensors"
    for name, tensors, metadata in wrong_files(call):
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(InvalidCall) as caught:
            KernelCall.load(path)
        assert "\n" not in str(caught.value), name


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64, b"{" * 9, None])
def test_files_that_are_no_safetensors(tmp_path, content):
    """Garbage, an empty file and a missing file: one line with the path."""
    path = tmp_path / "call.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidCall) as caught:
        KernelCall.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_directory_is_no_call(tmp_path):
    with pytest.raises(InvalidCall):
        KernelCall.load(tmp_path)


WRONG_SHAPES = {
    "query": (7, 64),
    "output": (8, 6, 64),
    "key": (7, 3, 63),
    "value": (7, 2, 64),
    "key_cache": (9, 3, 8, 16),
    "value_cache": (9, 3, 64, 15),
    "block_table": (4,),
    "seq_lens": (3,),
    "query_start_loc": (2,),
    "sinks": (5,),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_shapes_that_contradict_each_other(name):
    """The error names the tensor and its shape."""
    call, _ = call_of(hostile(query_lens=(1, 6), ctx_lens=(3, 4)))
    dtype = torch.float32 if name == "sinks" else getattr(call, name).dtype
    wrong = torch.zeros(WRONG_SHAPES[name], dtype=dtype)
    with pytest.raises(InvalidCall) as caught:
        dataclasses.replace(call, **{name: wrong})
    assert str(tuple(WRONG_SHAPES[name])) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be int32 or int64, got torch.float32"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int16)}, "block_table must be int32"),
        ({"sinks": torch.zeros(6, dtype=torch.int32)}, "sinks must be of a floating dtype"),
        ({"key_cache": torch.zeros(9, 3, 7, 16, 8)}, "key_cache must hold heads of 64, got 7 × 8"),
    ],
)
def test_other_contradictions(changes, words):
    """Index tensors must be int32 or int64; the cache must hold whole heads."""
    call, _ = call_of(hostile(query_lens=(1, 6), ctx_lens=(3, 4), num_blocks=9))
    with pytest.raises(InvalidCall) as caught:
        dataclasses.replace(call, **changes)
    assert words in str(caught.value)


def test_query_heads_must_divide():
    """The GQA ratio must be an integer."""
    call, _ = call_of(hostile(query_lens=(1, 6), ctx_lens=(3, 4)))
    five = torch.zeros(7, 5, 64, dtype=torch.float16)
    with pytest.raises(InvalidCall, match="multiple of 3 heads"):
        dataclasses.replace(call, query=five, output=five.clone())


def test_no_kv_heads_at_all():
    """Zero KV heads are refused, without a division by zero."""
    call, _ = call_of(hostile(query_lens=(1, 6), ctx_lens=(3, 4)))
    names = ("key", "value", "key_cache", "value_cache")
    with pytest.raises(InvalidCall, match="multiple of 0 heads"):
        dataclasses.replace(call, **{name: getattr(call, name)[:, :0] for name in names})


# A hollow call differs from the Case's call in its numbers only.


@pytest.mark.parametrize(
    "changes",
    [
        *({"op": op} for op in TRITON_OPS if OPS[op].prefill and op != ENCODER),
        {"op": DECODE_FWD, "query_lens": (1, 1), "ctx_lens": (5, 30)},
        {"op": ENCODER, "query_lens": (1, 7), "ctx_lens": (0, 0)},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8", "op": WRITE},
        {"sinks": True, "alibi": True, "stage": "int64", "pad_batch": 2},
    ],
    ids=str,
)
def test_only_the_numbers_differ(changes):
    """Every other field is equal: shapes, dtypes and strides, index tensors, options."""
    case = hostile(**changes)
    call, hollow = Lab().call(case), hollow_call(case)
    for field in dataclasses.fields(call):
        real, other = getattr(call, field.name), getattr(hollow, field.name)
        if not isinstance(real, torch.Tensor):
            assert other == real, field.name
            continue
        for fact in ("shape", "dtype"):
            assert getattr(other, fact) == getattr(real, fact), (field.name, fact)
        assert other.stride() == real.stride(), field.name
        if not real.is_floating_point() and not field.name.endswith("_cache"):
            assert torch.equal(other, real), field.name
