"""Reruns: what an output depends on although it must not, found by running a changed Case.

This needs no candidate: a row that changes with the output buffer was not written, and a row that changes
with unwritten cache slots reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.tensors.case_call import make_output

Rerun = Callable[[Case], torch.Tensor]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """The rows that depend on what they must not, each [n] int64.

    - ``unwritten``: rows that keep the buffer's previous contents, in two runs with different contents.
    - ``on_slots``: rows that change with the contents of unwritten slots, finite or NaN.
    - ``on_finite_slots``: those that change between two finite contents.
    """

    unwritten: torch.Tensor
    on_slots: torch.Tensor
    on_finite_slots: torch.Tensor


def find_dependence(rerun: Rerun, case: Case, output: torch.Tensor) -> Dependence:
    """Run the Case with other contents of the output buffer and of unwritten slots, and compare the bits.

    ``rerun`` returns the output of a Case, [num_tokens, num_heads, head_size]; ``output`` is what it
    returned for ``case``. Heads and sequences that the Case leaves out are ignored.
    """
    heads = case.query_heads
    ran = slice(None) if heads is None else slice(heads.start, heads.stop)
    other = case.replace(output_init="zeros" if case.output_init == "recycled" else "recycled")
    unwritten = rows_equal(output[:, ran], make_output(case)[:, ran])
    unwritten &= rows_equal(rerun(other)[:, ran], make_output(other)[:, ran])
    outputs = {
        fill: output if fill == case.empty_slots else rerun(case.replace(empty_slots=fill))
        for fill in ("garbage", "zeros", "nan")
    }
    on_finite = ~rows_equal(outputs["zeros"][:, ran], outputs["garbage"][:, ran])
    on_nan = ~rows_equal(outputs["zeros"][:, ran], outputs["nan"][:, ran])
    return Dependence(
        unwritten=_rows_that_ran(unwritten, case),
        on_slots=_rows_that_ran(on_finite | on_nan, case),
        on_finite_slots=_rows_that_ran(on_finite, case),
    )


def rows_equal(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return which rows hold the same bits, [num_tokens] bool; NaN equals itself, -0.0 is not 0.0."""
    bits = _BITS[first.element_size()]
    equal: torch.Tensor = first.contiguous().view(bits) == second.contiguous().view(bits)
    return equal.flatten(1).all(1)


def _rows_that_ran(rows: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the indices of the true rows, of the sequences that ran."""
    found = torch.nonzero(rows).flatten()
    ran = case.query_rows
    return found if ran is None else found[(found >= ran.start) & (found < ran.stop)]
