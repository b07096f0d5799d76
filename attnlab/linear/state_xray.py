"""The effective weights of an op of linear attention: of every token's value and of every state.

The output and the final states are linear in the values and in the states before the call, and each element
of a value meets the same weights. So coded values measure them, as for softmax attention
(:mod:`attnlab.weights.codes`): lane j is 1 in element j mod head_v_dim of run j // head_v_dim. A lane is a
token, or one element of the key in the state of a slot.
"""

import dataclasses
from dataclasses import dataclass

import torch

from attnlab.linear.run import Deviation, Runner, deviation
from attnlab.linear.state_call import StateCall
from attnlab.linear.state_plan import Evaluated, StatePlan, Units, evaluate, right_plan
from attnlab.weights.codes import one_hot, random_codes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateWeights:
    """Measured weights, float64.

    - ``call``: whose weights they are. ``output``: [tokens, heads, lanes]; ``states``: [slots, heads, lanes,
      key_size], the weights of the states after the call. The lanes are the tokens, then those of each slot,
      one for each element of the key.
    - ``expected``: the same of a right op, with bounds. ``is_linear``: a run with random numbers gives what
      follows from the weights. ``runs``: how many runs it took.
    """

    call: StateCall
    output: torch.Tensor
    states: torch.Tensor
    expected: Evaluated
    is_linear: bool
    runs: int

    @property
    def tokens(self) -> int:
        """Return the number of lanes of tokens."""
        return len(self.call.query)

    @property
    def deviation(self) -> Deviation:
        """Return how far the weights are from the right ones."""
        return deviation(self.call, self.output, self.states, self.expected)

    def by_source(self) -> torch.Tensor:
        """Return the size of each row's weights by source, [tokens, heads, tokens + slots].

        That of a slot is the length of the vector that its state is multiplied with.
        """
        return torch.cat([self.output[..., : self.tokens], self._of_slots(self.output)], -1)

    def expected_by_source(self) -> torch.Tensor:
        """Return :meth:`by_source` of a right op."""
        right = self.expected.output
        return torch.cat([right[..., : self.tokens], self._of_slots(right)], -1)

    def _of_slots(self, weights: torch.Tensor) -> torch.Tensor:
        slots, keys = len(self.call.states), self.call.key.shape[-1]
        found: torch.Tensor = weights[..., self.tokens :].unflatten(-1, (slots, keys)).norm(dim=-1)
        return found


def coded_plan(call: StateCall, plan: StatePlan) -> StatePlan:
    """Return a plan whose output elements are the lanes: values and states that are 1 in their own."""
    tokens, (slots, heads, _, keys) = len(call.query), call.states.shape
    lanes = tokens + slots * keys
    eye = torch.eye(lanes, dtype=torch.float64)
    value = eye[:tokens, None].expand(tokens, heads, lanes)
    states = eye[tokens:].view(slots, keys, lanes).mT[:, None].expand(slots, heads, lanes, keys)
    return plan.replace(value=value.contiguous(), states=states.contiguous())


def measure(call: StateCall, run: Runner) -> StateWeights:
    """Measure the weights of a call by running it with coded values and states."""
    tokens, (slots, heads, size, keys) = len(call.query), call.states.shape
    lanes = torch.arange(tokens + slots * keys)
    outputs, states, runs = [], [], 1
    for codes in one_hot(lanes, size, heads, size):
        found = run(_coded(call, codes))
        outputs.append(found.output.double())
        states.append(found.states.double())
        runs += 1
    output = torch.cat(outputs, -1)[..., : len(lanes)]
    after = torch.cat(states, 2)[:, :, : len(lanes)]
    expected = evaluate(coded_plan(call, right_plan(call)), Units.of(call))
    return StateWeights(
        call=call,
        output=output,
        states=after,
        expected=expected,
        is_linear=_is_linear(call, run, output),
        runs=runs,
    )


def _coded(call: StateCall, codes: torch.Tensor) -> StateCall:
    """Return the call with the values and states of one run, ``codes`` [tokens + slots * key_size, heads,
    value_size] int8."""
    tokens, (slots, heads, size, keys) = len(call.query), call.states.shape
    states = codes[tokens:].view(slots, keys, heads, size).permute(0, 2, 3, 1)
    return dataclasses.replace(
        call,
        value=codes[:tokens].to(call.value.dtype),
        states=states.to(call.states.dtype).contiguous(),
    )


def _is_linear(call: StateCall, run: Runner, weights: torch.Tensor) -> bool:
    """Answer whether the output with random numbers is what the weights give, where they are finite."""
    tokens, (slots, heads, size, keys) = len(call.query), call.states.shape
    codes = random_codes((tokens + slots * keys, heads, size))
    found = run(_coded(call, codes)).output.double()
    predicted = torch.einsum("thl,lhv->thv", weights, codes.double())
    sizes = torch.einsum("thl,lhv->thv", weights.abs(), codes.double().abs())
    stored = torch.finfo(call.value.dtype).eps
    is_close = (found - predicted).abs() <= _COARSE * stored * (sizes + predicted.abs()) + 1e-6
    return bool((is_close | predicted.isnan()).all())


_COARSE = 8.0  # roundings of an output that are allowed where weights are multiplied with numbers
