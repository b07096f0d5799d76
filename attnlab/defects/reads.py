"""Defects of how the cache is read: which bytes, and what they are taken for."""

import dataclasses
from collections.abc import Callable

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.cache_read import CacheRead
from attnlab.defects.defect import Defect, by_reading, by_sight
from attnlab.defects.problem import Problem, RowSlice
from attnlab.tensors.formats import FORMATS

Change = Callable[[Problem, int, CacheRead], CacheRead]


def _read(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    change: Change,
    applies: Callable[[Problem], bool],
    links: tuple[str, ...] = (),
) -> Defect:
    return Defect(
        name=name,
        family="reads",
        text=text,
        seen_in=seen_in,
        touches="cached",
        compute=by_reading(change),
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
    scales: Callable[[float, float], tuple[float, float]],
) -> Defect:
    """Return the defect of other scales, given as a function of (k_scale, v_scale)."""

    def change(problem: Problem, seq: int, reading: CacheRead) -> CacheRead:
        k_scale, v_scale = scales(reading.k_scale, reading.v_scale)
        return dataclasses.replace(reading, k_scale=k_scale, v_scale=v_scale)

    def applies(problem: Problem) -> bool:
        own = (problem.call.k_scale, problem.call.v_scale)
        return problem.written.is_fp8 and scales(*own) != own

    return _read(name, text, seen_in, change, applies)


def _format(name: str, seen_in: tuple[str, ...]) -> Defect:
    """Return the defect of bytes that are taken for another FP8 format."""
    return _read(
        f"read_as_{name}",
        f"the cache's bytes are taken for {name}",
        seen_in,
        lambda problem, seq, reading: dataclasses.replace(reading, format=FORMATS[name]),
        lambda problem: problem.written.is_fp8 and problem.written.name != name,
    )


# Slots.


def _row(which: tuple[str, ...], row: Callable[[Problem, int], int]) -> Change:
    def change(problem: Problem, seq: int, reading: CacheRead) -> CacheRead:
        rows = {f"{name}_row": row(problem, seq) for name in which}
        return dataclasses.replace(reading, **rows)  # type: ignore[arg-type]

    return change


def _next_row(problem: Problem, seq: int) -> int:
    return (seq + 1) % problem.num_seqs


def _several(problem: Problem) -> bool:
    return problem.num_seqs > 1


def _blocks(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda problem, seq, reading: dataclasses.replace(reading, block=change)


def _key_x(problem: Problem) -> int:
    """Return how many elements of the key cache are 16 bytes."""
    return 16 // problem.call.key_cache.element_size()


def _newest_slot(
    name: str, text: str, seen_in: tuple[str, ...], fill: float | None, links: tuple[str, ...] = ()
) -> Defect:
    """Return the defect of a newest token whose slot holds ``fill``; with None, of new tokens whose
    slots hold what stands there."""

    def change(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
        last = sight.key.shape[0] - 1
        if problem.cached_len(row_slice.seq) <= last:
            return sight  # its kernel takes the newest token from the arguments
        key, value = sight.key.clone(), sight.value.clone()
        if fill is not None:
            key[last], value[last] = fill, fill
        else:
            reading, kv = problem.reading(row_slice.seq), problem.kv_of(row_slice.heads)
            new = torch.arange(last + 1 - problem.query_len(row_slice.seq), last + 1)
            key[new] = problem.stored_key(reading, new, kv)
            value[new] = problem.stored_value(reading, new, kv)
        return dataclasses.replace(sight, key=key, value=value)

    return Defect(
        name=name,
        family="reads",
        text=text,
        seen_in=seen_in,
        touches="cached",
        compute=by_sight(change),
        applies=lambda problem: (
            (fill is not None or _may_be_unwritten(problem))
            and any(
                problem.cached_len(seq) == problem.seq_len(seq) for seq in range(problem.num_seqs)
            )
        ),
        links=links,
    )


def _may_be_unwritten(problem: Problem) -> bool:
    """Answer whether a newest token may be missing from the cache, as far as is known."""
    return problem.case is None or problem.case.staging.fill == "context_only"


READS = (
    _newest_slot(
        "newest_slot_zero",
        "the newest token is read from the cache, where its slot holds zeros",
        ("vllm #28490", "vllm #29019"),
        0.0,
    ),
    _newest_slot(
        "newest_slot_nan",
        "the newest token is read from the cache, where its slot holds NaN",
        ("vllm #27264", "vllm #35219"),
        float("nan"),
    ),
    _newest_slot(
        "newest_slot_unwritten",
        "new tokens are read from the cache, where their slots hold whatever stands there",
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
        "every sequence reads the block table's row of the next sequence",
        ("vllm #28490",),
        _row(("key", "value"), _next_row),
        _several,
        links=("index_dtype",),
    ),
    _read(
        "table_row_first",
        "every sequence reads the block table's row of sequence 0",
        ("vllm-project/flash-attention #176",),
        _row(("key", "value"), lambda problem, seq: 0),
        _several,
    ),
    _read(
        "keys_of_next_sequence",
        "keys, but not values, are read from the blocks of the next sequence",
        ("vllm #37442", "vllm #57156"),
        _row(("key",), _next_row),
        _several,
    ),
    _read(
        "values_of_next_sequence",
        "values, but not keys, are read from the blocks of the next sequence",
        ("vllm #37442", "vllm #57156"),
        _row(("value",), _next_row),
        _several,
    ),
    _read(
        "next_block",
        "block b + 1 is read for block b",
        ("vllm #47671", "vllm #52109"),
        _blocks(lambda blocks: blocks + 1),
        lambda problem: problem.call.key_cache.shape[0] > 1,
    ),
    _read(
        "block_16_bit",
        "only the low 16 bits of a block's number are used",
        ("aiter #3062", "aiter #3061"),
        _blocks(lambda blocks: blocks & 0xFFFF),
        lambda problem: bool(problem.call.block_table.max() > 0xFFFF),
    ),
    _read(
        "next_slot",
        "the slot behind the right one in its block is read",
        ("vllm #52109",),
        lambda problem, seq, reading: dataclasses.replace(reading, offset=lambda at: at + 1),
        lambda problem: problem.call.block_size > 1,
    ),
    _read(
        "key_x_of_16_bytes",
        "the innermost size of the key cache is taken for 16 bytes, whatever it is",
        ("vllm #6373",),
        lambda problem, seq, reading: dataclasses.replace(reading, key_x=_key_x(problem)),
        lambda problem: (
            problem.call.key_cache.shape[4] != _key_x(problem)
            and problem.call.query.shape[2] % _key_x(problem) == 0
        ),
        links=("key_layout",),
    ),
    _read(
        "key_block_turned",
        "a key block [head_size / x, block_size, x] is taken for [block_size, head_size / x, x]",
        ("vllm #6373",),
        lambda problem, seq, reading: dataclasses.replace(reading, turned=("key",)),
        lambda problem: problem.call.block_size > 1 and problem.call.key_cache.shape[2] > 1,
    ),
    _read(
        "value_block_turned",
        "a value block [head_size, block_size] is taken for [block_size, head_size]",
        ("vllm #6373",),
        lambda problem, seq, reading: dataclasses.replace(reading, turned=("value",)),
        lambda problem: problem.call.block_size > 1 and problem.call.query.shape[2] > 1,
    ),
)
