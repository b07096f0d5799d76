"""Defects of vLLM's history: each variant of the hostile cases finds the defect that it is for."""

import base64
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import refused
from helpers.commands import document
from helpers.plugins import RIGHT, faults_of_cases, planted
from helpers.sources import needs_triton
from helpers.triton_example import CASE

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.checker.case_check import check_case
from attnlab.checker.finding import Finding
from attnlab.cli.main import main
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.reference import Rounding
from attnlab.tensors.case_call import flash, presented, strided

pytestmark = needs_triton

LENS = {"query_lens": (1, 34, 2), "ctx_lens": (79, 62, 126), "num_blocks": None}
SMALL = CASE.replace(sm_scale=0.125, fill="all_rows", **LENS)
WINDOW = SMALL.replace(sliding_window=20, freed="empty")  # no tail within a block
LOW = SMALL.replace(
    sliding_window=3,
    sm_scale=60.0,
    num_queries_per_kv=1,
    query_lens=(40, 9, 1),
    ctx_lens=(21, 60, 47),
)


@pytest.mark.parametrize("strides", ["fused", "HND"])
def test_strides_do_not_change_values(strides: str) -> None:
    """The values are equal at other addresses, with gaps between the cache's blocks."""
    call = Lab().call(SMALL.replace(kv_layout=strides))
    other = strided(call)
    for name in ("query", "key", "value", "key_cache", "value_cache"):
        one, two = getattr(call, name), getattr(other, name)
        assert one.is_contiguous()
        assert not two.is_contiguous()
        assert torch.equal(one.view(torch.int16), two.contiguous().view(torch.int16))
    key = torch.arange(2 * 16 * 3 * 8.0).view(2, 16, 3, 8)
    laid = flash(key, key + 1, strides)
    assert torch.equal(laid[0], key)
    assert torch.equal(laid[1], key + 1)
    assert laid[0].stride(0) == 2 * key.stride(0)
    assert (laid[0].stride(1) < laid[0].stride(2)) == (strides == "HND")


def test_padding_follows_the_batch() -> None:
    """Padding is NaN tokens and empty sequences; the batch itself is unchanged."""
    call = Lab().call(SMALL.replace(pad_batch=3))
    padded = presented(call)
    assert len(padded.query) == len(padded.output) == len(call.query) + 3
    assert padded.query[len(call.query) :].isnan().all()
    assert torch.equal(padded.query[: len(call.query)], call.query)
    assert padded.query_start_loc.tolist() == [*call.query_start_loc.tolist(), 37, 37, 37]
    assert padded.seq_lens.tolist()[-3:] == [0, 0, 0]
    assert len(padded.block_table) == 6


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_layout": "HND", "op": "context_attention_fwd"}, "kv_layout"),
        ({"kv_layout": "wide"}, "kv_layout"),
        ({"pad_batch": -1}, "pad_batch"),
        (
            {
                "pad_batch": 1,
                "backend": "rocm",
                "op": "chunked_prefill_paged_decode",
                "platform": "gfx942",
            },
            "pad_batch",
        ),
    ],
)
def test_a_wrong_layout_names_its_field(changes: dict[str, object], field: str) -> None:
    with refused(field):
        SMALL.replace(**changes)


def test_products_without_tensor_cores_are_rounded() -> None:
    """decode_attention_fwd multiplies without tl.dot if and only if the GQA ratio is 1."""
    case = SMALL.replace(op="decode_attention_fwd", query_lens=(1, 1, 1))
    rounding = {}
    for group in (1, 2):
        one = case.replace(num_queries_per_kv=group)
        rounding[group] = Rounding.of(Lab().call(one), Target.of(one), decide(one).kernels)
    assert (rounding[1].products, rounding[2].products) == (1 + 5, 0)
    sizes = (1.0, 1.0, 32, 1.0, 0.0)
    grown = rounding[1].score_error(*sizes) - rounding[2].score_error(*sizes)
    assert grown == pytest.approx(6 * rounding[1].unit)


def found(source: Source, case: Case) -> list[Finding]:
    """Return the findings of a Case on a release."""
    backend = find_backend("vllm", source.path, "cpu")
    case = case.replace(backend="vllm", release=backend.release)
    lab = Lab(source=source.path, device="cpu")
    return [one for one in check_case(lab, backend, case) if one.is_fault]


