"""Verify what a diagnosis says about a kernel: run the kernel on fresh cases and compare.

Fresh cases have other lengths, scales and numbers than those that the diagnosis used. A repair runs on every
case of the check, too, because these vary every feature and size that an edit could hide behind.

A statement about accesses, such as "scratch memory that no kernel has written is read", may be true of the
call and is still wrong if it does not concern exactly the wrong rows of the fresh outputs.
"""

import ast
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.checker.case_run import run_case
from attnlab.defects import Defect
from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.claims import (
    AccessClaim,
    CaseFacts,
    DescribedWeights,
    FeatureClaim,
    LeakClaim,
    PatternClaim,
    RepairClaim,
)
from attnlab.diagnosis.confirmation import features_of
from attnlab.diagnosis.decision import NEVER_WRITTEN, SLOTS_OF, examine
from attnlab.diagnosis.diagnose import access_facts, diagnose, lines_of, trait_facts
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.refinement import (
    claimed,
    compared,
    counts_slots,
    follows_from,
    kernel_of,
    leak_of,
)
from attnlab.diagnosis.repair_check import is_right, with_contents
from attnlab.diagnosis.reruns import rows_equal, with_known_contents
from attnlab.diagnosis.side_claims import common_claims, side_claims
from attnlab.kernels.backend import Backend
from attnlab.kernels.triton.probe import Line, Probe, probing
from attnlab.kernels.triton.source_edits import expression_of
from attnlab.lab.lab import Lab
from attnlab.weights.conclude import rounding_of, xray
from attnlab.weights.fit import compare

MOST_REPAIR_S = 60.0  # processor time for the cases of the check with a repair
SoundRuns = Sequence[
    tuple[Case, Any]
]  # cases, and what the unchanged op gives: outputs, text, None

_LENGTHS = (
    ((1, 5, 21), (77, 130, 9)),
    ((1, 18), (290, 41)),
    ((1, 1, 1), (19, 34, 523)),
    ((1, 1, 3, 9), (0, 61, 0, 32)),
    ((140, 2, 197), (0, 50, 21)),
    ((4, 1, 2), (35, 0, 0)),  # a merge may copy the last sequences without context
)


def fresh_cases(case: Case, only_decodes: bool = False, *, is_small: bool = True) -> Iterator[Case]:
    """Yield cases with other lengths, scales and numbers, with the features of a case.

    The last has the lengths of the case, and other numbers: no other length may show its fault.

    ``only_decodes``: every sequence has one new token, for statements that are about decodes alone.
    ``is_small``: no cache begins with unused blocks.
    """
    case = case.replace(first_block=0, num_blocks=None) if is_small and case.first_block else case
    own = (case.lengths.query_lens, case.lengths.ctx_lens)
    for seed, (query_lens, ctx_lens) in enumerate((*_LENGTHS, own), 911):
        has_prefill = case.spec.prefill and not only_decodes
        lengths = query_lens if has_prefill else (1,) * len(query_lens)
        if not case.spec.context:
            ctx_lens = (0,) * len(lengths)
        changes: dict[str, Any] = {"query_lens": lengths, "ctx_lens": ctx_lens, "seed": seed}
        if case.sm_scale is not None:
            changes["sm_scale"] = round(case.sm_scale * 0.81, 5)
        if case.is_fp8:
            changes |= {"k_scale": 0.37, "v_scale": 0.59}
        sizes = dict.fromkeys(("num_blocks", "max_blocks_per_seq", "max_query_len", "max_seq_len"))
        try:
            yield case.replace(**changes, **sizes)
        except InvalidCase:
            continue


