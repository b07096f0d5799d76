"""Probes: what an output depends on that it must not, found by running the same Case again.

No theory is needed: a row whose bits follow the output buffer was not written, a row whose bits follow
slots that nobody wrote reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.tensors.call import make_output

Rerun = Callable[[Case], torch.Tensor]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What the runs told.

    - ``unwritten``: [n] int64, rows that nobody writes: they hold what the buffer held, in two runs
      with different contents.
    - ``by_slots``: [n] int64, rows that depend on what slots hold that nobody wrote: on two finite
      contents, or on NaN.
    - ``by_finite_slots``: those of them that two finite contents alone give away.
    """

    unwritten: torch.Tensor
    by_slots: torch.Tensor
    by_finite_slots: torch.Tensor


def probe(rerun: Rerun, case: Case, output: torch.Tensor) -> Probes:
    """Run the Case with other contents of the buffer and of empty slots, and compare the bits.

    ``rerun`` returns the output of a Case, [num_tokens, num_heads, head_size]; ``output`` is what it
    gave for ``case`` itself. Heads and sequences that the Case leaves out are not looked at.
    """
    heads = case.query_heads
    ran = slice(None) if heads is None else slice(heads.start, heads.stop)
    other = case.replace(output_init="zeros" if case.output_init == "recycled" else "recycled")
    kept = rows_equal(output[:, ran], make_output(case)[:, ran])
    kept &= rows_equal(rerun(other)[:, ran], make_output(other)[:, ran])
    fills = {
        empty: (output if empty == case.empty_slots else rerun(case.replace(empty_slots=empty)))[
            :, ran
        ]
        for empty in ("zeros", "garbage", "nan")
    }
    finite = ~rows_equal(fills["zeros"], fills["garbage"])
    nan = ~rows_equal(fills["zeros"], fills["nan"])
    return Probes(
        unwritten=_indices(kept, case),
        by_slots=_indices(finite | nan, case),
        by_finite_slots=_indices(finite, case),
    )


def rows_equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which rows hold the same bits, [num_tokens] bool; NaN equals itself, -0.0 is not 0.0."""
    bits = _BITS[one.element_size()]
    same: torch.Tensor = (one.contiguous().view(bits) == other.contiguous().view(bits)).flatten(1)
    return same.all(1)


def _indices(rows: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the rows that are true, of the sequences that ran."""
    found = torch.nonzero(rows).flatten()
    ran = case.query_rows
    return found if ran is None else found[(found >= ran.start) & (found < ran.stop)]
