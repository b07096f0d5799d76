"""Search for a rule beyond the catalogue that explains an output, and the outputs of further cases."""

from itertools import pairwise

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.defects import Defect
from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.claims import ConfirmedRule
from attnlab.diagnosis.confirmation import is_hidden
from attnlab.diagnosis.decision import Examination, examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import Rerun, further_cases, whole_tiles_case, with_known_contents
from attnlab.diagnosis.rules.addresses import FAMILY, address_defects
from attnlab.diagnosis.rules.divisions import LOOPS
from attnlab.diagnosis.rules.masks import mask_defects
from attnlab.diagnosis.rules.outputs import output_defects, scratch_defects
from attnlab.diagnosis.rules.rule import is_about_part
from attnlab.diagnosis.rules.softmax import loop_defects, softmax_defects
from attnlab.kernels.triton.run_log import other_outside
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem


def find_rule(lab: Lab, case: Case, rerun: Rerun) -> ConfirmedRule | None:
    """Return the first rule that explains the output of a Case and those of further cases, or None.

    All cases run with finite numbers in empty slots and in the output buffer, so that a rule predicts what
    is read there. Of a batch of decodes, only decodes must agree: an op may compute other batches in another
    way. If the rule holds in a batch with several new tokens, it must hold in further ones, too. A rule about
    one of two loops must agree with all: the kernel with both loops computes all batches, and one new token
    does not separate the loops. One of the wrong outputs must show what a rule says.
    """
    left, shown = _explanations(lab, with_known_contents(case), rerun)
    cases, only_decodes = 0, max(case.lengths.query_lens) == 1
    others = list(further_cases(case))
    for other in others:  # which grows
        if not left:
            return None
        try:
            known = with_known_contents(other)
            output = rerun(known)
        except AttnLabError:
            continue
        kept, again = _confirmed(lab, known, output, left)
        is_wrong = again.diagnosis.is_wrong
        has_prefill = max(other.lengths.query_lens) > 1
        if is_wrong and not (only_decodes and has_prefill and not kept):
            left, cases = kept, cases + 1
            shown |= _shown(again, kept)
            others += further_cases(other) if only_decodes and has_prefill else ()
            only_decodes &= not has_prefill
        elif is_wrong:
            left = [one for one in left if not _is_about_loop(one)]
        else:  # another kernel may compute other lengths, so these refute nothing
            problem = Problem.of_case(known, lab.batch(known), lab.call(known))
            hidden = [one for one in left if is_hidden(problem, one.defect)]
            is_same = other.lengths == case.lengths
            left = hidden if is_same else [*hidden, *(one for one in left if one not in hidden)]
    left = [one for one in left if one.name in shown]
    left = _separated(lab, case, left, rerun) if len(left) > 1 else left
    left = _true_of_outside(lab, case, left, rerun)
    if not left or not cases:
        return None
    kinds = {one.defect.family: one for one in reversed(left)}  # the first of each kind
    first, family = left[0], left[0].defect.family
    more = tuple(one for one in kinds.values() if one.defect.family != family)
    return ConfirmedRule(candidate=first, cases=cases, only_decodes=only_decodes, others=more)


def _is_about_loop(candidate: Candidate) -> bool:
    """Answer whether a rule concerns one of two loops, by the words of LOOPS in its name."""
    return any(words in candidate.name for words in LOOPS.values() if words)


def _separated(lab: Lab, case: Case, candidates: list[Candidate], rerun: Rerun) -> list[Candidate]:
    """Return the candidates that a case with whole tiles of different sizes leaves: sizes may be mistaken."""
    other = whole_tiles_case(case)
    if other is None:
        return candidates
    try:
        known = with_known_contents(other)
        kept, again = _confirmed(lab, known, rerun(known), candidates)
    except AttnLabError:
        return candidates
    return kept if again.diagnosis.is_wrong else candidates


def _true_of_outside(
    lab: Lab, case: Case, candidates: list[Candidate], rerun: Rerun
) -> list[Candidate]:
    """Return the candidates that also give the output of a run in which loads outside of all tensors get
    other numbers than 0.

    Zeros are what any address outside gives, and what other faults may give. Without such a run, nothing is
    said about addresses.
    """
    others = [one for one in candidates if one.defect.family != FAMILY]
    if len(others) == len(candidates):
        return candidates
    known = with_known_contents(case)
    try:
        with other_outside():
            return _confirmed(lab, known, rerun(known), candidates)[0]
    except AttnLabError:
        return others


def rules_of(problem: Problem) -> tuple[Defect, ...]:
    """Return the rules beyond the catalogue that a call allows.

    Those about addresses and scratch memory know one size of heads: none for values narrower than keys.
    """
    kinds = [softmax_defects, loop_defects, mask_defects]
    if problem.call.query.shape[2] == problem.call.buffer.shape[2]:
        kinds = [address_defects, output_defects, *kinds, scratch_defects]
    return tuple(one for kind in kinds for one in kind(problem))


def _explanations(lab: Lab, case: Case, rerun: Rerun) -> tuple[list[Candidate], set[str]]:
    """Return the rules that explain the output of a Case, and the names of those that it shows."""
    try:
        output = rerun(case)
        problem = Problem.of_case(case, lab.batch(case), lab.call(case))
        found = examine(lab, case, output, rules_of(problem), Pattern())
    except AttnLabError:
        return [], set()
    if not bool(output[found.evidence.locations.is_wrong].isfinite().any()):
        return [], set()  # many rules predict NaN from scratch memory; none is shown by it
    candidates = found.diagnosis.candidates
    left = [one for one in candidates if is_general(one)]
    if left:
        left += [one for one in candidates if _is_of_part(one)]
    else:  # a rule about some sequences may fit best, and is not general: further cases decide
        left = [
            one for one in candidates if one.verdict == "less likely" and _has_general_scope(one)
        ]
    return left, _shown(found, left)


def _shown(found: Examination, candidates: list[Candidate]) -> set[str]:
    """Return the names of the candidates that the wrong rows of an output can show."""
    problem, is_wrong = found.problem, found.evidence.locations.is_wrong.any(1)
    spans = enumerate(pairwise(problem.row_starts()))
    seqs = [seq for seq, (first, last) in spans if bool(is_wrong[first:last].any())]
    return {one.name for one in candidates if one.defect.is_shown(problem, seqs)}


def _is_of_part(candidate: Candidate) -> bool:
    """Answer whether a rule about the rows of one part of an op fits, but less well than one about more.

    Further cases, in which other rows belong to the part, decide.
    """
    is_less = candidate.verdict == "less likely" and _has_general_scope(candidate)
    return is_less and is_about_part(candidate.name)


def is_general(candidate: Candidate) -> bool:
    """Answer whether a candidate explains an output in all rows, or in all decodes or prefills."""
    return candidate.verdict == "explains" and _has_general_scope(candidate)


def _has_general_scope(candidate: Candidate) -> bool:
    return candidate.scope is not None and candidate.scope.rows != "sequences"


def _confirmed(
    lab: Lab, case: Case, output: torch.Tensor, candidates: list[Candidate]
) -> tuple[list[Candidate], Examination]:
    """Return the candidates that explain another output, and its examination."""
    found = examine(lab, case, output, [one.defect for one in candidates], Pattern())
    again = {
        one.name
        for one in found.diagnosis.candidates
        if one.verdict in ("explains", "less likely") and _has_general_scope(one)
    }
    return [one for one in candidates if one.name in again], found
