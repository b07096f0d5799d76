"""The file of a KernelCall: a safetensors file with storages, and in its metadata a JSON document.

safetensors does not keep strides. So a file of format 2 holds each storage as a one-dimensional uint8 tensor,
and the document has the dtype, shape, stride and offset of every tensor in its storage. Tensors that share
memory share a storage. A file of format 1 holds contiguous tensors and a document without a format number.
docs/call-file.md describes the document; docs/call-file.schema.json is its JSON schema.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.case.output_file import replacing
from attnlab.case.shown import Document

# Tensors as bytes of a storage plus dtype, shape, stride and offset.

_ALIGNMENT = 256  # bytes; the start of a part of a storage is a multiple of it
_LARGE = 1 << 24  # bytes; of a larger storage only the part that tensors reach is stored
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Document):
    """Where a tensor is in a storage: the storage's name, and dtype, shape, stride and offset.

    ``stride`` and ``offset`` are in elements, as in torch.
    """

    storage: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of_dict(cls, entry: object) -> "Stored":
        """Return the record of a dict. Raises InvalidCall if a field is missing or has another type."""
        if not isinstance(entry, dict) or set(entry) != set(cls.__slots__):
            text = f"its entry must have {', '.join(cls.__slots__)}, got {entry!r:.80}"
            raise InvalidCall(text, field="tensors")
        whole = [*_list(entry["shape"]), *_list(entry["stride"]), entry["offset"]]
        if any(type(number) is not int or number < 0 for number in whole):
            text = f"shape, stride and offset must be whole numbers, got {whole!r:.80}"
            raise InvalidCall(text, field="tensors")
        if len(entry["shape"]) != len(entry["stride"]):
            text = f"stride must have {len(entry['shape'])} numbers, got {entry['stride']!r:.80}"
            raise InvalidCall(text, field="tensors")
        if entry["dtype"] not in _DTYPES:
            text = f"dtype must be one of {', '.join(_DTYPES)}, got {entry['dtype']!r:.60}"
            raise InvalidCall(text)
        sizes = {name: tuple(entry[name]) for name in ("shape", "stride")}
        return cls(**{**entry, **sizes})


def stored_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, Stored]]:
    """Return the storages of tensors as uint8 tensors on the CPU, and where each tensor is in them.

    Of a storage above 16 MiB, only the bytes from the first to the last that a tensor reaches are kept.
    """
    groups: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.untyped_storage().data_ptr())
        groups.setdefault(key if key[1] else (tensor.device, -1 - len(groups)), []).append(name)
    storages, stored = {}, {}
    for number, names in enumerate(groups.values()):
        start, stop = _reach([tensors[name] for name in names])
        storage = tensors[names[0]].untyped_storage()
        everything = torch.empty(0, dtype=torch.uint8, device=tensors[names[0]].device)
        label = f"storage.{number}"
        storages[label] = everything.set_(storage)[start:stop].cpu().contiguous()
        for name in names:
            tensor = tensors[name]
            stored[name] = Stored(
                storage=label,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                offset=int(tensor.storage_offset()) - start // tensor.element_size(),
            )
    return storages, stored


def tensor_of(stored: Stored, storages: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor that views a storage. Raises InvalidCall if it does not lie in it."""
    if stored.storage not in storages:
        text = f"storage must be one of {', '.join(storages)}, got {stored.storage!r:.60}"
        raise InvalidCall(text)
    held = storages[stored.storage]
    if held.dtype != torch.uint8 or held.dim() != 1 or held.storage_offset():
        text = f"{stored.storage} must be one-dimensional and of uint8, got {held.dtype}"
        raise InvalidCall(text, field="storage")
    tensor = torch.empty(0, dtype=_DTYPES[stored.dtype])
    needed = (stored.offset + extent(stored.shape, stored.stride)) * tensor.element_size()
    if needed > held.numel():
        text = f"{stored.storage} must have at least {needed} bytes, got {held.numel()}"
        raise InvalidCall(text, field="storage")
    return tensor.set_(held.untyped_storage(), stored.offset, stored.shape, stored.stride)


