"""What wrong outputs of an op of linear attention have in common, where no rule gives them."""

from collections.abc import Callable, Iterator, Sequence

import torch

from attnlab.linear.run import Runner
from attnlab.linear.state_call import StateCall
from attnlab.linear.state_claims import Trial, WeightFacts
from attnlab.linear.state_plan import evaluate
from attnlab.linear.state_xray import StateWeights, measure

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
    right = [one.call.query_start_loc.diff().long() for one in every if not one.is_wrong]
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
    yield from _of_ratio(one, rows)


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
    lens = one.call.query_start_loc.diff().long()
    wrong = torch.zeros_like(lens, dtype=torch.bool)
    wrong[one.seq_of_row[rows]] = True
    firsts = {
        int(rows[one.call.rows_of(seq).start : one.call.rows_of(seq).stop].nonzero()[0])
        for seq in wrong.nonzero().flatten().tolist()
    }
    if len(firsts) == 1 and (first := firsts.pop()):
        yield f"the first wrong row of each wrong sequence is that of token {first}"
    whole = all(
        bool(rows[one.call.rows_of(seq).start : one.call.rows_of(seq).stop].all())
        for seq in wrong.nonzero().flatten().tolist()
    )
    if whole:
        yield "all rows of a wrong sequence are wrong"
    for words, which in _SEQUENCES.items():
        if bool((wrong == which(lens)).all()) and not bool(wrong.all()):
            yield words


def _of_ratio(one: Trial, rows: torch.Tensor) -> Iterator[str]:
    """Yield the factor of the wrong rows, if it is one number."""
    found, right = one.found.output.double()[rows], one.right.output[rows]
    total = float(right.square().sum())
    factor = float((found * right).sum()) / total if total else float("nan")
    if factor == factor and abs(factor) > 1e-3:
        error = (found - factor * right).abs()
        bound = (1 + abs(factor)) * one.right.output_bound[rows]
        if bool((error <= bound).all()):
            yield f"the wrong rows are {factor:.2g} times what they should be"


# Slots: whose states rows read and slots get, where these are not the right ones.


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
    found, right = weights.by_source().nan_to_num(0.0), weights.expected_by_source()
    seq = torch.arange(call.num_seqs).repeat_interleave(call.query_start_loc.diff().long())
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
    if bool(of_tokens) and not bool(of_states):
        yield "only weights of tokens are wrong, not those of the states before the call"
    if bool(of_states) and not bool(of_tokens):
        yield "only weights of the states before the call are wrong, not those of tokens"
    lost = own_slot[:, None] & (found[..., tokens:] < _SEEN) & (right[..., tokens:] > 100 * _SEEN)
    has = own_slot[:, None] & (right[..., tokens:] > 100 * _SEEN)
    if bool(has.any()) and bool((lost == has).all()):
        yield "no row has a weight for its sequence's state before the call"
