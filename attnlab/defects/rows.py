"""Defects of which output rows are written, and with whose result."""

import dataclasses
import itertools

import torch

from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.defect import Defect, always
from attnlab.defects.problem import Problem, RowSlice


def _constant(problem: Problem, row_slice: RowSlice, output: torch.Tensor) -> Predicted:
    """Return rows whose bits are known: nothing is rounded on the way."""
    return Predicted(output=output.double(), noise=torch.zeros(output.shape, dtype=torch.float64))


def _kept(problem: Problem, rows: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return what the buffer held in some rows before the call; NaN where that is not known."""
    if problem.before is None:
        return torch.full((len(rows), len(heads), problem.call.query.shape[2]), torch.nan)
    return problem.before[rows][:, heads]


def _never_written(problem: Problem, row_slice: RowSlice) -> Predicted:
    return _constant(problem, row_slice, _kept(problem, problem.rows(row_slice), row_slice.heads))


def _one_row_late(problem: Problem, row_slice: RowSlice) -> Predicted:
    rows = (problem.rows(row_slice) - 1) % problem.call.query.shape[0]
    return problem.right_rows(rows, row_slice.heads)


def _on_sequence_0(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Write every sequence to the rows of sequence 0, one after the other; the last one stays."""
    starts = problem.starts()
    if row_slice.seq != 0:
        return _never_written(problem, row_slice)
    parts = []
    for token in row_slice.tokens.tolist():
        last = max(seq for seq in range(problem.num_seqs) if problem.query_len(seq) > token)
        parts.append(starts[last] + token)
    return problem.right_rows(torch.tensor(parts, dtype=torch.int64), row_slice.heads)


def _zeros(problem: Problem, row_slice: RowSlice) -> Predicted:
    shape = (len(row_slice.tokens), len(row_slice.heads), problem.call.query.shape[2])
    return _constant(problem, row_slice, torch.zeros(shape))


def _start_loc_as_int32(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Decode as ROCm's kernel does that reads an int64 query_start_loc as int32.

    It writes, for each sequence whose misread length is 1, one row: the query at the misread start
    attending to that sequence's cache. Other rows of decode sequences stay unwritten.
    """
    starts = problem.call.query_start_loc.long().view(torch.int32)[: problem.num_seqs + 1].tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    writers = {starts[seq]: seq for seq, length in enumerate(lengths) if length == 1}
    right = (
        _never_written(problem, row_slice)
        if problem.is_decode(row_slice.seq)
        else problem.right(row_slice)
    )
    output, noise = right.output.clone(), right.noise.clone()
    for i, row in enumerate(problem.rows(row_slice).tolist()):
        if row in writers:
            one = dataclasses.replace(row_slice, tokens=row_slice.tokens[i : i + 1])
            wrong = _decoded(problem, one, writers[row])
            output[i], noise[i] = wrong.output[0], wrong.noise[0]
    return Predicted(output=output, noise=noise)


def _decoded(problem: Problem, row_slice: RowSlice, seq: int) -> Predicted:
    """Return a row whose query attends to all that the cache holds of another sequence."""
    there = problem.sight(
        RowSlice(seq=seq, tokens=torch.tensor([problem.query_len(seq) - 1]), heads=row_slice.heads)
    )
    positions = torch.arange(problem.seq_len(seq))
    reading, kv = problem.reading(seq), problem.kv_of(row_slice.heads)
    own = problem.call.query[problem.rows(row_slice)][:, row_slice.heads].double()
    sight = dataclasses.replace(
        there,
        query=own,
        key=problem.stored_key(reading, positions, kv),
        value=problem.stored_value(reading, positions, kv),
    )
    return problem.mix(sight)


def _knows_buffer(problem: Problem) -> bool:
    return problem.before is not None


ROWS = (
    Defect(
        name="query_start_loc_as_int32",
        family="rows",
        text="the decode kernel reads the bytes of an int64 query_start_loc as int32, finds other "
        "lengths, and writes the rows of no sequence or of the wrong one",
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
        text="rows are written by nobody and keep what the buffer held",
        seen_in=("vllm #28490", "vllm #28905"),
        touches="unwritten",
        compute=_never_written,
        applies=_knows_buffer,
        links=("unwritten_rows",),
    ),
    Defect(
        name="rows_one_late",
        family="rows",
        text="every row is written one row too late",
        seen_in=("vllm #57094",),
        touches="all",
        compute=_one_row_late,
        applies=lambda problem: problem.call.query.shape[0] > 1,
    ),
    Defect(
        name="folded_on_sequence_0",
        family="rows",
        text="every sequence is written to the rows of sequence 0, the others keep what the buffer held",
        seen_in=("vllm-project/flash-attention #176",),
        touches="all",
        compute=_on_sequence_0,
        applies=lambda problem: problem.num_seqs > 1 and _knows_buffer(problem),
    ),
    Defect(
        name="rows_zero",
        family="rows",
        text="rows are zero",
        seen_in=("vllm #43990",),
        touches="all",
        compute=_zeros,
        applies=always,
    ),
)
