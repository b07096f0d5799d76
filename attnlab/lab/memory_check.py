"""Check that a Case's tensors fit into the memory of this machine."""

import os
from pathlib import Path

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import Unavailable


def check_memory(case: Case, cache_copies: int = 1) -> None:
    """Raise Unavailable if the Case's tensors need more memory than this machine has.

    ``cache_copies`` is how many times the cache is in memory. Blocks before ``first_block`` take none.
    """
    needed, total = needed_bytes(case, cache_copies), total_bytes()
    if needed > total:
        raise Unavailable(
            f"the case needs about {needed / 2**30:.0f} GiB of memory and this machine has "
            f"{total / 2**30:.0f}: use fewer or shorter sequences, fewer heads or blocks"
        )


def needed_bytes(case: Case, cache_copies: int = 1) -> int:
    """Return about how many bytes the batch, the cache, the outputs, the reference and its bound take."""
    element_bytes = DTYPE_BYTES[case.dtype]
    row = case.num_kv_heads * case.head_size
    slots = (case.total_blocks - case.first_block) * case.block_size
    cache = 2 * slots * row * (1 if case.is_fp8 else element_bytes)
    batch = 2 * sum(case.lengths.seq_lens) * row * element_bytes
    reference_bytes = DTYPE_BYTES.get(case.reference_dtype, 8)
    outputs = case.lengths.num_tokens * case.num_heads * case.head_size
    return cache_copies * cache + batch + outputs * (2 * element_bytes + reference_bytes + 4)


def total_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the memory that programs can get now, by Linux's estimate; elsewhere half of all."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total_bytes() // 2
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 if found else total_bytes() // 2
