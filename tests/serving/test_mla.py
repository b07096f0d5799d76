"""MLA: vLLM's decode_attention_fwd with a latent cache, recorded and checked in place."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.clones import clone_of
from helpers.fake_vllm import Impl, new_request, runner, scheduled
from helpers.sources import needs_triton, of_release

import attnlab
from attnlab.case.ops import DECODE_FWD
from attnlab.case.platforms import PLATFORMS
from attnlab.kernels.vllm.backend import load
from attnlab.kernels.vllm.source import find_source
from attnlab.recorder.ops import vllm_ops
from attnlab.serving.begun_op import intent_of_layer
from attnlab.serving.capture_state import RecordFile, read_records
from attnlab.serving.settings import CaptureSettings
from attnlab.serving.start import Session, attention_wrapper

MODULE = "vllm.v1.attention.ops.triton_decode_attention"
LATENT, ROPE, HEADS, SIZE = 256, 32, 4, 16  # the op's smallest MLA: keys of 288, values of 256
FAULT = ("v = tl.trans(k)", "v = tl.trans(k) * 0.9")
pytestmark = [needs_triton, pytest.mark.releases]


def decode_module(source):
    """Return the op's module under the interpreter."""
    return load(source, PLATFORMS["sm_90"], "cpu").loader.load("triton_decode_attention")


def faulty(tmp_path):
    """Return a source whose values are 10 % too small."""
    return find_source(
        clone_of(of_release("0.33.0"), tmp_path, "triton_decode_attention.py", *FAULT)
    )


def forward_mqa(module, query, cache, table, seq_lens, k_scale=1.0):
    """Call the op as TritonMLAImpl.forward_mqa does (v1/attention/backends/mla/triton_mla.py, 0.33.0)."""
    rows, heads, _ = query.shape
    per_row = rows // len(seq_lens)
    if per_row > 1:  # a row of the table, and a length, for each token
        table = table.repeat_interleave(per_row, 0)
        seq_lens = (seq_lens[:, None] + torch.arange(1 - per_row, 1).int()).flatten()
    output = torch.zeros(rows, heads, LATENT, dtype=query.dtype)
    lse = torch.zeros(rows, heads, dtype=query.dtype)
    logits = torch.empty(rows, heads, 4, LATENT + 1)
    paged, scale = cache.unsqueeze(2), torch.tensor(k_scale)
    module.decode_attention_fwd(
        query,
        paged,
        paged[..., :LATENT],
        output,
        lse,
        table,
        seq_lens,
        logits,
        4,
        0.08,
        cache.shape[1],
        k_scale=scale,
        v_scale=scale,
        is_mla=True,
    )
    return output, lse


def tensors(rows=2, fp8=False):
    """Return a query, a latent cache, a block table and lengths of two requests."""
    torch.manual_seed(0)
    cache = torch.randn(8, SIZE, LATENT + ROPE)
    return (
        torch.randn(rows, HEADS, LATENT + ROPE).half(),
        cache.to(torch.float8_e4m3fn) if fp8 else cache.half(),
        torch.tensor([[5, 2, 1], [7, 3, 0]]).int(),
        torch.tensor([21, 40]).int(),
    )


def recorded(monkeypatch, source, rows=2, fp8=False):
    module = decode_module(source)
    monkeypatch.setitem(sys.modules, MODULE, module)
    with attnlab.capture() as calls:
        forward_mqa(module, *tensors(rows, fp8), k_scale=0.5 if fp8 else 1.0)
    return calls[-1]


@pytest.mark.parametrize(("rows", "fp8"), [(2, False), (4, True)])
def test_a_recorded_call(monkeypatch, tmp_path, rows, fp8):
    """Keys are the latent and its position, values are the latent; both are views of one cache."""
    call = recorded(monkeypatch, of_release("0.33.0"), rows, fp8)
    assert (call.op, call.query.shape, call.output.shape[2]) == (
        DECODE_FWD,
        (rows, HEADS, 288),
        LATENT,
    )
    assert call.key_cache.shape[1] == 1
    assert call.k_scale == call.v_scale == (0.5 if fp8 else 1.0)
    assert len(call.seq_lens) == rows
    assert attnlab.diagnose(call, platform="sm_90").status == "nothing wrong"
    wrong = recorded(monkeypatch, faulty(tmp_path), rows, fp8)
    assert attnlab.diagnose(wrong, platform="sm_90").wrong_rows == rows


