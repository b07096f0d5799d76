"""Scratch memory that the caller of an op allocates: for the results of splits and segments."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from attnlab.tensors.call import KernelCall

_NUMBER: ContextVar[float] = ContextVar("scratch", default=float("nan"))


@contextmanager
def scratch_full_of(number: float) -> Iterator[None]:
    """Let scratch memory be full of ``number`` inside the block, in place of NaN.

    An output that changes depends on scratch memory that no kernel has written.
    """
    token = _NUMBER.set(number)
    try:
        yield
    finally:
        _NUMBER.reset(token)


def scratch(call: KernelCall, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 scratch memory full of NaN, so that a read before a write shows in the output."""
    return torch.full(shape, _NUMBER.get(), device=call.query.device)
