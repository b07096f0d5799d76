"""The arguments of an attention op by the names that they have in vLLM, FlashAttention and FlashInfer.

A :class:`Reading` has the arguments of :meth:`attnlab.tensors.call.KernelCall.from_tensors` that were found.
Nothing is computed on tensors here: an argument is only looked up, so that reading is cheap on a GPU.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.tensors.call import KernelCall

Arguments = Mapping[str, Any]
NAMES: dict[str, tuple[str, ...]] = {
    "query": ("query", "q"),
    "key_cache": ("key_cache", "k_cache", "k_buffer"),
    "value_cache": ("value_cache", "v_cache", "v_buffer"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "output": ("output", "out", "o"),
    "block_table": (
        "block_table",
        "block_tables",
        "b_loc",
        "req_to_token",
        "page_table",
        "block_offsets",
    ),
    "request_index": ("b_req_idx", "req_pool_indices"),
    "token_starts": ("kv_indptr",),
    "token_slots": ("kv_indices",),
    "seq_lens": ("seq_lens", "seqused_k", "b_seq_len", "cache_seqlens", "kv_seqlens"),
    "query_start_loc": (
        "query_start_loc",
        "cu_seqlens_q",
        "b_start_loc",
        "cum_seq_lens_q",
        "qo_indptr",
        "q_start_loc",
    ),
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
    "causal": ("causal", "is_causal"),
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
# Arguments that change no number beyond rounding: scratch memory, tuning, and what is only returned.
_NEUTRAL = (
    "attn_logits", "attn_logits_max", "attn_lse", "exp_sum", "exp_sums", "max_logits", "tmp_out",
    "tmp_output", "workspace", "workspace_buffer", "scheduler_metadata", "softmax_segm_output",
    "softmax_segm_max", "softmax_segm_expsum", "lean_Mp", "lean_Lp", "lean_Op", "lean_locks",
    "num_splits", "num_kv_splits", "max_kv_splits", "num_par_softmax_segments", "seq_threshold_3D",
    "use_td", "enable_pdl", "use_pdl", "enable_lean", "uneven_batch", "pack_gqa", "sm_margin",
    "fa_version", "ver", "deterministic", "backend", "isa", "mfma_type", "num_warps", "num_stages",
    "waves_per_eu", "return_softmax_lse", "return_attn_probs", "return_lse", "out_dtype",
    "o_sf_vec_size", "cu_seqlens_k", "cum_seq_lens_kv", "max_len_in_batch", "rotary_interleaved",
)  # fmt: skip
# Arguments that repeat a size of the tensors: neutral if they have this value.
_SIZES: dict[str, Callable[[KernelCall], int]] = {
    **dict.fromkeys(("num_heads", "num_q_heads", "num_qo_heads"), lambda call: call.query.shape[1]),
    **dict.fromkeys(("num_kv_heads", "kv_heads"), lambda call: call.key.shape[1]),
    **dict.fromkeys(("head_size", "head_dim"), lambda call: call.query.shape[2]),
    **dict.fromkeys(("block_size", "page_size"), lambda call: call.block_size),
    **dict.fromkeys(("batch_size", "num_seqs"), lambda call: len(call.seq_lens)),
    **dict.fromkeys(("kv_group_num", "num_queries_per_kv"), lambda call: call.num_queries_per_kv),
}


class BoundArguments(dict[str, Any]):
    """The arguments of a call by name, with defaults. ``given``: the names of those not at their default."""

    def __init__(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.given = {
            name
            for name, value in arguments.items()
            if name not in defaults or not _is_same(value, defaults[name])
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """What was read from the arguments of a call.

    - ``fields``: arguments of ``KernelCall.from_tensors``, by its names.
    - ``unmodelled``: the names of arguments without a reference.
    - ``unknown``: arguments that were not understood and differ from their defaults, by name.
    - ``read_as``: how arguments of another form were read, in words.
    - ``result``: returns (output, log-sum-exp or None) from what the op returned; None if the op writes
      ``fields["output"]``.
    """

    fields: dict[str, Any]
    unmodelled: list[str] = field(default_factory=list)
    unknown: dict[str, Any] = field(default_factory=dict)
    read_as: list[str] = field(default_factory=list)
    result: Callable[[Any], tuple[torch.Tensor | None, torch.Tensor | None]] | None = None

    def unknown_texts(self, call: KernelCall) -> tuple[str, ...]:
        """Return the unknown arguments as "name=value", without those that repeat a size of the call."""
        return tuple(
            f"{name}={_shown(value)}"
            for name, value in self.unknown.items()
            if name not in _SIZES or _shown(value) != str(_SIZES[name](call))
        )


def read_arguments(arguments: Arguments, known: Collection[str] = ()) -> Reading:
    """Return the fields that the arguments of an op hold, by the names in :data:`NAMES`.

    Of :class:`BoundArguments`, those that are not understood are kept; ``known``: further names that are. A
    dict of tensors may hold anything: only a window_size that is not understood is kept.
    """
    fields, used = {}, {*known, *_UNMODELLED, *_NEUTRAL}
    for name, aliases in NAMES.items():
        for alias in aliases:
            if arguments.get(alias) is not None:
                fields[name] = arguments[alias]
                used.add(alias)
                break
    _take_caches(fields)
    used |= _take_window(fields, arguments)
    given = arguments.given if isinstance(arguments, BoundArguments) else {"window_size"}
    unknown = {
        name: arguments[name]
        for name in arguments
        if name in given and name not in used and arguments[name] is not None
    }
    unmodelled = [
        name
        for name, neutral in _UNMODELLED.items()
        if name in arguments and not _is_one_of(arguments[name], neutral)
    ]
    if not isinstance(fields.get("causal", True), (bool, int, float, torch.Tensor)):
        fields.pop("causal")
    return Reading(fields=fields, unmodelled=unmodelled, unknown=unknown)


def output_of(result: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return output and log-sum-exp of what an op returned: a tensor, or a sequence that starts with both.

    The output is None if no tensor was returned.
    """
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    found = [one if isinstance(one, torch.Tensor) else None for one in (*tensors[:2], None, None)]
    return found[0], found[1]