def answer_of(
    lab: Lab, backend: Backend, case: Case, diagnosis: Diagnosis, unchanged: Lab
) -> dict[str, Any]:
    """Return the kind of a diagnosis, and whether fresh cases confirm it; ``unchanged``: has the sound op."""
    names = [candidate.name for candidate in diagnosis.explanations]
    base = {"status": diagnosis.status, "names": names, "said": diagnosis.sentences()}
    if names:
        right = [
            one.name
            for one in diagnosis.explanations
            if _predicts(lab, backend, case, one.defect, only_decodes=one.only_decodes)
        ]
        kind = "named" if diagnosis.status == "explained" else "shortlist"
        return {**base, "right": right, "answer": _judged(kind, bool(right))}
    if diagnosis.rule is not None:
        rule = diagnosis.rule
        verified = _predicts(
            lab,
            backend,
            case,
            rule.candidate.defect,
            only_decodes=rule.only_decodes,
            in_all_rows=True,
        )
        if diagnosis.bad_lines:
            verified &= _accesses(lab, backend, case, set(diagnosis.bad_lines))
        return {**base, "answer": _judged("described by a rule", verified)}
    if diagnosis.weights is not None:
        is_coded = case.argument.cache is not None
        verified = (
            _measures(lab, case, diagnosis.weights)
            if is_coded
            else _describes(lab, backend, case, diagnosis.weights)
        )
        return {**base, "answer": _judged("described by weights", verified)}
    if diagnosis.is_by_repair:
        return {**base, "answer": _judged("described by a repair", _repairs(lab, case, diagnosis))}
    judges: dict[str, tuple[Any, Callable[[], bool]]] = {
        "its accesses": (
            diagnosis.accesses,
            lambda: _recurs((lab, unchanged), case, diagnosis.accesses),
        ),
        "a leak": (diagnosis.leak, lambda: _leaks(lab, backend, case, diagnosis.leak)),
        "precision": (diagnosis.precision, lambda: _is_rounding(lab, case)),
        "its features": (diagnosis.features, lambda: _needs(lab, case, diagnosis.features)),
        "traits of its weights": (
            diagnosis.traits,
            lambda: _recurs((lab, unchanged), case, diagnosis.traits, _traits),
        ),
    }
    for kind, (said, is_right_there) in judges.items():
        if said is not None:
            return {**base, "answer": _judged(f"described by {kind}", is_right_there())}
    if diagnosis.side_errors and not diagnosis.wrong_rows and diagnosis.status == "described":
        verified = _side_outputs(lab, case, diagnosis)
        return {**base, "answer": _judged("described by a pattern", verified)}
    claim, lines = diagnosis.claim, diagnosis.bad_lines
    if claim is not None or lines:
        verified = (claim is None or _claims(lab, backend, case, claim)) and (
            not lines or _accesses(lab, backend, case, set(lines))
        )
        kind = "described by a pattern" if claim is not None else "located by a bad access"
        return {**base, "answer": _judged(kind, verified)}
    return {**base, "answer": "abstained"}


def judged_lines(
    lab: Lab,
    backend: Backend,
    case: Case,
    diagnosis: Diagnosis,
    sound: SoundRuns,
    is_planted: Callable[[str, int], bool],
) -> list[dict[str, str]]:
    """Return each printed sentence after the first with a verdict; the first is the answer.

    - "right", "misleading": fresh cases, or the cases of the check with the repair, confirm it or do not.
    - "a part of the fault": a repair of one of several planted places, as :func:`repair_verdict` says.
    - "place": it counts or lists what is wrong in this call; nothing is concluded.
    - "not judged": a person must read it.

    ``is_planted``: answers whether a line, (file, line), is in a planted statement.
    """
    judges: dict[str, Callable[[], bool | str]] = {}
    claim, seen = diagnosis.repair, diagnosis.xray
    if claim is not None:
        judges[claim.text] = lambda: repair_verdict(lab, claim, sound, is_planted)
    if seen is not None and seen.description is not None and diagnosis.explanations:
        only_decodes = max(case.lengths.query_lens) == 1 and case.spec.prefill
        described = DescribedWeights(
            description=seen.description, cases=1, only_decodes=only_decodes
        )
        judges[f"X-ray of the kernel: {seen.sentences[0]}"] = lambda: _describes(
            lab, backend, case, described
        )
    for fact in diagnosis.observed if diagnosis.repair is not None else ():
        one = AccessClaim(some=(fact,), cases=1)
        judges[f"in this call, {fact}"] = lambda one=one: _recurs((lab,), case, one)  # type: ignore[misc]
    places = {*diagnosis.place_sentences(), *diagnosis.pattern.sentences()}
    places |= {one.text for one in diagnosis.side_errors}
    if diagnosis.status == "unexplained":  # measured in this call
        places |= {f"in this call, {text}" for text in diagnosis.observed}
    found = []
    for sentence in diagnosis.sentences()[1:]:
        if sentence in judges:
            found_by = judges[sentence]()
            verdict = _VERDICTS.get(found_by, "right")
        else:
            verdict = "place" if sentence in places else "not judged"
            if sentence.startswith(("source line: unknown", "unknown: ", "contract violation")):
                verdict = "place"
        found.append({"sentence": sentence, "verdict": verdict})
    return found


