"""Defects in reading the cache: which slots are read, and how their bytes are decoded."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.cache_read import CacheRead
from attnlab.defects.defect import ChangeCacheRead, Defect, changing_cache_read, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.tensors.formats import FORMATS


def _read(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    change: ChangeCacheRead,
    applies: Callable[[Problem], bool],
    links: tuple[str, ...] = (),
) -> Defect:
    return Defect(
        name=name,
        family="reads",
        text=text,
        seen_in=seen_in,
        touches="cached",
        compute=changing_cache_read(change),
        applies=lambda problem: _reads_cache(problem) and applies(problem),
        links=links,
    )


def _reads_cache(problem: Problem) -> bool:
    return any(problem.cached_len(seq) > 0 for seq in range(problem.num_seqs))


# Scales and formats of FP8 bytes.


def _scales(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    scales: Callable[[Any, Any], tuple[Any, Any]],
) -> Defect:
    """Return the defect of wrong scales; ``scales`` maps (k_scale, v_scale) to the wrong ones."""

    def change(problem: Problem, seq: int, cache_read: CacheRead) -> CacheRead:
        k_scale, v_scale = scales(cache_read.k_scale, cache_read.v_scale)
        return dataclasses.replace(cache_read, k_scale=k_scale, v_scale=v_scale)

    def applies(problem: Problem) -> bool:
        correct = (problem.call.k_scale, problem.call.v_scale)
        return problem.written.is_fp8 and not _same_scales(scales(*correct), correct)

    return _read(name, text, seen_in, change, applies)


def _same_scales(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Answer whether scales are equal, numbers or tensors."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def _format(name: str, seen_in: tuple[str, ...]) -> Defect:
    """Return the defect of bytes decoded as FP8 format ``name``."""
    return _read(
        f"read_as_{name}",
        f"the cache's bytes are decoded as {name}, but were written in another format",
        seen_in,
        lambda problem, seq, cache_read: dataclasses.replace(cache_read, format=FORMATS[name]),
        lambda problem: problem.written.is_fp8 and problem.written.name != name,
    )


# Slots.


def _table_row(which: tuple[str, ...], row: Callable[[Problem, int], int]) -> ChangeCacheRead:
    """Return the change of the block table's row for "key", "value" or both."""

    def change(problem: Problem, seq: int, cache_read: CacheRead) -> CacheRead:
        rows = {f"{name}_row": row(problem, seq) for name in which}
        return dataclasses.replace(cache_read, **rows)  # type: ignore[arg-type]

    return change


def _next_seq(problem: Problem, seq: int) -> int:
    return (seq + 1) % problem.num_seqs


def _has_several_seqs(problem: Problem) -> bool:
    return problem.num_seqs > 1


def _block(change: Callable[[torch.Tensor], torch.Tensor]) -> ChangeCacheRead:
    return lambda problem, seq, cache_read: dataclasses.replace(cache_read, block=change)


def _x_of_16_bytes(problem: Problem) -> int:
    """Return how many elements of the key cache fill 16 bytes."""
    return 16 // problem.call.key_cache.element_size()


def _newest_slot(
    name: str, text: str, seen_in: tuple[str, ...], fill: float | None, links: tuple[str, ...] = ()
) -> Defect:
    """Return the defect of new tokens read from slots that lack them.

    With a ``fill``, only the newest token's slot is wrong and holds that number. With None, the slots of
    all new tokens are read with their present contents.
    """

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        newest = inputs.key.shape[0] - 1
        if problem.cached_len(row_slice.seq) <= newest:
            return inputs  # the kernel takes the newest token from its arguments
        key, value = inputs.key.clone(), inputs.value.clone()
        if fill is not None:
            key[newest], value[newest] = fill, fill
        else:
            cache_read = problem.cache_read(row_slice.seq)
            kv = problem.kv_heads_of(row_slice.heads)
            new = torch.arange(newest + 1 - problem.query_len(row_slice.seq), newest + 1)
            key[new] = cache_read.keys(problem.call, new, kv)
            value[new] = cache_read.values(problem.call, new, kv)
        return dataclasses.replace(inputs, key=key, value=value)

    def applies(problem: Problem) -> bool:
        return (fill is not None or _may_be_unwritten(problem)) and any(
            problem.cached_len(seq) == problem.seq_len(seq) for seq in range(problem.num_seqs)
        )

    return Defect(
        name=name,
        family="reads",
        text=text,
        seen_in=seen_in,
        touches="cached",
        compute=changing_inputs(change),
        applies=applies,
        links=links,
    )


def _may_be_unwritten(problem: Problem) -> bool:
    """Answer whether the newest token may be missing from the cache, as far as is known."""
    return problem.case is None or problem.case.staging.fill == "context_only"


