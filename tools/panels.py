"""Measure the explorer: seconds from a change of a control to the new pictures, as JSON.

python tools/panels.py             in this process: from a control's new value to each picture
python tools/panels.py --browser   in JupyterLab: from the change on the page to the picture on the page
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.show.panels import explorer

ROOT = Path(__file__).parent.parent
CASE = Case(num_heads=8, draw_max_query_len=128, draw_max_ctx_len=128, x=8)
STAGES = ("cast_after_cumsum", "int32_before_cumsum", "fill_all", "sound", "fill_decode")
CHANGES = [("stage", name) for name in STAGES] + [
    ("platform", "sm_90"),
    ("empty_slots", "nan"),
    ("distribution", "normal"),
    ("seed", 1),
]
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


def in_this_process() -> dict[str, Any]:
    """Return for each change the seconds to the error plot, to all pictures, and of processor time."""
    view = explorer(CASE)
    view.wait()
    first: list[float] = []
    view.pictures["error"].observe(lambda change: first.append(time.perf_counter()), "version")
    figures: dict[str, Any] = {}
    for name, value in CHANGES:
        start, cpu = time.perf_counter(), time.process_time()
        first.clear()
        view.controls[name].show(value)
        view.wait()
        figures[f"{name} {value}"] = {
            "error_picture_s": round(first[0] - start, 3),
            "all_pictures_s": round(time.perf_counter() - start, 3),
            "processor_s": round(time.process_time() - cpu, 3),
        }
    return figures


def in_jupyterlab() -> dict[str, float]:
    """Return for each change on the page the seconds until the page shows the new error plot."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "show" / "panels")]
    from helpers.browser import find_chromium
    from helpers.jupyter import running_lab
    from playwright.sync_api import sync_playwright
    from test_browser import Browser

    figures = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_lab(ROOT / "notebooks", Path(folder) / "log") as url,
        sync_playwright() as play,
    ):
        chromium = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1500, "height": 1000})
        browser = Browser(page=page, url=url)
        browser.open("05-explorer.ipynb")
        browser.run("attnlab.explorer(")
        panel = browser.panel("attnlab.explorer(")
        for name, value in CHANGES:
            panel.locator("[data-state=idle]").wait_for(state="attached")
            figures[f"{name} {value}"] = round(page.evaluate(TOGGLE, [name, str(value)]), 3)
            page.wait_for_timeout(500)
        chromium.close()
    return figures


def main() -> int:
    """Print the figures as JSON."""
    figures = in_jupyterlab() if "--browser" in sys.argv[1:] else in_this_process()
    times = [t if isinstance(t, float) else t["error_picture_s"] for t in figures.values()]
    summary = {"median_s": statistics.median(times), "max_s": max(times)}
    print(json.dumps({"error_picture": summary, "changes": figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
