"""Compare what the kernels of a Case read and write with what they must, here and in further cases."""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.contracts.dispatch import decide
from attnlab.contracts.kernel_contracts import contracts_of
from attnlab.contracts.slot_states import SlotState, contract_reads
from attnlab.contracts.target import Target
from attnlab.diagnosis.access_claim import AccessClaim
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.examination import examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import rows_equal
from attnlab.diagnosis.second_case import further_cases
from attnlab.diagnosis.store_facts import is_conflict, store_facts
from attnlab.kernels.vllm.scratch import scratch_full_of
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.tensors.case_call import make_output

Run = Callable[[Case], Result]
_FOREIGN = (SlotState.OTHER_SEQUENCE, SlotState.OTHER_POSITION, SlotState.NEVER_MAPPED)


def with_accesses(lab: Lab, case: Case, diagnosis: Diagnosis, run: Run) -> Diagnosis:
    """Return the diagnosis with wrong accesses that further cases confirm, if nothing else explains it.

    ``lab`` has its tensors on the CPU; ``run`` runs the kernels.
    """
    if diagnosis.status != "unexplained" or not diagnosis.wrong_rows:
        return diagnosis
    left, cases = access_facts(lab, case, run)[0], 0
    for other in further_cases(case):
        if not left:
            return diagnosis
        facts, is_wrong = access_facts(lab, other, run)
        left = left & facts if is_wrong else refuted_by_right(left, facts)
        cases += is_wrong
    if not left or not cases:
        return diagnosis
    claim = AccessClaim(facts=tuple(sorted(left)), cases=cases)
    return dataclasses.replace(diagnosis, status="described", accesses=claim)


def refuted_by_right(left: frozenset[str], facts: frozenset[str]) -> frozenset[str]:
    """Return what is left of statements after a case with a right output, which has its own ``facts``."""
    return frozenset(fact for fact in left if fact not in facts or is_conflict(fact))


def access_facts(lab: Lab, case: Case, run: Run) -> tuple[frozenset[str], bool]:
    """Return statements about the accesses of a Case, and whether its output is wrong.

    There are none if the Case cannot run.
    """
    try:
        traced = case.replace(trace_reads=True, output_init="recycled")
        ran = run(traced)
        if ran.status == "rejected":
            return frozenset(), False
        wrong = examine(lab, traced, ran.output.cpu(), (), Pattern()).evidence.locations.is_wrong
        facts = {
            *_reads(lab, traced, ran),
            *_writes(traced, ran),
            *_scratch(traced, ran, run),
            *store_facts(traced, wrong, run),
        }
    except AttnLabError:
        return frozenset(), False
    return frozenset(facts), bool(wrong.any())


def _reads(lab: Lab, case: Case, ran: Result) -> Iterator[str]:
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
            yield f"cached {kind} that do not belong to the sequence are read"
        places = {place for found in entry.slots.values() for place in found}
        read.setdefault((kind, entry.seq), set()).update(places)
    traced = ["keys", *([] if case.interleave_v else ["values"])]
    for kind in traced if read else ():
        for seq, slots in _needed(lab, case).items():
            is_traced = case.backend == "vllm" or any(of == seq for _, of in read)
            if is_traced and not slots <= read.get((kind, seq), set()):
                yield f"cached {kind} that a sequence must read are never read"
    for unwritten in ran.memory.unwritten:
        yield f"{unwritten.tensor} is read before it is written, {unwritten.kernel}, {unwritten.line}"


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


def _writes(case: Case, ran: Result) -> Iterator[str]:
    """Yield that some rows keep the previous contents of the output buffer, if so."""
    output, heads, rows = ran.output.cpu(), case.query_heads, case.query_rows
    ran_heads = slice(None) if heads is None else slice(heads.start, heads.stop)
    unwritten = rows_equal(output[:, ran_heads], make_output(case)[:, ran_heads])
    at = torch.nonzero(unwritten).flatten().tolist()
    if any(rows is None or row in rows for row in at):
        yield "no kernel writes some rows of the output"


def _scratch(case: Case, ran: Result, run: Run) -> Iterator[str]:
    """Yield that the output depends on scratch memory that no kernel has written, if so.

    Only ops of vLLM get scratch memory from the lab. On the emulated device, a trace finds such reads.
    """
    if case.backend != "vllm":
        return
    with scratch_full_of(0.0):
        again = run(case)
    if again.status == "rejected":
        return
    if not bool(rows_equal(again.output.cpu(), ran.output.cpu()).all()):
        yield "scratch memory that no kernel has written is read"
