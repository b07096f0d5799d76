"""An atlas: one call of each known fault in releases of made-up libraries."""

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.sources import needs_triton

from attnlab.checker.atlas import (
    ANY_OP,
    AtlasPlan,
    KnownFault,
    atlas_plan,
    build_atlas,
    check_atlas,
    known_faults,
    merged_atlas,
    newest_findings,
    packaged_faults,
    read_faults,
)
from attnlab.checker.finding import Finding
from attnlab.checker.releases import releases_of
from attnlab.defects import DEFECTS
from attnlab.linear.state_check import check_states
from attnlab.reports.check_pages import write_releases
from attnlab.reports.upstream import write_reports
from attnlab.tasks.store import Shard
from attnlab.tasks.task import InProcess

PREFILL, DECODE = "sglang_prefill_attention", "sglang_decode_attention"
# SGLang's prefill in torch, with a fault or without.
SOURCE = """
import torch


def context_attention_fwd(q, k, v, o, b_start_loc, b_seq_len, max_input_len, is_causal=True):
    for start, length in zip(b_start_loc.tolist(), b_seq_len.tolist()):
        rows = slice(start, start + length)
        group = q.shape[1] // k.shape[1]
        key, value = (one[rows].float().repeat_interleave(group, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), key) * q.shape[2] ** -0.5{fault}
        hidden = torch.ones(length, length).triu(1).bool() if is_causal else torch.zeros(1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        o[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(o.dtype)
"""
CALL = {
    **{"num_heads": 6, "num_queries_per_kv": 2, "head_size": 16, "block_size": 16},
    **{"query_lens": [3, 5], "ctx_lens": [0, 0], "distribution": "normal", "fill": "all_rows"},
    **{"empty_slots": "zeros", "reference_dtype": "float64", "sm_scale": None},
}


def known(name: str, **calls: dict[str, object]) -> KnownFault:
    """Return a defect of the catalogue with calls."""
    return KnownFault(
        kind="wrong_output",
        diagnosis=name,
        title=name,
        family=DEFECTS[name].family,
        calls={op: [fields] for op, fields in calls.items()},
    )


@pytest.fixture
def plan(tmp_path: Path) -> AtlasPlan:
    """Return the plan of two faults in a wrong release, in the repaired one, and in one without the op."""
    paths = {}
    for version, fault in (("1.0.0", " * 2"), ("1.1.0", ""), ("1.2.0", None)):
        folder = tmp_path / version / "sglang/srt/layers/attention/triton_ops"
        folder.mkdir(parents=True)
        name = "merge_state" if fault is None else "prefill_attention"
        (folder / f"{name}.py").write_text(SOURCE.replace("{fault}", fault or ""))
        paths[f"sglang {version}"] = tmp_path / version
    return AtlasPlan(
        releases=tuple(releases_of(paths, "cpu", "sglang")),
        ops=(PREFILL, DECODE),
        platforms={PREFILL: "sm_90", DECODE: "sm_90"},
        faults=(
            known("scale_doubled", **{PREFILL: CALL}),
            known("alibi_ignored", **{PREFILL: {**CALL, "alibi": True}}),
            known("causal_top_left", **{PREFILL: {**CALL, "query_lens": [4], "ctx_lens": [0]}}),
        ),
    )


def states(table) -> dict[str, str]:
    """Return the first letters of the cells of each fault."""
    return {
        fault.finding.diagnosis: "".join(state[0] for state in fault.cells.values())
        for fault in table.faults
    }


@needs_triton
def test_a_fault_is_found_where_it_is_and_only_there(plan, tmp_path):
    """The wrong release is faulty, the repaired one sound, one without the op not applicable; a call that
    shows another fault is not called sound. A store continues, and its merge gives the same table."""
    out = tmp_path / "store"
    assert check_atlas(plan, InProcess(), out=out, stop=lambda: True).exit_code == 3
    table = check_atlas(plan, InProcess(), out=out)
    assert states(table) == {
        "scale_doubled": "fsa",
        "alibi_ignored": "aaa",
        "causal_top_left": "osa",
    }
    (run,) = (one for one in table.faults[0].runs if one.state == "finding")
    assert (run.op, run.releases) == (PREFILL, ("sglang 1.0.0",))
    assert "rows are wrong; the largest absolute error" in run.text
    assert run.command.startswith(f"attnlab run --op {PREFILL} ")
    why = [one.text for one in table.faults[1].runs if one.state == "absent"]
    assert f"alibi must be false with {PREFILL}, got True" in why
    (found,) = newest_findings(dataclasses.replace(table, releases=["sglang 1.0.0"])).values()
    assert {one.diagnosis for one in found} == {"scale_doubled"}
    again = check_atlas(plan, InProcess(), out=out, stop=lambda: True)
    assert again.faults == table.faults

    header = json.loads((out / "header.json").read_text())
    lines = (out / "outcomes.jsonl").read_text().splitlines()
    from attnlab.tasks.task import Outcome

    outcomes = {one["key"]: Outcome(**one) for one in map(json.loads, lines)}
    assert merged_atlas(header, outcomes).to_dict()["faults"] == table.to_dict()["faults"]
    some = dict([*outcomes.items()][:1])
    left = build_atlas(header, plan.tasks(), some, seconds=0, stopped="the time was up")
    assert left.not_run
    assert "n" in "".join(states(left).values())

    write_releases(tmp_path / "page.html", table)
    page = (tmp_path / "page.html").read_text()
    assert page.index("in earlier releases") < page.index("in no release: scores")
    assert "Right in sglang_prefill_attention (sglang 1.1.0)" in page