class MlaImpl(Impl):
    """An implementation that calls the op; ``given`` are its tensors, ``result`` its output."""

    module = None
    given = ()
    result = None

    def forward_mqa(self, query, cache, attn_metadata, layer):
        """Decode."""
        type(self).result = forward_mqa(type(self).module, query, cache, *type(self).given)
        return type(self).result


@pytest.mark.parametrize(("per_request", "fault"), [(1, True), (2, False), (2, True)])
def test_values_in_place(monkeypatch, tmp_path, per_request, fault):
    """Each decode is compared with the reference; a fault has its request and position."""
    module = decode_module(faulty(tmp_path) if fault else of_release("0.33.0"))
    (op,) = (one for one in vllm_ops() if one.name == f"{MODULE}.{DECODE_FWD}")
    monkeypatch.setattr("helpers.fake_vllm.BLOCK", SIZE)
    engine = runner(("layers.0.attn",), type("OwnMla", (MlaImpl,), {}))
    settings = CaptureSettings(out=str(tmp_path), sample=1.0, rows=None, heads=None)
    session = Session(settings, RecordFile(tmp_path))
    query, cache, table, _ = tensors(2 * per_request)
    seq_lens = torch.full((2,), per_request, dtype=torch.int32)
    wrapped = attention_wrapper(session, op, module.decode_attention_fwd)
    layer = engine.layers["layers.0.attn"]
    type(layer.impl).module = SimpleNamespace(decode_attention_fwd=wrapped)
    type(layer.impl).given = (table, seq_lens)

    new = [new_request(name, list(range(per_request))) for name in "ab"]
    output = scheduled({"a": per_request, "b": per_request}, scheduled_new_reqs=new)
    session.begin_step(engine, (output,), {})
    engine.input_batch.req_ids = ["a", "b"]
    engine.input_ids = torch.zeros(2 * per_request, dtype=torch.int32)
    engine.positions = torch.arange(per_request).repeat(2)
    session.batch_of_runner(engine)
    slots = (table[:, 0, None] * SIZE + torch.arange(per_request)).flatten()
    common = SimpleNamespace(
        block_table_tensor=table, seq_lens=seq_lens, slot_mapping=slots, causal=True
    )
    engine.builder.build(0, common)
    layer.impl.do_kv_cache_update(layer, None, slots)
    layer.impl.forward_mqa(query, cache, common, layer)
    session.end_step()
    session.state.tally.write()

    lines = [line for one in read_records(tmp_path).values() for line in one]
    assert [line for line in lines if line["event"] == "error"] == []
    counts = next(line for line in reversed(lines) if line["event"] == "counts")
    assert counts["counts"]["checked"] == 1
    assert any("several new tokens" in text for text in counts["unchecked"]) == (per_request > 1)
    assert counts["counts"]["rows"] == 2 * per_request
    found = [line for line in lines if line["event"] == "observation"]
    kinds = {(one["kind"], one["request"]) for one in found}
    assert kinds == ({("value", "a"), ("value", "b")} if fault else set())
    if fault:
        (file,) = (line["file"] for line in lines if line["event"] == "saved")
        call = attnlab.KernelCall.load(tmp_path / file)
        assert attnlab.diagnose(call, platform="sm_90").wrong_rows == 2 * per_request


def test_the_scale_of_the_values_is_that_of_the_keys():
    """A layer of MLA has a _v_scale that its op does not get."""
    layer = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=1.0)
    assert intent_of_layer(layer, None, causal=None, block_size=None).v_scale == 1.0
    layer.kv_lora_rank = LATENT
    assert intent_of_layer(layer, None, causal=None, block_size=None).v_scale is None


def test_a_changed_value_is_seen(monkeypatch):
    """The comparison is as wide as the values, not as the keys."""
    call = recorded(monkeypatch, of_release("0.33.0"))
    output = call.output.clone()
    output[1, 3, LATENT - 1] += 0.1
    found = attnlab.diagnose(dataclasses.replace(call, output=output), platform="sm_90")
    assert (found.place.row, found.place.head) == (1, 3)
