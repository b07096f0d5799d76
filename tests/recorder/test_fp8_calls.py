"""vLLM's unified_attention with FP8 queries and scaled outputs: recorded, judged, diagnosed and replayed."""

import dataclasses
import sys

import pytest
import torch
from helpers.clones import UNIFIED, clone_of
from helpers.sources import needs_triton, of_release

import attnlab
from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.platforms import PLATFORMS
from attnlab.kernels.vllm.backend import load
from attnlab.kernels.vllm.source import find_source
from attnlab.recorder.failing_side import Comparison, judge, output_matches
from attnlab.replay.replay_call import expected_of
from attnlab.serving.begun_op import check_values
from attnlab.tensors.quantised import in_numbers

pytestmark = [needs_triton, pytest.mark.releases]
MODULE = "vllm.v1.attention.ops.triton_unified_attention"
FP8 = {"sm_90": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
K_SCALE, V_SCALE = 0.4, 3.0
# Faults as they were seen, each in one line of the op: the value scale is lost (vLLM #34759).
LOST_SCALE = ("value_scale = tl.load(v_scale)", "value_scale = 1.0")
WRONG_OUTPUT = ("acc = acc * tl.load(out_scale)\n", "acc = acc * tl.load(out_scale) * 0.7\n")
QUERY = {"q_scale": 0.7}
OUTPUT = {"output_scale": 0.03}
KINDS = [
    pytest.param(QUERY, LOST_SCALE, id="query"),
    pytest.param(OUTPUT, WRONG_OUTPUT, id="output"),
    pytest.param({**QUERY, **OUTPUT}, LOST_SCALE, id="both"),
]


def arguments(platform, q_scale=None, output_scale=None):
    """Return arguments of unified_attention as vLLM's Triton backend makes them."""
    torch.manual_seed(0)
    fp8, table = FP8[platform], torch.randperm(13)[:12].view(3, 4).int()
    query, cache = torch.randn(7, 4, 64), torch.randn(2, 13, 16, 2, 64)
    rows = torch.full((7, 4, 64), 7.0)
    return {
        "q": query.half() if q_scale is None else (query / q_scale).to(fp8),
        "k": (cache[0] / K_SCALE).to(fp8),
        "v": (cache[1] / V_SCALE).to(fp8),
        "out": rows.half() if output_scale is None else rows.to(fp8),
        "cu_seqlens_q": torch.tensor([0, 5, 6, 7]).int(),
        "max_seqlen_q": 5,
        "seqused_k": torch.tensor([25, 34, 61]).int(),
        "max_seqlen_k": 61,
        "softmax_scale": 0.1,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": table,
        "softcap": 0,
        "q_descale": None if q_scale is None else torch.tensor([q_scale]),
        "k_descale": torch.full((3, 2), K_SCALE),
        "v_descale": torch.full((3, 2), V_SCALE),
        "output_scale": None if output_scale is None else torch.tensor([output_scale]),
        "kv_quant_mode": 1,
    }


def source_with(tmp_path, old, new):
    """Return vLLM's ops with a changed line."""
    return find_source(clone_of(of_release("0.33.0"), tmp_path, UNIFIED, old, new))


def recorded(monkeypatch, source, platform, kind):
    """Run the op of a source under the interpreter and return its recorded call."""
    module = load(source, PLATFORMS[platform], "cpu").loader.load("triton_unified_attention")
    monkeypatch.setitem(sys.modules, MODULE, module)
    with attnlab.capture() as calls:
        module.unified_attention(**arguments(platform, **kind))
    return calls[-1]


@pytest.mark.parametrize("platform", FP8)
@pytest.mark.parametrize(("kind", "fault"), KINDS)
def test_a_sound_op_and_a_fault(monkeypatch, tmp_path, platform, kind, fault):
    """A sound output is within the bound, and not by far; that of the fault is found by every check."""
    sound = recorded(monkeypatch, of_release("0.33.0"), platform, kind)
    assert sound.unmodelled == ()
    assert sound.output_scale == pytest.approx(kind.get("output_scale"))
    assert (sound.query.dtype == FP8[platform]) == ("q_scale" in kind)
    assert attnlab.diagnose(sound, platform=platform).status == "nothing wrong"
    worst = float(expected_of(sound, Case(platform=platform)).ratio(sound.output).max())
    assert 0.05 < worst <= 1
    wrong = recorded(monkeypatch, source_with(tmp_path, *fault), platform, kind)
    found = attnlab.diagnose(wrong, platform=platform)
    assert found.wrong_rows > 0
    assert {one.name for one in found.explanations} <= {"v_scale_ignored"}
    assert attnlab.replay_call(wrong, platform=platform, backends=[]).recorded == "mismatch"


def test_values_in_place(monkeypatch):
    """Sampled rows and heads of the capture in vLLM; the platform is the call's own."""
    call = recorded(monkeypatch, of_release("0.33.0"), "sm_90", {**QUERY, **OUTPUT})
    assert call.origin.platform == "cpu"
    found = check_values(call, rows=None, heads=2, seed=3)
    assert (found.wrong, found.rows) == ((), 7)
    call.output[5] = (call.output[5].float() * 3).to(call.output.dtype)
    assert [one.row for one in check_values(call, rows=None, heads=2, seed=3).wrong] == [5]


def test_it_is_saved_and_replayed_with_its_scales(monkeypatch, tmp_path):
    """The replay has the bits of the recording; without the scale of the query it has others."""
    source = of_release("0.33.0")
    recorded(monkeypatch, source, "sm_90", {**QUERY, **OUTPUT}).save(tmp_path / "call")
    call = dataclasses.replace(attnlab.KernelCall.load(tmp_path / "call"), num_splits=0)
    replays = [
        attnlab.replay_call(one, sources=[str(source.path)], platform="sm_90").replays[0]
        for one in (call, dataclasses.replace(call, q_scale=3.0))
    ]
    assert [one.status for one in replays] == ["match", "match"]
    assert replays[0].from_recorded.other_bits == 0
    assert replays[1].from_recorded.rows > 0
    (model,) = attnlab.replay_call(call, platform="sm_90").replays
    assert model.status == "cannot run"


def test_the_comparison_of_a_test(monkeypatch):
    """A test multiplies the stored output by its scale, or compares it as it is stored."""
    call = recorded(monkeypatch, of_release("0.33.0"), "sm_90", OUTPUT)
    right = expected_of(call, Case(platform="sm_90")).output
    stored, numbers = call.output.float(), in_numbers(call).output.float()
    for actual, factor in ((stored, call.output_scale), (numbers, 1.0)):
        assert output_matches(call, actual)
        sides = [
            judge(
                call,
                Comparison(
                    actual=actual,
                    expected=expected / factor,
                    atol=atol / factor,
                    rtol=0.0,
                    passed=False,
                ),
            ).side
            for expected, atol in ((right, 1e-9), (right + 0.5, 0.1))
        ]
        assert sides == ["the tolerance", "the expected value"]
    assert not output_matches(call, numbers + 1)


def test_scales_of_each_sequence_and_head():
    """q_scale as FlashAttention 3 takes it; another shape is refused."""
    given = arguments("sm_90", **QUERY)
    scale = torch.rand(3, 2) + 0.5
    fields = {
        "query": given["q"],
        "key_cache": given["k"],
        "value_cache": given["v"],
        "block_table": given["block_table"],
        "seq_lens": given["seqused_k"],
        "query_start_loc": given["cu_seqlens_q"],
        "output": given["out"],
    }
    call = attnlab.KernelCall.from_tensors(**fields, q_scale=scale)
    numbers = in_numbers(call).query
    assert torch.equal(numbers[6, 3], call.query[6, 3].double() * scale[2, 1].double())
    with pytest.raises(InvalidCall, match=r"q_scale must have shape \(3, 2\), got \(2, 3\)"):
        attnlab.KernelCall.from_tensors(**fields, q_scale=scale.T)
    for wrong in (0.0, torch.inf, "x"):
        with pytest.raises(InvalidCall, match="output_scale must be a positive number"):
            attnlab.KernelCall.from_tensors(**fields, output_scale=wrong)
