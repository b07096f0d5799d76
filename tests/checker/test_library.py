"""The check of a library: no finding for correct kernels, and every planted fault found and named."""

import json
import time
from pathlib import Path

import pytest
import torch
from helpers.plugins import EXAMPLES, RIGHT, checked, checked_by_workers, faults_of_cases, planted
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.ops import OPS, TRITON_OPS
from attnlab.checker.case_check import check_case, is_callers_fault
from attnlab.checker.case_run import CaseRun, never_reads_empty_slots
from attnlab.checker.finding import Location, location_of, op_locations
from attnlab.checker.hostile import DEFAULT_CASES, hostile_cases
from attnlab.cli.main import main
from attnlab.contracts.slot_states import EMPTY, STATES, SlotState
from attnlab.kernels import find_backend
from attnlab.kernels.model import ModelBackend
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.result import MemoryReport, SlotsRead
from attnlab.tasks import local

pytestmark = needs_triton

WRITE = """
import torch
from attnlab.kernels.model import reshape_and_cache_flash, slot_mapping
from attnlab.contracts.contract import Target

def write(call):
    reshape_and_cache_flash(call, Target())
    {fault}

write.op = "reshape_and_cache_flash"
write.kv_cache_dtypes = ("auto",)
"""


@pytest.mark.parametrize(
    "platform",
    ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gfx942", "gfx1100"))],
)
def test_sound_models_give_no_finding(platform: str) -> None:
    """Variants in which a model reproduces an error of vLLM are left out."""
    cases = 12 if platform == "sm_90" else 30
    report = checked(ModelBackend(rules="0.33.0"), cases=cases, platform=platform)
    assert report.cases_run > 5 * cases
    assert report.findings == report.observations == []
    assert set(ModelBackend(rules="0.33.0").blind_spots) <= set(report.left_out)


@pytest.mark.slow
def test_the_older_models_faults_are_found() -> None:
    """NaN of the last block leaks, the default scale uses the number of heads, the soft cap overflows."""
    report = checked(ModelBackend(rules="0.11.2"), cases=DEFAULT_CASES)
    faults = {one.group: one for one in report.findings if one.kind == "wrong_output"}
    leaks = {one.group for one in report.findings if one.kind == "reads_unwritten_slots"}
    assert leaks == {("chunked_prefill_paged_decode", "reads_unwritten_slots", "empty slots")}
    by_heads = ("chunked_prefill_paged_decode", "wrong_output", "scale_by_num_heads")
    overflow = ("unified_attention", "wrong_output", "softcap_overflows")
    assert faults.keys() == {by_heads, overflow}
    assert faults[overflow].case.softcap
    by_scale = faults[by_heads]
    assert len(by_scale.case.lengths.query_lens) == 1
    result = Lab().run(by_scale.case)
    assert result.errors.greatest_abs.value > 1e-2


@pytest.mark.parametrize(
    ("old", "new", "kind", "diagnosis"),
    [
        ("* scale", "* 2 * scale", "wrong_output", "scale_doubled"),
        ("[:seq_len]", "[: seq_len + 8]", "fails", "kernel.py:#: RuntimeError: The"),
        ("hidden |= away <= -call", "hidden |= away < -call", "wrong_output", "window_plus_one"),
        ("call.output[rows] = (", "x = (", "rows_not_written", "rows_never_written"),
        ("repeat_interleave(group, 1)", "repeat(1, group, 1)", "wrong_output", "kv_head_modulo"),
        ("weights @ value)", "weights @ value + 0 * value[:, -1:])", None, None),
        ("if call.sinks is not None", "if False", "wrong_output", "sink_ignored"),
        (
            "torch.cat([scores, sinks], -1)",
            "torch.cat([scores, sinks, sinks], -1)",
            "wrong_output",
            "sink_counted_twice",
        ),
        ("call.sinks[:, None", "call.sinks.roll(-1)[:, None", "wrong_output", "sink_next_head"),
        (
            "query = call.query[rows]",
            "query = call.query.as_strided(call.query.shape, "
            "(call.query[0].numel(), call.query.shape[2], 1))[rows]",
            "wrong_output",
            "strides ignored",
        ),
        ("value[:, hidden.all(0)] = 0.0", "pass", "reads_freed_blocks", "empty blocks"),
        ("(hidden, -torch.inf)", "(hidden, -50.0)", "wrong_output", "unexplained"),
    ],
    ids=[
        *("scale", "raises", "window", "unwritten", "heads", "harmless"),
        *("sink ignored", "sink twice", "sink of another", "strides", "freed blocks", "hidden"),
    ],
)
@pytest.mark.quick(
    *("raises", "window", "unwritten", "harmless", "sink twice"),
    *("strides", "freed blocks", "hidden"),
)
def test_a_planted_fault_is_found(tmp_path: Path, old, new, kind, diagnosis) -> None:
    """Each fault has its kind; a change without effect has no finding."""
    assert old in RIGHT
    found = faults_of_cases(planted(tmp_path, RIGHT.replace(old, new)), 14)
    if kind is None:
        assert list(found) == []
    else:
        assert any(one.kind == kind and one.diagnosis.startswith(diagnosis) for one in found)


