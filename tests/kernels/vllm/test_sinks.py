"""Attention sinks: drawing, ops that accept them, and their effect on results and diagnosis."""

import dataclasses
import math

import pytest
import torch
from fault_injection import correct_run, plant
from helpers.agreement import agrees, modelled, real
from helpers.agreement import bound as between
from helpers.bounds import bound
from helpers.cases import call_of, decode_rows, hostile, same_bits
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected, Unavailable
from attnlab.case.ops import DECODE_FWD, OPS, PREFILL, TRITON_OPS, UNIFIED, WRAPPER
from attnlab.checker.case_check import check_case
from attnlab.contracts.contract import TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import find_violations
from attnlab.defects import DEFECTS
from attnlab.defects.scores import splits
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import find_distinction
from attnlab.kernels import model
from attnlab.kernels.binding import bind
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.problem import make_problem
from attnlab.lab.reference import reference
from attnlab.mutation.power import is_equivalent
from attnlab.mutation.power import measure_power as power
from attnlab.tensors.cache import SINK_RANGE, make_batch, sink_logits
from attnlab.tensors.call import KernelCall

pytestmark = needs_triton

BESIDE = {"sink_capped": {"softcap": 0.7}, "sink_beside_alibi": {"alibi": True}}
SINKS = [one.name for one in DEFECTS.values() if one.family == "sinks" and one.name not in BESIDE]
DECODES = {"query_lens": (1,) * 4, "ctx_lens": (2, 100, 300, 530)}


@pytest.mark.parametrize("num_heads", [1, 2, 5, 64, 71])
def test_logits_are_of_each_heads_own(num_heads):
    """Sinks are in range, exact in bfloat16, distinct and not sorted; another seed gives others."""
    logits = sink_logits(num_heads, 3)
    assert (logits.shape, logits.dtype) == ((num_heads,), torch.float32)
    assert torch.equal(logits, logits.bfloat16().float())
    assert SINK_RANGE[0] <= logits.min() <= logits.max() <= SINK_RANGE[1]
    assert len(logits.unique()) == num_heads
    assert torch.equal(logits, sink_logits(num_heads, 3))
    assert not torch.equal(logits, sink_logits(num_heads, 4))
    if num_heads > 5:
        assert not torch.equal(logits, logits.sort().values)


def test_they_reach_reference_and_call_and_are_kept_apart():
    """Batch, call and reference contain them, and a Lab caches each variant separately."""
    lab, case = Lab(), hostile(sinks=True, platform="sm_90")
    plain = case.replace(sinks=False)
    call = lab.call(case)
    assert call.sinks is not None
    assert torch.equal(call.sinks, sink_logits(6, 7))
    assert lab.call(plain).sinks is None
    assert torch.equal(call.query, lab.call(plain).query)
    assert (lab.reference(case) - lab.reference(plain)).abs().flatten(1).amax(1).min() > 1e-2
    assert Lab().run(case.replace(atol=3e-3)).status == "match"
    for first, second in ((case, plain), (plain, case)):
        shared = Lab()
        shared.output(first)
        assert same_bits(shared.output(second), Lab().output(second))


def test_on_rocm_triton_decodes_and_the_term_is_named():
    """The custom kernel is not dispatched, and the decision states why."""
    result = Lab().run(hostile(sinks=True, atol=3e-3))
    assert result.decision.kernels == (PREFILL, TRITON_DECODE)
    assert result.decision.reasons == ["not paged_attention_rocm: sinks is given, allowed: none"]
    assert (result.status, result.violations) == ("match", [])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if OPS[op].sinks and OPS[op].context])
