"""Search: find the descriptions that explain measured weights, simplest first.

Each rule is tried on a sample of rows and heads. One that explains every weight within the bound is checked
on all of them. If none does, the best are combined with a second and a third rule.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from attnlab.weights.description import EVERYTHING, Description, Scope
from attnlab.weights.evidence import Evidence, compare, explained, traits_of
from attnlab.weights.fit import fit_law
from attnlab.weights.head_groups import right_weights
from attnlab.weights.plan import Plan, right_plan
from attnlab.weights.proposals import combinations, proposals
from attnlab.weights.rule import Rule
from attnlab.weights.setup import AttentionSetup

MAX_RULES = 3
_ROWS, _HEADS = 12, 3
_BEAM = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The descriptions that explain all weights, simplest first; empty if none was found in time.

    ``tried``: the number of descriptions that were tried; ``best``: the one that leaves the least
    unexplained.
    """

    descriptions: tuple[Description, ...]
    tried: int
    best: Description | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Search:
    """The search for descriptions of measured weights [R, H, N]."""

    setup: AttentionSetup
    measured: torch.Tensor
    limit_s: float
    max_rules: int = MAX_RULES
    tried: int = 0
    began: float = field(
        default_factory=time.thread_time
    )  # of this thread: other work does not count

    def run(self) -> Found:
        """Return what explains the weights."""
        wrong = ~explained(self.setup, self.measured, right_weights(self.setup), 1.0)
        best: tuple[float, Description] | None = None
        for depth in range(1, self.max_rules + 1):
            for scope in scopes(self.setup, wrong):
                found, leftover = self._search(scope, wrong, depth)
                if depth == 1 and not found:
                    found = list(self._fitted(scope, wrong))
                if found:
                    found += self._narrower(found, wrong)
                    found.sort(key=lambda one: one.complexity)
                    return Found(descriptions=tuple(found), tried=self.tried)
                if leftover is not None and (best is None or leftover[0] < best[0]):
                    best = leftover
                if self._is_late():
                    break
        return Found(descriptions=(), tried=self.tried, best=None if best is None else best[1])

    def _is_late(self) -> bool:
        return time.thread_time() - self.began > self.limit_s

    def _search(
        self, scope: Scope, wrong: torch.Tensor, depth: int
    ) -> tuple[list[Description], tuple[float, Description] | None]:
        """Return the descriptions of ``depth`` rules that explain everything, and the best other one."""
        rows, heads = sample(self.setup, wrong, scope)
        setup = self.setup.take(rows, heads)
        measured = self.measured[rows][:, heads]
        beam: list[tuple[float, tuple[Rule, ...], Plan]] = [(0.0, (), right_plan(setup))]
        whole: list[Description] = []
        for level in range(depth):
            scored: list[tuple[float, tuple[Rule, ...], Plan]] = []
            for cost, rules, plan, evidence in self._level(
                setup, measured, beam, level < depth - 1
            ):
                if evidence.complete and level == depth - 1:
                    one = Description(rules=rules, scope=scope)
                    if self.explains(one):
                        whole.append(one)
                scored.append((cost, rules, plan))
            scored.sort(key=lambda one: one[0])
            beam = scored[:_BEAM]
        leftover = (beam[0][0], Description(rules=beam[0][1], scope=scope)) if beam else None
        return whole, leftover

    def _narrower(self, found: list[Description], wrong: torch.Tensor) -> list[Description]:
        """Return descriptions of all rows for the kernel of the wrong rows alone.

        They predict the same here if the rules change no other row of this call. Another case decides.
        """
        kernels = [one for one in scopes(self.setup, wrong) if one.kernels and one.heads is None]
        return [
            Description(rules=one.rules, scope=scope)
            for one in found
            for scope in kernels
            if one.scope == EVERYTHING
        ]

    def _fitted(self, scope: Scope, wrong: torch.Tensor) -> Iterator[Description]:
        """Yield the descriptions with fitted numbers that explain everything."""
        rows, heads = sample(self.setup, wrong, scope, len(self.setup.heads))
        setup, measured = self.setup.take(rows, heads), self.measured[rows][:, heads]
        plan = right_plan(setup)
        predicted = plan.weights()
        traits = traits_of(setup, measured, predicted, predicted > 0)
        for rules in combinations(plan, measured, traits):
            if self._is_late():
                return
            self.tried += 1
            one = Description(rules=rules, scope=scope)
            changed = one.plan(plan)
            if compare(setup, measured, changed.weights()).complete and self.explains(one):
                yield one

    def _level(
        self,
        setup: AttentionSetup,
        measured: torch.Tensor,
        beam: list[tuple[float, tuple[Rule, ...], Plan]],
        ranked: bool,
    ) -> Iterator[tuple[float, tuple[Rule, ...], Plan, Evidence]]:
        """Yield every rule added to every plan of the beam, with its cost and its evidence."""
        for _, rules, plan in beam:
            predicted = plan.weights()
            traits = traits_of(setup, measured, predicted, predicted > 0)
            law = fit_law(plan, measured, with_distance=plan.slopes is not None)
            for rule in proposals(plan, measured, traits, law):
                if self._is_late():
                    return
                self.tried += 1
                new = rule.apply(plan)
                weights = new.weights()
                if torch.equal(weights, predicted):
                    continue
                evidence = compare(setup, measured, weights)
                left = traits_of(setup, measured, weights, weights > 0).count if ranked else 0
                yield 1e6 * left + evidence.cost, (*rules, rule), new, evidence

    def explains(self, one: Description) -> bool:
        """Answer whether a description explains every row and head, and changes those that are wrong."""
        return bool(explained(self.setup, self.measured, one.weights(self.setup)).all())


