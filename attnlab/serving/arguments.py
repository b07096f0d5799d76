"""The arguments of an op against the batch: lengths, and what it reads from the cache."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from attnlab.case.errors import InvalidCall
from attnlab.serving.batch import ReadArguments, Step
from attnlab.serving.intent import Contradiction
from attnlab.serving.requests import Integers
from attnlab.tensors.cache_layout import find_layout

Host = Callable[[torch.Tensor], Integers]


def block_size_of(fields: Mapping[str, Any], layout: str | None) -> int:
    """Return the tokens per block of the cache that an op got. Raises InvalidCall if it is not clear."""
    cache = fields["key_cache"]
    layout = fields.get("layout") or layout or find_layout(fields["query"], cache)
    axis = {"x-split": 3, "flash": 1, "HND": 2}[layout]
    if cache.dim() <= axis:
        raise InvalidCall(f"key_cache must have more than {axis} dimensions, got {cache.dim()}")
    return int(cache.shape[axis])


def read_arguments_of(
    fields: Mapping[str, Any], layout: str | None, host: Host, first: int
) -> ReadArguments:
    """Return what an op reads from the cache. ``first``: the row of the batch that is its row 0."""
    starts = fields.get("query_start_loc")
    seq_lens = host(fields["seq_lens"])
    return ReadArguments(
        block_table=host(fields["block_table"]),
        seq_lens=seq_lens,
        query_lens=np.diff(host(starts)) if isinstance(starts, torch.Tensor) else None,
        block_size=block_size_of(fields, layout),
        sliding_window=int(fields.get("sliding_window") or 0),
        first=first,
    )


def first_row(seq_lens: torch.Tensor, of_batch: torch.Tensor | None, num_reqs: int) -> int | None:
    """Return the row of the batch that is row 0 of an op's ``seq_lens``; None if unknown.

    ``of_batch``: those of the batch's metadata. A backend that splits its batch passes a slice of them.
    """
    if of_batch is not None and seq_lens.dtype == of_batch.dtype:
        distance = seq_lens.data_ptr() - of_batch.data_ptr()
        if 0 <= distance < of_batch.numel() * of_batch.element_size():
            return distance // of_batch.element_size()
    return 0 if len(seq_lens) >= num_reqs else None


def wrong_lengths(step: Step, reads: ReadArguments) -> Iterator[tuple[int, Contradiction]]:
    """Yield, for each row, the lengths that differ from those of the scheduler's batch."""
    rows = min(len(reads.seq_lens), len(step.requests) - reads.first)
    for row in range(rows):
        seq = reads.first + row
        pairs = [("seq_lens", int(step.seq_lens[seq]), int(reads.seq_lens[row]))]
        if reads.query_lens is not None:
            query_len = int(reads.query_lens[row])
            pairs.append(("query_start_loc", int(step.query_lens[seq]), query_len))
        for argument, intended, given in pairs:
            if intended != given:
                yield (
                    seq,
                    Contradiction(argument=argument, intended=intended, given=given),
                )


def wrong_maxima(fields: Mapping[str, Any], reads: ReadArguments) -> Iterator[Contradiction]:
    """Yield max_query_len and max_seq_len if a sequence is longer."""
    lens = {"max_seq_len": reads.seq_lens, "max_query_len": reads.query_lens}
    for argument, values in lens.items():
        given = fields.get(argument)
        if type(given) is int and values is not None and len(values) and given < int(values.max()):
            yield Contradiction(argument=argument, intended=int(values.max()), given=given)
