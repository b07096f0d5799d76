"""Suggestions for wrong values, names and flags."""

import pytest
from helpers.commands import error_line

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import difference, suggestion
from attnlab.case.ops import RELEASES
from attnlab.case.platforms import PLATFORMS


@pytest.mark.parametrize(
    ("field", "word", "meant"),
    [
        ("platform", "MI300X", "gfx942"),
        ("platform", "mi250", "gfx90a"),
        ("platform", "AMD Instinct MI355X", "gfx950"),
        ("platform", "H100", "sm_90"),
        ("platform", "NVIDIA H200", "sm_90"),
        ("platform", "B200", "sm_90"),
        ("platform", "a100", "sm_80"),
        ("dtype", "fp16", "float16"),
        ("dtype", "torch.bfloat16", "bfloat16"),
        ("dtype", "bf16", "bfloat16"),
        ("kv_cache_dtype", "e4m3", "fp8_e4m3"),
        ("kv_cache_dtype", "E5M2", "fp8_e5m2"),
        ("op", "unified-attention", "unified_attention"),
        ("op", "chunked_prefil_paged_decode", "chunked_prefill_paged_decode"),
        ("stage", "fill_al", "fill_all"),
        ("release", "0.14.0", "0.33.0"),
        ("release", "0.10.2", "0.11.2"),
    ],
)
def test_a_near_value_is_suggested(field, word, meant):
    with pytest.raises(InvalidCase) as caught:
        Case(**{field: word})
    assert meant in str(caught.value).rpartition(";")[0] + str(caught.value).partition("; ")[2]
    assert meant in str(caught.value).partition("; ")[2]


@pytest.mark.parametrize("word", ["quantum", "", "x" * 2000, "gfx", "日本"])
def test_nothing_is_suggested_for_something_else(word):
    assert suggestion(word, ("sm_80", "cpu")) == ""


def test_a_gpu_without_rules_is_named_as_such():
    assert "no rules for sm_100" in suggestion("B200", PLATFORMS)


def test_a_field_of_json():
    with pytest.raises(InvalidCase, match="num_heads"):
        Case.from_dict({"num_head": 3})


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["rum"], "did you mean run?"),
        (["explian"], "did you mean explain?"),
        (["run", "--sliding-windw", "3"], "did you mean --sliding-window?"),
        (["check", "--op", "unified_atention"], "did you mean unified_attention?"),
        (["run", "--platform", "MI300X"], "did you mean gfx942?"),
    ],
)
def test_commands_and_flags(capsys, argv, meant):
    assert meant in error_line(capsys, argv)


def test_what_differs_between_the_releases_with_rules():
    assert [difference(version) for version in RELEASES] == ["", ""]
    assert "softmax scale" in difference("0.14.0")
    assert "ROCm kernel lets NaN" in difference("0.29.0")
    assert "Triton" not in difference("0.29.0")
    assert difference("0.32.0") == ""
