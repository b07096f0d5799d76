"""A test's comparison of a written cache: which half it is, and where its expected value is wrong."""

from dataclasses import dataclass

import torch

from attnlab.contracts.target import Target
from attnlab.lab.expected_write import ExpectedWrite, expected_write
from attnlab.recorder.comparisons import Comparison
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import FP8_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Half:
    """The keys or the values of a written cache, as a test's tensor has them.

    - ``columns``: of the call's output. ``factor``: what the stored numbers were multiplied by in the tensor.
    - ``index``: [elements of the tensor] int64, the place of each in [num_slots, num_kv_heads, width].
    """

    columns: slice
    factor: float
    index: torch.Tensor

    def by_slot(self, tensor: torch.Tensor, call: KernelCall) -> torch.Tensor:
        """Return a tensor of the test as [num_slots, num_kv_heads, width] float64."""
        shape = call.buffer[..., self.columns].shape
        found = torch.empty(shape, dtype=torch.float64)
        found.view(-1)[self.index] = tensor.cpu().double().flatten()
        return found


def half_of(call: KernelCall, tensor: torch.Tensor) -> Half | None:
    """Return which half of the written cache a tensor is, None if it is neither.

    The tensor may hold the stored elements, their bytes, or their numbers with or without the scale.
    """
    size = call.query.shape[2]
    for name, columns in (("k_scale", slice(0, size)), ("v_scale", slice(size, None))):
        stored = call.buffer.cpu()[..., columns]
        if tensor.numel() != stored.numel():
            continue
        index = _in_layout(call, torch.arange(stored.numel()).view(stored.shape), name == "k_scale")
        scale = getattr(call, name)
        factors = {1.0, scale} if isinstance(scale, float) else {1.0}
        for factor in factors:
            half = Half(columns=columns, factor=factor, index=index)
            given = tensor.view(stored.dtype) if _holds_bytes(tensor, stored) else tensor
            numbers = (stored.double() * factor).to(_plain(given.dtype)).double()
            if torch.equal(half.by_slot(given, call).nan_to_num(1e9), numbers.nan_to_num(1e9)):
                return half
    return None


def _holds_bytes(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and stored.dtype in FP8_DTYPES


def _plain(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in FP8_DTYPES else dtype


def _in_layout(call: KernelCall, index: torch.Tensor, is_key: bool) -> torch.Tensor:
    """Return [num_slots, num_kv_heads, width] in the order of the caller's cache, flat."""
    paged = index.unflatten(0, (-1, call.block_size))
    if call.layout == "x-split":
        by_head = paged.permute(0, 2, 3, 1)
        x = call.key_cache.shape[4]
        paged = by_head.unflatten(2, (-1, x)).transpose(3, 4) if is_key else by_head
    elif call.layout == "HND":
        paged = paged.transpose(1, 2)
    flat: torch.Tensor = paged.flatten()
    return flat


def errors_of_write(
    call: KernelCall, target: Target, comparison: Comparison
) -> tuple[float, int, bool]:
    """Return the expected value's largest error, its wrong slots, and whether the tolerance is exceeded."""
    half = half_of(call, comparison.actual)
    if half is None:
        return 0.0, 0, False
    call = call.cpu()
    right: ExpectedWrite = expected_write(call, target)
    given = comparison.expected
    if _holds_bytes(given, call.buffer):
        given = given.view(call.buffer.dtype)
    expected = half.by_slot(given, call)
    correct = right.numbers[..., half.columns] * half.factor
    bound = right.bound[..., half.columns] * half.factor
    same = (expected == correct) | (expected.isnan() & correct.isnan())
    error = (expected - correct).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0.0)
    wrong = error > bound
    allowed = comparison.atol + comparison.rtol * expected.abs().nan_to_num(0.0)
    return (
        float(error.max()),
        int(wrong.flatten(1).any(1).sum()),
        bool((wrong & (error > allowed)).any()),
    )
