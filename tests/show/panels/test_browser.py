"""The panels in JupyterLab, driven by a browser."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import PROBLEMS, find_chromium
from helpers.geometry import layout_faults
from helpers.jupyter import running_lab

from attnlab.case.case import Case
from attnlab.lab.lab import Lab
from attnlab.show.panels.case_panel import MAIN
from attnlab.show.panels.controls import tooltip_of

pytestmark = pytest.mark.browser
NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
LONG_MS = 120_000  # a limit for slow machines; every wait ends with a state of the page
TRIES, SHOWN_MS = 4, 30_000  # to show a panel, and for each
LOST, LOST_MS = "widget model not found", 500  # what the console says of a lost part, and how soon
SIZE = {"num_heads": 2, "draw_max_query_len": 40, "draw_max_ctx_len": 60}

# Patterns of JupyterLab's own console messages. On a busy machine, plugins take more than 5 s to start.
NOISE = (r"^warning: Plugin @jupyter\S+ .*took [\d.]+ms to activate",)

READY = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
RUN = """async ([parameters, text]) => {
  const { content } = window.jupyterapp.shell.currentWidget;
  const cells = [...content.model.cells];
  for (const cell of cells) {
    if ((cell.getMetadata('tags') || []).includes('parameters'))
      cell.sharedModel.setSource(cell.sharedModel.getSource() + '\\n' + parameters);
  }
  const last = cells.findIndex((cell) => text && cell.sharedModel.getSource().includes(text));
  if (text && last < 0) return [`no cell contains ${text}`];
  content.activeCellIndex = last + 1;
  const command = text ? 'run-all-above' : 'run-all-cells';
  await window.jupyterapp.commands.execute('notebook:' + command);
  return cells.flatMap((cell) => cell.type !== 'code' ? []
    : cell.outputs.toJSON().filter((o) => o.output_type === 'error').map((o) => o.evalue));
}"""
PNG = "async (image) => [...new Uint8Array(await (await fetch(image.src)).arrayBuffer())]"
TITLES = "(root) => [...root.querySelectorAll('[title]')].map((element) => element.title)"
SHOW_CELL = """(text) => {
  const { content } = window.jupyterapp.shell.currentWidget;
  const sources = [...content.model.cells].map((cell) => cell.sharedModel.getSource());
  content.scrollToItem(sources.findIndex((source) => source.includes(text)), 'start');
  return document.querySelector('.attnlab-panel')?.offsetParent != null;
}"""


@dataclass
class Browser:
    """A page in JupyterLab, with the errors and warnings of its console."""

    page: Any
    url: str
    messages: list[str] = field(default_factory=list)
    upto: str = ""

    def open(self, notebook: str) -> None:
        """Open a notebook and wait for its kernel."""
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.messages.append(f"page error: {error}"))
        self.page.goto(self.url.format(notebook))
        self.page.wait_for_function(READY)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.messages.append(
                f"{message.type}: {message.text} {message.location.get('url', '')}"
            )

    def run(self, upto: str = "", **parameters: object) -> None:
        """Run all cells, or those up to the one that contains ``upto``; fail if a cell raises."""
        self.upto = upto
        text = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        assert self.page.evaluate(RUN, [text, upto]) == []

    def panel(self, source: str) -> Any:
        """Scroll to the cell whose source contains a text and return its panel.

        JupyterLab may lose a widget, or parts of one, that is made before its manager is ready. Then the
        cells run again.
        """
        from playwright.sync_api import TimeoutError as NotShown

        for tries in range(TRIES):
            is_last = tries == TRIES - 1
            try:
                self.page.wait_for_function(SHOW_CELL, arg=source, polling=200, timeout=SHOWN_MS)
                self.page.wait_for_timeout(LOST_MS)
                if is_last or not any(LOST in line for line in self.messages):
                    break
            except NotShown:
                if is_last:
                    raise
            self.messages.clear()
            self.run(self.upto)
        return self.page.locator(".attnlab-panel")

    def unexpected(self) -> list[str]:
        """Return the console messages that are not JupyterLab's own."""
        return [
            line for line in self.messages if not any(re.search(noise, line) for noise in NOISE)
        ]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Start the browser; skip the test if there is none."""
    path = find_chromium()
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lab_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run JupyterLab on a copy of the notebooks and yield the URL of its pages."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(NOTEBOOKS, folder / "notebooks")
    with running_lab(folder / "notebooks", folder / "jupyter.log") as url:
        yield url


@pytest.fixture
def browser(chromium: Any, lab_url: str) -> Iterator[Browser]:
    """Yield a new page; fail if its console shows an error or a warning."""
    context = chromium.new_context(viewport={"width": 1500, "height": 1000})
    context.set_default_timeout(LONG_MS)
    browser = Browser(page=context.new_page(), url=lab_url)
    yield browser
    unexpected = browser.unexpected()
    context.close()
    assert unexpected == []


@pytest.fixture(scope="module")
def explorer(chromium: Any, lab_url: str) -> Iterator[Any]:
    """Run notebook 05 to its explorer and yield the panel; a test leaves it with the Case of the start."""
    context = chromium.new_context(viewport={"width": 1500, "height": 1000})
    context.set_default_timeout(LONG_MS)
    browser = Browser(page=context.new_page(), url=lab_url)
    browser.open("05-explorer.ipynb")
    browser.run("attnlab.explorer(", **SIZE)
    yield browser.panel("attnlab.explorer(")
    unexpected = browser.unexpected()
    context.close()
    assert unexpected == []


def small_case(**changes: Any) -> Case:
    """Return the Case with which both notebooks start, at the size of these tests."""
    fields = {
        "num_heads": 2,
        "draw_max_query_len": 40,
        "draw_max_ctx_len": 60,
        "x": 8,
        "atol": 1e-4,
    }
    return Case(**{**fields, **changes})


def expect(panel: Any, case: Case, status: str) -> bytes:
    """Wait until a panel shows the result of the Case; return the PNG of its errors."""
    result = Lab().run(case)
    assert result.status == status
    verdict = result.verdict if status == "rejected" else f"{status}: {result.verdict}"
    line = panel.locator(".attnlab-verdict-line").filter(has_text=verdict)
    line.filter(has_text=f"on {case.platform},").wait_for()
    panel.locator("[data-state=idle]").first.wait_for(state="attached")
    if status == "rejected":
        panel.locator(".attnlab-picture").first.wait_for(state="hidden")
        return b""
    panel.locator(".attnlab-stale").first.wait_for(state="detached")
    return bytes(panel.locator(".attnlab-picture img").first.evaluate(PNG))


def choose(panel: Any, field: str, value: str) -> None:
    """Select a value of a field."""
    panel.locator(f".attnlab-knob-{field} select").select_option(value)


def enter(panel: Any, field: str, value: str) -> None:
    """Type a value of a field and press Enter."""
    box = panel.locator(f".attnlab-knob-{field} input")
    box.fill(value)
    box.press("Enter")


def test_the_explorer(browser: Browser) -> None:
    """Run notebook 05, change stage and platform, select by click and key, enter a wrong value."""
    browser.open("05-explorer.ipynb")
    browser.run(**SIZE)
    panel = browser.panel("attnlab.explorer(")
    case = small_case(stage="int32_before_cumsum")
    pictures = [expect(panel, case, "mismatch")]

    choose(panel, "stage", "cast_after_cumsum")
    case = case.replace(stage="cast_after_cumsum")
    pictures.append(expect(panel, case, "match"))
    choose(panel, "stage", "int64")
    case = case.replace(stage="int64")
    expect(panel, case, "rejected")
    choose(panel, "platform", "sm_90")
    case = case.replace(platform="sm_90")
    pictures.append(expect(panel, case, "match"))
    assert pictures[0] != pictures[1]
    assert "not paged_attention_rocm: platform is sm_90" in panel.inner_text()

    image = panel.locator(".attnlab-picture img").first
    box = image.bounding_box()
    image.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.78})
    selection = panel.locator(".attnlab-selection")
    selection.wait_for()
    assert re.search(r"sequence \d+, token \d+ of \d+ \(row \d+\), head 0", selection.inner_text())
    assert re.search(r"error .*; element \d+: got .*, expected", selection.inner_text())
    assert re.search(r"block \d+, slot \d+: sequence", selection.inner_text())
    assert panel.locator(".attnlab-mark").first.is_visible()
    image.press("ArrowRight")
    selection.filter(has_text="head 1").wait_for()

    enter(panel, "num_queries_per_kv", "3")
    wrong = panel.locator(".attnlab-knob-num_queries_per_kv .attnlab-wrong")
    wrong.filter(has_text="must be a divisor of num_heads (2), got 3").wait_for()
    panel.locator(".attnlab-picture.attnlab-stale").first.wait_for()
    panel.locator(".attnlab-fact-verdict.attnlab-stale").wait_for()
    panel.locator(".attnlab-knob-num_queries_per_kv.attnlab-changed").wait_for()
    enter(panel, "num_heads", "1e9")
    text = "num_heads must be an integer from 1 to 4096, got '1e9'"
    panel.locator(".attnlab-knob-num_heads .attnlab-wrong").filter(has_text=text).wait_for()
    enter(panel, "num_heads", "2")
    enter(panel, "num_queries_per_kv", "1")
    expect(panel, case, "match")
    wrong.wait_for(state="detached")


MAIN_NAMES = [name for names in MAIN.values() for name in names]
SIZES = [(1280, 800), (1920, 1080)]
# A style that plants each fault of the layout that PROBLEMS finds, and how it says so.
BAD_TEXTS = {
    "pixels to the side": ".attnlab-panel { min-width: 3000px }",
    "cut off": ".attnlab-panel .attnlab-name { flex-basis: 30px !important }",
    "8.0 pixels": ".attnlab-panel .attnlab-name label { font-size: 8px !important }",
    "contrast": ".attnlab-panel .attnlab-name label { color: #888888 !important }",
    " over ": ".attnlab-panel .attnlab-text * { line-height: 4px !important }"
    ".attnlab-panel .attnlab-section { margin-bottom: -24px !important }"
    ".attnlab-toggles button { margin-left: -70px !important; background: none !important }",
}
FOUND = f"([part, words]) => ({PROBLEMS})(part).some((one) => one.includes(words))"
BAD_STYLES = {
    "outside": ".attnlab-panel .attnlab-middle { padding-top: 900px }",
    "overlaps": ".attnlab-panel .attnlab-middle { margin-left: -200px }",
    "clipped": ".attnlab-panel .attnlab-name { flex-basis: 60px !important }",
    "hidden": ".attnlab-panel .attnlab-knob-stage { display: none }",
}
THEMES = ("JupyterLab Light", "JupyterLab Dark")
CHANGE_THEME = "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
TOGGLE_GROUPS = """(root) => root
  .querySelectorAll('.attnlab-groups .jupyter-widget-Collapse-header')
  .forEach((head) => head.click())"""
UNTITLED = """(root) => [...root.querySelectorAll('label, select, input, textarea')]
  .filter((part) => part.getClientRects().length && !part.closest('[title]:not([title=""])')
    && !part.querySelector('[title]:not([title=""])'))
  .map((part) => part.outerHTML.slice(0, 120))"""


def test_the_main_parts_are_on_one_screen(browser: Browser) -> None:
    """Verdict, errors and main controls are visible together; a bad style is detected."""
    page = browser.page
    page.set_viewport_size({"width": 1280, "height": 800})
    browser.open("05-explorer.ipynb")
    browser.run("attnlab.explorer(")
    panel = browser.panel("attnlab.explorer(")
    panel.locator(".attnlab-picture img").first.wait_for()
    for theme in THEMES:
        page.evaluate(CHANGE_THEME, theme)
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            assert layout_faults(panel, MAIN_NAMES) == [], (theme, width)
            assert page.evaluate(PROBLEMS, ".attnlab-panel") == [], (theme, width)
    page.set_viewport_size({"width": 1280, "height": 800})
    for word, style in BAD_STYLES.items():
        planted = page.add_style_tag(content=style)
        assert any(word in fault for fault in layout_faults(panel, MAIN_NAMES)), word
        planted.evaluate("tag => tag.remove()")
    assert layout_faults(panel, MAIN_NAMES) == []


@pytest.mark.parametrize(
    ("notebook", "cell", "size"),
    [
        ("05-explorer.ipynb", "attnlab.explorer(", SIZE),
        ("03-missing-decode-token.ipynb", 'panel(case.replace(empty_slots="nan")', SIZE),
        ("11-what-the-chain-of-mla-promises.ipynb", "study.mla_panel(cases)", {}),
    ],
)
def test_the_layout_of_every_panel(
    browser: Browser, notebook: str, cell: str, size: dict[str, int]
) -> None:
    """With all groups of controls open, and a message; each fault that is planted is found."""
    page = browser.page
    browser.open(notebook)
    browser.run(cell, **size)
    panel = browser.panel(cell)
    panel.locator(".attnlab-picture img").first.wait_for()
    panel.evaluate(TOGGLE_GROUPS)
    for box in panel.locator(
        ".attnlab-knob-draw_max_ctx_len input, .attnlab-knob-k_scale input"
    ).all():
        box.fill("wrong")
        box.press("Enter")
        panel.locator(".attnlab-wrong").first.wait_for()
    for theme in THEMES:
        page.evaluate(CHANGE_THEME, theme)
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": 4 * height})
            panel.evaluate("panel => panel.scrollIntoView()")
            page.wait_for_timeout(500)
            assert page.evaluate(PROBLEMS, ".attnlab-panel") == [], (theme, width)
    page.evaluate(CHANGE_THEME, THEMES[0])
    for words, style in BAD_TEXTS.items():
        planted = page.add_style_tag(content=style)
        page.wait_for_function(FOUND, arg=[".attnlab-panel", words], timeout=SHOWN_MS)
        planted.evaluate("tag => tag.remove()")


def test_no_tooltip_is_null(explorer: Any) -> None:
    """ipywidgets shows the tooltip None as "null"; every label in the explorer has a text or none."""
    assert "null" not in explorer.evaluate(TITLES)
    label = explorer.locator(".attnlab-knob-num_heads").first
    assert tooltip_of("num_heads") in label.evaluate(TITLES)


def test_values_are_shown_at_the_pointer(explorer: Any) -> None:
    """On each picture; and a click on the plot by sequence selects a token."""
    expect(explorer, small_case(stage="int32_before_cumsum"), "mismatch")
    patterns = (
        r"sequence \d+, tokens? .*\nhead \d\nerror [\d.e-]+",
        r"slot \d+\nblock \d+ of sequence \d+\n",
        r"sequence \d+\nlargest error",
    )
    for i, pattern in enumerate(patterns):
        picture = explorer.locator(".attnlab-picture:visible").nth(i)
        image, hover = picture.locator("img"), picture.locator(".attnlab-hover")
        box = image.bounding_box()
        image.hover(position={"x": box["width"] * 0.4, "y": box["height"] * 0.4})
        hover.wait_for()
        assert re.match(pattern, hover.inner_text())
    image.click(position={"x": box["width"] * 0.95, "y": box["height"] * 0.4})
    explorer.locator(".attnlab-selection", has_text="sequence 9").first.wait_for()


def test_every_control_has_a_tooltip(explorer: Any) -> None:
    """In all groups; a label without a title is detected."""
    explorer.evaluate(TOGGLE_GROUPS)
    explorer.locator(".attnlab-knob-k_scale .attnlab-name label[title^=Scale]").wait_for()
    assert explorer.evaluate(UNTITLED) == []
    label = explorer.locator(".attnlab-knob-stage .attnlab-name .widget-html-content label")
    title = label.get_attribute("title")
    label.evaluate("label => label.removeAttribute('title')")
    assert len(explorer.evaluate(UNTITLED)) == 1
    label.evaluate("(label, title) => label.setAttribute('title', title)", title)
    explorer.evaluate(TOGGLE_GROUPS)


def test_a_long_run_can_be_cancelled(explorer: Any) -> None:
    """At full size progress appears; Cancel ends the run and the old verdict remains as stale."""
    small = small_case(stage="int32_before_cumsum")
    expect(explorer, small, "mismatch")
    explorer.get_by_text("copy as code, or paste a case").click()
    pasted = explorer.get_by_placeholder("a test id, JSON or a command line")
    pasted.fill(Case(seed=3, platform="sm_90").to_cli())
    pasted.press("Enter")
    explorer.get_by_role("button", name="Cancel").click()
    explorer.get_by_text("cancelled; the results shown are those of an earlier case").wait_for()
    explorer.locator(".attnlab-fact-verdict.attnlab-stale").wait_for()
    assert Lab().run(small).verdict in explorer.inner_text()
    pasted.fill(small.to_cli())
    pasted.press("Enter")
    expect(explorer, small, "mismatch")
    explorer.get_by_text("copy as code, or paste a case").click()


def test_a_panel_in_a_notebook(browser: Browser) -> None:
    """Run notebook 03 and change the fill, the platform and the stage of its panel."""
    browser.open("03-missing-decode-token.ipynb")
    browser.run(**SIZE)
    panel = browser.panel('panel(case.replace(empty_slots="nan")')
    case = small_case(stage="cast_after_cumsum", empty_slots="nan")
    before = expect(panel, case, "mismatch")
    choose(panel, "fill", "decode_rows")
    after = expect(panel, case.replace(fill="decode_rows"), "match")
    assert before != after
    choose(panel, "platform", "sm_90")
    expect(panel, case.replace(fill="decode_rows", platform="sm_90"), "match")
    choose(panel, "stage", "int64")
    choose(panel, "platform", "gfx942")
    expect(panel, small_case(stage="int64", fill="decode_rows", empty_slots="nan"), "rejected")
    choose(panel, "stage", "sound")
    choose(panel, "fill", "context_only")
    expect(panel, small_case(stage="sound", fill="context_only", empty_slots="nan"), "mismatch")
