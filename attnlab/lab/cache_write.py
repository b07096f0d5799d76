"""The comparison of a cache write: the cache as it must be, slot by slot.

The rows of the comparison are slots: those of sequence 0, position by position, then of sequence 1, …, and
last, as one more sequence, the slots of no sequence. A token that is written to the wrong slot appears
twice: where it is missing, and where it must not be.
"""

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths
from attnlab.kernels.model.cache_write import written_cache
from attnlab.tensors.cache import PagedCache


def slot_lengths(case: Case) -> Lengths:
    """Return the comparison's rows as lengths: each sequence's positions, then the slots of no sequence."""
    owned = case.lengths.seq_lens
    spare = case.total_blocks * case.block_size - sum(owned)
    query_lens = (*owned, spare) if spare else owned
    return Lengths(query_lens=query_lens, ctx_lens=(0,) * len(query_lens))


def owners_of(case: Case) -> int | None:
    """Return how many sequences own the rows of a cache write's comparison; None for another op."""
    return len(case.lengths.query_lens) if case.spec.writes_cache else None


def slot_order(case: Case, block_table: torch.Tensor) -> torch.Tensor:
    """Return the slot of each row of the comparison, [num_slots] int64."""
    slots = []
    for row, seq_len in zip(block_table, case.lengths.seq_lens, strict=True):
        pos = torch.arange(seq_len)
        slots.append(row[pos // case.block_size] * case.block_size + pos % case.block_size)
    owned = torch.cat(slots)
    spare = torch.ones(case.total_blocks * case.block_size, dtype=torch.bool)
    spare[owned] = False
    return torch.cat([owned, torch.nonzero(spare).flatten()])


def expected_cache(written: PagedCache) -> torch.Tensor:
    """Return a cache with every token as the output of the write.

    [num_slots, num_kv_heads, 2 × head_size] in the dtype of the stored elements.
    """
    return written_cache(*(cache.view(written.format.dtype) for cache in written.to_flash()))


def as_numbers(output: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in float32, as read in the output's dtype.

    Elements with equal bytes, NaN included, are 0 in both.
    """
    expected = expected.view(output.dtype)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[output.element_size()]
    same = output.view(integer) == expected.view(integer)
    return output.float().masked_fill_(same, 0.0), expected.float().masked_fill_(same, 0.0)