def test_a_leak_of_empty_slots_is_found(tmp_path: Path) -> None:
    """0 × NaN of a slot that was never written."""
    place = "call.output[rows] = (weights @ value"
    leak = f"{place} + 0.0 * value_cache[blocks].flatten(0, 1)[-1].float().mean()"
    report = checked(planted(tmp_path, RIGHT.replace(place, leak)), cases=4)
    assert {one.kind for one in report.findings} == {"reads_unwritten_slots"}


@pytest.mark.slow
def test_a_broken_gpu_context_is_a_finding_and_the_other_cases_run(
    tmp_path: Path,
) -> None:
    """A new process continues with the next case."""
    broken = RIGHT.replace(
        "    key_cache, value_cache = to_flash",
        "    if call.sliding_window:\n"
        "        raise torch.AcceleratorError('CUDA error: an illegal memory access')\n"
        "    key_cache, value_cache = to_flash",
    )
    whole = checked(planted(tmp_path, RIGHT), cases=6)
    (tmp_path / "broken").mkdir()
    report = checked_by_workers(planted(tmp_path / "broken", broken))
    assert [(one.kind, one.diagnosis) for one in report.findings] == [("fails", "crash")]
    assert report.findings[0].case.sliding_window
    assert "illegal memory access" in report.findings[0].evidence
    assert report.cases_run == whole.cases_run


@pytest.mark.parametrize(
    ("fault", "diagnosis"),
    [
        ("pass", None),
        ("call.output[slot_mapping(call)[0]] = 0", "own slot"),
        ("call.output[slot_mapping(call)[-1]] = call.output[slot_mapping(call)[0]]", "own slot"),
        ("call.output[-1] = 1; call.output[0] = 1; call.output[40] = 1", None),
    ],
    ids=["right", "erased", "wrong token", "strays"],
)
def test_a_wrong_cache_write_is_found(tmp_path: Path, fault: str, diagnosis: str | None) -> None:
    """A token that is missing, a token of another slot, and bytes in slots without owner."""
    report = checked(planted(tmp_path, WRITE.format(fault=fault), "write"), cases=4)
    kinds = {one.kind for one in report.findings}
    assert kinds == (set() if fault == "pass" else {"wrong_bytes"})
    if diagnosis is not None:
        assert diagnosis in {one.diagnosis for one in report.findings}


def test_a_release(source: Source) -> None:
    """The first cases find nothing in 0.33.0; in 0.11.2 the known leak, and FP8 without scales."""
    report = checked(find_backend("vllm", source.path, "cpu"), cases=5)
    assert report.cases_run >= 25
    findings = {one.kind for one in report.findings if not one.horizon}
    observations = {one.kind for one in report.observations if not one.horizon}
    old = source.rules == "0.11.2"
    assert findings == ({"reads_unwritten_slots", "wrong_output"} if old else set())
    assert observations - {"reads_empty_slots", "out_of_bounds"} == {"reads_outside_window"}
    assert ("reads_empty_slots" in observations) == old


