"""Explain wrong outputs of an op of linear attention by rules that give the same numbers."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from attnlab.diagnosis.claims import Claim
from attnlab.linear.run import Deviation, Runner, StateOutput, deviation
from attnlab.linear.state_call import StateCall, make_call
from attnlab.linear.state_case import StateCase
from attnlab.linear.state_plan import (
    Evaluated,
    StatePlan,
    StateRule,
    Units,
    evaluate,
    right_plan,
    rules,
)
from attnlab.weights.codes import one_hot, random_codes

# The effective weights of an op of linear attention: of every token's value and of every state.
#
# The output and the final states are linear in the values and in the states before the call, and each element
# of a value meets the same weights. So coded values measure them, as for softmax attention
# (:mod:`attnlab.weights.codes`): lane j is 1 in element j mod head_v_dim of run j // head_v_dim. A lane is a
# token, or one element of the key in the state of a slot.


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

    def by_source(self, *, of_right: bool = False) -> torch.Tensor:
        """Return the size of each row's weights by source, [tokens, heads, tokens + slots].

        That of a slot is the length of the vector that its state is multiplied with. ``of_right``: those of a
        right op.
        """
        weights = self.expected.output if of_right else self.output
        sizes = (len(self.call.states), self.call.key.shape[-1])
        of_slots = weights[..., self.tokens :].unflatten(-1, sizes).norm(dim=-1)
        return torch.cat([weights[..., : self.tokens], of_slots], -1)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A case that ran: its call, the result, and what is right."""

    case: StateCase
    call: StateCall
    found: StateOutput

    @classmethod
    def of(cls, case: StateCase, run: Runner) -> "Trial":
        """Run a case."""
        call = make_call(case)
        return cls(case=case, call=call, found=run(call))

    @cached_property
    def plan(self) -> StatePlan:
        """Return the right plan."""
        return right_plan(self.call)

    @cached_property
    def right(self) -> Evaluated:
        """Return what is right."""
        return evaluate(self.plan, Units.of(self.call))

    @cached_property
    def deviation(self) -> Deviation:
        """Return how far the result is from what is right."""
        return self.deviation_from(self.right)

    def deviation_from(self, expected: Evaluated) -> Deviation:
        """Return how far the result is from something else."""
        return deviation(self.call, self.found.output, self.found.states, expected)

    @property
    def is_wrong(self) -> bool:
        """Answer whether an output or a state is wrong."""
        return not self.deviation.is_right

    @property
    def kind(self) -> str:
        """Return "wrong_output", "wrong_state" if every output is right, or "" if nothing is wrong."""
        if not self.is_wrong:
            return ""
        return "wrong_output" if bool(self.deviation.rows.any()) else "wrong_state"

    @property
    def evidence(self) -> str:
        """Return the largest error, as text."""
        return f"the largest error is {self.deviation.worst:.3g} times its rounding bound"

    @cached_property
    def seq_of_slot(self) -> torch.Tensor:
        """Return the sequence of each slot, [slots] int64, -1 for none."""
        found = torch.full((len(self.call.states),), -1)
        for seq, table in enumerate(self.call.tables):
            found[table[table >= 0]] = seq
        return found


_Where = Callable[[torch.Tensor, int], torch.Tensor]
_SCOPES: dict[str, tuple[_Where | None, _Where | None]] = {
    "": (None, None),
    "in the first value head": (lambda at, count: at == 0, None),
    "in all value heads but the first": (lambda at, count: at > 0, None),
    "in the last value head": (lambda at, count: at == count - 1, None),
    "in all value heads but the last": (lambda at, count: at < count - 1, None),
    "in every second value head": (lambda at, count: at % 2 == 1, None),
    "in the first sequence": (None, lambda at, count: at == 0),
    "in all sequences but the first": (None, lambda at, count: at > 0),
    "in the last sequence": (None, lambda at, count: at == count - 1),
    "in all sequences but the last": (None, lambda at, count: at < count - 1),
}


