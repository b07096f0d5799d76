"""attnlab.capture: what it records, that the program is unchanged, and the ops of other libraries."""

import importlib
import logging
import sys
import types

import pytest
import torch
from helpers.recorded import (
    KERNEL,
    batch,
    decode_module,
    flash_attention_module,
    flashinfer_module,
    planned_wrapper,
    write_module,
)

import attnlab
from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.kernels.triton.interpreter import interpret_if_possible
from attnlab.recorder.capture import Capture
from attnlab.replay.parts import KeptSequence, with_sequences


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A module with the op ``paged``, and a module that has imported the op's name from it."""
    write_module(tmp_path, "recorded_kernel", KERNEL)
    write_module(tmp_path, "its_caller", "from recorded_kernel import paged as op\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("recorded_kernel", "its_caller")
    importlib.invalidate_caches()
    yield names
    for name in names:
        sys.modules.pop(name, None)


OPS = ("recorded_kernel:paged",)


def imported(name):
    """Import a caller; return a function that calls the op by the caller's name for it."""
    caller = importlib.import_module(name)
    return lambda **given: caller.op(**given)


def test_a_name_imported_before(kernel):
    """The caller's name is wrapped, and put back after the block."""
    caller = importlib.import_module("its_caller")
    original = caller.op
    with attnlab.capture(ops=OPS) as calls:
        assert caller.op is not original
        caller.op(**batch())
    assert caller.op is original
    assert sys.modules["recorded_kernel"].paged is original
    assert len(calls) == calls.seen == 1
    caller.op(**batch())
    assert calls.seen == 1


def test_a_module_imported_inside(kernel):
    """The import hook wraps the op before the caller imports its name; afterwards both are restored."""
    with attnlab.capture(ops=OPS) as calls:
        caller = importlib.import_module("its_caller")
        caller.op(**batch())
    assert calls.seen == 1
    assert caller.op is sys.modules["recorded_kernel"].paged
    assert not hasattr(caller.op, "__wrapped__")
    assert sys.modules["recorded_kernel"].__spec__.loader is not None
    assert importlib.reload(sys.modules["recorded_kernel"]).FACTOR == 1.0


def test_inputs_before_and_outputs_before_and_after(kernel):
    """Changes after the call reach no copy; the output has both its contents."""
    op = imported("its_caller")
    given = batch()
    with attnlab.capture(ops=OPS) as calls:
        op(**given)
    written = given["out"].clone()
    for tensor in given.values():
        tensor.zero_()
    call = calls[-1]
    assert torch.equal(call.output, written)
    assert call.before.isnan().all()
    assert bool(call.key_cache.any())
    assert call.block_table.max() > 0
    assert call.key_cache.stride() == (2 * 16 * 2 * 64, 64, 8, 128, 1)
    assert (call.new_tokens, call.layout, call.op) == ("in the cache", "flash", "unified_attention")
    assert (call.origin.op, call.origin.platform) == ("recorded_kernel.paged", "cpu")


def test_a_recorded_call_is_diagnosed(kernel, tmp_path):
    module = importlib.import_module("recorded_kernel")
    with attnlab.capture(ops=OPS) as calls:
        module.paged(**batch())
        module.FACTOR = 2.0
        module.paged(**batch())
    assert attnlab.diagnose(calls[0]).status == "nothing wrong"
    calls[1].save(tmp_path / "call")
    found = attnlab.diagnose(attnlab.KernelCall.load(tmp_path / "call"))
    assert found.cause.name == "scale_doubled"
    assert any("contracts of recorded_kernel.paged" in text for text in found.unknown)
    assert list(attnlab.violations(calls[1])) == []


def test_only_the_last_calls_are_kept(kernel):
    op = imported("its_caller")
    with attnlab.capture(ops=OPS, keep=2) as calls:
        for scale in (0.1, 0.2, 0.3):
            op(**batch(), scale=scale)
    assert [call.sm_scale for call in calls] == [0.2, 0.3]
    assert calls.seen == 3
    assert [call.sm_scale for call in calls[-1:]] == [0.3]


def test_a_large_cache_is_kept_by_its_named_blocks(kernel):
    op = imported("its_caller")
    given = batch(num_blocks=9000)
    with attnlab.capture(ops=OPS) as calls:
        op(**given)
    call = calls[-1]
    assert call.key_cache.shape[0] == 8 == len(call.block_ids)
    ids = given["block_table"].flatten().sort().values
    assert call.block_ids.tolist() == ids.tolist()
    assert attnlab.diagnose(call).status == "nothing wrong"


def test_an_error_of_the_op_is_the_users(kernel):
    """It is raised unchanged, and the call is kept with its text."""
    op = imported("its_caller")
    with attnlab.capture(ops=OPS) as calls, pytest.raises(IndexError):
        op(**{**batch(), "block_table": torch.full((2, 4), 99, dtype=torch.int32)})
    assert calls.recorded[-1].rejection.startswith("IndexError")
    with pytest.raises(InvalidCall, match=r"block_table\[0\]\[0\] must be from 0 to 11, got 99"):
        _ = calls[-1]


def test_a_rejected_call_is_a_diagnosis(kernel):
    module = importlib.import_module("recorded_kernel")
    module.REJECT = "head size is not supported"
    with attnlab.capture(ops=OPS) as calls, pytest.raises(ValueError, match="head size"):
        module.paged(**batch())
    found = attnlab.diagnose(calls[-1])
    assert found.status == "rejected"
    assert found.rejection == "ValueError: head size is not supported"


def test_an_error_inside_is_logged_once(kernel, monkeypatch, caplog):
    """The program gets its results; two calls that cannot be recorded give one line."""
    op = imported("its_caller")

    def broken(fields):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("attnlab.recorder.capture.copy_fields", broken)
    with caplog.at_level(logging.WARNING, "attnlab.recorder"), attnlab.capture(ops=OPS) as calls:
        for _ in range(2):
            given = batch()
            op(**given)
            assert given["out"].isfinite().all()
    assert len(calls) == 0
    assert len(caplog.records) == 1
    assert "no memory at all" in caplog.text


def test_wrong_arguments_raise_what_they_raise_without_capture(kernel):
    op = imported("its_caller")
    with attnlab.capture(ops=OPS), pytest.raises(TypeError, match="unexpected keyword"):
        op(**batch(), nonsense=1)


def test_calls_that_are_no_paged_attention_are_left_out(kernel):
    """Here the block table is missing."""
    module = types.ModuleType("other_kernel")
    exec("def run(q, k_cache, v_cache):\n    return q", vars(module))
    sys.modules["other_kernel"] = module
    try:
        with attnlab.capture(ops=("other_kernel:run",)) as calls:
            module.run(*[torch.zeros(1)] * 3)
    finally:
        del sys.modules["other_kernel"]
    assert len(calls) == 0


@pytest.mark.parametrize("changes", [{"keep": 0}, {"keep": True}, {"ops": ("nonsense",)}])
def test_bad_arguments_of_capture(changes):
    with pytest.raises(InvalidCase), attnlab.capture(**changes):
        pass


# torch's scaled_dot_product_attention.


@pytest.mark.parametrize(
    ("shape", "keys", "options"),
    [
        ((2, 4, 7, 32), 7, {"is_causal": True}),
        ((2, 4, 5, 32), 9, {"is_causal": True}),  # the first row sees the first key
        ((2, 4, 7, 32), 9, {}),
        ((3, 4, 1, 32), 20, {"scale": 0.3}),
        ((3, 7, 32), 9, {}),
    ],
)
def test_sdpa(shape, keys, options):
    """It is found correct, and wrong after a change of its output."""
    torch.manual_seed(0)
    heads = (*shape[:-3], 2) if len(shape) == 4 else shape[:-2]
    query, key, value = (torch.randn(s) for s in (shape, *[(*heads, keys, 32)] * 2))
    enable = {"enable_gqa": True} if len(shape) == 4 else {}
    with attnlab.capture() as calls:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, **options, **enable)
    call = calls[-1]
    assert attnlab.diagnose(call).status == "nothing wrong"
    assert attnlab.diagnose(call, call.output * 1.01).status != "nothing wrong"


