"""Facts about the arguments of an op's call: values, dtypes, strides, and how far offsets reach.

A fact is a short text, so that the facts of many cases can be joined:

- of a number, a text or None: "value X";
- of a tensor: "dtype D"; for each dimension with more than one index "dim I", "stride I" if its stride is not
  that of a contiguous tensor of this shape, and "far I" if its largest index times its stride exceeds 2^31.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_LONGEST = 40


def parameters_of(function: Callable[..., None]) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def argument_facts(
    function: Callable[..., None], arguments: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the facts of each parameter of an op; one that is not passed has its default."""
    bound = inspect.signature(function).bind(**arguments)
    bound.apply_defaults()
    return {name: [*_facts(value)] for name, value in bound.arguments.items()}


def _facts(value: Any) -> Iterator[str]:
    if not isinstance(value, torch.Tensor):
        yield f"value {value!r}"[:_LONGEST]
        return
    yield f"dtype {str(value.dtype).removeprefix('torch.')}"
    contiguous = 1
    for dim in reversed(range(value.dim())):
        size, stride = value.shape[dim], value.stride(dim)
        if size > 1:
            yield f"dim {dim}"
            yield from [f"stride {dim}"] * (stride != contiguous)
            yield from [f"far {dim}"] * ((size - 1) * stride > 2**31)
        contiguous *= size