def _inside(trial: Trial, scope: str, seqs: torch.Tensor, heads: int) -> torch.Tensor:
    """Return which [n, heads] are in a scope; ``seqs``: the sequence of each of n."""
    by_head, by_seq = _SCOPES[scope]
    inside = torch.ones(len(seqs), heads, dtype=torch.bool)
    if by_head is not None:
        inside &= by_head(torch.arange(heads), heads)
    if by_seq is not None:
        inside &= by_seq(seqs, trial.call.num_seqs)[:, None]
    return inside


@dataclass(frozen=True, slots=True, kw_only=True)
class StateClaim(Claim):
    """A rule that gives the outputs and the states of all cases that it explains.

    ``scope``: where it holds, a key of the scopes. ``others``: rules that no case separates from it.
    ``right``: the number of cases in which it would show and the op is right. ``wrong``: of those in which
    it would show and the op is wrong in another way.
    """

    rule: StateRule
    scope: str = ""
    others: tuple[str, ...] = ()
    right: int = 0
    wrong: int = 0

    @property
    def said(self) -> str:
        """Return the rule in words, with where it holds."""
        laws = ", or ".join((self.rule.text, *self.others))
        separate = ": no case separates them" if self.others else ""
        where = f"{self.scope}: " if self.scope else ""
        some = f" (not in {self.right} other cases)" if self.right else ""
        more = f" (in {self.wrong} other wrong cases it does not hold)" if self.wrong else ""
        return f"{where}{laws}{separate}{some}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts(Claim):
    """What the wrong outputs and weights of all cases have in common, without a rule that gives them."""

    facts: tuple[str, ...]

    @property
    def said(self) -> str:
        """Return the facts in words."""
        return "; ".join(self.facts)


def shows(trial: Trial, rule: StateRule) -> bool:
    """Answer whether a rule gives something else than what is right."""
    try:
        plan = rule.edit(trial.call, trial.plan)
    except (IndexError, RuntimeError):
        return False
    if plan is trial.plan:
        return False
    ruled = evaluate(plan)
    return not deviation(trial.call, ruled.output, ruled.states, trial.right).is_right


def fitting_scopes(trial: Trial, rule: StateRule, is_sure: bool = True) -> set[str]:
    """Return the scopes in which a rule gives the result of a trial, and outside of which it is right.

    With ``is_sure``, the rule must give something else than what is right; else that is asked of no trial.
    """
    try:
        plan = rule.edit(trial.call, trial.plan)
    except (IndexError, RuntimeError):
        return set()
    quick = evaluate(plan.in_large_chunks)
    if is_sure and plan is trial.plan:
        return set()
    rough = Evaluated(
        output=quick.output,
        states=quick.states,
        output_bound=_ROUGH * trial.right.output_bound + _PART * quick.output.abs(),
        states_bound=_ROUGH * trial.right.states_bound + _PART * quick.states.abs(),
    )
    if not _scopes_of(trial, trial.deviation_from(rough)):
        return set()
    exact = evaluate(plan, Units.of(trial.call))
    return _scopes_of(trial, trial.deviation_from(exact))


# What passes a first comparison, before the bounds of a rule are computed.
_ROUGH, _PART = 8.0, 0.02


def _scopes_of(trial: Trial, found: Deviation) -> set[str]:
    """Return the scopes in which a rule's deviation is small, and outside of which the right one's is."""
    right = trial.deviation
    parts = (
        (found.rows, right.rows, trial.call.seq_of_row),
        (found.slots, right.slots, trial.seq_of_slot),
    )
    return {
        scope
        for scope in _SCOPES
        if not any(
            bool(torch.where(_inside(trial, scope, seqs, ruled.shape[1]), ruled, ours).any())
            for ruled, ours, seqs in parts
        )
    }


def explain(trials: Sequence[Trial]) -> tuple[list[tuple[Claim, list[Trial]]], list[Trial]]:
    """Return claims, each with the trials that it explains, and the wrong trials that no claim explains.

    A claim explains at least two wrong trials. Rules are looked for in the smallest.
    """
    left = sorted((one for one in trials if one.is_wrong), key=lambda one: len(one.call.query))
    fits: dict[int, _Fits] = {id(one): {} for one in left}
    claims: list[tuple[Claim, list[Trial]]] = []
    while len(left) > 1:
        some = [rule for one in left[:_SMALLEST] for rule in _fits(one, rules(), fits)]
        for one in left:
            _fits(one, list(dict.fromkeys(some)), fits)
        best = _best(left, fits, trials)
        if best is None:
            break
        claim, explained = best
        claims.append((claim, explained))
        left = [one for one in left if one not in explained]
    return claims, left


