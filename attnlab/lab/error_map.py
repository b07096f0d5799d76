"""ErrorMap: where and by how much an output differs from the reference."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.lengths import Lengths
from attnlab.case.shown import Shown, json_number

# Greatest: the largest error of a comparison and where it is.


@dataclass(frozen=True, slots=True, kw_only=True)
class Greatest:
    """A largest value and the first index (row, head, element) that has it."""

    value: float
    index: tuple[int, int, int]


NONE = Greatest(value=-1.0, index=(0, 0, 0))


def greater(
    best: list[Greatest],
    wrong: torch.Tensor,
    right: torch.Tensor,
    row: int,
    largest: torch.Tensor | None = None,
) -> list[Greatest]:
    """Return the greater of ``best`` and of ``wrong``, absolute and relative to ``right``.

    ``wrong``, ``right``: [rows, heads, head_size]. The greatest of each head is found first: a search of
    all elements at once is slow on a GPU. On a CPU ``vector_norm`` takes 20 times as long as ``amax`` and
    ``amin``. ``largest``: that of ``wrong``, [rows, heads], if it is known.
    """
    relative = wrong / right
    found = []
    for values, known in ((wrong, largest), (relative, None)):
        per_head = _largest(values) if known is None else known
        head = per_head.flatten().argmax()
        elements = values.flatten(0, 1)[head].abs()
        found += [head, elements.argmax(), elements.max()]
    numbers = torch.stack([number.double() for number in found]).tolist()  # one copy from the GPU
    kept = []
    for before, (head, element, value) in zip(best, (numbers[:3], numbers[3:]), strict=True):
        is_greater = value > before.value or (value != value and before.value == before.value)
        index = index_of(int(head) * wrong.shape[2] + int(element), wrong.shape, row)
        kept.append(Greatest(value=value, index=index) if is_greater else before)
    return kept


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each head; NaN if one is NaN. ``aminmax`` is slow on a CPU."""
    if values.device.type == "cpu":
        return torch.maximum(values.amax(2), -values.amin(2))
    low, high = values.aminmax(dim=2)
    return torch.maximum(high, -low)


def index_of(flat: int, shape: torch.Size, row: int) -> tuple[int, int, int]:
    """Return (row, head, element) of a flat index into rows that begin at ``row``."""
    _, heads, head_size = shape
    return row + flat // (heads * head_size), flat // head_size % heads, flat % head_size