def returned_output(result: Any) -> tuple[torch.Tensor | None, None]:
    """Return the output of an op that attnlab has no record of; what else it returned is not known."""
    return output_of(result)[0], None


def _is_same(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return value is default
    try:
        return value is default or (type(value) is type(default) and bool(value == default))
    except (TypeError, ValueError, RuntimeError):
        return False


def _shown(value: Any) -> str:
    """Return an argument as short text; of a larger tensor, only its shape."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return str(value.item())
        return f"a tensor {tuple(value.shape)}"
    return " ".join(f"{value!r:.40}".split())


def missing(fields: Mapping[str, Any], *, writes_cache: bool = False) -> list[str]:
    """Return the required fields of an attention op, or of a cache write, that are not there.

    Lists of token slots (``kv_indptr``, ``kv_indices``) stand for block table and lengths.
    """
    required = REQUIRED_OF_WRITE if writes_cache else REQUIRED
    listed = {"token_starts", "token_slots"} <= fields.keys()
    instead = ("block_table", "seq_lens") if listed else ()
    return [name for name in required if name not in fields and name not in instead]


def check_complete(reading: Reading, *, writes_cache: bool = False) -> None:
    """Raise InvalidCall unless every required field was read."""
    for name in missing(reading.fields, writes_cache=writes_cache):
        names = " or ".join(NAMES[name])
        raise InvalidCall(f"{name} must be among the arguments, as {names}, got none", field=name)


def take_tables(reading: Reading) -> None:
    """Bring tables and caches of other forms into those of a KernelCall. Changes the reading.

    - Lists of token slots become a block table; their lengths are waited for on a GPU.
    - A table for every request of an engine is read at the requests of the call.
    - A cache without a dimension for its blocks gets one.
    """
    page_size, fields = reading.unknown.get("page_size", 1), reading.fields
    reading.read_as += [
        *_table_of_slots(fields),
        *_table_of_requests(fields),
        *_paged_caches(fields, page_size),
    ]


def _table_of_slots(fields: dict[str, Any]) -> list[str]:
    """Make a block table and lengths from lists of the sequences' token slots, with blocks of one token."""
    starts, slots = fields.pop("token_starts", None), fields.pop("token_slots", None)
    tensors = isinstance(starts, torch.Tensor) and isinstance(slots, torch.Tensor)
    if not tensors or "block_table" in fields or "seq_lens" in fields:
        return []
    counts = starts.long().diff()
    columns = torch.arange(max(1, int(counts.max()) if len(counts) else 1), device=slots.device)
    index = starts[:-1].long().to(slots.device)[:, None] + columns
    inside = columns < counts.to(slots.device)[:, None]
    fields["block_table"] = torch.where(inside, slots[index.clamp(max=max(0, len(slots) - 1))], 0)
    fields["seq_lens"] = counts.int()
    return ["kv_indptr and kv_indices as a block table with blocks of one token"]


def _table_of_requests(fields: dict[str, Any]) -> list[str]:
    """Take the rows of a table of all requests that belong to the call."""
    index, table = fields.pop("request_index", None), fields.get("block_table")
    if not isinstance(index, torch.Tensor) or not isinstance(table, torch.Tensor):
        return []
    fields["block_table"] = table[index.long().to(table.device)]
    return ["the block table as the rows that the request index names"]


def _paged_caches(fields: dict[str, Any], page_size: Any) -> list[str]:
    """Give a cache [num_slots, num_kv_heads, head_size] a dimension for its blocks."""
    size = page_size if type(page_size) is int and page_size > 0 else 1
    caches = {name: fields.get(name) for name in ("key_cache", "value_cache")}
    flat = {n: one for n, one in caches.items() if isinstance(one, torch.Tensor) and one.dim() == 3}
    if len(flat) < 2 or any(len(one) % size for one in flat.values()):
        return []
    fields.update({name: one.unflatten(0, (-1, size)) for name, one in flat.items()})
    fields.setdefault("layout", "flash")
    tokens = "one token" if size == 1 else f"{size} tokens"
    return [f"the caches with blocks of {tokens}"]


def _take_caches(fields: dict[str, Any]) -> None:
    """Take ``k`` and ``v`` for the cache if they have its dimensions and no other argument is the cache."""
    for new, cache in (("key", "key_cache"), ("value", "value_cache")):
        tensor = fields.get(new)
        if cache not in fields and isinstance(tensor, torch.Tensor) and tensor.dim() >= 4:
            fields[cache] = fields.pop(new)


def _take_window(fields: dict[str, Any], arguments: Arguments) -> set[str]:
    """Set ``sliding_window`` to the number of keys that a row sees, 0 for all; return the arguments read.

    FlashAttention's window_size is (keys to the left, keys to the right), -1 for all; FlashInfer's
    window_left is the first of them. A window_size of one number is not read: it may count the row's own key
    or not. Nor is one that shows keys to the right.
    """
    window, used = arguments.get("window_size"), {"window_left", "rswa_window"}
    left = arguments.get("window_left")
    if isinstance(window, (tuple, list)) and len(window) == 2:
        left = window[0]
        used |= {"window_size"} if window[1] in (0, -1) else set()
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
    return used


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    return value is None or value in neutral
