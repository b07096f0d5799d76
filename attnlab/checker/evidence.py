"""Labels of wrong outputs by evidence: a rule about addresses or the softmax, or else that of an X-ray.

What is stated of a case depends on that case alone, so that shards, workers and an interrupted check state
the same. Only while one finding is shrunk is what explained one case's output tried on the next first.

Two faults with different rules get different labels, and one fault that shows in several cases gets one,
which the name that an output alone suggests does not ensure.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.checker.case_run import run_case
from attnlab.defects import Defect
from attnlab.diagnosis.confirmation import with_second_cases
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.examination import examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.rule_search import find_rule, is_general
from attnlab.diagnosis.second_case import second_cases, with_known_contents
from attnlab.diagnosis.weights_check import follows_from
from attnlab.diagnosis.withdrawal import withdraw
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab
from attnlab.weights.description import Description
from attnlab.weights.public import xray

MOST_SEARCHES = 4  # for rules, while one finding is shrunk
_MOST_REFUSALS = 2  # cases of one finding in which a name is tried and not confirmed
_XRAY_S = 3.0  # time for the search for a description
_MOST_WEIGHTS = 1 << 20  # rows × heads × slots of a case that is X-rayed


class Rules:
    """What was found out about the cases of one finding; ``confirmed`` and ``label`` mutate it.

    ``found``: rules that further cases confirmed, with their texts; ``weights``: descriptions by X-rays;
    ``searches``: how often something new was looked for. ``names``: defects that further cases confirmed;
    ``refused``: how often they did not.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Defect, str]] = []
        self.weights: list[Description] = []
        self.searches = 0
        self.names = set[str]()
        self.refused = Counter[str]()

    def confirmed(
        self, lab: Lab, case: Case, diagnosis: Diagnosis, rerun: Callable[[Case], torch.Tensor]
    ) -> Diagnosis:
        """Return the diagnosis with the names that further cases confirm, those of an earlier one first."""
        names = {one.name for one in diagnosis.explanations}
        known = names & self.names
        if known:
            return withdraw(
                diagnosis,
                lambda one: one.name not in known,
                "less likely",
                "{names}: not confirmed",
            )
        if names and max(self.refused[name] for name in names) < _MOST_REFUSALS:
            known_case = with_known_contents(case)
            diagnosis = with_second_cases(lab, known_case, rerun, diagnosis, second_cases)
            self.names |= {one.name for one in diagnosis.explanations if one.is_established}
            self.refused.update(names - self.names)
            return diagnosis
        return withdraw(diagnosis, lambda one: True, "excluded by rerun", "{names}: not confirmed")

    def label(
        self, lab: Lab, case: Case, output: torch.Tensor, rerun: Callable[[Case], torch.Tensor]
    ) -> str:
        """Return the text of the rule that explains an output, known or found now, or ""."""
        for known, law in self.found:
            seen = examine(lab, case, output, (known,), Pattern()).diagnosis
            if any(is_general(one) for one in seen.explanations):
                return law
        found = examine(lab, case, output, (), Pattern())
        for described in self.weights:
            if follows_from(described, lab, case, output, found):
                return described.text
        if self.searches >= MOST_SEARCHES:
            return ""
        self.searches += 1
        return self._new_rule(lab, case, rerun) or self._new_weights(lab, case)

    def _new_rule(self, lab: Lab, case: Case, rerun: Callable[[Case], torch.Tensor]) -> str:
        rule = find_rule(lab, case, rerun)
        if rule is None:
            return ""
        self.found.append((rule.candidate.defect, rule.law))
        return rule.law

    def _new_weights(self, lab: Lab, case: Case) -> str:
        """Return the rule of an X-ray of the kernel; "" if the case is too large, or for no clear rule."""
        slots = case.total_blocks * case.block_size
        if case.lengths.num_tokens * case.num_heads * slots > _MOST_WEIGHTS:
            return ""
        seen = xray(case, lab=lab, limit_s=_XRAY_S)
        if seen.status != "described" or seen.description is None:
            return ""
        self.weights.append(seen.description)
        return seen.description.text


