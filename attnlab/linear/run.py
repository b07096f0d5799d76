"""Run ops of linear attention from a source, and compare them with the plan in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import AttnLabError, KernelFailed, KernelRejected, Unsupported
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput
from attnlab.kernels.binding import Arguments, evaluate, new_empty_is_scratch, passed, taken
from attnlab.kernels.plugin import contained, source_function, text_of
from attnlab.kernels.triton.interpreter import interpreting
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.run_log import RunLog, other_outside
from attnlab.kernels.vllm.backend import is_stated, one_line
from attnlab.kernels.vllm.loader import OnCpu
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.library.op import package_of, state_ops_of
from attnlab.linear.state_call import StateCall
from attnlab.linear.state_plan import Evaluated, Units, right_plan
from attnlab.linear.state_plan import evaluate as evaluate_plan
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import ratio


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateOutput:
    """The output of a call, [tokens, num_v_heads, head_v_dim], and the states of all slots after it.

    ``log``: what Triton's interpreter recorded; empty for models.
    """

    output: torch.Tensor
    states: torch.Tensor
    log: RunLog


Runner = Callable[[StateCall], StateOutput]
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "key_first": lambda states: None if states is None else states.mT.contiguous(),
    "packed": lambda *parts: torch.cat([one.flatten(1) for one in parts], 1),
    "nan_like": lambda tensor: torch.full_like(tensor, float("nan")).contiguous(),
}


@dataclass(frozen=True, kw_only=True)
class StateBackend(Backend):
    """The ops of linear attention of a library's source; :class:`SourceRunner` runs their cases."""

    library: str
    path: Path | str | None = None

    device = "cpu"

    @property
    def name(self) -> str:
        return f"library:{self.library}"

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(one.name for one in state_ops_of(self.library))

    @cached_property
    def op_source(self) -> Source:
        """Return the source, found on first use; raise InvalidCase or Unavailable if there is none."""
        return find_source(self.path, package_of(self.library))

    @property
    def version(self) -> str:
        return self.op_source.text()

    def text(self, kernels: Sequence[str], target: Target) -> str:
        return self.version

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        raise Unsupported(f"{self.name} runs calls of linear attention, not of a paged cache")


class _Names(dict[str, Any]):
    """What the expressions of a record name: functions, and the tensors of a call."""

    def __init__(self, call: StateCall, **given: Any) -> None:
        super().__init__({**_FUNCTIONS, "True": True, **given})
        self._call = call

    def __missing__(self, name: str) -> Any:
        self[name] = found = getattr(self._call, name)
        return found.clone() if isinstance(found, torch.Tensor) else found


@dataclass(frozen=True, kw_only=True)
class SourceRunner:
    """Runs the ops of a source under Triton's interpreter, as of a platform."""

    source: Source
    platform: str = "sm_90"

    def __call__(self, call: StateCall) -> StateOutput:
        """Return what the op computes; the tensors of the call stay as they are."""
        op = call.op
        function = source_function(
            self.source, PLATFORMS[self.platform], op.module, op.python_name, False
        )
        names = _Names(call, states=call.states.clone())
        arguments = _arguments(function, call, names)
        plan = LaunchPlan()
        try:
            # Memory outside of the tensors may hold anything: NaN shows what depends on it.
            with (
                launching(plan),
                interpreting(),
                contained(),
                OnCpu(),
                new_empty_is_scratch(),
                other_outside(math.nan),
            ):
                returned = function(**arguments)
        except AttnLabError:
            raise
        except NotImplementedError as error:
            raise Unsupported(f"{op.name} does not support this call: {error}") from error
        except Exception as error:
            if is_stated(error, self.source):
                raise KernelRejected(one_line(error)) from error
            file = str(self.source.op_file(op.module))
            raise KernelFailed(text_of(error, file)) from error
        names.update(arguments, returned=returned)
        output = evaluate(op.result, names)
        if not isinstance(output, torch.Tensor) or output.shape != call.value.shape:
            shape = list(getattr(output, "shape", ()))
            text = f"the shape of its output is not that of the values: {shape}, {list(call.value.shape)}"
            raise KernelFailed(text)
        if op.states:
            states = evaluate(op.states, names)
        else:
            states = call.states.clone()
            states[call.tables[:, 0]] = evaluate(op.final, names).to(states.dtype)
        return StateOutput(output=output, states=states, log=plan.observed)


def _arguments(function: Callable[..., Any], call: StateCall, names: _Names) -> Arguments:
    """Return the arguments of the op, of those that its record has."""
    known = taken(function)
    lacking = [one for one in call.op.parameters(*call.options) if one not in known]
    if lacking:
        raise Unsupported(f"{call.op.python_name} of this source has no argument {lacking[0]}")
    texts = {name: text for name, text in call.op.arguments.items() if name in known}
    given = {name: evaluate(text, names) for name, text in texts.items()}
    return passed(function, given, call.op.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deviation:
    """How far an output and states are from those of a plan.

    - ``output``: [tokens, heads, n], ``states``: [slots, heads, n, key_size], errors as multiples of their
      bounds, infinite where only one is finite, 0 in rows that no caller reads. ``compared``: [tokens]
      bool.
    """

    output: torch.Tensor
    states: torch.Tensor

    @property
    def worst(self) -> float:
        """Return the largest error as a multiple of its bound."""
        parts = [one.max() for one in (self.output, self.states) if one.numel()]
        return float(torch.stack(parts).max()) if parts else 0.0

    @property
    def is_right(self) -> bool:
        """Answer whether every error is within its bound."""
        return self.worst <= 1.0

    @property
    def rows(self) -> torch.Tensor:
        """Return which rows and heads of the output are wrong, [tokens, heads] bool."""
        return (self.output > 1).any(-1)

    @property
    def slots(self) -> torch.Tensor:
        """Return which states are wrong, [slots, heads] bool."""
        return (self.states > 1).flatten(2).any(-1)


def deviation(
    call: StateCall, output: torch.Tensor, states: torch.Tensor, expected: Evaluated
) -> Deviation:
    """Compare an output and states with what a plan computes; rows of skipped sequences may hold anything."""
    compared = ~call.skipped[call.seq_of_row] | (call.op.skips == "zeros")
    found = ratio(output, expected.output, expected.output_bound)
    return Deviation(
        output=torch.where(compared[:, None, None], found, 0.0),
        states=ratio(states, expected.states, expected.states_bound),
    )


def compare(call: StateCall, run: Runner) -> Deviation:
    """Run a call, and compare the result with the right plan."""
    found = run(call)
    expected = evaluate_plan(right_plan(call), Units.of(call))
    return deviation(call, found.output, found.states, expected)
