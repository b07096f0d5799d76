"""diagnose and diagnose_call: find the defect that explains an output. The package describes the method."""

import contextlib
import dataclasses
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import TypeVar

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.fields import runs_triton
from attnlab.case.op_arguments import NONE
from attnlab.contracts.contract import ROCM_DECODE, Target, contracts_of
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import SlotState, contract_reads
from attnlab.contracts.violations import Violations, find_violations
from attnlab.defects import DEFECTS, Defect
from attnlab.defects.reads import argument_defects
from attnlab.diagnosis.address_rules import FAMILY
from attnlab.diagnosis.candidates import CLEAR, Candidate, ErrorLocations, locate
from attnlab.diagnosis.claims import (
    UNWRITTEN,
    AccessClaim,
    CaseFacts,
    KernelLocation,
    TraitClaim,
    recorded_facts,
)
from attnlab.diagnosis.confirmation import find_rule, processes_of, with_features
from attnlab.diagnosis.decision import (
    check_output,
    collect_evidence,
    conclude,
    examine,
    examined,
    with_run_faults,
    without_guess,
)
from attnlab.diagnosis.diagnosis import Diagnosis, Distinction, find_distinction
from attnlab.diagnosis.lines import lines_of, locate_lines
from attnlab.diagnosis.parts import is_part_fact
from attnlab.diagnosis.pattern import PLACES, Pattern
from attnlab.diagnosis.refinement import (
    Kernel,
    can_xray,
    kernel_of,
    true_of_outside,
    with_facts,
    with_precision,
    with_reruns,
)
from attnlab.diagnosis.repair_check import with_repair
from attnlab.diagnosis.reruns import (
    Rerun,
    few_sequences,
    find_unwritten,
    further_cases,
    keeping,
    nearby_cases,
    with_known_contents,
)
from attnlab.diagnosis.side_claims import confirmed_side_claims, side_claims
from attnlab.diagnosis.trials import FULL, Limit
from attnlab.diagnosis.written_cache import diagnose_write
from attnlab.kernels.binding import scratch_full_of
from attnlab.kernels.child_process import in_copies
from attnlab.kernels.control import Control, controlled, repeated, rows_agree, rows_equal
from attnlab.kernels.triton.run_log import limiting_reruns, other_outside
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.lab.result import Result
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import same_numbers
from attnlab.tensors.quantised import output_numbers
from attnlab.weights.facts import weight_traits
from attnlab.weights.measurement import Examined

# Compare what the kernels of a Case read and write with what they must, here and in further cases.

# Source lines whose bad access or overflow recurs wherever the output of a further case is wrong.


def with_bad_lines(
    lab: Lab, case: Case, diagnosis: Diagnosis, run: Callable[[Case], Result]
) -> Diagnosis:
    """Return the diagnosis with the lines of ``wraps`` and ``outside`` that further cases confirm.

    An access that does not recur where an output is wrong is no description of the fault. ``lab`` has its
    tensors on the CPU; ``run`` runs the kernels. If nothing else explains the output, the status is
    "described".
    """
    is_known = (
        diagnosis.explanations or diagnosis.rule is not None or diagnosis.accesses is not None
    )
    if is_known or diagnosis.bad_lines or not diagnosis.wrong_rows:
        return diagnosis
    left, cases = lines_of((*diagnosis.outside, *diagnosis.wraps)), 0
    for other in further_cases(case) if left else ():
        try:
            ran = run(other)
            if ran.status == "rejected":
                continue
            found = examine(lab, other, ran.output.cpu(), (), Pattern())
        except AttnLabError:
            continue
        if len(found.evidence.locations.wrong_rows):
            left, cases = left & lines_of((*ran.outside, *ran.wraps)), cases + 1
    if not left or not cases:
        return diagnosis
    status = "described" if diagnosis.status == "unexplained" else diagnosis.status
    return dataclasses.replace(diagnosis, status=status, bad_lines=tuple(sorted(left)))


Run = Callable[[Case], Result]
_NO_FACTS = CaseFacts(places={}, is_wrong=torch.zeros(0, 0, dtype=torch.bool))
_Claim = TypeVar("_Claim", bound=AccessClaim)
_ENOUGH_CASES = 5
_EVERYWHERE = torch.tensor([[True]])
_FOREIGN = (SlotState.OTHER_SEQUENCE, SlotState.OTHER_POSITION, SlotState.NEVER_MAPPED)


