"""Cache writes of vLLM that are recorded: reading, copying, and their KernelCall.

The recorded cache is that before the write; the output is the cache after it, slot by slot. Of a large cache
only the blocks that slot_mapping names are copied. A write has no sequences: its slot_mapping says where each
token goes.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.case.ops import CPU_ATTENTION, DECODE_FWD, OPS, PREFILL, UNIFIED, WRAPPER, WRITE
from attnlab.case.platforms import PLATFORMS
from attnlab.kernels.by_name import NAMES, output_of
from attnlab.kernels.model import written_cache
from attnlab.recorder.arguments import (
    Adjust,
    BoundArguments,
    Reading,
    RecordedOp,
    check_complete,
    number_of,
    op_of_text,
    plain_kv_cache_dtype,
    table_of_lists,
)
from attnlab.recorder.records import library_ops
from attnlab.recorder.snapshot import copied, copies, is_large
from attnlab.tensors.cache import LAYOUTS, to_flash, to_x_split
from attnlab.tensors.call import KernelCall, Origin
from attnlab.tensors.call_file import copy_blocks, named_by
from attnlab.tensors.formats import read_format
from attnlab.tensors.quantised import FP8_DTYPES

_CACHES = ("key_cache", "value_cache")
SDPA = "scaled_dot_product_attention"
_SLOT_AXIS = {"x-split": 3, "flash": 1, "HND": 2}  # of the keys


def write_ops(folders: tuple[str, ...], custom: str) -> tuple[RecordedOp, ...]:
    """Return the cache writes of vLLM: those of ``_custom_ops``, and the Triton one."""
    places = [(custom, "reshape_and_cache_flash"), (custom, "reshape_and_cache")]
    places += [(f"{folder}.{OPS[WRITE].module}", OPS[WRITE].function) for folder in folders]
    return tuple(
        RecordedOp(module=module, function=function, op=WRITE, writes_cache=True, adjust=_adjust)
        for module, function in places
    )


def _adjust(arguments: dict[str, Any], reading: Reading) -> None:
    """Set the layout: a key cache with five dimensions is x-split."""
    cache = reading.fields.get("key_cache")
    if isinstance(cache, torch.Tensor):
        reading.fields["layout"] = "x-split" if cache.dim() == 5 else "flash"


def copy_write(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a write with copies of their tensors, before the op runs.

    Of a large cache only the named blocks are copied: ``slot_mapping`` then has new numbers, and
    ``block_ids`` the original ones.
    """
    caches = tuple(fields[name].detach() for name in _CACHES)
    rest = copies({name: value for name, value in fields.items() if name not in _CACHES})
    if not is_large(*caches):
        return {**rest, **dict(zip(_CACHES, map(copied, caches), strict=True))}
    size = caches[0].shape[_SLOT_AXIS[fields["layout"]]]
    slots = rest["slot_mapping"]
    named = copy_blocks(caches, named_by(slots.div(size, rounding_mode="floor"), len(caches[0])))
    numbers = named.renumbered(slots.div(size, rounding_mode="floor"))
    rest["slot_mapping"] = torch.where(slots < 0, slots, numbers * size + slots % size)
    rest["block_ids"] = named.block_ids
    return {**rest, **dict(zip(_CACHES, named.caches, strict=True))}


