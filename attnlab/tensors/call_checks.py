"""Checks of a KernelCall's fields: each raises InvalidCall with one line that names the field."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import OPS
from attnlab.tensors.shapes import check_dims, check_index, check_shape
from attnlab.tensors.visibility_checks import check_visibility

NEW_TOKENS = ("given", "in the cache")
_INDEX = ("block_table", "seq_lens", "query_start_loc")


def check_call(given: Mapping[str, Any]) -> None:
    """Raise InvalidCall unless the fields of a call fit together. ``given``: each field by its name."""
    if given["op"] not in OPS:
        text = f"op must be one of {', '.join(OPS)}, got {given['op']!r}"
        raise InvalidCall(text, field="op")
    _check_attention(given)
    num_seqs, _ = check_dims("block_table", given["block_table"], 2)
    check_shape("seq_lens", given["seq_lens"], (num_seqs,))
    check_shape("query_start_loc", given["query_start_loc"], (num_seqs + 1,))
    for name in _INDEX:
        check_index(name, given[name])
    _check_optional(given, num_seqs)
    check_visibility(given, num_seqs)
    if given["new_tokens"] not in NEW_TOKENS:
        text = f"new_tokens must be one of {', '.join(NEW_TOKENS)}, got {given['new_tokens']!r}"
        raise InvalidCall(text, field="new_tokens")


def _check_attention(given: Mapping[str, Any]) -> None:
    """Check query, key, value, both caches and the output."""
    tokens, heads, head_size = check_dims("query", given["query"], 3)
    _, kv_heads, _ = check_dims("key", given["key"], 3)
    check_shape("key", given["key"], (tokens, kv_heads, head_size))
    blocks, _, chunks, block_size, x = check_dims("key_cache", given["key_cache"], 5)
    check_shape("key_cache", given["key_cache"], (blocks, kv_heads, chunks, block_size, x))
    if chunks * x != head_size:
        text = f"key_cache must hold heads of {head_size}, got {chunks} × {x}"
        raise InvalidCall(text, field="key_cache")
    _, _, value_size, _ = check_dims("value_cache", given["value_cache"], 4)
    check_shape("value_cache", given["value_cache"], (blocks, kv_heads, value_size, block_size))
    check_shape("value", given["value"], (tokens, kv_heads, value_size))
    output = (tokens, heads, value_size)
    if OPS[given["op"]].writes_cache:
        output = (blocks * block_size, kv_heads, head_size + value_size)
    for name in ("output", "before"):
        if given[name] is not None:
            check_shape(name, given[name], output)
    if kv_heads == 0 or heads % kv_heads:
        text = f"query must have a multiple of {kv_heads} heads, got {heads}"
        raise InvalidCall(text, field="query")


def _check_optional(given: Mapping[str, Any], num_seqs: int) -> None:
    """Check sinks, log-sum-exp, slot mapping, block numbers and scales."""
    tokens, heads, _ = given["query"].shape
    blocks, kv_heads, _, block_size = given["value_cache"].shape
    shapes = {"sinks": (heads,), "lse": (tokens, heads), "block_ids": (blocks,)}
    for name, shape in shapes.items():
        if given[name] is not None:
            check_shape(name, given[name], shape)
    if given["sinks"] is not None and not given["sinks"].is_floating_point():
        text = f"sinks must be of a floating dtype, got {given['sinks'].dtype}"
        raise InvalidCall(text, field="sinks")
    if given["slot_mapping"] is not None:
        check_dims("slot_mapping", given["slot_mapping"], 1)
        check_index("slot_mapping", given["slot_mapping"])
    _check_formats(given, num_seqs)
    for name in ("k_scale", "v_scale"):
        scale = given[name]
        allowed = [(num_seqs, kv_heads), (blocks, block_size, kv_heads)]
        if isinstance(scale, torch.Tensor) and tuple(scale.shape) not in allowed:
            shown = " or ".join(map(str, allowed))
            text = f"{name} must be a number or have shape {shown}, got {tuple(scale.shape)}"
            raise InvalidCall(text, field=name)


def is_fp8(value: object) -> bool:
    """Answer whether ``value`` is a tensor in an FP8 format."""
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() == 1
    )


def _check_formats(given: Mapping[str, Any], num_seqs: int) -> None:
    """Check the formats of query and output: an FP8 query needs an FP8 cache, and scales must fit."""
    kv_heads = given["value_cache"].shape[1]
    if is_fp8(given["query"]) and given["kv_cache_dtype"] == "auto":
        text = "kv_cache_dtype must be FP8 for a query in FP8, got auto"
        raise InvalidCall(text, field="kv_cache_dtype")
    if isinstance(given["q_scale"], torch.Tensor):
        check_shape("q_scale", given["q_scale"], (num_seqs, kv_heads))
    scale = given["output_scale"]
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        text = f"output_scale must be a positive number, got {scale!r:.60}"
        raise InvalidCall(text, field="output_scale")