_VERDICTS = {one: one for one in ("misleading", "a part of the fault")} | {False: "misleading"}


def repair_verdict(
    lab: Lab, claim: RepairClaim, sound: SoundRuns, is_planted: Callable[[str, int], bool]
) -> str:
    """Return what an edit is, by the cases of the check in which the unchanged op is right.

    - "the fault": the edited mutant has the same bits in all of them.
    - "equivalent": its outputs are right in all of them.
    - "a part of the fault": the line is planted, the edit makes outputs right, and each row that is wrong
      with it has the same bits without it. So the edit is of one of several planted places.
    - "misleading": none of these.

    A claim without an edit is right if its line is planted, or one that computes what has a wrong value.
    For ``only_finite``, slots without a token hold finite numbers.
    """
    is_line = is_planted(claim.file, claim.line)
    if not claim.is_stated:
        is_line |= any(is_planted(*line) for line in _sources(claim))
        return "the line" if is_line else "misleading"
    end, verdict, has_rest = time.process_time() + MOST_REPAIR_S, "the fault", False
    right: list[tuple[Case, torch.Tensor]] = []
    for case, expected in sound:
        if time.process_time() > end:
            break
        if not isinstance(expected, tuple) or expected[0] is None:
            continue
        known = case.replace(empty_slots="garbage") if claim.only_finite else case
        got = _output(lab, known, claim.repair.texts())
        if got is not None and rows_equal(got, expected[0]).all():
            right.append((known, got))
            continue
        verdict = "equivalent"
        wrong = _newly_wrong(lab, case, known, got, expected[0])
        if got is not None and not bool(wrong.any()):
            right.append((known, got))
        elif not is_line or not _is_unchanged(got, _output(lab, known, {}), wrong):
            return "misleading"
        else:
            has_rest = True
    if not has_rest:
        return verdict
    gained = any(
        not _is_unchanged(got, _output(lab, known, {}), torch.ones(len(got), dtype=torch.bool))
        for known, got in right
    )
    return "a part of the fault" if gained else "misleading"


def _sources(claim: RepairClaim) -> Iterator[tuple[str, int]]:
    """Yield the lines, (file, line), that compute what the edit of a claim replaces: those that assign a name
    of it in its function, and those of all files of the op that pass the argument that the claim names."""
    for file in Path(claim.file).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        for one in ast.walk(tree):
            if isinstance(one, ast.keyword) and one.arg == claim.argument:
                yield str(file), one.value.lineno
    read = {
        one.id
        for one in ast.walk(expression_of(claim.repair.edit.before) or ast.Pass())
        if isinstance(one, ast.Name)
    }
    for one in ast.walk(ast.parse(claim.repair.kernel.text)):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.id in read:
            yield claim.repair.kernel.line(one.lineno)


def _newly_wrong(
    lab: Lab, case: Case, known: Case, got: torch.Tensor | None, expected: torch.Tensor
) -> torch.Tensor:
    """Return which rows of an output are wrong where those of the unchanged op are right, [rows] bool.

    All are if the kernel raises: ``got`` is None.
    """
    if got is None:
        return torch.ones(len(expected), dtype=torch.bool)
    is_wrong, before = (
        examine(lab, one, output, ()).evidence.locations.is_wrong
        for one, output in ((known, got), (case, expected))
    )
    return (is_wrong & ~before).any(1)


def _is_unchanged(got: torch.Tensor | None, plain: torch.Tensor | None, rows: torch.Tensor) -> bool:
    """Answer whether two outputs have the same bits in some rows, or both kernels raise."""
    if got is None or plain is None:
        return got is plain
    return bool(rows_equal(got, plain)[rows].all())


