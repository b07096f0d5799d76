"""Compare what the kernels of a Case read and write with what they must, here and in further cases."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.fields import runs_triton
from attnlab.contracts.contract import Target, contracts_of
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import SlotState, contract_reads
from attnlab.diagnosis.claims import UNWRITTEN, AccessClaim, AccessFacts, recorded_facts
from attnlab.diagnosis.decision import examine
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import PLACES, Pattern
from attnlab.diagnosis.reruns import few_sequences, find_unwritten, further_cases
from attnlab.diagnosis.rules.addresses import FAMILY
from attnlab.diagnosis.rules.search import find_rule
from attnlab.kernels.binding import scratch_full_of
from attnlab.kernels.control import rows_agree
from attnlab.kernels.triton.run_log import other_outside
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result

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


def lines_of(texts: Iterable[str]) -> set[str]:
    """Return the lines, "file:line", of texts of bad accesses."""
    return {text.split()[0] for text in texts}


Run = Callable[[Case], Result]
_EVERYWHERE = torch.tensor([[True]])
_FOREIGN = (SlotState.OTHER_SEQUENCE, SlotState.OTHER_POSITION, SlotState.NEVER_MAPPED)


def with_accesses(lab: Lab, case: Case, diagnosis: Diagnosis, run: Run) -> Diagnosis:
    """Return the diagnosis with wrong accesses that further cases confirm, if nothing else explains it.

    They say why an output is wrong, and a pattern only where. ``lab`` has its tensors on the CPU; ``run``
    runs the kernels.
    """
    is_open = diagnosis.status == "unexplained" or diagnosis.claim is not None
    if not is_open or not diagnosis.wrong_rows:
        return diagnosis
    first = access_facts(lab, case, run)
    if not first.places:
        return diagnosis
    found = [first]
    for other in (*further_cases(case), *few_sequences(case, fewer_kernels=True)):
        found.append(access_facts(lab, other, run))
        if bool(found[-1].is_wrong.any()) and claim_of_facts(found) is None:
            return diagnosis
    claim = claim_of_facts(found)
    if claim is None:
        return diagnosis
    return dataclasses.replace(diagnosis, status="described", claim=None, accesses=claim)


def claim_of_facts(found: Sequence[AccessFacts]) -> AccessClaim | None:
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
    alone = tuple(name for name in names if all(one.covers(name) for one in wrong))
    if alone:
        return AccessClaim(facts=alone, cases=cases)
    for pair in combinations(names, 2):
        if all(one.covers(*pair) for one in wrong):
            return AccessClaim(either=pair, cases=cases)
    some = tuple(name for name in names if all(name in one.places for one in wrong))
    return AccessClaim(some=some, cases=cases) if some else None


def access_facts(lab: Lab, case: Case, run: Run) -> AccessFacts:
    """Return statements about the accesses of a Case; none if the Case cannot run."""
    none = AccessFacts(places={}, is_wrong=torch.zeros(0, 0, dtype=torch.bool))
    try:
        traced = case.replace(trace_reads=True, output_init="recycled")
        ran = run(traced)
        if ran.status == "rejected":
            return none
        wrong = examine(lab, traced, ran.output.cpu(), (), Pattern()).evidence.locations.is_wrong
        found = (
            *_reads(lab, traced, ran),
            *_writes(traced, ran, wrong.any(1), run),
            *_scratch(traced, ran, run),
            *recorded_facts(traced, wrong, run),
        )
    except AttnLabError:
        return none
    places: dict[str, torch.Tensor] = {}
    for name, cells in found:
        whole = cells.expand_as(wrong)
        places[name] = places[name] | whole if name in places else whole
    return AccessFacts(places=places, is_wrong=wrong)


_Found = tuple[
    str, torch.Tensor
]  # a statement, and its places: broadcast to [num_tokens, num_heads]


def _rows_of(case: Case, seq: int) -> torch.Tensor:
    """Return which rows belong to a sequence, [num_tokens, 1] bool."""
    rows = torch.arange(case.lengths.num_tokens)[:, None]
    start = case.lengths.token_start_loc[seq]
    return (rows >= start) & (rows < start + case.lengths.query_lens[seq])


def _reads(lab: Lab, case: Case, ran: Result) -> Iterator[_Found]:
    """Yield what is wrong with the slots that are read for the sequences.

    On the emulated ROCm device, sequences with several new tokens are computed elsewhere and not traced.
    """
    if ran.memory is None:
        return
    read: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for entry in ran.memory.slots:
        kind = "keys" if entry.tensor.lower().startswith("k") else "values"
        # a freed block may belong to another sequence; a kernel may read it and count none of its keys
        if case.freed == "kept" and any(entry.counts[state] for state in _FOREIGN):
            what = f"cached {kind} that do not belong to the sequence are read"
            yield what, _rows_of(case, entry.seq)
        places = {place for found in entry.slots.values() for place in found}
        read.setdefault((kind, entry.seq), set()).update(places)
    traced = ["keys", *([] if case.interleave_v else ["values"])]
    for kind in traced if read else ():
        for seq, slots in _needed(lab, case).items():
            is_traced = case.backend == "vllm" or any(of == seq for _, of in read)
            if is_traced and not slots <= read.get((kind, seq), set()):
                yield f"cached {kind} that a sequence must read are never read", _rows_of(case, seq)
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
    :func:`without_unfounded_rule` judges it. ``lab`` has its tensors on the CPU; ``run`` runs the kernels.
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


def without_unfounded_rule(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis without a rule about addresses if every wrong row depends on memory outside.

    The interpreter loads zeros there from every address, so that other factors give the same output.
    """
    rule = diagnosis.rule
    if rule is None or rule.candidate.defect.family != FAMILY:
        return diagnosis
    if len(diagnosis.outside_rows) < diagnosis.wrong_rows:
        return diagnosis
    status = diagnosis.status if diagnosis.bad_lines else "unexplained"
    return dataclasses.replace(diagnosis, rule=None, status=status)


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
