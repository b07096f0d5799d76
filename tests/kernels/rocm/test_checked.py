"""The checked device reports silent errors of a GPU with their source line."""

import dataclasses
import re

import pytest
import torch
from helpers.cases import call_of, hostile, same_bits
from helpers.sources import sdist

from attnlab.case.case import Case
from attnlab.case.errors import KernelFailed
from attnlab.contracts.contract import Target
from attnlab.contracts.slot_states import STATES, SlotState, slot_states
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.rocm.device import DeviceOptions
from attnlab.kernels.rocm.findings import Findings
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.result import report
from attnlab.tensors.call import KernelCall

CHECKED = DeviceOptions(checked=True)


def watched(case: Case, source: Source, **changes: object) -> tuple[KernelCall, Findings]:
    """Return the call and the findings of a run on the checked device with some arguments changed."""
    call, _ = call_of(case)
    call = dataclasses.replace(call, **changes)
    return call, rocm_source.run(call, Target.of(case), source, CHECKED)


@pytest.mark.parametrize("group", [1, 6])
def test_a_sound_call_is_clean_and_gives_the_same_bits(rocm: Source, group: int) -> None:
    """A sound call has no findings and the same bits as on the plain device."""
    case = hostile(num_heads=2 * group, num_queries_per_kv=group, release=rocm.rules, sm_scale=0.1)
    call, findings = watched(case, rocm)
    plain, cache = call_of(case)
    rocm_source.run(plain, Target.of(case), rocm)
    assert same_bits(call.output, plain.output)
    assert [str(one) for one in findings.unwritten] == []
    memory = report(findings, cache.provenance, call.seq_lens)
    seqs = [s for s, query_len in enumerate(case.lengths.query_lens) if query_len == 1]
    found = {(one.tensor, one.seq) for one in memory.slots}
    assert found == {(tensor, seq) for tensor in ("key_cache", "value_cache") for seq in seqs}
    for one in memory.slots:
        seq_len = case.lengths.seq_lens[one.seq]
        expected = {SlotState.OWN: seq_len, SlotState.UNWRITTEN_TAIL: -seq_len % case.block_size}
        assert {state: n for state, n in one.counts.items() if n or state in expected} == expected


def test_slot_states(rocm: Source) -> None:
    """A missing token, another sequence's block, an extra token and a spare block each have their slot
    state."""
    case = hostile(
        query_lens=(1, 1),
        ctx_lens=(40, 40),
        fill="context_only",
        num_blocks=12,
        head_size=128,
        release=rocm.rules,
    )
    call, cache = call_of(case)
    spare = (set(range(12)) - set(cache.provenance.block_table.flatten().tolist())).pop()
    table = call.block_table.clone()
    table[0, 0], table[0, 1] = table[1, 0], spare
    call, findings = watched(case, rocm, block_table=table)
    memory = report(findings, cache.provenance, call.seq_lens)
    counts = {(one.tensor, one.seq): one.counts for one in memory.slots}
    for tensor in ("key_cache", "value_cache"):
        read = [{state: n for state, n in counts[tensor, seq].items() if n} for seq in (0, 1)]
        own = {SlotState.UNWRITTEN: 1, SlotState.UNWRITTEN_TAIL: 7}
        foreign = {SlotState.OTHER_SEQUENCE: 16, SlotState.NEVER_MAPPED: 16}
        assert read == [{SlotState.OWN: 8, **own, **foreign}, {SlotState.OWN: 40, **own}]
    assert memory.total(SlotState.NEVER_MAPPED) == 32
    states = slot_states(cache.provenance, 0, seq_len=33)
    assert STATES[int(states[cache.provenance.slot(0, 35)])] is SlotState.OWN_FUTURE


