"""vLLM's cache writes: recorded with their slot_mapping, diagnosed, replayed, and seen by the plugin."""

import dataclasses
import sys
import types

import pytest
import torch
from helpers.sources import needs_triton, of_release

import attnlab
from attnlab.case.errors import InvalidCall
from attnlab.case.platforms import PLATFORMS
from attnlab.kernels.vllm.backend import load
from attnlab.recorder import snapshot
from attnlab.recorder.capture import Capture
from attnlab.recorder.failing_side import Comparison
from attnlab.recorder.failure_report import report_failure

BLOCKS, SIZE, HEADS, WIDTH = 8, 16, 2, 32
SLOTS = torch.tensor([37, 3, -1, 90, 91])  # the third token is padding


def plain(name, fault, key, value, key_cache, value_cache, slot_mapping, dtype, k_scale, v_scale):
    """Write a cache as vLLM's C++ ops do, with a fault."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0 or (fault == "skip" and token == 3):
            continue
        block, offset = divmod(slot + (fault == "shift"), SIZE)
        both = [key[token], value[token]]
        both = both[::-1] if fault == "exchange" else both
        both = [one.roll(1, 0) for one in both] if fault == "other_head" else both
        if fault == "half" and token == 0:
            both[0] = both[0] * 0.5
        if dtype.startswith("fp8"):
            scales = (float(k_scale), float(v_scale))
            stored = [
                (one / scale).to(torch.float8_e4m3fn)
                for one, scale in zip(both, scales, strict=True)
            ]
            both = [one.view(key_cache.dtype) for one in stored]
        if name == "reshape_and_cache":
            key_cache[block, :, :, offset] = both[0].view(HEADS, -1, key_cache.shape[4])
            value_cache[block, :, :, offset] = both[1]
        else:
            key_cache[block, offset], value_cache[block, offset] = both
    if fault == "extra":
        key_cache.view(BLOCKS, -1)[6] = 0


@pytest.fixture
def custom_ops(monkeypatch):
    """A module with the names and arguments of vLLM's cache writes; ``fault`` is what they do wrong."""
    module = types.ModuleType("vllm._custom_ops")
    module.fault = ""
    names = "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale"
    for name in ("reshape_and_cache", "reshape_and_cache_flash"):
        text = f"def {name}({names}):\n    plain('{name}', fault, {names})\n"
        vars(module)["plain"] = plain
        exec(text, vars(module))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", module)
    return module