def _output(lab: Lab, case: Case, texts: Mapping[Line, str]) -> torch.Tensor | None:
    """Return the output of a Case with other texts of functions, or None if the kernel raises."""
    try:
        with probing(Probe(texts=texts)):
            ran = lab.run(case)
    except AttnLabError:
        return None
    return None if ran.status == "rejected" else ran.output.cpu().clone()


def _judged(kind: str, verified: bool) -> str:
    return f"{kind}, {'right' if verified else 'wrong'}"


def _predicts(
    lab: Lab,
    backend: Backend,
    case: Case,
    defect: Defect,
    *,
    only_decodes: bool,
    in_all_rows: bool = False,
) -> bool:
    """Return whether a defect explains the kernel's output on fresh cases, wherever one of them is wrong.

    A rule must do so in all rows, or in all decodes or prefills, not in single sequences. A defect that
    is "less likely" gives all outputs up to rounding, too: a factor of keys that are rounded afterwards, for
    example, is not the one that fits best.
    """
    decisive = 0
    for fresh in fresh_cases(case, only_decodes):
        known = with_known_contents(fresh)
        if defect.name in SLOTS_OF:  # finite numbers times 0 would not show it
            known = known.replace(empty_slots="nan")
        try:
            output = run_case(lab, backend, known).output
        except AttnLabError:
            continue
        evidence = examine(lab, known, output, ()).evidence
        wrong_rows = evidence.locations.wrong_rows
        is_wrong = bool(len(wrong_rows))
        if defect.name == NEVER_WRITTEN:  # which rows that concerns depends on the lengths
            if not bool(torch.isin(wrong_rows, evidence.unwritten).all()):
                return False
            decisive += is_wrong
            continue
        only = diagnose(known, output, lab=lab, defects=(defect,), propose=False)
        found = [one for one in only.candidates if _fits(one, in_all_rows=in_all_rows)]
        if is_wrong and not found:
            return False
        decisive += is_wrong
    return decisive > 0


def _fits(one: Candidate, *, in_all_rows: bool) -> bool:
    """Return whether a candidate gives an output up to rounding, in all rows of a kind or in any scope."""
    if one.verdict not in ("explains", "less likely") or one.scope is None:
        return False
    return not in_all_rows or one.scope.rows != "sequences"


def _describes(lab: Lab, backend: Backend, case: Case, weights: DescribedWeights) -> bool:
    """Return whether the weights of a description give the kernel's outputs on fresh cases."""
    decisive = 0
    for fresh in fresh_cases(case, weights.only_decodes):
        known = with_known_contents(fresh)
        try:
            output = run_case(lab, backend, known).output
        except AttnLabError:
            continue
        found = examine(lab, known, output, ())
        if weights.right_decodes and max(known.lengths.query_lens) == 1:
            if bool(found.evidence.locations.is_wrong.any()):
                return False
            continue
        if not follows_from(weights.description, lab, known, output, found):
            return False
        decisive += bool(found.evidence.locations.is_wrong.any())
    return decisive > 0


def _repairs(lab: Lab, case: Case, diagnosis: Diagnosis) -> bool:
    """Return whether the edit makes every fresh output and side output right.

    Cases in which the kernel raises with and without the edit are left out. Slots without a token hold NaN,
    or finite numbers if the statement is about these.
    """
    claim, decisive = diagnosis.repair, 0
    assert claim is not None
    for fresh in fresh_cases(case):
        known = with_contents(fresh, "garbage" if claim.only_finite else "nan")
        before, after = is_right(lab, known), is_right(lab, known, claim.repair)
        if before is None and after is None:
            continue
        if not after:
            return False
        decisive += not before
    return decisive > 0


def _traits(lab: Lab, case: Case) -> CaseFacts:
    kernel = kernel_of(lab, case)
    assert kernel.weights is not None
    return trait_facts(lab, case, run=kernel.run, measured=kernel.weights)


def _recurs(
    labs: Sequence[Lab],
    case: Case,
    claim: AccessClaim | None,
    facts_of: Callable[[Lab, Case], CaseFacts] = lambda lab, case: access_facts(lab, case, lab.run),
) -> bool:
    """Return whether what is stated of accesses or weights concerns every wrong row of fresh outputs.

    It must not concern a right one, nor an output of the unchanged op, which may have a fault of its own.

    ``labs``: with the mutant, and with the unchanged op, if that is compared.
    """
    assert claim is not None
    said = {*claim.facts, *claim.either, *claim.some}
    found, *sound = ([facts_of(lab, fresh) for fresh in fresh_cases(case)] for lab in labs)
    is_decisive = any(bool(one.is_wrong.any()) for one in found)
    is_planted = not any(
        said & (one.places.keys() if bool(one.is_wrong.any()) else one.refuted)
        for one in itertools.chain(*sound)
    )
    return is_decisive and is_planted and all(claim.holds_in(one) for one in found)


