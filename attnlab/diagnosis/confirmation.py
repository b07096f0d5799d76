"""Confirmation: a statement must hold in further cases with other lengths and odd scales."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.fields import runs_triton
from attnlab.case.masks import CAUSAL, MASK_DATA
from attnlab.defects import Defect
from attnlab.diagnosis.address_rules import FAMILY, address_defects
from attnlab.diagnosis.candidates import CLEAR, ENOUGH, Candidate, fit
from attnlab.diagnosis.claims import ConfirmedRule, FeatureClaim
from attnlab.diagnosis.decision import (
    NEVER_WRITTEN,
    SLOTS_OF,
    Examination,
    examine,
    with_explanations,
    withdraw,
)
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.divisions import LOOPS, mask_defects
from attnlab.diagnosis.output_rules import is_about_part, output_defects, scratch_defects
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.repair_check import is_right
from attnlab.diagnosis.reruns import (
    Rerun,
    every_remainder_case,
    further_cases,
    nearby_cases,
    output_of_outside,
    whole_tiles_case,
    with_contents,
    with_known_contents,
    with_larger_groups,
    with_other_numbers,
)
from attnlab.diagnosis.softmax_rules import loop_defects, softmax_defects
from attnlab.kernels.child_process import in_copies
from attnlab.kernels.triton.interpreter import cores
from attnlab.kernels.triton.run_log import other_outside
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem, sample_rows
from attnlab.tensors.quantised import output_numbers

_SHOWN_BY_RERUNS = ("query_start_loc_as_int32",)  # with another output buffer
# What a Case must have for a defect of a family, and the change that leaves it out. Sinks are none of these:
# a fault of the sum of the weights, right in one tile, looks there as if the sink were ignored.
_NEEDS: dict[str, dict[str, Any]] = {"softcap": {"softcap": None}}
_TOLD = ("query_lens", "ctx_lens", "sliding_window", "sm_scale", "k_scale", "v_scale")


def with_second_cases(
    lab: Lab,
    case: Case,
    rerun: Rerun,
    diagnosis: Diagnosis,
    cases_of: Callable[[Case], Iterable[Case]] = further_cases,
) -> Diagnosis:
    """Return the diagnosis without explanations that do not hold in further cases, those of ``cases_of``.

    A defect that changes nothing in a further case is kept, as is one in a case that the kernel rejects. So
    is one of a batch with several new tokens if decodes alone are right: another kernel may compute those.
    A cause must be shown by a further case, if one runs; else it is only one of the explanations. What one
    with several new tokens shows of a batch of decodes must hold in further ones of its kind.
    """
    diagnosis = _with_names_true_of_outside(lab, case, rerun, diagnosis)
    has_prefill, cases = max(case.lengths.query_lens, default=0) > 1, Counter[str]()
    of_decodes, sizes = Counter[str](), (case.lengths, case.sliding_window)
    others = list(cases_of(case))
    for other in chain(others, (with_other_numbers(case),)):  # others may grow
        left = [one for one in diagnosis.explanations if one.name not in _SHOWN_BY_RERUNS]
        has_same_sizes = other is None or (other.lengths, other.sliding_window) == sizes
        if not left or other is None or (has_same_sizes and all(cases[o.name] for o in left)):
            break
        known = with_contents(other, output_init="recycled")  # unwritten rows can be recognised
        if any(one.name in SLOTS_OF for one in diagnosis.explanations):
            known = with_leaks(known, case)
        try:
            output = rerun(known)
        except AttnLabError:
            continue
        only_decodes = max(other.lengths.query_lens, default=0) == 1
        if has_prefill and only_decodes and not examine(lab, known, output, ()).diagnosis.is_wrong:
            continue
        found = {one.name: _verdict(lab, known, output, one) for one in left}
        for one in left:
            needs = _NEEDS.get(one.defect.family) if found[one.name] == REFUTED else None
            if needs and _has_another(lab, case, known, rerun, needs):
                found[one.name] = ALLOWED
        shown = [name for name, verdict in found.items() if verdict == SHOWN]
        cases.update(shown)
        of_decodes.update(shown if only_decodes else ())
        if shown and not (has_prefill or only_decodes):
            others += cases_of(other)
            has_prefill = True
        diagnosis = withdraw(
            diagnosis,
            lambda one, found=found: found.get(one.name) == REFUTED,  # type: ignore[misc]
            "excluded by rerun",
            f"{{names}} does not explain a second run with {_changes_text(case, other)}",
        )
    is_of_decodes = case.spec.prefill and not has_prefill
    return _with_cases(diagnosis, cases, of_decodes if is_of_decodes else None)


def _with_names_true_of_outside(
    lab: Lab, case: Case, rerun: Rerun, diagnosis: Diagnosis
) -> Diagnosis:
    """Return the diagnosis without names that do not explain a run with other numbers outside of all tensors.

    Zeros there may look like another fault: keys of 0 all have one score. A leak is shown by NaN in slots.
    """
    kept = {*_SHOWN_BY_RERUNS, *SLOTS_OF}
    if {one.name for one in diagnosis.explanations} <= kept:
        return diagnosis
    known = with_contents(case, output_init="recycled")
    output = output_of_outside(rerun, known)
    if output is None:
        return diagnosis
    return withdraw(
        diagnosis,
        lambda one: one.name not in kept and _verdict(lab, known, output, one) == REFUTED,
        "excluded by rerun",
        "{names} does not explain a run with other numbers outside of the tensors",
    )


def _has_another(lab: Lab, case: Case, other: Case, rerun: Rerun, changes: dict[str, Any]) -> bool:
    """Answer whether a Case is right without a feature and another case is not: it has another fault, too,
    so it refutes no fault of the feature."""
    with suppress(AttnLabError):
        plain = (one.replace(**changes) for one in (case, other))
        wrong = [examine(lab, one, rerun(one), ()).diagnosis.is_wrong for one in plain]
        return wrong == [False, True]
    return False


def with_leaks(other: Case, case: Case) -> Case:
    """Return a further case with NaN in slots without a token and the freed blocks of a Case.

    Finite numbers times 0 would not show what leaks.
    """
    return other.replace(empty_slots=case.spec.poison, freed=case.freed)


def _with_cases(
    diagnosis: Diagnosis, cases: Counter[str], of_decodes: Counter[str] | None
) -> Diagnosis:
    """Return the diagnosis with how many further cases show each explanation; what reruns of the first
    case show needs none. The cause is selected again.

    ``of_decodes``: how many of these cases are decodes alone, if the first one is.
    """
    shown = {*_SHOWN_BY_RERUNS, *(NEVER_WRITTEN for _ in diagnosis.unwritten[:1])}
    shown |= {name for name, kind in SLOTS_OF.items() if kind in diagnosis.slot_kinds}

    def counted(one: Candidate) -> Candidate:
        if of_decodes is not None and of_decodes[one.name] == cases[one.name]:
            one = dataclasses.replace(one, only_decodes=True)
        if one.name in shown:
            return dataclasses.replace(one, shown=max(1, one.shown))
        return dataclasses.replace(one, cases=cases[one.name])

    return with_explanations(diagnosis, [counted(one) for one in diagnosis.explanations])


SHOWN, ALLOWED, REFUTED = "shown", "allowed", "refuted"


def _verdict(lab: Lab, case: Case, output: torch.Tensor, candidate: Candidate) -> str:
    """Return whether the output of another case shows a candidate, allows or contradicts it."""
    again = examine(lab, case, output, (candidate.defect,), Pattern())
    wrong_rows, unwritten = again.evidence.locations.wrong_rows, again.evidence.unwritten
    if candidate.name == NEVER_WRITTEN:  # how many rows that concerns may depend on the lengths
        if not bool(torch.isin(wrong_rows, unwritten).all()):
            return REFUTED
        return SHOWN if len(wrong_rows) else ALLOWED
    if again.diagnosis.is_wrong:
        if not again.diagnosis.explanations:
            return REFUTED
        found = again.diagnosis.explanations[0]
        is_narrower = _has_general_scope(candidate) and not _has_general_scope(found)
        return SHOWN if found.shown and not is_narrower else ALLOWED
    if candidate.name in SLOTS_OF:  # the case may have no such slots
        return ALLOWED
    return ALLOWED if is_hidden(again.problem, candidate.defect) else REFUTED


def is_hidden(problem: Problem, defect: Defect) -> bool:
    """Answer whether a defect changes only the rounding in a problem."""
    if not defect.applies(problem):
        return True
    for row_slice in sample_rows(problem):
        predicted, correct = defect.compute(problem, row_slice), problem.correct(row_slice)
        if bool((fit(predicted.output, correct, 1).ratio > 1).any()):
            return False
    return True


def _changes_text(case: Case, other: Case) -> str:
    """Return the changed fields of another case that matter to a reader."""
    changed = [name for name in _TOLD if getattr(other, name) != getattr(case, name)]
    return ", ".join(f"{name}={getattr(other, name)}" for name in changed)


# Features without which an output is right: what is stated of a fault if nothing else describes it.

_LEAST_CASES, _MOST_CASES = 8, 10  # with wrong outputs that are right without a feature
_MOST_S = 20.0  # processor time
_PLAIN_CACHE = {"kv_cache_dtype": "auto", "cache_format": None, "k_scale": 1.0, "v_scale": 1.0}


def features_of(case: Case) -> dict[str, dict[str, Any]]:
    """Return the features of a Case that it could lack, as nouns, each with the changes that leave it out."""
    found: dict[str, dict[str, Any]] = {
        f"op_argument {case.op_argument}": {"op_argument": case.plainer_argument},
        "an FP8 cache": _PLAIN_CACHE,
        "a sliding window": {"sliding_window": 0, "freed": "kept"},
        f"mask {case.mask}": {"mask": CAUSAL, **dict.fromkeys(MASK_DATA)},
        "ALiBi slopes": {"alibi": False},
        "a soft cap": {"softcap": None},
        "attention sinks": {"sinks": False},
        "a softmax scale above 1": {"sm_scale": None} if (case.sm_scale or 0) > 1 else {},
        "the default softmax scale": {"sm_scale": 0.7 * case.head_size**-0.5}
        if case.sm_scale is None
        else {},
        f"distribution {case.distribution}": {"distribution": "normal"},
        "interleaved values": {"interleave_v": False},
        f"the strides of kv_layout {case.kv_layout}": {"kv_layout": "contiguous"},
        "several query heads per KV head": {
            "num_queries_per_kv": 1,
            "num_heads": case.num_kv_heads,
        },
        "several KV heads": {"num_heads": case.num_queries_per_kv},
        f"head_size {case.head_size}, no power of 2": {
            "head_size": 1 << (case.head_size - 1).bit_length()
        },
    }
    return {
        noun: changes
        for noun, changes in found.items()
        if any(getattr(case, name) != value for name, value in changes.items())
    }


def confirmed_features(lab: Lab, case: Case) -> FeatureClaim | None:
    """Return the features without which the outputs of a Case and of further cases are right, or None.

    Wrong outputs must be right without a feature, and no output may be wrong without it.
    """
    end, cases = time.process_time() + _MOST_S, 0
    left = _right_without(lab, features_of(case), case)

    def examined(other: Case) -> tuple[bool | None, list[str]]:
        """Return whether another case is right, and the features without which it is; those of now."""
        right = None if time.process_time() > end else is_right(lab, other)
        return right, [] if right is None else _right_without(lab, left, other)

    others = (*further_cases(case), *nearby_cases(case))
    for right, nouns in in_copies(examined, others if left else (), processes_of(lab, case)):
        if right is not None:
            left = [noun for noun in left if noun in nouns]
            cases += not right
        if not left or cases == _MOST_CASES or time.process_time() > end:
            break
    if not left or cases < _LEAST_CASES:
        return None
    return FeatureClaim(features=tuple(left), cases=cases)


def processes_of(lab: Lab, case: Case) -> int:
    """Return how many processes may run the kernels of a Case at a time: all cores for interpreted ones of
    which equal runs are equal, one for a model, which takes no time."""
    is_interpreted = runs_triton(case.backend) and lab.backend(case).is_deterministic
    return cores() if is_interpreted else 1


def _right_without(lab: Lab, features: Iterable[str], case: Case) -> list[str]:
    """Return the features without which the output of a Case is right, of those that it can lack."""
    known, found = features_of(case), list[str]()
    for noun in features:
        with suppress(InvalidCase):
            if is_right(lab, case.replace(**known.get(noun, {}))) is True:
                found.append(noun)
    return found


def with_features(lab: Lab, case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with the features that the fault needs, if nothing else describes it.

    An error near its bound may be hidden without a feature, because the bound is larger there.
    """
    if diagnosis.status != "unexplained" or not diagnosis.wrong_rows:
        return diagnosis
    if diagnosis.largest_in_bounds is not None and diagnosis.largest_in_bounds <= CLEAR:
        return diagnosis
    claim = confirmed_features(lab, case)
    if claim is None:
        return diagnosis
    return dataclasses.replace(diagnosis, status="described", features=claim)


