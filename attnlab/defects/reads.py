"""Defects in reading the cache, in the heads that are read, and in the rows that are written."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.defects.edit import (
    TILES,
    Defect,
    Rows,
    any_seq,
    family,
    fault,
    has_cached,
    has_several_heads,
    has_several_seqs,
)
from attnlab.defects.masks import MASK_AND_WINDOW_IGNORED
from attnlab.lab.argument_reference import wrong_reads
from attnlab.lab.problem import AttentionInputs, Predicted, Problem, RowSlice
from attnlab.tensors.formats import FORMATS

_reads_cache = has_cached(0)


def _next_seq(at: Rows) -> int:
    return (at.slice.seq + 1) % at.problem.num_seqs


def _x_of_16_bytes(problem: Problem) -> int:
    """Return how many elements of the key cache fill 16 bytes."""
    return 16 // problem.call.key_cache.element_size()


def _has_other_x(problem: Problem) -> bool:
    x = _x_of_16_bytes(problem)
    return problem.call.key_cache.shape[4] != x and problem.call.query.shape[2] % x == 0


def _has_slots(problem: Problem) -> bool:
    return problem.call.block_size > 1


# New tokens that are read from slots that lack them.


def _filled(at: Rows, fill: float) -> AttentionInputs:
    """Fill the newest token's key and value with a number, if they are read from the cache."""
    if at.cached < at.seq_len:
        return at.inputs
    key, value = at.inputs.key.clone(), at.inputs.value.clone()
    key[-1], value[-1] = fill, fill
    return at.change(key=key, value=value)


def _as_in_cache(at: Rows) -> AttentionInputs:
    """Take the new tokens' keys and values as the cache holds them."""
    if at.cached < at.seq_len:
        return at.inputs
    new = at.keys[at.ctx_len :]
    key, value = at.in_cache(new)
    return at.change(
        key=torch.cat([at.inputs.key[: at.ctx_len], key]),
        value=torch.cat([at.inputs.value[: at.ctx_len], value]),
    )


def _reads_new_tokens(problem: Problem, seq: int) -> bool:
    return problem.cached_len(seq) == problem.seq_len(seq)


_any_reads_new_tokens = any_seq(_reads_new_tokens)


def _newest_slot_holds(problem: Problem, number: float) -> bool:
    """Answer whether the slot of a sequence's newest token holds a number in all elements, by the cache."""
    kv = torch.arange(problem.call.key.shape[1])

    def holds(seq: int) -> bool:
        newest, read = torch.tensor([problem.seq_len(seq) - 1]), problem.cache_read(seq)
        keys, values = (get(problem.call, newest, kv) for get in (read.keys, read.values))
        held = torch.cat([keys.flatten(), values.flatten()])
        return bool(held.isnan().all() if math.isnan(number) else (held == number).all())

    return any(holds(seq) for seq in problem.computed_seqs() if _reads_new_tokens(problem, seq))


def _may_be_unwritten(problem: Problem) -> bool:
    """Answer whether the newest token may be missing from the cache, as far as is known."""
    return problem.case is None or problem.case.staging.fill == "context_only"


def _read(
    name: str,
    text: str,
    seen_in: str,
    changes: Callable[[Rows], dict[str, Any]],
    *applies: Callable[[Problem], bool],
    links: tuple[str, ...] = (),
) -> Defect:
    """Return the defect of a cache that is read with ``changes`` of a CacheRead."""
    return fault(
        *(name, text, seen_in),
        lambda at: at.read(**changes(at)),
        *(_reads_cache, *applies),
        touches="cached",
        links=links,
    )


