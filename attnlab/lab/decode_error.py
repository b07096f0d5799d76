"""Decode the message of a failed assertion: the sequence, token and kernel of a mismatch."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.json import json_value
from attnlab.case.ops import PREFILL
from attnlab.case.shown import Shown
from attnlab.contracts.dispatch import decide
from attnlab.lab.error_answer import (
    ErrorAnswer,
    of_allclose,
    of_cache,
    of_dtypes,
    refusal_sentences,
)
from attnlab.lab.error_text import ErrorText

_LARGEST_VALUE = {"uniform_1e-3": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DecodedError(Shown):
    """The message of a failed assertion, in terms of a Case.

    - ``mismatched``, ``total``, ``max_abs_error``: the numbers of the message; with ``rows_worth`` None if
      the text is only an index.
    - ``row``, ``head``, ``element``: the index of the greatest difference.
    - ``rows_worth``: mismatches divided by the elements of a row; 1.0 is exactly one token.
    - ``seq``, ``token``, ``query_len``, ``ctx_len``: the sequence of that row, and the row's token in it.
    - ``kernel``: the kernel that should have written that row.
    - ``newest``: (position, column of the block table, offset in the block) of the newest token that
      the row attends to; None if its kernel does not read it from the cache.
    - ``largest_possible``: the largest difference that wrong weights of the values could cause; None if
      the values have no bound.
    - ``refusal``: why a pytest id in the text did not become the Case, or "".
    """

    mismatched: int | None
    total: int | None
    max_abs_error: float | None
    row: int
    head: int
    element: int
    rows_worth: float | None
    seq: int
    token: int
    query_len: int
    ctx_len: int
    kernel: str
    newest: tuple[int, int, int] | None
    largest_possible: float | None
    refusal: str = ""

    def sentences(self) -> list[str]:
        """Return the facts as sentences."""
        which = "its only token" if self.query_len == 1 else f"token {self.token} of its query"
        sentences = [
            f"row {self.row} is sequence {self.seq}, {which} "
            f"(query_len {self.query_len}, ctx_len {self.ctx_len}); head {self.head}, "
            f"element {self.element}",
        ]
        if self.rows_worth is not None:
            sentences.append(
                f"{self.mismatched} of {self.total} elements are "
                f"{self.rows_worth:g} {'row' if self.rows_worth == 1 else 'rows'} of all heads"
            )
        sentences.append(f"{self.kernel} should have written that row")
        if self.newest is not None:
            position, column, offset = self.newest
            sentences.append(
                f"it reads every key from the cache, the newest at position {position}: "
                f"block_table[{self.seq}][{column}], offset {offset}"
            )
        error = self.max_abs_error
        if (
            error is not None
            and self.largest_possible is not None
            and error > self.largest_possible
        ):
            sentences.append(
                f"if the values are within ±{self.largest_possible / 2:g}, as the case's distribution "
                f"has them, wrong weights cause at most {self.largest_possible:g}: {self.max_abs_error:g} "
                "was not computed from them"
            )
        return sentences + refusal_sentences(self.refusal)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the sentences as values of strict JSON."""
        fields: dict[str, Any] = json_value(dataclasses.asdict(self))
        return {**fields, "sentences": self.sentences()}


def _kernel(case: Case, query_len: int) -> str:
    """Return the kernel that computes the rows of a sequence with ``query_len`` new tokens."""
    kernels = decide(case).kernels
    if PREFILL in kernels and (query_len > 1 or kernels == (PREFILL,)):
        return PREFILL
    return next(name for name in reversed(kernels) if name != PREFILL)


_NO_INDEX = (
    "text must hold an index like (5336, 0, 0), or the lines 'Mismatched elements: … / …' and "
    "'Greatest absolute difference: … at index (…, …, …)' of torch.testing"
)


def _other_size(total: int, shape: tuple[int, int, int]) -> str:
    """Return that a text is about an output of another size, and which flags to add."""
    tokens, heads, size = shape
    rows, rest = divmod(total, heads * size)
    fits = (
        "" if rest else f"; --query-lens with {rows} tokens in all and as many --ctx-lens would fit"
    )
    return (
        f"text must be about an output of {tokens} × {heads} × {size} = {tokens * heads * size} elements, "
        f"as in the case, got {total}{fits}; give the test's own case with --test-id, or --num-heads, "
        "--head-size, --query-lens and --ctx-lens"
    )


def decode_error(text: str, case: Case) -> DecodedError | ErrorAnswer:
    """Return what the text of a failed test means for the Case.

    Raises InvalidCase as :func:`decode`.
    """
    return decode(ErrorText.read(text), case)


def decode(found: ErrorText, case: Case) -> DecodedError | ErrorAnswer:
    """Return the place of an index in the Case's output; without an index, what follows from the text.

    Raises InvalidCase if the text has nothing to decode, or if its counts or its index are of tensors of
    another size than the Case's.
    """
    if found.index is None or (found.greatest is not None and found.total is None):
        if found.dtypes is not None:
            return of_dtypes(found, case)
        if found.has_allclose:
            return of_allclose(found, case)
        raise InvalidCase(_with_refusal(_NO_INDEX, found))
    if case.spec.writes_cache:
        return of_cache(found, case)
    return _place(found, case)


def _with_refusal(text: str, found: ErrorText) -> str:
    """Return the text of an error, with the reason why an id did not become the Case."""
    return "; ".join([text, *refusal_sentences(found.refusal)])


def _place(found: ErrorText, case: Case) -> DecodedError:
    """Return the place of an index in the Case's output."""
    shape = (case.lengths.num_tokens, case.num_heads, case.head_size)
    mismatched, total, index = found.mismatched, found.total, found.index
    if total is not None and total != shape[0] * shape[1] * shape[2]:
        raise InvalidCase(_with_refusal(_other_size(total, shape), found))
    if index is None or len(index) != 3 or any(n >= m for n, m in zip(index, shape, strict=True)):
        raise InvalidCase(
            _with_refusal(f"text must give an index inside {shape}, got {index}", found)
        )
    row, head, element = index
    seq, token = case.lengths.locate(row)
    query_len, ctx_len = case.lengths.query_lens[seq], case.lengths.ctx_lens[seq]
    decode = decide(case).decode
    source = case.spec.new_tokens_from
    from_cache = source == "cache" or (query_len == 1 and decode is not None)
    position = ctx_len + token
    newest = (position, position // case.block_size, position % case.block_size)
    largest = _LARGEST_VALUE.get(case.distribution)
    return DecodedError(
        mismatched=mismatched,
        total=total,
        max_abs_error=found.greatest,
        row=row,
        head=head,
        element=element,
        rows_worth=None if mismatched is None else mismatched / (case.num_heads * case.head_size),
        seq=seq,
        token=token,
        query_len=query_len,
        ctx_len=ctx_len,
        kernel=_kernel(case, query_len),
        newest=newest if from_cache else None,
        largest_possible=None if largest is None else 2 * largest,
        refusal=found.refusal,
    )
