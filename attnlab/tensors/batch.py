"""Batch: ragged sequences with their query, key and value."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths
from attnlab.case.shown import Shown
from attnlab.tensors.formats import FORMATS

SINK_RANGE = (1.0, 6.0)
_CHUNK = 1 << 22  # elements drawn at a time in float32, so that float16 needs no second full copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Batch(Shown):
    """New tokens and context of several sequences.

    - ``query``: [num_tokens, num_heads, head_size], the new tokens of sequence 0, then 1, …
    - ``key``, ``value``: [sum(seq_lens), num_kv_heads, head_size], all tokens of sequence 0 (context,
      then new), then of sequence 1, …
    - ``alibi_slopes``: [num_heads] float32, or None.
    - ``sinks``: [num_heads] float32, the logit of each query head's sink, or None.
    """

    lengths: Lengths
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None = None

    @property
    def kv_start_loc(self) -> list[int]:
        """Return where each sequence begins in ``key`` and ``value``; length num_seqs + 1."""
        return [0, *accumulate(self.lengths.seq_lens)]

    @property
    def token_start_loc(self) -> list[int]:
        """Return where each sequence begins in ``query``; length num_seqs + 1."""
        return [0, *accumulate(self.lengths.query_lens)]

    def new_rows(self) -> torch.Tensor:
        """Return the rows of ``key`` that are new tokens, in the order of ``query``; [num_tokens]."""
        starts = self.kv_start_loc
        return torch.cat(
            [
                torch.arange(start + ctx_len, end)
                for start, end, ctx_len in zip(
                    starts, starts[1:], self.lengths.ctx_lens, strict=False
                )
            ]
        )


def make_batch(case: Case, device: str = "cpu") -> Batch:
    """Draw the Case's batch, and put it on ``device``; the same Case gives the same bits on the same
    torch version.

    The lengths are those of vLLM's test to the number; the numbers are of the same distribution, but
    not the test's own, which a GPU's generator draws.
    """
    lengths, dtype = case.lengths, FORMATS[case.dtype].dtype
    kv_shape = (sum(lengths.seq_lens), case.num_kv_heads, case.head_size)
    return Batch(
        lengths=lengths,
        query=_draw((lengths.num_tokens, case.num_heads, case.head_size), dtype, case, 0).to(
            device
        ),
        key=_draw(kv_shape, dtype, case, 1).to(device),
        value=_draw(kv_shape, dtype, case, 2).to(device),
        alibi_slopes=alibi_slopes(case.num_heads).to(device) if case.alibi else None,
        sinks=sink_logits(case.num_heads, case.seed).to(device) if case.sinks else None,
    )


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return the ALiBi slope of each head, [num_heads] float32 (Press et al. 2022, appendix).

    For a power of two, 2^(-8 (h + 1) / num_heads). Otherwise the slopes of the power of two below,
    then every second slope of the power of two above, as many as are missing.
    """
    below = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    rest = [2.0 ** (-4 * (2 * h + 1) / below) for h in range(num_heads - below)]
    return torch.tensor(first + rest, dtype=torch.float32)


def sink_logits(num_heads: int, seed: int) -> torch.Tensor:
    """Return the logit of each query head's attention sink, [num_heads] float32.

    They lie between 1 and 6, evenly apart, in an order drawn from ``seed``: below and above the largest
    score of N(0, 1) data at the usual scale, and no head's is that of its neighbour. Each is a bfloat16
    number, the dtype in which gpt-oss keeps them, so that a kernel may take either dtype.
    """
    generator = torch.Generator().manual_seed((seed << 24) + (3 << 20))
    order = torch.randperm(num_heads, generator=generator)
    beside = torch.rand(1, generator=generator)
    low, high = SINK_RANGE
    logits = low + (high - low) * (order + beside) / num_heads
    return logits.to(torch.bfloat16).float()


def _draw(shape: tuple[int, ...], dtype: torch.dtype, case: Case, salt: int) -> torch.Tensor:
    """Return a tensor drawn in float32 and rounded to ``dtype``.

    Each chunk has a generator of its own, so that the bits do not depend on how many cores draw.
    """
    drawn = torch.empty(shape, dtype=dtype)
    chunks = drawn.view(-1).split(_CHUNK)

    def draw(i: int) -> None:
        generator = torch.Generator().manual_seed((case.seed << 24) + (salt << 20) + i)
        numbers = torch.empty(chunks[i].shape, dtype=torch.float32)
        if case.distribution == "normal":
            numbers.normal_(generator=generator)
        else:
            numbers.uniform_(-1e-3, 1e-3, generator=generator)
        chunks[i].copy_(numbers)

    with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
        list(pool.map(draw, range(len(chunks))))
    return drawn