READS = family(
    "reads",
    *(
        fault(
            f"newest_slot_{name}",
            f"the newest token is read from the cache, but its slot holds {held}",
            seen_in,
            lambda at, fill=fill: _filled(at, fill),
            _any_reads_new_tokens,
            touches="cached",
            is_possible=lambda problem, fill=fill: _newest_slot_holds(problem, fill),
        )
        for name, held, fill, seen_in in (
            ("zero", "zeros", 0.0, "vllm #28490, vllm #29019"),
            ("nan", "NaN", math.nan, "vllm #27264, vllm #35219"),
        )
    ),
    fault(
        "newest_slot_unwritten",
        "new tokens are read from the cache before they are written there",
        "vllm #28490, vllm #43990",
        _as_in_cache,
        *(_may_be_unwritten, _any_reads_new_tokens),
        touches="cached",
        links=("unwritten_slot", "foreign_slot"),
    ),
    _read(
        "table_row_next",
        "each sequence uses the block table row of the next sequence",
        "vllm #28490",
        lambda at: {"key_row": _next_seq(at), "value_row": _next_seq(at)},
        has_several_seqs,
        links=("index_dtype",),
    ),
    _read(
        "table_row_first",
        "every sequence uses the block table row of sequence 0",
        "vllm-project/flash-attention #176",
        lambda at: {"key_row": 0, "value_row": 0},
        has_several_seqs,
    ),
    _read(
        "keys_of_next_sequence",
        "keys are read from the blocks of the next sequence; values are read correctly",
        "vllm #37442, vllm #57156",
        lambda at: {"key_row": _next_seq(at)},
        has_several_seqs,
    ),
    _read(
        "values_of_next_sequence",
        "values are read from the blocks of the next sequence; keys are read correctly",
        "vllm #37442, vllm #57156",
        lambda at: {"value_row": _next_seq(at)},
        has_several_seqs,
    ),
    _read(
        "next_block",
        "block b + 1 is read instead of block b",
        "vllm #47671, vllm #52109",
        lambda at: {"block": lambda blocks: blocks + 1},
        lambda problem: problem.call.key_cache.shape[0] > 1,
    ),
    _read(
        "block_16_bit",
        "block numbers are truncated to 16 bits",
        "aiter #3062, aiter #3061",
        lambda at: {"block": lambda blocks: blocks & 0xFFFF},
        lambda problem: bool(problem.call.block_table.max() > 0xFFFF),
    ),
    fault(
        "page_is_tile",
        "the block table is indexed with the position divided by the tile size instead of the block size",
        "tile-ai/TileOPs #1787, vllm #53906",
        # tiles of the size of a block are tiles of twice that size
        lambda at, size: at.read(column_size=size * (1 + (size == at.call.block_size))),
        lambda problem: has_cached(problem.call.block_size)(problem),
        touches="cached",
        variants={f"with tiles of {size}": size for size in TILES},
    ),
    _read(
        "next_slot",
        "the slot after the correct one in the same block is read",
        "vllm #52109",
        lambda at: {"offset": lambda offsets: offsets + 1},
        _has_slots,
    ),
    _read(
        "key_x_of_16_bytes",
        "the kernel assumes that the key cache's innermost dimension x is 16 bytes, but it is not",
        "vllm #6373",
        lambda at: {"key_x": _x_of_16_bytes(at.problem)},
        _has_other_x,
        links=("key_layout",),
    ),
    _read(
        "key_block_turned",
        "a key block [head_size / x, block_size, x] is read as [block_size, head_size / x, x]",
        "vllm #6373",
        lambda at: {"transposed": ("key",)},
        _has_slots,
        lambda problem: problem.call.key_cache.shape[2] > 1,
    ),
    _read(
        "value_block_turned",
        "a value block [head_size, block_size] is read as [block_size, head_size]",
        "vllm #6373",
        lambda at: {"transposed": ("value",)},
        _has_slots,
        lambda problem: problem.call.query.shape[2] > 1,
    ),
)


# Defects in decoding the cache's FP8 bytes: their format and scales.


def _same_scales(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Answer whether scales are equal, numbers or tensors."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def _scales(
    name: str, text: str, seen_in: str, scales: Callable[[Any, Any], tuple[Any, Any]]
) -> Defect:
    """Return the defect of wrong scales; ``scales`` maps (k_scale, v_scale) to the wrong ones."""

    def changes(at: Rows) -> dict[str, Any]:
        wrong = scales(at.call.k_scale, at.call.v_scale)
        return dict(zip(("k_scale", "v_scale"), wrong, strict=True))

    def applies(problem: Problem) -> bool:
        correct = (problem.call.k_scale, problem.call.v_scale)
        return problem.written.is_fp8 and not _same_scales(scales(*correct), correct)

    return _read(name, text, seen_in, changes, applies)


def _format(name: str, seen_in: str) -> Defect:
    """Return the defect of bytes decoded as FP8 format ``name``."""
    return _read(
        f"read_as_{name}",
        f"the cache's bytes are decoded as {name}, but were written in another format",
        seen_in,
        lambda at: {"format": FORMATS[name]},
        lambda problem: problem.written.is_fp8 and problem.written.name != name,
    )


