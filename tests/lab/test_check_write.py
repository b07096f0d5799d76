"""Cache writes in further formats: models and vLLM's ops are right, and planted faults are found."""

import dataclasses
import shutil

import pytest
import torch
from helpers.cases import refused
from helpers.drawn_cases import draw_writes
from helpers.sources import RELEASES, needs_triton, of_release, sdist

from attnlab.case.errors import KernelFailed, KernelRejected, Unsupported
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.writes import (
    CACHE_FORMATS,
    CUDA_FORMATS,
    DS_LATENT,
    DS_SIZES,
    HND,
    LATENT,
    NHD,
    PER_TOKEN_HEAD,
    X_SPLIT,
    WriteCase,
    check_write,
    cuda_write,
    make_write_inputs,
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
    with refused(field):
        WriteCase(**fields)


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


# Cache writes by vLLM's CUDA source on the emulated device are right, and planted faults are found.


FILE, VECTORS = "csrc/cache_kernels.cu", "csrc/quantization/vectorization_utils.cuh"
CONVERSIONS = "csrc/quantization/w8a8/fp8/nvidia/quant_utils.cuh"
MLA = WriteCase(cache_format=LATENT, num_kv_heads=1)
DS = WriteCase(cache_format=DS_LATENT, num_kv_heads=1, dtype="bfloat16", **DS_SIZES)
# The file, the text, what it becomes, and the case and the kinds of errors that show it; None: the op fails.
FAULTS = {
    "block stride without the gap": (
        FILE,
        "int block_stride = kv_cache.stride(0);",
        "int block_stride = kv_cache.stride(1) * block_size;",
        MLA,
        {"numbers", "elsewhere"},
    ),
    "rotary part one element late": (
        FILE,
        "copy(k_pe, kv_cache, k_pe_stride, block_stride, pe_dim, kv_lora_rank);",
        "copy(k_pe, kv_cache, k_pe_stride, block_stride, pe_dim, kv_lora_rank + 1);",
        MLA,
        {"numbers", "elsewhere"},
    ),
    "tokens without a slot are written": (FILE, "if (slot_idx < 0) {", "if (false) {", MLA, None),
    "multiplied by the scale": (
        CONVERSIONS,
        "half_to_float(a) / scale",
        "half_to_float(a) * scale",
        WriteCase(cache_format=LATENT, num_kv_heads=1, kv_cache_dtype="fp8", k_scale=0.5),
        {"numbers"},
    ),
    "block offset in 32 bits": (
        FILE,
        "          block_idx * block_stride + block_offset * entry_stride + i + offset;",
        "          (int)block_idx * block_stride + (int)block_offset * entry_stride + i + offset;",
        write_variants()["mla: block offsets beyond 2³¹ elements"],
        None,
    ),
    "vectors at any address": (
        VECTORS,
        "((out_addr & (OUT_WIDTH - 1)) == 0) &&",
        "true &&",
        WriteCase(cache_format=NHD, head_size=20, value_size=20, num_kv_heads=2, slot_gap=1),
        None,
    ),
}


def test_a_scale_that_clips_or_wastes_bits_is_found():
    for factor in (0.5, 4.0):

        def write(case, inputs, factor=factor):
            model_write(case, inputs)
            slot = inputs.slots[0]
            scales = inputs.caches["kv_cache"][slot // case.block_size, slot % case.block_size, 0]
            scales[512:528].view(torch.float32).mul_(factor)

        assert "scales" in check_write(DS, write)


def is_misaligned(case, write):
    """Answer whether a write fails with a misaligned vector."""
    try:
        check_write(case, write)
    except KernelFailed as error:
        return "misaligned address" in str(error)
    return False


@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES)
def test_the_source_is_right_on_random_writes(version):
    """The bytes are those of the model; 0.11.2 stores another scale and may write misaligned vectors."""
    write = vllm_write(sdist(version))
    for cache_format in CUDA_FORMATS:
        for case in draw_writes(cache_format, 12, seed=3):
            if version == "0.11.2" and is_misaligned(case, write):
                continue
            assert check_write(case, write) == {}, case
            if version == "0.33.0":
                found, expected = make_write_inputs(case), make_write_inputs(case)
                write(case, found)
                model_write(case, expected)
                assert all(torch.equal(found.memory[n], expected.memory[n]) for n in found.memory)


@pytest.mark.releases
def test_findings_of_0_33_0():
    """float16 latents of fp8_ds_mla are read as integers; HND with fewer than 32 elements does not end."""
    write, cases = vllm_write(sdist("0.33.0")), write_variants()
    assert check_write(cases["fp8_ds_mla: float16"], write).keys() == {"scales"}
    with pytest.raises(KernelFailed, match="does not end"):
        check_write(WriteCase(cache_format=HND, num_kv_heads=1, head_size=8, value_size=8), write)


@pytest.mark.releases
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_cuda_source_is_found(name, tmp_path):
    path, before, after, case, kinds = FAULTS[name]
    root = tmp_path / "vllm-source"
    shutil.copytree(sdist("0.33.0").root, root)
    text = (root / path).read_text()
    assert before in text
    (root / path).write_text(text.replace(before, after))
    write = vllm_write(find_source(root))
    if kinds is None:
        with pytest.raises(KernelFailed, match=r"\.cuh?:\d+$"):
            check_write(case, write)
    else:
        assert kinds <= set(check_write(case, write))


@pytest.mark.releases
def test_the_ops_reject_what_they_check():
    inputs, write = make_write_inputs(MLA), cuda_write(sdist("0.33.0"))
    narrow = dataclasses.replace(inputs, slots=inputs.slots.int())
    with pytest.raises(KernelRejected, match="expected scalar type Long but found Int"):
        write(MLA, narrow)


def test_a_source_without_csrc_is_refused(tmp_path):
    ops = tmp_path / "vllm" / "attention" / "ops"
    ops.mkdir(parents=True)
    (ops / "one.py").write_text("")
    with pytest.raises(Unsupported, match="concat_and_cache_mla is a C\\+\\+ op"):
        check_write(MLA, vllm_write(find_source(tmp_path)))
