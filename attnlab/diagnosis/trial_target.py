"""TrialTarget: the tensor that trial edits must make right: the output, padded rows, or the log-sum-exp."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.kernels.triton.probe import LaunchLog
from attnlab.kernels.triton.replay import Replay
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.tensors.op_argument_data import OUTPUT_SCALE

Judge = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialTarget:
    """What trial edits run and compare.

    - ``replay``: of the recorded launches, with that tensor as the output. ``judge``: returns which of its
      rows and heads are right, bool. ``right``: those of the unchanged kernels.
    """

    replay: Replay
    judge: Judge
    right: torch.Tensor


def target_of(lab: Lab, case: Case, ran: Result, launches: list[LaunchLog]) -> TrialTarget:
    """Return the first tensor of a run that is wrong: the output, rows of padding, or the log-sum-exp."""
    judge = judge_of(lab, case)
    right = judge(ran.output)
    found = TrialTarget(replay=Replay(launches, ran.output.shape), judge=judge, right=right)
    if not bool(right.all()):
        return found
    others = (_padded(ran, launches), _lse(lab, case, ran, launches))
    return next((one for one in others if one is not None and not bool(one.right.all())), found)


def judge_of(lab: Lab, case: Case) -> Judge:
    """Return the function that answers which rows and heads of an output are right up to rounding.

    An output in FP8 is decoded first.
    """
    own = case.replace(atol=None, rtol=0.0)
    call, expected = lab.call(own), lab.reference(own)

    def judge(output: torch.Tensor) -> torch.Tensor:
        is_coded = output.element_size() == 1
        call.buffer.copy_(output.float() * OUTPUT_SCALE if is_coded else output)
        return lab.errors(own, call, expected).mismatches == 0

    return judge


def _padded(ran: Result, launches: list[LaunchLog]) -> TrialTarget | None:
    """Return the output with its rows of padding, which must be 0."""
    if ran.padded is None or "padding" not in ran.side_outputs:
        return None
    rows, heads, size = ran.output.shape
    shape = torch.Size((rows + len(ran.padded), heads, size))
    replay = Replay(launches, shape)

    def judge(output: torch.Tensor) -> torch.Tensor:
        right = (output.float() == 0).all(2)
        right[:rows] = True  # of the batch, which the judge of the output compares
        return right

    if replay.output is None:
        return None
    return TrialTarget(replay=replay, judge=judge, right=judge(replay.contents()))


def _lse(lab: Lab, case: Case, ran: Result, launches: list[LaunchLog]) -> TrialTarget | None:
    """Return the log-sum-exp, with as many dimensions as it is stored; rows of padding must have -inf."""
    stored = None if ran.lse is None else argument_at(launches, ran.lse.data_ptr())
    if ran.lse is None or stored is None or stored.dim() != 2:
        return None
    expected, bound = (one.cpu().double() for one in lab.expected_lse(case))
    is_turned = stored.stride() != ran.lse.stride() or stored.shape != ran.lse.shape
    rows, heads = case.query_rows, case.query_heads
    has_padding = "padding" in ran.side_outputs

    def judge(output: torch.Tensor) -> torch.Tensor:
        lse = output[..., 0].T if is_turned else output[..., 0]
        right = torch.ones(lse.shape, dtype=torch.bool)
        near = (lse[: len(expected)].double() - expected).abs() <= bound
        ran_here = (_slice(rows), _slice(heads))
        right[: len(expected)][ran_here] = near[ran_here]
        if has_padding:
            right[len(expected) :] = lse[len(expected) :] == -torch.inf
        return right.T if is_turned else right

    shape = torch.Size((*stored.shape, 1))
    replay = Replay(launches, shape, stored)
    return TrialTarget(replay=replay, judge=judge, right=judge(stored[..., None]))


def argument_at(launches: list[LaunchLog], address: int) -> torch.Tensor | None:
    """Return the tensor at an address among the arguments of launches, or None."""
    for launch in launches:
        for value in launch.arguments.values():
            if isinstance(value, torch.Tensor) and value.data_ptr() == address:
                return value
    return None


def _slice(span: range | None) -> slice:
    return slice(None) if span is None else slice(span.start, span.stop)
