"""Draw the pictures of the documentation.

- docs/find.png, of the README: a live fault of vLLM 0.33.0, as its page shows it. It needs Chromium, and the
  ops of the release (``attnlab fetch --ops 0.33.0``).
- docs/failure.png: the failing stage and the table of stages of vLLM #28490.
- docs/xray.png: the weights of a kernel whose causal mask admits one key too many.
- docs/server.png: the top of docs/capture.html. It needs Chromium.
"""

import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from attnlab.case.case import Case
from attnlab.lab.lab import Lab, stage_table
from attnlab.show.plots import plot_error, plot_stages, plot_weights
from attnlab.weights.conclude import xray
from attnlab.weights.xray import key_columns

ROOT = Path(__file__).parent.parent
SEED_ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"


FIND = {
    "op": "unified_attention",
    "num_heads": 2,
    "head_size": 32,
    "block_size": 16,
    "sliding_window": 3,
    "mask": "bidirectional",
    "query_lens": (6, 3),
    "ctx_lens": (10, 20),
    "distribution": "normal",
    "stage": "sound",
    "backend": "vllm",
}


def main() -> None:
    """Draw the pictures that the arguments name, or all."""
    draw = {"xray": draw_xray, "failure": draw_failure, "find": draw_find, "server": draw_server}
    for name in sys.argv[1:] or draw:
        draw[name]()


def draw_find() -> None:
    """Diagnose a fault of vLLM 0.33.0 and take a picture of the first half of its page.

    Of vLLM's source, the picture has the faulty line alone.
    """
    from attnlab.diagnosis.diagnose import diagnose
    from attnlab.kernels.vllm.source import fetch_ops
    from attnlab.reports.close_up import trace_run
    from attnlab.reports.shared_page import page_of

    lab, case = Lab(source=fetch_ops("0.33.0"), device="cpu"), Case(**FIND)
    found = diagnose(case, lab=lab)
    page = page_of(found, "", run=trace_run(lab, case, found.xray))
    assert page.source is not None
    line = page.source.lines[page.source.line - page.source.first].strip()
    alone = dataclasses.replace(page.source, first=page.source.line, lines=(line,))
    cause = f"vLLM 0.33.0, {case.op}: {page.cause}"
    page = dataclasses.replace(page, source=alone, cause=cause)
    with tempfile.TemporaryDirectory() as folder:
        page.write(file := Path(folder) / "find.html")
        photograph(file, "find.png", last="figure")


def draw_server() -> None:
    """Take a picture of the table of docs/capture.html."""
    photograph(
        ROOT / "docs" / "capture.html", "server.png", last="table:first-of-type tr:nth-child(3)"
    )


def photograph(file: Path, name: str, last: str) -> None:
    """Save the page's top, down to the last element of the selector, in docs/."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1000, "height": 900}, device_scale_factor=1.5)
        view.goto(file.as_uri())
        bottom = view.locator(last).last.bounding_box()
        height = bottom["y"] + bottom["height"]
        clip = {"x": 0, "y": 0, "width": 1000, "height": height}
        view.screenshot(path=ROOT / "docs" / name, clip=clip, full_page=True)
        browser.close()
    print(ROOT / "docs" / name)


def draw_xray() -> None:
    """X-ray a faulty copy of the example kernel and save the figure."""
    text = (ROOT / "examples" / "my_attention.py").read_text()
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "masked.py"
        kernel.write_text(text.replace("hidden = away > 0", "hidden = away > 1"))
        case = Case(
            op="unified_attention", num_heads=2, head_size=64, query_lens=(12, 1), ctx_lens=(20, 30)
        )
        columns = key_columns(xray(case, backend=f"{kernel}:my_attention"), seq=0, head=0)
    axes = plt.subplots(ncols=3, figsize=(15, 4), layout="constrained")[1]
    for ax, which in zip(axes, ("measured", "expected", "difference"), strict=True):
        plot_weights(columns, which=which, ax=ax)
    save("xray.png")


def save(name: str) -> None:
    """Save the current figure in docs/."""
    path = ROOT / "docs" / name
    plt.savefig(path, dpi=90)
    print(path)


def draw_failure() -> None:
    """Run the seed case in every stage and save the figure."""
    lab, case = Lab(), Case.from_test_id(SEED_ID)
    failing = lab.run(case.replace(stage="int32_before_cumsum"))
    left, right = plt.subplots(
        ncols=2, figsize=(13, 5), layout="constrained", width_ratios=(1.2, 1)
    )[1]
    plot_error(failing.errors, unwritten=failing.unwritten_rows(), ax=left)
    plot_stages(
        stage_table(lab, case), title="elements over the tolerance, stage by stage", ax=right
    )
    save("failure.png")


if __name__ == "__main__":
    main()
