"""Defects in reading the cache: which slots are read, and in which order their elements."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlab.defects.problem import (
    AttentionInputs,
    CacheRead,
    ChangeCacheRead,
    Defect,
    Predicted,
    Problem,
    RowSlice,
    changing_cache_read,
    changing_inputs,
)
from attnlab.defects.softmax import TILES
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


def _column_of_tile(size: int) -> ChangeCacheRead:
    """Return the change of the block table's columns from blocks to tiles of ``size``; tiles of the size
    of a block are tiles of twice that size."""

    def change(problem: Problem, seq: int, cache_read: CacheRead) -> CacheRead:
        block_size = problem.call.block_size
        return dataclasses.replace(
            cache_read, column_size=2 * block_size if size == block_size else size
        )

    return change


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

    def is_possible(problem: Problem) -> bool:
        return fill is None or any(
            _newest_slot_holds(problem, seq, fill)
            for seq in problem.computed_seqs()
            if problem.cached_len(seq) == problem.seq_len(seq)
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
        is_possible=is_possible,
    )


def _newest_slot_holds(problem: Problem, seq: int, number: float) -> bool:
    """Answer whether the slot of a sequence's newest token holds a number in all elements, by the cache."""
    newest = torch.tensor([problem.seq_len(seq) - 1])
    cache_read, kv = problem.cache_read(seq), torch.arange(problem.call.key.shape[1])
    keys = cache_read.keys(problem.call, newest, kv)
    values = cache_read.values(problem.call, newest, kv)
    held = torch.cat([keys.flatten(), values.flatten()])
    return bool(held.isnan().all() if math.isnan(number) else (held == number).all())


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
    dataclasses.replace(
        _read(
            "page_is_tile",
            "the block table is indexed with the position divided by the tile size instead of the block size",
            ("tile-ai/TileOPs #1787", "vllm #53906"),
            _column_of_tile(TILES[0]),
            lambda problem: any(
                problem.cached_len(seq) > problem.call.block_size for seq in range(problem.num_seqs)
            ),
        ),
        variants=tuple(
            (f"with tiles of {size}", changing_cache_read(_column_of_tile(size))) for size in TILES
        ),
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


# Defects in decoding the cache's FP8 bytes: their format and scales.


def _decoding(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    change: ChangeCacheRead,
    applies: Callable[[Problem], bool],
) -> Defect:
    return Defect(
        name=name,
        family="decoding",
        text=text,
        seen_in=seen_in,
        touches="cached",
        compute=changing_cache_read(change),
        applies=lambda problem: (
            any(problem.cached_len(seq) > 0 for seq in range(problem.num_seqs)) and applies(problem)
        ),
    )


def _same_scales(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Answer whether scales are equal, numbers or tensors."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


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

    return _decoding(name, text, seen_in, change, applies)


def _format(name: str, seen_in: tuple[str, ...]) -> Defect:
    """Return the defect of bytes decoded as FP8 format ``name``."""
    return _decoding(
        f"read_as_{name}",
        f"the cache's bytes are decoded as {name}, but were written in another format",
        seen_in,
        lambda problem, seq, cache_read: dataclasses.replace(cache_read, format=FORMATS[name]),
        lambda problem: problem.written.is_fp8 and problem.written.name != name,
    )


DECODING = (
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
    _scales(
        "k_scale_is_v_scale",
        "keys are multiplied by v_scale",
        ("sglang #26852",),
        lambda k, v: (v, v),
    ),
    _scales(
        "v_scale_is_k_scale",
        "values are multiplied by k_scale",
        ("sglang #26852",),
        lambda k, v: (k, k),
    ),
    _format("fp8_e4m3fn", ("vllm #45562", "vllm #45720")),
    _format("fp8_e4m3fnuz", ("vllm #45562",)),
    _format("fp8_e5m2", ("vllm #45720",)),
)


# Defects in the mapping of query heads to KV heads and of outputs to heads.


def _kv_head(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    kv_heads: Callable[[Problem, torch.Tensor], torch.Tensor],
) -> Defect:
    """Return the defect of wrong KV heads; ``kv_heads`` maps query heads [n] to KV heads [n]."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        wrong = kv_heads(problem, row_slice.heads)
        return problem.predict(problem.attention_inputs(row_slice, wrong))

    def applies(problem: Problem) -> bool:
        heads = torch.arange(problem.num_heads)
        return not kv_heads(problem, heads).equal(problem.kv_heads_of(heads))

    return Defect(
        name=name,
        family="heads",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=compute,
        applies=applies,
    )


def _by_tile(problem: Problem, heads: torch.Tensor) -> torch.Tensor:
    """Return the KV heads if each tile of 16 query heads uses the KV head of its first query head.

    With 20 query heads per KV head, a KV head gets two tiles, so query heads 20 to 31 use KV head 0.
    """
    group = problem.call.num_queries_per_kv
    return heads // min(16, group) // -(-group // 16)


def _next_head(problem: Problem, row_slice: RowSlice) -> Predicted:
    heads = (row_slice.heads + 1) % problem.num_heads
    return problem.correct(dataclasses.replace(row_slice, heads=heads))


HEADS = (
    _kv_head(
        "kv_head_modulo",
        "query head h reads KV head h % num_kv_heads instead of h // num_queries_per_kv",
        ("HipKittens #22", "fla #1029"),
        lambda problem, heads: heads % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_first",
        "every query head reads KV head 0",
        ("aiter #3062",),
        lambda problem, heads: torch.zeros_like(heads),
    ),
    _kv_head(
        "kv_head_next",
        "every query head reads the KV head that follows its own",
        ("fla #1029",),
        lambda problem, heads: (problem.kv_heads_of(heads) + 1) % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_by_tile",
        "query heads are processed in tiles of 16; with more than 16 query heads per KV head, the last "
        "tile also computes query heads of the next KV head",
        ("vllm #40792",),
        _by_tile,
    ),
    Defect(
        name="output_of_next_head",
        family="heads",
        text="each head's output is the output of the next head",
        seen_in=("HipKittens #22",),
        touches="all",
        compute=_next_head,
        applies=lambda problem: problem.num_heads > 1,
    ),
)