def copy_written(fields: Mapping[str, Any], caches: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return copies of the caches after the write, with the blocks that ``fields`` has."""
    both = tuple(caches[name].detach() for name in _CACHES)
    ids = fields.get("block_ids")
    after = tuple(map(copied, both)) if ids is None else copy_blocks(both, ids).caches
    return {"key_after": after[0], "value_after": after[1]}


def write_of_reading(reading: Reading, origin: Origin) -> KernelCall:
    """Return the KernelCall of a recorded write; raise InvalidCall with one line."""
    check_complete(reading, writes_cache=True)
    fields = reading.fields
    layout = fields.get("layout") or ("x-split" if fields["key_cache"].dim() == 5 else "flash")
    if layout not in LAYOUTS:
        raise InvalidCall(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r:.40}")
    key, value = fields["key"], fields["value"]
    kind = plain_kv_cache_dtype(fields.get("kv_cache_dtype"), fields["key_cache"], key.dtype)
    before = _x_split(fields, _CACHES, layout, kind)
    after = before
    if "key_after" in fields:
        after = _x_split(fields, ("key_after", "value_after"), layout, kind)
    stored = fields["key_cache"].dtype
    if stored == torch.uint8:
        e4m3 = PLATFORMS[origin.platform].fp8_e4m3 if origin.platform in PLATFORMS else "fp8_e4m3fn"
        stored = read_format(kind, key.dtype, e4m3).dtype
    slots = fields["slot_mapping"].flatten()
    count = before[1].shape[0] * before[1].shape[3]
    beyond = torch.nonzero(slots >= count).flatten()
    if len(beyond):
        at = int(beyond[0])
        raise InvalidCall(f"slot_mapping[{at}] must be at most {count - 1}, got {int(slots[at])}")
    empty = torch.zeros(0, dtype=torch.int32, device=slots.device)
    return KernelCall(
        op=WRITE,
        query=key.new_zeros(()).expand(key.shape),
        key=key,
        value=value,
        key_cache=before[0],
        value_cache=before[1],
        output=written_cache(*(one.view(stored) for one in to_flash(*after))),
        kv_cache_dtype=kind,
        block_table=empty.view(0, 0),
        query_start_loc=torch.zeros(1, dtype=torch.int32, device=slots.device),
        seq_lens=empty,
        max_seq_len=0,
        max_query_len=0,
        slot_mapping=slots,
        block_ids=fields.get("block_ids"),
        layout=layout,
        unmodelled=tuple(reading.unmodelled),
        origin=origin,
        k_scale=_scale("k_scale", fields, before[1]),
        v_scale=_scale("v_scale", fields, before[1]),
    )


def _x_split(
    fields: Mapping[str, Any], names: tuple[str, str], layout: str, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = to_x_split(fields[names[0]], fields[names[1]], layout)
    return (key, value) if kind == "auto" else (key.view(torch.uint8), value.view(torch.uint8))


def _scale(name: str, fields: Mapping[str, Any], cache: torch.Tensor) -> float | torch.Tensor:
    """Return a scale as a number, or as one for each slot and head where it has one for each head."""
    scale = fields.get(name)
    if scale is None or fields["key"].dtype in FP8_DTYPES:
        return 1.0
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return float(number_of(name, scale))
    blocks, heads, _, size = cache.shape
    if tuple(scale.shape) != (heads,):
        text = f"{name} must be a number or have shape ({heads},), got {tuple(scale.shape)}"
        raise InvalidCall(text)
    return scale.expand(blocks, size, heads)


# FlashAttention, FlashInfer's stateless paged calls, and torch's scaled_dot_product_attention.
#
# The record of unified_attention describes them: all keys and values come from the cache. The signatures
# are those of flash_attn 2.8, vllm_flash_attn (vLLM 0.33.0) and flashinfer 0.4.


def _flash(arguments: dict[str, Any], reading: Reading) -> None:
    """Take the lengths of the keys, and the log-sum-exp as [num_tokens, num_heads].

    Keys and values without pages are a cache with blocks of one token.
    """
    starts, key = arguments.get("cu_seqlens_k"), arguments.get("k")
    if isinstance(starts, torch.Tensor):
        if "block_table" not in reading.fields and isinstance(key, torch.Tensor) and key.dim() == 3:
            for name in ("key", "value"):
                reading.fields[f"{name}_cache"] = reading.fields.pop(name)
            slots = torch.arange(len(key), dtype=torch.int32, device=key.device)
            reading.fields |= {"token_starts": starts, "token_slots": slots}
            reading.fields.pop("seq_lens", None)
        else:
            reading.fields.setdefault("seq_lens", starts.diff())
    reading.fields["causal"] = bool(arguments.get("causal", False))
    window = arguments.get("window_size")
    right = int(window[1]) if isinstance(window, (tuple, list)) else -1
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


def _with_rows(reading: Reading, query: torch.Tensor) -> None:
    """Read a query [num_seqs, new tokens, heads, size] as rows, and outputs and log-sum-exps likewise."""
    seqs, rows = query.shape[:2]
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=query.device) * rows
    reading.fields |= {"query": query.flatten(0, 1), "query_start_loc": starts}
    reading.fields["causal"] = reading.fields.get("causal", False) or rows == 1

    def result(returned: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        output, lse = output_of(returned)
        output = None if output is None else output.reshape(seqs * rows, *output.shape[-2:])
        return output, None if lse is None or lse.dim() != 3 else lse.transpose(1, 2).flatten(0, 1)

    reading.result = result


def _flash_decode(arguments: dict[str, Any], reading: Reading) -> None:
    """Read FlashAttention's call with a cache; without pages, each sequence has one block.

    New keys and values, which the op writes to the cache first, have no reference.
    """
    _flash(arguments, reading)
    query, cache, lens = arguments["q"], arguments["k_cache"], arguments.get("cache_seqlens")
    _with_rows(reading, query)
    index = {"dtype": torch.int32, "device": query.device}
    if "block_table" not in reading.fields:
        reading.fields["block_table"] = torch.arange(len(query), **index)[:, None]
    if not isinstance(lens, torch.Tensor):
        count = cache.shape[1] if lens is None else int(lens)
        reading.fields["seq_lens"] = torch.full((len(query),), count, **index)
    for name in ("key", "value"):
        reading.fields.pop(name, None)
    given = ("k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "qv")
    reading.unmodelled += [name for name in given if arguments.get(name) is not None]


_OF_FLASH_DECODE = (
    "k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "cache_seqlens", "qv",
)  # fmt: skip


def _latent(arguments: dict[str, Any], reading: Reading) -> None:
    """Read a call with a latent cache: the values are the first part of the keys, of one KV head."""
    cache: Any = arguments.get("k_cache", arguments.get("kv_cache"))
    size = arguments.get("head_dim_v", arguments.get("kv_lora_rank"))
    if cache.dim() == 3:  # [pages, tokens, size]
        cache = cache[:, :, None]
    reading.fields |= {"key_cache": cache, "value_cache": cache[..., :size], "layout": "flash"}
    if "bmm1_scale" in arguments:
        reading.fields["sm_scale"] = arguments["bmm1_scale"]
        reading.fields["causal"] = True
    query: Any = arguments.get("q", arguments.get("query"))
    _with_rows(reading, query)
    given = ("indices", "is_fp8_kvcache", "descale_q", "descale_k", "sparse_mla_top_k")
    reading.unmodelled += [name for name in given if arguments.get(name)]
    if arguments.get("bmm2_scale", 1.0) != 1.0:
        reading.unmodelled.append("bmm2_scale")


_OF_LATENT = (
    "kv_cache", "head_dim_v", "kv_lora_rank", "bmm1_scale", "bmm2_scale", "indices", "is_fp8_kvcache",
    "descale_q", "descale_k", "sparse_mla_top_k", "tile_scheduler_metadata", "qk_nope_head_dim",
    "qk_rope_head_dim",
)  # fmt: skip


# FlashInfer's wrappers: ``plan`` has the pages of the sequences, ``run`` the query and the cache.

WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": "flashinfer.decode",
    "BatchPrefillWithPagedKVCacheWrapper": "flashinfer.prefill",
}


def read_wrapper(given: dict[str, Any], reading: Reading) -> None:
    """Read the run of a wrapper, with the arguments of its plan among ``given``."""
    reading.unknown, reading.unmodelled = {}, []
    query, cache = given.get("q"), given.get("paged_kv_cache")
    if isinstance(cache, torch.Tensor):
        cache = cache.unbind(1)
    if not isinstance(query, torch.Tensor) or not isinstance(cache, (tuple, list)):
        reading.why_not = "no tensors q and paged_kv_cache"
        return
    pages = _pages(given, query.device)
    if pages is None:
        reading.why_not = "no page list of a plan that fits its indptr"
        return
    layout = given.get("kv_layout", getattr(given.get("self"), "_kv_layout", "NHD"))
    window = given.get("window_left", -1)
    scales = [given.get(name) for name in ("q_scale", "k_scale")]
    sm_scale = given.get("sm_scale") or query.shape[-1] ** -0.5
    is_fp8 = cache[0].dtype.itemsize == 1
    reading.fields = {
        **pages,
        "query": query,
        "key_cache": cache[0],
        "value_cache": cache[1],
        "sm_scale": sm_scale * math.prod(1.0 if scale is None else scale for scale in scales),
        "v_scale": given.get("v_scale") if is_fp8 else None,
        "sliding_window": 0 if window is None or window < 0 else window + 1,
        "softcap": given.get("logits_soft_cap"),
        "sinks": given.get("sinks"),
        "causal": True if "qo_indptr" not in given else bool(given.get("causal")),
        "layout": "HND" if layout == "HND" else "flash",
    }
    neutral = {"custom_mask": None, "packed_custom_mask": None, "pos_encoding_mode": "NONE"}
    for name, value in neutral.items():
        if given.get(name, value) is not value and given.get(name) != value:
            reading.unmodelled.append(name)
    if query.dtype.itemsize == 1:
        reading.unmodelled.append("query in FP8")  # how weights are rounded is not documented
    if not is_fp8 and given.get("v_scale") not in (None, 1, 1.0):
        reading.unmodelled.append("v_scale")

    def result(returned: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        output, lse = output_of(returned)  # FlashInfer's log-sum-exp is to base 2
        return output, None if lse is None or lse.dim() != 2 else lse * math.log(2)

    reading.result = result


def _pages(given: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor] | None:
    """Return block_table, seq_lens and query_start_loc of a plan's pages, None if they do not fit."""
    starts = given.get("paged_kv_indptr", given.get("indptr"))
    pages = given.get("paged_kv_indices", given.get("indices"))
    last = given.get("paged_kv_last_page_len", given.get("last_page_len"))
    size = given.get("page_size")
    lists = [one for one in (starts, pages, last) if isinstance(one, torch.Tensor)]
    if len(lists) < 3 or not isinstance(size, int):
        return None
    starts, pages, last = (one.cpu() for one in lists)
    starts, last = starts.long(), last.long()
    if starts.dim() != 1 or last.shape != (len(starts) - 1,) or int(starts[-1]) > len(pages):
        return None
    table, counts = table_of_lists(starts, pages)
    lens = torch.where(counts > 0, (counts - 1) * size + last, 0).int()
    found = {"block_table": table.int().to(device), "seq_lens": lens.to(device)}
    if isinstance(given.get("qo_indptr"), torch.Tensor):
        found["query_start_loc"] = given["qo_indptr"].to(device)
    return found


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
    rows = arguments.get("q_len_per_req") or 1
    if rows > 1 and isinstance(query, torch.Tensor) and "query_start_loc" not in fields:
        count = torch.arange(len(query) // rows + 1, dtype=torch.int32, device=query.device)
        fields["query_start_loc"] = count * rows
    for name in ("o_sf_scale", "skip_softmax_threshold_scale_factor"):
        if arguments.get(name) not in (None, 1):
            reading.unmodelled.append(name)
    reading.result = output_of


_OF_TRTLLM = (
    "kv_cache", "bmm1_scale", "bmm2_scale", "kv_layout", "q_len_per_req", "o_sf_scale",
    "skip_softmax_threshold_scale_factor", "batch_size",
)  # fmt: skip


def read_dense(arguments: dict[str, Any], reading: Reading) -> None:
    """View each batch element as a sequence with one block that holds all its keys.

    A mask is what is added to the scores; of one that differs between heads, each head is a sequence.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    mask = arguments.get("attn_mask")
    if query.dim() != 4:
        query, key, value = (t.flatten(0, -3)[:, None] for t in (query, key, value))
        mask = mask if mask is None or mask.dim() < 3 else mask.flatten(0, -3)[:, None]
    shape = query.shape
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        group = shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, 1).flatten(0, 1)[:, None] for t in (key, value))
        query = query.flatten(0, 1)[:, None]
        mask = mask.expand(shape[0], shape[1], -1, -1).flatten(0, 1)[:, None]
    batch, heads, rows, size = query.shape
    keys = key.shape[2]
    if mask is not None:
        if batch * rows * keys > _MOST_OF_MASK or rows > keys:
            large = f"a mask of more than {_MOST_OF_MASK >> 20} Mi elements"
            reading.why_not = "a mask with more rows than keys" if rows > keys else large
            return
        reading.unknown.pop("attn_mask", None)
        reading.unmodelled = [name for name in reading.unmodelled if name != "attn_mask"]
    causal = bool(arguments.get("is_causal"))
    if causal and rows > keys:
        reading.unmodelled.append("is_causal with more rows than keys")
    index = {"dtype": torch.int32, "device": query.device}
    reading.fields = {
        **{name: reading.fields[name] for name in _OF_SCORES if name in reading.fields},
        "query": query.transpose(1, 2).reshape(batch * rows, heads, size),
        "key_cache": key,
        "value_cache": value,
        "block_table": torch.arange(batch, **index)[:, None],
        "seq_lens": torch.full((batch,), rows if causal else keys, **index),
        "query_start_loc": torch.arange(batch + 1, **index) * rows,
        "sm_scale": arguments.get("scale"),
        "causal": causal or (rows == 1 and mask is None),
        "qq_bias": None if mask is None else _added(mask).expand(batch, 1, rows, keys)[:, 0],
    }

    def result(returned: Any) -> tuple[torch.Tensor | None, None]:
        output = output_of(returned)[0]
        if output is None:
            return None, None
        shaped = output.reshape(batch, heads, rows, -1).transpose(1, 2)
        return shaped.reshape(batch * rows, heads, -1), None

    reading.result = result


_OF_SCORES = ("softcap", "sinks", "alibi_slopes", "sliding_window")
_MOST_OF_MASK = 1 << 26  # elements that are copied


def _added(mask: torch.Tensor) -> torch.Tensor:
    """Return what a mask adds to scores: -inf where one of booleans is false."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)


def _flex(arguments: dict[str, Any], reading: Reading) -> None:
    """Evaluate mask_mod and score_mod for every row and key, and read the call as one with that mask."""
    query, blocks = arguments["query"], arguments.get("block_mask")
    score_mod, mask, where = arguments.get("score_mod"), None, query.device
    shape: tuple[int, ...] = (*query.shape[:3], arguments["key"].shape[2])
    if blocks is not None:
        some = blocks.kv_num_blocks.shape[:2]
        mask = _added(_of_indices(blocks.mask_mod, (*some, *shape[2:]), where))
    softcap = 0.0
    if score_mod is not None:
        found = {
            number: _of_indices(
                score_mod, shape, where, score=torch.full(shape, number, device=where)
            )
            for number in (0.0, *_SCORES, _FAR)
        }
        cap = float(found[_FAR].max()) if found[_FAR].numel() else 0.0
        if _is_score(found, lambda score: score + found[0.0]):
            mask = found[0.0] if mask is None else found[0.0] + mask
        elif 0 < cap < _FAR and _is_score(found, lambda score: cap * (score / cap).tanh()):
            softcap = cap
        else:
            reading.why_not = "score_mod does more than add to a score or cap it"
            return
    for name in ("score_mod", "block_mask"):
        reading.unknown.pop(name, None)
    read_dense({**arguments, "attn_mask": mask}, reading)
    reading.fields["softcap"] = softcap


_SCORES, _FAR = (1.0, -3.0), 1e9  # scores for which a score_mod is evaluated


def _is_score(
    found: Mapping[float, torch.Tensor], score_of: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Answer whether a score_mod is what ``score_of`` says, for every score but those of hidden keys."""
    hidden = found[0.0] == -torch.inf
    return all(
        torch.allclose(
            found[score].masked_fill(hidden, 0.0),
            score_of(torch.full_like(found[score], score)).masked_fill(hidden, 0.0),
            atol=1e-5,
        )
        for score in _SCORES
    )


def _of_indices(
    function: Callable[..., Any],
    shape: tuple[int, ...],
    device: torch.device,
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what a function of batch, head, row and key, and perhaps a score, is for each of them."""
    found, scored = function, () if score is None else (0,)
    for i in reversed(range(4)):  # the keys innermost
        dims = [0 if j == i else None for j in range(4)]
        found = torch.vmap(found, in_dims=(*scored, *dims))
    indices = [torch.arange(size, device=device) for size in shape]
    result: torch.Tensor = found(*(() if score is None else (score,)), *indices)
    return result


_OF_FLEX = ("enable_gqa", "return_lse", "return_aux", "kernel_options")
_FLASH = "flash_attn.flash_attn_interface"
_MLA = ("flashinfer.mla", "flashinfer.decode")
_FLASH_MLA = ("flash_mla.flash_mla_interface", "vllm.v1.attention.ops.flashmla")
_OTHERS: tuple[tuple[tuple[str, ...], str, str | None, Adjust, tuple[str, ...]], ...] = (
    ((f"vllm.vllm_{_FLASH}", _FLASH), "flash_attn_varlen_func", "flash", _flash, ()),
    (("flashinfer.decode",), "trtllm_batch_decode_with_kv_cache", None, _trtllm, _OF_TRTLLM),
    (("flashinfer.prefill",), "trtllm_batch_context_with_kv_cache", None, _trtllm, _OF_TRTLLM),
    ((_FLASH, "flash_attn_interface"), "flash_attn_with_kvcache", "flash", _flash_decode, _OF_FLASH_DECODE),
    (_FLASH_MLA, "flash_mla_with_kvcache", "flash", _latent, _OF_LATENT),
    (_MLA, "trtllm_batch_decode_with_kv_cache_mla", "flash", _latent, _OF_LATENT),
    (("torch.nn.functional",), SDPA, "HND", read_dense, ("enable_gqa",)),
    (("torch.nn.attention.flex_attention",), "flex_attention", "HND", _flex, _OF_FLEX),
)  # fmt: skip


def other_ops() -> tuple[RecordedOp, ...]:
    """Return the ops of other libraries that are recorded, and the plans of FlashInfer's wrappers."""
    functions = (
        RecordedOp(
            module=module, function=function, op=UNIFIED, layout=layout, adjust=adjust, reads=reads
        )
        for modules, function, layout, adjust, reads in _OTHERS
        for module in modules
    )
    wrappers = (
        RecordedOp(
            module=module,
            function=f"{class_}.{method}",
            op=UNIFIED,
            adjust=read_wrapper,
            is_plan=method == "plan",
        )
        for class_, module in WRAPPERS.items()
        for method in ("plan", "run")
    )
    return (*functions, *wrappers)


# vLLM's attention ops in Python (releases 0.11.2 and 0.33.0), and what their names alone do not say.

FOLDERS = ("vllm.attention.ops", "vllm.v1.attention.ops")  # of 0.11.2, and of later releases
_CUSTOM = "vllm._custom_ops"


def _wrapper(arguments: dict[str, Any], reading: Reading) -> None:
    """Read every token from the cache if there are no new ones (0.33.0); a block table of pointers is no
    table of block numbers."""
    if "key" not in reading.fields and "value" not in reading.fields:
        reading.fields["op"] = UNIFIED
    if arguments.get("is_block_table_ptr"):
        reading.unmodelled.append("is_block_table_ptr")


def _unified(arguments: dict[str, Any], reading: Reading) -> None:
    """Limit a window to the right as the op does: as far as to the left, in sequences that are not causal."""
    window, both = reading.fields.get("sliding_window"), arguments.get("window_size")
    if isinstance(both, (tuple, list)) and both[0] == both[1]:
        reading.unknown.pop("window_size", None)
    if window and reading.fields.get("causal", True) is not True:
        reading.fields["window_right"] = window - 1


def _decode(arguments: dict[str, Any], reading: Reading) -> None:
    """Give each block a dimension of its own. With ``is_mla``, values are the first part of the keys."""
    page_size = arguments.get("page_size", 1)
    for name in ("key_cache", "value_cache", "key", "value"):
        tensor = reading.fields.pop(name, None)
        if isinstance(tensor, torch.Tensor):
            paged = tensor.unflatten(0, (-1, page_size)) if tensor.dim() == 3 else tensor
            reading.fields[name.removesuffix("_cache") + "_cache"] = paged
    table = reading.fields.get("block_table")
    if isinstance(table, torch.Tensor) and table.dim() == 3 and table.shape[2] == 1:
        reading.fields["block_table"] = table[:, :, 0]  # as vLLM's own test passes it
    query = reading.fields.get("query")
    lens = reading.fields.get("seq_lens")
    if isinstance(query, torch.Tensor) and isinstance(lens, torch.Tensor):
        reading.fields["seq_lens"] = lens[: len(query)]
    if arguments.get("is_mla") and "k_scale" in reading.fields:
        reading.fields["v_scale"] = reading.fields["k_scale"]


def _paged_v1(arguments: dict[str, Any], reading: Reading) -> None:
    """One new token per sequence, read from the cache."""
    reading.fields.pop("query_start_loc", None)


def _rocm(arguments: dict[str, Any], reading: Reading) -> None:
    """Sequences with several new tokens are left to another kernel: their rows are not this op's."""
    if arguments.get("query_start_loc") is not None:
        reading.unmodelled.append("query_start_loc")


def _cpu(arguments: dict[str, Any], reading: Reading) -> None:
    """View the cache as x-split: its keys have the tokens of a block innermost (0.32.0, "vec")."""
    key, value = reading.fields.get("key_cache"), reading.fields.get("value_cache")
    if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        return
    blocks, heads, block_size, head_size = key.shape
    strides = (key.stride(0), key.stride(1), block_size, 1)
    by_token = key.as_strided((blocks, heads, head_size, block_size), strides)
    reading.fields["key_cache"] = by_token.unsqueeze(-1)
    reading.fields["value_cache"] = value.transpose(2, 3)
    if key.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        reading.unmodelled.append("key_cache, packed for AMX")


_POINTERS = ("is_block_table_ptr",)
# Of the compiled ops; the sizes of block-sparse attention matter only with blocksparse_vert_stride.
_OF_CUSTOM = (
    "tp_rank", "blocksparse_local_blocks", "blocksparse_block_size", "blocksparse_head_sliding_step",
    "block_size", "num_kv_heads",
)  # fmt: skip
_TRITON: tuple[tuple[str, Adjust, tuple[str, ...]], ...] = (
    (WRAPPER, _wrapper, _POINTERS),
    (PREFILL, _wrapper, _POINTERS),
    (UNIFIED, _unified, ()),
    (DECODE_FWD, _decode, ("page_size", "is_mla")),
)
_COMPILED: tuple[tuple[str, str, Adjust], ...] = (
    ("paged_attention_v1", WRAPPER, _paged_v1),
    ("paged_attention_v2", WRAPPER, _paged_v1),
    ("paged_attention_rocm", WRAPPER, _rocm),
    (CPU_ATTENTION, CPU_ATTENTION, _cpu),
)


def vllm_ops() -> tuple[RecordedOp, ...]:
    """Return the attention ops and the cache writes of vLLM that are recorded."""
    in_triton = (
        RecordedOp(
            module=f"{folder}.{OPS[op].module}",
            function=OPS[op].function,
            op=op,
            layout=OPS[op].cache_layout,
            adjust=adjust,
            reads=reads,
        )
        for folder in FOLDERS
        for op, adjust, reads in _TRITON
    )
    shared: dict[str, Any] = {"module": _CUSTOM, "layout": "x-split", "reads": _OF_CUSTOM}
    compiled = (
        RecordedOp(function=name, op=op, adjust=adjust, **shared) for name, op, adjust in _COMPILED
    )
    return (*in_triton, *compiled, *write_ops(FOLDERS, _CUSTOM))


GROUP = "attnlab.ops"


def recorded_ops(
    further: Iterable[RecordedOp | str] = (), *, on_error: Callable[[str, Exception], None]
) -> tuple[RecordedOp, ...]:
    """Return every op to record. ``further``: more of them, as RecordedOp or "module:function".

    An entry point that fails is passed to ``on_error`` with its name, and left out.
    """
    known = {f"{op.module}:{op.function}": op for op in library_ops()}
    given = [known.get(one) or op_of_text(one) if isinstance(one, str) else one for one in further]
    found = [*vllm_ops(), *other_ops(), *known.values(), *launches()]
    for point in entry_points(group=GROUP):
        try:
            found += _ops_of(point.load())
        except Exception as error:  # a plug-in of another package
            on_error(f"entry point {point.name} of {GROUP}", error)
    return (*found, *given)


def _ops_of(loaded: Any) -> list[RecordedOp]:
    """Return the ops of an entry point: RecordedOps, or a function whose arguments have known names."""
    if isinstance(loaded, RecordedOp):
        return [loaded]
    if inspect.isfunction(loaded):
        return [RecordedOp(module=loaded.__module__, function=loaded.__name__)]
    if isinstance(loaded, (list, tuple)):
        return [op for one in loaded for op in _ops_of(one)]
    raise InvalidCase(f"{GROUP} must name a RecordedOp or a function, got {loaded!r:.60}")


def ops_in(folder: Path, tests: Collection[str]) -> list[RecordedOp]:
    """Return the functions of imported modules below a folder whose arguments are those of attention.

    That is a query, with the keys and values as a cache with a table and lengths, or as they are. ``tests``:
    the names of test modules, whose functions count only if no other module has one: they are often a
    reference.
    """
    found: list[RecordedOp] = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or folder not in Path(file).parents or "site-packages" in file:
            continue
        for name, one in list(vars(module).items()):
            if inspect.isfunction(one) and one.__module__ == module.__name__:
                found += _guess(module.__name__, name, tuple(inspect.signature(one).parameters))
    return [op for op in found if op.module not in tests] or found


def _guess(module: str, function: str, parameters: tuple[str, ...]) -> list[RecordedOp]:
    """Return the op that a function seems to be by the names of its parameters; none if it seems none."""
    has = {field for field, names in NAMES.items() if set(names) & set(parameters)}
    is_paged = {"query", "block_table", "seq_lens"} <= has and "slot_mapping" not in has
    if is_paged and ({"key_cache", "value_cache"} <= has or {"key", "value"} <= has):
        return [RecordedOp(module=module, function=function, is_guess=True)]
    others = {"block_table", "seq_lens", "query_start_loc", "key_cache", "slot_mapping"}
    if {"query", "key", "value"} <= has and not others & has:
        dense = RecordedOp(
            module=module, function=function, op=UNIFIED, layout="HND", adjust=_dense
        )
        return [replace(dense, is_guess=True, is_dense=True)]
    return []


_LAUNCHES = {
    "triton.runtime.jit": "JITFunction",
    "triton.runtime.interpreter": "InterpretedFunction",
}


def launches() -> tuple[RecordedOp, ...]:
    """Return the methods by which Triton launches kernels; launches of attention are recorded."""
    return tuple(
        RecordedOp(module=module, function=f"{class_}.run", is_launch=True)
        for module, class_ in _LAUNCHES.items()
    )


@functools.lru_cache(maxsize=256)
def op_of_launch(kernel: Callable[..., Any]) -> tuple[RecordedOp, tuple[str, ...]] | None:
    """Return a Triton kernel as an op, and its arguments by attention's names, None if it has others.

    Q, q_ptr and q are the same. Of the others, such as strides, only a window may matter.
    """
    names = [one.name for one in inspect.signature(kernel).parameters.values()]
    plain = tuple(name.lower().removesuffix("_ptr") for name in names)
    found = _guess(kernel.__module__, kernel.__name__, plain)
    return (replace(found[0], is_launch=True), plain) if found else None


def arguments_of_launch(
    kernel: Any, plain: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BoundArguments:
    """Return the arguments of a launch by the names of attention's."""
    by_name = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    given = {
        new: by_name[old]
        for old, new in zip(kernel.arg_names, plain, strict=True)
        if old in by_name
    }
    known = {alias for aliases in NAMES.values() for alias in aliases}
    return BoundArguments({n: v for n, v in given.items() if n in known or "window" in n}, {})


def _dense(arguments: dict[str, Any], reading: Reading) -> None:
    """Read queries, keys and values [batch, heads, tokens, size] as those of torch's SDPA."""
    fields = reading.fields
    both = [fields.get(f"{name}_cache", fields.get(name)) for name in ("key", "value")]
    tensors = [fields["query"], *both]
    if any(not isinstance(one, torch.Tensor) or one.dim() not in (3, 4) for one in tensors):
        reading.why_not = "queries, keys and values are not tensors of 3 or 4 dimensions"
        return
    given, out = dict(zip(("query", "key", "value"), tensors, strict=True)), fields.get("output")
    rest = {"is_causal": fields.get("causal"), "scale": fields.get("sm_scale")}
    mask = arguments.get("attn_mask")
    read_dense({**given, **rest, "attn_mask": mask}, reading)
    reading.dims, result = tensors[0].dim(), reading.result
    if result is not None and out is not None:
        reading.result = lambda returned: result(out if returned is None else returned)
    if mask is None:
        reading.guessed = ("order",) if rest["is_causal"] is not None else ("order", "causal")


def other_readings(reading: Reading) -> Iterator[Reading]:
    """Yield the other ways to read a dense function's arguments.

    Queries, keys and values may be [batch, tokens, heads, size], and rows may see no later keys.
    """
    tokens_first = [_tokens_first(reading)] if "order" in reading.guessed else []
    for one in (reading, *tokens_first):
        if one is not reading:
            yield one
        if "causal" in reading.guessed and not one.fields["causal"]:
            fields = {**one.fields, "causal": True}
            yield replace(one, fields=fields, read_as=[*one.read_as, "causal attention"])


def _tokens_first(reading: Reading) -> Reading:
    """Return arguments that were read with heads first as [batch, tokens, heads, size]."""
    given, seqs = reading.fields, len(reading.fields["seq_lens"])

    def original(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if reading.dims == 4 else tensor[:, 0][None]

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return original(tensor.unflatten(0, (seqs, -1)).transpose(1, 2))

    query = rows(given["query"])
    both = {name: original(given[f"{name}_cache"]) for name in ("key", "value")}
    text = "queries, keys and values as [batch, tokens, heads, size]"
    other = replace(reading, read_as=[*reading.read_as, text])
    first = {name: one.transpose(1, 2) for name, one in {"query": query, **both}.items()}
    # one row of each head counts as causal, with heads first
    causal = given["causal"] and "causal" not in reading.guessed
    read_dense({**first, "is_causal": causal, "scale": given["sm_scale"]}, other)
    if "output" in given:
        other.fields["output"] = rows(given["output"]).flatten(0, 1)
    of_heads_first = other.result

    def result(returned: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        output = output_of(returned)[0]
        if output is None or of_heads_first is None:
            return None, None
        return of_heads_first(output.reshape(*query.shape[:3], -1).transpose(1, 2))

    other.result = result
    return other


def signature_of(op: RecordedOp, function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters of a function; those of torch's SDPA, which has no signature, are known."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        if op.function != SDPA:
            raise
    defaults = {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
    }  # torch 2.13
    defaults |= {"enable_gqa": False}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, kind) for name in ("query", "key", "value")]
    given += [inspect.Parameter(name, kind, default=one) for name, one in defaults.items()]
    return inspect.Signature(given)
