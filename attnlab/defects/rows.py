"""Defects of which output rows are written, and with whose result."""

import dataclasses
import itertools

import torch

from attnlab.defects.attention_inputs import Mixed
from attnlab.defects.defect import Defect, always
from attnlab.defects.problem import Scene, Spot


def _constant(scene: Scene, spot: Spot, output: torch.Tensor) -> Mixed:
    """Return rows whose bits are known: nothing is rounded on the way."""
    return Mixed(output=output.double(), noise=torch.zeros(output.shape, dtype=torch.float64))


def _kept(scene: Scene, rows: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return what the buffer held in some rows before the call; NaN where that is not known."""
    if scene.before is None:
        return torch.full((len(rows), len(heads), scene.call.query.shape[2]), torch.nan)
    return scene.before[rows][:, heads]


def _never_written(scene: Scene, spot: Spot) -> Mixed:
    return _constant(scene, spot, _kept(scene, scene.rows(spot), spot.heads))


def _one_row_late(scene: Scene, spot: Spot) -> Mixed:
    rows = (scene.rows(spot) - 1) % scene.call.query.shape[0]
    return scene.right_rows(rows, spot.heads)


def _on_sequence_0(scene: Scene, spot: Spot) -> Mixed:
    """Write every sequence to the rows of sequence 0, one after the other; the last one stays."""
    starts = scene.starts()
    if spot.seq != 0:
        return _never_written(scene, spot)
    parts = []
    for token in spot.tokens.tolist():
        last = max(seq for seq in range(scene.num_seqs) if scene.query_len(seq) > token)
        parts.append(starts[last] + token)
    return scene.right_rows(torch.tensor(parts, dtype=torch.int64), spot.heads)


def _zeros(scene: Scene, spot: Spot) -> Mixed:
    shape = (len(spot.tokens), len(spot.heads), scene.call.query.shape[2])
    return _constant(scene, spot, torch.zeros(shape))


def _start_loc_as_int32(scene: Scene, spot: Spot) -> Mixed:
    """Decode as ROCm's kernel does that reads an int64 query_start_loc as int32.

    It writes, for each sequence whose misread length is 1, one row: the query at the misread start
    attending to that sequence's cache. Other rows of decode sequences stay unwritten.
    """
    starts = scene.call.query_start_loc.long().view(torch.int32)[: scene.num_seqs + 1].tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    writers = {starts[seq]: seq for seq, length in enumerate(lengths) if length == 1}
    right = _never_written(scene, spot) if scene.is_decode(spot.seq) else scene.right(spot)
    output, noise = right.output.clone(), right.noise.clone()
    for i, row in enumerate(scene.rows(spot).tolist()):
        if row in writers:
            one = dataclasses.replace(spot, tokens=spot.tokens[i : i + 1])
            wrong = _decoded(scene, one, writers[row])
            output[i], noise[i] = wrong.output[0], wrong.noise[0]
    return Mixed(output=output, noise=noise)


def _decoded(scene: Scene, spot: Spot, seq: int) -> Mixed:
    """Return a row whose query attends to all that the cache holds of another sequence."""
    there = scene.sight(
        Spot(seq=seq, tokens=torch.tensor([scene.query_len(seq) - 1]), heads=spot.heads)
    )
    positions = torch.arange(scene.seq_len(seq))
    reading, kv = scene.reading(seq), scene.kv_of(spot.heads)
    own = scene.call.query[scene.rows(spot)][:, spot.heads].double()
    sight = dataclasses.replace(
        there,
        query=own,
        key=scene.stored_key(reading, positions, kv),
        value=scene.stored_value(reading, positions, kv),
    )
    return scene.mix(sight)


def _knows_buffer(scene: Scene) -> bool:
    return scene.before is not None


ROWS = (
    Defect(
        name="query_start_loc_as_int32",
        family="rows",
        text="the decode kernel reads the bytes of an int64 query_start_loc as int32, finds other "
        "lengths, and writes the rows of no sequence or of the wrong one",
        seen_in=("vllm #28424", "vllm #28905"),
        touches="decode",
        compute=_start_loc_as_int32,
        applies=lambda scene: (
            _knows_buffer(scene)
            and scene.call.query_start_loc.dtype == torch.int64
            and any(scene.is_decode(seq) for seq in range(scene.num_seqs))
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
        applies=lambda scene: scene.call.query.shape[0] > 1,
    ),
    Defect(
        name="folded_on_sequence_0",
        family="rows",
        text="every sequence is written to the rows of sequence 0, the others keep what the buffer held",
        seen_in=("vllm-project/flash-attention #176",),
        touches="all",
        compute=_on_sequence_0,
        applies=lambda scene: scene.num_seqs > 1 and _knows_buffer(scene),
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
