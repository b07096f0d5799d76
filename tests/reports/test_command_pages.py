"""The page of each command with --html in a browser without a network: its size, console and layout."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import WIDTHS, layout_problems, offline_page
from helpers.saved_calls import PLAIN, WRONG, kernel_file

import attnlab
from attnlab.cli.main import main
from attnlab.serving.capture_state import Observation, RecordFile, Tally

pytestmark = pytest.mark.browser
CASE = ["--num-heads", "2", "--query-lens", "5,1", "--ctx-lens", "40,33"]
COMMANDS = {
    "diagnose": ["--kernel", "KERNEL", *CASE, "--no-location"],
    "check": ["KERNEL", "--cases", "3", "--engine", "local:1"],
    "replay": ["call.safetensors", "--kernel", "model", "--kernel", "KERNEL"],
    "shrink": ["call.safetensors", "--kernel", "KERNEL", "--seconds", "5"],
    "xray": ["--kernel", "KERNEL", *CASE, "--no-location", "--limit-s", "1"],
    "capture": ["--out", "found"],
    "matrix": [
        "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]",
        *("--stage", "int32_before_cumsum", "--num-heads", "2"),
        *("--draw-max-query-len", "20", "--draw-max-ctx-len", "20"),
    ],
    "decode-error": ["failure.txt", *CASE],
    "page": ["call.safetensors", "--kernel", "KERNEL", "--no-location", "--note", "since=0.9.0"],
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Write the page of each command about a wrong kernel."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        kernel = kernel_file(folder, WRONG, "mine")
        call = attnlab.run(attnlab.Case(**{**PLAIN, "backend": kernel})).recorded_call
        call.save(Path("call.safetensors"))
        Path("failure.txt").write_text("Greatest absolute difference: 1.6 at index (5, 0, 0)\n")
        Path("found").mkdir()
        text = "the output of request a at position 3 is off by 0.1"
        where = {"kind": "value", "layer": "layers.0", "step": 3, "request": "a"}
        facts = {"call": "../call.safetensors"}
        Tally(RecordFile(Path("found"))).observe([Observation(text=text, facts=facts, **where)])
        found = {}
        for name, words in COMMANDS.items():
            words = [name, *words, "--html", f"{name}.html"]
            words = [kernel if word == "KERNEL" else word for word in words]
            patch.setattr("sys.argv", ["attnlab", *words])
            assert main(words) in (0, 1), name
            found[name] = folder / f"{name}.html"
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_each_page_is_legible(pages: dict[str, Path], width: int, scheme: str) -> None:
    with offline_page(viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        for name, path in pages.items():
            page.goto(path.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            found = (name, page.asked, page.complaints, layout_problems(page))
            assert found == (name, [], [], [])


def test_each_page_is_small_and_has_a_picture(pages: dict[str, Path]) -> None:
    for name, path in pages.items():
        text = path.read_text()
        assert len(text) < 1_000_000, name
        assert f"attnlab {name}" in text
        assert "<figure" in text or 'id="weights"' in text, name
