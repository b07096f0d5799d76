"""Place tensors 64 GiB apart, so that an out-of-bounds address identifies its tensor."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from attnlab.case.errors import Unavailable


@contextmanager
def guarded_tensors(
    library: Any, arguments: Mapping[str, Any], writes: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments with each tensor copied to a region 64 GiB away from the others.

    After the block the tensors named in ``writes`` are copied back into ``arguments``, and the memory is
    released. Raises Unavailable if the address space has no room.
    """
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
                    raise Unavailable(
                        "the checked device has no address space left for its tensors"
                    )
                places.append((place, bytes_))
                placed[name] = _at(place, value, span).copy_(value)
        yield placed
        for name in writes:
            arguments[name].copy_(placed[name])
    finally:
        for place, bytes_ in places:
            library.attnlab_leave(ctypes.c_void_p(place), ctypes.c_size_t(bytes_))


def _at(place: int, like: torch.Tensor, span: int) -> torch.Tensor:
    """Return a tensor at an address with the dtype, shape and strides of ``like``."""
    memory = (ctypes.c_uint8 * (span * like.element_size())).from_address(place)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())
