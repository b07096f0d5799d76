"""The file of a call: storages with strides, named blocks, the format's version, and old files."""

import dataclasses
import json
import struct
from pathlib import Path

import jsonschema
import pytest
import torch
from helpers.cases import call_of, hostile, same_bits
from safetensors import safe_open
from safetensors.torch import save_file

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import UNIFIED
from attnlab.tensors import call as call_module
from attnlab.tensors import call_file
from attnlab.tensors.cache import in_layout
from attnlab.tensors.call import KernelCall, Origin

OLD_CALL = {
    "op": "unified_attention",
    "kv_cache_dtype": "auto",
    "max_seq_len": 3,
    "max_query_len": 1,
    "k_scale": 1.0,
    "v_scale": 1.0,
    "sliding_window": 0,
    "sm_scale": 0.5,
    "interleave_v": False,
    "strides": "contiguous",
    "padding": 0,
}
# Of each tensor: shape, dtype in safetensors, format in struct, and the numbers.
_TENSORS = {
    "query": ([1, 1, 4], "F32", "f", [1.0, 0.5, 0.25, 2.0]),
    "key": ([1, 1, 4], "F32", "f", [0.0] * 4),
    "value": ([1, 1, 4], "F32", "f", [0.0] * 4),
    "output": ([1, 1, 4], "F32", "f", [0.0] * 4),
    "key_cache": ([2, 1, 1, 4, 4], "F32", "f", list(range(32))),
    "value_cache": ([2, 1, 4, 4], "F32", "f", list(range(32))),
    "block_table": ([1, 1], "I32", "i", [1]),
    "query_start_loc": ([2], "I32", "i", [0, 1]),
    "seq_lens": ([1], "I32", "i", [3]),
}


def write_old_call(path: Path) -> None:
    """Write the file: the length of the header, the header in JSON, and the numbers."""
    header: dict[str, object] = {"__metadata__": {"attnlab_call": json.dumps(OLD_CALL)}}
    data = b""
    for name, (shape, dtype, code, numbers) in _TENSORS.items():
        part = struct.pack(f"<{len(numbers)}{code}", *numbers)
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


SCHEMA = Path(__file__).parents[2] / "docs" / "call-file.schema.json"
ORIGIN = Origin(op="vllm.f", program="vllm", release="0.33.0", layer="3", step=7, rank=0)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def fused(num_blocks=20, value_size=32):
    """Return a decode of two sequences whose keys and values share the blocks of one storage, with padding
    after each block, and whose query is a slice of a fused projection."""
    torch.manual_seed(0)
    pool = torch.randn(num_blocks, 2 * 16 * 2 * 32 + 64).half()
    both = pool[:, : 2 * 16 * 2 * 32].unflatten(1, (2, 16, 2, 32))
    projection = torch.randn(2, 8, 32).half()
    table = torch.full((2, 4), -1, dtype=torch.int32)
    table[0, :2], table[1, :1] = int32(17, 3), int32(3)
    return KernelCall.from_tensors(
        query=projection[:, 2:6],
        key_cache=both[:, 0],
        value_cache=both[:, 1][..., :value_size],
        block_table=table[:, :3],
        seq_lens=int32(20, 9),
        layout="flash",
        op=UNIFIED,
        origin=ORIGIN,
        unmodelled=("qq_bias",),
    )


def same(one, other):
    """Answer whether two calls have equal fields: bits, shapes and strides."""
    for field in dataclasses.fields(KernelCall):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            if not same_bits(a, b) or a.stride() != b.stride():
                return False
        elif a != b:
            return False
    return True


def document(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["attnlab_call"])


def test_storage_stride_and_offset_survive(tmp_path):
    call = fused()
    call.save(tmp_path / "call")
    again = KernelCall.load(tmp_path / "call")
    assert same(call, again)
    assert again.query.storage_offset() == call.query.storage_offset() == 64
    storages = {one.untyped_storage().data_ptr() for one in (again.key_cache, again.value_cache)}
    assert len(storages) == 1
    key, value = in_layout(again.key_cache, again.value_cache, again.layout)
    assert key.stride() == value.stride() == (2 * 16 * 2 * 32 + 64, 64, 32, 1)
    assert (again.origin, again.unmodelled) == (ORIGIN, ("qq_bias",))