def test_shards_divide_the_calls(plan):
    """Two releases have the op, and each has two calls: one of three is refused."""
    tasks = plan.tasks()
    parts = [Shard(index=i, count=2).of(tasks) for i in (1, 2)]
    assert sorted(one.key for part in parts for one in part) == sorted(one.key for one in tasks)
    assert len(tasks) == 4


def test_a_status_says_nothing_about_another_op():
    """An unexplained output is a fault that a check found only where the check found it."""
    fault = dataclasses.replace(
        known("kv_head_by_tile", **{ANY_OP: CALL, DECODE: CALL}), found_in=(DECODE,)
    )
    seen = Finding(
        op=PREFILL,
        kind="wrong_output",
        case=next(iter(packaged_faults())).case,
        evidence="",
        diagnosis="unexplained",
    )
    assert not fault.is_shown(seen, is_own_call=True)
    assert fault.is_shown(dataclasses.replace(seen, op=DECODE), is_own_call=True)
    assert not fault.is_shown(dataclasses.replace(seen, op=DECODE), is_own_call=False)
    assert fault.is_shown(dataclasses.replace(seen, diagnosis="kv_head_by_tile"), is_own_call=False)
    assert fault.calls_at("reshape_and_cache_flash") == []
    assert fault.calls_at(PREFILL) == [CALL]


def test_every_packaged_fault_has_a_row():
    """Findings of one name in several ops are one fault; a defect keeps its place in the catalogue."""
    found = packaged_faults()
    faults = known_faults(found, {}, {})
    assert len({(one.kind, one.diagnosis, str(one.calls)) for one in faults}) == len(faults)
    for one in found:
        if len(one.names) == 1:  # also if it is not confirmed
            one = dataclasses.replace(one, diagnosis=one.names[0])
        assert [fault for fault in faults if fault.is_shown(one, is_own_call=True)], one.title
    tile = next(one for one in faults if one.diagnosis == "kv_head_by_tile")
    assert {"decode_attention_fwd", DECODE, "lmdeploy_paged_attention"} <= {*tile.found_in}


@needs_triton
def test_a_defect_gets_the_plainest_call_that_shows_it(plan):
    """The calls of the catalogue are chosen for the ops that the newest releases have."""
    found = atlas_plan(plan.releases[:2])
    calls = {one.diagnosis: one.calls.get(PREFILL) for one in found.faults}
    (call,) = calls["scale_doubled"]
    assert "empty_slots" not in call  # zeros
    assert not {"sinks", "alibi", "sliding_window", "softcap"} & {*call}
    assert calls["alibi_ignored"] is None
    assert found.ops == (PREFILL,)


def test_a_file_that_is_no_document_is_refused(tmp_path):
    """One line that names the flag."""
    file = tmp_path / "faults.json"
    for text in ("", "[]", '{"faults": [{}]}'):
        file.write_text(text)
        with pytest.raises(Exception, match="faults must be a JSON document of check, releases"):
            read_faults(file)


def test_the_numbers_of_the_kept_atlas():
    """The how-to has the counts of docs/atlas.json; every current fault has its numbers and a command."""
    docs = Path(__file__).parents[2] / "docs"
    table = json.loads((docs / "atlas.json").read_text())
    text = (docs / "howto/atlas.md").read_text()
    libraries = {version.split()[0]: version for version in table["releases"]}
    for state in ("finding", "sound", "other fault", "absent"):
        counts = []
        for library, newest in libraries.items():
            of = [version for version in table["releases"] if version.split()[0] == library]
            shown = [of, [newest]] if len(of) > 1 else [of]
            counts += [
                sum(one["cells"][version] == state for one in table["faults"] for version in some)
                for some in shown
            ]
        assert f"| {state} | {' | '.join(map(str, counts))} |" in text
    found = [one for one in table["faults"] if one["first"]]
    newest = {*libraries.values()}
    earlier = [
        one for one in found if not newest & {v for v, s in one["cells"].items() if s == "finding"}
    ]
    assert f"{len(found)} faults are in one of these releases, {len(earlier)} of them" in text
    assert f"{len(table['faults'])} faults" in text
    for run in (run for one in found for run in one["runs"] if run["state"] == "finding"):
        assert run["text"]
        assert run["command"].split()[1] in ("run", "linear", "horizon")