_SMALLEST = 3
_Fits = dict[StateRule, set[str]]


def _fits(one: Trial, some: Sequence[StateRule], fits: dict[int, _Fits]) -> list[StateRule]:
    """Return which rules fit a trial, and note the scopes of each."""
    known = fits[id(one)]
    for rule in some:
        if rule not in known:
            known[rule] = fitting_scopes(one, rule)
    return [rule for rule in some if known[rule]]


def _best(
    left: Sequence[Trial], fits: dict[int, _Fits], trials: Sequence[Trial]
) -> tuple[StateClaim, list[Trial]] | None:
    """Return the claim that explains most trials, of those the simplest, or None."""
    found: list[tuple[str, StateRule, list[Trial]]] = []
    for scope in _SCOPES:
        for rule in dict.fromkeys(rule for one in left for rule in fits[id(one)]):
            explained = [one for one in left if scope in fits[id(one)].get(rule, ())]
            if len(explained) > 1:
                found.append((scope, rule, explained))
    if not found:
        return None
    most = max(len(explained) for *_, explained in found)
    order = [one.text for one in rules()]
    ranked = sorted(
        (
            (
                _contradicted(trials, rule, scope),
                scope != "",
                order.index(rule.text),
                scope,
                explained,
            )
            for scope, rule, explained in found
            if len(explained) == most
        ),
        key=lambda one: one[:3],
    )
    right, _, first, scope, explained = ranked[0]
    rule = rules()[first]
    others = tuple(
        order[at]
        for count, _, at, other_scope, other in ranked[1:]
        if other == explained and other_scope == scope and count == right
    )
    claim = StateClaim(cases=most - 1, rule=rule, scope=scope, others=others[:2], right=right)
    return claim, explained


def _contradicted(trials: Sequence[Trial], rule: StateRule, scope: str) -> int:
    """Return in how many right trials a rule would show."""
    return sum(
        scope not in fitting_scopes(one, rule, is_sure=False) for one in trials if not one.is_wrong
    )


_SEQUENCES: dict[str, Callable[..., torch.Tensor]] = {
    "the wrong sequences are those after a sequence without a token": lambda lens: (
        ((lens == 0).cumsum(0) > 0) & (lens > 0)
    ),
    **{
        f"the wrong sequences are those with more than {size} tokens": lambda lens, size=size: (
            lens > size
        )
        for size in (1, 16, 32, 64, 128)
    },
    "the wrong sequences are those with one token": lambda lens: lens == 1,
}
_SEEN = 1e-5  # a weight above this is one; a right op gives the sources in question exactly 0
_MOST_LANES = 600  # of a case that is measured
_MOST_COUNTS = 8  # numbers of tokens whose states are compared with that of a slot


def facts_of(trials: Sequence[Trial], every: Sequence[Trial], run: Runner) -> WeightFacts:
    """Return the facts that hold in most of some wrong trials, and do not ask for a wrong result of a right
    one of ``every``. The weights of the three smallest are measured.
    """
    right = [one.call.lens for one in every if not one.is_wrong]
    facts = _common([list(_of_result(one)) for one in trials], "cases")
    for words, which in _SEQUENCES.items():
        if any(bool(which(lens).any()) for lens in right):
            facts = [fact for fact in facts if not fact.startswith(words)]
    small = [one for one in trials if _lanes(one) <= _MOST_LANES and bool(one.deviation.rows.any())]
    small.sort(key=lambda one: (one.call.num_seqs < 2, _lanes(one)))
    found = [list(weight_facts(measure(one.call, run))) for one in small[:3]]
    return WeightFacts(cases=len(trials) - 1, facts=(*facts, *_common(found, "measured cases")))


