"""FlashAttention, FlashInfer's stateless paged calls, and torch's scaled_dot_product_attention.

The record of unified_attention describes them: all keys and values come from the cache. The signatures are
those of flash_attn 2.8, vllm_flash_attn (vLLM 0.33.0) and flashinfer 0.4.
"""

from typing import Any

import torch

from attnlab.case.ops import UNIFIED
from attnlab.recorder.argument_names import Reading, output_of
from attnlab.recorder.recorded_op import RecordedOp


def _flash(arguments: dict[str, Any], reading: Reading) -> None:
    """Take the lengths of the keys, and the log-sum-exp as [num_tokens, num_heads]."""
    starts = arguments.get("cu_seqlens_k")
    if "seq_lens" not in reading.fields and isinstance(starts, torch.Tensor):
        reading.fields["seq_lens"] = starts.diff()
    reading.fields["causal"] = bool(arguments.get("causal", False))
    right = _right(arguments.get("window_size"))
    if reading.fields["causal"] and right > 0:
        reading.unmodelled.append("window_size to the right")
    if isinstance(arguments.get("window_size"), (tuple, list)):
        reading.unknown.pop("window_size", None)
    if not reading.fields["causal"] and right >= 0:
        reading.fields["window_right"] = right
        if not reading.fields.get("sliding_window"):
            reading.unmodelled.append("window_size to the right alone")

    def result(returned: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        output, lse = output_of(returned)
        return output, None if lse is None or lse.dim() != 2 else lse.T

    reading.result = result


def _right(window: Any) -> int:
    return int(window[1]) if isinstance(window, (tuple, list)) else -1


def _trtllm(arguments: dict[str, Any], reading: Reading) -> None:
    """Read the cache and the two scales: bmm1_scale has sm_scale, q_scale and k_scale, bmm2_scale v_scale."""
    cache, fields = arguments.get("kv_cache"), reading.fields
    if isinstance(cache, torch.Tensor):
        cache = cache.unbind(1)  # [num_pages, 2, …]
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        fields["key_cache"], fields["value_cache"] = cache
    fields["layout"] = "flash" if arguments.get("kv_layout", "HND") == "NHD" else "HND"
    fields["sm_scale"], fields["v_scale"] = arguments.get("bmm1_scale"), arguments.get("bmm2_scale")
    key, query = fields.get("key_cache"), fields.get("query")
    if isinstance(key, torch.Tensor) and isinstance(query, torch.Tensor):
        if key.dtype == query.dtype and fields.pop("v_scale") not in (None, 1, 1.0):
            reading.unmodelled.append("bmm2_scale")
        if query.dtype.itemsize == 1:
            reading.unmodelled.append("query in FP8")
    for name in ("q_len_per_req", "o_sf_scale", "skip_softmax_threshold_scale_factor"):
        if arguments.get(name) not in (None, 1):
            reading.unmodelled.append(name)
    reading.result = output_of


_OF_TRTLLM = (
    "kv_cache", "bmm1_scale", "bmm2_scale", "kv_layout", "q_len_per_req", "o_sf_scale",
    "skip_softmax_threshold_scale_factor", "batch_size",
)  # fmt: skip


def _sdpa(arguments: dict[str, Any], reading: Reading) -> None:
    """View each batch element as a sequence with one block that holds all its keys.

    A call with a mask is left out: it has no reference here, and is often a test's own one, whose copies
    would be the largest.
    """
    if arguments.get("attn_mask") is not None:
        reading.fields = {}
        return
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if query.dim() != 4:
        query, key, value = (t.flatten(0, -3)[:, None] for t in (query, key, value))
    batch, heads, rows, size = query.shape
    keys = key.shape[2]
    causal = bool(arguments.get("is_causal"))
    if causal and rows > keys:
        reading.unmodelled.append("is_causal with more rows than keys")
    index = {"dtype": torch.int32, "device": query.device}
    reading.fields = {
        "query": query.transpose(1, 2).reshape(batch * rows, heads, size),
        "key_cache": key,
        "value_cache": value,
        "block_table": torch.arange(batch, **index)[:, None],
        "seq_lens": torch.full((batch,), rows if causal else keys, **index),
        "query_start_loc": torch.arange(batch + 1, **index) * rows,
        "sm_scale": arguments.get("scale"),
        "causal": causal or rows == 1,
    }

    def result(returned: Any) -> tuple[torch.Tensor, None]:
        shaped = returned.reshape(batch, heads, rows, -1).transpose(1, 2)
        return shaped.reshape(batch * rows, heads, -1), None

    reading.result = result


def other_ops() -> tuple[RecordedOp, ...]:
    """Return the ops of other libraries that are recorded."""
    found = [
        RecordedOp(
            module=module,
            function="flash_attn_varlen_func",
            op=UNIFIED,
            layout="flash",
            adjust=_flash,
        )
        for module in (
            "vllm.vllm_flash_attn.flash_attn_interface",
            "flash_attn.flash_attn_interface",
        )
    ]
    for module, function in (
        ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"),
        ("flashinfer.prefill", "trtllm_batch_context_with_kv_cache"),
    ):
        found.append(
            RecordedOp(
                module=module, function=function, op=UNIFIED, adjust=_trtllm, reads=_OF_TRTLLM
            )
        )
    sdpa = RecordedOp(
        module="torch.nn.functional",
        function="scaled_dot_product_attention",
        op=UNIFIED,
        layout="HND",
        adjust=_sdpa,
        reads=("enable_gqa",),
    )
    return (*found, sdpa)