LINEAR = "vllm_linear_decode"
# vLLM's decode of lightning attention in torch, with a fault or without.
LINEAR_SOURCE = """
import torch


def linear_decode_forward_triton(q, k, v, kv_caches, slope_rate, slot_idx, BLOCK_SIZE=32):
    output = torch.zeros_like(q)
    for i, slot in enumerate(slot_idx.tolist()):
        if slot < 0:
            continue
        state = kv_caches[slot] * torch.exp(-slope_rate.float().view(-1, 1, 1)){fault}
        state += torch.einsum("hd,he->hde", k[i, :, 0].float(), v[i, :, 0].float())
        kv_caches[slot] = state
        output[i, :, 0] = torch.einsum("hd,hde->he", q[i, :, 0].float(), state).to(q.dtype)
    return output.transpose(1, 2).reshape(len(q), -1)
"""


@needs_triton
def test_linear_attention_has_rows_and_cells(tmp_path):
    """A finding of a check of linear attention is a row; a release is faulty where its call is wrong, and its
    text has the script. A release whose op raises is not called sound."""
    paths = {}
    for version, fault in (("1.0.0", " * 1.5"), ("1.1.0", ""), ("1.2.0", ".no_such")):
        folder = tmp_path / version / "vllm/model_executor/layers"
        folder.mkdir(parents=True)
        (folder / "lightning_attn.py").write_text(LINEAR_SOURCE.replace("{fault}", fault))
        paths[f"vllm_linear {version}"] = tmp_path / version
    releases = releases_of(paths, "cpu", "vllm_linear")
    report = check_states("vllm_linear", tmp_path / "1.0.0", ops=[LINEAR])
    document = tmp_path / "check.json"
    document.write_text(json.dumps(report.to_dict()))
    found = read_faults(document)
    assert found
    plan = atlas_plan(releases, faults=found)
    assert LINEAR in plan.ops
    table = check_atlas(plan, InProcess())
    title = next(iter(found)).title
    (row,) = [one for one in table.found if one.finding.title == title]
    assert [*row.cells.values()] == ["finding", "sound", "other fault"]
    run = next(one for one in row.runs if one.state == "finding")
    assert run.command.startswith(f"attnlab linear --op {LINEAR}")
    write_releases(tmp_path / "page.html", table)
    texts = write_reports([row.finding], tmp_path / "r", "1", "cpu", releases[0].backend)
    assert {one.suffix for one in texts} == {".md", ".py"}


# vLLM's merge of partial results, which gives the mean; its kernel has an int32 address, or none.
MERGE_SOURCE = """
import torch
from vllm.triton_utils import tl, triton


def merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
    output.copy_((prefix_output + suffix_output) / 2)


@triton.jit
def merge_attn_states_kernel(output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse,
                             prefix_head_stride, output_head_stride, HEAD_SIZE: tl.constexpr):
    token = tl.program_id(0){cast}
    at = token * tl.num_programs(1) * output_head_stride + tl.program_id(1) * output_head_stride
    tl.store(output + at + tl.arange(0, HEAD_SIZE), 0.0)
"""
MERGE = "merge_attn_states"


@needs_triton
def test_an_address_that_overflows_is_a_row(tmp_path):
    """The size is 2^31 elements of 32 heads of 128; a release with an int64 address is sound."""
    paths = {}
    for version, cast in (("0.32.0", ""), ("0.33.0", ".to(tl.int64)")):
        folder = tmp_path / version / "vllm/v1/attention/ops"
        folder.mkdir(parents=True)
        (folder / "triton_merge_attn_states.py").write_text(MERGE_SOURCE.replace("{cast}", cast))
        (tmp_path / version / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
        paths[f"vllm {version}"] = tmp_path / version
    call = {"query_lens": [3], "ctx_lens": [20], "num_heads": 2, "head_size": 32, "block_size": 16}
    plan = AtlasPlan(
        releases=tuple(releases_of(paths, "cpu")),
        ops=(MERGE,),
        platforms={MERGE: "sm_90"},
        faults=(known("scale_doubled", **{MERGE: call}),),
    )
    table = check_atlas(plan, InProcess())
    (row,) = [one for one in table.found if one.finding.kind == "int32_horizon"]
    assert [*row.cells.values()] == ["finding", "sound"]
    assert "with 524,289 tokens of a step" in row.runs[0].text
    assert "int32 address output + at" in row.finding.title
    command = row.runs[0].command
    assert command.startswith("attnlab horizon 0.32.0 --kernel merge_attn_states_kernel")
    write_releases(tmp_path / "page.html", table)