def test_models_are_within_their_bound(op, dtype):
    """Also with a sink far above or far below every score."""
    case = hostile(op=op, sinks=True, dtype=dtype, platform="sm_90")
    batch = make_batch(case)
    without = dataclasses.replace(batch, sinks=None)
    for shift in (0.0, 12.0, -200.0):
        moved = dataclasses.replace(batch, sinks=batch.sinks + shift)
        call, _ = call_of(case)
        call = dataclasses.replace(call, sinks=moved.sinks)
        model.run(call, Target.of(case), decide(case).kernels)
        exact = reference(case, moved)
        assert ((call.output.double() - exact).abs() <= bound(case, moved)).all()
        if shift == -200.0:
            assert (exact - reference(case, without)).abs().max() < 1e-12


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("op", [op for op in TRITON_OPS if OPS[op].sinks and OPS[op].context])
def test_vllms_kernels_take_either_dtype(
    source: Source,
    op: str,
    decodes: bool,
) -> None:
    """Sinks of either dtype give the same bits; the agreement check detects a missing or exchanged sink."""
    if source.rules not in OPS[op].releases:
        pytest.skip(f"{source.text()} has no {op}")
    lens = {**DECODES, "num_blocks": None} if decodes else {}
    case = hostile(
        op=op, sinks=True, platform="sm_90", release=source.rules, empty_slots="zeros", **lens
    )
    case = case.replace(sm_scale=0.125)
    right, within = real(case, source).output, between(case)
    assert agrees(modelled(case).output, right, within)
    call, _ = call_of(case)
    for sinks in (None, call.sinks.roll(1), call.sinks + math.log(2)):
        wrong = dataclasses.replace(call, sinks=sinks, output=call.output.clone())
        model.run(wrong, Target.of(case), decide(case).kernels)
        assert not agrees(wrong.output, right, within)
    half = dataclasses.replace(call, sinks=call.sinks.bfloat16())
    vllm_ops.run(half, Target.of(case), decide(case).kernels, source)
    assert same_bits(half.output, right)


@pytest.mark.parametrize("op", ["chunked_prefill_paged_decode", "context_attention_fwd"])
def test_beside_alibi_the_prefill_asserts(source: Source, op: str) -> None:
    """Model and real op reject the call with the violation's text; without a prefill it runs."""
    case = hostile(op=op, sinks=True, alibi=True, platform="sm_90", release=source.rules)
    call, cache = call_of(case)
    (first, *_) = find_violations(call, Target.of(case), decide(case).kernels, cache.provenance)
    assert (first.kind, first.effect, first.tensor) == ("unsupported", "rejected", "sinks")
    for run in (modelled, lambda case: real(case, source)):
        with pytest.raises(KernelRejected, match=r"^Sinks arg is not supported with alibi$"):
            run(case)
    if op == PREFILL:
        return
    decodes = case.replace(**DECODES, num_blocks=None, empty_slots="zeros", sm_scale=0.125)
    assert decide(decodes).kernels == (TRITON_DECODE,)
    assert agrees(modelled(decodes).output, real(decodes, source).output, between(decodes))


def test_a_release_without_the_argument_says_so():
    """An op without the argument, as in 0.9.2, rejects the call."""

    def unified_attention(q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, k_descale): ...

    case = hostile(op=UNIFIED, sinks=True)
    with pytest.raises(Unavailable, match="sinks must be false: unified_attention of this vLLM"):
        bind(unified_attention, Lab().call(case), Target.of(case))
    plain = case.replace(sinks=False)
    assert "sinks" not in bind(unified_attention, Lab().call(plain), Target.of(plain))


def test_breaches_of_a_captured_call():
    """A kernel without sinks, and the CPU op, which accepts two dtypes."""
    case = hostile(sinks=True, **DECODES)
    call, _ = call_of(case)
    target = Target.of(case)
    for kernel in ("paged_attention_rocm", DECODE_FWD):
        found = [v for v in find_violations(call, target, (kernel,)) if v.tensor == "sinks"]
        assert [(v.kernel, v.effect, v.required) for v in found] == [(kernel, "rejected", "none")]
    half = dataclasses.replace(call, sinks=call.sinks.half())
    (violation,) = find_violations(half, target, ("cpu_attention_with_kv_cache",))
    assert (violation.tensor, violation.dtype) == ("sinks", "float16")
    assert violation.required == "bfloat16, float32"


