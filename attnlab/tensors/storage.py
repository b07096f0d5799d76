"""Tensors as bytes of a storage plus dtype, shape, stride and offset."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnlab.case.errors import InvalidCall

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
class Stored:
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
            raise InvalidCall(text, field="dtype")
        sizes = {name: tuple(entry[name]) for name in ("shape", "stride")}
        return cls(**{**entry, **sizes})

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-able values."""
        return {**asdict(self), "shape": list(self.shape), "stride": list(self.stride)}


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
        raise InvalidCall(text, field="storage")
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
    """Return tensors on a device, "cpu" or "cuda".

    Storages are moved as a whole: strides are kept, and tensors that share memory still do.
    """
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
