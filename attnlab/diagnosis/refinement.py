"""Refine a diagnosis by running the kernel again: other buffers, other empty slots, and a second case."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.op_arguments import NONE
from attnlab.defects import Defect
from attnlab.diagnosis.address_rules import FAMILY
from attnlab.diagnosis.candidates import Candidate, limit_of, ratio_of
from attnlab.diagnosis.claims import (
    DescribedWeights,
    LeakClaim,
    PatternClaim,
    PrecisionClaim,
    claim_of,
)
from attnlab.diagnosis.confirmation import (
    find_rule,
    is_hidden,
    processes_of,
    with_leaks,
    with_second_cases,
)
from attnlab.diagnosis.decision import (
    Evidence,
    Examination,
    examine,
    examined,
    if_all_unwritten,
    status_of,
    with_explanations,
    with_slot_kinds,
    withdraw,
)
from attnlab.diagnosis.describe import SMALL, sizes_of
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import Pattern, Sizes, list_text
from attnlab.diagnosis.reruns import (
    CacheRun,
    Rerun,
    decodes_alone,
    edge_case,
    few_sequences,
    find_dependence,
    find_slot_kinds,
    further_cases,
    output_of_outside,
    with_contents,
    with_known_contents,
)
from attnlab.kernels.child_process import in_background, in_copies
from attnlab.kernels.control import Control, rows_agree
from attnlab.kernels.triton.run_log import other_outside
from attnlab.lab.lab import Lab
from attnlab.lab.problem import AttentionInputs, Predicted, Problem, RowSlice, scores_of, weights_of
from attnlab.tensors.cache import PagedCache
from attnlab.weights.conclude import measured_weights, most_runs, rounding_of, xray
from attnlab.weights.facts import MOST_FACTS, weight_facts
from attnlab.weights.fit import compare
from attnlab.weights.measurement import Examined
from attnlab.weights.plan import Description
from attnlab.weights.setup import AttentionSetup, table_slots
from attnlab.weights.xray import XRay, predict_case

# Compare the weights that an X-ray describes with the outputs of further cases.

_SLACK = 3.0  # a wrong description is off by hundreds of rounding bounds
_MOST = 4  # descriptions of an X-ray that are tried


def confirmed_weights(
    lab: Lab,
    case: Case,
    descriptions: Sequence[Description],
    rerun: Rerun,
    processes: int = 1,
) -> DescribedWeights | None:
    """Return the first description from which every wrong output of the further cases follows, or None.

    So must the output of a run with other numbers outside of all tensors. Of a batch of decodes, only decodes
    must follow. ``processes``: as ``Kernel.processes``.
    """
    first = _weights_true_of_outside(lab, case, descriptions[:_MOST], rerun)

    def followed(other: Case) -> tuple[bool, list[bool]] | None:
        """Return whether another output is wrong, and from which descriptions it follows; None if the case
        does not run."""
        for known, output, found in examined(lab, [with_known_contents(other)], rerun):
            is_wrong = bool(len(found.evidence.locations.wrong_rows))
            return is_wrong, [follows_from(one, lab, known, output, found) for one in first]
        return None

    others = [*further_cases(case), *decodes_alone(case)] if first else []
    runs = list(zip(others, in_copies(followed, others, processes), strict=True))
    for i, description in enumerate(first):
        cases, is_right = 0, True
        only_decodes = max(case.lengths.query_lens) == 1
        has_prefill, right_decodes = not only_decodes, False
        for other, ran in runs:
            if ran is None:
                continue
            is_wrong, follows = ran
            if follows[i]:
                cases += is_wrong
                only_decodes &= not (is_wrong and max(other.lengths.query_lens) > 1)
            elif has_prefill and not is_wrong and max(other.lengths.query_lens) == 1:
                right_decodes = True
            elif not only_decodes or max(other.lengths.query_lens) == 1:
                is_right = False
                break
        if is_right and cases:
            return DescribedWeights(
                description=description,
                cases=cases,
                only_decodes=only_decodes and case.spec.prefill,
                right_decodes=right_decodes,
            )
    return None


def _weights_true_of_outside(
    lab: Lab, case: Case, descriptions: Sequence[Description], rerun: Rerun
) -> Sequence[Description]:
    """Return the descriptions from which a run with other numbers outside of all tensors follows, too."""
    known = with_known_contents(case)
    output = output_of_outside(rerun, known) if descriptions else None
    if output is None:
        return descriptions
    found = examine(lab, known, output, (), Pattern())
    return [one for one in descriptions if follows_from(one, lab, known, output, found)]


def follows_from(
    description: Description, lab: Lab, case: Case, output: torch.Tensor, found: Examination
) -> bool:
    """Answer whether a description gives an output of a Case; ``found``: the examination of that output."""
    predicted = predict_case(description, case, lab)
    rows, heads = torch.arange(len(output)), torch.arange(output.shape[1])
    right = found.problem.correct_rows(rows, heads)
    size = predicted.abs().amax(-1) / lab.reference(case).abs().double().amax(-1)
    bound = _SLACK * right.bound * size.clamp(min=1)[..., None]
    limit = limit_of(bound, output.double(), right.output, _SLACK * right.bound)
    error = ratio_of(output.double() - predicted, limit.amax(-1, keepdim=True))
    return not bool((error > 1).any())


# What an X-ray says about the explanations of an output: names that contradict it are withdrawn.

# Families whose defects change how much each key counts, not which slot is read as that key.
_WEIGHTS = ("masks", "softmax", "scores", "sinks", "softcap")
_OVERFLOW = "softcap_overflows"  # depends on the size of the scores, which an X-ray may draw anew
_AGREES = 0.5  # share of the rows and heads that a name must predict


def with_xray(diagnosis: Diagnosis, found: XRay) -> Diagnosis:
    """Return the diagnosis with an X-ray of the same kernel and call.

    A name that says how keys count is withdrawn if it does not predict the measured weights. If no name is
    left and the X-ray has a description, the status is "described".
    """
    diagnosis = dataclasses.replace(diagnosis, xray=found)
    if found.status in ("right", "precision", "described"):
        diagnosis = withdraw(
            diagnosis,
            lambda one: _contradicts(one, found),
            "excluded by run",
            "{names} is withdrawn: the measured attention weights are not those that it predicts",
        )
    if diagnosis.status == "unexplained" and found.status == "described":
        return dataclasses.replace(diagnosis, status="described")
    return diagnosis


def _contradicts(candidate: Candidate, found: XRay) -> bool:
    """Answer whether a name predicts other weights than were measured."""
    if candidate.defect.family not in _WEIGHTS or candidate.name == _OVERFLOW:
        return False
    predicted = _predicted(candidate, found.setup)
    if predicted is None:
        return False
    readable = found.weights.isfinite().all(-1)
    explained = compare(found.setup, found.weights, predicted).explained
    return float(explained[readable].double().mean()) < _AGREES if bool(readable.any()) else False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WeightProblem(Problem):
    """A problem that predicts the weights of the keys, [rows, heads, keys], in place of outputs."""

    def predict(self, inputs: AttentionInputs) -> Predicted:
        weights = weights_of(inputs, scores_of(inputs)).nan_to_num(0.0).transpose(0, 1)
        return Predicted(output=weights, bound=torch.zeros_like(weights))


def _predicted(candidate: Candidate, setup: AttentionSetup) -> torch.Tensor | None:
    """Return the weights of all slots under a defect in its scope, [R, H, N], or None if they do not belong
    to the positions of the sequence."""
    call, kernels = setup.call.cpu(), tuple(dict.fromkeys(setup.kernels))
    problem = _WeightProblem.of_call(call, setup.target, kernels)
    measured, heads, seqs = (one.cpu() for one in (setup.rows, setup.heads, setup.seq))
    weights = torch.zeros(len(measured), len(heads), setup.num_slots, dtype=torch.float64)
    starts = problem.row_starts()
    for seq in seqs.unique().tolist():
        rows = torch.nonzero(seqs == seq).flatten()
        row_slice = RowSlice(seq=seq, tokens=measured[rows] - starts[seq], heads=heads)
        inside = candidate.scope is None or seq in candidate.scope.sequences
        compute = candidate.defect.compute if inside else Problem.correct
        output = compute(problem, row_slice).output
        if output.shape[2] != problem.seq_len(seq):
            return None
        slots = _slots(problem, setup, seq)
        weights[rows] = weights[rows].index_add(2, slots, output)
    return weights.to(setup.device)


def _slots(problem: Problem, setup: AttentionSetup, seq: int) -> torch.Tensor:
    """Return the slot of each position of a sequence, as the X-ray numbers them, [seq_len] int64."""
    cached = problem.cached_len(seq)
    first_new = setup.cache_slots + problem.row_starts()[seq] - problem.ctx_len(seq)
    new = first_new + torch.arange(cached, problem.seq_len(seq))
    return torch.cat([table_slots(setup.call)[seq, :cached], new])


# Compare a pattern with further cases: only what holds there, too, is stated as a rule.


def confirmed_claim(
    lab: Lab, case: Case, first: Examination, rerun: Rerun, processes: int = 1
) -> PatternClaim | None:
    """Return what the pattern of an output says and further cases confirm, or None.

    A claim from decodes alone is confirmed on decodes, and says so. ``processes``: as ``Kernel.processes``.
    """
    claim, _ = claimed(first)
    if claim is None or not claim.is_rule:
        return None
    others = [*further_cases(case), *few_sequences(case)]
    if claim.only_decodes:
        others = [one for one in others if max(one.lengths.query_lens) <= 1]
    more = in_copies(partial(_claimed_in, lab, case, rerun), others, processes)
    seen = list[Claimed]()

    def claims() -> Iterator[Claimed]:
        yield from tuple(seen)
        for one in more:
            if one is not None:
                seen.append(one)
                yield one

    while True:
        cases = 0
        for found in claims():
            claim, is_decisive = compared(found, claim)
            cases += is_decisive
            if claim is None or not claim.is_rule:
                return None
        # the limit that a rule of sequences states, such as "with seq_len above 256"
        limit = (
            re.search(r" (?:above|up to) (\d+)$", claim.sequences[0]) if claim.sequences else None
        )
        if limit is None or _holds_at_edge(lab, case, claim, int(limit[1]), rerun):
            return claim if cases else None
        claim = dataclasses.replace(claim, sequences=claim.sequences[1:])


def _holds_at_edge(lab: Lab, case: Case, claim: PatternClaim, limit: int, rerun: Rerun) -> bool:
    """Answer whether sequences just at the limit of lengths that a claim states do not contradict it."""
    other = edge_case(case, limit)
    found = None if other is None else _claimed_in(lab, case, rerun, other)
    left = None if found is None else compared(found, claim)[0]
    return left is not None and left.sequences[:1] == claim.sequences[:1]


Claimed = tuple[PatternClaim | None, Sizes]  # by an output, and the sizes of its call


def _claimed_in(lab: Lab, case: Case, rerun: Rerun, other: Case) -> Claimed | None:
    """Return what another case claims with the contents of ``case``; None if it does not run."""
    alike = other.replace(empty_slots=case.empty_slots, output_init=case.output_init)
    for _, _, found in examined(lab, [alike], rerun, describes=True):
        return claimed(found)
    return None


def claimed(found: Examination) -> Claimed:
    """Return what the errors of an examined output claim, and the sizes of its call."""
    sizes = sizes_of(found.problem)
    ran = list(found.evidence.heads or range(found.problem.num_heads))
    is_wrong = found.evidence.locations.is_wrong
    return claim_of(is_wrong, ran, sizes, found.diagnosis.pattern), sizes


def compared(found: Claimed, claim: PatternClaim) -> tuple[PatternClaim | None, bool]:
    """Return what is left of a claim after another output, None if nothing, and whether that was wrong."""
    again, sizes = found
    if again is None:
        return (claim if claim.predicts_none(sizes) else None), False
    return claim.common(again), True


# Compare a Case and further ones with finite numbers and with NaN in their unwritten slots.


def confirmed_leak(lab: Lab, case: Case, rerun: Rerun, *, only_nan: bool) -> LeakClaim | None:
    """Return the claim if it holds for the Case and for all further cases, else None."""
    holds = leak_of if only_nan else counts_slots
    if holds(lab, case, rerun) is not True:
        return None
    found = [holds(lab, with_leaks(other, case), rerun) for other in further_cases(case)]
    if False in found or True not in found:
        return None
    return LeakClaim(cases=found.count(True), only_nan=only_nan)


def counts_slots(lab: Lab, case: Case, rerun: Rerun) -> bool | None:
    """Answer whether every row that is wrong with finite numbers in unwritten slots changes with them.

    None if the output is right, or if the kernel rejects the Case.
    """
    finite, zeros = (case.replace(empty_slots=fill) for fill in ("garbage", "zeros"))
    try:
        output = rerun(finite)
        is_wrong = examine(lab, finite, output, (), Pattern()).evidence.locations.is_wrong.any(1)
        if not bool(is_wrong.any()):
            return None
        return not bool((is_wrong & rows_agree(output, rerun(zeros))).any())
    except AttnLabError:
        return None


def leak_of(lab: Lab, case: Case, rerun: Rerun) -> bool | None:
    """Answer whether NaN in unwritten slots, and it alone, makes the output of a Case wrong.

    None if the output is right with NaN, too, or if the kernel rejects the Case.
    """
    finite, nan = (case.replace(empty_slots=fill) for fill in ("garbage", "nan"))
    try:
        if examine(lab, finite, rerun(finite), (), Pattern()).diagnosis.is_wrong:
            return False
        return True if examine(lab, nan, rerun(nan), (), Pattern()).diagnosis.is_wrong else None
    except AttnLabError:
        return None


# Compare statements about values with a run that loads other numbers than 0 outside of all tensors.


def true_of_outside(lab: Lab, case: Case, diagnosis: Diagnosis, rerun: Rerun) -> Diagnosis:
    """Return the diagnosis without what is not true of a run with other numbers outside of all tensors.

    It runs if a row depends on them. The interpreter loads zeros there, and other factors of an address give
    the same zeros, so a rule about addresses needs a wrong row that does not depend on them. Names, other
    rules and confirmed weights were compared with such a run before.
    """
    if not diagnosis.outside_rows:
        return diagnosis
    known = with_known_contents(case)
    try:
        with other_outside():
            output = rerun(known)
        found = examine(lab, known, output, ())
    except AttnLabError:
        return diagnosis
    rule, is_all = diagnosis.rule, len(diagnosis.outside_rows) >= diagnosis.wrong_rows
    if rule is not None and rule.candidate.defect.family == FAMILY and is_all:
        rule = None
    xray, claim = diagnosis.xray, diagnosis.claim
    described = None if xray is None else xray.description
    if described is None or not follows_from(described, lab, known, output, found):
        xray = None
    if claim is not None:
        claim = compared(claimed(found), claim)[0]
        claim = claim if claim is not None and claim.is_rule else None
    again = {fact.sentence for fact in found.diagnosis.pattern.facts}
    facts = (
        one for one in diagnosis.pattern.facts if not one.accounts_for or one.sentence in again
    )
    pattern = dataclasses.replace(diagnosis.pattern, facts=tuple(facts))
    is_described = diagnosis.bad_lines or any((rule, diagnosis.leak, diagnosis.weights, claim))
    status = diagnosis.status
    if not is_described:
        status = status_of(diagnosis.cause, diagnosis.explanations, pattern)
    return dataclasses.replace(
        diagnosis,
        status=status,
        pattern=pattern,
        rule=rule,
        xray=xray,
        claim=claim,
    )


# What was measured in this call, where nothing describes the fault.


def with_facts(diagnosis: Diagnosis, wrong_rows: torch.Tensor) -> Diagnosis:
    """Return the diagnosis with facts of its X-ray, if nothing else is stated; ``wrong_rows``: of the output.

    They are true of this call alone, so the status stays "unexplained".
    """
    found = diagnosis.xray
    if diagnosis.status != "unexplained" or not diagnosis.wrong_rows or found is None:
        return diagnosis
    facts = [one.text for one in weight_facts(found)]
    if found.status == "precision":
        facts = [found.sentences[0]] if _is_small(diagnosis.pattern) else []
    wrong = found.setup.rows[found.wrong.any(1)]
    others = wrong_rows[~torch.isin(wrong_rows, wrong)].tolist()
    if facts and others:
        words = f"the weights of {list_text('row', others)} are right, and the output is wrong"
        facts = [*facts[: MOST_FACTS - 1], words]
    if found.drawn:
        facts = [f"with other numbers in query and keys, {one}" for one in facts]
    return dataclasses.replace(diagnosis, observed=tuple(facts))


def with_precision(lab: Lab, case: Case, diagnosis: Diagnosis, kernel: "Kernel") -> Diagnosis:
    """Return the diagnosis with the rounding of weights that its X-ray measured, if nothing else is stated
    and further cases confirm it."""
    found = diagnosis.xray
    is_open = diagnosis.status == "unexplained" and kernel.rounding is not None
    if not is_open or found is None or found.status != "precision":
        return diagnosis
    claim = confirmed_precision(lab, case, kernel) if _is_small(diagnosis.pattern) else None
    if claim is None:
        return diagnosis
    return dataclasses.replace(diagnosis, status="described", precision=claim)


def _is_small(pattern: Pattern) -> bool:
    """Answer whether all errors of an output are finite and small, as those of rounding are."""
    sizes = [*pattern.of("precision"), *pattern.of("size")]
    return bool(sizes) and sizes[0].values["relative"] < SMALL and not pattern.of("nonfinite")


def confirmed_precision(lab: Lab, case: Case, kernel: "Kernel") -> PrecisionClaim | None:
    """Return that the weights of a Case and of further ones are off by rounding to bfloat16, or None.

    A wrong output with other weights refutes it, or with errors that are not small.
    """
    rounding = kernel.rounding
    assert rounding is not None

    def measured(other: Case) -> float | None:
        """Return the rounding of a further Case with a wrong output, 0 if that shows none or takes long; None
        refutes it."""
        began = time.perf_counter()
        for known, _, found in examined(
            lab, [with_known_contents(other)], kernel.run, describes=True
        ):
            if not len(found.evidence.locations.wrong_rows):
                return 0.0
            if not _is_small(found.diagnosis.pattern):
                return None
            if not can_xray(known, time.perf_counter() - began):
                return 0.0
            with suppress(AttnLabError):
                return rounding(known)
        return 0.0

    first, cases = rounding(case), list[float]()
    for largest in in_copies(measured, further_cases(case), kernel.processes):
        if largest is None:
            return None
        cases += [largest] if largest else []
    if not first or not cases:
        return None
    only_decodes = max(case.lengths.query_lens) == 1 and case.spec.prefill
    return PrecisionClaim(cases=len(cases), largest=max(first, *cases), only_decodes=only_decodes)


_XRAY_S = 2.5  # time for the search for a description
_RERUNS = 6  # of the kernel, before an X-ray
_XRAY_RUN_S = 30.0  # time that all runs of an X-ray may take
_XRAY_WEIGHTS = 1 << 24  # rows × heads × slots, up to which the weights are measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel at hand.

    ``run``: runs a Case; ``run_with``: runs a Case with another cache than ``cache_of`` returns for it, or
    None; ``xray``: measures the weights; ``weights``, ``rounding``: as
    :func:`attnlab.weights.conclude.measured_weights` and :func:`attnlab.weights.conclude.rounding_of`. All
    outputs are on the CPU. ``is_deterministic``: as ``Backend.is_deterministic``. ``processes``: how many
    processes may run it at a time.
    """

    run: Rerun
    run_with: CacheRun | None = None
    cache_of: Callable[[Case], PagedCache] | None = None
    xray: Callable[[Case], XRay] | None = None
    weights: Callable[[Case], Examined] | None = None
    rounding: Callable[[Case], float | None] | None = None
    is_deterministic: bool = False
    processes: int = 1

    def check_repeats(
        self, control: Control, case: Case, output: torch.Tensor, diagnosis: Diagnosis
    ) -> None:
        """Run a Case with a wrong output again, and raise NotDeterministic if it gives another one."""
        if diagnosis.is_wrong and not self.is_deterministic:
            control.compare(output, lambda: self.run(case))


