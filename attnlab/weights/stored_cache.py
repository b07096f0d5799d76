"""StoredCache: what a cache with a scale per token and head holds in an X-ray, and wrong reads of it.

The values of an X-ray are 1 in one element. They are stored with drawn scales that are powers of two, so they
are exact, and the scale of another slot or head shows as a factor of a weight.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlab.case.case import Case
from attnlab.lab.argument_reads import StoredHalf, wrong_reads
from attnlab.tensors.call import KernelCall
from attnlab.tensors.op_argument_data import decoded_numbers, stored_numbers

_LEAST = -2  # exponent of the smallest scale: INT4 stores 1 as 4 times it


def value_scales(call: KernelCall) -> torch.Tensor:
    """Return the scale of each value, [num_blocks, block_size, num_kv_heads] float32."""
    blocks, kv_heads, _, block_size = call.value_cache.shape
    generator = torch.Generator().manual_seed(29)
    powers = torch.randint(_LEAST, 1, (blocks, block_size, kv_heads), generator=generator)
    return 2.0 ** powers.float()


def key_tokens(call: KernelCall) -> torch.Tensor:
    """Return the keys of the cache in its dtype, [slots, num_kv_heads, head_size]."""
    return call.key_cache.cpu().permute(0, 3, 1, 2, 4).flatten(3, 4).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCache:
    """Keys and values of all slots, as they are stored.

    - ``key``, ``value``: [N, num_kv_heads, …]. A value is 1 in ``element`` [N] and 0 elsewhere.
    - ``sequences``: the slots of each sequence in order, to the end of its last block.
    """

    case: Case
    key: StoredHalf
    value: StoredHalf
    element: torch.Tensor
    sequences: tuple[torch.Tensor, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the wrong reads of the cache."""
        return tuple(wrong_reads(self.case))


def store(case: Case, call: KernelCall, lanes: torch.Tensor) -> StoredCache:
    """Return what the cache of a Case holds. ``lanes``: [N], the lane of each slot."""
    element = lanes % call.query.shape[2]
    tokens, scales = key_tokens(call), value_scales(call).flatten(0, 1)
    one_hot = torch.zeros(tokens.shape)
    one_hot[torch.arange(len(element)), :, element] = 1.0
    numbers, scale = stored_numbers(case, tokens)
    values, scales = stored_numbers(case, one_hot, scales)
    table, size = call.block_table.long().cpu(), call.block_size
    sequences = []
    for row, seq_len in zip(table, call.seq_lens.tolist(), strict=True):
        at = torch.arange(-(-seq_len // size) * size)
        sequences.append(row[at // size] * size + at % size)
    return StoredCache(
        case=case,
        key=StoredHalf(numbers=numbers, scale=scale),
        value=StoredHalf(numbers=values, scale=scales),
        element=element,
        sequences=tuple(sequences),
    )


@lru_cache(maxsize=64)
def misread(stored: StoredCache, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys [N, num_kv_heads, head_size], and by what each value is multiplied [N, num_kv_heads],
    under a wrong read with a name; float64."""
    case, read = stored.case, wrong_reads(stored.case)[name]
    key = _decoded(case, stored.key)
    gain = torch.ones(key.shape[:2], dtype=torch.float64)
    for slots in stored.sequences:
        halves = read(case, _take(stored.key, slots), _take(stored.value, slots))
        key[slots], values = (_decoded(case, half) for half in halves)
        element = stored.element[slots, None, None].expand(-1, key.shape[1], 1)
        gain[slots] = values.gather(2, element)[..., 0]
    return key, gain


def _take(half: StoredHalf, slots: torch.Tensor) -> StoredHalf:
    scale = None if half.scale is None else half.scale[slots]
    return StoredHalf(numbers=half.numbers[slots], scale=scale)


def _decoded(case: Case, half: StoredHalf) -> torch.Tensor:
    assert half.scale is not None
    return decoded_numbers(case, half.numbers, half.scale)