def test_max_seq_len_one_partition_short_leaves_the_scratch(rocm: Source) -> None:
    """The merge of the last head of the last sequence reads past the scratch: an error with tensor, index,
    block, thread and line. For an earlier head it reads the next head's partition."""
    case = hostile(
        query_lens=(1,),
        ctx_lens=(299,),
        max_seq_len=256,
        head_size=128,
        release=rocm.rules,
        empty_slots="zeros",
    )
    call, _ = call_of(case)
    before = call.output.clone()
    with pytest.raises(KernelFailed) as caught:
        rocm_source.run(call, Target.of(case), rocm, CHECKED)
    assert re.fullmatch(
        r"out of bounds: read of \d+ bytes, nearest is (max_logits|exp_sums|tmp_out) at element "
        r"(6 of 6|768 of 768), paged_attention_ll4mi_reduce_kernel, block \(5, 0, 0\), thread \d+, "
        r"attention\w*\.cuh?:\d+",
        str(caught.value),
    )
    rocm_source.run(call, Target.of(case), rocm)  # a GPU and the plain device report nothing
    assert not same_bits(call.output, before)
    two = case.replace(
        query_lens=(1, 3), ctx_lens=(299, 3), num_blocks=40
    )  # now no head is the last in the scratch
    _, findings = watched(two, rocm)
    merged = findings.reads["paged_attention_ll4mi_reduce_kernel", "exp_sums"]
    assert torch.nonzero(merged[0]).tolist() == [[0, 0, 0], [0, 1, 0]]
    unwritten = [one for one in findings.unwritten if one.tensor == "exp_sums"]
    assert [(one.index, one.block[0]) for one in unwritten] == [((1, 0, 0), 5)]
    assert re.search(
        r"exp_sums\[1, 0, 0\] is read before it is written, .*\.cuh?:\d+$", str(unwritten[0])
    )


@pytest.mark.parametrize("block", [10**6, -5])
def test_a_block_that_is_not_there_is_an_error(rocm: Source, block: int) -> None:
    """The checked device reports tensor, element and line. The plain device catches the crash, and the next
    call runs normally."""
    case = hostile(query_lens=(1, 1), ctx_lens=(40, 40), release=rocm.rules, empty_slots="zeros")
    call, _ = call_of(case)
    clean = call.output.clone()
    rocm_source.run(dataclasses.replace(call, output=clean), Target.of(case), rocm)
    table = call.block_table.clone()
    table[0, 1] = block
    with pytest.raises(
        KernelFailed, match=r"read of 16 bytes, nearest is \w+ at element -?\d+ of \d+"
    ):
        watched(case, rocm, block_table=table)
    table[0, 1] = 2**31 - 1
    with pytest.raises(KernelFailed, match=r"touched memory that is not there \(signal \d+"):
        rocm_source.run(dataclasses.replace(call, block_table=table), Target.of(case), rocm)
    rocm_source.run(call, Target.of(case), rocm)
    assert same_bits(call.output, clean)


def test_a_row_outside_the_output_is_not_written(rocm: Source) -> None:
    """A query_start_loc outside the output is rejected before it can crash the process; the checked device
    reports the access."""
    case = hostile(query_lens=(1, 1), ctx_lens=(40, 40), release=rocm.rules, empty_slots="zeros")
    call, _ = call_of(case)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32) + 7
    far = dataclasses.replace(call, query_start_loc=starts)
    with pytest.raises(KernelFailed, match=r"query_start_loc\[0\] reads as 7: .* has 2 rows"):
        rocm_source.run(far, Target.of(case), rocm)
    with pytest.raises(KernelFailed, match="out of bounds: read of 16 bytes, nearest is query"):
        rocm_source.run(far, Target.of(case), rocm, CHECKED)


def test_0_11_2_reads_behind_the_query_where_a_head_has_64_elements(rocm: Source) -> None:
    """Found by this device: the 4×4 kernel reads 128 elements per query head regardless of head_size. The
    extra elements are not used; 0.33.0 stays inside the head."""
    case = hostile(query_lens=(1,), ctx_lens=(20,), release=rocm.rules, empty_slots="zeros")
    assert case.head_size == 64
    if rocm.rules == "0.33.0":
        watched(case, rocm)
        return
    with pytest.raises(
        KernelFailed, match=r"nearest is query at element 384 of 384, .*attention.cu:\d+"
    ):
        watched(case, rocm)


@pytest.mark.releases
def test_a_lab_reports_what_a_watched_kernel_read() -> None:
    """The newest token is missing: the Result has the slot's state, as text and as JSON."""
    source = sdist("0.33.0")
    case = hostile(
        backend="rocm", trace_reads=True, fill="context_only", query_lens=(1,), ctx_lens=(20,)
    )
    result = Lab(source=source.path).run(case)
    assert result.memory.total("own unwritten") == 2
    memory = result.to_dict(3)["memory"]
    assert memory["slots"][0]["counts"]["own unwritten"] == 1
    assert memory["unwritten"] == []