def _common(found: Sequence[Sequence[str]], noun: str) -> list[str]:
    """Return the facts that hold in more than half of some cases, with their number if not in all."""
    every = dict.fromkeys(fact for one in found for fact in one)
    counts = {fact: sum(fact in one for one in found) for fact in every}
    return [
        fact if count == len(found) else f"{fact} (in {count} of {len(found)} {noun})"
        for fact, count in counts.items()
        if 2 * count > len(found)
    ]


def _lanes(trial: Trial) -> int:
    slots, _, _, keys = trial.call.states.shape
    return len(trial.call.query) + slots * keys


def _of_result(one: Trial) -> Iterator[str]:
    """Yield what is true of the wrong outputs and states of a trial."""
    rows, slots = one.deviation.rows, one.deviation.slots
    if not bool(rows.any()):
        yield "every output is right, and states after the call are wrong"
        yield from _of_heads(slots.any(0))
        yield from dict.fromkeys(kind for kind, _ in stored_facts(one))
        return
    if not bool(slots.any()):
        yield "outputs are wrong, and every state after the call is right"
    if not bool(one.found.output.isfinite().all(-1)[rows].any()):
        yield "every wrong row of the output is NaN, infinite or not written"
    yield from _of_heads(rows.any(0))
    yield from _of_elements((one.deviation.output > 1).flatten(0, 1).any(0))
    yield from _of_sequences(one, rows.any(1))
    found, right = one.found.output.double()[rows], one.right.output[rows]
    total = float(right.square().sum())
    factor = float((found * right).sum()) / total if total else float("nan")
    if factor == factor and abs(factor) > 1e-3:
        error = (found - factor * right).abs()
        bound = (1 + abs(factor)) * one.right.output_bound[rows]
        if bool((error <= bound).all()):
            yield f"the wrong rows are {factor:.2g} times what they should be"


def _of_heads(wrong: torch.Tensor) -> Iterator[str]:
    if len(wrong) > 1 and bool(wrong[1:].all()) and not bool(wrong[0]):
        yield "the first value head is right, and all others are wrong"
    if len(wrong) > 1 and bool(wrong[0]) and not bool(wrong[1:].any()):
        yield "only the first value head is wrong"


def _of_elements(wrong: torch.Tensor) -> Iterator[str]:
    """Yield from which element on values are wrong, if not all are."""
    if bool(wrong.all()):
        return
    first = int(wrong.nonzero()[0])
    if first and bool(wrong[first:].all()):
        yield f"only elements of values from {first} on are wrong"
    last = int(wrong.nonzero()[-1])
    if not first and bool(wrong[: last + 1].all()):
        yield f"only elements of values before {last + 1} are wrong"


def _of_sequences(one: Trial, rows: torch.Tensor) -> Iterator[str]:
    """Yield which sequences are wrong, and from which token on."""
    lens = one.call.lens
    wrong = torch.zeros_like(lens, dtype=torch.bool)
    wrong[one.call.seq_of_row[rows]] = True
    parts = [part for part in rows.split(lens.tolist()) if bool(part.any())]
    firsts = {int(part.nonzero()[0]) for part in parts}
    if len(firsts) == 1 and (first := firsts.pop()):
        yield f"the first wrong row of each wrong sequence is that of token {first}"
    if all(bool(part.all()) for part in parts):
        yield "all rows of a wrong sequence are wrong"
    for words, which in _SEQUENCES.items():
        if bool((wrong == which(lens)).all()) and not bool(wrong.all()):
            yield words


def slot_kind(call: StateCall, slot: int, seq: int) -> str:
    """Return what a slot is to a sequence, in words."""
    owners = torch.nonzero((call.tables == slot).any(1)).flatten().tolist()
    if seq in owners:
        return "another slot of their own sequence"
    if owners:
        return "the slot of another sequence"
    return "slot 0, which belongs to no sequence" if slot == 0 else "a slot of no sequence"


def read_slots(weights: StateWeights) -> Iterator[tuple[int, int, str]]:
    """Yield each sequence and slot whose state its rows read and must not, with what the slot is to it."""
    call, tokens = weights.call, weights.tokens
    found = weights.by_source().nan_to_num(0.0)[..., tokens:].amax(1) > _SEEN
    for seq, load in enumerate(call.loads.tolist()):
        rows = call.rows_of(seq)
        for slot in torch.nonzero(found[rows.start : rows.stop].any(0)).flatten().tolist():
            if slot != load:
                kind = "a state, and must begin from 0" if load < 0 else slot_kind(call, slot, seq)
                yield seq, slot, kind


