"""Coverage of arguments: what did not occur is listed, unless there is a reason; no parameter is unknown."""

import inspect

import pytest
import torch
from helpers.sources import of_release

from attnlab.case import op_arguments as case_arguments
from attnlab.case.ops import OPS, TRITON_OPS, UNIFIED
from attnlab.checker.coverage import parameter_uses
from attnlab.checker.hostile import hostile_cases, launches
from attnlab.checker.library import check_library
from attnlab.checker.plan import Plan
from attnlab.checker.variants import DEFAULT_CASES
from attnlab.kernels import find_backend
from attnlab.kernels.triton.coverage import measuring
from attnlab.kernels.vllm import op_arguments as vllm_arguments
from attnlab.kernels.vllm.features import op_functions
from attnlab.kernels.vllm.op_arguments import argument_facts, with_gaps

RELEASES = ("0.11.2", "0.33.0")


def parameters(version: str, op: str) -> tuple[str, ...]:
    """Return the parameters of an op of a release."""
    found = op_functions(of_release(version), op)
    return next(one.parameters for one in found if one.name == OPS[op].function)


def op(q, block_table, *, softcap=0, causal=True):
    """Stand for an op."""


def facts(**arguments):
    return argument_facts(op, arguments)


def test_facts_of_a_call():
    cache = torch.zeros(3, 4, 5)
    found = facts(q=cache[:, :, :2], block_table=torch.zeros(1, 2).int(), softcap=2.0)
    assert found["q"] == ["dtype float32", "dim 2", "dim 1", "stride 1", "dim 0", "stride 0"]
    assert found["block_table"] == ["dtype int32", "dim 1"]
    assert (found["softcap"], found["causal"]) == (["value 2.0"], ["value True"])


def test_what_did_not_occur_is_listed():
    cases = [
        facts(q=torch.zeros(3, 4, 5), block_table=torch.zeros(2, 2).int()),
        facts(q=torch.zeros(3, 4, 8)[..., :5], block_table=torch.zeros(2, 2).int(), softcap=1.0),
    ]
    uses = {one.name: one for one in parameter_uses(UNIFIED, ("q", "block_table"), cases)}
    assert uses["q"].gaps == ()
    assert any(reason.startswith("stride 2") for reason in uses["q"].reasons)
    assert set(uses["block_table"].gaps) == {
        "stride 0 is that of a contiguous tensor",
        "never int64",
    }
    uses = {one.name: one for one in parameter_uses(UNIFIED, ("softcap", "causal"), cases)}
    assert uses["softcap"].gaps == ()
    assert uses["causal"].gaps == ("one value only",)
    (unread,) = parameter_uses(UNIFIED, ("max_seqlen_k",), [])
    assert (unread.gaps, len(unread.reasons)) == ((), 1)


@pytest.mark.parametrize("used", [1, 2, 3])
def test_tensors_with_other_strides(used):
    tensor = torch.randn(3, 4, 8)
    gaps = with_gaps(tensor, used)
    assert torch.equal(gaps, tensor)
    contiguous = tensor.stride()
    assert [gaps.stride(i) != contiguous[i] for i in range(3)] == [i < used for i in range(3)]


@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("op", TRITON_OPS)
def test_every_parameter_is_passed_or_has_a_reason(version, op):
    """Those that the lab binds, those of op arguments, and those with a reason; nothing else."""
    if version not in OPS[op].releases:
        pytest.skip(f"{version} does not have the op")
    argued = inspect.getsource(case_arguments) + inspect.getsource(vllm_arguments)
    for name in parameters(version, op):
        is_stated = name in OPS[op].arguments or OPS[op].why_neutral(name)
        assert is_stated or f'"{name}"' in argued, name


@pytest.mark.releases
def test_the_tables_name_parameters_that_exist():
    for name in TRITON_OPS:
        op = OPS[name]
        stated = {*op.neutral, *op.index_dtypes, *op.strides, *op.writes}
        assert stated <= set(parameters("0.33.0", name))


def layout_gaps(op, is_left_out=lambda case: False):
    """Return the strides and index dtypes that no call of an op has, by parameter.

    The op is called with the Cases for layouts, but no program of a kernel runs.
    """
    source, facts = of_release("0.33.0"), []
    backend = find_backend("vllm", source.path, "cpu")
    for case in hostile_cases(backend, op, "sm_90", DEFAULT_CASES, 0):
        argument = case.argument
        is_about_layout = argument.name == "gaps" or argument.cache
        is_index = case.stage == "int64" or case.mask in ("ranges", "tree", "prefix_and_window")
        if (is_about_layout or is_index) and not is_left_out(case):
            with measuring() as measured:
                launches(backend, case)
            facts.append({name: sorted(found) for name, found in measured.arguments.items()})
    uses = parameter_uses(op, parameters("0.33.0", op), facts)
    gaps = {use.name: [gap for gap in use.gaps if gap != "one value only"] for use in uses}
    return {name: found for name, found in gaps.items() if found}


@pytest.mark.releases
@pytest.mark.parametrize("op", TRITON_OPS)
def test_every_stride_and_index_dtype_occurs_or_has_a_reason(op):
    assert layout_gaps(op) == {}


@pytest.mark.releases
def test_a_stride_that_no_case_changes_is_a_gap():
    without = layout_gaps("decode_attention_fwd", lambda case: case.op_argument == "gaps")
    assert "stride 2 is that of a contiguous tensor" in without["k_buffer"]


@pytest.mark.releases
@pytest.mark.slow
def test_all_cases_of_an_op_leave_no_gap():
    """Every line and branch of the cache write, every parameter and stride."""
    backend = find_backend("vllm", of_release("0.33.0").path, "cpu")
    plan = Plan(backend=backend, ops=("reshape_and_cache_flash",), coverage=True)
    report = check_library(plan)
    (found,) = report.coverage.values()
    assert found.missing == found.outdated == []
    assert [one.name for one in found.parameters if one.gaps] == []
    assert found.lines.percent > 95
    few = check_library(
        Plan(backend=backend, ops=("reshape_and_cache_flash",), cases=6, coverage=True)
    )
    (found,) = few.coverage.values()
    assert found.missing
    assert {one.name for one in found.parameters if one.gaps} >= {"interleaved_v_pack_factor"}