def test_hostile_cases_keep_every_contract() -> None:
    """No case violates a contract, and the cases use all features.

    An op with few dtypes is not asked: a check leaves out the cases that its contract excludes.
    """
    lab, seen = Lab(), set[str]()
    for op in (one for one in TRITON_OPS if not OPS[one].contract.get("dtypes")):
        cases = list(hostile_cases(ModelBackend(rules="0.33.0"), op, "sm_90", DEFAULT_CASES, 0))
        assert len(cases) > 25
        for case in cases:
            assert not is_callers_fault(lab, case)
            seen |= set(case.changes())
    assert {"alibi", "sliding_window", "kv_cache_dtype", "k_scale", "num_splits"} <= seen
    assert {"sinks", "softcap"} <= seen


def test_a_cache_without_new_tokens_is_the_callers_fault() -> None:
    """unified_attention and decode read the new tokens from the cache."""
    case = Case(fill="context_only", stage="sound", query_lens=(1,), ctx_lens=(9,))
    assert is_callers_fault(Lab(), case)
    assert not is_callers_fault(Lab(), case.replace(fill="all_rows"))


def test_json_and_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit 0 without findings, 1 with findings; the JSON document has every field.

    All cases show the fault; its smallest case is not the one that showed it first.
    """
    flags = ["--engine", "local:1", "--json"]
    assert main(["check", "--op", "unified_attention", "--cases", "1", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["findings"]) == ("models of 0.33.0", [])
    (tmp_path / "k.py").write_text(RIGHT.replace("* scale", "* 2 * scale"))
    assert main(["check", f"{tmp_path}/k.py:my_attention", "--cases", "2", *flags]) == 1
    document = json.loads(capsys.readouterr().out)
    assert set(document) >= {"source", "version", "cases_run", "seconds", "findings", "left_out"}
    (finding,) = document["findings"]
    assert set(finding) >= {"op", "kind", "case", "evidence", "diagnosis"}
    assert (finding["kind"], finding["diagnosis"]) == ("wrong_output", "scale_doubled")
    assert finding["seen"] == document["cases_run"] > 1
    case = Case.from_dict(finding["case"])
    assert Lab().run(case.replace(atol=1e-3)).status == "mismatch"
    assert case.to_cli() == finding["run"]
    assert finding["first"] not in (None, finding["run"])


@pytest.mark.parametrize("what", ["first", "strides", "block size"])
def test_the_triton_example(what: str) -> None:
    """It has no finding under the interpreter: in general, with strides, with 48 tokens per block."""
    backend = find_backend(f"{EXAMPLES / 'my_triton_attention.py'}:my_attention")
    cases = [*hostile_cases(backend, backend.ops[0], "sm_90", DEFAULT_CASES, 0)]
    chosen = {
        "first": cases[:1],
        "strides": [case for case in cases if case.kv_layout == "fused"],
        "block size": [case for case in cases if case.block_size == 48],
    }[what]
    assert check_case(Lab(), backend, chosen[0]) == []


# Where findings are in source code.


UNIFIED = "unified_attention"
FILE = """
import math

def helper():
    pass

def unified_attention(q):
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm" / "v1" / "attention" / "ops"
    folder.mkdir(parents=True)
    (folder / "triton_unified_attention.py").write_text(FILE)
    return tmp_path


def test_an_op_is_at_its_definition(checkout: Path) -> None:
    """Relative to the root of the source; ops that the release does not have are left out."""
    found = op_locations(find_backend("vllm", checkout, "cpu"))
    file = "vllm/v1/attention/ops/triton_unified_attention.py"
    assert found == {UNIFIED: Location(file=file, line=7)}
    assert op_locations(find_backend("model")) == {}