def kernel_of(lab: Lab, case: Case) -> Kernel:
    """Return the kernels of a lab that run a Case."""
    return Kernel(
        is_deterministic=lab.backend(case).is_deterministic,
        run=lambda case: lab.output(case).cpu(),
        run_with=lambda case, cache: lab.output(case, cache).cpu(),
        cache_of=lab.cache,
        xray=lambda case: xray(case, lab=lab, limit_s=_XRAY_S),
        weights=lambda case: measured_weights(case, lab),
        rounding=lambda case: rounding_of(case, lab),
        processes=processes_of(lab, case),
    )


def with_reruns(
    lab: Lab,
    case: Case,
    output: torch.Tensor,
    first: Examination,
    kernel: Kernel,
    defects: Iterable[Defect],
) -> Diagnosis:
    """Return the first diagnosis, refined by what reruns of the kernel show."""
    began = time.perf_counter()
    # its cache is reused below
    diagnosis = _with_finite_contents(lab, case, first, kernel.run, defects)
    is_wrong = first.evidence.locations.is_wrong.any(1)
    dependence = find_dependence(kernel.run, case, output, is_wrong)
    diagnosis = dataclasses.replace(
        _if_unwritten(first.evidence, dependence.unwritten, diagnosis, defects),
        pattern=first.diagnosis.pattern,
        unwritten=dependence.unwritten.tolist(),
        unwritten_by="reruns" if len(dependence.unwritten) else "",
        slot_dependent=dependence.on_slots.tolist(),
    )
    if len(dependence.on_slots) and kernel.run_with is not None and kernel.cache_of is not None:
        zeros = case.replace(empty_slots="zeros")
        kinds = find_slot_kinds(kernel.run_with, zeros, kernel.cache_of(zeros))
        diagnosis = with_slot_kinds(diagnosis, kinds)
    diagnosis = with_second_cases(lab, case, kernel.run, diagnosis)
    seconds = (time.perf_counter() - began) / _RERUNS
    measure = partial(_xray_of, case, kernel, diagnosis, seconds)
    with in_background(measure, kernel.processes) as measured:
        rule = None if diagnosis.explanations else find_rule(lab, case, kernel.run)
        if rule is not None:
            return dataclasses.replace(diagnosis, status="described", rule=rule)
        weights = measured()
    if weights is not None:
        diagnosis = _with_weights(lab, case, kernel, with_xray(diagnosis, weights))
    if diagnosis.explanations or diagnosis.weights is not None:
        return diagnosis
    if len(dependence.on_slots):
        only_nan = not len(dependence.on_finite_slots)
        leak = confirmed_leak(lab, case, kernel.run, only_nan=only_nan)
        if leak is not None:
            return dataclasses.replace(diagnosis, status="described", leak=leak)
    claim = confirmed_claim(lab, case, first, kernel.run, kernel.processes)
    status = "unexplained" if claim is None else "described"
    diagnosis = dataclasses.replace(diagnosis, status=status, claim=claim)
    if status == "unexplained" and case.first_block:
        return _from_the_first_block(lab, case, diagnosis, kernel)
    return diagnosis


