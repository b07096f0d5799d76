"""Statements beyond names and rules: leaks, accesses, common factors; each must hold in further cases."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import faulty_attention
from helpers.cases import hostile
from helpers.faulty_labs import FaultyLab, run_models
from helpers.sources import needs_triton, of_release

from attnlab.case.case import Case
from attnlab.case.ops import DECODE_FWD, OPS, TRITON_OPS
from attnlab.checker.hostile import hostile_cases
from attnlab.contracts.slot_states import STATES, SlotState
from attnlab.defects import DEFECTS
from attnlab.diagnosis import diagnose as diagnosing
from attnlab.diagnosis.address_rules import address_defects
from attnlab.diagnosis.claims import ALL, FeatureClaim, PatternClaim
from attnlab.diagnosis.confirmation import confirmed_features, find_rule, with_second_cases
from attnlab.diagnosis.decision import examine
from attnlab.diagnosis.diagnose import diagnose, with_accesses
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.refinement import confirmed_claim, confirmed_leak
from attnlab.kernels import find_backend
from attnlab.kernels.binding import scratch
from attnlab.lab.lab import Lab
from attnlab.lab.problem import make_problem
from attnlab.lab.result import MemoryReport, Result, SlotsRead
from attnlab.tensors.case_call import make_output
from attnlab.weights.conclude import rounding_of

SMALL = {"num_heads": 4, "head_size": 32, "platform": "sm_90"}
DECODES = hostile(op="unified_attention", query_lens=(1, 1), ctx_lens=(20, 40), **SMALL)
MIXED = hostile(op="unified_attention", query_lens=(1, 5), ctx_lens=(20, 18), **SMALL)
TRACED = MIXED.replace(backend="vllm")
Spoil = Callable[[Case, torch.Tensor], None]


def spoiled(spoil: Spoil) -> FaultyLab:
    """Return a lab whose outputs are changed."""
    return FaultyLab(spoil=lambda case, call: spoil(case, call.output))


def is_decode(case: Case) -> bool:
    return max(case.lengths.query_lens) == 1


def nan_from_slots(case: Case, output: torch.Tensor) -> None:
    if case.empty_slots == "nan":
        output[0] = torch.nan


def always_nan(case: Case, output: torch.Tensor) -> None:
    output[0] = torch.nan


def nan_from_freed_blocks(case: Case, output: torch.Tensor) -> None:
    if case.empty_slots == "nan" and case.freed == "empty":
        output[0] = torch.nan


@pytest.mark.parametrize(
    ("spoil", "is_leak"),
    [(nan_from_slots, True), (nan_from_freed_blocks, True), (always_nan, False)],
)
def test_a_leak_is_stated_if_finite_numbers_make_all_outputs_right(spoil, is_leak):
    case = MIXED.replace(sliding_window=9, freed="empty")
    found = confirmed_leak(Lab(), case, spoiled(spoil).output, only_nan=True)
    assert (found is not None) == is_leak
    assert found is None or found.cases > 2


def counted(case: Case, output: torch.Tensor) -> None:
    output[0] = {"zeros": 0.0, "garbage": 3.0, "nan": torch.nan}[case.empty_slots]


@pytest.mark.slow
def test_slots_without_a_token_that_count_are_stated():
    """Finite numbers in them change each wrong row, too; a row that is wrong anyway refutes it."""

    def with_another(case: Case, output: torch.Tensor) -> None:
        counted(case, output)
        if case.seed != DECODES.seed:
            output[1] = 5.0

    case = DECODES.replace(empty_slots="nan")
    found = diagnose(case, lab=spoiled(counted), limit=None, propose=False)
    assert "slots that hold no token count" in found.conclusion
    lab = spoiled(with_another)
    assert confirmed_leak(Lab(), case, lab.output, only_nan=False) is None


def test_nan_alone_is_no_rule():
    """That some rows are NaN describes no fault: anything that is wrong may end in NaN."""
    nan = frozenset({"all elements are NaN"})
    fields = {"heads": (0,), "all_heads": True, "elements": None}
    assert not PatternClaim(sequences=(), rows=(), values=nan, **fields).is_rule
    assert PatternClaim(sequences=("without context",), rows=(ALL,), values=nan, **fields).is_rule
    assert PatternClaim(sequences=(), rows=(), values=frozenset({"all zeros"}), **fields).is_rule


def test_a_name_of_a_leak_must_hold_in_further_cases():
    """NaN also reaches the rows of sequences without slots after their end: the name says too little."""

    def leaks(case: Case, output: torch.Tensor) -> None:
        if case.empty_slots == "nan":
            output[:] = torch.nan

    case = DECODES.replace(empty_slots="nan")
    lab = spoiled(leaks)
    alone = diagnose(case, lab.output(case), lab=Lab(), propose=False)
    assert "tail_leaked" in [one.name for one in alone.explanations]
    again = diagnose(case, lab=lab, limit=None, propose=False)
    assert again.explanations == []
    assert again.leak is not None


@pytest.mark.parametrize(
    ("is_spoilt", "features"),
    [
        (lambda case: case.sliding_window, ("a sliding window",)),
        (lambda case: case.sliding_window and case.alibi, ("a sliding window", "ALiBi slopes")),
        (lambda case: case.sliding_window or max(case.lengths.ctx_lens) > 200, None),
        (lambda case: case.sliding_window and case.seed == MIXED.seed, None),
        (lambda case: case.sm_scale is None, ("the default softmax scale",)),
        (lambda case: True, None),
    ],
    ids=["one", "two", "another fault", "no further case", "default scale", "always"],
)
@pytest.mark.quick("two", "another fault", "default scale")
def test_features_are_stated_if_outputs_without_them_are_right(is_spoilt, features):
    def spoil(case: Case, output: torch.Tensor) -> None:
        if is_spoilt(case):
            output *= 2

    case = MIXED.replace(sliding_window=9, alibi=True)
    found = confirmed_features(spoiled(spoil), case)
    assert (None if found is None else found.features) == features
    assert found is None or found.cases > 7


def test_features_are_judged_by_fresh_cases(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    from fault_verification import _needs

    def spoil(case: Case, output: torch.Tensor) -> None:
        output *= 2 if case.sliding_window else 1

    lab, case = spoiled(spoil), MIXED.replace(sliding_window=9, alibi=True)
    claims = [
        FeatureClaim(features=(noun,), cases=5) for noun in ("a sliding window", "ALiBi slopes")
    ]
    assert [_needs(lab, case, one) for one in claims] == [True, False]


def test_rounded_weights_are_stated_if_further_cases_confirm_it(monkeypatch):
    """In further cases, the weights are off by rounding, or by more than that."""
    case = hostile(
        **{**SMALL, "op": "context_attention_fwd", "empty_slots": "zeros", "output_init": "zeros"},
        query_lens=(5, 9),
        ctx_lens=(40, 21),
        backend=f"{faulty_attention.__file__}:bfloat16_scores",
    )
    first = diagnose(case, limit=None)
    assert first.status == "described"
    assert first.precision.cases > 2
    assert first.sentences()[0] == first.precision.text
    assert sum("every key has about its weight" in one for one in first.sentences()) == 1
    monkeypatch.setattr(
        "attnlab.diagnosis.refinement.rounding_of",
        lambda one, lab: rounding_of(one, lab) if one == case else None,
    )
    found = diagnose(case, limit=None)
    assert (found.status, found.precision) == ("unexplained", None)
    assert found.sentences()[0].startswith(
        "in this call, precision: every key has about its weight"
    )
    assert sum("every key has about its weight" in one for one in found.sentences()) == 1


def factors_of_rows(case: Case, output: torch.Tensor) -> None:
    rows, heads, _ = output.shape
    output *= torch.linspace(0.3, 0.7, rows * heads).view(rows, heads, 1).to(output.dtype)


@pytest.mark.parametrize("is_general", [True, False])
def test_multiples_of_the_correct_output_are_stated_if_further_outputs_are_such(is_general):
    def spoil(case: Case, output: torch.Tensor) -> None:
        factors_of_rows(case, output)
        if case.lengths != MIXED.lengths and not is_general:
            output[:, 1] += 1.0

    lab = spoiled(spoil)
    case = MIXED.replace(empty_slots="zeros", output_init="zeros")
    claim = confirmed_claim(Lab(), case, examine(Lab(), case, lab.output(case), ()), lab.output)
    assert ("multiples of the correct output" in (claim.text if claim else "")) == is_general


def read(seq: int, state: SlotState) -> SlotsRead:
    """Return the read of one slot of the key cache for a sequence."""
    counts = {one: int(one == state) for one in STATES}
    return SlotsRead(tensor="K_cache", seq=seq, counts=counts, slots={state: ((0, 0),)})


def accesses(slots: Callable[[Case], tuple[SlotsRead, ...]], spoil: Spoil) -> tuple[str, ...]:
    """Return the accesses that describe an output with these reads."""
    lab = spoiled(spoil)
    first = examine(Lab(), TRACED, lab.output(TRACED), ()).diagnosis
    first = dataclasses.replace(first, status="unexplained")

    def run(case: Case) -> Result:
        report = MemoryReport(slots=slots(case), unwritten=())
        return dataclasses.replace(lab.run(case.replace(trace_reads=False)), memory=report)

    found: Diagnosis = with_accesses(Lab(), TRACED, first, run)
    assert (found.status == "described") == (found.accesses is not None)
    return () if found.accesses is None else found.accesses.facts


def never_read(kind: str) -> str:
    return f"cached {kind} that a sequence must read are never read"


@pytest.mark.parametrize(
    ("slots", "facts"),
    [
        ((read(0, SlotState.OTHER_SEQUENCE),), {"do not belong to the sequence"}),
        ((read(0, SlotState.OWN),), {never_read("values")}),
        ((), {never_read("keys"), never_read("values")}),
    ],
    ids=["another sequence", "no value", "no slot"],
)
def test_wrong_reads_describe_a_fault_if_they_recur(slots, facts):
    """Without a value, its addresses seem those of another tensor; without a slot, the loop has no turn."""
    found = accesses(lambda case: slots, always_nan)
    assert all(any(fact in one for one in found) for fact in facts)


@pytest.mark.parametrize(
    ("op", "is_fact"),
    [("unified_attention", True), ("merge_attn_states", False), ("turboquant_decode", False)],
)
def test_a_cache_that_an_op_does_not_get_needs_no_read(op, is_fact):
    """The one merges what others computed, the other gets its cache in a form of its own."""
    case = Case(op=op, backend="vllm", query_lens=(1, 1), ctx_lens=(20, 9), trace_reads=True)
    ran = SimpleNamespace(memory=MemoryReport(slots=(), unwritten=()))
    assert bool(list(diagnosing._reads(Lab(), case, ran))) == is_fact


@needs_triton
@pytest.mark.releases
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if not OPS[op].writes_cache])
def test_right_kernels_read_what_they_must(op):
    lab, ran = Lab(source=of_release("0.33.0").path, device="cpu"), 0
    backend = find_backend("vllm", of_release("0.33.0").path, "cpu")
    for case in list(hostile_cases(backend, op, "sm_90", None, 0))[::5]:
        traced = case.replace(trace_reads=True, output_init="recycled")
        result = lab.run(traced)
        if result.status == "match" and not traced.first_block:
            ran += 1
            assert not [fact for fact, _ in diagnosing._reads(lab, traced, result)]
    assert ran


def test_a_read_that_right_outputs_share_describes_nothing():
    """It is made in every case; the outputs are wrong in batches with several new tokens alone."""

    def spoil(case: Case, output: torch.Tensor) -> None:
        if case.lengths == TRACED.lengths or len(case.lengths.query_lens) == 4:
            always_nan(case, output)

    facts = accesses(lambda case: (read(0, SlotState.OTHER_SEQUENCE),), spoil)
    assert not any("belong" in fact for fact in facts)


def test_rows_that_are_never_written_describe_a_fault():
    def spoil(case: Case, output: torch.Tensor) -> None:
        output[-1] = make_output(case)[-1]

    assert "no kernel writes some rows of the output" in accesses(lambda case: (), spoil)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_read_of_unwritten_scratch_memory_describes_a_fault(is_read):
    """The output is wrong in both; it changes with the contents of the scratch memory in one."""

    def spoil(case: Case, output: torch.Tensor) -> None:
        number = scratch(Lab().call(case), (1,)) if is_read else torch.nan
        output[0] += number

    facts = accesses(lambda case: (), spoil)
    assert ("scratch memory that no kernel has written is read" in facts) == is_read


def test_the_stride_of_a_slot_may_be_another():
    """A kernel that computes block × block_size + offset multiplies that number by one stride."""
    problem = make_problem(hostile(op=DECODE_FWD, query_lens=(1,), ctx_lens=(20,), **SMALL))
    texts = [defect.text for defect in address_defects(problem)]
    assert any("with slot × stride 2 in place of slot × stride 1" in text for text in texts)


@pytest.mark.slow
def test_a_rule_of_decodes_may_fail_for_other_batches():
    """Another kernel may compute those, with another fault; the rule says that it is about decodes."""

    def spoil(case: Case, output: torch.Tensor) -> None:
        if is_decode(case):
            call = Lab().call(case)
            heads = torch.arange(call.query.shape[1]) // call.num_queries_per_kv
            wrong = dataclasses.replace(call, query=call.query[:, heads].clone(), output=output)
            run_models(case, wrong)
        else:
            output += 1.0

    assert find_rule(Lab(), DECODES, spoiled(spoil).output).only_decodes


def test_right_batches_of_decodes_alone_do_not_refute_a_name():
    """Releases before 0.33.0 compute them with another kernel than batches with prefills."""
    lab = FaultyLab(
        change=lambda one, call: {"sliding_window": call.sliding_window + (not is_decode(one))}
    )
    case = MIXED.replace(sliding_window=8)
    first = examine(Lab(), case, lab.output(case), DEFECTS.values()).diagnosis
    assert [one.name for one in first.explanations] == ["window_plus_one"]
    diagnosis = with_second_cases(Lab(), case, lab.output, first)
    assert [one.name for one in diagnosis.explanations] == ["window_plus_one"]
    wrong = spoiled(lambda one, output: output.mul_(1.0 if one.lengths != case.lengths else 2.0))
    assert not with_second_cases(Lab(), case, wrong.output, first).explanations
