"""The page of the findings of a check: each finding has an X-ray, or the reason why not."""

import dataclasses
from pathlib import Path

import pytest
from helpers import faulty_attention
from helpers.check_report import REPORT

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.kernels import find_backend
from attnlab.lab.lab import Lab
from attnlab.reports import check_pages
from attnlab.reports.pages import write_findings

KERNEL = f"{faulty_attention.__file__}:halved"
FINDING = Finding(
    op="context_attention_fwd",
    kind="wrong_output",
    case=Case(
        op="context_attention_fwd",
        num_heads=2,
        head_size=32,
        block_size=16,
        query_lens=(3,),
        ctx_lens=(20,),
        distribution="normal",
        backend=KERNEL,
    ),
    evidence="3 of 3 rows are wrong",
    diagnosis="unexplained",
)


@pytest.mark.parametrize(
    ("finding", "status", "reason"),
    [
        (FINDING, "described", ""),
        (dataclasses.replace(FINDING, kind="wrong_lse"), None, "does not concern"),
        (dataclasses.replace(FINDING, op="reshape_and_cache_flash"), None, "weighs no values"),
    ],
    ids=["output", "lse", "cache"],
)
def test_a_finding_has_an_xray_or_a_reason(
    finding: Finding, status: str | None, reason: str
) -> None:
    backend = find_backend(KERNEL, None, None)
    lab = Lab(device="cpu")
    found = check_pages._xray(lab, backend, finding)
    measured = found.get("xray")
    assert (measured and measured.status) == status
    assert reason in found.get("no_xray", "")
    if status:
        assert measured.description.text == "the output is multiplied by a further 1/2"
        assert found["light"] != found["dark"]


def test_the_page_states_the_rule(tmp_path: Path) -> None:
    backend = find_backend(KERNEL, None, None)
    parts = check_pages._xray(Lab(device="cpu"), backend, FINDING)
    picture = check_pages.Picture(finding=FINDING, kind="wrong", data="AAAA", **parts)
    write_findings(tmp_path / "index.html", REPORT, [picture], "attnlab check")
    page = (tmp_path / "index.html").read_text()
    assert "X-ray: described" in page
    assert "multiplied by a further 1/2" in page
    assert "prefers-color-scheme: dark" in page
