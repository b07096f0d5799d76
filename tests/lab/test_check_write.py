"""Cache writes in further formats: models and vLLM's ops are right, and planted faults are found."""

import shutil

import pytest
from helpers.drawn_cases import draw_writes
from helpers.sources import needs_triton, of_release

from attnlab.case.errors import InvalidCase
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.writes import (
    CACHE_FORMATS,
    CUDA_FORMATS,
    DS_LATENT,
    DS_SIZES,
    HND,
    NHD,
    PER_TOKEN_HEAD,
    X_SPLIT,
    WriteCase,
    check_write,
    model_write,
    vllm_write,
    write_variants,
)

TRITON_FORMATS = [one for one in CACHE_FORMATS if one not in CUDA_FORMATS]
FLASH, PACKED = "triton_reshape_and_cache_flash", "int4_per_token_head"
# By the kinds of errors that show it: the module, the text, and what it becomes.
EDITS = {
    "scales in pages without gaps": (
        WriteCase(cache_format="int8_per_token_head"),
        FLASH,
        "stride_ks_blk=k_scale_cache.stride(0)",
        "stride_ks_blk=k_scale_cache[0].numel()",
        {"scales", "elsewhere"},
    ),
    "int8 is truncated": (
        WriteCase(cache_format="int8_per_token_head"),
        FLASH,
        "k_q = tl.where(k_q >= 0, k_q + 0.5, k_q - 0.5)",
        "k_q = k_q",
        {"numbers"},
    ),
    "a token without a slot is written": (
        WriteCase(cache_format="fp8_per_token_head"),
        FLASH,
        "    if slot < 0:\n        return\n\n    blk",
        "    slot = tl.maximum(slot, 0)\n    blk",
        {"elsewhere"},
    ),
    "nibbles exchanged": (
        WriteCase(cache_format="int4_per_token_head"),
        PACKED,
        "return (lo & 0xF) | ((hi & 0xF) << 4)",
        "return (hi & 0xF) | ((lo & 0xF) << 4)",
        {"numbers"},
    ),
    "no zero point": (
        WriteCase(cache_format="int4_per_token_head"),
        PACKED,
        "((k_scale_bits & -16) | (k_zp_int & 0xF))",
        "((k_scale_bits & -16))",
        {"zero points"},
    ),
    "values after as many elements as a value has": (
        WriteCase(cache_format="diffkv", head_size=24, value_size=32),
        FLASH,
        "kv_cache_ptr + tgt_idx + head_size_k + tile_offs",
        "kv_cache_ptr + tgt_idx + head_size_v + tile_offs",
        {"numbers"},
    ),
}
WRONG = [
    ({"cache_format": "int2"}, "cache_format"),
    ({"cache_format": "diffkv", "num_tokens": 0}, "num_tokens"),
    ({"cache_format": "diffkv", "k_scale": 0.0}, "k_scale"),
    ({"cache_format": "diffkv", "gap": 8}, "gap"),
    ({"cache_format": "int8_per_token_head", "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ({"cache_format": "int4_per_token_head", "head_size": 25}, "head_size"),
    ({"cache_format": "mla"}, "num_kv_heads"),
    ({"cache_format": NHD, "value_size": 16}, "value_size"),
    ({"cache_format": X_SPLIT}, "gap"),
    ({"cache_format": X_SPLIT, "gap": 0, "head_size": 20, "value_size": 20}, "head_size"),
    ({"cache_format": DS_LATENT, "num_kv_heads": 1}, "head_size"),
    ({"cache_format": HND, "slot_gap": 16}, "slot_gap"),
    ({"cache_format": "diffkv", "first_block": 1}, "first_block"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG, ids=lambda one: str(one)[:40])
def test_what_is_refused(fields, field):
    with pytest.raises(InvalidCase) as raised:
        WriteCase(**fields)
    assert raised.value.field == field


def test_the_model_is_right_on_every_hostile_write():
    assert {name: check_write(one, model_write) for name, one in write_variants().items()} == {
        name: {} for name in write_variants()
    }


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_the_model_is_right_on_random_writes(cache_format):
    for case in draw_writes(cache_format, 12):
        assert check_write(case, model_write) == {}, case


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_a_byte_that_changes_elsewhere_is_found(cache_format):
    sizes = DS_SIZES if cache_format == DS_LATENT else {}
    gap = 0 if cache_format == X_SPLIT else 64
    case = WriteCase(cache_format=cache_format, num_kv_heads=1, gap=gap, **sizes)

    def write(case, inputs):
        model_write(case, inputs)
        next(iter(inputs.memory.values()))[-1] ^= 1

    assert check_write(case, write) == {"elsewhere": 1}


@pytest.mark.releases
@needs_triton
@pytest.mark.parametrize("cache_format", TRITON_FORMATS)
def test_ops_of_0_33_0_are_right_on_random_writes(cache_format):
    write = vllm_write(of_release("0.33.0"))
    for case in draw_writes(cache_format, 4, seed=3):
        assert check_write(case, write) == {}, case


@pytest.mark.releases
@needs_triton
def test_0_33_0_reads_past_slot_mapping_with_scales_per_token_and_head():
    write = vllm_write(of_release("0.33.0"))
    for cache_format in TRITON_FORMATS:
        found = check_write(WriteCase(cache_format=cache_format, padding=3), write)
        assert bool(found) == (cache_format in PER_TOKEN_HEAD), cache_format


@pytest.mark.releases
@needs_triton
@pytest.mark.parametrize("name", EDITS)
def test_a_fault_in_the_source_is_found(name, tmp_path):
    case, module, before, after, kinds = EDITS[name]
    root = tmp_path / "vllm-source"
    shutil.copytree(of_release("0.33.0").root, root)
    file = find_source(root).op_file(module)
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    assert kinds <= set(check_write(case, vllm_write(find_source(root))))
