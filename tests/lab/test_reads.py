"""Traced slot reads: their states, program by program; every planted stray read is reported."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.plugins import checked
from helpers.sources import needs_triton
from helpers.triton_example import CASE, EXAMPLE, TRITON

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.ops import OPS, TRITON_OPS
from attnlab.checker.case_check import check_case, is_callers_fault
from attnlab.checker.case_run import read_counts, run_case, slots_by_state
from attnlab.checker.hostile import hostile_cases
from attnlab.contracts.contract import Target
from attnlab.contracts.slot_states import SlotState
from attnlab.kernels import find_backend
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.run_log import RunLog, Trace, Watched
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.result import traced
from attnlab.tensors.cache import NOBODY, freed_blocks
from attnlab.tensors.visibility import Visibility

pytestmark = needs_triton

LOADS = "k = tl.load(key + at, mask=both, other=0.0)"
STRAYS = {  # (old, new, state of the slots, fault of the output or None, changes of the Case)
    "own": ("", "", None, None, {}),
    "a neighbour's block, unused": (
        LOADS,
        "tl.load(key + tl.load(table + table_stride).to(tl.int64) * BLOCK * KV * DIM); " + LOADS,
        SlotState.OTHER_SEQUENCE,
        None,
        {},
    ),
    "a neighbour's block, used": (
        "tl.load(seq + row) * table_stride",
        "0 * tl.load(seq + row)",
        SlotState.OTHER_SEQUENCE,
        "wrong_output",
        {},
    ),
    "a block in no row of the block table": (
        LOADS,
        "tl.load(key + 11 * BLOCK * KV * DIM); " + LOADS,
        SlotState.NEVER_MAPPED,
        None,
        {"block_table": ((0, 1, 2), (3, 4, 5), (6, 7, 8))},
    ),
    "one slot past, used": (
        "both = seen",
        "both = (pos <= end + 1)",
        SlotState.UNWRITTEN_TAIL,
        "reads_unwritten_slots",
        {"query_lens": (1,), "ctx_lens": (20,)},
    ),
    "the next row's key, unused": (
        "both = seen",
        "both = (pos <= end + 1)",
        SlotState.OWN_FUTURE,
        None,
        {"query_lens": (12,), "ctx_lens": (4,)},
    ),
    "the window ignored by the loads": (
        "both = seen",
        "both = (pos <= end)",
        SlotState.OUTSIDE_WINDOW,
        None,
        {"sliding_window": 5},
    ),
}


def planted(folder: Path, old: str, new: str):
    """Return the example with a change, as a plugin."""
    assert old in TRITON
    file = folder / "kernel.py"
    file.write_text(TRITON.replace(old, new) if old else TRITON)
    return find_backend(f"{file}:my_attention")


@pytest.mark.parametrize(("old", "new", "state", "fault", "changes"), STRAYS.values(), ids=STRAYS)
def test_a_stray_read_is_reported(tmp_path: Path, old, new, state, fault, changes) -> None:
    """With its state, whether the output is wrong or not; a correct kernel has no report."""
    found = check_case(Lab(), planted(tmp_path, old, new), CASE.replace(**changes))
    assert {one.kind for one in found if one.is_fault} == ({fault} if fault else set())
    assert {
        one.diagnosis for one in found if one.kind.startswith("reads_") and not one.is_fault
    } == ({state} if state else set())


def test_slots_are_exactly_those_of_the_rows(tmp_path: Path) -> None:
    """A correct kernel reads every key that a row may see, and no other."""
    lab, backend = Lab(), planted(tmp_path, "", "")
    case = CASE.replace(sliding_window=9)
    memory = run_case(lab, backend, case, trace_reads=True).memory
    assert memory is not None
    provenance = lab.cache(case).provenance
    for seq, (query_len, ctx_len) in enumerate(zip(case.query_lens, case.ctx_lens, strict=True)):
        positions = range(max(0, ctx_len - 8), ctx_len + query_len)
        wanted = {provenance.slot(seq, position) for position in positions}
        for one in memory.slots:
            if one.seq == seq:
                assert set(one.slots[SlotState.OWN]) == wanted, one
                assert sum(one.counts.values()) == len(wanted)
    assert {(one.tensor, one.seq) for one in memory.slots} == {
        (name, seq) for name in ("key", "value") for seq in range(3)
    }


def test_what_vllm_reads(source: Source) -> None:
    """Every op reads the slots that its contract requires, and no slot of another sequence.

    0.11.2's decode kernel also reads the tail of the last block; 0.33.0's does not.
    """
    lab = Lab(source=source.path, device="cpu")
    copied = ("turboquant_decode", "xpu_mla_sparse")  # get the cache in another form
    for op in (op for op in TRITON_OPS if OPS[op].context and op not in copied):
        if source.rules not in OPS[op].releases:
            continue
        lens = {"query_lens": (1, 1), "ctx_lens": (20, 37)}
        if op != "decode_attention_fwd":
            lens = {"query_lens": (1, 5, 1), "ctx_lens": (20, 30, 37)}
        fields = {"op": op, "release": source.rules, "backend": "vllm", "trace_reads": True, **lens}
        case = CASE.replace(**fields, fill="context_only" if OPS[op].writes_cache else "all_rows")
        memory = lab.run(case).memory
        assert memory is not None
        own = {seq: 0 for seq in range(len(case.query_lens))}
        others = set()
        for (seq, state), slots in slots_by_state(memory).items():
            if state is SlotState.OWN:
                own[seq] = len(slots)
            else:
                others.add(state)
        tail = source.rules == "0.11.2" and op == "chunked_prefill_paged_decode"
        assert others == ({SlotState.UNWRITTEN_TAIL} if tail else set()), op
        if OPS[op].new_tokens_from == "cache":
            assert tuple(own.values()) == case.lengths.seq_lens
        elif op == "chunked_prefill_paged_decode":
            assert tuple(own.values()) == (21, 30, 38)
        elif op == "context_attention_fwd":
            assert tuple(own.values()) == case.ctx_lens
        else:
            assert set(own.values()) == {0}


def test_two_processes_report_the_same(source: Source, monkeypatch) -> None:
    """A launch whose programs are divided between two processes has the same reads."""
    case = CASE.replace(
        op="chunked_prefill_paged_decode", backend="vllm", trace_reads=True, release=source.rules
    )
    one = Lab(source=source.path, device="cpu").run(case).memory
    monkeypatch.setattr(interpreter, "_ALONE_S", 0.0)
    monkeypatch.setattr(interpreter, "cores", lambda: 2)
    assert Lab(source=source.path, device="cpu").run(case).memory == one
    assert one.slots


def test_without_trace_reads_nothing_is_recorded(source: Source) -> None:
    case = CASE.replace(backend="vllm", release=source.rules)
    assert Lab(source=source.path, device="cpu").run(case).memory is None


def test_reads_of_two_processes_are_united() -> None:
    """By tensor and rows."""
    one, two = RunLog(), RunLog()
    one.reads[("key", (0,))] = {1}
    two.reads.update({("key", (0,)): {2}, ("key", (1,)): {3}})
    one.take(two)
    assert one.reads == {("key", (0,)): {1, 2}, ("key", (1,)): {3}}


def test_rows_of_two_sequences_and_of_none() -> None:
    """A slot counts for the sequence with the most permissive state; without rows the reader is unknown."""
    provenance = Lab().cache(CASE).provenance
    flat = {pos: provenance.slot(0, pos)[0] * 16 + provenance.slot(0, pos)[1] for pos in (2, 3)}
    both = traced({("key", (0, 1)): {flat[2]}}, provenance, CASE.lengths, Visibility())
    assert [(one.seq, one.counts[SlotState.OWN]) for one in both.slots] == [(0, 1), (1, 0)]
    assert sum(sum(one.counts.values()) for one in both.slots) == 1
    none = traced({("key", ()): {flat[3]}}, provenance, CASE.lengths, Visibility())
    assert [(one.seq, one.counts[SlotState.UNKNOWN]) for one in none.slots] == [(NOBODY, 1)]
    assert read_counts(none)["unknown"] == 1


def test_strided_caches_and_masked_loads() -> None:
    """Key and value that alternate in one storage are distinguished; new keys are not rows."""
    call = Lab().call(CASE)
    blocks, heads, size, slots = call.value_cache.shape
    both = torch.zeros(blocks, 2, slots, heads, size)
    reads: dict = {}
    trace = Trace.of(Watched.of(call), {"k": both[:, 0], "v": both[:, 1], "new": call.key}, reads)
    address = both[3, 1, 5, 1, 7].data_ptr()
    trace.loaded(np.array([address, address + 64], dtype=np.uint64), np.array([True, False]))
    trace.loaded(np.uint64(call.key.data_ptr()), np.bool_(True))
    trace.end()
    assert reads == {("v", ()): {3 * 16 + 5}}


def test_trace_reads_is_refused_where_reads_are_not_recorded(source: Source, monkeypatch) -> None:
    """With the models, and on a GPU."""
    with pytest.raises(InvalidCase, match="trace_reads must be false with backend model"):
        CASE.replace(trace_reads=True)
    call = Lab().call(CASE)
    with pytest.raises(Unavailable, match="trace_reads must be false on a GPU"):
        vllm_ops.run(call, Target(), (), source, where="cuda", watch=True)


@pytest.mark.slow
def test_the_report_has_a_table_of_reads(tmp_path: Path) -> None:
    """For a Triton plugin, counts by state and what is allowed; for a torch plugin, why there are none."""
    report = checked(planted(tmp_path, "both = seen", "both = (pos <= end)"), cases=4)
    counts = report.to_dict()["reads"]["unified_attention"]
    assert counts["own"] > 200
    assert counts["outside_window"] > 50
    assert report.reads_allowed["unified_attention"] == ["own"]
    assert {one.kind for one in report.observations} == {"reads_outside_window"}
    text = EXAMPLE.with_name("my_attention.py")
    report = checked(find_backend(f"{text}:my_attention"), cases=1)
    assert report.reads == {}
    assert any(line.startswith("unified_attention: slot reads") for line in report.left_out)


def test_an_out_of_bounds_access_of_a_plugin_is_reported(tmp_path: Path) -> None:
    """Before the first element of a tensor."""
    old = "q = tl.load(place"
    backend = planted(tmp_path, old, "tl.load(out - 1); " + old)
    case = next(hostile_cases(backend, backend.ops[0], "sm_90", 1, 0))
    assert "out_of_bounds" in {one.kind for one in check_case(Lab(), backend, case)}


@pytest.mark.parametrize("freed", ["empty", "recycled"])
@pytest.mark.parametrize(
    "op", ["chunked_prefill_paged_decode", "context_attention_fwd", "unified_attention"]
)
def test_blocks_that_a_window_freed(source: Source, op: str, freed: str) -> None:
    """unified_attention of 0.33.0 ignores their contents; 0.11.2's does not, nor does the prefill kernel."""
    lens = {"query_lens": (3, 20, 2), "ctx_lens": (75, 50, 40)}
    fields = {"op": op, "backend": "vllm", "release": source.rules, "sliding_window": 16, **lens}
    case = CASE.replace(**fields, freed=freed, num_blocks=30, fill="all_rows")
    lab, backend = Lab(source=source.path, device="cpu"), find_backend("vllm", source.path, "cpu")
    assert not is_callers_fault(lab, case)
    found = {one.kind for one in check_case(lab, backend, case) if one.kind != "out_of_bounds"}
    ignores = op == "unified_attention" and source.rules == "0.33.0"
    assert ("reads_freed_blocks" in found) == (not ignores), found
    assert ("reads_foreign_slots" in found) == (freed == "recycled")
    assert "reads_outside_window" in found
    plain = {
        one.kind for one in check_case(lab, backend, case.replace(freed="kept")) if one.is_fault
    }
    assert plain == set()


def test_freed_blocks_are_as_vllm_leaves_them() -> None:
    """vLLM's example: of 8 tokens with a window of 4, the 8th does not need the first 4."""
    case = CASE.replace(block_size=2, sliding_window=4, query_lens=(1, 2), ctx_lens=(7, 1))
    case = case.replace(num_blocks=None, freed="empty", x=1)
    assert freed_blocks(case) == [2, 0]
    kept = Lab().cache(case.replace(freed="kept")).provenance
    empty, recycled = (Lab().cache(case.replace(freed=f)).provenance for f in ("empty", "recycled"))
    assert torch.equal(kept.block_table, empty.block_table)
    assert (empty.seq[kept.block_table[0, :2]] == NOBODY).all()
    assert (empty.seq[kept.block_table[0, 2:]] == 0).all()
    last = int(kept.block_table[1, 1])
    assert recycled.block_table[0].tolist() == [last, last, *kept.block_table[0, 2:].tolist()]
    assert int(recycled.seq[last, 0]) == 1
    with pytest.raises(InvalidCase, match="freed must be kept"):
        case.replace(sliding_window=0)