def _from_the_first_block(lab: Lab, case: Case, diagnosis: Diagnosis, kernel: Kernel) -> Diagnosis:
    """Return the diagnosis with what describes the kernel in a small cache, if it is wrong there, too.

    A cache that begins with unused blocks is too large for most rules.
    """
    small = case.replace(first_block=0, num_blocks=None)
    try:
        output = kernel.run(small)
    except AttnLabError:
        return diagnosis
    first = examine(lab, small, output, ())
    if not first.diagnosis.is_wrong:
        return diagnosis
    found = with_reruns(lab, small, output, first, kernel, ())
    if found.status != "described":
        return diagnosis
    names = ("status", "rule", "weights", "leak", "claim")
    return dataclasses.replace(diagnosis, **{name: getattr(found, name) for name in names})


def _xray_of(case: Case, kernel: Kernel, diagnosis: Diagnosis, seconds: float) -> XRay | None:
    """Return an X-ray, if one may change a diagnosis and is quick; a run takes ``seconds``.

    That needs no name, or one that says how keys count. No name predicts the weights that a kernel gives to
    numbers of an op argument.
    """
    names = diagnosis.explanations
    is_about_keys = any(one.defect.family in _WEIGHTS for one in names)
    is_open = not names or (is_about_keys and case.op_argument == NONE)
    if kernel.xray is None or not is_open or not can_xray(case, seconds):
        return None
    with suppress(AttnLabError):  # the call is too large, or the kernel rejects coded values
        return kernel.xray(case)
    return None