def with_accesses(
    lab: Lab, case: Case, diagnosis: Diagnosis, run: Run, processes: int = 1
) -> Diagnosis:
    """Return the diagnosis with wrong accesses that further cases confirm, if nothing else explains it.

    They say why an output is wrong, and a pattern only where. ``lab`` has its tensors on the CPU; ``run``
    runs the kernels, in so many ``processes`` at a time.
    """
    is_open = diagnosis.status == "unexplained" or diagnosis.claim is not None
    if not is_open or not diagnosis.wrong_rows:
        return diagnosis
    claim = _recurring(case, lambda one: access_facts(lab, one, run), processes, AccessClaim)
    if claim is None:
        return diagnosis
    return dataclasses.replace(diagnosis, status="described", claim=None, accesses=claim)


def with_traits(lab: Lab, case: Case, diagnosis: Diagnosis, kernel: Kernel) -> Diagnosis:
    """Return the diagnosis with what is wrong with the measured weights, if nothing else describes the fault
    and further cases confirm it. ``lab`` has its tensors on the CPU."""
    seen = diagnosis.xray
    is_open = diagnosis.status == "unexplained" and bool(diagnosis.wrong_rows)
    if not is_open or seen is None or not seen.is_wrong or kernel.weights is None:
        return diagnosis
    if diagnosis.largest_in_bounds is not None and diagnosis.largest_in_bounds <= CLEAR:
        return diagnosis
    facts = partial(trait_facts, lab, run=kernel.run, measured=kernel.weights)
    claim = _recurring(case, facts, kernel.processes, TraitClaim, nearby_cases)
    if claim is None:
        return diagnosis
    return dataclasses.replace(diagnosis, status="described", traits=claim)


def _recurring(
    case: Case,
    facts_of: Callable[[Case], CaseFacts],
    processes: int,
    kind: type[_Claim],
    more: Callable[[Case], Iterable[Case]] = lambda case: (),
) -> _Claim | None:
    """Return what is true of a wrong output of a Case and of those of further cases, or None.

    ``more``: returns cases that run if few of the others have a wrong output.
    """
    first = facts_of(case)
    if not first.places:
        return None
    found, claim = [first], None
    further = [*further_cases(case), *few_sequences(case, fewer_kernels=True)]
    for others in (further, more(case)):
        for facts in in_copies(facts_of, others, processes):
            found.append(facts)
            if bool(facts.is_wrong.any()) and claim_of_facts(found, kind) is None:
                return None
        claim = claim_of_facts(found, kind)
        if claim is not None and claim.cases >= _ENOUGH_CASES:
            break
    return claim


def claim_of_facts(found: Sequence[CaseFacts], kind: type[_Claim]) -> _Claim | None:
    """Return what is true of a wrong output and of others, or None; the first is the one to describe.

    Statements that concern all wrong rows are best, then two that do so together, then those that concern
    some rows of each wrong output.
    """
    wrong = [one for one in found if bool(one.is_wrong.any())]
    cases = len(wrong) - 1
    if cases < 1:
        return None
    refuted = frozenset[str]().union(*(one.refuted for one in found))
    names = sorted({name for one in wrong for name in one.places} - refuted)
    if sum(map(is_part_fact, names)) > 1:  # they exclude each other
        names = [name for name in names if not is_part_fact(name)]
    alone = tuple(name for name in names if all(one.covers(name) for one in wrong))
    if alone:
        return kind(facts=alone, cases=cases)
    for pair in combinations(names, 2):
        if all(one.covers(*pair) for one in wrong):
            return kind(either=pair, cases=cases)
    some = tuple(name for name in names if all(name in one.places for one in wrong))
    return kind(some=some, cases=cases) if some else None


