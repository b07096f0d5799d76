"""Compare what two ops return in addition to their output: the log-sum-exp, and the rows of padding.

A later merge weights an output by its LSE. A wrong LSE, or NaN in it, makes a correct output useless.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.json import json_number
from attnlab.case.ops import MERGE
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.lab.reference import stored_tokens
from attnlab.lab.rounding import Rounding
from attnlab.tensors.batch import Batch
from attnlab.tensors.call import KernelCall

LSE, PADDING = "lse", "padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideError:
    """What is wrong with a side output, and the first place.

    - ``subject``: "lse" for the log-sum-exp of the batch's rows, "padding" for the rows of padding.
    - ``row``, ``head``: the first wrong place; a row of padding counts from the first of them.
    - ``quantity``: "lse" or "output", which one is wrong there; ``value`` is what it is, ``expected`` what
      it must be.
    - ``rows``: the number of wrong rows.
    """

    subject: str
    row: int
    head: int
    quantity: str
    value: float
    expected: float
    rows: int

    def short(self) -> str:
        """Return which side output is wrong, in a few words."""
        name = "padding" if self.subject == PADDING else "log-sum-exp"
        return f"{name} wrong in {self.rows} {'row' if self.rows == 1 else 'rows'}"

    def text(self) -> str:
        """Return the first error as one sentence, with the number of wrong rows."""
        names = {"lse": "the log-sum-exp", "output": "the output"}
        where = f"row {self.row}, head {self.head}"
        if self.subject == PADDING:
            where = f"padding row {self.row}, whose parts are both empty, head {self.head},"
        return (
            f"{names[self.quantity]} of {where} is {self.value:.6g}, not {self.expected:.6g} "
            f"({self.rows} wrong {'row' if self.rows == 1 else 'rows'})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        fields = dataclasses.asdict(self)
        return {**fields, "value": json_number(self.value), "expected": json_number(self.expected)}


def side_errors(
    case: Case,
    lse: torch.Tensor | None,
    padded: torch.Tensor | None,
    expected_lse: Callable[[Case], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[SideError, ...]:
    """Return the errors of the side outputs that an op returned; None is one that it does not return.

    ``expected_lse`` returns the right LSE of a Case and its bound, each [num_tokens, num_heads].
    """
    errors: list[SideError | None] = []
    if lse is not None:
        expected, bound = (tensor.to(lse.device) for tensor in expected_lse(case))
        errors.append(lse_error(case, lse, expected, bound))
    if padded is not None:
        errors.append(padding_error(case, padded, lse))
    return tuple(error for error in errors if error is not None)


def lse_error(
    case: Case, lse: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> SideError | None:
    """Return how an LSE [rows, num_heads] is off by more than ``bound``, or None.

    ``expected``, ``bound``: [num_tokens, num_heads]. Rows of padding, and rows and heads that the Case does
    not run, are not compared.
    """
    error = (lse[: len(expected)].double() - expected).abs().nan_to_num(torch.inf, torch.inf)
    wrong = error > bound
    ran = torch.zeros_like(wrong)
    rows, heads = case.query_rows, case.query_heads
    ran[_slice(rows), _slice(heads)] = True
    return _error(LSE, "lse", wrong & ran, lse, expected)


def padding_error(case: Case, padded: torch.Tensor, lse: torch.Tensor | None) -> SideError | None:
    """Return what is wrong with the rows of padding of a merge, whose parts are both empty, or None.

    ``padded``: [n, num_heads, head_size]; the last n rows of ``lse`` belong to them. Such a row must be 0
    with an LSE of -inf, so that a further merge ignores it: vLLM's CUDA kernel does so since 0.11.1
    (csrc/attention/merge_attn_states.cu), its Triton kernel since 0.27.
    """
    if case.op != MERGE:
        return None
    zeros = padded.new_zeros(padded.shape[:2])
    at = (padded != 0).int().argmax(2, keepdim=True)  # the first element that is not 0
    values = padded.gather(2, at)[..., 0]
    error = _error(PADDING, "output", (padded != 0).any(2), values, zeros)
    if error is not None or lse is None:
        return error
    logs = lse[-len(padded) :]
    return _error(PADDING, "lse", logs != -torch.inf, logs, torch.full_like(logs, -torch.inf))


def lse_bound(case: Case, batch: Batch, call: KernelCall, expected: torch.Tensor) -> torch.Tensor:
    """Return by how much a kernel's LSE may be off, [num_tokens, num_heads] in the dtype of ``expected``.

    ``expected``: the right LSE, [num_tokens, num_heads]. Scores are off by at most s, so the LSE is off by
    s; n products and sums of float32 add (n + 8)·2⁻²³; rounding the result, and its two parts in a merge,
    adds 3·2⁻²⁴ of it.
    """
    rounding = Rounding.of(call, Target.of(case), decide(case).kernels)
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    slope = 0.0 if batch.alibi_slopes is None else float(batch.alibi_slopes.max())
    added = call.visibility.largest_bias
    rows, tokens = batch.token_start_loc, batch.kv_start_loc
    bound = torch.empty_like(expected)
    for i, cached in enumerate(batch.lengths.cached_lens(case.spec.fill_read)):
        here = slice(rows[i], rows[i + 1])
        key = stored_tokens(case, batch.key[tokens[i] : tokens[i + 1]], cached, case.k_scale)
        query_norm, key_norm = (
            float(t.double().norm(dim=2).max()) for t in (batch.query[here], key)
        )
        error = rounding.score_error(
            query_norm,
            key_norm,
            case.head_size,
            scale,
            slope * len(key) + added,
            case.softcap or 0.0,
        )
        bound[here] = error + (len(key) + 8) * 2.0**-23 + 3 * 2.0**-24 * expected[here].abs()
    return bound


def _slice(span: range | None) -> slice:
    return slice(None) if span is None else slice(span.start, span.stop)


def _error(
    subject: str, quantity: str, wrong: torch.Tensor, values: torch.Tensor, expected: torch.Tensor
) -> SideError | None:
    """Return the error of the places ``wrong`` [rows, num_heads], or None if there are none."""
    places = torch.nonzero(wrong)
    if not len(places):
        return None
    row, head = places[0].tolist()
    return SideError(
        subject=subject,
        row=row,
        head=head,
        quantity=quantity,
        value=float(values[row, head]),
        expected=float(expected[row, head]),
        rows=int(wrong.any(1).sum()),
    )