def _with_weights(lab: Lab, case: Case, kernel: Kernel, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with what of the X-ray the outputs of further cases confirm; without that, the
    X-ray describes nothing.

    How a cache with a scale per token and head is read shows in coded values alone: there, the second Case of
    the X-ray decides.
    """
    found = diagnosis.xray
    if found is None or found.status != "described" or diagnosis.explanations:
        return diagnosis
    weights = None
    if case.argument.cache is None:
        weights = confirmed_weights(lab, case, found.descriptions, kernel.run, kernel.processes)
    elif found.confirmed and found.description is not None:
        weights = DescribedWeights(description=found.description, cases=1)
    status = "unexplained" if weights is None else "described"
    return dataclasses.replace(diagnosis, status=status, weights=weights)


def can_xray(case: Case, seconds: float) -> bool:
    """Answer whether an X-ray takes seconds at most, if a run takes ``seconds``."""
    slots = case.total_blocks * case.block_size
    is_small = case.lengths.num_tokens * case.num_heads * slots <= _XRAY_WEIGHTS
    return is_small and seconds * most_runs(case) <= _XRAY_RUN_S


def _if_unwritten(
    evidence: Evidence, unwritten: torch.Tensor, diagnosis: Diagnosis, defects: Iterable[Defect]
) -> Diagnosis:
    """Return that no kernel writes the wrong rows, if reruns show it for all and no defect explains them."""
    if diagnosis.explanations or not len(unwritten):
        return diagnosis
    known = dataclasses.replace(evidence, unwritten=unwritten, unwritten_by="reruns")
    return if_all_unwritten(known, diagnosis, tuple(defects)) or diagnosis


def _with_finite_contents(
    lab: Lab, case: Case, first: Examination, rerun: Rerun, defects: Iterable[Defect]
) -> Diagnosis:
    """Run the Case with finite garbage in unwritten slots and rows, and diagnose that output.

    NaN shows where unwritten memory is used, but not how; finite garbage also has values. If the output
    with garbage is correct, the remaining explanations are those that garbage does not show.
    """
    empty_slots = "garbage" if case.empty_slots == "nan" else case.empty_slots
    finite = with_contents(case, empty_slots=empty_slots, output_init="recycled")
    if finite == case:
        return first.diagnosis
    second = examine(lab, finite, rerun(finite), defects, first.diagnosis.pattern)
    if second.diagnosis.is_wrong:
        return second.diagnosis
    found = first.diagnosis.explanations
    explanations = [one for one in found if is_hidden(second.problem, one.defect)]
    left = [candidate.name for candidate in explanations]
    candidates = [
        dataclasses.replace(candidate, verdict="excluded by rerun")
        if candidate.verdict == "explains" and candidate.name not in left
        else candidate
        for candidate in first.diagnosis.candidates
    ]
    again = dataclasses.replace(first.diagnosis, candidates=candidates)
    return with_explanations(again, explanations)