READS = (
    _newest_slot(
        "newest_slot_zero",
        "the newest token is read from the cache, but its slot holds zeros",
        ("vllm #28490", "vllm #29019"),
        0.0,
    ),
    _newest_slot(
        "newest_slot_nan",
        "the newest token is read from the cache, but its slot holds NaN",
        ("vllm #27264", "vllm #35219"),
        float("nan"),
    ),
    _newest_slot(
        "newest_slot_unwritten",
        "new tokens are read from the cache before they are written there",
        ("vllm #28490", "vllm #43990"),
        None,
        links=("unwritten_slot", "foreign_slot"),
    ),
    _scales(
        "k_scale_ignored",
        "k_scale is not applied",
        ("flashinfer #1023", "sglang #20705"),
        lambda k, v: (1.0, v),
    ),
    _scales(
        "v_scale_ignored",
        "v_scale is not applied",
        ("flashinfer #1023", "flashinfer #4979"),
        lambda k, v: (k, 1.0),
    ),
    _scales(
        "scales_swapped",
        "k_scale and v_scale are exchanged",
        ("vllm #41343",),
        lambda k, v: (v, k),
    ),
    _scales(
        "k_scale_squared", "k_scale is applied twice", ("vllm #41343",), lambda k, v: (k * k, v)
    ),
    _scales(
        "v_scale_squared", "v_scale is applied twice", ("vllm #41343",), lambda k, v: (k, v * v)
    ),
    _format("fp8_e4m3fn", ("vllm #45562", "vllm #45720")),
    _format("fp8_e4m3fnuz", ("vllm #45562",)),
    _format("fp8_e5m2", ("vllm #45720",)),
    _read(
        "table_row_next",
        "each sequence uses the block table row of the next sequence",
        ("vllm #28490",),
        _table_row(("key", "value"), _next_seq),
        _has_several_seqs,
        links=("index_dtype",),
    ),
    _read(
        "table_row_first",
        "every sequence uses the block table row of sequence 0",
        ("vllm-project/flash-attention #176",),
        _table_row(("key", "value"), lambda problem, seq: 0),
        _has_several_seqs,
    ),
    _read(
        "keys_of_next_sequence",
        "keys are read from the blocks of the next sequence; values are read correctly",
        ("vllm #37442", "vllm #57156"),
        _table_row(("key",), _next_seq),
        _has_several_seqs,
    ),
    _read(
        "values_of_next_sequence",
        "values are read from the blocks of the next sequence; keys are read correctly",
        ("vllm #37442", "vllm #57156"),
        _table_row(("value",), _next_seq),
        _has_several_seqs,
    ),
    _read(
        "next_block",
        "block b + 1 is read instead of block b",
        ("vllm #47671", "vllm #52109"),
        _block(lambda blocks: blocks + 1),
        lambda problem: problem.call.key_cache.shape[0] > 1,
    ),
    _read(
        "block_16_bit",
        "block numbers are truncated to 16 bits",
        ("aiter #3062", "aiter #3061"),
        _block(lambda blocks: blocks & 0xFFFF),
        lambda problem: bool(problem.call.block_table.max() > 0xFFFF),
    ),
    _read(
        "next_slot",
        "the slot after the correct one in the same block is read",
        ("vllm #52109",),
        lambda problem, seq, cache_read: dataclasses.replace(
            cache_read, offset=lambda offsets: offsets + 1
        ),
        lambda problem: problem.call.block_size > 1,
    ),
    _read(
        "key_x_of_16_bytes",
        "the kernel assumes that the key cache's innermost dimension x is 16 bytes, but it is not",
        ("vllm #6373",),
        lambda problem, seq, cache_read: dataclasses.replace(
            cache_read, key_x=_x_of_16_bytes(problem)
        ),
        lambda problem: (
            problem.call.key_cache.shape[4] != _x_of_16_bytes(problem)
            and problem.call.query.shape[2] % _x_of_16_bytes(problem) == 0
        ),
        links=("key_layout",),
    ),
    _read(
        "key_block_turned",
        "a key block [head_size / x, block_size, x] is read as [block_size, head_size / x, x]",
        ("vllm #6373",),
        lambda problem, seq, cache_read: dataclasses.replace(cache_read, transposed=("key",)),
        lambda problem: problem.call.block_size > 1 and problem.call.key_cache.shape[2] > 1,
    ),
    _read(
        "value_block_turned",
        "a value block [head_size, block_size] is read as [block_size, head_size]",
        ("vllm #6373",),
        lambda problem, seq, cache_read: dataclasses.replace(cache_read, transposed=("value",)),
        lambda problem: problem.call.block_size > 1 and problem.call.query.shape[2] > 1,
    ),
)