def trait_facts(
    lab: Lab, case: Case, *, run: Rerun, measured: Callable[[Case], Examined]
) -> CaseFacts:
    """Return what is wrong with the weights of a Case with a wrong output.

    A Case that cannot run says nothing, and neither does one whose weights cannot be measured as they are, or
    not soon. Rows and heads with errors just above their bounds do not count as wrong: their weights may be
    within the bounds of a measurement.
    """
    known, began = with_known_contents(case), time.perf_counter()
    for _, _, found in examined(lab, [known], run):
        wrong = found.evidence.locations.ratio > CLEAR
        if not bool(wrong.any()):
            return CaseFacts(places={}, is_wrong=wrong)
        if not can_xray(known, time.perf_counter() - began):
            break
        with contextlib.suppress(AttnLabError):
            weights = measured(known)
            traits = None if weights.drawn else weight_traits(weights)
            if traits is not None:
                places = {name: torch.zeros_like(wrong) for name in traits}
                for name, cells in traits.items():
                    places[name][weights.setup.rows[:, None], weights.setup.heads] = cells
                return CaseFacts(places=places, is_wrong=wrong)
    return _NO_FACTS


def access_facts(lab: Lab, case: Case, run: Run) -> CaseFacts:
    """Return statements about the accesses of a Case; none if the Case cannot run."""
    try:
        traced = case.replace(trace_reads=True, output_init="recycled")
        ran = run(traced)
        if ran.status == "rejected":
            return _NO_FACTS
        evidence = examine(lab, traced, ran.output.cpu(), (), Pattern()).evidence
        wrong = evidence.locations.is_wrong
        found = (
            *_reads(lab, traced, ran),
            *_writes(traced, ran, wrong.any(1), run),
            *_scratch(traced, ran, run),
            *recorded_facts(traced, wrong, run, evidence.problem),
        )
    except AttnLabError:
        return _NO_FACTS
    places: dict[str, torch.Tensor] = {}
    for name, cells in found:
        whole = cells.expand_as(wrong)
        places[name] = places[name] | whole if name in places else whole
    return CaseFacts(places=places, is_wrong=wrong)


# A statement, and its places: broadcast to [num_tokens, num_heads].
_Found = tuple[str, torch.Tensor]


def _rows_in(case: Case, seq: int) -> torch.Tensor:
    """Return which rows belong to a sequence, [num_tokens, 1] bool."""
    rows = torch.arange(case.lengths.num_tokens)[:, None]
    start = case.lengths.token_start_loc[seq]
    return (rows >= start) & (rows < start + case.lengths.query_lens[seq])


def _reads(lab: Lab, case: Case, ran: Result) -> Iterator[_Found]:
    """Yield what is wrong with the slots that are read for the sequences.

    Of kernels for ROCm, those in Triton are traced with backend vllm, the others on the emulated device.
    """
    if ran.memory is None:
        return
    read: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for entry in ran.memory.slots:
        kind = "keys" if entry.tensor.lower().startswith("k") else "values"
        # a freed block may belong to another sequence; a kernel may read it and count none of its keys
        if case.freed == "kept" and any(entry.counts[state] for state in _FOREIGN):
            what = f"cached {kind} that do not belong to the sequence are read"
            yield what, _rows_in(case, entry.seq)
        places = {place for found in entry.slots.values() for place in found}
        read.setdefault((kind, entry.seq), set()).update(places)
    traced = {kind for kind, _ in read}  # of a copy of the cache, no reads are traced
    is_whole = case.backend == "vllm" and ROCM_DECODE not in decide(case).kernels
    is_own = case.spec.attends_to_cache and not case.spec.copies_cache
    if is_whole and is_own and case.op_argument == NONE:
        traced = {"keys", "values"}
    for kind in sorted(traced - {"values" if case.interleave_v else ""}):
        for seq, slots in _needed(lab, case).items():
            is_traced = is_whole or any(of == seq for _, of in read)
            if is_traced and not slots <= read.get((kind, seq), set()):
                yield f"cached {kind} that a sequence must read are never read", _rows_in(case, seq)
    for one in ran.memory.unwritten:
        yield f"{one.tensor} is read before it is written, {one.kernel}, {one.line}", _EVERYWHERE


def _needed(lab: Lab, case: Case) -> dict[int, set[tuple[int, int]]]:
    """Return the slots (block, slot) that each sequence must read from the cache.

    A sequence that several kernels may compute needs what all of them read.
    """
    call, target = lab.call(case), Target.of(case)
    contracts = contracts_of(decide(case).kernels, target, call.op)
    found: dict[int, set[tuple[int, int]]] = {}
    for reads in contract_reads(contracts, call, None):
        slots = set(zip(reads.blocks.tolist(), reads.slots.tolist(), strict=True))
        found[reads.seq] = found[reads.seq] & slots if reads.seq in found else slots
    return found