def test_splits_are_those_of_the_kernels():
    """The number of splits equals that of reduce_segments, or of the parts in the record of an op; a batch
    with a prefill is not split."""
    case = hostile(op=UNIFIED, sinks=True, **DECODES)
    problem = make_problem(case)
    assert [splits(problem, seq) for seq in range(4)] == [1, 7, 10, 12]
    problem = make_problem(case.replace(num_splits=4))
    assert [splits(problem, seq) for seq in range(4)] == [1, 4, 4, 4]
    assert splits(make_problem(hostile(op=UNIFIED, sinks=True)), 10) == 1
    problem = make_problem(hostile(sinks=True, **DECODES))
    assert [splits(problem, seq) for seq in range(4)] == [1, 1, 2, 3]
    parts = hostile(
        op="sglang_decode_attention", backend="library:sglang", sinks=True, num_splits=4, **DECODES
    )
    assert [splits(make_problem(parts), seq) for seq in range(4)] == [1, 4, 4, 4]


CHUNKED = (
    "chunked_prefill_paged_decode"  # tests/defects has a kernel with each of the other defects
)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        *((name, UNIFIED) for name in SINKS),
        ("sink_per_split", CHUNKED),
        ("sink_on_first_key", CHUNKED),
    ],
)
def test_each_defect_is_found(name, op):
    """A planted defect is the cause or among equivalent explanations, and its scope is all rows."""
    lens = {**DECODES, "num_blocks": None} if name == "sink_per_split" else {}
    case, lab = hostile(op=op, sinks=True, platform="sm_90", empty_slots="garbage", **lens), Lab()
    problem, output = correct_run(lab, case)
    diagnosis = diagnose(case, plant(problem, output, DEFECTS[name], "all"), lab=lab, propose=False)
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == (name, "all")
    rest = [defect for defect in DEFECTS.values() if defect.name != name]
    blind = diagnose(
        case, plant(problem, output, DEFECTS[name], "all"), lab=lab, defects=rest, propose=False
    )
    assert (blind.cause, blind.status in ("unexplained", "described")) == (None, True)


def test_unified_attention_counts_alibi_from_the_first_new_token(source: Source) -> None:
    """Without a sink the offset cancels in the softmax. With one, all rows after a prefill's first are wrong.

    The same token then gives another output if its chunk starts elsewhere.
    """
    case = hostile(op=UNIFIED, sinks=True, alibi=True, release=source.rules, platform="sm_90")
    output = real(case, source).output
    assert agrees(modelled(case).output, output, between(case))
    diagnosis = diagnose(case, output, propose=False)
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == ("sink_beside_alibi", "all")
    assert diagnose(case.replace(**DECODES, num_blocks=None)).status == "nothing wrong"
    plain = case.replace(sinks=False)
    assert diagnose(plain, real(plain, source).output, propose=False).status == "nothing wrong"


def test_a_shift_of_alibi_is_a_defect_beside_a_sink():
    """Without sinks the shift cancels in the softmax; with sinks it does not."""
    for sinks, verdict in ((True, "explained"), (False, "nothing wrong")):
        case = hostile(op=UNIFIED, alibi=True, sinks=sinks, empty_slots="zeros", **DECODES)
        problem, output = correct_run(Lab(), case)
        diagnosis = diagnose(
            case, plant(problem, output, DEFECTS["alibi_shifted"], "all"), propose=False
        )
        assert diagnosis.status == verdict
        assert diagnosis.cause is None or diagnosis.cause.name == "alibi_shifted"


def test_in_decodes_alone_it_is_placed_there():
    """A decode kernel that ignores its sinks has the scope decode."""
    case, lab = hostile(sinks=True, platform="sm_90", empty_slots="garbage"), Lab()
    call = lab.call(case)
    model.run(call, Target.of(case), (PREFILL,))
    blind = dataclasses.replace(call, sinks=None)
    model.run(blind, Target.of(case), (TRITON_DECODE,))
    diagnosis = diagnose(case, call.output, lab=lab, propose=False)
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == ("sink_ignored", "decode")
    right = Lab().output(case)
    assert torch.equal((call.output != right).flatten(1).any(1), decode_rows(case))


