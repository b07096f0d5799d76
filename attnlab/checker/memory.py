"""How much memory the check of a case takes, estimated before anything is allocated."""

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.kernels.backend import Backend
from attnlab.lab.memory_check import needed_bytes

# The check runs a case with up to three contents of the empty slots, and a Lab keeps three caches.
_CONTENTS = 3
# Of the cache during a run: the lab's layout, the op's layout, a strided copy and a comparison's.
_COPIES = 4
_FIXED_BYTES = 64 << 20  # what torch and the allocator of a device keep for small tensors
_MOST_SCORES = {"cpu": 3 << 17, "cuda": 1 << 28}  # of a tile of the reference


def estimated_bytes(case: Case, backend: Backend) -> int:
    """Return about how many bytes the check of a Case allocates on the backend's device.

    On a CPU, blocks before ``first_block`` are addresses without memory. On a GPU they take memory, in two
    layouts of the cache.
    """
    total = _FIXED_BYTES + _CONTENTS * needed_bytes(case, _COPIES) + _score_bytes(case, backend)
    if backend.device == "cuda" and case.first_block:
        total += 2 * far_bytes(case)
    return total


def far_bytes(case: Case) -> int:
    """Return the size of the blocks before ``first_block`` in key and value, which share them."""
    block = case.block_size * case.num_kv_heads * case.head_size
    return case.first_block * block * (1 if case.is_fp8 else DTYPE_BYTES[case.dtype])


def _score_bytes(case: Case, backend: Backend) -> int:
    """Return the size of the reference's scores and weights, and of a sequence's keys and values."""
    longest = max(case.lengths.seq_lens)
    rows = max(case.lengths.query_lens)
    scores = min(case.num_heads * rows * longest, _MOST_SCORES[backend.device])
    return 8 * (3 * scores + 2 * case.num_heads * longest * case.head_size)