def arguments(name="reshape_and_cache_flash", kind="auto"):
    """Return arguments of a cache write."""
    torch.manual_seed(0)
    dtype = torch.uint8 if kind == "fp8" else torch.float16
    shapes = [(BLOCKS, SIZE, HEADS, WIDTH)] * 2
    if name == "reshape_and_cache":
        x = 16 // torch.tensor([], dtype=dtype).element_size()
        shapes = [(BLOCKS, HEADS, WIDTH // x, SIZE, x), (BLOCKS, HEADS, WIDTH, SIZE)]
    caches = [torch.randn(shape).half() for shape in shapes]
    if kind == "fp8":
        caches = [cache.to(torch.float8_e4m3fn).view(torch.uint8) for cache in caches]
    return {
        "key": torch.randn(5, HEADS, WIDTH).half(),
        "value": torch.randn(5, HEADS, WIDTH).half(),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": SLOTS.clone(),
        "kv_cache_dtype": kind,
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.25),
    }


def written(module, name="reshape_and_cache_flash", kind="auto", fault=""):
    """Record one write."""
    module.fault = fault
    with attnlab.capture() as calls:
        getattr(module, name)(**arguments(name, kind))
    return calls[-1]


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("name", ["reshape_and_cache_flash", "reshape_and_cache"])
def test_a_sound_write(custom_ops, name, kind):
    """The recorded cache is that before the write, the output that after it; the model writes the same."""
    given = arguments(name, kind)
    call = written(custom_ops, name, kind)
    assert call.origin.op == f"vllm._custom_ops.{name}"
    assert (call.op, call.slot_mapping.tolist()) == ("reshape_and_cache_flash", SLOTS.tolist())
    assert torch.equal(call.value_cache.flatten(), attnlab_view(given, name).flatten())
    assert call.k_scale == 0.5
    assert attnlab.diagnose(call).status == "nothing wrong"
    (replay,) = attnlab.replay_call(call).replays
    assert (replay.status, replay.from_recorded.other_bits) == ("match", 0)


def attnlab_view(given, name):
    """Return the values before the write in the layout of a KernelCall."""
    cache = given["value_cache"]
    return cache if name == "reshape_and_cache" else cache.permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("fault", "kind", "slots"),
    [
        ("shift", "misplaced", {38, 4, 91, 92}),
        ("skip", "not_written", {90}),
        ("exchange", "exchanged", {37, 3, 90, 91}),
        ("other_head", "heads", {37, 3, 90, 91}),
        ("extra", None, set(range(6 * SIZE, 7 * SIZE))),
        ("half", None, {37}),
    ],
)
def test_faults_of_a_write(custom_ops, fault, kind, slots):
    """Each is described by its rule; what no rule reproduces stays unexplained, with its slots."""
    call = written(custom_ops, fault=fault)
    found = attnlab.diagnose(call)
    assert found.status == ("unexplained" if kind is None else "described")
    (place,) = found.pattern.of("slots")
    assert slots <= set(place.values["slots"])
    if kind is not None:
        assert slots <= set(found.pattern.of(kind)[0].values["slots"])
    replays = attnlab.replay_call(call)
    assert (replays.recorded, replays.replays[0].status) == ("mismatch", "match")


def test_the_text_of_a_shift(custom_ops):
    found = attnlab.diagnose(written(custom_ops, fault="shift"))
    assert "1 slot after the slot in slot_mapping" in " ".join(found.sentences())
    assert "slot_mapping names the right slots" in " ".join(found.unknown)


@pytest.mark.parametrize("change", ["ignored", "multiplied", "exchanged", "of_keys", "of_values"])
def test_scales_of_a_write(custom_ops, change):
    """The op gets the right scales and uses others."""
    call = written(custom_ops, kind="fp8")
    k_scale, v_scale = {
        **{"ignored": (1, 1), "multiplied": (2, 4), "exchanged": (0.25, 0.5)},
        **{"of_keys": (0.5, 0.5), "of_values": (0.25, 0.25)},
    }[change]
    other = dataclasses.replace(call, k_scale=k_scale, v_scale=v_scale)
    wrong = dataclasses.replace(other, k_scale=0.5, v_scale=0.25)
    wrong.output.copy_(call.output)
    rewritten = arguments(kind="fp8") | {"k_scale": k_scale, "v_scale": v_scale}
    custom_ops.fault = ""
    custom_ops.reshape_and_cache_flash(**rewritten)
    both = [rewritten[name].flatten(0, 1) for name in ("key_cache", "value_cache")]
    wrong.output.view(torch.uint8).copy_(torch.cat(both, 2))
    found = attnlab.diagnose(wrong)
    assert found.status == "described"
    assert [fact.kind for fact in found.pattern.rules] == [
        {"exchanged": "scales_exchanged"}.get(change, f"scale_{change}")
    ]


def test_the_named_blocks_of_a_large_cache(custom_ops, monkeypatch, tmp_path):
    """Blocks 0, 2 and 5 are kept; the text has the caller's numbers, after saving, too."""
    monkeypatch.setattr(snapshot, "_LARGE_CACHE", 1 << 10)
    call = written(custom_ops, fault="half")
    assert call.block_ids.tolist() == [0, 2, 5]
    assert call.slot_mapping.tolist() == [SIZE + 5, 3, -1, 2 * SIZE + 10, 2 * SIZE + 11]
    call.save(tmp_path / "call")
    found = attnlab.diagnose(attnlab.KernelCall.load(tmp_path / "call"))
    assert "slot 37 (block 2, offset 5), of token 0" in " ".join(found.sentences())
    assert any("not recorded" in text for text in found.unknown)