def moved(tensors: Mapping[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Return tensors on a device, "cpu" or "cuda"."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = {}
    for name, tensor in tensors.items():
        if tensor.device.type == device:
            found[name] = tensor
            continue
        old = tensor.untyped_storage()
        if old.data_ptr() not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(old)
            storages[old.data_ptr()] = whole.to(device).untyped_storage()
        at = (tensor.storage_offset(), tensor.shape, tensor.stride())
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        found[name] = empty.set_(storages[old.data_ptr()], *at)
    return found


def extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements lie from the first to the last element of a tensor; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _reach(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """Return the part of the common storage to keep, as byte positions."""
    size = tensors[0].untyped_storage().nbytes()
    if size <= _LARGE:
        return 0, size
    starts = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    stops = [
        start + extent(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
        for tensor, start in zip(tensors, starts, strict=True)
    ]
    return min(starts) // _ALIGNMENT * _ALIGNMENT, max(stops)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidCall(f"shape and stride must be lists, got {value!r:.60}", field="tensors")
    return value


# The blocks of a cache that a call names: copied, renumbered, with their strides within a block.
#
# Example: a table [[7, 3], [3, 9]] over a cache of 1000 blocks. The copy holds the blocks 3, 7 and 9, the
# table becomes [[1, 0], [0, 2]], and block_ids is [3, 7, 9].


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedBlocks:
    """Caches with some of their blocks.

    - ``caches``: views with the blocks as first dimension, as they were given.
    - ``block_ids``: [n] int64, the original number of each block, rising.
    """

    caches: tuple[torch.Tensor, ...]
    block_ids: torch.Tensor

    def renumbered(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return block numbers as positions in ``block_ids``; other numbers are kept.

        A number beyond the original cache is beyond the smaller one, too.
        """
        ids = self.block_ids.to(numbers.device)
        if not len(ids):
            return numbers
        position = torch.searchsorted(ids, numbers.long().contiguous()).clamp(max=len(ids) - 1)
        found = torch.where(ids[position] == numbers, position.to(numbers.dtype), numbers)
        if 0 in numbers.stride():
            return found.contiguous()
        kept: torch.Tensor = numbers.new_empty_strided(numbers.shape, numbers.stride())
        kept.copy_(found)
        return kept


def named_by(numbers: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the blocks that a table names, rising, [n] int64; numbers outside the cache are left out."""
    flat = numbers.flatten().long()
    found: torch.Tensor = flat[(flat >= 0) & (flat < num_blocks)].unique()
    return found


def copy_blocks(caches: tuple[torch.Tensor, ...], block_ids: torch.Tensor) -> NamedBlocks:
    """Return copies of some blocks of each cache; block_ids are rising and in range.

    Strides within a block are kept, and so is the stride from block to block where blocks do not
    interleave. Caches that lie in the same blocks of one storage, such as keys and values, still do.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, cache in enumerate(caches):
        step = cache.stride(0) * cache.element_size()
        start = cache.storage_offset() * cache.element_size()
        block = cache.untyped_storage().data_ptr() + start // max(1, step) * step
        groups.setdefault((block, step), []).append(index)
    copies: dict[int, torch.Tensor] = {}
    for indices in groups.values():
        members = [caches[index] for index in indices]
        copies |= dict(zip(indices, _copy_together(members, block_ids), strict=True))
    return NamedBlocks(
        caches=tuple(copies[index] for index in range(len(caches))), block_ids=block_ids
    )


def _copy_together(caches: list[torch.Tensor], block_ids: torch.Tensor) -> list[torch.Tensor]:
    """Copy the blocks of caches with equal strides from block to block into one new storage."""
    ids, step = block_ids.to(caches[0].device), caches[0].stride(0)
    if len({cache.element_size() for cache in caches}) > 1:
        return [cache[ids] for cache in caches]
    first = min(cache.storage_offset() for cache in caches)
    last = max(
        cache.storage_offset() + extent(tuple(cache.shape[1:]), cache.stride()[1:])
        for cache in caches
    )
    if last - first > step:
        return [cache[ids] for cache in caches]  # blocks interleave: a stride cannot be kept
    blocks = torch.as_strided(caches[0], (caches[0].shape[0], last - first), (step, 1), first)
    if last - first == step:
        storage = blocks[ids].flatten()
    else:
        storage = torch.zeros(len(ids) * step, dtype=caches[0].dtype, device=caches[0].device)
        storage.view(len(ids), step)[:, : last - first] = blocks[ids]
    return [
        torch.as_strided(
            storage.view(cache.dtype),
            (len(ids), *cache.shape[1:]),
            cache.stride(),
            cache.storage_offset() - first,
        )
        for cache in caches
    ]


FORMAT = 2
_KEY = "attnlab_call"  # of the metadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallFile:
    """The contents of a file: ``format``, ``scalars``, ``tensors`` and ``origin``, each by field name.

    ``names_missing``: the file states which tensors were not recorded. An older one does not, and its output
    of NaN alone may stand for none.
    """

    format: int
    scalars: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    origin: dict[str, Any]
    names_missing: bool = False


def write(
    path: Path,
    scalars: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    origin: Mapping[str, Any],
    *,
    missing: Sequence[str] = (),
) -> None:
    """Write a file of format 2; it is replaced at once. ``missing``: the tensors that were not recorded."""
    storages, stored = stored_tensors(tensors)
    document = {
        "format": FORMAT,
        "scalars": dict(scalars),
        "tensors": {name: one.to_dict() for name, one in stored.items()},
        "origin": dict(origin),
        "missing": list(missing),
    }
    try:
        with replacing(Path(path)) as part:
            save_file(storages, part, metadata={_KEY: json.dumps(document)})
    except (InvalidCase, SafetensorError) as error:
        raise InvalidCall(f"{path} must be a file to write to: {error}") from error


def read(path: Path) -> CallFile:
    """Return what a file of format 1 or 2 holds. Raises InvalidCall with one line."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {})[_KEY])
            raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InvalidCall(f"{path} must be a saved KernelCall: {_line(error)}") from error
    if not isinstance(document, dict):
        raise InvalidCall(f"{path} must be a saved KernelCall: its document is not an object")
    if "format" not in document:
        return CallFile(format=1, scalars=document, tensors=raw, origin={})
    if document["format"] != FORMAT:
        text = f"{path} must be of format 1 or {FORMAT}, got {document['format']!r:.40}"
        raise InvalidCall(f"{text}; a newer attnlab wrote it", field="format")
    return _of_document(path, document, raw)


def is_call_file(path: Path) -> bool:
    """Answer whether a file is a safetensors file with the document of a KernelCall."""
    try:
        with safe_open(path, framework="pt") as file:
            return _KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _of_document(path: Path, document: dict[str, Any], raw: dict[str, torch.Tensor]) -> CallFile:
    for name in ("scalars", "tensors", "origin"):
        if not isinstance(part := document.get(name), dict):
            raise InvalidCall(f"{path} must have an object {name}, got {part!r:.60}", field=name)
    storages = {name: tensor.clone() for name, tensor in raw.items()}  # each in memory of its own
    tensors = {}
    for name, entry in document["tensors"].items():
        try:
            tensors[name] = tensor_of(Stored.of_dict(entry), storages)
        except InvalidCall as error:
            raise InvalidCall(f"{path}: tensor {name}: {error}", field=name) from error
    return CallFile(
        format=FORMAT,
        scalars=document["scalars"],
        tensors=tensors,
        origin=document["origin"],
        names_missing="missing" in document,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
