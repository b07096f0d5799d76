"""Defects in which output rows are written, and with which result."""

import dataclasses
import itertools

import torch

from attnlab.defects.masks import hide, key_positions
from attnlab.defects.problem import (
    AttentionInputs,
    Defect,
    Predicted,
    Problem,
    RowSlice,
    always,
    changing_inputs,
)
from attnlab.defects.softmax import has_partial_block
from attnlab.tensors.cache import freed_blocks


def _exactly(output: torch.Tensor) -> Predicted:
    """Return a prediction without rounding error: the bits are known."""
    return Predicted(output=output.double(), bound=torch.zeros(output.shape, dtype=torch.float64))


def _never_written(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Return what the buffer held before the call; NaN if that is unknown."""
    rows, heads = problem.rows(row_slice), row_slice.heads
    if problem.before is None:
        shape = (len(rows), len(heads), problem.call.buffer.shape[2])
        return _exactly(torch.full(shape, torch.nan))
    return _exactly(problem.before[rows][:, heads])


def _one_row_late(problem: Problem, row_slice: RowSlice) -> Predicted:
    rows = (problem.rows(row_slice) - 1) % problem.call.query.shape[0]
    return problem.correct_rows(rows, row_slice.heads)


def _on_sequence_0(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Write every sequence to the rows of sequence 0, in order, so that the last writer's rows stay."""
    if row_slice.seq != 0:
        return _never_written(problem, row_slice)
    rows = []
    for token in row_slice.tokens.tolist():
        writer = max(seq for seq in range(problem.num_seqs) if problem.query_len(seq) > token)
        rows.append(problem.row_starts()[writer] + token)
    return problem.correct_rows(torch.tensor(rows, dtype=torch.int64), row_slice.heads)


def _zeros(problem: Problem, row_slice: RowSlice) -> Predicted:
    shape = (len(row_slice.tokens), len(row_slice.heads), problem.call.buffer.shape[2])
    return _exactly(torch.zeros(shape))


def _start_loc_as_int32(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Decode as ROCm's kernel does when it reads an int64 query_start_loc as int32.

    The kernel writes one row for each sequence whose misread length is 1: the query at the misread start,
    attending to that sequence's cache. All other rows of decode sequences stay unwritten.

    query_start_loc [0, 1, 4] in int64 is read as [0, 0, 1], so sequence 1 has length 1 and start 0: row 0
    attends to the cache of sequence 1.
    """
    misread = problem.call.query_start_loc.long().view(torch.int32)[: problem.num_seqs + 1].tolist()
    lengths = [end - start for start, end in itertools.pairwise(misread)]
    writers = {misread[seq]: seq for seq, length in enumerate(lengths) if length == 1}
    unwritten = problem.is_decode(row_slice.seq)
    base = _never_written(problem, row_slice) if unwritten else problem.correct(row_slice)
    output, bound = base.output.clone(), base.bound.clone()
    for i, row in enumerate(problem.rows(row_slice).tolist()):
        if row in writers:
            token = dataclasses.replace(row_slice, tokens=row_slice.tokens[i : i + 1])
            wrong = _decoded_from_cache(problem, token, writers[row])
            output[i], bound[i] = wrong.output[0], wrong.bound[0]
    return Predicted(output=output, bound=bound)


def _decoded_from_cache(problem: Problem, row_slice: RowSlice, seq: int) -> Predicted:
    """Return a row whose query attends to all tokens of sequence ``seq``, read from the cache."""
    last_token = torch.tensor([problem.query_len(seq) - 1])
    inputs = problem.attention_inputs(RowSlice(seq=seq, tokens=last_token, heads=row_slice.heads))
    positions = torch.arange(problem.seq_len(seq))
    cache_read, kv = problem.cache_read(seq), problem.kv_heads_of(row_slice.heads)
    query = problem.call.query[problem.rows(row_slice)][:, row_slice.heads].double()
    return problem.predict(
        dataclasses.replace(
            inputs,
            query=query,
            key=cache_read.keys(problem.call, positions, kv),
            value=cache_read.values(problem.call, positions, kv),
        )
    )


def _knows_buffer(problem: Problem) -> bool:
    return problem.before is not None


ROWS = (
    Defect(
        name="query_start_loc_as_int32",
        family="rows",
        text="the decode kernel reads an int64 query_start_loc as int32; it gets wrong query lengths and "
        "leaves rows unwritten or computes them from the wrong sequence",
        seen_in=("vllm #28424", "vllm #28905"),
        touches="decode",
        compute=_start_loc_as_int32,
        applies=lambda problem: (
            _knows_buffer(problem)
            and problem.call.query_start_loc.dtype == torch.int64
            and any(problem.is_decode(seq) for seq in range(problem.num_seqs))
        ),
        links=("index_dtype",),
    ),
    Defect(
        name="rows_never_written",
        family="rows",
        text="the kernel does not write these rows; they keep the previous contents of the output buffer",
        seen_in=("vllm #28490", "vllm #28905"),
        touches="unwritten",
        compute=_never_written,
        applies=_knows_buffer,
        links=("unwritten_rows",),
    ),
    Defect(
        name="rows_one_late",
        family="rows",
        text="each row's result is written to the row after it",
        seen_in=("vllm #57094",),
        touches="all",
        compute=_one_row_late,
        applies=lambda problem: problem.call.query.shape[0] > 1,
    ),
    Defect(
        name="folded_on_sequence_0",
        family="rows",
        text="every sequence is written to the rows of sequence 0; all other rows keep the previous "
        "contents of the output buffer",
        seen_in=("vllm-project/flash-attention #176",),
        touches="all",
        compute=_on_sequence_0,
        applies=lambda problem: problem.num_seqs > 1 and _knows_buffer(problem),
    ),
    Defect(
        name="rows_zero",
        family="rows",
        text="the rows are all zeros",
        seen_in=("vllm #43990",),
        touches="all",
        compute=_zeros,
        applies=always,
    ),
)


# Defects in which tokens are attended to: context, new tokens, and slots after the last cached token.


def _ctx_len(problem: Problem, seq: int) -> int:
    return problem.seq_len(seq) - problem.query_len(seq)


def _context_only(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    return hide(inputs, key_positions(inputs) >= _ctx_len(problem, row_slice.seq))


def _new_tokens_only(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    return hide(inputs, key_positions(inputs) < _ctx_len(problem, row_slice.seq))


def _tail_attended(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Append the slots after the sequence's last cached token, up to the end of the block."""
    cached, size = problem.cached_len(row_slice.seq), problem.call.block_size
    tail = torch.arange(cached, -(-cached // size) * size)
    cache_read, kv = problem.cache_read(row_slice.seq), problem.kv_heads_of(row_slice.heads)
    key = cache_read.keys(problem.call, tail, kv)
    value = cache_read.values(problem.call, tail, kv)
    is_visible = torch.ones(len(row_slice.tokens), len(tail), dtype=torch.bool)
    return dataclasses.replace(
        inputs,
        key=torch.cat([inputs.key, key]),
        value=torch.cat([inputs.value, value]),
        visible=torch.cat([inputs.visible, is_visible], 1),
    )


def _tail_leaked(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    """Multiply the values after the last cached token by weights of 0; 0 · NaN is NaN."""
    with_tail = _tail_attended(problem, row_slice, inputs)
    in_tail = torch.arange(with_tail.key.shape[0]) >= inputs.key.shape[0]
    return dataclasses.replace(
        with_tail,
        key=with_tail.key.masked_fill(in_tail[:, None, None], 0.0),
        visible=with_tail.visible & ~in_tail,
        leak=in_tail.expand_as(with_tail.visible),
    )


def _freed_leaked(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Multiply the values of freed blocks by weights of 0; 0 · NaN is NaN."""
    count = _freed_keys(problem, row_slice.seq)
    if not count:
        return inputs
    freed, value = torch.arange(count), inputs.value.clone()
    kv = problem.kv_heads_of(row_slice.heads)
    value[freed] = problem.cache_read(row_slice.seq).values(problem.call, freed, kv)
    is_freed = torch.arange(inputs.key.shape[0]) < count
    return dataclasses.replace(
        inputs, value=value, leak=(is_freed & ~inputs.visible).expand_as(inputs.visible)
    )


def _freed_keys(problem: Problem, seq: int) -> int:
    """Return how many keys of a sequence were in blocks that the window has freed and that are empty."""
    case = problem.case
    if case is None or case.freed != "empty":
        return 0
    return freed_blocks(case)[seq] * case.block_size


TOKENS = (
    Defect(
        name="context_only",
        family="tokens",
        text="rows attend to the context but not to the new tokens",
        seen_in=("nano-vllm #213",),
        touches="all",
        compute=changing_inputs(_context_only),
        applies=always,
    ),
    Defect(
        name="new_tokens_only",
        family="tokens",
        text="rows attend to the new tokens but not to the context",
        seen_in=("nano-vllm #213",),
        touches="all",
        compute=changing_inputs(_new_tokens_only),
        applies=lambda problem: any(_ctx_len(problem, seq) > 0 for seq in range(problem.num_seqs)),
    ),
    Defect(
        name="tail_attended",
        family="tokens",
        text="rows attend to the slots after the sequence's last cached token, up to the end of the block",
        seen_in=("nano-vllm #213", "torch-spyre #4517"),
        touches="cached",
        compute=changing_inputs(_tail_attended),
        applies=has_partial_block,
    ),
    Defect(
        name="tail_leaked",
        family="tokens",
        text="values after the sequence's last cached token are multiplied by weight 0 instead of being "
        "skipped, so a NaN there reaches the output",
        seen_in=("vllm #641", "vllm #53856", "Dao-AILab/flash-attention #1745", "flashinfer #941"),
        touches="cached",
        compute=changing_inputs(_tail_leaked),
        applies=has_partial_block,
    ),
    Defect(
        name="freed_leaked",
        family="tokens",
        text="values in blocks that the window has freed are multiplied by weight 0 instead of being "
        "skipped, so a NaN there reaches the output",
        seen_in=("vllm #641", "vllm #53856"),
        touches="cached",
        compute=changing_inputs(_freed_leaked),
        applies=lambda problem: any(_freed_keys(problem, seq) for seq in range(problem.num_seqs)),
    ),
)
