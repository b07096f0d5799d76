"""StateRule: one way in which an op of linear attention can be wrong, as an edit of a StatePlan."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlab.linear.state_call import NONE, StateCall
from attnlab.linear.state_plan import (
    CARRY,
    CARRY_GATE,
    HELD,
    HELD_GATE,
    INNER,
    INNER_GATE,
    NEW_GATE,
    OWN,
    OWN_GATE,
    READ_GATE,
    SCORES,
    SCORES_GATE,
    StatePlan,
    right_plan,
)

_Edit = Callable[..., StatePlan]  # of a call and its right plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateRule:
    """A clause that says what an op does, and the edit that does it. ``edit`` may return the plan itself."""

    text: str
    edit: _Edit


@functools.cache
def rules() -> tuple[StateRule, ...]:
    """Return all rules; of rules with the same result, the first is the simplest."""
    return tuple(StateRule(text=text, edit=edit) for text, edit in _all())


def _all() -> Iterator[tuple[str, _Edit]]:
    yield from _factors()
    yield from _raw_gates()
    yield from _products()
    yield from _slots()
    yield from _sequences()
    yield from _chunks()


# Factors: gate, beta, scale.


def _factors() -> Iterator[tuple[str, _Edit]]:
    for words, factor in _GATES.items():
        yield words, lambda call, plan, factor=factor: plan.replace(gate=plan.gate * factor)
    for words, way in _NEIGHBOURS.items():
        yield (
            f"a token takes the gate of {words}",
            lambda call, plan, way=way: plan.replace(gate=_taken(plan, plan.gate, way)),
        )
        yield (
            f"a token takes the beta of {words}",
            lambda call, plan, way=way: _with_beta(plan, _taken(plan, plan.beta, way)),
        )
    yield (
        "the state is multiplied by the gate after a token is added, not before",
        lambda call, plan: plan.replace(chunk=1, late_gate=True).without(HELD_GATE),
    )
    yield (
        "the gate of a key's first element is taken for all elements",
        lambda call, plan: plan.replace(gate=plan.gate[..., :1].expand_as(plan.gate)),
    )
    yield "beta is missing", lambda call, plan: _with_beta(plan, torch.ones_like(plan.beta))
    yield "beta is applied twice", lambda call, plan: _with_beta(plan, plan.beta.square())
    yield (
        "beta multiplies a token's value, not what the state already holds of it",
        lambda call, plan: plan.replace(held_beta=torch.ones_like(plan.beta)),
    )
    yield (
        "beta multiplies what the state already holds of a key, not the token's value",
        lambda call, plan: plan.replace(beta=torch.ones_like(plan.beta)),
    )
    for words, power in _SCALES.items():
        yield words, lambda call, plan, power=power: plan.replace(scale=plan.scale**power)
    yield (
        "the default scale, 1/sqrt(key size), is used in place of the one that is passed",
        lambda call, plan: plan.replace(scale=plan.query.shape[-1] ** -0.5),
    )


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
}


def _raw_gates() -> Iterator[tuple[str, _Edit]]:
    """Yield what a kernel that computes gates and beta itself may do to what a layer projects and learns."""
    softplus = torch.nn.functional.softplus
    decays: dict[str, _Decay] = {
        "A_log is used without the exponential": lambda log, x, bias: log * softplus(x + bias),
        "A_log is missing in the gate": lambda log, x, bias: softplus(x + bias),
        "the bias of the gate is missing": lambda log, x, bias: log.exp() * softplus(x),
        "the bias of the gate is subtracted": lambda log, x, bias: log.exp() * softplus(x - bias),
        "the softplus of the gate is missing": lambda log, x, bias: log.exp() * (x + bias),
        "relu is used in place of softplus for the gate": lambda log, x, bias: (
            log.exp() * (x + bias).relu()
        ),
    }
    for words, decay in decays.items():
        yield words, lambda call, plan, decay=decay: _decayed(call, plan, decay)
    yield (
        "beta is not passed through the sigmoid",
        lambda call, plan: _with_beta(plan, call.b.double()) if call.op.raw_gate else plan,
    )


_Decay = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _decayed(call: StateCall, plan: StatePlan, decay: _Decay) -> StatePlan:
    """Return a plan with another gate, of an op that computes it."""
    if not call.op.raw_gate:
        return plan
    log = call.A_log.double().view(-1, *[1] * (call.a.ndim - 2))
    gate = -decay(log, call.a.double(), call.dt_bias.double())
    return plan.replace(gate=(gate if gate.ndim == 3 else gate[..., None]).expand_as(plan.gate))


def _with_beta(plan: StatePlan, beta: torch.Tensor) -> StatePlan:
    return plan.replace(beta=beta, held_beta=beta) if plan.delta else plan


def _taken(plan: StatePlan, numbers: torch.Tensor, way: Callable[[int, int], int]) -> torch.Tensor:
    """Return rows of a tensor, each from another row of its sequence."""
    index = list(range(len(numbers)))
    for first, end in zip(plan.starts, plan.starts[1:], strict=False):
        for i in range(first, end):
            index[i] = first + way(i - first, end - first)
    return numbers[index]


# Queries, keys and values, their heads, and the products of the delta rule.


def _products() -> Iterator[tuple[str, _Edit]]:
    for words, norm in {
        "queries and keys are not normalised": (False, False),
        "queries are not normalised": (False, True),
        "keys are not normalised": (True, False),
    }.items():
        yield words, lambda call, plan, norm=norm: _like(right_plan(call, norm=norm), plan)
    yield (
        "what the state already holds of a key is not subtracted from the value",
        lambda call, plan: plan.without(HELD),
    )
    yield (
        "what the state already holds of a key is added to the value, not subtracted",
        lambda call, plan: plan.replace(held_beta=-plan.held_beta),
    )
    yield (
        "what the state already holds of a key is read before the gate is applied",
        lambda call, plan: plan.replace(chunk=1).without(HELD_GATE),
    )
    yield "the output leaves out the row's own token", lambda call, plan: plan.without(OWN)
    yield (
        "the output is read before the row's own token and its gate are applied",
        lambda call, plan: plan.replace(chunk=1).without(OWN, READ_GATE),
    )
    yield "the output is read with the key", lambda call, plan: plan.replace(query=plan.key)
    for words, head in _HEADS.items():
        yield (
            f"a value head takes {words}",
            lambda call, plan, head=head: _of_heads(call, plan, head),
        )
    yield (
        "all value heads take the gate of the first",
        lambda call, plan: plan.replace(gate=plan.gate[:, :1].expand_as(plan.gate)),
    )
    yield (
        "all value heads take the beta of the first",
        lambda call, plan: _with_beta(plan, plan.beta[:, :1].expand_as(plan.beta)),
    )
    yield (
        "all value heads take the values of the first",
        lambda call, plan: plan.replace(value=plan.value[:, :1].expand_as(plan.value)),
    )


_HEADS: dict[str, Callable[[int, int, int], int]] = {
    "the key head of its number modulo the number of key heads": lambda i, keys, each: i % keys,
    "the key head of its own number": lambda i, keys, each: min(i, keys - 1),
    "the first key head": lambda i, keys, each: 0,
}


def _like(made: StatePlan, plan: StatePlan) -> StatePlan:
    """Return a plan with the queries and keys of another."""
    return plan.replace(query=made.query, key=made.key)


def _of_heads(call: StateCall, plan: StatePlan, head: Callable[[int, int, int], int]) -> StatePlan:
    """Return the plan with other key heads."""
    heads, keys = plan.query.shape[1], call.key.shape[1]
    each = heads // keys
    index = [head(i, keys, each) * each for i in range(heads)]
    return plan.replace(query=plan.query[:, index], key=plan.key[:, index])


# Slots: which states are loaded and stored.


def _slots() -> Iterator[tuple[str, _Edit]]:
    yield (
        "no state is loaded: each sequence begins from 0",
        lambda call, plan: plan.replace(loads=(NONE,) * len(plan.loads)),
    )
    for words, other in _OTHERS.items():
        yield (
            f"a sequence loads {words}",
            lambda call, plan, other=other: plan.replace(loads=tuple(_loads(call, plan, other))),
        )
        yield (
            f"the state is stored in {words}",
            lambda call, plan, other=other: plan.replace(stores=tuple(_moved(call, plan, other))),
        )
    for words, at in _ACCEPTED.items():
        yield (
            f"a sequence loads {words}",
            lambda call, plan, at=at: plan.replace(loads=tuple(_accepted(call, plan, at))),
        )
    yield "no state is stored", lambda call, plan: plan.replace(stores=((),) * len(plan.stores))
    yield (
        "the state before the last token is stored",
        lambda call, plan: _stores(plan, lambda count: max(count - 1, 0)),
    )
    yield "the state before the call is stored", lambda call, plan: _stores(plan, lambda count: 0)
    yield (
        "only the state after the last token is stored",
        lambda call, plan: plan.replace(stores=tuple(one[-1:] for one in plan.stores)),
    )
    yield (
        "the state after the first token is stored",
        lambda call, plan: _stores(plan, lambda count: min(count, 1)),
    )
    yield "the states that are loaded have keys and values exchanged", _transposed


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


def _loads(call: StateCall, plan: StatePlan, other: Callable[[int, int], int]) -> Iterator[int]:
    for seq, load in enumerate(plan.loads):
        yield load if load == NONE else _other_slot(call, seq, load, other)


def _other_slot(call: StateCall, seq: int, slot: int, other: Callable[[int, int], int]) -> int:
    found = other(seq, call.num_seqs)
    if found == -1000:
        return min(slot + 1, len(call.states) - 1)
    return -1 - found if found < 0 else int(call.tables[found, 0])


def _accepted(call: StateCall, plan: StatePlan, at: Callable[[int, int], int]) -> Iterator[int]:
    if call.num_accepted_tokens is None:
        yield from plan.loads
        return
    for accepted, table in zip(call.num_accepted_tokens.tolist(), call.tables, strict=True):
        yield int(table[at(accepted - 1, len(table))])


def _moved(
    call: StateCall, plan: StatePlan, other: Callable[[int, int], int]
) -> Iterator[tuple[tuple[int, int], ...]]:
    for seq, one in enumerate(plan.stores):
        yield tuple((count, _other_slot(call, seq, slot, other)) for count, slot in one)


def _stores(plan: StatePlan, count: Callable[[int], int]) -> StatePlan:
    """Return the plan with the state after another number of tokens in each slot."""
    stores = tuple(tuple((count(n), slot) for n, slot in one) for one in plan.stores)
    return plan.replace(stores=stores, chunk=1)


def _transposed(call: StateCall, plan: StatePlan) -> StatePlan:
    values, keys = plan.states.shape[-2:]
    if values == keys:
        return plan.replace(read_states=plan.states.mT)
    return plan.replace(read_states=plan.states.mT.reshape(plan.states.shape))


# Sequences: where they begin, and which rows are computed.


def _sequences() -> Iterator[tuple[str, _Edit]]:
    yield (
        "a sequence goes on from the state of the sequence before it in the batch",
        lambda call, plan: plan.replace(continues=True),
    )
    yield (
        "the last token of a sequence is not computed",
        lambda call, plan: _cut(plan, lambda count: max(count - 1, 0)),
    )
    yield "the first token of a sequence is not computed", _without_first
    yield (
        "the tokens after the last whole chunk are not computed",
        lambda call, plan: _cut(plan, lambda count: count // plan.chunk * plan.chunk),
    )
    yield (
        "the tokens after the first chunk are not computed",
        lambda call, plan: _cut(plan, lambda count: min(count, plan.chunk)),
    )
    yield (
        "sequences without a slot are computed",
        lambda call, plan: plan.replace(zeros=torch.zeros_like(plan.zeros)),
    )


def _cut(plan: StatePlan, kept: Callable[[int], int]) -> StatePlan:
    """Return the plan in which only the first tokens of each sequence are computed."""
    written, stores = plan.written.clone(), []
    for seq, one in enumerate(plan.stores):
        first, end = plan.starts[seq], plan.starts[seq + 1]
        last = kept(end - first)
        written[first + last : end] = False
        stores.append(tuple((min(count, last), slot) for count, slot in one))
    return plan.replace(written=written, stores=tuple(stores), chunk=1)


def _without_first(call: StateCall, plan: StatePlan) -> StatePlan:
    """Return the plan in which the first token of each sequence adds and decays nothing, with no output."""
    first = [a for a, b in zip(plan.starts, plan.starts[1:], strict=False) if a < b]
    gate, value, key = plan.gate.clone(), plan.value.clone(), plan.key.clone()
    gate[first], value[first], key[first] = 0.0, 0.0, 0.0
    written = plan.written.clone()
    written[first] = False
    return plan.replace(gate=gate, value=value, key=key, written=written)


# Chunks: what passes from one to the next, and what tokens of one chunk do to each other.


def _chunks() -> Iterator[tuple[str, _Edit]]:
    for size in (64, 128, 32, 16):
        yield (
            f"the state is lost after every {size} tokens",
            lambda call, plan, size=size: plan.replace(chunk=size).without(CARRY),
        )
        yield (
            f"every {size} tokens begin from the state before the call",
            lambda call, plan, size=size: plan.replace(chunk=size, begins_again=True),
        )
    yield (
        "the state before a chunk is not added to that after it",
        lambda call, plan: plan.replace(loses_state=plan.chunk > 1),
    )
    for part in (INNER, SCORES, INNER_GATE, SCORES_GATE, NEW_GATE, CARRY_GATE, READ_GATE):
        yield f"missing: {part}", lambda call, plan, part=part: _in_chunks(plan, part)
    yield f"missing: {OWN_GATE}", lambda call, plan: plan.without(OWN_GATE)
    yield f"missing: {HELD_GATE}", lambda call, plan: _in_chunks(plan, HELD_GATE)
    yield (
        "missing: the gate from the beginning of a chunk, and the state of the chunks before, in the output",
        lambda call, plan: plan.replace(no_read=plan.chunk > 1),
    )
    yield (
        "what the state before the chunk already holds of a key is not subtracted",
        lambda call, plan: plan.replace(no_held=plan.chunk > 1),
    )


def _in_chunks(plan: StatePlan, part: str) -> StatePlan:
    return plan.without(part) if plan.chunk > 1 else plan
