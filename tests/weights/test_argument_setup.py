"""X-rays of Cases with an op argument: sound kernels are right, planted wrong reads are described."""

import dataclasses

import pytest
import torch
from helpers.argument_cases import FORMATS, random_format_case
from helpers.cases import refused
from helpers.sources import of_release

from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels.vllm import op_arguments
from attnlab.lab.lab import Lab
from attnlab.weights.conclude import xray
from attnlab.weights.rules import StoredRead
from attnlab.weights.setup import misread, store, value_scales

QUERY = "fp8_query"


def case_of(name):
    """Return a small Case with two KV heads, and blocks of 8 tokens."""
    is_fp8 = name == QUERY
    fields = {"query_lens": (1, 3), "ctx_lens": (18, 7), "sliding_window": 0, "num_heads": 4}
    fields |= {"block_size": 8, "kv_cache_dtype": "fp8" if is_fp8 else "auto"}
    case = random_format_case(name, 2, **fields)
    return case.replace(
        num_queries_per_kv=2, dtype="float16", num_splits=None, head_size=16, sinks=False
    )


@pytest.fixture(scope="module")
def lab():
    """Provide a lab with the ops of 0.33.0."""
    return Lab(source=of_release("0.33.0").path, device="cpu")


def plant(monkeypatch, name, change):
    """Let the op get other arguments: those that ``change`` returns for the right ones."""
    make = op_arguments._MAKERS[name]

    def faulty(case, given):
        made = make(case, given)
        if isinstance(made, dict):
            return {**made, **change(made)}
        return dataclasses.replace(made, arguments={**made.arguments, **change(made.arguments)})

    monkeypatch.setitem(op_arguments._MAKERS, name, faulty)


@pytest.mark.releases
@pytest.mark.parametrize("name", [*FORMATS, QUERY])
def test_a_sound_kernel_is_right(lab, name):
    assert xray(case_of(name), lab=lab, confirm=False).status == "right"


def _of_next_head(name):
    """Return the change that lets the first KV head read the scale of the second."""

    def change(given):
        scale = given[name].clone()
        scale[:, :, 0] = scale[:, :, 1]
        return {name: scale}

    return change


def _exchanged(given):
    return {"v": (given["v"] >> 4) | (given["v"] << 4)}


READS = {
    "fp8_per_token_head": (
        lambda given: {"k_scale_cache": given["k_scale_cache"].roll(1, dims=1)},
        "previous_slot_k_scale",
    ),
    "int4_per_token_head": (_exchanged, "v_nibbles_exchanged"),
}


@pytest.mark.releases
@pytest.mark.parametrize("name", READS)
def test_a_wrong_read_is_described(lab, monkeypatch, name):
    """The scale of another token, and exchanged nibbles."""
    change, read = READS[name]
    plant(monkeypatch, name, change)
    found = xray(case_of(name), lab=lab, confirm=False)
    assert found.status == "described"
    assert found.description.rules == (StoredRead(read),)
    assert found.sentences[0]


@pytest.mark.releases
def test_values_of_another_head_in_a_narrow_cache_are_described(lab, monkeypatch):
    plant(monkeypatch, "diffkv", lambda given: {"v": given["v"].roll(1, dims=2)})
    found = xray(case_of("diffkv"), lab=lab, confirm=False)
    assert (found.status, found.descriptions) == ("described", ())


@pytest.mark.releases
@pytest.mark.slow
def test_a_diagnosis_has_the_xray(lab, monkeypatch):
    """No wrong read of all heads gives the output; the X-ray and a second Case show that of one."""
    plant(monkeypatch, "int8_per_token_head", _of_next_head("v_scale_cache"))
    found = diagnose(case_of("int8_per_token_head"), lab=lab)
    assert found.status == "described"
    described = found.weights.description
    assert described.rules == (StoredRead("next_kv_head_v_scale"),)
    assert described.scope.heads == (0, 1)


def test_arguments_without_weights_to_read_are_refused():
    assert {name for name, one in OP_ARGUMENTS.items() if one.no_xray} == {
        *("alibi_sqrt", "fp8_output", "cached_new_tokens"),
        *("sinks_of_key_0", "skip_decode", "latent_cache"),
    }
    case = case_of("int8_per_token_head").replace(op_argument="fp8_output")
    with refused("op_argument"):
        xray(case, lab=Lab(device="cpu"))


@pytest.mark.parametrize("name", FORMATS[:3])
def test_values_of_one_are_exact_with_every_scale(name):
    """Each slot's value is 1 in its element; the scale of another slot is seen as a power of two."""
    case, lab = case_of(name), Lab(device="cpu")
    call = lab.call(case)
    stored = store(case, call, torch.arange(call.value_cache.shape[0] * case.block_size))
    assert set(value_scales(call).unique().tolist()) == {0.25, 0.5, 1.0}
    _, right = misread(stored, "previous_slot_k_scale")
    assert right.unique().tolist() == [1.0]
    _, gain = misread(stored, "previous_slot_v_scale")
    assert set(gain.unique().tolist()) <= {0.25, 0.5, 1.0, 2.0, 4.0}
    assert len(gain.unique()) > 2