def test_a_changed_stride_is_seen():
    """The comparison of these tests can fail."""
    call = fused()
    assert not same(call, dataclasses.replace(call, query=call.query.contiguous()))


def test_keys_and_values_of_different_width(tmp_path):
    call = fused(value_size=16)
    call.save(tmp_path / "call")
    assert same(call, KernelCall.load(tmp_path / "call"))
    assert call.with_buffer().buffer.shape == (2, 4, 16)


def test_only_the_named_blocks_of_a_large_cache(tmp_path, monkeypatch):
    """The blocks 3 and 17 become 0 and 1; strides, padding entries and numbers are kept."""
    call = fused()
    monkeypatch.setattr(call_module, "_LARGE_CACHE", 1 << 10)
    call.save(tmp_path / "call")
    again = KernelCall.load(tmp_path / "call")
    assert again.block_ids.tolist() == [3, 17]
    assert again.block_table.tolist() == [[1, 0, -1], [0, -1, -1]]
    assert again.block_table.stride() == call.block_table.stride()
    for name in ("key_cache", "value_cache"):
        one, other = getattr(again, name), getattr(call, name)
        assert one.stride() == other.stride()
        assert same_bits(one, other[[3, 17]])
    gap = again.value_cache.storage_offset() - again.key_cache.storage_offset()
    assert gap == call.value_cache.storage_offset() - call.key_cache.storage_offset()
    assert again.with_named_blocks().block_ids.tolist() == [3, 17]


def test_a_block_number_beyond_the_cache_stays_beyond_it():
    call = fused()
    table = call.block_table.clone()
    table[1, 0] = 25
    named = dataclasses.replace(call, block_table=table).with_named_blocks()
    assert named.block_table.tolist() == [[1, 0, -1], [25, -1, -1]]


def test_separate_caches_and_scales_of_slots():
    """Keys and values of two storages, and a scale of each slot, follow the blocks."""
    call = fused()
    caches = {name: getattr(call, name).clone() for name in ("key_cache", "value_cache")}
    scale = torch.rand(20, 16, 2)
    named = dataclasses.replace(call, **caches, k_scale=scale).with_named_blocks()
    assert same_bits(named.k_scale, scale[[3, 17]])
    assert same_bits(named.key_cache, call.key_cache[[3, 17]])
    assert same_bits(named.value_cache, call.value_cache[[3, 17]])


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "fp8"}, {"alibi": True, "sinks": True}])
def test_the_document_follows_its_schema(tmp_path, changes):
    schema = json.loads(SCHEMA.read_text())
    for number, call in enumerate((fused(), call_of(hostile(**changes))[0])):
        call.save(tmp_path / str(number))
        found = document(tmp_path / str(number))
        jsonschema.validate(found, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found, "format": 1}, schema)
    fields = {field.name for field in dataclasses.fields(KernelCall)}
    parts = schema["properties"]
    named = {*parts["scalars"]["properties"], *parts["tensors"]["properties"], "origin"}
    assert named == fields
    origin = {field.name for field in dataclasses.fields(Origin)}
    assert set(parts["origin"]["properties"]) == origin


def test_a_file_of_format_1_loads(tmp_path):
    """The file is that of attnlab 0.1.0: contiguous tensors and a document without a format."""
    write_old_call(tmp_path / "old")
    call = KernelCall.load(tmp_path / "old")
    assert (call.op, call.sm_scale, call.max_seq_len) == (OLD_CALL["op"], 0.5, 3)
    assert call.block_table.tolist() == [[1]]
    assert call.key_cache.flatten().tolist() == list(range(32))
    assert (call.new_tokens, call.layout, call.origin) == ("given", "x-split", Origin())
    call.save(tmp_path / "new")
    assert same(call, KernelCall.load(tmp_path / "new"))


