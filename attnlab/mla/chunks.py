"""The chunks in which the context of a batch is attended (path prefill)."""

from dataclasses import dataclass
from itertools import count

from attnlab.mla.mla_case import ALIGNED, MlaCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Keys ``start`` … ``end`` − 1 of the context of sequence ``seq``; the span is empty if they are
    equal."""

    seq: int
    start: int
    end: int

    @property
    def continues(self) -> bool:
        """Answer whether a chunk before has the beginning of the context."""
        return self.start > 0


def chunks_of(case: MlaCase) -> list[list[Span]]:
    """Return the spans of each chunk of a case."""
    return _aligned(case) if case.chunking == ALIGNED else _packed(case)


def _aligned(case: MlaCase) -> list[list[Span]]:
    """Return chunks of the same positions of all sequences, some empty (0.11.2)."""
    size = case.chunk_rows
    found: list[list[Span]] = []
    for first in count(0, size):
        if first >= max(case.ctx_lens):
            return found
        found.append(
            [
                Span(seq=seq, start=min(first, ctx_len), end=min(first + size, ctx_len))
                for seq, ctx_len in enumerate(case.ctx_lens)
            ]
        )
    raise AssertionError("count does not end")


def _packed(case: MlaCase) -> list[list[Span]]:
    """Return chunks of up to chunk_rows tokens of several sequences, none empty (0.33.0).

    A context that does not fit is cut at a multiple of block_size, and continues in the next chunk.
    """
    found: list[list[Span]] = []
    spans: list[Span] = []
    left = case.chunk_rows

    def close() -> None:
        nonlocal spans, left
        if spans:
            found.append(spans)
        spans, left = [], case.chunk_rows

    for seq, ctx_len in enumerate(case.ctx_lens):
        if not ctx_len:
            close()  # a chunk has neighbouring sequences
        start = 0
        while start < ctx_len:
            fits = ctx_len - start <= left
            most = min(left, ctx_len - start - 1)
            length = ctx_len - start if fits else most // case.block_size * case.block_size
            if length:
                spans.append(Span(seq=seq, start=start, end=start + length))
                left -= length
                start += length
            if start < ctx_len:
                close()
    close()
    return found
