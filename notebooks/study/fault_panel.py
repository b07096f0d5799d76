"""MlaPanel: toggles for the faults of an MLA path, and the error of each step as a heatmap."""

from html import escape
from typing import Any

import ipywidgets as ipw
from matplotlib.axes import Axes

from attnlab.mla.faults import MLA_FAULTS, faults_of
from attnlab.mla.mla_case import MlaCase
from attnlab.mla.run import MlaResult, run_path
from attnlab.show.panels.case_panel import static_html
from attnlab.show.panels.controls import labelled
from attnlab.show.panels.rendering import Cells, Picture, Rendered, axes_rect, render
from attnlab.show.panels.views import place_color_bar, status_line
from attnlab.show.plots import mla_ratios, plot_mla

SOUND = "sound"
_WIDTH, _ROW = 640, 30
_MARGINS = (128, 105, 52, 26)


class MlaPanel:
    """Toggles for the case and the fault of an MLA path, the verdict, and a heatmap of its steps.

    Every change runs the models, which takes milliseconds. ``result`` is the MlaResult that is shown. In
    Python, :meth:`show` chooses a case and a fault.
    """

    def __init__(self, cases: dict[str, MlaCase]) -> None:
        self.cases = cases
        self.case = ipw.ToggleButtons(options=list(cases), tooltip="The path that runs.")
        self.fault = ipw.ToggleButtons(options=[SOUND], tooltip="The fault that is planted.")
        for one in (self.case, self.fault):
            one.style.button_width = "auto"
        self.verdict = ipw.HTML(tooltip="")
        self.picture = Picture(hint="The error of each step and row, as a multiple of its bound.")
        self.result: MlaResult
        self._rendered: Rendered
        self._is_setting = False
        self._use_case()
        self.case.observe(self._on_case, "value")
        self.fault.observe(self._on_fault, "value")
        self.picture.observe(self._on_theme, "dark")
        rows = [labelled("case", self.case), labelled("fault", self.fault)]
        for row in rows:
            row.add_class("attnlab-toggles")
        box = ipw.Box([*rows, self.verdict, self.picture])
        self.widget = box.add_class("attnlab-panel").add_class("attnlab-mla")

    def show(self, case: str, fault: str = SOUND) -> MlaResult:
        """Choose a case and a fault, and return the result."""
        self.case.value, self.fault.value = case, fault
        return self.result

    def _on_case(self, change: Any) -> None:
        self._use_case()

    def _on_fault(self, change: Any) -> None:
        if not self._is_setting:
            self._run()

    def _on_theme(self, change: Any) -> None:
        self._draw()

    def _use_case(self) -> None:
        """Offer the faults of the chosen case, and run it without one."""
        faults = faults_of(self.cases[self.case.value])
        self._is_setting = True
        self.fault.options = [SOUND, *(one.name for one in faults)]
        self.fault.tooltips = ["nothing is wrong", *(one.text for one in faults)]
        self._is_setting = False
        self._run()

    def _run(self) -> None:
        fault = None if self.fault.value == SOUND else self.fault.value
        self.result = run_path(self.cases[self.case.value], fault=fault)
        self.verdict.value = _verdict(self.result)
        self._draw()

    def _draw(self) -> None:
        self._rendered = _render(self.result, self.picture.dark)
        self.picture.show(self._rendered)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {
            "text/plain": f"attnlab MLA panel: {', '.join(self.cases)}",
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": self.to_html(),
        }

    def to_html(self) -> str:
        """Return the verdict and the picture as static HTML."""
        return static_html(
            [self.verdict.value], {"steps": self._rendered}, ["the case", "the fault"]
        )


def _verdict(result: MlaResult) -> str:
    """Return the verdict, the first wrong step and the cause."""
    line = f"<b>{result.status}: {result.worst:.3g} × the bound</b>"
    parts = []
    if result.planted is not None:
        parts.append(f"planted: {escape(MLA_FAULTS[result.planted].text)}")
    if result.first_wrong is not None:
        parts.append(f"first wrong step: {escape(result.first_wrong)}")
    if result.status != "match":
        parts.append(f"named: {escape(', '.join(result.candidates) or 'no fault')}")
    return f'<div class="attnlab-text">{status_line(line, result.status)}{"<br>".join(parts)}</div>'


def _render(result: MlaResult, is_dark: bool) -> Rendered:
    """Return the heatmap of a result."""
    steps = len(result.steps)
    size = (_WIDTH, _MARGINS[2] + _MARGINS[3] + _ROW * max(steps, 2))
    rect = axes_rect(size, _MARGINS)

    def plot(ax: Axes) -> None:
        plot_mla(result, ax=ax)
        place_color_bar(ax, rect)
        ax.tick_params(labelsize="small")

    rows = [one.name for one in result.steps]
    columns = [
        f"sequence {i}, token {j}" for i, n in enumerate(result.case.query_lens) for j in range(n)
    ]
    columns += [f"row of padding {i}" for i in range(result.case.padding)]
    cells = Cells(rows=rows, columns=columns, values=mla_ratios(result), unit="error / bound")
    return render(plot, size, rect, cells, is_dark=is_dark)
