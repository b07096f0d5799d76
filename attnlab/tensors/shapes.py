"""Checks of tensors: each raises InvalidCall with one line that names the tensor."""

import torch

from attnlab.case.errors import InvalidCall

INDEX_DTYPES = {"int32": torch.int32, "int64": torch.int64}


def check_dims(name: str, tensor: torch.Tensor, dims: int) -> tuple[int, ...]:
    """Return the shape of ``tensor``; raise InvalidCall unless it has ``dims`` dimensions."""
    if tensor.dim() != dims:
        text = f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}"
        raise InvalidCall(text, field=name)
    return tuple(tensor.shape)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise InvalidCall unless ``tensor`` has the shape ``shape``."""
    if tuple(tensor.shape) != shape:
        raise InvalidCall(f"{name} must have shape {shape}, got {tuple(tensor.shape)}", field=name)


def check_index(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidCall unless ``tensor`` is int32 or int64."""
    if tensor.dtype not in INDEX_DTYPES.values():
        raise InvalidCall(f"{name} must be int32 or int64, got {tensor.dtype}", field=name)


def check_tensor(name: str, value: object, device: torch.device | None = None) -> None:
    """Raise InvalidCall unless ``value`` is a tensor, on ``device`` if that is given."""
    if not isinstance(value, torch.Tensor):
        raise InvalidCall(f"{name} must be a tensor, got {type(value).__name__}", field=name)
    if device is not None and value.device != device:
        raise InvalidCall(f"{name} must be on {device} like query, got {value.device}", field=name)
