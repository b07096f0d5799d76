"""A wrong cache write is described slot by slot, and an edit of its kernel that repairs it is found."""

from pathlib import Path

import pytest
from helpers.fake_ops import made
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.written_cache import diagnose_write
from attnlab.lab.cache_write import expected_write
from attnlab.lab.lab import Lab

pytestmark = needs_triton

# Each half has a kernel argument of its own, as in vLLM's and SGLang's ops.
WRITE = """
@triton.jit
def write_kernel(
    key, value, key_cache, value_cache, slots, key_stride, value_stride, block_stride, slot_stride,
    head_stride, block_size, SIZE: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    d = tl.arange(0, SIZE)
    block, place = slot // block_size, slot % block_size
    old = block * block_stride + place * slot_stride + head * head_stride + d
    k = tl.load(key + token * key_stride + head * SIZE + d)
    v = tl.load(value + token * value_stride + head * SIZE + d)
    tl.store(key_cache + old, k)
    tl.store(value_cache + old, v)


def triton_reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    if kv_cache_dtype != "auto":
        raise NotImplementedError("it has no scales")
    strides = key.stride(0), value.stride(0), *key_cache.stride()[:3]
    write_kernel[(len(slot_mapping), key.shape[1])](
        key, value, key_cache, value_cache, slot_mapping, *strides, key_cache.shape[1], key.shape[2]
    )
"""
CASE = Case(
    op="reshape_and_cache_flash",
    backend="vllm",
    platform="sm_90",
    query_lens=(3, 1, 20),
    ctx_lens=(20, 5, 0),
    num_heads=4,
    num_queries_per_kv=2,
    head_size=32,
    block_size=16,
    distribution="normal",
)


def found(folder: Path, old: str = "", new: str = "") -> Diagnosis:
    """Return the diagnosis of the kernel with one change."""
    assert old in WRITE
    made(folder, triton_reshape_and_cache_flash=WRITE.replace(old, new, 1))
    return diagnose(CASE, lab=Lab(source=folder, device="cpu"))


def test_a_right_write_has_no_fault(tmp_path):
    seen = found(tmp_path)
    assert (seen.status, seen.repair) == ("nothing wrong", None)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("slot % block_size", "slot // block_size"),  # of both halves
        ("tl.load(value +", "tl.load(key +"),  # of the values alone
    ],
)
def test_the_edit_that_repairs_a_write_is_stated(tmp_path, right, wrong):
    seen = found(tmp_path, right, wrong)
    assert seen.status == "described"
    assert wrong in seen.repair.source
    assert "the cache is right" in seen.conclusion
    assert seen.pattern.facts[0].kind == "slots"


@pytest.mark.parametrize("contents", ["zeros", "garbage"])
@pytest.mark.parametrize(
    ("stored", "text"),
    [("", "the key is not written"), ("k * 0", "the key is stored as zeros")],
    ids=["nothing", "zeros"],
)
def test_half_a_token_that_is_wrong_is_described(tmp_path, contents, stored, text):
    """If the slot held zeros before, nothing shows that zeros were stored."""
    line = "    tl.store(key_cache + old, k)\n"
    wrong = line.replace("k)", f"{stored})") if stored else ""
    made(tmp_path, triton_reshape_and_cache_flash=WRITE.replace(line, wrong))
    case, lab = CASE.replace(empty_slots=contents), Lab(source=tmp_path, device="cpu")
    pattern = diagnose_write(lab.call(case), Target.of(case), output=lab.run(case).output).pattern
    is_hidden = contents == "zeros"
    assert ("the key is not written" if is_hidden else text) in pattern.facts[1].what


@pytest.mark.parametrize(("contents", "is_said"), [("nan", False), ("garbage", True)])
def test_nan_of_a_decoded_cache_does_not_show_that_nothing_was_written(contents, is_said):
    """A wrong scale makes NaN of integers that were written."""
    fields = {"op": "lmdeploy_fill_kv_cache_int8", "backend": "library:lmdeploy"}
    case = CASE.replace(**fields, empty_slots=contents)
    call = Lab(device="cpu").call(case).cpu()
    before = expected_write(call, Target.of(case)).before.to(call.buffer.dtype)
    pattern = diagnose_write(call, Target.of(case), output=before).pattern
    assert any("not written" in fact.what for fact in pattern.facts) == is_said


def test_changes_of_slots_without_a_token_are_counted():
    lab = Lab(device="cpu")
    call = lab.call(CASE)
    right = expected_write(call, Target.of(CASE))
    output = lab.output(CASE.replace(backend="model")).clone()
    empty = [int(slot) for slot in (right.token < 0).nonzero()[:2]]
    output[empty] += 1
    seen = diagnose_write(call, Target.of(CASE), output=output)
    assert seen.status == "unexplained"
    assert seen.conclusion == "in this call, 2 slots that hold none of its tokens changed"
