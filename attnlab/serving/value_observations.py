"""Observations of wrong values: which request and position a wrong row of an output belongs to."""

from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnlab.serving.batch import Step
from attnlab.serving.observation import Observation
from attnlab.serving.requests import Request
from attnlab.serving.value_check import ValueCheck, WrongRow
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import in_numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowsOfOp:
    """The rows of an op's output: which layer and step made them.

    ``first_token``: the row of the step's new tokens that is row 0 of the op.
    """

    layer: str
    step: Step
    rank: int
    first_token: int = 0

    def request_of(self, row: int) -> tuple[int, Request, int]:
        """Return the row in the batch, the request and the position of an output row."""
        token = row + self.first_token
        seq, request = self.step.request_of_row(token)
        position = int(self.step.seq_lens[seq]) - int(self.step.starts[seq + 1]) + token
        return seq, request, position

    def observe(self, kind: str, row: int, text: str, facts: dict[str, Any]) -> Observation:
        """Return an observation of a row; ``text`` continues "the output of request R at position P"."""
        seq, request, position = self.request_of(row)
        return Observation(
            kind=kind,
            text=f"the output of request {request.name} at position {position}{text}",
            layer=self.layer,
            step=self.step.number,
            rank=self.rank,
            request=request.name,
            seq=seq,
            position=position,
            facts=facts,
        )


def wrong_values(place: RowsOfOp, found: ValueCheck) -> list[Observation]:
    """Return an observation for the worst wrong row of each request."""
    worst: dict[int, WrongRow] = {}
    for row in found.wrong:
        seq, _, _ = place.request_of(row.row)
        before = worst.get(seq)
        if before is None or _ratio(row) > _ratio(before):
            worst[seq] = row
    return [_wrong_value(place, row) for row in worst.values()]


def _ratio(row: WrongRow) -> float:
    """Return the error as a multiple of its bound; infinite if the output is not finite."""
    return row.error / max(row.bound, 1e-300) if _is_number(row) else torch.inf


def _is_number(row: WrongRow) -> bool:
    return abs(row.error) < torch.inf


def _wrong_value(place: RowsOfOp, row: WrongRow) -> Observation:
    heads = f", heads {ranges(row.heads)},"
    if _is_number(row):
        text = f"{heads} is off by {row.error:.3g}; rounding explains {row.bound:.3g}"
        return place.observe("value", row.row, text, asdict(row))
    inputs = "finite" if row.finite_inputs else "not finite"
    text = f"{heads} is not finite; its inputs are {inputs}"
    return place.observe("not_finite", row.row, text, asdict(row))


def not_finite(
    place: RowsOfOp, call: KernelCall, known: AbstractSet[str | None]
) -> list[Observation]:
    """Return an observation for the first row with NaN or Inf of each request that is not in ``known``."""
    call = in_numbers(call)
    bad = ~call.buffer[: int(call.query_start_loc[-1])].isfinite().flatten(1).all(1)
    if not bool(bad.any()):
        return []
    rows: dict[str, int] = {}
    for row in torch.nonzero(bad).flatten().tolist():
        rows.setdefault(place.request_of(row)[1].name, row)
    found = []
    for name, row in rows.items():
        if name not in known:
            is_finite = bool(call.query[row].isfinite().all())
            of_query = "finite" if is_finite else "not finite either"
            text = f" is not finite; its query is {of_query}"
            found.append(
                place.observe("not_finite", row, text, {"row": row, "finite_query": is_finite})
            )
    return found


def ranges(numbers: tuple[int, ...]) -> str:
    """Return rising numbers as text, for example "0–3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)
