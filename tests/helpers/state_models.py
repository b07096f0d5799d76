"""Models of ops of linear attention: the plan of a call, right or changed, as an op would store it."""

from collections.abc import Callable
from dataclasses import dataclass

from attnlab.kernels.triton.run_log import RunLog
from attnlab.linear.run import StateOutput
from attnlab.linear.state_call import StateCall
from attnlab.linear.state_plan import StatePlan, right_plan
from attnlab.linear.state_plan import evaluate as evaluate_plan


@dataclass(frozen=True, kw_only=True)
class ModelRunner:
    """Computes the plan of a call in float64, changed by ``edit``, and rounds what is stored."""

    edit: Callable[[StatePlan], StatePlan] = lambda plan: plan

    def __call__(self, call: StateCall) -> StateOutput:
        """Return what the changed plan gives."""
        found = evaluate_plan(self.edit(right_plan(call)))
        return StateOutput(
            output=found.output.to(call.value.dtype),
            states=found.states.to(call.states.dtype),
            log=RunLog(),
        )
