"""Check the values of a call in place: some rows and heads against the reference, with the derived bound."""

import bisect
import dataclasses
import random
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnlab.diagnosis.captured import problem_of
from attnlab.replay.parts import view_of_kv_heads, whole, with_sequences
from attnlab.serving.batch import Request, Step
from attnlab.serving.record import Observation
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import has_scaled_output, in_numbers
from attnlab.weights.rule import numbers

_BY_ROW = ("query", "key", "value", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongRow:
    """A row of an output that is wrong.

    - ``row``: of the output. ``seq``, ``token``: the same in its sequence. ``heads``: the query heads.
    - ``error``, ``bound``: of the element whose error is the largest multiple of its bound. The error is
      NaN or infinite if the output is not finite.
    - ``finite_inputs``: whether query, keys and values of the row are finite.
    """

    row: int
    seq: int
    token: int
    heads: tuple[int, ...]
    error: float
    bound: float
    finite_inputs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """What a check found.

    ``rows``, ``heads``: how many were compared. ``worst``: the largest error as a multiple of its bound.
    """

    rows: int
    heads: int
    worst: float
    wrong: tuple[WrongRow, ...]


def sampled_rows(query_lens: list[int], count: int | None, seed: int) -> list[int]:
    """Return some rows of a batch, rising: of different sequences first, often a sequence's last row."""
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    if count is None or count >= starts[-1]:
        return list(range(starts[-1]))
    draw = random.Random(seed)
    seqs = [seq for seq, length in enumerate(query_lens) if length]
    draw.shuffle(seqs)
    chosen: set[int] = set()
    for seq in seqs[:count]:
        token = query_lens[seq] - 1 if draw.random() < 0.5 else draw.randrange(query_lens[seq])
        chosen.add(starts[seq] + token)
    left = [row for row in range(starts[-1]) if row not in chosen] if len(chosen) < count else []
    return sorted({*chosen, *draw.sample(left, count - len(chosen))})


def sampled_heads(num_heads: int, group: int, count: int | None, seed: int) -> list[int]:
    """Return some query heads, rising, of as few neighbouring KV heads as possible.

    ``group``: query heads per KV head.
    """
    if count is None or count >= num_heads:
        return list(range(num_heads))
    draw = random.Random(~seed)
    kv_heads = -(-count // group)
    first = draw.randrange(num_heads // group - kv_heads + 1) * group
    return sorted(draw.sample(range(first, first + kv_heads * group), count))


def check_values(call: KernelCall, *, rows: int | None, heads: int | None, seed: int) -> ValueCheck:
    """Compare some rows and heads of a call's output with the reference.

    Only these rows' sequences and KV heads are copied to the CPU. Raises InvalidCall for a call that has no
    reference.
    """
    starts = call.query_start_loc.tolist()
    chosen = sampled_rows(call.query_lens.tolist(), rows, seed)
    if not chosen:
        return ValueCheck(rows=0, heads=0, worst=0.0, wrong=())
    group = call.num_queries_per_kv
    some = sampled_heads(call.query.shape[1], group, heads, seed)
    seq_of = [bisect.bisect_right(starts, row) - 1 for row in chosen]
    seqs = sorted(set(seq_of))
    part = _part(call, seqs, some)
    part_starts = dict(zip(seqs, part.query_start_loc.tolist(), strict=False))
    part_rows = [part_starts[s] + row - starts[s] for row, s in zip(chosen, seq_of, strict=True)]
    part_heads = [head - some[0] // group * group for head in some]
    found = _compare(part, torch.tensor(part_rows), torch.tensor(part_heads))
    wrong = tuple(
        _wrong_row(found, i, row, seq_of[i], row - starts[seq_of[i]], some)
        for i, row in enumerate(chosen)
        if found.is_wrong[i].any()
    )
    ratio = found.ratio[~found.ratio.isnan()]
    worst = float(ratio.max()) if ratio.numel() else 0.0
    return ValueCheck(rows=len(chosen), heads=len(some), worst=worst, wrong=wrong)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Compared:
    """Errors of some rows and heads, [rows, heads, head_size]; ``finite``: [rows]."""

    error: torch.Tensor
    bound: torch.Tensor
    ratio: torch.Tensor
    is_wrong: torch.Tensor
    finite: torch.Tensor


def _wrong_row(
    found: _Compared, i: int, row: int, seq: int, token: int, heads: list[int]
) -> WrongRow:
    """Return what is wrong in row ``i`` of a comparison, with its worst element."""
    at = int(found.ratio[i].nan_to_num(torch.inf, torch.inf).argmax())
    bad = torch.nonzero(found.is_wrong[i].any(1)).flatten().tolist()
    return WrongRow(
        row=row,
        seq=seq,
        token=token,
        heads=tuple(heads[head] for head in bad),
        error=float(found.error[i].flatten()[at]),
        bound=float(found.bound[i].flatten()[at]),
        finite_inputs=bool(found.finite[i]),
    )


def _compare(part: KernelCall, rows: torch.Tensor, heads: torch.Tensor) -> _Compared:
    problem = problem_of(part)
    right = problem.correct_rows(rows, heads)
    output = problem.call.buffer[rows][:, heads].double()
    finite = right.output.isfinite().flatten(1).all(1)
    finite &= problem.call.query[rows].double().isfinite().flatten(1).all(1)
    error = (output - right.output).abs()
    # Where the inputs are not finite, neither need the output be; clamping makes NaN any number.
    excused = ~right.output.isfinite() & (~output.isfinite() | has_scaled_output(part))
    error = error.masked_fill(excused, 0.0)
    ratio = error / right.bound.clamp(min=torch.finfo(torch.float64).tiny)
    ratio = ratio.masked_fill(error == 0, 0.0)
    is_wrong = ~(error <= right.bound) & ~excused
    return _Compared(error=error, bound=right.bound, ratio=ratio, is_wrong=is_wrong, finite=finite)


def _part(call: KernelCall, seqs: list[int], heads: list[int]) -> KernelCall:
    """Return the call of some sequences and the KV heads of some query heads, on the CPU."""
    group, large = call.num_queries_per_kv, (*_BY_ROW, "key_cache", "value_cache")
    changes: dict[str, Any] = {
        name: one.cpu() for name, one in call.tensors().items() if name not in large
    }
    here = dataclasses.replace(
        call, **{**changes, "before": None, "lse": None, "slot_mapping": None}
    )
    every = whole(here)
    part = with_sequences(here, [every[seq] for seq in seqs])
    own = range(heads[0] // group, heads[-1] // group + 1)
    return view_of_kv_heads(part, own).with_named_blocks().cpu()


# Observations of wrong values: which request and position a wrong row of an output belongs to.


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
    heads = f", heads {numbers(row.heads, len(row.heads))},"
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
