"""Soft cap: ops that accept it, its place in the computation, and overflow."""

import dataclasses

import pytest
import torch
from fault_injection import correct_run, plant
from helpers.agreement import agrees, modelled, real
from helpers.agreement import bound as between
from helpers.bounds import bound
from helpers.cases import call_of, hostile
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.ops import DECODE_FWD, OPS, UNIFIED, VLLM_OPS, WRAPPER
from attnlab.contracts.contract import Target, contract
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import find_violations
from attnlab.defects import DEFECTS
from attnlab.defects.problem import make_problem
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import model
from attnlab.kernels.binding import bind
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.reference import reference
from attnlab.mutation.report import is_equivalent
from attnlab.tensors.batch import make_batch

pytestmark = needs_triton

CAPS = [defect.name for defect in DEFECTS.values() if defect.family == "softcap"]
DECODES = {"query_lens": (1,) * 4, "ctx_lens": (2, 100, 300, 530)}


def capped(op: str = UNIFIED, **changes) -> Case:
    """Return a Case with a soft cap that changes most scores."""
    lens = DECODES if op == DECODE_FWD else {}
    fields = {"op": op, "softcap": 0.7, "platform": "sm_90", "sm_scale": 0.125, **lens}
    return hostile(**{**fields, **changes})


@pytest.mark.parametrize("op", VLLM_OPS)
def test_who_takes_it(op):
    """Only ops that accept a cap allow a Case with one; others reject it in one line."""
    own = {"backend": "vllm-cpu", "platform": "cpu"} if op.startswith("cpu") else {}
    fields = {"op": op, "softcap": 5, "query_lens": (1,), "ctx_lens": (5 * OPS[op].context,), **own}
    takes = contract(op, Target(), op).softcap != "none"
    assert takes is (OPS[op].softcap is not None)
    if takes:
        assert Case(**fields).softcap == 5.0
        return
    with pytest.raises(InvalidCase) as caught:
        Case(**fields)
    assert caught.value.field == "softcap"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", [UNIFIED, DECODE_FWD])
@pytest.mark.parametrize("softcap", [0.02, 0.7, 50.0])
def test_models_are_within_their_bound(op, dtype, softcap):
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
    assert diagnosis.cause is not None
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == ("softcap_overflows", "all")


@pytest.mark.parametrize("name", CAPS)
def test_each_defect_is_found(name):
    """A planted defect is the cause; without its catalogue entry there is none."""
    cap = 0.02 if name == "softcap_overflows" else 0.7
    case, lab = capped(alibi=True, softcap=cap, empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    broken = plant(problem, output, DEFECTS[name], "all")
    diagnosis = diagnose(case, broken, lab=lab, propose=False)
    assert diagnosis.cause is not None, [one.name for one in diagnosis.explanations]
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == (name, "all")
    rest = [defect for defect in DEFECTS.values() if defect.name != name]
    blind = diagnose(case, broken, lab=lab, defects=rest)
    assert (blind.cause, blind.status in ("unexplained", "described")) == (None, True)


def test_a_capped_sink_is_found():
    """A sink that is capped too."""
    case, lab = capped(sinks=True, empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    diagnosis = diagnose(case, plant(problem, output, DEFECTS["sink_capped"], "all"), lab=lab)
    assert diagnosis.cause is not None
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