DECODING = family(
    "decoding",
    _scales(
        "k_scale_ignored",
        "k_scale is not applied",
        "flashinfer #1023, sglang #20705",
        lambda k, v: (1.0, v),
    ),
    _scales(
        "v_scale_ignored",
        "v_scale is not applied",
        "flashinfer #1023, flashinfer #4979",
        lambda k, v: (k, 1.0),
    ),
    _scales(
        "scales_swapped", "k_scale and v_scale are exchanged", "vllm #41343", lambda k, v: (v, k)
    ),
    _scales("k_scale_squared", "k_scale is applied twice", "vllm #41343", lambda k, v: (k * k, v)),
    _scales("v_scale_squared", "v_scale is applied twice", "vllm #41343", lambda k, v: (k, v * v)),
    _scales(
        "k_scale_is_v_scale",
        "keys are multiplied by v_scale",
        "sglang #26852",
        lambda k, v: (v, v),
    ),
    _scales(
        "v_scale_is_k_scale",
        "values are multiplied by k_scale",
        "sglang #26852",
        lambda k, v: (k, k),
    ),
    _format("fp8_e4m3fn", "vllm #45562, vllm #45720"),
    _format("fp8_e4m3fnuz", "vllm #45562"),
    _format("fp8_e5m2", "vllm #45720"),
)


# Defects of op arguments, which are known for a Case alone.


def argument_defects(case: Case) -> tuple[Defect, ...]:
    """Return the wrong reads that the Case's op argument may have, and that the op ignores it or the mask."""
    if case.op_argument == NONE:
        return ()
    reads = [
        _of_argument(name, f"the cache is read wrongly: {name.replace('_', ' ')}")
        for name in wrong_reads(case)
    ]
    ignored = _of_argument("argument_ignored", "the op ignores its argument")
    return (*reads, ignored, MASK_AND_WINDOW_IGNORED)


def _of_argument(name: str, text: str) -> Defect:
    return Defect(
        name=name,
        family="op arguments",
        text=text,
        compute=lambda problem, row_slice: _misread(problem, name).correct(row_slice),
        applies=lambda problem: problem.misread is not None,
    )


@lru_cache(maxsize=4)
def _misread(problem: Problem, name: str) -> Problem:
    assert problem.case is not None
    assert problem.misread is not None
    return problem.misread(wrong_reads(problem.case).get(name))


# Defects in the mapping of query heads to KV heads and of outputs to heads.


def _kv_head(
    name: str,
    text: str,
    seen_in: str,
    kv_heads: Callable[[Problem, torch.Tensor], torch.Tensor],
) -> Defect:
    """Return the defect of wrong KV heads; ``kv_heads`` maps query heads [n] to KV heads [n]."""

    def applies(problem: Problem) -> bool:
        heads = torch.arange(problem.num_heads)
        return not kv_heads(problem, heads).equal(problem.kv_heads_of(heads))

    return fault(
        *(name, text, seen_in),
        lambda at: at.problem.attention_inputs(at.slice, kv_heads(at.problem, at.heads)),
        applies,
    )


def _by_tile(problem: Problem, heads: torch.Tensor) -> torch.Tensor:
    """Return the KV heads if each tile of 16 query heads uses the KV head of its first query head.

    With 20 query heads per KV head, a KV head gets two tiles, so query heads 20 to 31 use KV head 0.
    """
    group = problem.call.num_queries_per_kv
    return heads // min(16, group) // -(-group // 16)


HEADS = family(
    "heads",
    _kv_head(
        "kv_head_modulo",
        "query head h reads KV head h % num_kv_heads instead of h // num_queries_per_kv",
        "HipKittens #22, fla #1029",
        lambda problem, heads: heads % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_first",
        "every query head reads KV head 0",
        "aiter #3062",
        lambda problem, heads: torch.zeros_like(heads),
    ),
    _kv_head(
        "kv_head_next",
        "every query head reads the KV head that follows its own",
        "fla #1029",
        lambda problem, heads: (problem.kv_heads_of(heads) + 1) % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_by_tile",
        "query heads are processed in tiles of 16; with more than 16 query heads per KV head, the last "
        "tile also computes query heads of the next KV head",
        "vllm #40792",
        _by_tile,
    ),
    fault(
        "keys_and_values_exchanged",
        "keys are read as values, and values as keys",
        "",
        lambda at: at.change(key=at.inputs.value, value=at.inputs.key),
        lambda problem: problem.call.query.shape[2] == problem.call.buffer.shape[2],
    ),
    fault(
        "output_of_next_head",
        "each head's output is the output of the next head",
        "HipKittens #22",
        lambda at: at.problem.correct(dataclasses.replace(at.slice, heads=at.next_heads)),
        has_several_heads,
    ),
)


# Defects in which output rows are written, and with which result.


def _exactly(output: torch.Tensor) -> Predicted:
    """Return a prediction without rounding error: the bits are known."""
    return Predicted(output=output.double(), bound=torch.zeros(output.shape, dtype=torch.float64))


