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
    best: list[Greatest], wrong: torch.Tensor, right: torch.Tensor, row: int
) -> list[Greatest]:
    """Return the greater of ``best`` and of ``wrong``, absolute and relative to ``right``.

    ``wrong``, ``right``: [rows, heads, head_size]. The greatest of each head is found first: a search of
    all elements at once is slow on a GPU.
    """
    relative = wrong / right
    found = []
    for values in (wrong, relative):
        head = torch.linalg.vector_norm(values, float("inf"), 2).flatten().argmax()
        elements = values.flatten(0, 1)[head].abs()
        found += [head, elements.argmax(), elements.max()]
    numbers = torch.stack([number.double() for number in found]).tolist()  # one copy from the GPU
    kept = []
    for before, (head, element, value) in zip(best, (numbers[:3], numbers[3:]), strict=True):
        is_greater = value > before.value or (value != value and before.value == before.value)
        index = index_of(int(head) * wrong.shape[2] + int(element), wrong.shape, row)
        kept.append(Greatest(value=value, index=index) if is_greater else before)
    return kept


def index_of(flat: int, shape: torch.Size, row: int) -> tuple[int, int, int]:
    """Return (row, head, element) of a flat index into rows that begin at ``row``."""
    _, heads, head_size = shape
    return row + flat // (heads * head_size), flat // head_size % heads, flat % head_size
