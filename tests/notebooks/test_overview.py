"""The overview lists every notebook, with a computed answer for each."""

import dataclasses
from pathlib import Path

import pytest
from helpers.notebooks import NOTEBOOKS, judged
from nbformat import v4, write

import study
from attnlab.case.case import Case
from attnlab.lab.lab import Lab, stage_table
from attnlab.reports.investigate import find_notebooks
from attnlab.show.sheets import html, sheet_of
from study.broken_kernel import is_available
from study.claims import FAILS, HOLDS, LEDGER, Findings
from study.overview import _JUDGES, Chapters, read_chapters
from study.predictions import outcomes, predict_stages

ENGINE = ("C17", "C18")


@pytest.fixture(scope="module")
def ledger() -> Findings:
    """Judge the claims that the chapters use; the engine's claims are set without a run."""
    found = [judged(number) for number in ("C2", "C3", "C6", "C11", "C13")]
    engine = [
        dataclasses.replace(
            found[0], claim=one.claim, verdict=HOLDS, reading=f"read {one.claim.number}"
        )
        for one in LEDGER
        if one.claim.number in ENGINE
    ]
    return Findings([*found, *engine])


@pytest.fixture(scope="module")
def chapters(ledger: Findings) -> Chapters:
    return read_chapters(ledger, NOTEBOOKS)


def test_every_notebook_but_the_first_page_has_its_row(chapters: Chapters) -> None:
    files = [path.name for path in find_notebooks([], NOTEBOOKS)]
    assert files[0] == "00-start-here.ipynb"
    assert [one.notebook for one in chapters] == files[1:]
    assert {*_JUDGES} == {f"{number:02}" for number in range(1, 13)}
    assert {one.notebook[:2] for one in chapters if one.verdict} >= {*_JUDGES}
    assert all(one.question for one in chapters)


def test_facts_are_those_of_the_experiments(chapters: Chapters) -> None:
    by_number = {one.notebook[:2]: one for one in chapters}
    assert by_number["01"].facts == {
        "checked": ["block_table", "seq_lens"],
        "taken": ["query_start_loc"],
    }
    assert by_number["02"].facts == {"rejected": ["128, 1, 0"], "nonzero bytes": 0}
    assert by_number["03"].facts == {"violations": ["unwritten_slot"], "the test says": "match"}
    assert by_number["04"].facts == {"cause": "query_start_loc_as_int32"}
    assert by_number["06"].facts == {"C17": HOLDS, "C18": HOLDS}
    assert "scale_doubled" in by_number["07"].facts["pass"]
    assert by_number["07"].facts["zeros in FP8"] == "survived"
    assert by_number["08"].facts == {"rows": [0], "from sequences": [1]}
    assert by_number["09"].facts == {"cause": "window_plus_one"}
    rule = "the keys from the cache from position 0 to 31 are missing"
    assert by_number["10"].facts == {"rule": rule if is_available() else None}


def test_what_a_single_toggle_does(ledger: Findings) -> None:
    """An int32 tensor or another decode kernel fixes the failing stage; the cache does not."""
    _, facts = _JUDGES["05"][1]({})
    assert facts == {
        "fixes": ["query_start_loc_dtype=int32", "platform=sm_90"],
        "does not": ["fill=all_rows", "fill=decode_rows", "empty_slots=garbage"],
    }


def test_another_outcome_makes_other_facts(ledger: Findings) -> None:
    refused = dict.fromkeys(
        ("block_table", "seq_lens", "query_start_loc"), "expected scalar type Int but found Long"
    )
    changed = {"C2": {"evidence": refused}, "C17": {"verdict": FAILS}}
    changed["C11"] = {"evidence": {"cause": "unexplained", "predicted": 1.5, "observed": 1.6}}
    other = {
        one.claim.number: dataclasses.replace(one, **changed.get(one.claim.number, {}))
        for one in ledger
    }
    facts = {number: _JUDGES[number][1](other)[1] for number in ("01", "04", "06")}
    assert facts["01"]["taken"] == []
    assert facts["04"] == {"cause": "unexplained"}
    assert facts["06"]["C17"] == FAILS


def test_a_notebook_without_an_answer_is_listed(tmp_path: Path, ledger: Findings) -> None:
    cell = v4.new_markdown_cell("# What <if>?")
    for name in ("00-start-here.ipynb", "55-what-if & why.ipynb"):
        write(v4.new_notebook(cells=[cell]), tmp_path / name)
    (one,) = found = read_chapters(ledger, tmp_path)
    assert (one.question, one.verdict, one.facts) == ("What <if>?", "", {})
    assert '<a href="55-what-if%20%26%20why.ipynb">What &lt;if&gt;?</a>' in html(found)
    assert sheet_of(found).parts[0].rows[0][2].tone == "quiet"


@pytest.mark.parametrize("platform", ["gfx942", "sm_90", "gfx1100", "gfx90a"])
def test_contracts_predict_every_stage(platform: str) -> None:
    """Without a run: which stages are rejected, and how many elements stay unwritten."""
    lab = Lab()
    case = Case(num_heads=2, query_lens=(20, 1), ctx_lens=(40, 65), x=8, atol=1e-4)
    predicted = predict_stages(case, platform)
    assert predicted == outcomes(stage_table(lab, case, (platform,)), platform)
    rocm = platform in ("gfx942", "gfx90a")
    assert predicted == (["rejected", *[256] * 3, 0, 0, 0] if rocm else [0] * 7)


def test_every_name_that_notebooks_use_is_there() -> None:
    assert [name for name in study.__all__ if not hasattr(study, name)] == []