def _writes(case: Case, ran: Result, is_wrong: torch.Tensor, run: Run) -> Iterator[_Found]:
    """Yield that some wrong rows keep the contents of the output buffer, whatever they are, if so."""
    plain = case.replace(trace_reads=False)
    rows = find_unwritten(lambda one: run(one).output.cpu(), plain, ran.output.cpu())
    unwritten = torch.zeros_like(is_wrong)
    unwritten[rows] = is_wrong[rows]
    if bool(unwritten.any()):
        yield f"{UNWRITTEN} some rows of the output", unwritten[:, None]


def _scratch(case: Case, ran: Result, run: Run) -> Iterator[_Found]:
    """Yield that the output depends on scratch memory that no kernel has written, if so.

    Only ops of a source get scratch memory from the lab. On the emulated device, a trace finds such reads.
    """
    if not runs_triton(case.backend):
        return
    with scratch_full_of(0.0):
        again = run(case)
    if again.status == "rejected":
        return
    is_other = ~rows_agree(again.output.cpu(), ran.output.cpu())
    if bool(is_other.any()):
        yield "scratch memory that no kernel has written is read", is_other[:, None]


# Outputs that depend on memory outside of a kernel's tensors: the access is the finding.
#
# Under the interpreter such loads return 0, on a GPU anything. Statements about the values of the output
# then describe the interpreter, not the kernel.


def with_outside_reads(
    lab: Lab, case: Case, diagnosis: Diagnosis, ran: Result, run: Run
) -> Diagnosis:
    """Return the diagnosis with the rows that depend on memory outside of the tensors.

    If the lines of these accesses recur wherever a further output is wrong, the status is "described", and
    nothing is stated about values. A rule about addresses is: it is why an access is out of bounds.
    :func:`true_of_outside` judges it. ``lab`` has its tensors on the CPU; ``run`` runs the kernels.
    """
    rows = outside_rows(case, ran, run) if diagnosis.wrong_rows and ran.outside else ()
    if not rows:
        return diagnosis
    diagnosis = dataclasses.replace(
        diagnosis, outside_rows=rows, outside=ran.outside, wraps=ran.wraps
    )
    places = tuple(fact for fact in diagnosis.pattern.facts if fact.kind in PLACES)
    bare = dataclasses.replace(
        diagnosis,
        status="unexplained",
        cause=None,
        explanations=[],
        pattern=dataclasses.replace(diagnosis.pattern, facts=places),
    )
    found = with_bad_lines(lab, case, bare, run)
    if not found.bad_lines:
        return diagnosis
    rule = find_rule(lab, case, lambda one: run(one).output.cpu())
    is_address = rule is not None and rule.candidate.defect.family == FAMILY
    return dataclasses.replace(found, rule=rule if is_address else None)


def outside_rows(case: Case, ran: Result, run: Run) -> tuple[int, ...]:
    """Return the rows that change with what loads outside of all tensors return.

    Only the interpreter knows them.
    """
    if case.backend == "rocm":
        return ()
    try:
        with other_outside():
            again = run(case)
    except AttnLabError:
        return ()
    if again.status == "rejected":
        return ()
    is_equal = rows_agree(again.output.cpu(), ran.output.cpu())
    return tuple(torch.nonzero(~is_equal).flatten().tolist())


_MOST_ANNOUNCED = 320  # characters of what is announced
# Processor time of a further run of a kernel, at least, and in units of that of the first run.
_LEAST_RERUN_S, _RERUN_SLACK = 20.0, 20.0


