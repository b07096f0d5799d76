"""AddressMemory: the tensors of a call as flat memory, with the terms of their addresses.

An address is a sum of terms, each a feature times a stride: the address of an element of the value cache is
block × stride 0 + KV head × stride 1 + d × stride 2 + offset × stride 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlab.case.ops import PREFILL, WRAPPER
from attnlab.defects.problem import Problem
from attnlab.tensors.cache import to_flash
from attnlab.tensors.call import KernelCall
from attnlab.tensors.layout import flash, strided

Term = tuple[str, str]  # feature, stride
Features = Mapping[str, torch.Tensor]

ROW_TERMS = (("row", "stride 0"), ("head", "stride 1"), ("d", "stride 2"))
LSE_TERMS = (("head", "stride 0"), ("row", "stride 1"))
TOKEN_TERMS = (("token", "stride 0"), ("KV head", "stride 1"), ("d", "stride 2"))
TABLE_TERMS = (("sequence", "stride 0"), ("p // block_size", "stride 1"))
_SPLIT_KEY_TERMS = (
    ("block", "stride 0"),
    ("KV head", "stride 1"),
    ("d // x", "stride 2"),
    ("p % block_size", "stride 3"),
    ("d % x", "stride 4"),
)
_SPLIT_VALUE_TERMS = (
    ("block", "stride 0"),
    ("KV head", "stride 1"),
    ("d", "stride 2"),
    ("p % block_size", "stride 3"),
)
_FLASH_TERMS = (
    ("block", "stride 0"),
    ("p % block_size", "stride 1"),
    ("KV head", "stride 2"),
    ("d", "stride 3"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMemory:
    """One tensor as the op gets it.

    - ``flat``: [n], the memory; ``base``: where the tensor begins in it.
    - ``terms``: of the address of an element. ``strides``: in elements, by name.
    """

    flat: torch.Tensor
    base: int
    terms: tuple[Term, ...]
    strides: Mapping[str, int]

    @classmethod
    def of(cls, tensor: torch.Tensor, terms: tuple[Term, ...]) -> "TensorMemory":
        """Return the memory of a tensor on the CPU."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(
            flat=tensor.as_strided((size,), (1,), 0),
            base=int(tensor.storage_offset()),
            terms=terms,
            strides={f"stride {i}": stride for i, stride in enumerate(tensor.stride())},
        )

    def read(self, address: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is stored at addresses relative to the base, and which of them are inside."""
        at = address + self.base
        inside = (at >= 0) & (at < len(self.flat))
        return self.flat[at.clamp(0, len(self.flat) - 1)], inside


@lru_cache(maxsize=4)
def memory_of(call: KernelCall) -> dict[str, TensorMemory]:
    """Return the tensors of a call by name, with the strides with which the lab gives them to the op."""
    ran = strided(call)
    found = {
        "query": TensorMemory.of(ran.query, ROW_TERMS),
        "block_table": TensorMemory.of(ran.block_table, TABLE_TERMS),
    }
    if call.spec.cache_layout == "x-split":
        found["key_cache"] = TensorMemory.of(ran.key_cache, _SPLIT_KEY_TERMS)
        if not call.interleave_v:
            found["value_cache"] = TensorMemory.of(ran.value_cache, _SPLIT_VALUE_TERMS)
    elif call.spec.cache_layout == "flash":
        key, value = flash(*to_flash(call.key_cache, call.value_cache), call.strides)
        found["key_cache"] = TensorMemory.of(key, _FLASH_TERMS)
        found["value_cache"] = TensorMemory.of(value, _FLASH_TERMS)
    if call.op in (PREFILL, WRAPPER):
        found["key"] = TensorMemory.of(ran.key, TOKEN_TERMS)
        found["value"] = TensorMemory.of(ran.value, TOKEN_TERMS)
    return found


def sizes_of(call: KernelCall) -> dict[str, int]:
    """Return the sizes by which an address may be multiplied by mistake."""
    return {
        "1": 1,
        "head_size": call.query.shape[2],
        "num_heads": call.query.shape[1],
        "num_kv_heads": call.key.shape[1],
        "block_size": call.block_size,
        "x": call.key_cache.shape[4],
    }


def key_features(
    problem: Problem, seq: int, positions: torch.Tensor, heads: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the features of keys and values: tensors that broadcast to [positions, heads, head_size]."""
    call = problem.call
    size, x = call.block_size, call.key_cache.shape[4]
    d, head, at = torch.arange(call.query.shape[2]), heads[:, None], positions[:, None, None]
    context = problem.seq_len(seq) - problem.query_len(seq)
    start = problem.row_starts()[seq]
    return {
        **_common(call, d, head),
        "sequence": torch.tensor(seq),
        "p": at,
        "p // block_size": at // size,
        "p % block_size": at % size,
        "d // x": d // x,
        "d % x": d % x,
        "new token of the sequence": at - context,
        "token": start + at - context,
        "first token of the sequence": torch.tensor(start),
    }


def row_features(
    problem: Problem, seq: int, tokens: torch.Tensor, heads: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the features of rows: tensors that broadcast to [tokens, heads, head_size]."""
    call, start = problem.call, problem.row_starts()[seq]
    at = tokens[:, None, None]
    return {
        **_common(call, torch.arange(call.query.shape[2]), heads[:, None]),
        "sequence": torch.tensor(seq),
        "row": start + at,
        "new token of the sequence": at,
        "first token of the sequence": torch.tensor(start),
    }


def _common(call: KernelCall, d: torch.Tensor, head: torch.Tensor) -> dict[str, torch.Tensor]:
    group = call.num_queries_per_kv
    return {
        "0": torch.tensor(0),
        "1": torch.tensor(1),
        "d": d,
        "head": head,
        "KV head": head // group,
        "KV head // 2": head // group // 2,
        "head within its group": head % group,
        "head % num_kv_heads": head % call.key.shape[1],
    }


# What may be taken for a feature by mistake.
INSTEAD: Mapping[str, tuple[str, ...]] = {
    "block": ("p // block_size", "1", "0"),
    "KV head": ("head within its group", "head", "KV head // 2", "1", "0"),
    "head": ("KV head", "head within its group", "1", "0"),
    "d": ("1", "0"),
    "slot": ("p", "block", "1", "0"),
    "part": ("head", "row", "1", "0"),
    "d // x": ("d % x", "d", "1", "0"),
    "d % x": ("d // x", "d", "1", "0"),
    "p % block_size": ("p // block_size", "p", "1", "0"),
    "p // block_size": ("p % block_size", "p", "1", "0"),
    "token": ("new token of the sequence", "first token of the sequence", "p", "1", "0"),
    "row": ("new token of the sequence", "first token of the sequence", "sequence", "1", "0"),
    "sequence": ("1", "0"),
}
