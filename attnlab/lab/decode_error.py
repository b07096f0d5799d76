"""Reading an assertion's text: which sequence, token and kernel a mismatch belongs to."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import PREFILL
from attnlab.case.shown import Shown
from attnlab.contracts.dispatch import decide

_COUNT = re.compile(r"Mismatched elements:\s*(\d+)\s*/\s*(\d+)")
_GREATEST = re.compile(
    r"Greatest absolute difference:\s*(\S+)\s+at index\s*\((\d+),\s*(\d+),\s*(\d+)\)"
)
_LARGEST_VALUE = {"uniform_1e-3": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DecodedError(Shown):
    """What an assertion's text says of a Case.

    - ``rows_worth``: mismatches divided by the elements of a row; 1.0 is exactly one token.
    - ``seq``, ``token``, ``query_len``, ``ctx_len``: whose row the greatest difference is in.
    - ``kernel``: which kernel should have written that row.
    - ``newest``: (position, column of the block table, offset in the block) of the newest token that
      the row attends to, where its kernel takes it from the cache.
    - ``largest_possible``: the largest difference that any weighting of the values could make, or None
      where the data has no bound.
    """

    mismatched: int
    total: int
    max_abs_error: float
    row: int
    head: int
    element: int
    rows_worth: float
    seq: int
    token: int
    query_len: int
    ctx_len: int
    kernel: str
    newest: tuple[int, int, int] | None
    largest_possible: float | None

    def sentences(self) -> list[str]:
        """Return what a person wants to know, a sentence each."""
        which = "its only token" if self.query_len == 1 else f"token {self.token} of its query"
        told = [
            f"row {self.row} is sequence {self.seq}, {which} "
            f"(query_len {self.query_len}, ctx_len {self.ctx_len}); head {self.head}, "
            f"element {self.element}",
            f"{self.mismatched} of {self.total} elements are "
            f"{self.rows_worth:g} {'row' if self.rows_worth == 1 else 'rows'} of all heads",
            f"{self.kernel} should have written that row",
        ]
        if self.newest is not None:
            position, column, offset = self.newest
            told.append(
                f"it takes every key from the cache, the newest at position {position}: "
                f"block_table[{self.seq}][{column}], offset {offset}"
            )
        if self.largest_possible is not None and self.max_abs_error > self.largest_possible:
            told.append(
                f"{self.max_abs_error:g} is more than any weighting of these values can be off "
                f"({self.largest_possible:g}): the row was not computed from them"
            )
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the sentences as JSON-able values."""
        return {**dataclasses.asdict(self), "sentences": self.sentences()}


def decode_error(text: str, case: Case) -> DecodedError:
    """Return what the text of a failed ``torch.testing.assert_close`` says of the Case.

    Raises InvalidCase where the text has no counts or no index, or where they belong to tensors of
    another size than the Case's output.
    """
    count, greatest = _COUNT.search(text), _GREATEST.search(text)
    if count is None or greatest is None:
        raise InvalidCase(
            "text must hold the lines 'Mismatched elements: … / …' and "
            "'Greatest absolute difference: … at index (…, …, …)' of torch.testing"
        )
    mismatched, total = int(count[1]), int(count[2])
    row, head, element = (int(greatest[i]) for i in (2, 3, 4))
    shape = (case.lengths.num_tokens, case.num_heads, case.head_size)
    if total != shape[0] * shape[1] * shape[2]:
        raise InvalidCase(
            f"text must be of an output of {shape[0]} × {shape[1]} × {shape[2]} = "
            f"{shape[0] * shape[1] * shape[2]} elements, as the case gives it, got {total}"
        )
    if row >= shape[0] or head >= shape[1] or element >= shape[2]:
        raise InvalidCase(f"text must give an index inside {shape}, got {(row, head, element)}")
    seq, token = case.lengths.locate(row)
    query_len, ctx_len = case.lengths.query_lens[seq], case.lengths.ctx_lens[seq]
    decode = decide(case).decode
    from_cache = query_len == 1 and decode is not None
    newest = (ctx_len, ctx_len // case.block_size, ctx_len % case.block_size)
    largest = _LARGEST_VALUE.get(case.distribution)
    return DecodedError(
        mismatched=mismatched,
        total=total,
        max_abs_error=float(greatest[1]),
        row=row,
        head=head,
        element=element,
        rows_worth=mismatched / (case.num_heads * case.head_size),
        seq=seq,
        token=token,
        query_len=query_len,
        ctx_len=ctx_len,
        kernel=decode if from_cache and decode else PREFILL,
        newest=newest if from_cache else None,
        largest_possible=None if largest is None else 2 * largest,
    )
