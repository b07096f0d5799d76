"""One plain sentence for each choice of a field of a Case, shown in the tooltip of its control."""

from attnlab.case.masks import MASKS
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.platforms import PLATFORMS
from attnlab.case.stages import STAGES

_INDEX_DTYPES = {
    "int32": "The tensor has 32-bit integers, as the kernels expect.",
    "int64": "The tensor has 64-bit integers.",
}
_DTYPES = {
    "float16": "IEEE half precision.",
    "bfloat16": "8 bits of exponent, 8 bits of precision.",
    "float32": "IEEE single precision.",
    "float64": "IEEE double precision.",
}


def sentence(text: str) -> str:
    """Return a help text as a sentence, with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


CHOICES: dict[str, dict[str, str]] = {
    "op": {
        "chunked_prefill_paged_decode": "Attention of a mixed batch: prefill rows by the prefill kernel, "
        "decode rows by a paged decode kernel.",
        "context_attention_fwd": "The prefill kernel alone: new tokens attend to a paged context.",
        "triton_prefill_attention": "Attention of whole sequences without a cache, as in an encoder.",
        "unified_attention": "One kernel for prefill and decode rows, which reads all keys from the cache.",
        "decode_attention_fwd": "Decode of one token per sequence, split along the keys.",
        "merge_attn_states": "Merges two partial attention outputs by their log-sum-exp.",
        "reshape_and_cache_flash": "Writes new keys and values to the cache.",
        "cpu_attention_with_kv_cache": "The attention op of vLLM's CPU backend.",
    },
    "dtype": _DTYPES,
    "kv_cache_dtype": {
        "auto": "The cache has the dtype of query, key and value.",
        "fp8": "The platform's default FP8 format, which is e4m3.",
        "fp8_e4m3": "FP8 with 4 bits of exponent and 3 of mantissa.",
        "fp8_e5m2": "FP8 with 5 bits of exponent and 2 of mantissa.",
    },
    "kv_layout": {
        "contiguous": "Every tensor is contiguous.",
        "fused": "Query, key and value are slices of one tensor; so are key and value cache.",
        "HND": "Like fused, and the heads of a block precede its slots.",
    },
    "mask": {name: sentence(one.summary) for name, one in MASKS.items()},
    "op_argument": {
        NONE: "No further argument is passed.",
        **{name: sentence(one.summary) for name, one in OP_ARGUMENTS.items()},
    },
    "stage": {name: sentence(stage.story) for name, stage in STAGES.items()},
    "fill": {
        "context_only": "The cache has the context tokens only.",
        "decode_rows": "The cache also has the new token of each decode sequence.",
        "all_rows": "The cache has all tokens, as in production.",
    },
    "block_table_dtype": _INDEX_DTYPES,
    "seq_lens_dtype": _INDEX_DTYPES,
    "query_start_loc_dtype": {
        **_INDEX_DTYPES,
        "int32_before_cumsum": "Int32 is requested before torch.cumsum, which returns int64.",
    },
    "platform": {
        name: sentence(f"{platform.family.upper()}: {platform.example}")
        for name, platform in PLATFORMS.items()
    },
    "release": {
        "0.11.2": "The rules of vLLM 0.11.2.",
        "0.33.0": "The rules of vLLM 0.33.0.",
    },
    "backend": {
        "model": "Models of the kernels, written in torch.",
        "vllm": "The Triton source of a vLLM, on a GPU or under Triton's interpreter.",
        "vllm-cpu": "The compiled CPU op of the installed vLLM.",
        "rocm": "The HIP source of a vLLM on an emulated device.",
        "cuda": "The CUDA source of a vLLM's cache write on an emulated device.",
    },
    "cache_write": {
        "scaled": "Numbers are divided by the scale and rounded to FP8, as vLLM does.",
        "numeric": "Each number is cast to uint8, as an early version of the test does.",
    },
    "cache_format": {
        "fp8_e4m3fn": "OCP e4m3: largest number 448.",
        "fp8_e4m3fnuz": "AMD's e4m3 of MI300: largest number 240, no negative zero.",
        "fp8_e5m2": "OCP e5m2: largest number 57344.",
    },
    "freed": {
        "kept": "The blocks keep their contents.",
        "empty": "The blocks hold what empty slots hold.",
        "recycled": "The blocks hold tokens of the next sequence.",
    },
    "empty_slots": {
        "zeros": "Slots that were never written hold zeros.",
        "nan": "They hold NaN, so that every read of one shows.",
        "garbage": "They hold finite numbers, as recycled memory does.",
    },
    "distribution": {
        "uniform_1e-3": "Uniform between -1e-3 and 1e-3, as in vLLM's test.",
        "normal": "Normal with standard deviation 1.",
        "large_scores": "Normal, with all scores of a row near ±147456 times the scale.",
        "ties": "Normal, with equal scores; values are tags of a head and 16 tokens.",
        "dominant_key": "Normal, with one key per sequence and head that has nearly all the weight.",
        "near_limit": "Normal, with values near 65504, the limit of float16.",
    },
    "output_init": {
        "recycled": "The output buffer holds finite numbers, as torch.empty may return.",
        "nan": "It holds NaN, so that unwritten rows show.",
        "zeros": "It holds zeros.",
    },
    "reference_dtype": _DTYPES,
}