_REMEMBERED: ContextVar[Rules | None] = ContextVar("remembered", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Within, try on each case first what explained the cases before; all must be of one op and backend."""
    token = _REMEMBERED.set(Rules())
    try:
        yield
    finally:
        _REMEMBERED.reset(token)


def _rules() -> Rules:
    """Return what was found out about earlier cases, nothing outside of :func:`remembering`."""
    return _REMEMBERED.get() or Rules()


def confirmed(lab: Lab, backend: Backend, case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of one output with the names that further cases confirm."""
    if not diagnosis.explanations:
        return diagnosis
    return _rules().confirmed(lab, case, diagnosis, lambda one: run_case(lab, backend, one).output)


def evidence_label(
    lab: Lab, backend: Backend, case: Case, output: torch.Tensor, diagnosis: Diagnosis
) -> str:
    """Return the label of a wrong output: a rule that further cases confirm, else the name of its cause,
    else the status of its diagnosis.

    A search for a rule runs the kernel about three times. It is made if the output alone has no explanation.
    """
    if diagnosis.explanations:  # Finding.names joins cases that do not decide with those that do
        return diagnosis.cause.name if diagnosis.cause is not None else diagnosis.status
    try:
        rule = _rules().label(lab, case, output, lambda one: run_case(lab, backend, one).output)
    except AttnLabError:
        rule = ""
    return rule or diagnosis.status


def evidence_fields(
    lab: Lab, case: Case, output: torch.Tensor, diagnosis: Diagnosis, label: str
) -> dict[str, Any]:
    """Return the names, the description, and what separates faults of one label.

    These are ``wrong_in``, ``right_in`` and ``contents``.

    A defect that explains only the rows of one kernel would change the others, too, if that kernel had it.
    """
    explanations = diagnosis.explanations
    kinds = {"decode" if n == 1 else "prefill" for n in case.lengths.query_lens}
    fields: dict[str, Any] = {
        "names": tuple(one.name for one in explanations),
        "description": _description(diagnosis, label),
    }
    if explanations:
        scopes = {one.scope.rows for one in explanations if one.scope is not None}
        wrong = scopes & kinds if scopes <= kinds else set[str]()
        wrong = wrong or (kinds if len(kinds) == 1 else set[str]())
        right = kinds - wrong if scopes and scopes <= kinds else set[str]()
    elif label == diagnosis.status:
        wrong = _kinds_of(lab, case, output)
        right = kinds - wrong
        if diagnosis.pattern.is_complete:
            fields["contents"] = tuple(sorted({fact.kind for fact in diagnosis.pattern.rules}))
    else:
        return fields
    return {**fields, "wrong_in": tuple(sorted(wrong)), "right_in": tuple(sorted(right))}


def _description(diagnosis: Diagnosis, label: str) -> str:
    """Return the text of each defect that explains an output, its rule, or the facts that reproduce it."""
    if diagnosis.explanations:
        return "; ".join(f"{one.name}: {one.text}" for one in diagnosis.explanations)
    if label != diagnosis.status:
        return label
    pattern = diagnosis.pattern
    return "; ".join(fact.sentence for fact in pattern.rules) if pattern.is_complete else ""


def _kinds_of(lab: Lab, case: Case, output: torch.Tensor) -> set[str]:
    """Return the kinds of the sequences with wrong rows."""
    rows = examine(lab, case, output, (), Pattern()).evidence.locations.wrong_rows
    starts = torch.tensor(case.lengths.query_lens).cumsum(0)
    seqs = torch.searchsorted(starts, rows.cpu(), right=True).unique().tolist()
    return {"decode" if case.lengths.query_lens[seq] == 1 else "prefill" for seq in seqs}
