"""Diagnosis of saved calls and outputs."""

import dataclasses

import pytest
import torch
from helpers.cases import call_of, hostile

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.defects import DEFECTS
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.diagnosis.diagnose import diagnose, diagnose_call
from attnlab.diagnosis.rules.outputs import scratch_defects
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.tensors.call import KernelCall


def test_an_output_is_diagnosed_without_a_run():
    """Unwritten rows are found by the buffer's known contents."""
    case = hostile(stage="int32_before_cumsum", output_init="recycled", empty_slots="garbage")
    diagnosis = diagnose(case, Lab().output(case))
    assert diagnosis.cause is not None
    assert diagnosis.cause.name == "query_start_loc_as_int32"
    assert diagnosis.unwritten_by == "buffer"
    assert diagnosis.slot_dependent is None


def test_a_saved_call_is_diagnosed(tmp_path):
    """The buffer is unknown, so unwritten rows follow from the contracts."""
    case = hostile(stage="int32_before_cumsum", empty_slots="garbage", ctx_lens=(20,) * 12)
    lab = Lab()
    call = dataclasses.replace(lab.call(case), output=lab.output(case))
    path = tmp_path / "call.safetensors"
    call.save(path)
    diagnosis = diagnose_captured(KernelCall.load(path), Case())
    assert diagnosis.unwritten == [31, 49, 90, 91, 95]
    assert diagnosis.unwritten_by == "contracts"
    assert {violation.kind for violation in diagnosis.violations} >= {"index_dtype"}


def test_a_saved_call_with_rows_unwritten_and_nothing_else(tmp_path):
    """The one row that is computed from another sequence is corrected first."""
    case = hostile(stage="int32_before_cumsum", empty_slots="garbage", output_init="recycled")
    lab = Lab()
    output = lab.output(case)
    output[0] = lab.output(case.replace(stage="sound"))[0]
    call = dataclasses.replace(lab.call(case), output=output)
    diagnosis = diagnose_call(call, Target.of(case), decide(case).kernels)
    assert diagnosis.status == "explained"
    assert diagnosis.cause is not None
    assert diagnosis.cause.name == "query_start_loc_as_int32"
    causes = ("query_start_loc_as_int32", "rows_never_written")
    rest = [defect for defect in DEFECTS.values() if defect.name not in causes]
    blind = diagnose_call(call, Target.of(case), decide(case).kernels, defects=rest)
    assert blind.status == "unexplained"


def test_a_call_of_another_defect_is_diagnosed_without_its_case():
    """A default scale from the number of heads."""
    case = hostile(release="0.11.2", empty_slots="zeros")
    call, _ = call_of(case)
    output = Lab().output(case)
    diagnosis = diagnose_call(call, Target.of(case), decide(case).kernels, output=output)
    assert diagnosis.cause is not None
    assert diagnosis.cause.name == "scale_by_num_heads"


def test_kernels_of_a_call_are_those_of_its_case():
    """Dispatch reads the call's own tensors."""
    for changes in ({}, {"platform": "sm_90"}, {"sinks": True}, {"sliding_window": 7}):
        case = hostile(**changes)
        plain = Case(platform=case.platform)
        assert kernels_of(plain, Lab().call(case)) == decide(case).kernels


def test_a_wrong_output_is_refused():
    case = hostile()
    with pytest.raises(
        InvalidCall, match=r"^output must have shape \(98, 6, 64\), got \(3, 2, 1\)$"
    ):
        diagnose(case, torch.zeros(3, 2, 1, dtype=torch.float16))
    with pytest.raises(
        InvalidCall, match=r"output must have dtype torch.float16, got torch.float32"
    ):
        diagnose(case, torch.zeros(98, 6, 64))


def test_diagnosing_changes_no_tensor(tmp_path):
    case, lab = hostile(stage="int32_before_cumsum"), Lab()
    output = lab.output(case)
    call = lab.call(case)
    call.save(tmp_path / "before")
    kept = output.clone()
    diagnose(case, output, lab=lab)
    lab.call(case).save(tmp_path / "after")
    assert output.nan_to_num(9).equal(kept.nan_to_num(9))
    before, after = (KernelCall.load(tmp_path / name) for name in ("before", "after"))
    assert before.key_cache.nan_to_num(9).equal(after.key_cache.nan_to_num(9))


def test_rows_that_equal_the_buffer_are_not_known_to_be_unwritten():
    """One output shows no more; a call whose contracts leave the rows out does."""
    changes = {"query_lens": (4, 3), "ctx_lens": (9, 40), "platform": "sm_90"}
    case, lab = hostile(stage="sound", empty_slots="zeros", **changes), Lab()
    output, call = lab.output(case).clone(), lab.call(case)
    before = torch.randn_like(output.float()).to(output.dtype)
    output[-3:] = before[-3:]
    defects = [DEFECTS[name] for name in ("rows_never_written", "causal_plus_one")]
    given = {"output": output, "before": before, "defects": defects}
    diagnosis = diagnose_call(call, Target.of(case), decide(case).kernels, **given)
    assert (diagnosis.status, diagnosis.cause) == ("ambiguous", None)
    assert [one.name for one in diagnosis.explanations] == ["rows_never_written"]
    assert "ambiguous: the output does not contradict" in " ".join(diagnosis.sentences())


def test_equal_factors_of_all_parts_are_also_a_missing_rescale():
    """A maximum at one address for all parts and a lost rescale of both numbers give the same outputs."""
    case = hostile(op="unified_attention", query_lens=(1, 2), ctx_lens=(70, 40), platform="sm_90")
    texts = [
        one.text
        for one in scratch_defects(
            Problem.of_call(Lab().call(case), Target.of(case), decide(case).kernels)
        )
    ]
    both = [one for one in texts if "are rescaled; or, which no output distinguishes" in one]
    assert any("maxima of the parts are read" in one for one in both)
    assert len(both) < len(texts)
