"""Greatest: the largest error of a comparison and where it is."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Greatest:
    """A largest value and the first index (row, head, element) that has it."""

    value: float
    index: tuple[int, int, int]


NONE = Greatest(value=-1.0, index=(0, 0, 0))


def greater(
    best: list[Greatest],
    wrong: torch.Tensor,
    right: torch.Tensor,
    row: int,
    largest: torch.Tensor | None = None,
) -> list[Greatest]:
    """Return the greater of ``best`` and of ``wrong``, absolute and relative to ``right``.

    ``wrong``, ``right``: [rows, heads, head_size]. The greatest of each head is found first: a search of
    all elements at once is slow on a GPU. On a CPU ``vector_norm`` takes 20 times as long as ``amax`` and
    ``amin``. ``largest``: that of ``wrong``, [rows, heads], if it is known.
    """
    relative = wrong / right
    found = []
    for values, known in ((wrong, largest), (relative, None)):
        per_head = _largest(values) if known is None else known
        head = per_head.flatten().argmax()
        elements = values.flatten(0, 1)[head].abs()
        found += [head, elements.argmax(), elements.max()]
    numbers = torch.stack([number.double() for number in found]).tolist()  # one copy from the GPU
    kept = []
    for before, (head, element, value) in zip(best, (numbers[:3], numbers[3:]), strict=True):
        is_greater = value > before.value or (value != value and before.value == before.value)
        index = index_of(int(head) * wrong.shape[2] + int(element), wrong.shape, row)
        kept.append(Greatest(value=value, index=index) if is_greater else before)
    return kept


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each head; NaN if one is NaN. ``aminmax`` is slow on a CPU."""
    if values.device.type == "cpu":
        return torch.maximum(values.amax(2), -values.amin(2))
    low, high = values.aminmax(dim=2)
    return torch.maximum(high, -low)


def index_of(flat: int, shape: torch.Size, row: int) -> tuple[int, int, int]:
    """Return (row, head, element) of a flat index into rows that begin at ``row``."""
    _, heads, head_size = shape
    return row + flat // (heads * head_size), flat // head_size % heads, flat % head_size
