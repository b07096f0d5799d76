"""Cache writes of vLLM that are recorded: reading, copying, and their KernelCall.

The recorded cache is that before the write; the output is the cache after it, slot by slot. Of a large cache
only the blocks that slot_mapping names are copied. A write has no sequences: its slot_mapping says where each
token goes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import OPS, WRITE
from attnlab.case.platforms import PLATFORMS
from attnlab.kernels.model.cache_write import written_cache
from attnlab.recorder.argument_names import Reading, check_complete
from attnlab.recorder.reading import number_of, plain_kv_cache_dtype
from attnlab.recorder.recorded_op import RecordedOp
from attnlab.recorder.snapshot import copied, is_large
from attnlab.tensors.cache import to_flash
from attnlab.tensors.cache_layout import LAYOUTS, to_x_split
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import read_format
from attnlab.tensors.named_blocks import copy_blocks, named_by
from attnlab.tensors.origin import Origin
from attnlab.tensors.quantised import FP8_DTYPES

_CACHES = ("key_cache", "value_cache")
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
    rest = {
        name: copied(value) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
        if name not in _CACHES
    }
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
    _check_slots(slots, before[1].shape[0] * before[1].shape[3])
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
        raise InvalidCall(text, field=name)
    return scale.expand(blocks, size, heads)


def _check_slots(slots: torch.Tensor, count: int) -> None:
    """Raise InvalidCall for a slot that the cache does not have."""
    beyond = torch.nonzero(slots >= count).flatten()
    if len(beyond):
        at = int(beyond[0])
        text = f"slot_mapping[{at}] must be at most {count - 1}, got {int(slots[at])}"
        raise InvalidCall(text, field="slot_mapping")