def test_a_saved_call_tells_of_its_sinks(tmp_path):
    """A saved call contains them, and the diagnosis uses them."""
    case, lab = hostile(sinks=True, platform="sm_90", empty_slots="zeros"), Lab()
    call = dataclasses.replace(lab.call(case), output=lab.output(case.replace(sinks=False)))
    call.save(tmp_path / "call.safetensors")
    diagnosis = diagnose_captured(
        KernelCall.load(tmp_path / "call.safetensors"), Case(platform="sm_90"), given=("platform",)
    )
    assert diagnosis.cause.name == "sink_ignored"


def test_twice_and_once_per_split_are_the_same_in_two_pieces():
    """With two partitions everywhere the diagnosis is ambiguous, and the proposed Case distinguishes
    the defects."""
    case = hostile(sinks=True, platform="sm_90", query_lens=(1, 1), ctx_lens=(300, 400))
    lab = Lab()
    problem, output = correct_run(lab, case)
    diagnosis = diagnose(case, plant(problem, output, DEFECTS["sink_per_split"], "all"), lab=lab)
    assert diagnosis.status == "ambiguous"
    assert {one.name for one in diagnosis.explanations} == {"sink_counted_twice", "sink_per_split"}
    assert diagnosis.distinction.case is not None


def test_without_sinks_none_of_them_is_suspected():
    """Sink defects do not apply to a call without sinks; an extra sink does not apply to a call with
    sinks."""
    assert len(SINKS) == 9
    problems = make_problem(hostile()), make_problem(hostile(sinks=True))
    assert not any(DEFECTS[name].applies(problems[0]) for name in SINKS)
    assert all(DEFECTS[name].applies(problems[1]) for name in SINKS)
    assert DEFECTS["zero_key_counted"].applies(problems[0])
    assert not DEFECTS["zero_key_counted"].applies(problems[1])
    apart = find_distinction(hostile(), DEFECTS["sink_ignored"], DEFECTS["sink_counted_twice"])
    assert apart.case is None


def test_the_power_of_a_test_with_sinks():
    """At an FP8 test's tolerance small data hide defects that N(0, 1) data show; without sinks there
    are none."""
    case = hostile(
        sinks=True, distribution="uniform_1e-3", stage="cast_after_cumsum", empty_slots="zeros"
    )
    names = [DEFECTS[name] for name in SINKS if name != "sink_per_split"]  # not in the sampled rows
    outcomes = {}
    for data in ("uniform_1e-3", "normal"):
        diagnosis = power(case.replace(distribution=data, atol=1e-3), mutants=names, remedies=False)
        outcomes[data] = {one.outcome for one in diagnosis.mutants}
        assert len(diagnosis.mutants) == len(names) == 8
    assert outcomes == {"uniform_1e-3": {"survived"}, "normal": {"killed"}}
    assert power(case.replace(sinks=False), mutants=names, remedies=False).mutants == []


# Soft cap: ops that accept it, its place in the computation, and overflow.


CAPS = [defect.name for defect in DEFECTS.values() if defect.family == "softcap"]


def capped(op: str = UNIFIED, **changes) -> Case:
    """Return a Case with a soft cap that changes most scores."""
    lens = DECODES if op == DECODE_FWD else {}
    fields = {"op": op, "softcap": 0.7, "platform": "sm_90", "sm_scale": 0.125, **lens}
    return hostile(**{**fields, **changes})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", [UNIFIED, DECODE_FWD])
@pytest.mark.parametrize("softcap", [0.02, 0.7, 50.0])
def test_models_with_a_cap_are_within_their_bound(op, dtype, softcap):
    """From a cap far below all scores to one with almost no effect."""
    case = capped(op, dtype=dtype, softcap=softcap)
    call, _ = call_of(case)
    model.run(call, Target.of(case), decide(case).kernels)
    batch = make_batch(case)
    exact = reference(case, batch)
    assert ((call.output.double() - exact).abs() <= bound(case, batch)).all()
    without = reference(case.replace(softcap=None), batch)
    assert (exact - without).abs().max() > (1e-5 if softcap == 50.0 else 0.1)