def test_a_missing_output_is_not_a_number(tmp_path):
    """Neither a call without an output nor an output of NaN becomes the other."""
    missing = fused()
    of_nan = dataclasses.replace(missing, output=torch.full((2, 4, 32), torch.nan).half())
    for name, call in (("missing", missing), ("nan", of_nan)):
        call.save(tmp_path / name)
    assert KernelCall.load(tmp_path / "missing").output is None
    assert KernelCall.load(tmp_path / "nan").output.isnan().all()
    assert document(tmp_path / "missing")["missing"] == ["output"]
    assert "output" not in document(tmp_path / "missing")["tensors"]
    with pytest.raises(InvalidCall, match="without a recorded output") as error:
        _ = missing.buffer
    assert error.value.field == "output"


@pytest.mark.parametrize("before", [None, 0.0])
def test_an_older_file_with_an_output_of_nan(tmp_path, monkeypatch, before):
    """It may stand for none there, and is taken for none, unless the file has the buffer before the call."""
    output = torch.full((2, 4, 32), torch.nan).half()
    held = None if before is None else torch.full_like(output, before)
    path = tmp_path / "old"

    def written(storages, part, metadata):
        older = json.loads(metadata["attnlab_call"])
        del older["missing"]
        save_file(storages, part, metadata={"attnlab_call": json.dumps(older)})

    monkeypatch.setattr(call_file, "save_file", written)
    dataclasses.replace(fused(), output=output, before=held).save(path)
    assert (KernelCall.load(path).output is None) == (before is None)
    dataclasses.replace(fused(), output=torch.ones_like(output), before=held).save(path)
    assert KernelCall.load(path).output is not None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_file_loads_that_calls_the_cache_of_an_fp8_query_auto(tmp_path, dtype):
    """Files that were saved before a call had a q_scale do so."""
    call = fused()
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() and name != "output" else tensor
        for name, tensor in call.tensors().items()
    }
    scalars = {"op": UNIFIED, "kv_cache_dtype": "auto", "layout": "flash", "max_query_len": 1}
    scalars |= {"max_seq_len": 20, "new_tokens": "in the cache", "unmodelled": ["q_descale"]}
    call_file.write(tmp_path / "old", scalars, tensors, {})
    name = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}[dtype]
    assert KernelCall.load(tmp_path / "old").kv_cache_dtype == name


def broken_documents(found):
    """Yield (name, document) of documents that are not a call."""
    yield "a newer format", {**found, "format": 3}
    yield "a format in words", {**found, "format": "two"}
    yield "no tensors", {**found, "tensors": None}
    yield "an unknown scalar", {**found, "scalars": {**found["scalars"], "nonsense": 1}}
    yield "an unknown origin", {**found, "origin": {"nonsense": 1}}
    yield "a step in words", {**found, "origin": {"step": "one"}}
    query = found["tensors"]["query"]
    wrong = {
        "storage": "storage.99",
        "dtype": "float12",
        "shape": [2, 4],
        "stride": [1, 1, -1],
        "offset": 10**12,
    }
    for name, value in wrong.items():
        entry = {**query, name: value}
        yield (
            f"query with another {name}",
            {**found, "tensors": {**found["tensors"], "query": entry}},
        )
    for entry in (None, [1], {}, {**query, "nonsense": 1}, {**query, "shape": "12"}):
        yield f"query as {entry}", {**found, "tensors": {**found["tensors"], "query": entry}}


def test_broken_documents_are_one_line(tmp_path):
    fused().save(tmp_path / "call")
    found = document(tmp_path / "call")
    with safe_open(tmp_path / "call", framework="pt") as file:
        storages = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    count = 0
    for name, wrong in broken_documents(found):
        save_file(storages, tmp_path / "wrong", metadata={"attnlab_call": json.dumps(wrong)})
        with pytest.raises(InvalidCall) as caught:
            KernelCall.load(tmp_path / "wrong")
        assert "\n" not in str(caught.value), name
        count += 1
    assert count == 16


def test_a_truncated_file_is_one_line(tmp_path):
    fused().save(tmp_path / "call")
    data = (tmp_path / "call").read_bytes()
    for size in (4, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "part").write_bytes(data[:size])
        with pytest.raises(InvalidCall) as caught:
            KernelCall.load(tmp_path / "part")
        assert str(caught.value).startswith(str(tmp_path / "part"))
        assert "\n" not in str(caught.value)
