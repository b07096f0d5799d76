"""The arguments of an attention op by the names that they have in vLLM, FlashAttention and FlashInfer.

A :class:`Reading` has the arguments of :meth:`attnlab.tensors.call.KernelCall.from_tensors` that were found.
Nothing is computed on tensors here: an argument is only looked up, so that reading is cheap on a GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.errors import InvalidCall

Arguments = Mapping[str, Any]
NAMES: dict[str, tuple[str, ...]] = {
    "query": ("query", "q"),
    "key_cache": ("key_cache", "k_cache", "k_buffer"),
    "value_cache": ("value_cache", "v_cache", "v_buffer"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "output": ("output", "out", "o"),
    "block_table": ("block_table", "block_tables", "b_loc", "req_to_token", "page_table"),
    "seq_lens": ("seq_lens", "seqused_k", "b_seq_len", "cache_seqlens"),
    "query_start_loc": ("query_start_loc", "cu_seqlens_q", "b_start_loc", "cum_seq_lens_q"),
    "slot_mapping": ("slot_mapping",),
    "max_query_len": ("max_query_len", "max_seqlen_q", "max_input_len", "max_q_len"),
    "max_seq_len": ("max_seq_len", "max_seqlen_k", "max_kv_len"),
    "sm_scale": ("sm_scale", "softmax_scale", "scale"),
    "k_scale": ("k_scale", "k_descale"),
    "v_scale": ("v_scale", "v_descale"),
    "softcap": ("softcap", "logit_cap", "logits_soft_cap"),
    "alibi_slopes": ("alibi_slopes",),
    "sinks": ("sinks", "s_aux"),
    "sliding_window": ("sliding_window",),
    "kv_cache_dtype": ("kv_cache_dtype",),
    "q_scale": ("q_scale", "q_descale"),
    "output_scale": ("output_scale", "fp8_out_scale"),
    "causal": ("causal",),
    "mm_prefix_range": ("mm_prefix_range",),
    "mm_prefix_clamp_sliding_window": ("mm_prefix_clamp_sliding_window",),
    "rswa_prefix_lens": ("rswa_prefix_lens",),
    "chunk_lookback": ("chunk_lookback",),
    "qq_bias": ("qq_bias",),
    "lse": ("lse", "softmax_lse"),
    "before": ("before",),
    "op": ("op",),
    "layout": ("layout",),
}
REQUIRED = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
REQUIRED_OF_WRITE = ("key", "value", "key_cache", "value_cache", "slot_mapping")
# Arguments that change the result and that attnlab has no reference for, and the values that change nothing.
_UNMODELLED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("k_scale_cache", "v_scale_cache", "q_v", "mask_mod"), (None,)),
    **dict.fromkeys(("attn_mask", "gather_kv_indices", "dynamic_causal", "mask"), (None,)),
    "block_sparse_tensors": (None,),
    **dict.fromkeys(("use_alibi_sqrt", "skip_decode", "use_interleaved_v_cache"), (False,)),
    "interleaved_v": (False,),
    "interleaved_v_pack_factor": (0,),
    "blocksparse_vert_stride": (0,),
    "dropout_p": (0.0,),
    "cp_world_size": (1,),
    "kv_quant_mode": (0, 1),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """What was read from the arguments of a call.

    - ``fields``: arguments of ``KernelCall.from_tensors``, by its names.
    - ``unmodelled``: the names of arguments without a reference.
    - ``result``: returns (output, log-sum-exp or None) from what the op returned; None if the op writes
      ``fields["output"]``.
    """

    fields: dict[str, Any]
    unmodelled: list[str] = field(default_factory=list)
    result: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]] | None = None


def read_arguments(arguments: Arguments) -> Reading:
    """Return the fields that the arguments of an op hold, by the names in :data:`NAMES`."""
    fields = {}
    for name, aliases in NAMES.items():
        for alias in aliases:
            if arguments.get(alias) is not None:
                fields[name] = arguments[alias]
                break
    _take_caches(fields)
    _take_window(fields, arguments)
    unmodelled = [
        name
        for name, neutral in _UNMODELLED.items()
        if name in arguments and not _is_one_of(arguments[name], neutral)
    ]
    if not isinstance(fields.get("causal", True), (bool, int, float, torch.Tensor)):
        fields.pop("causal")
    return Reading(fields=fields, unmodelled=unmodelled)


def missing(fields: Mapping[str, Any], *, writes_cache: bool = False) -> list[str]:
    """Return the required fields of an attention op, or of a cache write, that are not there."""
    required = REQUIRED_OF_WRITE if writes_cache else REQUIRED
    return [name for name in required if name not in fields]


def check_complete(reading: Reading, *, writes_cache: bool = False) -> None:
    """Raise InvalidCall unless every required field was read."""
    for name in missing(reading.fields, writes_cache=writes_cache):
        names = " or ".join(NAMES[name])
        raise InvalidCall(f"{name} must be among the arguments, as {names}, got none", field=name)


def _take_caches(fields: dict[str, Any]) -> None:
    """Take ``k`` and ``v`` for the cache if they have its dimensions and no other argument is the cache."""
    for new, cache in (("key", "key_cache"), ("value", "value_cache")):
        tensor = fields.get(new)
        if cache not in fields and isinstance(tensor, torch.Tensor) and tensor.dim() >= 4:
            fields[cache] = fields.pop(new)


def _take_window(fields: dict[str, Any], arguments: Arguments) -> None:
    """Set ``sliding_window`` to the number of keys that a row sees, 0 for all.

    FlashAttention's window_size is (keys to the left, keys to the right), -1 for all; FlashInfer's
    window_left is the first of them.
    """
    window = arguments.get("window_size")
    left = window[0] if isinstance(window, (tuple, list)) else arguments.get("window_left")
    if left is not None:
        fields["sliding_window"] = left + 1 if left >= 0 else 0
    if isinstance(fields.get("sliding_window"), (tuple, list)):
        fields["sliding_window"] = fields["sliding_window"][0] + 1
    if "sliding_window" in fields:
        fields["sliding_window"] = max(0, int(fields["sliding_window"]))
    if arguments.get("rswa_window") is None:  # R-SWA needs both arguments
        fields.pop("rswa_prefix_lens", None)
    elif "rswa_prefix_lens" in fields:
        fields["sliding_window"] = int(arguments["rswa_window"])


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    return value is None or value in neutral