def stored_facts(one: Trial) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the state of a slot after the call: in general, and for this slot.

    Of a state that is none of those that sequences have before, within and after the call, or several of
    them within rounding, nothing is yielded.
    """
    right = {slot: (seq, n) for seq, some in enumerate(one.plan.stores) for n, slot in some}
    for slot in torch.nonzero(one.deviation.slots.any(1)).flatten().tolist():
        seq, count = right.get(slot, (-1, 0))
        held = list(_held(one, slot))
        if len(held) != 1:
            continue
        other, n = held[0]
        if other < 0:
            text = "a slot keeps its state from before the call, and must get a new one"
        elif seq < 0:
            kind = slot_kind(one.call, slot, other).replace("their own", "the same")
            text = f"the state of a sequence is stored in {kind}, which must stay as it is"
        elif other != seq:
            text = "a slot gets the state of another sequence"
        else:
            text = "a slot gets the state after another token of its own sequence"
        wanted = "" if seq < 0 else f", must have that after {count} of sequence {seq}"
        has = (
            "the state before the call"
            if other < 0
            else f"the state after {n} tokens of sequence {other}"
        )
        yield text, f"slot {slot} has {has}{wanted}"


def _held(one: Trial, slot: int) -> Iterator[tuple[int, int]]:
    """Yield the sequences and numbers of tokens whose state a slot has; (-1, 0) for that before the call."""
    call, found = one.call, one.found.states[slot].double()
    if torch.equal(found, call.states[slot].double()):
        yield -1, 0
        return
    bound = one.right.states_bound.amax().clamp(min=_SEEN)
    for seq in range(call.num_seqs):
        length = len(call.rows_of(seq))
        for count in range(max(0, length - _MOST_COUNTS), length + 1):
            stores = tuple(((count, slot),) if at == seq else () for at in range(call.num_seqs))
            chunk = one.plan.chunk if count == length else 1
            state = evaluate(one.plan.replace(stores=stores, chunk=chunk)).states[slot]
            if bool(((found - state).abs() <= bound).all()):
                yield seq, count


def weight_facts(weights: StateWeights) -> Iterator[str]:
    """Yield what is true of the sources that rows have a weight for."""
    if not weights.is_linear:
        yield "the output is not linear in values and states, or mixes their elements"
        return
    call, tokens = weights.call, weights.tokens
    if not bool(weights.output.isfinite().any()):
        return
    found, right = weights.by_source().nan_to_num(0.0), weights.by_source(of_right=True)
    seq = call.seq_of_row
    row, source = torch.arange(tokens)[:, None], torch.arange(tokens)
    foreign, later = seq[:, None] != seq, (seq[:, None] == seq) & (source > row)
    own_slot = torch.arange(len(call.states)) == call.loads[seq][:, None]
    kinds = {"tokens of another sequence": foreign, "later tokens of their own sequence": later}
    for words, where in kinds.items():
        if bool((found[..., :tokens].abs() * where[:, None] > _SEEN).any()):
            yield f"rows have a weight for {words}"
    yield from dict.fromkeys(f"rows read {kind}" for _, _, kind in read_slots(weights))
    wrong = weights.deviation.output > 1
    of_tokens, of_states = wrong[..., :tokens].any(), wrong[..., tokens:].any()
    if bool(of_tokens) and not bool(of_states) and bool((call.loads >= 0).any()):
        yield "only weights of tokens are wrong, not those of the states before the call"
    if bool(of_states) and not bool(of_tokens):
        yield "only weights of the states before the call are wrong, not those of tokens"
    lost = own_slot[:, None] & (found[..., tokens:] < _SEEN) & (right[..., tokens:] > 100 * _SEEN)
    has = own_slot[:, None] & (right[..., tokens:] > 100 * _SEEN)
    if bool(has.any()) and bool((lost == has).all()):
        yield "no row has a weight for its sequence's state before the call"
