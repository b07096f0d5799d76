"""Fields of the Cases of vLLM's attention tests, and what such a Case lacks to be the test.

Each function takes the values of a test's parameters. Data that a test draws from a random generator is
drawn anew: a Case has the test's distribution, not its numbers.
"""

import random
from collections.abc import Mapping
from typing import Any

from attnlab.case.ops import DECODE_FWD, MERGE, UNIFIED, WRAPPER, WRITE

Values = Mapping[str, Any]
_LDS_BYTES = 64 << 10  # shared memory of a workgroup on gfx90a and gfx942


def _common(values: Values) -> dict[str, Any]:
    """Return what all of these tests have: int32 tables, random data, and random numbers in empty slots."""
    return {
        "stage": "sound",
        "seed": values.get("seed", 0),
        "distribution": "normal",
        "empty_slots": "garbage",
    }


def unified(values: Values) -> dict[str, Any]:
    heads, kv_heads = values["num_heads"]
    lens = values["seq_lens"]
    fields = {
        **_common(values),
        "op": UNIFIED,
        "num_heads": heads,
        "num_queries_per_kv": heads // kv_heads,
        "head_size": values["head_size"],
        "block_size": values["block_size"],
        "dtype": values.get("dtype", "bfloat16"),
        "sliding_window": values.get("sliding_window") or 0,
        "softcap": values.get("soft_cap"),
        "query_lens": tuple(query_len for query_len, _ in lens),
        "ctx_lens": tuple(seq_len - query_len for query_len, seq_len in lens),
        "num_blocks": values["num_blocks"],
        "atol": 1.5e-2,
        "rtol": 1e-2,
    }
    if "seq_threshold_3D" in values:
        fields["num_splits"] = 16 if values["seq_threshold_3D"] else 0
    return fields


def unified_fp8_cache(values: Values) -> dict[str, Any]:
    scales = {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 0.25}
    return {**unified(values), **scales, "atol": 0.15, "rtol": 0.15}


def unified_fp8_output(values: Values) -> dict[str, Any]:
    return {**unified({**values, "dtype": "float16"}), "atol": 0.2, "rtol": 0.2}


def decode(values: Values) -> dict[str, Any]:
    """The test compares two page sizes by torch.allclose; a Case compares one with the reference, up to
    rounding. Its table and seq_lens are int64."""
    count, seq_len = values["B"], values["L"]
    return {
        **_common(values),
        "op": DECODE_FWD,
        "num_heads": values["H_Q"],
        "num_queries_per_kv": values["H_Q"] // values["H_KV"],
        "head_size": values["D_QK"],
        "block_size": values["PAGE_SIZE"],
        "dtype": "bfloat16",
        "num_splits": 8,
        "query_lens": (1,) * count,
        "ctx_lens": (seq_len - 1,) * count,
        "num_blocks": values["CACHE_SIZE"] // values["PAGE_SIZE"],
        "block_table_dtype": "int64",
        "seq_lens_dtype": "int64",
        "output_init": "zeros",
    }


def decode_fp8(values: Values) -> dict[str, Any]:
    """The test's scale is the largest of its random numbers, about 5.6, divided by 448."""
    scale = {"kv_cache_dtype": "fp8", "k_scale": 0.0125, "v_scale": 0.0125}
    return {**decode(values), **scale, "atol": 0.5, "rtol": 1e-2}


def decode_missing(values: Values) -> str:
    return "" if values["D_QK"] == values["D_V"] else f"values of width {values['D_V']}"