def _constant(at: Rows, number: float) -> Predicted:
    width = at.call.buffer.shape[2]
    return _exactly(torch.full((len(at.slice.tokens), len(at.heads), width), number))


def _never_written(at: Rows) -> Predicted:
    """Return what the buffer held before the call; NaN if that is unknown."""
    if at.problem.before is None:
        return _constant(at, torch.nan)
    return _exactly(at.problem.before[at.problem.rows(at.slice)][:, at.heads])


def _on_sequence_0(at: Rows) -> Predicted:
    """Write every sequence to the rows of sequence 0, in order, so that the last writer's rows stay."""
    problem = at.problem
    if at.slice.seq != 0:
        return _never_written(at)
    rows = []
    for token in at.slice.tokens.tolist():
        writer = max(seq for seq in range(problem.num_seqs) if problem.query_len(seq) > token)
        rows.append(problem.row_starts()[writer] + token)
    return problem.correct_rows(torch.tensor(rows, dtype=torch.int64), at.heads)


def _start_loc_as_int32(at: Rows) -> Predicted:
    """Decode as ROCm's kernel does when it reads an int64 query_start_loc as int32.

    The kernel writes one row for each sequence whose misread length is 1: the query at the misread start,
    attending to that sequence's cache. All other rows of decode sequences stay unwritten.

    query_start_loc [0, 1, 4] in int64 is read as [0, 0, 1], so sequence 1 has length 1 and start 0: row 0
    attends to the cache of sequence 1.
    """
    problem = at.problem
    misread = at.call.query_start_loc.long().view(torch.int32)[: problem.num_seqs + 1].tolist()
    lengths = [end - start for start, end in itertools.pairwise(misread)]
    writers = {misread[seq]: seq for seq, length in enumerate(lengths) if length == 1}
    unwritten = problem.is_decode(at.slice.seq)
    base = _never_written(at) if unwritten else problem.correct(at.slice)
    output, bound = base.output.clone(), base.bound.clone()
    for i, row in enumerate(problem.rows(at.slice).tolist()):
        if row in writers:
            token = dataclasses.replace(at.slice, tokens=at.slice.tokens[i : i + 1])
            wrong = _decoded_from_cache(problem, token, writers[row])
            output[i], bound[i] = wrong.output[0], wrong.bound[0]
    return Predicted(output=output, bound=bound)


def _decoded_from_cache(problem: Problem, row_slice: RowSlice, seq: int) -> Predicted:
    """Return a row whose query attends to all tokens of sequence ``seq``, read from the cache."""
    last_token = torch.tensor([problem.query_len(seq) - 1])
    at = Rows(problem=problem, slice=RowSlice(seq=seq, tokens=last_token, heads=row_slice.heads))
    query = problem.call.query[problem.rows(row_slice)][:, row_slice.heads].double()
    key, value = at.in_cache(at.keys)
    return problem.predict(at.change(query=query, key=key, value=value))


def _knows_buffer(problem: Problem) -> bool:
    return problem.before is not None


ROWS = family(
    "rows",
    fault(
        "query_start_loc_as_int32",
        "the decode kernel reads an int64 query_start_loc as int32; it gets wrong query lengths and "
        "leaves rows unwritten or computes them from the wrong sequence",
        "vllm #28424, vllm #28905",
        _start_loc_as_int32,
        *(_knows_buffer, any_seq(lambda problem, seq: problem.is_decode(seq))),
        lambda problem: problem.call.query_start_loc.dtype == torch.int64,
        touches="decode",
        links=("index_dtype",),
    ),
    fault(
        "rows_never_written",
        "the kernel does not write these rows; they keep the previous contents of the output buffer",
        "vllm #28490, vllm #28905",
        _never_written,
        _knows_buffer,
        touches="unwritten",
        links=("unwritten_rows",),
    ),
    fault(
        "rows_one_late",
        "each row's result is written to the row after it",
        "vllm #57094",
        lambda at: at.problem.correct_rows(
            (at.problem.rows(at.slice) - 1) % len(at.call.query), at.heads
        ),
        lambda problem: problem.call.query.shape[0] > 1,
    ),
    fault(
        "folded_on_sequence_0",
        "every sequence is written to the rows of sequence 0; all other rows keep the previous "
        "contents of the output buffer",
        "vllm-project/flash-attention #176",
        _on_sequence_0,
        *(has_several_seqs, _knows_buffer),
    ),
    fault("rows_zero", "the rows are all zeros", "vllm #43990", lambda at: _constant(at, 0.0)),
)
