"""The close-up of a page: which steps are marked, what is stated, and the page in a browser."""

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.browser import layout_problems, offline_page

import attnlab
from attnlab.cli.demo import RIGHT, WRONG, plant
from attnlab.lab.lab import Lab
from attnlab.reports.close_up import TracedRun, close_up, runs_of, trace_run
from attnlab.reports.shared_page import page_of
from attnlab.weights.conclude import xray

CASE = attnlab.Case(
    op="unified_attention", num_heads=4, num_queries_per_kv=2, head_size=16, block_size=16,
    query_lens=(5, 1), ctx_lens=(40, 64), distribution="normal",
)  # fmt: skip
ROW, HEAD = 5, 1  # the decode of sequence 1, which has three steps


def traced(folder: Path, old: str, new: str, *, with_xray: bool) -> TracedRun:
    """Plant an edit in the right kernel of the demo, and run it."""
    path, _ = plant(folder)
    text = path.read_text().replace(WRONG, RIGHT)
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    lab, case = Lab(), CASE.replace(backend=f"{path}:paged_attention")
    run = trace_run(lab, case)  # which measures the weights if the output is wrong
    if with_xray and run.xray is None:
        run = dataclasses.replace(run, xray=xray(case, lab=lab, confirm=False))
    return run if with_xray else dataclasses.replace(run, xray=None)


@pytest.mark.parametrize(
    ("old", "new", "with_xray", "marks", "why"),
    [
        (RIGHT, WRONG, False, 3, "it reads KV head 1, not 0"),
        ("seq * table_stride", "0 * table_stride", False, 3, "other sequence"),
        ("mixed * rescale[:, None]", "mixed", True, None, "times what is right"),
        ("position[:, None]\n", "position[:, None] - 1\n", True, 1, "a key that must have a weight has none"),
        ("KEYS = 16, 32", "KEYS = 16, 32", True, 0, ""),
    ],
    ids=["KV head", "another sequence", "no rescale", "mask", "right"],
)  # fmt: skip
def test_the_faulty_steps_are_marked(
    tmp_path: Path, old: str, new: str, with_xray: bool, marks: int | None, why: str
) -> None:
    found = close_up(traced(tmp_path, old, new, with_xray=with_xray))
    cell = found["cells"][f"{ROW},{HEAD}"]
    marked = [text for _, text, _ in cell["steps"] if text]
    assert len(cell["steps"]) == 3
    assert len(marked) == marks if marks is not None else 0 < len(marked) < 3
    assert all(why in text for text in marked)
    assert cell["unread"] == ([[0, 64]] if why == "other sequence" else [])
    assert bool(cell["wrong"]) == (old != new)


def test_positions_that_no_step_reads_are_stated(tmp_path: Path) -> None:
    run = traced(
        tmp_path, "range(0, seq_len, KEYS)", "range(0, seq_len - KEYS, KEYS)", with_xray=False
    )
    found = close_up(run)
    assert len(found["cells"][f"{ROW},{HEAD}"]["steps"]) == 2
    assert found["cells"][f"{ROW},{HEAD}"]["unread"] == []  # 64 of its keys are in two tiles
    assert found["cells"][f"0,{HEAD}"]["unread"] == [[32, 8]]


def test_the_numbers_are_those_of_the_run_and_bounded(tmp_path: Path) -> None:
    case = CASE.replace(query_lens=(200, 1), num_heads=24, num_queries_per_kv=2, head_size=128)
    lab = Lab()
    found = close_up(trace_run(lab, case.replace(stage="int32_before_cumsum")))
    assert found is not None
    assert len(json.dumps(found)) < 600_000
    tokens, of_tokens, heads, of_heads = found["of"]
    assert (of_tokens, of_heads) == (201, 24)
    assert len(found["cells"]) == tokens * heads
    row, head = map(int, next(iter(found["cells"])).split(","))
    expected = lab.reference(case)[row, head].tolist()
    assert found["cells"][f"{row},{head}"]["right"] == pytest.approx(expected, rel=1e-3)
    assert found["tokens"][0]["sees"] == [[0, 40 + 1 + found["tokens"][0]["token"]]]
    assert runs_of([1, 2, 5]) == [[1, 2], [5, 1]]


# The colours of a map of weights, so that a change of what is drawn shows.
PIXELS = "(canvas) => canvas.toDataURL()"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the page of a diagnosis with an X-ray, and that of the X-ray alone."""
    folder = tmp_path_factory.mktemp("pages")
    run = traced(folder, "mixed * rescale[:, None]", "mixed", with_xray=True)
    assert run.xray is not None
    diagnosis = attnlab.diagnose(CASE.replace(stage="int32_before_cumsum"))
    found = {"diagnosis": folder / "page.html", "xray": folder / "xray.html"}
    page_of(diagnosis, "x", run=run).write(found["diagnosis"])
    page_of(run.xray, "x").write(found["xray"])
    assert all(path.stat().st_size < 1_000_000 for path in found.values())
    return found


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light"), (1920, "dark")])
def test_the_close_up_is_legible(pages: dict[str, Path], width: int, scheme: str) -> None:
    with offline_page(viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        for path in pages.values():
            page.goto(path.as_uri())
            assert page.is_visible("#weights canvas")
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert (page.asked, page.complaints) == ([], [])
            assert layout_problems(page) == []


@pytest.mark.browser
def test_the_close_up_is_used_with_the_keyboard(pages: dict[str, Path]) -> None:
    """Pick a head, step through the reads, toggle what is shown, and move in the map of weights."""
    with offline_page(viewport={"width": 1280, "height": 900}) as page:
        page.goto(pages["diagnosis"].as_uri())
        page.click(".pictures g[data-at='5,1']")
        assert page.input_value("#head") == "1"
        assert page.locator("#token option:checked").inner_text().startswith("sequence 1, token 0")
        assert page.locator(".steps .marked").count() > 0
        page.focus(".steps [aria-current]")
        page.keyboard.press("Home")
        assert "Step 1" in page.inner_text(".step")
        page.keyboard.press("ArrowRight")
        assert "Step 2" in page.inner_text(".step")
        assert "k = tl.load(key_cache" in page.inner_text(".step")
        bars, cells = page.inner_html("#values svg"), page.eval_on_selector("canvas", PIXELS)
        page.check("input[value=difference]")
        assert page.inner_html("#values svg") != bars
        assert page.eval_on_selector("canvas", PIXELS) != cells
        page.focus("canvas")
        before = page.inner_text(".place")
        page.keyboard.press("ArrowRight")
        assert page.inner_text(".place") != before
        page.select_option("#head", "0")
        assert "head 0 is of KV head 0" in page.inner_text("#facts")
