"""A device that this machine does not have: its tensors are on the CPU and refuse to meet others.

An operation with tensors of both devices raises, as on a GPU, unless it copies, indexes with a tensor of the
CPU, or one of them is a scalar. The bytes that leave the device are counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from attnlab.case.errors import Unavailable
from attnlab.kernels.triton.interpreter import load_triton

DEVICE = torch.device("meta")  # a name that torch has on every machine
_MIXED = ("_to_copy", "copy_", "index.Tensor", "index_put", "_index_put_impl")


class OtherTensor(torch.Tensor):
    """A tensor of the device; ``inner`` has its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OtherTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"OtherTensor{tuple(self.shape)}"


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.left_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = _run(function, args, kwargs or {})
        leaves = function.__name__.startswith("_to_copy") and not isinstance(found, OtherTensor)
        if leaves and isinstance(args[0], OtherTensor):
            self.left_bytes += found.numel() * found.element_size()
        return found


@contextmanager
def other_device() -> Iterator[_Mode]:
    """Provide the device inside the block; yields an object that counts ``left_bytes``.

    torch's dispatch modes import Triton, which other tests need as an interpreter.
    """
    with suppress(Unavailable):
        load_triton(interpret=True)
    with _Mode() as mode:
        yield mode


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function.__name__
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    is_other = [isinstance(one, OtherTensor) for one in tensors]
    if not name.startswith(_MIXED):
        if any(is_other) and any(
            one.dim() and not other for one, other in zip(tensors, is_other, strict=True)
        ):
            raise RuntimeError(f"{name}: tensors on two devices")
    elif "index" in name and not is_other[0] and any(is_other[1:]):
        raise RuntimeError(f"{name}: a tensor of the CPU is indexed by one of the device")
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if name.endswith("_.default") or name.startswith("copy_"):
        return args[0]
    goes_there = any(is_other) if device is None else torch.device(device) == DEVICE
    return tree_map(_outer, found) if goes_there else found


def _inner(one: Any) -> Any:
    return one.inner if isinstance(one, OtherTensor) else one


def _outer(one: Any) -> Any:
    return OtherTensor(one) if isinstance(one, torch.Tensor) else one