def test_a_kernel_of_a_user_is_at_its_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the folder where the command runs, as a CI job shows it."""
    kernel = "def kernel(call):\n    pass\n\n\nkernel.op = 'unified_attention'\n"
    (tmp_path / "mine.py").write_text(f"\n\n{kernel}")
    monkeypatch.chdir(tmp_path)
    found = op_locations(find_backend("mine.py:kernel"))
    assert found == {UNIFIED: Location(file="mine.py", line=3)}


def test_evidence_names_a_line() -> None:
    """In the folder of the op. Without a line, or for an op without a file, it is the op's or none."""
    ops = {UNIFIED: Location(file="a/b/op.py", line=7)}
    lines = {
        "kernels.py:12 reads 4 bytes before out": Location(file="a/b/kernels.py", line=12),
        "op.py:30 multiplies in int32: 1 × 2 = 3": Location(file="a/b/op.py", line=30),
        "rows [1, 2] differ at 3:4": ops[UNIFIED],
    }
    for evidence, location in lines.items():
        assert location_of(UNIFIED, evidence, ops) == location
    assert location_of("merge_attn_states", "op.py:3 reads", ops) is None


# A case that hangs or ends its process is a finding; the cases before and after it count.


PLACE = "    key_cache, value_cache = to_flash"
EXIT = "ctypes.CDLL(None)._exit(3)"  # cannot be caught


def with_fault(folder, line, when="call.sliding_window"):
    """Return the example kernel with a line that runs for some calls."""
    assert PLACE in RIGHT
    fault = f"    if {when}:\n        import ctypes, time\n        {line}\n{PLACE}"
    return planted(folder, RIGHT.replace(PLACE, fault))


@pytest.mark.parametrize(
    ("line", "diagnosis", "words"),
    [("time.sleep(1000)", "does not end", "3 s"), (EXIT, "crash", "exit code 3")],
    ids=["loops", "ends its process"],
)
def test_a_kernel_that_ends_its_worker_is_a_finding(tmp_path, monkeypatch, line, diagnosis, words):
    """The finding has the case that did it, and the other cases run."""
    monkeypatch.setattr(local, "_IDLE_SHARE", 1.0)
    report = checked_by_workers(with_fault(tmp_path, line), limit_s=3.0)
    assert [(one.kind, one.diagnosis) for one in report.findings] == [("fails", diagnosis)]
    assert report.findings[0].case.sliding_window
    assert words in report.findings[0].evidence
    assert report.cases_run >= 5


def test_the_time_limit_holds_for_a_kernel_that_always_loops(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_IDLE_SHARE", 1.0)
    begin = time.monotonic()
    report = checked_by_workers(
        with_fault(tmp_path, "time.sleep(1000)", "True"), limit_s=2.0, seconds=2.0
    )
    assert [one.diagnosis for one in report.findings] == ["does not end"]
    assert [entry.reason for entry in report.not_run] == ["the time was up"]
    assert time.monotonic() - begin < 90


# Which slots a traced run read, and whether its output can depend on empty ones.


def run_that_read(
    *entries: tuple[str, SlotState], traced: bool = True, outside: tuple[str, ...] = ()
) -> CaseRun:
    """Return a run that read one slot of each (tensor, state)."""
    slots = tuple(
        SlotsRead(tensor=tensor, seq=0, counts={**dict.fromkeys(STATES, 0), state: 1})
        for tensor, state in entries
    )
    memory = MemoryReport(slots=slots, unwritten=()) if traced else None
    return CaseRun(
        output=torch.zeros(1), lse=None, padded=None, memory=memory, wraps=(), outside=outside
    )


KEY, VALUE = ("key_cache", SlotState.OWN), ("value_cache", SlotState.OWN)


FOREIGN = ("value_cache", SlotState.OTHER_SEQUENCE)


@pytest.mark.parametrize(
    ("run", "never"),
    [
        (run_that_read(KEY, VALUE), True),
        (run_that_read(KEY, VALUE, FOREIGN), True),
        *(
            (run_that_read(KEY, VALUE, ("key_cache", state)), False)
            for state in (*EMPTY, SlotState.UNKNOWN)
        ),
        (run_that_read(KEY, VALUE, traced=False), False),
        (run_that_read(KEY), False),
        (run_that_read(), False),
        (run_that_read(KEY, VALUE, outside=("f.py:3 …",)), False),
    ],
)
def test_an_output_is_independent_of_empty_slots_if_a_full_trace_has_none(run, never) -> None:
    """An empty slot or an unknown reader decides; without a full trace nothing is known."""
    assert never_reads_empty_slots(run) == never