def diagnose(
    case: Case,
    output: torch.Tensor | None = None,
    *,
    lab: Lab | None = None,
    rerun: Rerun | None = None,
    defects: Iterable[Defect] = DEFECTS.values(),
    propose: bool = True,
    limit: Limit | None = FULL,
) -> Diagnosis:
    """Diagnose an output of the Case.

    - ``output``: [num_tokens, num_heads, head_size] of any backend; None runs the Case in the lab.
    - ``rerun``: runs a changed Case on the backend that produced ``output``. It finds unwritten rows and
      rows that read unwritten slots. It is the lab if ``output`` is None; otherwise None reruns nothing.
    - ``defects``: the candidates.
    - ``propose``: if the output is ambiguous, search for a Case that distinguishes the first two
      explanations.
    - ``limit``: of the search for the source lines of a fault, if ``output`` is None; None does not search.

    Of a cache write, the output is the cache, [num_slots, num_kv_heads, 2 × head_size], and no candidates
    are compared. Raises InvalidCall if ``output`` has another shape or dtype than the Case's output. If the
    kernel raises for the Case, the status is "rejected".
    """
    began = time.perf_counter()
    lab = lab or Lab()
    if case.spec.writes_cache:
        return _of_write(case, output, lab, limit)
    defects = (*defects, *argument_defects(case))
    ran, kernel = None, None if rerun is None else Kernel(run=repeated(rerun))
    started, rerun_s = time.process_time(), math.inf
    if output is None:
        ran = lab.run(case)
        rerun_s = max(_LEAST_RERUN_S, _RERUN_SLACK * (time.process_time() - started))
        if ran.status == "rejected":
            return _rejected(lab, case, str(ran.error))
        output, kernel = ran.output, kernel or kernel_of(lab, case)
    flags = lab.backend(case).flags
    own, output, lab = lab, output.cpu(), _cpu_lab(lab, case)
    examination = examine(lab, case, output, defects)
    diagnosis = examination.diagnosis
    diagnose_in = partial(diagnose, lab=own, defects=defects, propose=propose, limit=limit)
    plain = _without_argument(case, diagnosis, None if ran is None else diagnose_in)
    if plain is not None:
        return plain
    with (
        controlled() as control,
        limiting_reruns(rerun_s),
        keeping(own.backend(case).fixed_fields(case.op)),
        announcing(own) as announce,
    ):
        announce(_measured(diagnosis))
        if kernel is not None:
            kernel.check_repeats(control, case, output, diagnosis)
        if ran is not None:
            diagnosis = with_outside_reads(lab, case, diagnosis, ran, own.run)
        outside_rows = diagnosis.outside_rows
        if kernel is not None and diagnosis.is_wrong and not diagnosis.bad_lines:
            diagnosis = with_reruns(lab, case, output, examination, kernel, defects)
        if ran is not None:
            diagnosis = dataclasses.replace(diagnosis, outside_rows=outside_rows)
            diagnosis = _with_runs(lab, own, case, ran, diagnosis, limit, announce)
        diagnosis = with_facts(diagnosis, examination.evidence.locations.wrong_rows.cpu())
    diagnosis = if_stable(diagnosis, examination.diagnosis, control)
    distinction = _distinguish(case, examination.problem, diagnosis, flags) if propose else None
    return dataclasses.replace(
        diagnosis,
        tolerance=case.tolerance,
        distinction=distinction,
        seconds=time.perf_counter() - began,
    )


def _of_write(case: Case, output: torch.Tensor | None, lab: Lab, limit: Limit | None) -> Diagnosis:
    """Return the diagnosis of a cache write; if it ran here, with an edit of the source that repairs it.

    With an op argument, the rules of slots do not apply, and only an edit is looked for.
    """
    began, ran = time.perf_counter(), None
    if output is None:
        ran = lab.run(case)
        if ran.status == "rejected":
            return _rejected(lab, case, str(ran.error))
        output = ran.output
    if case.op_argument == NONE:
        diagnosis = diagnose_write(lab.call(case), Target.of(case), output=output)
    else:
        wrong = () if ran is None else ran.places()
        status = "unexplained" if wrong else "nothing wrong"
        diagnosis = Diagnosis(status=status, wrong_rows=len(wrong))
    if ran is not None:
        diagnosis = with_run_faults(diagnosis, ran.wraps, ran.outside)
        diagnosis = _with_location(lab, case, diagnosis, limit)
    return dataclasses.replace(diagnosis, seconds=time.perf_counter() - began)


def _measured(diagnosis: Diagnosis) -> str:
    """Return what was measured of a wrong output, or "": no name, which further cases may withdraw."""
    found = [*diagnosis.place_sentences()[:1], *diagnosis.pattern.sentences()]
    return "; ".join(found) if diagnosis.is_wrong else ""


def _confirmed(diagnosis: Diagnosis) -> str:
    """Return the conclusion, if further cases have confirmed one, else what was measured."""
    is_known = diagnosis.status in ("explained", "described")
    return diagnosis.conclusion if is_known else _measured(diagnosis)