def describe(
    setup: AttentionSetup,
    measured: torch.Tensor,
    limit_s: float = 10.0,
    max_rules: int = MAX_RULES,
) -> Found:
    """Find the descriptions of measured weights [R, H, N], finite in every row of the setup."""
    return Search(setup=setup, measured=measured, limit_s=limit_s, max_rules=max_rules).run()


def scopes(setup: AttentionSetup, wrong: torch.Tensor) -> Iterator[Scope]:
    """Yield the scopes that contain all wrong rows and heads: everything first, then smaller ones."""
    yield EVERYTHING
    rows, heads = wrong.any(1), wrong.any(0)
    kernels = {name for name, bad in zip(setup.kernels, rows.tolist(), strict=True) if bad}
    kernel_scope = tuple(sorted(kernels)) if kernels != set(setup.kernels) else None
    head_scope = tuple(setup.heads[heads].tolist()) if not bool(heads.all()) else None
    seqs = setup.seq[rows].unique()
    seq_scope = tuple(seqs.tolist()) if len(seqs) < len(setup.seq.unique()) else None
    if kernel_scope is not None:
        yield Scope(kernels=kernel_scope)
    if head_scope is not None:
        yield Scope(kernels=kernel_scope, heads=head_scope)
    if seq_scope is not None and kernel_scope is None:
        yield Scope(seqs=seq_scope, heads=head_scope)


def sample(
    setup: AttentionSetup, wrong: torch.Tensor, scope: Scope, most_heads: int = _HEADS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and heads to try rules on, as indices: wrong ones first, spread over sequences."""
    rows, heads = scope.rows_of(setup), scope.heads_of(setup)
    row_order = _spread(torch.nonzero(rows).flatten(), wrong.any(1), setup.seq, _ROWS)
    head_order = _spread(torch.nonzero(heads).flatten(), wrong.any(0), setup.kv_head, most_heads)
    return row_order, head_order


def _spread(
    indices: torch.Tensor, wrong: torch.Tensor, group: torch.Tensor, most: int
) -> torch.Tensor:
    """Return at most ``most`` of the indices, from every group in turn, wrong ones first; ascending."""
    if len(indices) <= most:
        return indices
    queues: dict[int, list[int]] = {}
    generator = torch.Generator().manual_seed(0)
    shuffled = indices[torch.randperm(len(indices), generator=generator)]
    for index in sorted(shuffled.tolist(), key=lambda i: not bool(wrong[i])):
        queues.setdefault(int(group[index]), []).append(index)
    picked: list[int] = []
    while len(picked) < most:
        for queue in queues.values():
            if queue and len(picked) < most:
                picked.append(queue.pop(0))
    return torch.tensor(sorted(picked))