def test_what_has_no_reference_is_kept_and_named():
    query = torch.randn(1, 2, 7, 32)
    with attnlab.capture() as calls:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert calls[-1].unmodelled == ("dropout_p",)
    with pytest.raises(InvalidCall, match="dropout_p"):
        attnlab.diagnose(calls[-1])


def masks():
    torch.manual_seed(1)
    return {
        "booleans": torch.rand(2, 1, 5, 9) > 0.3,
        "of a sequence": torch.rand(5, 9) > 0.3,
        "of a head": torch.randn(2, 4, 5, 9),
        "added": torch.randn(5, 9).masked_fill(torch.rand(5, 9) > 0.7, -torch.inf),
    }


@pytest.mark.parametrize("name", masks())
def test_sdpa_with_a_mask(name):
    """The mask is in the call: the output is right, that of a mask with other rows is not."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 32) for heads, n in ((4, 5), (2, 9), (2, 9)))
    mask = masks()[name]
    mask[..., 0] = 1
    with attnlab.capture() as calls:
        for one in (mask, mask.roll(1, -2)):
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=one, enable_gqa=True
            )
    first, second = calls
    assert attnlab.diagnose(first).status == "nothing wrong"
    assert attnlab.diagnose(first, second.output).status != "nothing wrong"
    assert first.qq_bias.shape == (2 if "head" not in name else 8, 5, 9)


def test_a_part_of_a_call_has_its_part_of_the_mask():
    query, mask = torch.randn(3, 2, 6, 16), torch.rand(3, 1, 6, 6) > 0.4
    mask[..., 0] = True
    with attnlab.capture() as calls:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    kept = [KeptSequence(seq=2, first=1, last=6), KeptSequence(seq=0, first=0, last=6)]
    part = with_sequences(calls[0], kept)
    assert attnlab.diagnose(part).status == "nothing wrong"
    assert attnlab.diagnose(part, part.output.roll(1, 0)).status != "nothing wrong"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    """mask_mod and score_mod are evaluated; what they hide or add is in the call."""
    interpret_if_possible()  # torch imports Triton, which other tests interpret
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    torch.manual_seed(0)
    query = torch.randn(2, 4, 16, 16)
    slopes = torch.randn(4)
    block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    with attnlab.capture() as calls:
        for shift in (0, 1):
            flex.flex_attention(
                *[query] * 3,
                block_mask=block_mask,
                score_mod=lambda s, b, h, i, j, shift=shift: s + slopes[h] * (j - i + shift * j),
            )
    assert attnlab.diagnose(calls[0]).status == "nothing wrong"
    assert attnlab.diagnose(calls[0], calls[1].output).status != "nothing wrong"


# Libraries that are not installed where the tests run: modules with their signatures stand in for them.


@pytest.mark.parametrize("name", ["vllm.vllm_flash_attn", "flash_attn"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention(name, with_lse):
    with (
        flash_attention_module(f"{name}.flash_attn_interface") as module,
        attnlab.capture() as calls,
    ):
        module.run(with_lse)
    call = calls[-1]
    assert call.origin.op == f"{name}.flash_attn_interface.flash_attn_varlen_func"
    assert (call.lse is not None) == with_lse
    assert attnlab.diagnose(call).status == "nothing wrong"
    assert call.sliding_window == 12


def test_flash_attention_without_a_block_table_is_left_out():
    with (
        flash_attention_module("flash_attn.flash_attn_interface") as module,
        attnlab.capture() as calls,
    ):
        module.run(paged=False)
    assert len(calls) == 0


@pytest.mark.parametrize("fault", [False, True])
def test_flash_attention_without_pages(fault):
    starts, lens = torch.tensor([0, 5, 6]).int(), torch.tensor([0, 40, 73]).int()
    query, (key, value) = torch.randn(6, 4, 64).half(), torch.randn(2, 73, 2, 64).half()
    with (
        flash_attention_module("flash_attn.flash_attn_interface") as module,
        attnlab.capture() as calls,
    ):
        module.FACTOR = 0.9 if fault else 1.0
        module.flash_attn_varlen_func(query, key, value, 5, starts, 40, lens, causal=True)
    assert (attnlab.diagnose(calls[-1]).status == "nothing wrong") is not fault


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_flashinfer(kind, layout):
    with flashinfer_module(kind) as module, attnlab.capture() as calls:
        module.run(layout)
    call = calls[-1]
    assert call.layout == {"HND": "HND", "NHD": "flash"}[layout]
    assert attnlab.diagnose(call).status == "nothing wrong"


@pytest.mark.parametrize("fault", [False, True])
def test_wrapper_of_flashinfer(fault):
    with planned_wrapper(fault) as module, attnlab.capture() as calls:
        module.run()
    assert calls[-1].origin.op == "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run"
    assert (attnlab.diagnose(calls[-1]).status == "nothing wrong") is not fault
    assert not hasattr(module.BatchPrefillWithPagedKVCacheWrapper.run, "__wrapped__")  # undone


def test_wrapper_of_flashinfer_without_a_plan():
    one = Capture()
    with planned_wrapper(fault=False) as module:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1))
        one.start()
        with pytest.raises(AttributeError):
            wrapper.run(torch.zeros(1, 4, 64), torch.zeros(2, 2, 16, 2, 64))
        one.stop()
    reasons = one.left_out["flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run"]
    assert "no page list of a plan" in reasons


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(
    "function",
    ["flash_attn_with_kvcache", "flash_mla_with_kvcache", "trtllm_batch_decode_with_kv_cache_mla"],
)
def test_decodes_with_a_query_per_sequence(function, fault):
    with decode_module(function, fault) as module, attnlab.capture() as calls:
        module.run()
    assert (attnlab.diagnose(calls[-1]).status == "nothing wrong") is not fault


# Entry points.


class Point:
    """An entry point of another package."""

    name = "theirs"

    def __init__(self, loaded):
        self.loaded = loaded

    def load(self):
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_ops_of_entry_points(kernel, monkeypatch, caplog):
    """A function is found by its module and name; a broken entry point is logged."""
    function = importlib.import_module("recorded_kernel").paged
    points = [Point(ImportError("gone")), Point(function), Point([function])]
    monkeypatch.setattr("attnlab.recorder.ops.entry_points", lambda group: points)
    with attnlab.capture() as calls:
        importlib.import_module("its_caller").op(**batch())
    assert calls.seen == 1
    assert "gone" in caplog.text


def test_two_captures_at_once(kernel):
    """The inner one is removed without the outer one's wrapper."""
    op = importlib.import_module("recorded_kernel")
    original = op.paged
    outer, inner = Capture(ops=OPS), Capture(ops=OPS)
    outer.start()
    inner.start()
    op.paged(**batch())
    inner.stop()
    op.paged(**batch())
    outer.stop()
    assert op.paged is original
    assert outer.calls.seen + inner.calls.seen >= 2
