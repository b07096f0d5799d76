"""What a cache write is held to: the cache as it must be, slot by slot.

The rows of the comparison are not tokens of a query but slots: those of sequence 0, position by position,
then of sequence 1, …, and last, as one more sequence, the slots that belong to nobody. So a token that is
written to the wrong slot shows twice, where it is missing and where it should not be.
"""

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths
from attnlab.kernels.model.cache_write import written_cache
from attnlab.tensors.cache import PagedCache


def slot_lengths(case: Case) -> Lengths:
    """Return the rows of the comparison as lengths: each sequence's positions, then nobody's slots."""
    owned = case.lengths.seq_lens
    spare = case.total_blocks * case.block_size - sum(owned)
    query_lens = (*owned, spare) if spare else owned
    return Lengths(query_lens=query_lens, ctx_lens=(0,) * len(query_lens))


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
    """Return a cache that holds every token as the output of the write, [num_slots, num_kv_heads,
    2 × head_size] in the elements' dtype."""
    return written_cache(*(cache.view(written.format.dtype) for cache in written.to_flash()))


def as_numbers(output: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as float32, the bytes of both read in the output's dtype; elements whose bytes are the
    same are 0 in both, NaN among them."""
    expected = expected.view(output.dtype)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[output.element_size()]
    same = output.view(integer) == expected.view(integer)
    return output.float().masked_fill_(same, 0.0), expected.float().masked_fill_(same, 0.0)