def merge(values: Values) -> dict[str, Any]:
    """The test merges random numbers; a Case merges the attention to 16 cached keys and to the new ones."""
    dtype, tokens = values.get("input_dtype") or values["output_dtype"], values["num_tokens"]
    lens = [64] * (tokens // 64) + [tokens % 64] * (tokens % 64 > 0)
    return {
        **_common(values),
        "op": MERGE,
        "num_heads": values["num_query_heads"],
        "head_size": values["head_size"],
        "dtype": dtype,
        "query_lens": tuple(lens),
        "ctx_lens": (16,) * len(lens),
        "atol": 1e-3,
        "rtol": 1e-2 if dtype == "bfloat16" else 1e-3,
    }


def merge_missing(values: Values) -> str:
    missing = ["an FP8 output"] if values.get("use_fp8") else []
    if values.get("prefill_tokens_with_context") is not None:
        missing.append("prefill_tokens_with_context")
    return " and ".join(missing)


def write(values: Values) -> dict[str, Any]:
    """Half of num_tokens, each in a block of its own and at another offset, in half of num_blocks."""
    count, block_size = values["num_tokens"] // 2, values["block_size"]
    fields = {
        **_common(values),
        "op": WRITE,
        "num_heads": values["num_heads"],
        "head_size": values["head_size"],
        "block_size": block_size,
        "dtype": values["dtype"],
        "query_lens": (1,) * count,
        "ctx_lens": tuple(5 * i % block_size for i in range(count)),
        "num_blocks": values["num_blocks"] // 2,
    }
    if (
        values["kv_cache_dtype"] == "fp8"
    ):  # the largest of its random numbers, about 4, divided by 64
        fields |= {"kv_cache_dtype": "fp8", "k_scale": 0.0625, "v_scale": 0.0625}
    if values.get("kv_cache_layout") == "HND":
        fields["kv_layout"] = "HND"
    return fields


def write_missing(values: Values) -> str:
    missing = []
    if values["kv_cache_dtype"] == "nvfp4":
        missing.append("an nvfp4 cache")
    if values.get("kv_scale_type") == "attn_head":
        missing.append("one scale per head")
    if values.get("implementation", "cuda") == "cuda":
        missing.append("vLLM's compiled kernel instead of its Triton kernel")
    elif values["kv_cache_layout"] == "HND":
        missing.append("the Triton kernel with HND, which the test skips")
    return " and ".join(missing)


def paged(values: Values) -> dict[str, Any]:
    """The ROCm decode kernel. The longest sequence fills the shared memory of gfx90a and gfx942."""
    most = _LDS_BYTES // 4 - 512
    rng = random.Random(values["seed"])
    seq_lens = [rng.randint(1, most) for _ in range(values["num_seqs"])]
    seq_lens[-1] = most
    heads, kv_heads = values["num_heads"]
    fields = {
        **_common(values),
        "op": WRAPPER,
        "platform": "gfx942",
        "num_heads": heads,
        "num_queries_per_kv": heads // kv_heads,
        "head_size": values["head_size"],
        "block_size": values["block_size"],
        "alibi": values["use_alibi"],
        "dtype": values["dtype"],
        "query_lens": (1,) * len(seq_lens),
        "ctx_lens": tuple(seq_len - 1 for seq_len in seq_lens),
    }
    if values["kv_cache_dtype"] == "fp8":
        fields["kv_cache_dtype"] = "fp8"
        if "version" not in values:  # 0.33.0; before it both scales were 1
            fields |= {"k_scale": 0.5, "v_scale": 0.25}
    if values.get("use_interleaved_v_cache"):
        fields["interleave_v"] = True
    return fields


def paged_missing(values: Values) -> str:
    version = values.get("version", "rocm")
    if version != "rocm":
        return f"the compiled CUDA kernel paged_attention_{version}"
    if values["head_size"] not in (64, 128):
        return "a head size other than 64 and 128, which the test skips"
    return ""


def unified_missing(values: Values) -> str:
    return "" if values["q_dtype"] is None else "FP8 queries"


def nonstandard_blocks(values: Values) -> dict[str, Any]:
    """test_contexted_kv_attention without a window, with fewer blocks than the test allocates."""
    names = ("op", "num_heads", "num_queries_per_kv", "head_size", "block_size", "interleave_v")
    fixed = {"stage": "cast_after_cumsum", "x": 8, "atol": 1e-4}
    return {**{name: values[name] for name in names}, **fixed}
