"""The int32 horizons of a check: true findings, notes for larger sizes, and nothing for int64."""

import shutil
from pathlib import Path

import pytest
from helpers.sources import needs_triton, of_release

from attnlab.case.errors import InvalidCase
from attnlab.case.ops import DECODE_FWD, MERGE, OPS, PREFILL, TRITON_OPS, WRAPPER
from attnlab.checker.case_check import deployment_of, ops_with_files
from attnlab.checker.finding import BEYOND, HORIZON, Finding
from attnlab.checker.plan import Plan, is_case
from attnlab.checker.report import Report, check_library
from attnlab.horizon.survey import survey
from attnlab.kernels.model import ModelBackend
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.kernels.vllm.source import fetch_ops
from attnlab.reports.check_pages import sarif

pytestmark = [needs_triton, pytest.mark.releases]
# Of each file, the lines of 0.33.0 whose offsets a check found until 2026-11-25 with tensors beyond 2^31
# elements (docs/findings.md).
SIZES = ("tokens", "seqs", "element_stride", "row_stride")
LINES = {
    "prefix_prefill": {219, 220, 221, 96, 97, 98, 116, 117, 593, 594},
    "triton_prefill_attention": {90, 91},
    "triton_unified_attention": {478, 484, 506, 507},
    "triton_decode_attention": {113, 131, 331, 343},
    "triton_merge_attn_states": {149, 188, 189, 195, 218},
}


def checked(path: Path, op: str, **options) -> Report:
    """Return the report of the horizons of an op alone."""
    backend = VllmBackend(path=path, requested_device="cpu")
    plan = Plan(backend=backend, ops=(op,), cases=1, **options)
    assert sum(not is_case(task) for task in plan.tasks()) == int(plan.horizon)
    return check_library(plan)


def horizons(report: Report) -> list[Finding]:
    return [one for one in (*report.findings, *report.observations) if one.horizon]


@pytest.mark.parametrize("name", LINES)
def test_the_horizon_finds_the_lines_of_far_tensors(name: str) -> None:
    source = VllmBackend(path=of_release("0.33.0").path, requested_device="cpu").source
    found = survey(source.root, files=[source.op_file(name)], is_assuming=False, sizes=SIZES)
    lines = {one.site.line for kernel in found.kernels for one in kernel.statements if one.access}
    assert LINES[name] <= lines
    assert found.not_run == []


def test_a_size_that_fits_is_a_finding_with_a_line_and_int64_is_silent(tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    shutil.copytree(of_release("0.33.0").root / "vllm", folder)
    report = checked(tmp_path, MERGE)
    (one,) = [found for found in horizons(report) if found.is_fault]
    assert (one.kind, one.diagnosis) == (
        HORIZON,
        "merge_attn_states_kernel: 524,289 tokens of a step",
    )
    assert report.exit_code == 1
    assert report.cases == 1  # a horizon is no case
    place = report.location(one)
    assert (Path(place.file).name, place.line) == ("triton_merge_attn_states.py", 186)
    assert one.command.startswith(f"attnlab horizon {tmp_path} --kernel merge_attn_states_kernel")
    (result,) = [r for r in sarif(report)["runs"][0]["results"] if r["ruleId"] == HORIZON]
    assert result["locations"]
    file = next(folder.rglob("triton_merge_attn_states.py"))
    text = file.read_text()
    assert "token_idx = tl.program_id(0)" in text
    wide = "token_idx = tl.program_id(0).to(tl.int64)"
    file.write_text(text.replace("token_idx = tl.program_id(0)", wide))
    assert [found for found in horizons(checked(tmp_path, MERGE)) if found.is_fault] == []
    assert horizons(checked(tmp_path, MERGE, horizon=False)) == []


def test_a_size_that_does_not_fit_is_a_note() -> None:
    found = horizons(checked(fetch_ops("0.9.0"), PREFILL))
    notes = [one.diagnosis for one in found if one.kind == BEYOND]
    assert notes == ["_fwd_kernel: 131,073 blocks", "_fwd_kernel_alibi: 131,073 blocks"]
    assert horizons(checked(of_release("0.33.0").path, "unified_attention")) == []


def test_which_kernels_and_which_deployment_count() -> None:
    assert ops_with_files(WRAPPER, TRITON_OPS) == [WRAPPER]
    assert ops_with_files(WRAPPER, (WRAPPER,)) == [WRAPPER, PREFILL]
    for op in (DECODE_FWD, MERGE):
        one = deployment_of(op)
        needed = one.limits["blocks"] * one.block_size * one.token_bytes + one.weights * 10**9
        assert needed <= one.gpu_memory * 10**9
        assert one.limits["tokens"] * 2 <= one.limits["slots"]
        assert one.limits["seqs"] == one.limits["blocks"]
    models = Plan(backend=ModelBackend(rules="0.33.0"), ops=(MERGE,), cases=1)
    assert all(map(is_case, models.tasks()))


@pytest.mark.parametrize("name", ["far_rows", "int8_far_slots_per_token_head", "far_values"])
def test_a_former_op_argument_names_what_replaces_it(name: str) -> None:
    from attnlab.case.case import Case

    new = "it is now spaced_values" if name == "far_values" else "attnlab horizon"
    with pytest.raises(InvalidCase, match=new):
        Case(op=next(iter(OPS)), op_argument=name)