def _leaks(lab: Lab, backend: Backend, case: Case, claim: LeakClaim | None) -> bool:
    """Return whether fresh outputs are wrong by what unwritten slots hold, as a claim says."""
    assert claim is not None
    holds = leak_of if claim.only_nan else counts_slots
    found = [
        holds(lab, fresh, lambda one: run_case(lab, backend, one).output)
        for fresh in fresh_cases(case)
    ]
    return True in found and False not in found


def _needs(lab: Lab, case: Case, claim: FeatureClaim | None) -> bool:
    """Return whether some fresh output is wrong, and each is right without any of the features."""
    assert claim is not None
    fresh = [one for one in fresh_cases(case) if is_right(lab, one) is not None]
    lacking = [
        one.replace(**changes)
        for one in fresh
        for noun, changes in features_of(one).items()
        if noun in claim.features
    ]
    is_wrong = any(is_right(lab, one) is False for one in fresh)
    return is_wrong and all(is_right(lab, one) for one in lacking)


def _measures(lab: Lab, case: Case, weights: DescribedWeights) -> bool:
    """Return whether the description gives most weights that X-rays of fresh cases measure.

    Outputs of cases with an op argument are not predicted, and their formats leave few digits of a weight.
    """
    shares = []
    for fresh in fresh_cases(case):
        with suppress(AttnLabError):
            seen = xray(fresh, lab=lab, confirm=False, limit_s=0.1)
            readable = seen.weights.isfinite().all(-1)
            predicted = weights.description.weights(seen.setup)
            explained = compare(seen.setup, seen.weights, predicted).explained[readable]
            shares.append(float(explained.double().mean()))
    return bool(shares) and min(shares) > 0.5


def _is_rounding(lab: Lab, case: Case) -> bool:
    """Return whether rounding to bfloat16 explains the weights of fresh cases, and some are wrong."""
    found = list[float | None]()
    for fresh in fresh_cases(case, max(case.lengths.query_lens) == 1):
        with suppress(AttnLabError):
            found.append(rounding_of(fresh, lab))
    return None not in found and any(found)


def _claims(lab: Lab, backend: Backend, case: Case, claim: PatternClaim) -> bool:
    """Return whether the stated pattern holds on fresh cases: the first rule of each place."""
    decisive = 0
    for fresh in fresh_cases(case, claim.only_decodes):
        try:
            output = run_case(lab, backend, fresh).output
        except AttnLabError:
            continue
        left, is_wrong = compared(claimed(examine(lab, fresh, output, ())), claim)
        if left is None or left.text != claim.text:
            return False
        decisive += is_wrong
    return decisive > 0


def _side_outputs(lab: Lab, case: Case, diagnosis: Diagnosis) -> bool:
    """Return whether the statements about side outputs hold on fresh cases."""
    decisive = 0
    for fresh in fresh_cases(case):
        try:
            again = side_claims(lab, fresh, lab.run(fresh))
        except AttnLabError:
            continue
        left = common_claims(diagnosis.side_errors, again)
        if again and [one.said for one in left] != [one.said for one in diagnosis.side_errors]:
            return False
        decisive += bool(again)
    return decisive > 0


def _accesses(lab: Lab, backend: Backend, case: Case, lines: set[str]) -> bool:
    """Return whether the source lines of bad accesses are the same wherever a fresh output is wrong."""
    decisive = 0
    for fresh in fresh_cases(case, is_small=False):
        try:
            run = run_case(lab, backend, fresh)
        except AttnLabError:
            continue
        is_wrong = diagnose(fresh, run.output, lab=lab, defects=(), propose=False).is_wrong
        if is_wrong and not lines & lines_of((*run.outside, *run.wraps)):
            return False
        decisive += is_wrong
    return decisive > 0