def kinds_found(source: Source, case: Case) -> set[tuple[str, str]]:
    """Return kind and diagnosis of the findings of a Case on a release."""
    return {(one.kind, one.diagnosis) for one in found(source, case)}


LEAK = ("reads_freed_blocks", "empty blocks")


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (WINDOW, {LEAK}, set()),
        (WINDOW.replace(op="context_attention_fwd"), {LEAK}, {LEAK}),
        (LOW, {("wrong_output", "described")}, set()),
        (
            SMALL.replace(op="merge_attn_states", pad_batch=4),
            {("wrong_output", "both parts empty")},
            set(),
        ),
        (
            SMALL.replace(op="decode_attention_fwd", query_lens=(1, 1, 1), kv_layout="fused"),
            {("wrong_output", "strides ignored")},
            set(),
        ),
        (SMALL.replace(num_heads=40, num_queries_per_kv=20), set(), set()),
        (
            SMALL.replace(
                op="decode_attention_fwd",
                num_heads=40,
                num_queries_per_kv=20,
                query_lens=(1, 1),
                ctx_lens=(40, 5),
            ),
            {("wrong_output", "kv_head_by_tile")},
            {("wrong_output", "kv_head_by_tile")},
        ),
        (SMALL.replace(op="reshape_and_cache_flash", fill=None, pad_batch=4), set(), set()),
        (SMALL.replace(kv_layout="HND"), set(), set()),
    ],
    ids=[
        "window",
        "prefill window",
        "low scores",
        "merge",
        "decode",
        "ratio",
        "decode ratio",
        "write",
        "HND",
    ],
)
def test_releases(source: Source, case: Case, old, new) -> None:
    """The expected findings of each release follow from its source."""
    assert kinds_found(source, case) == (new if source.rules == "0.33.0" else old)


def test_a_documented_limit_is_not_a_finding(source: Source) -> None:
    """The cache write of 0.11.2 asserts contiguous heads; that of 0.33.0 accepts other strides."""
    case = SMALL.replace(op="reshape_and_cache_flash", fill=None, kv_layout="HND")
    if source.rules == "0.33.0":
        assert kinds_found(source, case) == set()
        return
    with pytest.raises(Unavailable, match="only continous heads"):
        kinds_found(source, case)


@pytest.mark.slow
def test_pages_of_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page contains a picture of each finding, or states that there are none."""
    wrong = RIGHT.replace("repeat_interleave(group, 1)", "repeat(1, group, 1)")
    (tmp_path / "mine.py").write_text(wrong)
    drawn = tmp_path / "drawn"
    one_case = ("--cases", "1", "--engine", "local:1", "--pictures", str(drawn))
    assert main(["check", f"{tmp_path}/mine.py:my_attention", *one_case]) == 1
    assert f"{drawn}/index.html" in capsys.readouterr().out
    (png,) = drawn.glob("*.png")
    data = png.read_bytes()
    assert png.name == "01-unified_attention-wrong_output.png"
    assert data.startswith(b"\x89PNG")
    page = (drawn / "index.html").read_text()
    assert base64.b64encode(data).decode() in page
    for words in ("kv_head_modulo", "attnlab run --op unified_attention", "Not covered"):
        assert words in page
    assert "<script" not in page
    found = document(capsys, ["check", "--op", "merge_attn_states", *one_case], 0)
    assert found["pictures"] == f"{drawn}/index.html"
    assert "No findings." in (drawn / "index.html").read_text()


def test_a_picture_shows_where(tmp_path: Path) -> None:
    """The plotted errors are in the heads with the fault and nowhere else."""
    from attnlab.reports.check_pages import errors_of

    wrong = RIGHT.replace("repeat_interleave(group, 1)", "repeat(1, group, 1)")
    backend = planted(tmp_path, wrong)
    (finding,) = faults_of_cases(backend, 1)
    errors = errors_of(Lab(), backend, finding.case, finding)
    assert {place.heads for place in errors.places()} == {(1, 2)}  # of 4, on 2 KV heads


def test_no_pictures_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the check starts, one line names the missing package or the wrong folder."""
    (tmp_path / "file").write_text("")
    assert main(["check", "--pictures", str(tmp_path / "file")]) == 2
    assert "pictures must be a folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["check", "--pictures", str(tmp_path / "drawn")]) == 2
    assert "pip install 'attnlab[lab]'" in capsys.readouterr().err