# On a CPU few enough rows that no full-size copy is made; on a GPU there is room for one.
_ROWS_AT_A_TIME = {"cpu": 128, "cuda": 1 << 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One output row with mismatches.

    - ``row``: the row of the output; ``token``: the same row, counted from its sequence's first new token.
    - ``heads``: the query heads with a mismatch; ``elements``: the number of mismatches.
    """

    seq: int
    token: int
    row: int
    query_len: int
    heads: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ErrorMap(Shown):
    """Token × head error of an output, in the terms of ``torch.testing.assert_close``.

    - ``heads``, ``rows``: the query heads and the rows that ran, None if all did. The others are not
      compared.
    - ``error``: [num_tokens, num_heads] float32, the largest absolute difference over the head's
      elements; NaN if one is NaN, -inf if the row or head did not run.
    - ``mismatches``: [num_tokens, num_heads] int32, elements outside atol + rtol × |expected|; NaN is
      outside.
    - ``is_derived``: each element had its own atol, its rounding bound; ``atol`` is then the largest.
    - ``greatest_abs``, ``greatest_rel``: over the elements that mismatch, or over all if none does; NaN is
      greater than any number.
    - ``first_index``: (row, head, element) of the first mismatch, or None.
    - ``nan_elements``: the number of NaN elements of the output.
    """

    lengths: Lengths
    head_size: int
    atol: float
    rtol: float
    heads: range | None = None
    rows: range | None = None
    error: torch.Tensor
    mismatches: torch.Tensor
    greatest_abs: Greatest
    greatest_rel: Greatest
    first_index: tuple[int, int, int] | None
    nan_elements: int
    is_derived: bool = False

    @property
    def mismatched(self) -> int:
        """Return the number of elements outside the tolerance."""
        return 0 if self.first_index is None else int(self.mismatches.sum())

    @property
    def total(self) -> int:
        """Return the number of elements that were compared."""
        num_tokens, num_heads = self.mismatches.shape
        rows = len(self.rows if self.rows is not None else range(num_tokens))
        heads = len(self.heads if self.heads is not None else range(num_heads))
        return rows * heads * self.head_size

    @property
    def token_error(self) -> torch.Tensor:
        """Return the largest error of each row, [num_tokens] float32; NaN if one is NaN."""
        return self.error.amax(1)

    def seq_error(self) -> list[float]:
        """Return the largest error of each sequence; NaN if one is NaN."""
        return [float(rows.max()) for rows in self.token_error.split(list(self.lengths.query_lens))]

    def bands(self, per_row: torch.Tensor, height: int = 16) -> torch.Tensor:
        """Return ``per_row`` [num_tokens, …] with ``height`` rows per sequence, whatever its length.

        Each row of the result is the maximum over its part of the sequence's tokens; NaN if one is NaN. So
        a sequence of one token is as tall in a picture as one of a thousand.
        """
        bands = range(height * len(self.lengths.query_lens))
        rows = (self.band_rows(band, height) for band in bands)
        return torch.stack([per_row[part.start : part.stop].amax(0) for part in rows])

    def band_rows(self, band: int, height: int = 16) -> range:
        """Return the output rows of row ``band`` of :meth:`bands`."""
        seq, i = divmod(band, height)
        start, length = sum(self.lengths.query_lens[:seq]), self.lengths.query_lens[seq]
        first, last = length * i // height, length * (i + 1) // height
        return range(start + first, start + max(last, first + 1))

    def places(self) -> list[Place]:
        """Return every row with a mismatch, in order."""
        found = []
        for row in torch.nonzero(self.mismatches.sum(1)).flatten().tolist():
            seq, token = self.lengths.locate(row)
            heads = torch.nonzero(self.mismatches[row]).flatten().tolist()
            found.append(
                Place(
                    seq=seq,
                    token=token,
                    row=row,
                    query_len=self.lengths.query_lens[seq],
                    heads=tuple(heads),
                    elements=int(self.mismatches[row].sum()),
                )
            )
        return found

    def message(self) -> str:
        """Return the message of ``torch.testing.assert_close`` for these tensors; "" if they match.

        Rounding bounds take the place of one allowed difference.
        """
        if not self.mismatched:
            return ""
        exact = self.atol == self.rtol == 0
        share = self.mismatched / self.total
        lines = [
            f"Tensor-likes are not {'equal' if exact else 'close'}!",
            "",
            f"Mismatched elements: {self.mismatched} / {self.total} ({share:.1%})",
        ]
        for name, greatest, allowed in (
            ("absolute", self.greatest_abs, self.atol),
            ("relative", self.greatest_rel, self.rtol),
        ):
            line = f"Greatest {name} difference: {greatest.value} at index {greatest.index}"
            limit = "its rounding bound" if self.is_derived and name == "absolute" else allowed
            lines.append(line if exact else f"{line} (up to {limit} allowed)")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as values of strict JSON."""
        return {
            "mismatched": self.mismatched,
            "total": self.total,
            "max_abs_error": json_number(self.greatest_abs.value),
            "max_index": list(self.greatest_abs.index),
            "first_index": None if self.first_index is None else list(self.first_index),
            "nan_elements": self.nan_elements,
            "heads_run": None if self.heads is None else list(self.heads),
            "rows_run": None if self.rows is None else [self.rows.start, self.rows.stop],
            "atol": json_number(self.atol),
            "atol_is_derived": self.is_derived,
            "rtol": self.rtol,
        }


def compare(
    output: torch.Tensor,
    expected: torch.Tensor,
    lengths: Lengths,
    atol: float | torch.Tensor,
    rtol: float,
    heads: range | None = None,
    rows: range | None = None,
) -> ErrorMap:
    """Return the ErrorMap of ``output`` against ``expected``, both [num_tokens, num_heads, head_size].

    The comparison uses ``expected``'s dtype and works on some rows at a time. ``atol`` is a number, or the
    rounding bound of each element in the shape of ``output``. ``heads`` and ``rows`` limit the comparison
    to these query heads and rows.
    """
    if heads is not None or rows is not None:
        part_of = (as_slice(rows), as_slice(heads))
        part_atol = atol[part_of] if isinstance(atol, torch.Tensor) else atol
        part = compare(output[part_of], expected[part_of], lengths, part_atol, rtol)
        return _embedded(part, heads, rows, output.shape[:2])
    tokens, num_heads, head_size = output.shape
    on_gpu = expected.device.type == "cuda"
    error = torch.empty(tokens, num_heads, pin_memory=on_gpu)
    mismatches = torch.zeros(tokens, num_heads, dtype=torch.int32, pin_memory=on_gpu)
    # Greatest absolute and relative difference, of all elements and of those that mismatch.
    overall, outside = [NONE, NONE], [NONE, NONE]
    first, nans = None, 0
    step = _ROWS_AT_A_TIME[expected.device.type]
    for row in range(0, tokens, step):
        here = slice(row, row + step)
        got, right = output[here], expected[here]
        wrong = _difference(got, right)
        allowed = atol[here] if isinstance(atol, torch.Tensor) else atol
        per_head = largest = wrong.amax(2)
        close = (
            None
            if _all_below(per_head, allowed, rtol)
            else _close(got, right, wrong, allowed, rtol)
        )
        if close is not None and not per_head.isfinite().all():
            per_head = wrong.masked_fill_(close & wrong.isnan(), 0).amax(2)
        error[here] = per_head
        overall = greater(overall, wrong, right, row, largest)
        if close is not None and not close.all():
            mismatches[here] = head_size - close.sum(2, dtype=torch.int32)
            first = first or index_of(int((~close).flatten().int().argmax()), close.shape, row)
            nans += int(got.isnan().sum())
            others = (wrong.masked_fill(close, 0), right.masked_fill(close, 1))
            outside = greater(outside, *others, row)
    greatest_abs, greatest_rel = outside if first else overall
    return ErrorMap(
        lengths=lengths,
        head_size=head_size,
        atol=float(atol.max()) if isinstance(atol, torch.Tensor) else atol,
        rtol=rtol,
        error=error,
        mismatches=mismatches,
        greatest_abs=greatest_abs,
        greatest_rel=greatest_rel,
        first_index=first,
        nan_elements=nans,
        is_derived=isinstance(atol, torch.Tensor),
    )


def _difference(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the magnitude of the difference, in ``right``'s dtype."""
    if got.dtype.itemsize > 1 and got.dtype.itemsize <= right.dtype.itemsize:
        return (got - right).abs_()  # converts as it subtracts, without a copy of ``got``
    return (got.to(right.dtype) - right).abs_()


def as_slice(span: range | None) -> slice:
    """Return the slice of a range; None is everything."""
    return slice(None) if span is None else slice(span.start, span.stop)


def _embedded(
    part: ErrorMap, heads: range | None, rows: range | None, shape: torch.Size
) -> ErrorMap:
    """Return the ErrorMap of some rows and heads as one of all; the others did not run."""
    here = (as_slice(rows), as_slice(heads))
    error = torch.full(shape, float("-inf"))
    mismatches = torch.zeros(shape, dtype=torch.int32)
    error[here], mismatches[here] = part.error, part.mismatches
    first_row, first_head = (0 if span is None else span.start for span in (rows, heads))

    def moved(index: tuple[int, int, int]) -> tuple[int, int, int]:
        return index[0] + first_row, index[1] + first_head, index[2]

    return dataclasses.replace(
        part,
        heads=heads,
        rows=rows,
        error=error,
        mismatches=mismatches,
        greatest_abs=dataclasses.replace(part.greatest_abs, index=moved(part.greatest_abs.index)),
        greatest_rel=dataclasses.replace(part.greatest_rel, index=moved(part.greatest_rel.index)),
        first_index=None if part.first_index is None else moved(part.first_index),
    )


def _all_below(per_head: torch.Tensor, allowed: float | torch.Tensor, rtol: float) -> bool:
    """Return whether one number bounds every error, which spares a comparison of the elements."""
    if isinstance(allowed, torch.Tensor) or rtol or not math.isfinite(allowed):
        return False
    return bool((per_head <= allowed).all())


def _close(
    got: torch.Tensor,
    right: torch.Tensor,
    wrong: torch.Tensor,
    allowed: float | torch.Tensor,
    rtol: float,
) -> torch.Tensor:
    """Return which elements are within the tolerance; equal infinities are, other infinities are not."""
    close = wrong <= (allowed + rtol * right.abs() if rtol else allowed)
    return (got.to(right.dtype) == right) | (wrong.isfinite() & close)
