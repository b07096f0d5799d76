"""Explain wrong outputs of an op of linear attention by rules that give the same numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from attnlab.diagnosis.claims import Claim
from attnlab.linear.run import Deviation, Runner, StateOutput, deviation
from attnlab.linear.state_call import StateCall, make_call
from attnlab.linear.state_case import StateCase
from attnlab.linear.state_plan import Evaluated, StatePlan, Units, evaluate, right_plan
from attnlab.linear.state_rules import StateRule, rules


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

    @cached_property
    def seq_of_row(self) -> torch.Tensor:
        """Return the sequence of each row, [tokens] int64."""
        lens = self.call.query_start_loc.diff().long()
        return torch.arange(self.call.num_seqs).repeat_interleave(lens)

    @cached_property
    def seq_of_slot(self) -> torch.Tensor:
        """Return the sequence of each slot, [slots] int64, -1 for none."""
        found = torch.full((len(self.call.states),), -1)
        for seq, table in enumerate(self.call.tables):
            found[table[table >= 0]] = seq
        return found


# Scopes: the sequences and heads in which a rule holds; elsewhere the op is right.

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


_ROUGH, _PART = (
    8.0,
    0.02,
)  # what passes a first comparison, before the bounds of a rule are computed


def _scopes_of(trial: Trial, found: Deviation) -> set[str]:
    """Return the scopes in which a rule's deviation is small, and outside of which the right one's is."""
    fits = {}
    right = trial.deviation
    parts = (
        (found.rows, right.rows, trial.seq_of_row),
        (found.slots, right.slots, trial.seq_of_slot),
    )
    for scope in _SCOPES:
        fits[scope] = all(
            not bool(torch.where(_inside(trial, scope, seqs, ruled.shape[1]), ruled, ours).any())
            for ruled, ours, seqs in parts
        )
    return {scope for scope, is_fit in fits.items() if is_fit}


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
    left: Sequence[Trial],
    fits: dict[int, _Fits],
    trials: Sequence[Trial],
) -> tuple[StateClaim, list[Trial]] | None:
    """Return the claim that explains most trials, of those the simplest, or None."""
    found: list[tuple[int, str, StateRule, list[Trial]]] = []
    for scope in _SCOPES:
        found_rules = dict.fromkeys(rule for one in left for rule in fits[id(one)])
        for rule in found_rules:
            explained = [one for one in left if scope in fits[id(one)].get(rule, ())]
            if len(explained) > 1:
                found.append((len(explained), scope, rule, explained))
    if not found:
        return None
    most = max(count for count, *_ in found)
    order = [one.text for one in rules()]
    same = sorted(
        (one for one in found if one[0] == most),
        key=lambda one: (
            _contradicted(trials, one[2], one[1]),
            one[1] != "",
            order.index(one[2].text),
        ),
    )
    _, scope, rule, explained = same[0]
    right = _contradicted(trials, rule, scope)
    others = tuple(
        one.text
        for _, other_scope, one, other in same[1:]
        if other == explained
        and other_scope == scope
        and _contradicted(trials, one, other_scope) == right
    )
    claim = StateClaim(cases=most - 1, rule=rule, scope=scope, others=others[:2], right=right)
    return claim, explained


def _contradicted(trials: Sequence[Trial], rule: StateRule, scope: str) -> int:
    """Return in how many right trials a rule would show."""
    return sum(
        scope not in fitting_scopes(one, rule, is_sure=False) for one in trials if not one.is_wrong
    )