@contextlib.contextmanager
def announcing(lab: Lab) -> Iterator[Callable[[str], None]]:
    """Yield a function that puts what is known so far in a line above each step that the lab announces."""
    outer = lab.on_step

    def announce(known: str) -> None:
        if outer is not None and known:
            text = textwrap.shorten(f"so far: {known}", _MOST_ANNOUNCED, placeholder=" …")
            lab.on_step = lambda step=None, *rest, **named: outer(f"{text}\n{step}", *rest, **named)
            lab.on_step("further runs")

    try:
        yield announce
    finally:
        lab.on_step = outer


def _with_runs(
    lab: Lab,
    own: Lab,
    case: Case,
    ran: Result,
    diagnosis: Diagnosis,
    limit: Limit | None,
    announce: Callable[[str], None],
) -> Diagnosis:
    """Return the diagnosis with what the run and further runs show; ``own`` runs the kernels."""
    diagnosis = true_of_outside(lab, case, diagnosis, lambda one: own.run(one).output.cpu())
    diagnosis = with_run_faults(diagnosis, ran.wraps, ran.outside)
    announce(_confirmed(diagnosis))
    diagnosis = with_precision(lab, case, diagnosis, kernel_of(own, case))
    diagnosis = with_accesses(lab, case, diagnosis, own.run, processes_of(own, case))
    diagnosis = with_bad_lines(lab, case, diagnosis, own.run)
    diagnosis = _with_side_outputs(lab, own, case, ran, diagnosis)
    announce(_confirmed(diagnosis))
    diagnosis = _with_location(own, case, diagnosis, limit)
    return with_traits(lab, case, diagnosis, kernel_of(own, case))


def if_stable(diagnosis: Diagnosis, first: Diagnosis, control: Control) -> Diagnosis:
    """Return a diagnosis by runs, unless equal runs differ; then what ``first`` says of one output.

    Defects may explain that output by chance, and rows that equal the buffer or depend on slots were compared
    with runs that differ anyway.
    """
    if control.found is None:
        return diagnosis
    return dataclasses.replace(
        first,
        status="described",
        instability=control.found,
        cause=None,
        explanations=[],
        unwritten=[],
        unwritten_by="",
    )


def _without_argument(
    case: Case, found: Diagnosis, diagnose_in: Callable[[Case], Diagnosis] | None
) -> Diagnosis | None:
    """Return the diagnosis of a Case with the op argument that its own includes, or without it, with a note,
    if that is wrong, too."""
    if case.op_argument == NONE or not found.is_wrong or diagnose_in is None:
        return None
    for name in dict.fromkeys((case.plainer_argument, NONE)):
        with contextlib.suppress(AttnLabError):  # a release may lack the included one
            plain = diagnose_in(case.replace(op_argument=name))
            if plain.is_wrong:
                what = f"what op_argument {case.op_argument} adds: this is about the output "
                what += (
                    "without it, wrong, too" if name == NONE else f"with {name} alone, wrong, too"
                )
                return dataclasses.replace(plain, unknown=[*plain.unknown, what])
    return None


def diagnose_call(
    call: KernelCall,
    target: Target,
    kernels: Iterable[str],
    *,
    output: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    defects: Iterable[Defect] = DEFECTS.values(),
    unknown: Iterable[str] = (),
) -> Diagnosis:
    """Diagnose the output of a call without a Case, such as a captured one.

    The context is assumed to be correct in the cache, and new tokens to be the arguments ``key`` and
    ``value`` if the call has them. ``output`` defaults to the call's own; ``before`` is the output buffer
    before the call, by default the call's own. ``unknown``: what cannot be concluded, for the diagnosis.
    Raises InvalidCall if ``output`` has another shape or dtype than the call's.
    """
    began = time.perf_counter()
    call = call.cpu()
    before = call.before if before is None else before
    output = call.buffer if output is None else output.cpu()
    if call.output is None:
        call = dataclasses.replace(call, output=output)
    check_output(output, call.buffer)
    kernels = tuple(kernels)
    problem = Problem.of_call(call, target, kernels)
    numbers = output_numbers(call, output)
    locations = locate(problem, numbers)
    if before is not None and not _holds_results(before, output, locations):
        problem = dataclasses.replace(problem, before=output_numbers(call, before))
    violations = Violations() if call.is_foreign else find_violations(call, target, kernels)
    evidence = collect_evidence(problem, numbers, locations, violations)
    diagnosis = without_guess(conclude(evidence, defects))
    seconds = time.perf_counter() - began
    return dataclasses.replace(diagnosis, unknown=list(unknown), seconds=seconds)


