"""Saved calls of FlashAttention, FlashMLA and FlashInfer run again on modules of the same signatures."""

import dataclasses

import pytest
import torch
from helpers.recorded import decode_module, flashinfer_module, planned_wrapper

import attnlab
from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, DeviceLost, Unsupported
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.kernels.by_name import kernel_of
from attnlab.kernels.run_call import backend_of_origin, run_call
from attnlab.tensors.call import KernelCall

DECODES = (
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "trtllm_batch_decode_with_kv_cache_mla",
)


def saved(calls, tmp_path) -> KernelCall:
    calls[-1].save(tmp_path / "call.safetensors")
    return KernelCall.load(tmp_path / "call.safetensors")


def test_a_stateless_call_runs_again(tmp_path):
    for kind in ("decode", "prefill"):
        with flashinfer_module(kind) as module, attnlab.capture() as calls:
            module.run("NHD")
            call = saved(calls, tmp_path)
            found = run_call(call, backend_of_origin(call), Case())
        assert torch.equal(found, call.output)


@pytest.mark.parametrize("function", DECODES)
def test_a_decode_runs_again(function, tmp_path):
    with decode_module(function, fault=True) as module, attnlab.capture() as calls:
        module.run()
        call = saved(calls, tmp_path)
        runner = backend_of_origin(call)
        assert torch.equal(run_call(call, runner, Case()), call.output)
        diagnosis = diagnose_captured(call, Case(), runner=runner)
        assert diagnosis.is_wrong
        assert not any("another output" in one for one in diagnosis.unknown)
        if function == "flash_attn_with_kvcache":
            assert "newest_token_dropped" in {one.name for one in diagnosis.explanations}
            assert attnlab.xray(call, backend=runner, confirm=False).status == "described"
            other = dataclasses.replace(call, softcap=9.0)
            with pytest.raises(AttnLabError, match="must have an argument softcap"):
                run_call(other, runner, Case())


def test_a_wrapper_is_planned_and_run_again(tmp_path):
    with planned_wrapper(fault=True) as module, attnlab.capture() as calls:
        module.run()
        call = saved(calls, tmp_path)
        runner = backend_of_origin(call)
        assert torch.equal(run_call(call, runner, Case()), call.output)
        module.FAULT = False
        right = run_call(call, runner, Case())
    found = attnlab.diagnose(dataclasses.replace(call, output=right))
    assert found.conclusion.startswith("nothing is wrong")


def test_a_decode_wrapper_gets_one_new_token_per_sequence(tmp_path):
    with flashinfer_module("prefill") as module, attnlab.capture() as calls:
        module.run("NHD")
        call = saved(calls, tmp_path)
    kernel = kernel_of(type("BatchDecodeWithPagedKVCacheWrapper", (), {}))
    assert kernel.is_compiled
    with pytest.raises(Unsupported, match="one new token per sequence"):
        kernel(call)


def test_a_kernel_that_breaks_the_gpu_leaves_what_the_call_shows(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    with planned_wrapper(fault=True) as module, attnlab.capture() as calls:
        module.run()
        call = saved(calls, tmp_path)
        monkeypatch.setattr("attnlab.diagnosis.captured.diagnose", broken)
        found = diagnose_captured(call, Case(), runner=backend_of_origin(call))
    assert found.is_wrong
    assert any("a varied call broke the GPU's context" in text for text in found.unknown)
