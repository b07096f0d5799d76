"""The weights of a large X-ray are computed on the device of its subject, and stay there."""

import dataclasses

import pytest
import torch
from helpers import faulty_attention
from helpers.other_device import DEVICE, OtherTensor, other_device

import attnlab
from attnlab.case.case import Case
from attnlab.weights import conclude, setup
from attnlab.weights.conclude import xray_of

FIELDS = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 32,
    "query_lens": (5, 9),
    "ctx_lens": (40, 67),
    "distribution": "normal",
    "platform": "sm_90",
}
CASES = {
    "lanes": Case(**FIELDS, empty_slots="nan"),
    "prefill": Case(**FIELDS, op="context_attention_fwd", alibi=True, num_blocks=300),
    "unified": Case(**FIELDS, op="unified_attention", sinks=True, softcap=3.0, sliding_window=10),
    "fp8": Case(**FIELDS, kv_cache_dtype="fp8", k_scale=0.7, v_scale=0.37),
    "weak scores": Case(**{**FIELDS, "distribution": "uniform_1e-3"}),
    "mask": Case(**FIELDS, op="unified_attention", mask="bidirectional", fill="all_rows"),
}


def examined_on(case, where):
    lab = attnlab.Lab()
    subject = conclude._of_case(case, lab, lab.backend(case))
    return xray_of(dataclasses.replace(subject, device=where))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_another_device_gives_the_same_weights_and_keeps_them(case):
    expected = examined_on(case, "cpu")
    assert expected.status == "right"
    with other_device() as counted:
        found = examined_on(case, DEVICE)
        left = counted.left_bytes
        assert isinstance(found.examined.measurement.weights, OtherTensor)
        assert found.to_dict().keys() == expected.to_dict().keys()
        weights, right = found.weights, found.expected
    assert (found.status, found.sentences) == (expected.status, expected.sentences)
    assert left < weights.numel() * 4  # half of the weights
    torch.testing.assert_close(weights, expected.weights)
    torch.testing.assert_close(right, expected.expected)
    assert found.law.score == pytest.approx(expected.law.score)
    torch.testing.assert_close(found.magnitudes.key, expected.magnitudes.key)


@pytest.mark.parametrize(
    ("fault", "num_blocks"), [("context_one_too_many", None), ("next_sequence", 140)]
)
def test_a_wrong_kernel_is_described_on_the_cpu(fault, num_blocks):
    kernel = f"{faulty_attention.__file__}:{fault}"
    case = Case(**FIELDS, op="context_attention_fwd", backend=kernel, num_blocks=num_blocks)
    expected = examined_on(case, "cpu")
    with other_device():
        found = examined_on(case, DEVICE)
    assert (found.status, found.sentences) == (expected.status, expected.sentences)
    assert found.status == "described"


def test_the_other_device_refuses_tensors_of_the_cpu():
    with other_device():
        there, here = torch.zeros(3, device=DEVICE), torch.zeros(3)
        with pytest.raises(RuntimeError, match="two devices"):
            there + here
        with pytest.raises(RuntimeError, match="indexed"):
            here[torch.nonzero(there == 0)]


@pytest.mark.parametrize(
    ("weights", "requested", "free", "expected"),
    [
        (setup.MANY, None, 1 << 40, "cuda"),
        (setup.MANY - 1, None, 1 << 40, "cpu"),
        (setup.MANY, "cpu", 1 << 40, "cpu"),
        (setup.MANY, None, 1 << 20, "cpu"),
    ],
)
def test_a_gpu_computes_many_weights_that_fit(monkeypatch, weights, requested, free, expected):
    values = {"is_available": True, "mem_get_info": (free, free)}
    values |= {"memory_reserved": 0, "memory_allocated": 0}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert setup.device_for(weights, requested).type == expected