@pytest.mark.parametrize("op", [UNIFIED, DECODE_FWD])
def test_agreement_sees_a_wrong_cap(source: Source, op: str) -> None:
    """The agreement check detects a cap that is 5 % larger, missing, or applied before the scale."""
    case = capped(op, release=source.rules, empty_slots="zeros")
    right, within = real(case, source).output, between(case)
    assert agrees(modelled(case).output, right, within)
    for changes in ({"softcap": 0.735}, {"softcap": None}, {"softcap": 0.0875}):
        assert not agrees(modelled(case.replace(**changes)).output, right, within)


def test_0_11_2_overflows_and_0_33_0_does_not(source: Source) -> None:
    """A score beyond 88 times the cap gives NaN in the same rows as the model, and is diagnosed by name."""
    case = capped(softcap=0.02, release=source.rules, empty_slots="zeros", output_init="zeros")
    output = real(case, source).output
    assert agrees(modelled(case).output, output, between(case))
    diagnosis = diagnose(case, output, propose=False)
    if source.rules == "0.33.0":
        assert diagnosis.status == "nothing wrong"
        return
    assert output.isnan().flatten(1).any(1).sum() > 50
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == ("softcap_overflows", "all")


def test_infinite_and_nan_scores_are_one_fault(source: Source) -> None:
    """With a cap above 1, scores are infinite before they become NaN; a check gives both the same name."""
    case = Case(
        op=UNIFIED, backend="vllm", release=source.rules, num_heads=1, head_size=32, sm_scale=16.0,
        softcap=2.0, query_lens=(1,), ctx_lens=(0,), seed=7, distribution="normal", fill="all_rows",
    )  # fmt: skip
    lab = Lab(source=source.path, device="cpu")
    found = check_case(lab, VllmBackend(path=source.path, requested_device="cpu"), case)
    names = [("softcap_overflows",)] if source.rules == "0.11.2" else []
    assert [one.names for one in found if one.is_fault] == names


@pytest.mark.parametrize("name", CAPS)
def test_each_defect_of_a_cap_is_found(name):
    """A planted defect is the cause; without its catalogue entry there is none."""
    cap = 0.02 if name == "softcap_overflows" else 0.7
    case, lab = capped(alibi=True, softcap=cap, empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    broken = plant(problem, output, DEFECTS[name], "all")
    diagnosis = diagnose(case, broken, lab=lab, propose=False)
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == (name, "all")
    rest = [defect for defect in DEFECTS.values() if defect.name != name]
    blind = diagnose(case, broken, lab=lab, defects=rest, propose=False)
    assert (blind.cause, blind.status in ("unexplained", "described")) == (None, True)


def test_a_capped_sink_is_found():
    """A sink that is capped too."""
    case, lab = capped(sinks=True, empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    diagnosis = diagnose(case, plant(problem, output, DEFECTS["sink_capped"], "all"), lab=lab)
    assert diagnosis.cause.name == "sink_capped"


def test_without_a_cap_none_of_them_is_suspected():
    """An overflow that some data show is not reported as equivalent."""
    problem = make_problem(hostile(op=UNIFIED))
    assert len(CAPS) == 7
    assert not any(DEFECTS[name].applies(problem) for name in (*CAPS, "sink_capped"))
    problem = make_problem(capped(alibi=True, softcap=5.0))
    assert [name for name in CAPS if not DEFECTS[name].applies(problem)] == ["softcap_overflows"]
    assert not is_equivalent(capped(softcap=5.0), DEFECTS["softcap_overflows"])


def test_a_captured_call_with_a_cap():
    """A kernel without the argument is a violation; a saved call keeps the value."""
    case = capped()
    call, _ = call_of(case)
    assert call.softcap == 0.7
    other = dataclasses.replace(call, op=WRAPPER)
    found = find_violations(other, Target.of(case), ("context_attention_fwd",))
    capped_by = [(v.kernel, v.value, v.required) for v in found if v.parameter == "softcap"]
    assert capped_by == [("context_attention_fwd", 0.7, "none")]

    def chunked_prefill_paged_decode(query, key, value, output): ...

    with pytest.raises(Unavailable, match="softcap must be none: chunked"):
        bind(chunked_prefill_paged_decode, other, Target.of(case))
    assert torch.equal(call.query, call_of(case.replace(softcap=None))[0].query)