# Search for a rule beyond the catalogue that explains an output, and the outputs of further cases.


def find_rule(lab: Lab, case: Case, rerun: Rerun) -> ConfirmedRule | None:
    """Return the first rule that explains the output of a Case and those of further cases, or None.

    All cases run with finite numbers in empty slots and in the output buffer, so that a rule predicts what
    is read there. Of a batch of decodes, only decodes must agree: an op may compute other batches in another
    way. If the rule holds in a batch with several new tokens, it must hold in further ones, too. A rule about
    one of two loops must agree with all: the kernel with both loops computes all batches, and one new token
    does not separate the loops. One of the wrong outputs must show what a rule says, and those count that
    decide. A right output with another sliding window refutes a rule if the first window makes it wrong.
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
            left, cases = kept, cases + _decides(again, kept)
            shown |= _shown(again, kept)
            others += further_cases(other) if only_decodes and has_prefill else ()
            only_decodes &= not has_prefill
        elif is_wrong:
            left = [one for one in left if not _is_about_loop(one)]
        else:  # another kernel may compute other lengths, so these refute nothing
            problem = Problem.of_case(known, lab.batch(known), lab.call(known))
            hidden = [one for one in left if is_hidden(problem, one.defect)]
            rest = [one for one in left if one not in hidden]
            left = hidden if _runs_alike(lab, case, other, rerun) else [*hidden, *rest]
    left = [one for one in left if one.name in shown]
    sizes = (whole_tiles_case, with_larger_groups) if len(left) > 1 else ()
    for made in (*sizes, every_remainder_case):
        left = _true_of(lab, made(case), left, rerun) if left else []
    left = _true_of_outside(lab, case, left, rerun)
    if not left or not cases:
        return None
    kinds = {one.defect.family: one for one in reversed(left)}  # the first of each kind
    first, family = left[0], left[0].defect.family
    more = tuple(one for one in kinds.values() if one.defect.family != family)
    only_decodes &= case.spec.prefill
    return ConfirmedRule(candidate=first, cases=cases, only_decodes=only_decodes, others=more)


def _runs_alike(lab: Lab, case: Case, other: Case, rerun: Rerun) -> bool:
    """Answer whether what computes a Case also computes another one: its lengths are the same, or it is wrong
    with the sliding window of the Case."""
    if other.lengths == case.lengths or other.sliding_window == case.sliding_window:
        return other.lengths == case.lengths
    with suppress(AttnLabError):
        known = with_known_contents(other.replace(sliding_window=case.sliding_window))
        return examine(lab, known, rerun(known), ()).diagnosis.is_wrong
    return False


def _decides(found: Examination, candidates: list[Candidate]) -> bool:
    """Answer whether an output would hardly fit wrong candidates: its errors are clear, or the candidates
    explain many of its numbers but for small parts. Small numbers explain errors just above their bounds."""
    names = {one.name for one in candidates}
    shown = [one.shown for one in found.diagnosis.candidates if one.name in names]
    return found.evidence.locations.is_clear or min(shown, default=0) >= ENOUGH


def _is_about_loop(candidate: Candidate) -> bool:
    """Answer whether a rule concerns one of two loops, by the words of LOOPS in its name."""
    return any(words in candidate.name for words in LOOPS.values() if words)


def _true_of(
    lab: Lab, case: Case | None, candidates: list[Candidate], rerun: Rerun
) -> list[Candidate]:
    """Return the candidates that explain the output of another case, all if it is right or does not run.

    Sizes may be mistaken for each other: of tiles, whole ones separate them, and of groups, another number of
    query heads per KV head. What depends on a place in a tile needs every place.
    """
    if case is None:
        return candidates
    with suppress(AttnLabError):
        known = with_known_contents(case)
        kept, again = _confirmed(lab, known, rerun(known), candidates)
        return kept if again.diagnosis.is_wrong else candidates
    return candidates


def _true_of_outside(
    lab: Lab, case: Case, candidates: list[Candidate], rerun: Rerun
) -> list[Candidate]:
    """Return the candidates that also give the output of a run in which loads outside of all tensors get
    other numbers than 0.

    Zeros are what any address outside gives, and what other faults may give. Without such a run, nothing is
    said about addresses.
    """
    known = with_known_contents(case)
    try:
        with other_outside():
            return _confirmed(lab, known, rerun(known), candidates)[0] if candidates else []
    except AttnLabError:
        return [one for one in candidates if one.defect.family != FAMILY]


def rules_of(problem: Problem, output: torch.Tensor) -> tuple[Defect, ...]:
    """Return the rules beyond the catalogue that a call allows; ``output``: the wrong one.

    Those about addresses and scratch memory know one size of heads: none for values narrower than keys.
    """
    masks = partial(mask_defects, output=output_numbers(problem.call, output).cpu())
    kinds: list[Callable[[Problem], list[Defect]]] = [softmax_defects, loop_defects, masks]
    if problem.call.query.shape[2] == problem.call.buffer.shape[2]:
        kinds = [address_defects, output_defects, *kinds, scratch_defects]
    return tuple(one for kind in kinds for one in kind(problem))


def _explanations(lab: Lab, case: Case, rerun: Rerun) -> tuple[list[Candidate], set[str]]:
    """Return the rules that explain the output of a Case, and the names of those that it shows."""
    try:
        output = rerun(case)
        problem = Problem.of_case(case, lab.batch(case), lab.call(case))
        found = examine(lab, case, output, rules_of(problem, output), Pattern())
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
    """Answer whether a candidate explains more than some sequences, chosen by their wrong rows."""
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
