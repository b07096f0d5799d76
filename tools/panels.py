"""Measure the explorer: seconds from a change of a control to the new pictures, as JSON.

python tools/panels.py                        in this process: from a control's new value to each picture
python tools/panels.py --browser --rounds 10  in JupyterLab: from the change on the page to its picture
python tools/panels.py --backend vllm         with the Triton kernels of the installed vLLM

Each round makes the same changes, and draws new data twice. The summary has the median, the 95th percentile
and the maximum of all changes, and of those that draw new data.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.show.panels import explorer

ROOT = Path(__file__).parent.parent
SIZE = {"num_heads": 8, "draw_max_query_len": 128, "draw_max_ctx_len": 128}
CASE = Case(**SIZE, x=8)
STAGES = ("cast_after_cumsum", "int32_before_cumsum", "fill_all", "sound", "fill_decode")
PLATFORMS, EMPTY = ("sm_90", "gfx942"), ("nan", "zeros")
DATA = ("distribution", "seed")  # fields that draw new data
GOALS_S = {"model": 0.3, "vllm": 1.0}
TOGGLE = """async ([name, value]) => {
  const panel = document.querySelector('.attnlab-panel');
  const input = panel.querySelector(`.attnlab-knob-${name} select, .attnlab-knob-${name} input`);
  const image = panel.querySelector('.attnlab-picture img');
  const drawn = new Promise((done) => image.addEventListener('load', done, { once: true }));
  const start = performance.now();
  input.value = value;
  input.dispatchEvent(new Event(input.tagName === 'SELECT' ? 'input' : 'change', { bubbles: true }));
  input.dispatchEvent(new Event('change', { bubbles: true }));
  await drawn;
  return (performance.now() - start) / 1000;
}"""


def changes(rounds: int) -> Iterator[tuple[str, Any]]:
    """Yield the fields and values to which they change; each change differs from the value before it."""
    for i in range(rounds):
        yield from (("stage", name) for name in STAGES)
        yield "platform", PLATFORMS[i % 2]
        yield "empty_slots", EMPTY[i % 2]
        yield "distribution", ("normal", "uniform_1e-3")[i % 2]
        yield "seed", i + 1


def in_this_process(rounds: int, backend: str) -> Iterator[dict[str, Any]]:
    """Yield for each change the seconds to the error plot, to all pictures, and of processor time."""
    view = explorer(CASE.replace(backend=backend))
    view.wait()
    first: list[float] = []
    view.pictures["error"].observe(lambda change: first.append(time.perf_counter()), "version")
    for name, value in changes(rounds):
        start, cpu = time.perf_counter(), time.process_time()
        first.clear()
        view.controls[name].show(value)
        view.wait()
        yield {
            "change": f"{name} {value}",
            "error_picture_s": round(first[0] - start, 3),
            "all_pictures_s": round(time.perf_counter() - start, 3),
            "processor_s": round(time.process_time() - cpu, 3),
        }


def in_jupyterlab(rounds: int, backend: str) -> Iterator[dict[str, Any]]:
    """Yield for each change on the page the seconds until the page shows the new error plot."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "show" / "panels")]
    from helpers.browser import find_chromium
    from helpers.jupyter import running_lab
    from playwright.sync_api import sync_playwright
    from test_browser import Browser

    with (
        tempfile.TemporaryDirectory() as folder,
        running_lab(_copy_of_notebooks(Path(folder)), Path(folder) / "log") as url,
        sync_playwright() as play,
    ):
        chromium = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1500, "height": 1000})
        page.set_default_timeout(120_000)
        browser = Browser(page=page, url=url)
        browser.open("05-explorer.ipynb")
        browser.run("attnlab.explorer(", **SIZE, backend=backend)
        panel = browser.panel("attnlab.explorer(")
        for name, value in changes(rounds):
            # of all pictures of the change before, too
            panel.locator("[data-state=working]").first.wait_for(state="detached")
            page.wait_for_timeout(300)
            seconds = round(page.evaluate(TOGGLE, [name, str(value)]), 3)
            yield {"change": f"{name} {value}", "error_picture_s": seconds}
        chromium.close()


def _copy_of_notebooks(folder: Path) -> Path:
    """Copy the notebooks, because JupyterLab saves what it runs, and return their folder."""
    return Path(shutil.copytree(ROOT / "notebooks", folder / "notebooks"))


def summary(figures: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median, the 95th percentile and the maximum."""
    times = sorted(one["error_picture_s"] for one in figures)
    return {
        "changes": len(times),
        "median_s": round(statistics.median(times), 3),
        "p95_s": round(statistics.quantiles(times, n=20, method="inclusive")[-1], 3),
        "max_s": times[-1],
    }


def main() -> int:
    """Print the figures as JSON; return 1 if the 95th percentile of all changes exceeds the goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--browser", action="store_true", help="measure on a page of JupyterLab")
    parser.add_argument("--rounds", type=int, default=3, help="of nine changes each")
    parser.add_argument("--backend", default="model", choices=GOALS_S, help="whose kernels run")
    args = parser.parse_args()
    measure = in_jupyterlab if args.browser else in_this_process
    figures = [*measure(args.rounds, args.backend)]
    data = [one for one in figures if one["change"].split()[0] in DATA]
    goal_s = GOALS_S[args.backend]
    found = {"all": summary(figures), "new data": summary(data), "goal_p95_s": goal_s}
    print(json.dumps({"error_picture": found, "changes": figures}, indent=1))
    return 1 if found["all"]["p95_s"] > goal_s else 0


if __name__ == "__main__":
    sys.exit(main())
