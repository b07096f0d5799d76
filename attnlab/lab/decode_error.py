"""Decode the message of a failed assertion: the sequence, token and kernel of a mismatch."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.json import json_value
from attnlab.case.ops import PREFILL
from attnlab.case.platforms import PLATFORMS
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

    - ``mismatched``, ``total``, ``max_abs_error``: the numbers of the message, None if it does not have
      them; ``rows_worth`` is None without the first.
    - ``row``, ``head``, ``element``: the index of the greatest difference, or the only one of the text.
    - ``rows_worth``: mismatches divided by the elements of a row: 1.0 is as many as one token has. The text
      does not say which elements they are.
    - ``seq``, ``token``, ``query_len``, ``ctx_len``: the sequence of that row, and the row's token in it.
    - ``kernel``: the kernel that should have written that row.
    - ``newest``: (position, column of the block table, offset in the block) of the newest token that
      the row attends to; None if its kernel does not read it from the cache.
    - ``largest_possible``: the largest difference between two averages of the values; None if the values
      have no bound. Weights that do not sum to 1 give no average.
    - ``platform``: whose rules name the kernel; ``platform_by``: where it is from, as for :func:`decode`.
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
    platform: str
    platform_by: str = "case"
    refusal: str = ""

    def sentences(self) -> list[str]:
        """Return the facts as sentences."""
        which = "its only token" if self.query_len == 1 else f"token {self.token} of its query"
        sentences = [
            platform_text(self.platform, self.platform_by),
            f"row {self.row} is sequence {self.seq}, {which} "
            f"(query_len {self.query_len}, ctx_len {self.ctx_len}); head {self.head}, "
            f"element {self.element}",
        ]
        if self.rows_worth is not None:
            rows = f"{self.rows_worth:g} {'row' if self.rows_worth == 1 else 'rows'}"
            sentences.append(
                f"{self.mismatched} of {self.total} elements are as many as {rows} of all heads have; which "
                "rows they are in, the text does not say"
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
                f"has them, two averages of values differ by at most {self.largest_possible:g}; with "
                f"{self.max_abs_error:g}, the row of the output or the expected one is no average: it was "
                "not written, its weights do not sum to 1, or it holds other numbers"
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
    "text must hold an index like (5336, 0, 0), or 'index (5336, 0, 0)' with 'Mismatched elements: … / …' or "
    "'Greatest absolute difference: …', as torch.testing prints them, in any order"
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


def platform_text(platform: str, platform_by: str) -> str:
    """Return the platform whose rules an answer follows, and where it is from, as for :func:`decode`."""
    name = f"{platform} ({PLATFORMS[platform].example})"
    if platform_by == "assumed":
        return (
            f"platform {name} is assumed: no GPU is seen here, and the text names none; change it "
            "with --platform"
        )
    where = {"case": "of the case", "machine": "of this machine's GPU"}[platform_by]
    return f"platform {name}, {where}"


def decode(
    found: ErrorText, case: Case, *, platform_by: str = "case"
) -> DecodedError | ErrorAnswer:
    """Return the place of an index in the Case's output; without an index, what follows from the text.

    ``platform_by``: where the Case's platform is from: "case" (the user), "machine" (its GPU), or "assumed".
    Raises InvalidCase if the text has nothing to decode, or if its counts or its index are of tensors of
    another size than the Case's.
    """
    if found.index is not None and not case.spec.writes_cache:
        return dataclasses.replace(_place(found, case), platform_by=platform_by)
    if found.index is not None:
        answer = of_cache(found, case)
    elif found.dtypes is not None:
        answer = of_dtypes(found, case)
    elif found.has_allclose:
        answer = of_allclose(found, case)
    else:
        raise InvalidCase(_with_refusal(_NO_INDEX, found))
    first = platform_text(case.platform, platform_by)
    return dataclasses.replace(answer, facts=(first, *answer.facts))


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
        platform=case.platform,
        refusal=found.refusal,
    )
