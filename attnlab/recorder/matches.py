"""Which elements of a call's output a tensor of a test has.

A test may compare the output itself, or what it made of it: another dtype or device, another shape or order
of dimensions, some rows, heads or elements. The tensor is recognised by its values.
"""

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

from attnlab.recorder.written_side import half_of
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import has_scaled_output, output_numbers

_NAN = 1e9  # stands for NaN where values are compared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """The elements of an output that a tensor has.

    - ``index``: [elements of the tensor] int64, the place of each in the flat output.
    - ``factor``: what the tensor must be multiplied by to be the numbers of the output.
    - ``is_whole``: it has every element.
    """

    index: torch.Tensor
    factor: float = 1.0
    is_whole: bool = True

    def spread(self, tensor: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Return ``rest``, of the output's shape, in float64 with the elements of a tensor of the test."""
        found = rest.double().clone(memory_format=torch.contiguous_format)
        found.view(-1)[self.index] = tensor.cpu().double().flatten() * self.factor
        return found

    def is_plain(self, call: KernelCall, tensor: torch.Tensor) -> bool:
        """Answer whether the test's tensor is at least as precise as the output."""
        kinds = (tensor.dtype, call.buffer.dtype)
        precise, own = (torch.finfo(kind).eps for kind in kinds)
        return bool(precise <= own)

    def cells(self, shape: torch.Size) -> torch.Tensor:
        """Return how many elements of each row and head the tensor has, [num_tokens, num_heads] int64."""
        places = torch.bincount(self.index // shape[2], minlength=shape[0] * shape[1])
        return places.view(shape[0], shape[1])


def output_matches(call: KernelCall, tensor: torch.Tensor) -> bool:
    """Answer whether a tensor has the numbers of the whole output, in any shape and dtype; NaN equals NaN."""
    if call.output is None:
        return False
    if call.spec.writes_cache:
        return half_of(call, tensor) is not None
    found = match_of(call, tensor)
    return found is not None and found.is_whole


def factor_of(call: KernelCall, tensor: torch.Tensor) -> float | None:
    """Return what a tensor is multiplied by to be the numbers of a call's output; None if it is another."""
    found = match_of(call, tensor)
    return None if found is None else found.factor


def match_of(call: KernelCall, tensor: torch.Tensor) -> Match | None:
    """Return which elements of a call's output a tensor has; None if it is another.

    A scaled output may have been multiplied by its scale already.
    """
    if call.output is None or not tensor.numel() or not tensor.is_floating_point():
        return None
    output, tensor = call.output.cpu(), tensor.cpu()
    if tensor.numel() > output.numel():
        return None
    whole = _whole(call, output, tensor) if tensor.numel() == output.numel() else None
    if whole is not None or has_scaled_output(call):
        return whole
    return _part(_comparable(output, tensor.dtype), _comparable(tensor, tensor.dtype))


def _whole(call: KernelCall, output: torch.Tensor, tensor: torch.Tensor) -> Match | None:
    """Return the match of a tensor with as many elements as the output, its dimensions in any order."""
    scale = 1.0 if call.output_scale is None else call.output_scale
    pairs = [(scale, output.double()), (1.0, output_numbers(call, output))]
    given = _comparable(tensor, tensor.dtype).flatten()
    for factor, numbers in pairs if has_scaled_output(call) else pairs[1:]:
        values = _comparable(numbers, tensor.dtype)
        for order in itertools.permutations(range(3)):
            if torch.equal(values.permute(order).flatten(), given):
                places = torch.arange(output.numel()).view(output.shape)
                return Match(index=places.permute(order).flatten(), factor=factor)
    return None


def _part(output: torch.Tensor, tensor: torch.Tensor) -> Match | None:
    """Return the match of a tensor with some rows, heads or elements of an output.

    Rows of equal numbers alone are no match: padding and other outputs have them, too.
    """
    size, width = output.shape[2], tensor.shape[-1] if tensor.dim() else 1
    width = size if width % size == 0 else width
    vectors = tensor.reshape(-1, width)
    if width > size or bool((vectors == vectors[:, :1]).all()):
        return None
    for first in dict.fromkeys((0, size - width, *range(0, size - width + 1, width))):
        index = _cells_of(output[..., first : first + width].reshape(-1, width), vectors)
        if index is not None:
            columns = torch.arange(first, first + width)
            places = (index[:, None] * size + columns).flatten()
            return Match(index=places, is_whole=len(places.unique()) == output.numel())
    return None


def _cells_of(cells: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor | None:
    """Return the cell of each vector, [n] int64; equal cells are taken in turn. None if one has no cell."""
    places: dict[bytes, deque[int]] = defaultdict(deque)
    wanted = [one.numpy().tobytes() for one in vectors.contiguous()]
    known = set(wanted)
    for at, one in enumerate(cells.contiguous()):
        if (data := one.numpy().tobytes()) in known:
            places[data].append(at)
    found = []
    for data in wanted:
        if not places[data]:
            return None
        found.append(places[data][0])
        places[data].rotate(-1)
    return torch.tensor(found)


def _comparable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a tensor as a test has them in ``dtype``, in float64; no NaN, one zero."""
    return tensor.to(dtype).double().nan_to_num(_NAN, torch.inf, -torch.inf) + 0.0