def _holds_results(before: torch.Tensor, output: torch.Tensor, locations: ErrorLocations) -> bool:
    """Answer whether a buffer had results of the call before it: a right row, or the whole output.

    An earlier call with the same inputs wrote them, in this buffer or in memory that it recycles, or all is
    NaN: unwritten rows cannot be recognised by such a buffer.
    """
    is_right = ~locations.is_wrong.any(1) & (output.float() != 0).flatten(1).any(1)
    if bool((rows_equal(before, output) & is_right).any()):
        return True
    if output.element_size() == 1:
        return torch.equal(before.view(torch.uint8), output.view(torch.uint8))
    return bool(same_numbers(before, output).all())


def _with_location(lab: Lab, case: Case, diagnosis: Diagnosis, limit: Limit | None) -> Diagnosis:
    """Return the diagnosis with the source lines that may hold the fault, and an edit that repairs it.

    If nothing describes the fault, the features that it needs are stated. Models have no source, and a wrong
    call is no fault of the kernel.
    """
    is_callers = any(violation.effect != "harmless" for violation in diagnosis.violations)
    is_wrong = diagnosis.wrong_rows or diagnosis.side_errors
    if limit is None or not is_wrong or is_callers or case.backend == "model":
        return diagnosis
    if lab.on_step is not None:
        lab.on_step("trial edits of the source")
    try:
        location = locate_lines(lab, case, diagnosis.xray, limit)
    except AttnLabError as error:
        location = KernelLocation(why_none=f"the kernels cannot be traced: {error}")
    diagnosis = dataclasses.replace(diagnosis, location=location)
    return with_features(lab, case, with_repair(lab, case, diagnosis, location.repairs))


def _distinguish(
    case: Case, problem: Problem, diagnosis: Diagnosis, flags: tuple[str, ...]
) -> Distinction | None:
    """Search for a Case that distinguishes the first two of several explanations."""
    if len(diagnosis.explanations) < 2 or diagnosis.cause is not None:
        return None
    first, second = diagnosis.explanations[:2]
    rows = _rows_of(problem, first), _rows_of(problem, second)
    found = find_distinction(case, first.defect, second.defect, rows=rows)
    return dataclasses.replace(found, flags=flags)


def _rows_of(problem: Problem, candidate: Candidate) -> str:
    """Return a candidate's scope as "all", "decode" or "prefill", which other Cases have too."""
    if candidate.scope is None or candidate.scope.rows == "all":
        return "all"
    is_decode = {problem.is_decode(seq) for seq in candidate.scope.sequences}
    if len(is_decode) > 1:
        return "all"
    return "decode" if is_decode == {True} else "prefill"


def _with_side_outputs(
    lab: Lab, own: Lab, case: Case, ran: Result, diagnosis: Diagnosis
) -> Diagnosis:
    """Return the diagnosis with wrong log-sum-exps and rows of padding.

    If the output is right, they are what is described. ``lab`` is on the CPU, ``own`` runs the kernels.
    """
    claims = side_claims(lab, case, ran)
    if not claims:
        return diagnosis
    if diagnosis.is_wrong:
        return dataclasses.replace(diagnosis, side_errors=claims)
    confirmed = confirmed_side_claims(lab, case, claims, own.run)
    status = "described" if confirmed else "unexplained"
    return dataclasses.replace(
        diagnosis, status=status, side_errors=confirmed or claims, looked_at=(0, len(ran.output))
    )


def _cpu_lab(lab: Lab, case: Case) -> Lab:
    """Return a Lab with its tensors on the CPU, where candidates are computed."""
    if lab.where(case) == "cpu":
        return lab
    native = lab.is_native_run(case)
    return dataclasses.replace(lab, device="cpu", is_native=native, on_step=None)


def _rejected(lab: Lab, case: Case, rejection: str) -> Diagnosis:
    """Return the diagnosis of a Case that its kernel rejects, with the violations that explain it."""
    violations = lab.violations(case, lab.call(case))
    return Diagnosis(status="rejected", rejection=rejection, violations=violations)
