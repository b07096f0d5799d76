"""Intent against arguments: each contradiction is found, and equal meanings are none."""

from types import SimpleNamespace

import pytest
import torch

from attnlab.serving.begun_op import Intent, contradictions, intent_of_layer

INTENT = Intent(
    sm_scale=0.125,
    softcap=30.0,
    sliding_window=64,
    causal=True,
    sinks=[1.0, 2.0],
    alibi_slopes=[],
    kv_cache_dtype="auto",
    element_bytes=2,
    k_scale=1.0,
    v_scale=0.5,
    block_size=16,
)
FIELDS = {
    "sm_scale": 0.125,
    "softcap": 30.0,
    "sliding_window": 64,
    "causal": True,
    "sinks": torch.tensor([1.0, 2.0]),
    "k_scale": torch.ones(3, 2),
    "v_scale": 0.5,
    "seq_lens": torch.tensor([50, 200]),
    "key_cache": torch.empty(1, dtype=torch.float16),
}
ARGUMENTS = {"kv_cache_dtype": "auto", "sliding_window": 64, "s_aux": None, "alibi_slopes": None}


def found(arguments=None, block_size=16, reads_tensors=True, intent=INTENT, **fields):
    ones = contradictions(
        intent,
        {**ARGUMENTS, **(arguments or {})},
        {**FIELDS, **fields},
        block_size=block_size,
        reads_tensors=reads_tensors,
    )
    return [(one.argument, one.intended, one.given) for one in ones]


def test_equal_arguments_contradict_nothing():
    assert found() == []


@pytest.mark.parametrize(
    ("name", "value", "intended", "given"),
    [
        ("sm_scale", 0.25, 0.125, 0.25),
        ("softcap", 0.0, 30.0, 0.0),
        ("softcap", None, 30.0, 0.0),
        ("sliding_window", 0, 64, 0),
        ("sliding_window", 65, 64, 65),
        ("causal", False, True, False),
        ("sinks", None, [1.0, 2.0], []),
        ("sinks", torch.tensor([1.0, 3.0]), [1.0, 2.0], [1.0, 3.0]),
        ("alibi_slopes", torch.tensor([0.5]), [], [0.5]),
        ("k_scale", torch.full((3, 2), 2.0), 1.0, 2.0),
        ("v_scale", 1.0, 0.5, 1.0),
    ],
)
def test_a_wrong_argument_is_found(name, value, intended, given):
    assert found(**{name: value}) == [(name, intended, given)]


def test_format_and_block_size():
    assert found({"kv_cache_dtype": "fp8"}) == [("kv_cache_dtype", "auto", "fp8")]
    assert found(block_size=32) == [("block_size", 16, 32)]
    ((name, *_),) = found(key_cache=torch.empty(1, dtype=torch.uint8))
    assert name == "key_cache"


def test_names_of_the_same_format_are_equal():
    assert found({"kv_cache_dtype": "bfloat16"}) == []
    fp8 = Intent(kv_cache_dtype="fp8")
    assert found({"kv_cache_dtype": "fp8_e4m3"}, intent=fp8) == []
    assert [name for name, *_ in found({"kv_cache_dtype": "fp8_e5m2"}, intent=fp8)] == [
        "kv_cache_dtype"
    ]


def test_windows_that_hide_nothing_are_equal():
    short = {"seq_lens": torch.tensor([50, 64])}
    assert found(sliding_window=0, **short) == []
    assert found(sliding_window=100, **short) == []
    assert found(sliding_window=63, **short) != []


def test_what_the_op_has_no_parameter_for_is_not_compared():
    arguments = {"kv_cache_dtype": "auto"}
    fields = {"key_cache": FIELDS["key_cache"]}
    assert contradictions(INTENT, arguments, fields, block_size=16) == []


def test_tensors_are_left_out_where_they_would_wait_for_a_gpu():
    assert found(reads_tensors=False, sinks=None, k_scale=torch.full((3, 2), 2.0)) == []
    assert found(reads_tensors=False, v_scale=1.0) != []


def test_the_intent_of_a_layer():
    layer = SimpleNamespace(
        sliding_window=None,
        kv_cache_torch_dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        attn_type="decoder",
        _k_scale_float=1.0,
        _v_scale_float=2.0,
    )
    asked = {"scale": 0.1, "logits_soft_cap": None, "alibi_slopes": [0.5], "sinks": None}
    intent = intent_of_layer(layer, asked, causal=True, block_size=16)
    assert intent == Intent(
        sm_scale=0.1,
        softcap=0.0,
        sliding_window=0,
        causal=True,
        sinks=[],
        alibi_slopes=[0.5],
        kv_cache_dtype="auto",
        element_bytes=2,
        k_scale=1.0,
        v_scale=2.0,
        block_size=16,
    )
    unknown = intent_of_layer(
        SimpleNamespace(attn_type="encoder"), None, causal=True, block_size=None
    )
    assert unknown == Intent()
