"""Tensors far apart in memory, so that an access outside one is nearest to the one it was meant for."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from attnlab.case.errors import Unavailable


@contextmanager
def apart(
    library: Any, arguments: Mapping[str, Any], writes: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments with every tensor copied to a place of its own, 64 GiB from the next; after
    the block, copy those that the op ``writes`` back and give the memory up."""
    placed, places = dict(arguments), []
    try:
        for number, (name, value) in enumerate(arguments.items()):
            if isinstance(value, torch.Tensor):
                span = 1 + sum(
                    (n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)
                )
                bytes_ = max(1, span * value.element_size())
                place = library.attnlab_place(number, bytes_)
                if not place:
                    raise Unavailable("the checked device finds no room for its tensors")
                places.append((place, bytes_))
                placed[name] = _at(place, value, span).copy_(value)
        yield placed
        for name in writes:
            arguments[name].copy_(placed[name])
    finally:
        for place, bytes_ in places:
            library.attnlab_leave(ctypes.c_void_p(place), ctypes.c_size_t(bytes_))


def _at(place: int, like: torch.Tensor, span: int) -> torch.Tensor:
    """Return a tensor at an address, of another's dtype, shape and strides."""
    memory = (ctypes.c_uint8 * (span * like.element_size())).from_address(place)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())