def test_two_tokens_of_one_slot(custom_ops):
    """Either may win."""
    given = arguments() | {"slot_mapping": torch.tensor([7, 7, 8, 9, 10])}
    with attnlab.capture() as calls:
        custom_ops.reshape_and_cache_flash(**given)
    call = calls[-1]
    first = torch.cat([call.key[0], call.value[0]], 1)
    assert not torch.equal(call.output[7], first)
    call.output[7] = first
    found = attnlab.diagnose(call)
    assert found.status == "nothing wrong"
    assert any("more than once" in text for text in found.unknown)


def test_a_slot_beyond_the_cache(custom_ops):
    given = arguments()
    with attnlab.capture() as calls, pytest.raises(IndexError):
        custom_ops.reshape_and_cache_flash(**{**given, "slot_mapping": torch.tensor([3, 128])})
    with pytest.raises(InvalidCall, match=r"slot_mapping\[1\] must be at most 127, got 128"):
        _ = calls[-1]


@needs_triton
@pytest.mark.releases
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_vllms_triton_op(monkeypatch, kind):
    """The op of 0.33.0 under the interpreter is recorded, found right, and replayed with the same bytes."""
    source = of_release("0.33.0")
    name = "triton_reshape_and_cache_flash"
    module = load(source, PLATFORMS["sm_90"], "cpu").loader.load(name)
    monkeypatch.setitem(sys.modules, f"vllm.v1.attention.ops.{name}", module)
    with attnlab.capture() as calls:
        getattr(module, name)(**arguments(kind=kind))
    call = calls[-1]
    assert attnlab.diagnose(call, platform="sm_90").status == "nothing wrong"
    (replay,) = attnlab.replay_call(call, sources=[str(source.path)], platform="sm_90").replays
    assert (replay.status, replay.from_recorded.other_bits) == ("match", 0)
    call.output[91] = call.output[90]
    found = attnlab.diagnose(call, platform="sm_90")
    assert [fact.kind for fact in found.pattern.rules] == ["misplaced"]


@pytest.mark.parametrize("name", ["reshape_and_cache_flash", "reshape_and_cache"])
def test_the_comparison_of_a_test(custom_ops, name, tmp_path):
    """A test compares the keys or the values of the cache; the report says which side is wrong."""
    given = arguments(name)
    right = {half: given[f"{half}_cache"].clone() for half in ("key", "value")}
    changed = {f"{half}_cache": cache for half, cache in right.items()}
    custom_ops.fault = ""
    getattr(custom_ops, name)(**{**given, **changed})
    for fault, off, side in (
        ("", 0.0, "neither"),
        ("", 1.0, "the expected value"),
        ("skip", 0.0, "the kernel"),
    ):
        custom_ops.fault, again = fault, arguments(name)
        capture = Capture()
        capture.start()
        getattr(custom_ops, name)(**again)
        capture.stop()
        comparisons = [
            Comparison(
                actual=again[f"{half}_cache"],
                expected=right[half] + off,
                atol=1e-3,
                rtol=0.0,
                passed=not (fault or off),
            )
            for half in ("key", "value")
        ]
        for comparison in comparisons:
            report = report_failure("t", list(capture.calls.recorded), [comparison], tmp_path)
            assert dict(report.facts)["wrong side"] == side
            assert "call" in dict(report.facts)


def test_a_write_that_no_comparison_has(custom_ops, tmp_path):
    """It is reported, but not torch's own attention."""
    capture = Capture()
    capture.start()
    custom_ops.fault = "skip"
    custom_ops.reshape_and_cache_flash(**arguments())
    torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 1, 3, 8)] * 3)
    capture.stop()
    report = report_failure("t", list(capture.calls.recorded), [], tmp_path)
    assert dict(report.facts)["op"].startswith("vllm._custom_ops")
    assert (
        dict(report.facts)["diagnosis"]
        == "described: token 3 is not written: its slot holds what was there before"
    )
