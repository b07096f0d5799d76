"""StatePlan: what an op of linear attention computes, as data; its output and states in float64.

A chunk of tokens is computed at once, as in the WY form of the gated delta rule (Yang et al., 2024,
arXiv:2412.06464). With chunks of one token this is the recurrence itself. The result is the same for every
chunk size; only the rounding bound and what an edit leaves out depend on it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from attnlab.linear.state_call import NONE, StateCall

# Parts of the computation that an edit can leave out, in words.
INNER = "what the values of a chunk's earlier tokens already hold of a key"
SCORES = "the values of the same chunk's tokens"
INNER_GATE = "the gate between two tokens, in the subtraction within a chunk"
SCORES_GATE = "the gate between two tokens, in the output"
NEW_GATE = "the gate from a token to the end of its chunk"
CARRY_GATE = "the gate of a whole chunk"
READ_GATE = "the gate from the beginning of a chunk, where the output reads the state"
HELD_GATE = "the gate from the beginning of a chunk, where the held value is read"
READ_SCALE = "the scale, where the output reads the state"
SCORES_SCALE = "the scale, of the values of the same chunk's tokens in the output"
INNER_BETA = "beta, in the subtraction within a chunk"
HELD_BETA = "beta, where the held value is read from the state before the chunk"
HELD = "what the state holds of a key, which a delta rule subtracts"
CARRY = "the state of the chunks before"
OWN = "the row's own token"
OWN_GATE = "the gate of the row's own token, where the output reads the state"


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePlan:
    """What is computed, all numbers in float64.

    - ``query``, ``key``: [tokens, heads, key_size], of each value head, normalised. ``value``: [tokens,
      heads, value_size]. ``gate``: [tokens, heads, key_size], logarithms. ``beta``: [tokens, heads].
    - ``starts``: the first row of each sequence, and the end. ``states``: [slots, heads, value_size,
      key_size].
    - ``loads``: the slot that each sequence begins from, NONE for 0. ``stores``: for each sequence, pairs of
      a number of tokens and the slot that gets the state after them.
    - ``continues``: sequences begin from the last state of the sequence before. ``begins_again``: chunks
      begin from the state before the call. ``read_states``: what is loaded, if not ``states``.
      ``late_gate``: a token's gate multiplies the token, too. ``no_read``: the output does not read the state
      before the chunk; ``no_held``: the delta rule does not. ``loses_state``: the state before a chunk is not
      added to that after it.
    - ``written``: [tokens] bool, which rows of the output are written. ``zeros``: [tokens] bool, which of
      them are 0.
    - ``delta``: it is a delta rule. ``skip``: [heads], how often a token's value is added to its output.
      ``chunk``: tokens that are computed together. ``missing``: parts that are left out.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    held_beta: torch.Tensor
    scale: float
    starts: tuple[int, ...]
    states: torch.Tensor
    loads: tuple[int, ...]
    stores: tuple[tuple[tuple[int, int], ...], ...]
    written: torch.Tensor
    zeros: torch.Tensor
    delta: bool
    chunk: int
    skip: torch.Tensor | None = None
    continues: bool = False
    begins_again: bool = False
    late_gate: bool = False
    no_read: bool = False
    no_held: bool = False
    loses_state: bool = False
    read_states: torch.Tensor | None = None
    missing: frozenset[str] = frozenset()

    def replace(self, **changes: object) -> "StatePlan":
        """Return the plan with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def in_large_chunks(self) -> "StatePlan":
        """Return the plan in chunks that compute fast, if the result does not depend on their size."""
        edits = (self.begins_again, self.late_gate, self.no_read, self.no_held, self.loses_state)
        is_fixed = self.missing or any(edits) or self.stops_inside
        return self if is_fixed else self.replace(chunk=_FAST)

    @property
    def stops_inside(self) -> bool:
        """Answer whether a state is stored before the last token of a sequence."""
        pairs = zip(pairwise(self.starts), self.stores, strict=True)
        return any(count not in (0, b - a) for (a, b), one in pairs for count, _ in one)

    def without(self, *parts: str) -> "StatePlan":
        """Return the plan without some parts."""
        return self.replace(missing=self.missing | {*parts})


def right_plan(call: StateCall, *, norm: tuple[bool, bool] = (True, True)) -> StatePlan:
    """Return the plan of a right op; ``norm``: if the call says so, queries and keys are normalised."""
    op, heads = call.op, call.value.shape[1]
    group = heads // call.key.shape[1]
    query, key = (
        (_unit(one.double()) if call.use_norm and used else one.double()).repeat_interleave(
            group, 1
        )
        for one, used in zip((call.query, call.key), norm, strict=True)
    )
    gate = call.exact_gate if call.raw_gate else call.gate.double()
    gate = gate if gate.ndim == 3 else gate[..., None].expand(*gate.shape, key.shape[-1])
    beta = call.b.double().sigmoid() if call.raw_gate else call.beta.double()
    beta = call.step if op.steps else beta if op.delta else torch.ones_like(beta)
    starts = tuple(call.query_start_loc.tolist())
    rows = call.skipped[call.seq_of_row]
    return StatePlan(
        query=query,
        key=key,
        value=call.value.double(),
        gate=gate,
        beta=beta,
        held_beta=beta,
        scale=call.scale,
        starts=starts,
        states=call.states.double(),
        loads=tuple(call.loads.tolist()),
        stores=tuple(_stores(call)),
        written=~rows if op.skips != "zeros" else torch.ones_like(rows),
        zeros=rows,
        delta=op.delta,
        chunk=op.chunk,
        skip=call.D.double() if op.skip else None,
    )


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / (vectors.square().sum(-1, keepdim=True) + NORM).sqrt()


def _stores(call: StateCall) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the stores of each sequence."""
    for seq, table in enumerate(call.tables.tolist()):
        count = len(call.rows_of(seq))
        if table[0] < 0 or (call.op.slots and not count):
            yield ()
        elif call.num_accepted_tokens is not None:
            yield tuple((i + 1, table[i]) for i in range(count))
        else:
            yield ((count, table[0]),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluated:
    """The output [tokens, heads, value_size] and the states of all slots after the call, with bounds.

    Rows that are not written are NaN. A bound follows from the rounding errors to first order: within a chunk
    four times the root of their summed squares, as of independent errors; from one chunk to the next the
    largest that the state can make of them.
    """

    output: torch.Tensor
    states: torch.Tensor
    output_bound: torch.Tensor
    states_bound: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Relative rounding errors of an op.

    - ``fine``: of a sum of products in float32, with its gates. ``operand``: of a number that is stored for a
      product; ``query``: of a normalised query or key. ``output``, ``state``: of what is stored.
    """

    fine: float
    operand: float
    query: float
    output: float
    state: float

    @classmethod
    def of(cls, call: StateCall) -> "Units":
        """Return the errors of a call.

        Sums in float32 have at most key_size + 64 terms. Exponentials of gates have the relative error of
        their argument, a sum of up to 64 gates, times float32's unit. An op that takes one token after the
        other has all numbers in float32; one in chunks stores them in the query's dtype (FLA 0.6.0 and vLLM
        0.33.0: chunk.py, wy_fast.py, chunk_delta_h.py, chunk_o.py).
        """
        single = torch.finfo(torch.float32).eps / 2
        stored = torch.finfo(call.query.dtype).eps / 2
        count = call.query.shape[-1] + call.op.chunk + 16
        largest = float(call.exact_gate.abs().clamp(max=88.0).max())
        fine = single * (2 * count + 2 * largest * call.op.chunk)
        operand = stored if call.op.chunk > 1 or call.op.rounds else 0.0
        state = torch.finfo(call.states.dtype).eps / 2
        norm = operand if call.use_norm else 0.0
        return cls(fine=fine, operand=operand, query=norm, output=stored, state=state)


def evaluate(plan: StatePlan, units: Units | None = None) -> Evaluated:
    """Return what a plan computes; without ``units``, the bounds are 0."""
    output = torch.full_like(plan.value, float("nan"))
    bound = torch.zeros_like(output)
    states, states_bound = plan.states.clone(), torch.zeros_like(plan.states)
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    read = plan.states if plan.read_states is None else plan.read_states
    for seq, load in enumerate(plan.loads):
        rows = range(plan.starts[seq], plan.starts[seq + 1])
        state = torch.zeros_like(states[0]) if load == NONE else read[load]
        error = torch.zeros_like(state[..., 0])
        if plan.continues and last is not None:
            state, error = last
        wanted = dict(plan.stores[seq])
        kept = {0: (state, error)}
        for first in range(rows.start, rows.stop, plan.chunk):
            chunk = _Chunk(plan, slice(first, min(first + plan.chunk, rows.stop)), units)
            if plan.begins_again:
                state, error = kept[0]
            begin = (
                torch.zeros_like(state) if CARRY in plan.missing and first > rows.start else state
            )
            out, out_error = chunk.output(begin, error)
            output[chunk.rows], bound[chunk.rows] = out, out_error
            state, error = chunk.next(begin, error)
            kept[chunk.rows.stop - rows.start] = state, error
        last = state, error
        for count, slot in wanted.items():
            if count in kept:
                state, error = kept[count]
                states[slot] = state
                own = 0.0 if units is None else units.state * state.abs()
                states_bound[slot] = error[..., None] + own
    output = torch.where(plan.zeros[:, None, None], 0.0, output)
    output = torch.where(plan.written[:, None, None], output, torch.nan)
    bound = torch.where(plan.zeros[:, None, None], 0.0, bound)
    return Evaluated(output=output, states=states, output_bound=bound, states_bound=states_bound)


class _Chunk:
    """Some tokens of a sequence that are computed together: matrices [heads, tokens, …]."""

    def __init__(self, plan: StatePlan, rows: slice, units: Units | None) -> None:
        self.rows, self._plan, self._units = rows, plan, units
        query, key, value, gate = (
            one[rows].transpose(0, 1) for one in (plan.query, plan.key, plan.value, plan.gate)
        )
        beta = plan.beta[rows].T[..., None]
        total = gate.cumsum(1)
        self._last = _or_one(plan, CARRY_GATE, total[:, -1].exp()) * (not plan.loses_state)
        between = total[:, :, None] - total[:, None]
        order = torch.ones(*between.shape[1:3], dtype=torch.bool).tril()
        between = torch.where(order[..., None], between, 0.0).exp()
        pairs = torch.einsum("hik,hjk->hijk", key, key)
        inner = (pairs * _or_one(plan, INNER_GATE, between)).sum(-1).tril(-1)
        sizes = (pairs.abs() * between).sum(-1).tril(-1)
        squares = (pairs * between).square().sum(-1).tril(-1)
        is_delta = plan.delta and HELD not in plan.missing
        held_beta = plan.held_beta[rows].T[..., None]
        inner_beta = _or_one(plan, INNER_BETA, held_beta)
        inner, sizes = inner * inner_beta, sizes * inner_beta.abs()
        squares = squares * inner_beta.square()
        if not is_delta or INNER in plan.missing:
            inner = sizes = squares = torch.zeros_like(inner)
        eye = torch.eye(inner.shape[-1], dtype=inner.dtype)
        solve = torch.linalg.solve_triangular(eye + inner, eye.expand_as(inner), upper=False)
        self._own = value
        decayed = key * _or_one(plan, HELD_GATE, total.exp()) * is_delta
        decayed = decayed * _or_one(plan, HELD_BETA, held_beta)
        self._decayed, self._added = decayed, value * beta
        if plan.no_held:
            self._decayed = torch.zeros_like(self._decayed)
        self._held, self._new = solve @ self._decayed, solve @ self._added
        scores = torch.einsum("hik,hjk->hijk", query, key)
        scale = torch.tensor(plan.scale, dtype=scores.dtype)
        scores = _or_one(plan, SCORES_SCALE, scale) * scores * _or_one(plan, SCORES_GATE, between)
        self._sizes = scores.abs().sum(-1).tril()
        self._squares = scores.square().sum(-1).tril()
        self._scores = scores.sum(-1).tril(-1 if OWN in plan.missing else 0)
        if SCORES in plan.missing:
            self._scores = self._scores * torch.eye(self._scores.shape[-1], dtype=inner.dtype)
        read = (total - gate if OWN_GATE in plan.missing else total).exp()
        self._read = _or_one(plan, READ_SCALE, scale) * query * _or_one(plan, READ_GATE, read)
        self._read = self._read * (not plan.no_read)
        self._keys = key * _or_one(plan, NEW_GATE, (total[:, -1:] - total).exp())
        if plan.late_gate:
            self._scores = (plan.scale * query * key * total.exp()).sum(-1, keepdim=True)
            self._keys = self._keys * total.exp()
        if units is not None:
            self._find_errors(units, solve, inner, sizes, squares)

    def _find_errors(
        self,
        units: Units,
        solve: torch.Tensor,
        inner: torch.Tensor,
        sizes: torch.Tensor,
        squares: torch.Tensor,
    ) -> None:
        """Compute the variance of the solved matrix and of what follows from it, in units of 1/3."""
        fine, operand, query = (one**2 for one in (units.fine, units.operand, units.query))
        square = solve.square()
        first = fine * sizes.square() + operand * inner.square() + 2 * query * squares
        inverse = square @ first @ square + (fine + operand) * square
        each = fine + 2 * operand
        self._held_error = inverse @ self._decayed.square() + operand * self._held.square()
        self._held_error += (each + query) * (square @ self._decayed.square())
        self._new_error = inverse @ self._added.square() + operand * self._new.square()
        self._new_error += each * (square @ self._added.square())

    def _values(self, state: torch.Tensor) -> torch.Tensor:
        """Return the values that the tokens add to the state, [heads, tokens, value_size]."""
        found: torch.Tensor = self._new - self._held @ state.mT
        return found

    def _values_error(self, state: torch.Tensor) -> torch.Tensor:
        """Return the variance of the values, without that of the state before the chunk."""
        units, square = self._units, state.square().mT
        assert units is not None
        fine, operand = units.fine**2, units.operand**2
        held = self._held_error + (fine + operand) * self._held.square()
        own = (fine + operand) * self._values(state).square()
        found: torch.Tensor = self._new_error + held @ square + own
        return found

    def output(self, state: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the output and their bounds, each [tokens, heads, value_size].

        ``error``: [heads, value_size], the length of the error of each row of the state.
        """
        values, units = self._values(state), self._units
        found = self._read @ state.mT + self._scores @ values
        if self._plan.skip is not None:
            found = found + self._plan.skip[:, None, None] * self._own
        if units is None:
            return found.transpose(0, 1), torch.zeros_like(found).transpose(0, 1)
        fine, operand, query = (one**2 for one in (units.fine, units.operand, units.query))
        scores = self._scores.square()
        variance = (fine + 3 * operand + query) * (self._read.square() @ state.square().mT)
        each = (fine + 2 * operand) * scores + 2 * query * self._squares
        variance += (each + fine * self._sizes.square()) @ values.square()
        variance += scores @ self._values_error(state)
        through = (self._read - self._scores @ self._held).norm(dim=-1)
        bound = _SIGMAS * variance.sqrt() + through[..., None] * error[:, None]
        bound = bound + _STORED * units.output * found.abs() + _LEAST
        return found.transpose(0, 1), bound.transpose(0, 1)

    def next(self, state: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state after the chunk, and the length of the error of each of its rows."""
        values, keys, units = self._values(state), self._keys, self._units
        found = state * self._last[:, None] + values.mT @ keys
        if units is None:
            return found, error
        fine, operand, query = (one**2 for one in (units.fine, units.operand, units.query))
        square = keys.square()
        own = self._values_error(state).mT @ square + fine * found.square()
        own += (fine + 3 * operand + query) * (values.square().mT @ square)
        own += fine * (state * self._last[:, None]).square()
        carry = torch.diag_embed(self._last) - self._held.mT @ keys
        growth = torch.linalg.matrix_norm(carry.nan_to_num(0.0, 0.0, 0.0), 2)
        return found, growth[:, None] * error + _SIGMAS * own.sum(-1).sqrt()


# How many times the root of the summed squares of the errors an error may be; the same of the last rounding;
# and numbers below float32's smallest.
_FAST = 32
NORM = 1e-6  # what all ops add to the square of the length of a query or key
_SIGMAS, _STORED, _LEAST = 4.0, 1.25, 1e-30


def _or_one(plan: StatePlan, part: str, factor: torch.Tensor) -> torch.Tensor:
    """Return a factor, or ones if the part is missing."""
    return torch.ones_like(factor) if part in plan.missing else factor


_Edit = Callable[[StateCall, StatePlan], StatePlan]  # of a call and its right plan
_Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateRule:
    """A clause that says what an op does, and the edit that does it. ``edit`` may return the plan itself."""

    text: str
    edit: _Edit


@functools.cache
def rules() -> tuple[StateRule, ...]:
    """Return all rules; of rules with the same result, the first is the simplest."""
    tables = (_FACTORS, _RAW_GATES, _PRODUCTS, _SLOTS, _SEQUENCES, _CHUNKS)
    return tuple(StateRule(text=text, edit=edit) for one in tables for text, edit in one.items())


def _edited(*missing: str, **changes: Any) -> _Edit:
    """Return the edit that leaves out parts and sets fields; a function returns the value for a plan."""

    def edit(call: StateCall, plan: StatePlan) -> StatePlan:
        values = {name: one(plan) if callable(one) else one for name, one in changes.items()}
        return plan.replace(**values).without(*missing)

    return edit


def _with_beta(change: _Change, call: StateCall, plan: StatePlan) -> StatePlan:
    beta = change(plan.beta)
    return plan.replace(beta=beta, held_beta=beta) if plan.delta else plan


def _of_neighbours(
    name: str, way: Callable[[int, int], int], call: StateCall, plan: StatePlan
) -> StatePlan:
    """Return the plan with "gate" or "beta" of each token from another token of its sequence."""
    index = list(range(len(plan.gate)))
    for first, end in pairwise(plan.starts):
        for i in range(first, end):
            index[i] = first + way(i - first, end - first)
    if name == "gate":
        return plan.replace(gate=plan.gate[index])
    return _with_beta(lambda beta: beta[index], call, plan)


_GATES = {
    "the gate is missing": 0.0,
    "the gate is applied twice": 2.0,
    "the state is divided by the gate, not multiplied": -1.0,
    "exp2 is used in place of exp for the gate": math.log(2),
    "the gate is multiplied by log2(e)": 1 / math.log(2),
    "the square root of the gate is applied": 0.5,
}
_SCALES = {
    "the scale is missing": 0.0,
    "the scale is applied twice": 2.0,
    "the output is divided by the scale, not multiplied": -1.0,
    "the square root of the scale is applied": 0.5,
}
_NEIGHBOURS: dict[str, Callable[[int, int], int]] = {
    "the next token": lambda i, count: min(i + 1, count - 1),
    "the token before": lambda i, count: max(i - 1, 0),
    "the first token of its sequence": lambda i, count: 0,
    "the token as far from the other end of its sequence": lambda i, count: count - 1 - i,
}
_FACTORS: dict[str, _Edit] = {
    **{
        words: _edited(gate=lambda plan, factor=factor: plan.gate * factor)
        for words, factor in _GATES.items()
    },
    **{
        f"a token takes the {name} of {words}": partial(_of_neighbours, name, way)
        for words, way in _NEIGHBOURS.items()
        for name in ("gate", "beta")
    },
    "the state is multiplied by the gate after a token is added, not before": _edited(
        HELD_GATE, chunk=1, late_gate=True
    ),
    "the gate of a key's first element is taken for all elements": _edited(
        gate=lambda plan: plan.gate[..., :1].expand_as(plan.gate)
    ),
    "beta is missing": partial(_with_beta, torch.ones_like),
    "beta is applied twice": partial(_with_beta, torch.square),
    "beta multiplies a token's value, not what the state already holds of it": _edited(
        held_beta=lambda plan: torch.ones_like(plan.beta)
    ),
    "beta multiplies what the state already holds of a key, not the token's value": _edited(
        beta=lambda plan: torch.ones_like(plan.beta)
    ),
    **{
        words: _edited(scale=lambda plan, power=power: plan.scale**power)
        for words, power in _SCALES.items()
    },
    "the default scale, 1/sqrt(key size), is used in place of the one that is passed": _edited(
        scale=lambda plan: plan.query.shape[-1] ** -0.5
    ),
}


# What a kernel that computes gates and beta itself may do to what a layer projects and learns.


def _decayed(call: StateCall, plan: StatePlan, **changes: Any) -> StatePlan:
    """Return a plan with another gate, of an op that computes it."""
    if not call.raw_gate:
        return plan
    gate = call.gate_of(**changes)
    return plan.replace(gate=(gate if gate.ndim == 3 else gate[..., None]).expand_as(plan.gate))


def _with_late_bias(call: StateCall, plan: StatePlan) -> StatePlan:
    if call.gate_limit is not None:
        return plan
    late, softplus = call.dt_bias.double(), torch.nn.functional.softplus
    return _decayed(call, plan, bias=0.0, softplus=lambda inner: softplus(inner) + late)


def _with_raw_beta(call: StateCall, plan: StatePlan) -> StatePlan:
    return _with_beta(lambda beta: call.b.double(), call, plan) if call.raw_gate else plan


_RAW_GATES: dict[str, _Edit] = {
    "A_log is used without the exponential": partial(_decayed, rate=lambda log: log),
    "A_log is missing in the gate": partial(_decayed, rate=torch.ones_like),
    "the bias of the gate is missing": partial(_decayed, bias=0.0),
    "the bias of the gate is subtracted": partial(_decayed, bias=-1.0),
    "the softplus of the gate is missing": partial(_decayed, softplus=lambda inner: inner),
    "relu is used in place of softplus for the gate": partial(_decayed, softplus=torch.relu),
    "the bias of the gate is added after the softplus": _with_late_bias,
    "beta is not passed through the sigmoid": _with_raw_beta,
}


# Queries, keys and values, their heads, and the products of the delta rule.


def _with_norm(norm: tuple[bool, bool], call: StateCall, plan: StatePlan) -> StatePlan:
    made = right_plan(call, norm=norm)
    return plan.replace(query=made.query, key=made.key)


def _of_heads(head: Callable[[int, int], int], call: StateCall, plan: StatePlan) -> StatePlan:
    """Return the plan with other key heads."""
    heads, keys = plan.query.shape[1], call.key.shape[1]
    index = [head(i, keys) * (heads // keys) for i in range(heads)]
    return plan.replace(query=plan.query[:, index], key=plan.key[:, index])


def _first_head(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the first head for all heads, [tokens, heads, …]."""
    return numbers[:, :1].expand_as(numbers)


_HEADS: dict[str, Callable[[int, int], int]] = {
    "the key head of its number modulo the number of key heads": lambda i, keys: i % keys,
    "the key head of its own number": lambda i, keys: min(i, keys - 1),
    "the first key head": lambda i, keys: 0,
}
_PRODUCTS: dict[str, _Edit] = {
    "queries and keys are not normalised": partial(_with_norm, (False, False)),
    "queries are not normalised": partial(_with_norm, (False, True)),
    "keys are not normalised": partial(_with_norm, (True, False)),
    "what the state already holds of a key is not subtracted from the value": _edited(HELD),
    "what the state already holds of a key is added to the value, not subtracted": _edited(
        held_beta=lambda plan: -plan.held_beta
    ),
    "what the state already holds of a key is read before the gate is applied": _edited(
        HELD_GATE, chunk=1
    ),
    "the output leaves out the row's own token": _edited(OWN),
    "the output is read before the row's own token and its gate are applied": _edited(
        OWN, READ_GATE, chunk=1
    ),
    "the output is read with the key": _edited(query=lambda plan: plan.key),
    **{f"a value head takes {words}": partial(_of_heads, head) for words, head in _HEADS.items()},
    "all value heads take the gate of the first": _edited(gate=lambda plan: _first_head(plan.gate)),
    "all value heads take the beta of the first": partial(_with_beta, _first_head),
    "all value heads take the values of the first": _edited(
        value=lambda plan: _first_head(plan.value)
    ),
}


# The slots that states are loaded from and stored in.


def _other_slot(call: StateCall, seq: int, slot: int, other: Callable[[int, int], int]) -> int:
    found = other(seq, call.num_seqs)
    if found == -1000:
        return min(slot + 1, len(call.states) - 1)
    return -1 - found if found < 0 else int(call.tables[found, 0])


def _loaded(other: Callable[[int, int], int], call: StateCall, plan: StatePlan) -> StatePlan:
    loads = (
        load if load == NONE else _other_slot(call, seq, load, other)
        for seq, load in enumerate(plan.loads)
    )
    return plan.replace(loads=tuple(loads))


def _moved(other: Callable[[int, int], int], call: StateCall, plan: StatePlan) -> StatePlan:
    stores = (
        tuple((count, _other_slot(call, seq, slot, other)) for count, slot in one)
        for seq, one in enumerate(plan.stores)
    )
    return plan.replace(stores=tuple(stores))


def _accepted(at: Callable[[int, int], int], call: StateCall, plan: StatePlan) -> StatePlan:
    if call.num_accepted_tokens is None:
        return plan.replace()
    pairs = zip(call.num_accepted_tokens.tolist(), call.tables, strict=True)
    loads = tuple(int(table[at(accepted - 1, len(table))]) for accepted, table in pairs)
    return plan.replace(loads=loads)


def _stored_less(count: Callable[[int], int], call: StateCall, plan: StatePlan) -> StatePlan:
    """Return the plan with the state after another number of tokens in each slot."""
    stores = tuple(tuple((count(n), slot) for n, slot in one) for one in plan.stores)
    return plan.replace(stores=stores, chunk=1)


def _transposed(call: StateCall, plan: StatePlan) -> StatePlan:
    *lead, values, keys = plan.states.shape
    if call.state_v_first:
        return plan.replace(read_states=plan.states.reshape(*lead, keys, values).mT)
    return plan.replace(read_states=plan.states.mT.reshape(plan.states.shape))


_OTHERS: dict[str, Callable[[int, int], int]] = {
    "the state of the next sequence": lambda seq, count: (seq + 1) % count,
    "the state of the sequence before": lambda seq, count: (seq - 1) % count,
    "the state of the first sequence": lambda seq, count: 0,
    "the slot of its own number": lambda seq, count: -1 - seq,
    "the slot after its own": lambda seq, count: -1000,
}
_ACCEPTED: dict[str, Callable[[int, int], int]] = {
    "the state after its first token, not after the accepted ones": lambda at, count: 0,
    "the state of the slot after that of the accepted token": lambda at, count: min(
        at + 1, count - 1
    ),
    "the state of the slot before that of the accepted token": lambda at, count: max(at - 1, 0),
    "the state of its last slot, not of the accepted token": lambda at, count: count - 1,
}
_SLOTS: dict[str, _Edit] = {
    "no state is loaded: each sequence begins from 0": _edited(
        loads=lambda plan: (NONE,) * len(plan.loads)
    ),
    **{
        f"{verb} {words}": partial(edit, other)
        for words, other in _OTHERS.items()
        for verb, edit in (("a sequence loads", _loaded), ("the state is stored in", _moved))
    },
    **{f"a sequence loads {words}": partial(_accepted, at) for words, at in _ACCEPTED.items()},
    "no state is stored": _edited(stores=lambda plan: ((),) * len(plan.stores)),
    "the state before the last token is stored": partial(_stored_less, lambda n: max(n - 1, 0)),
    "the state before the call is stored": partial(_stored_less, lambda n: 0),
    "only the state after the last token is stored": _edited(
        stores=lambda plan: tuple(one[-1:] for one in plan.stores)
    ),
    "the state after the first token is stored": partial(_stored_less, lambda n: min(n, 1)),
    "the states that are loaded have keys and values exchanged": _transposed,
}


# The tokens that are computed.


def _cut(kept: Callable[[int, int], int], call: StateCall, plan: StatePlan) -> StatePlan:
    """Return the plan in which only the first tokens of each sequence are computed.

    ``kept`` returns their number from that of all tokens and the size of a chunk.
    """
    written, stores = plan.written.clone(), []
    for (first, end), one in zip(pairwise(plan.starts), plan.stores, strict=True):
        last = kept(end - first, plan.chunk)
        written[first + last : end] = False
        stores.append(tuple((min(count, last), slot) for count, slot in one))
    return plan.replace(written=written, stores=tuple(stores), chunk=1)


def _without_first(call: StateCall, plan: StatePlan) -> StatePlan:
    """Return the plan in which the first token of each sequence adds and decays nothing, with no output."""
    first = [a for a, b in pairwise(plan.starts) if a < b]
    changed = {name: getattr(plan, name).clone() for name in ("gate", "value", "key", "written")}
    for numbers in changed.values():
        numbers[first] = 0
    return plan.replace(**changed)


_SEQUENCES: dict[str, _Edit] = {
    "a sequence goes on from the state of the sequence before it in the batch": _edited(
        continues=True
    ),
    "the last token of a sequence is not computed": partial(_cut, lambda n, size: max(n - 1, 0)),
    "the first token of a sequence is not computed": _without_first,
    "the tokens after the last whole chunk are not computed": partial(
        _cut, lambda n, size: n // size * size
    ),
    "the tokens after the first chunk are not computed": partial(_cut, min),
    "sequences without a slot are computed": _edited(
        zeros=lambda plan: torch.zeros_like(plan.zeros)
    ),
}


def _in_chunks(part: str, call: StateCall, plan: StatePlan) -> StatePlan:
    return plan.without(part) if plan.chunk > 1 else plan


_CHUNKS: dict[str, _Edit] = {}
for _size in (64, 128, 32, 16):
    _CHUNKS[f"the state is lost after every {_size} tokens"] = _edited(CARRY, chunk=_size)
    _CHUNKS[f"every {_size} tokens begin from the state before the call"] = _edited(
        chunk=_size, begins_again=True
    )
_CHUNKS |= {
    "the state before a chunk is not added to that after it": _edited(
        loses_state=lambda plan: plan.chunk > 1
    ),
    **{
        f"missing: {part}": _edited(part) if part == OWN_GATE else partial(_in_chunks, part)
        for part in (
            *(INNER, SCORES, INNER_GATE, SCORES_GATE, NEW_GATE, CARRY_GATE, READ_GATE, OWN_GATE),
            *(HELD_GATE, READ_SCALE, SCORES_SCALE, INNER_BETA, HELD_BETA),
        )
    },
    "missing: the gate from the beginning of a chunk, and the state of the chunks before, in the output": (
        _edited(no_read=lambda plan: plan.chunk > 1)
    ),
    "what the state before the chunk already holds of a key is not subtracted": _edited(
        no_held=lambda plan: plan.chunk > 1
    ),
}
