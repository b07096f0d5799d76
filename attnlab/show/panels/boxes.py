"""A Case as text: convert it to JSON, a command line or a test id, and read it back."""

import json
import shlex
from collections.abc import Callable, Mapping
from copy import copy
from html import escape
from typing import Any

import ipywidgets as ipw
import numpy as np
from matplotlib.axes import Axes

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.flags import Parser, add_case_flags, case_of
from attnlab.case.pytest_id import nearest_id
from attnlab.lab.lab import Lab
from attnlab.show.panels.controls import labelled
from attnlab.show.panels.progress import Job, LatestOnly, Progress
from attnlab.show.panels.rendering import Cells, Picture, Rendered, axes_rect, render
from attnlab.show.panels.texts import failure_html
from attnlab.show.panels.views import place_color_bar
from attnlab.show.plots.weights import plot_law, plot_weights
from attnlab.weights.conclude import xray
from attnlab.weights.xray import KeyColumns, XRay, key_columns, law_points


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def cell_text(case: Case, call: str, changes: Mapping[str, Any], **arguments: str) -> str:
    """Return a cell that shows a Case in an explorer, or a call with the fields that were changed.

    ``call``: the expression of the call, "" for a Case; ``arguments``: further ones of explorer, as Python.
    """
    given = "".join(f", {name}={text}" for name, text in arguments.items())
    implied = "backend" if "kernel" in arguments else ""
    fields = {name: value for name, value in case.changes().items() if name != implied}
    lines = ["import attnlab", ""]
    if not call:
        lines += [f"case = attnlab.Case({_listed(fields)})", f"attnlab.explorer(case{given})"]
    else:
        lines += [f"view = attnlab.explorer({call}{given})"]
        lines += [f"view.set({_listed(changes)})"] * bool(changes)
        lines += ["view"]
    return "\n".join(lines)


def case_texts(case: Case) -> dict[str, str]:
    """Return the Case as JSON, a command line, a Python expression and a vLLM test id.

    :func:`read_case` reads all but the expression, which starts from the nearest test id. A text is "" if
    it cannot express the Case: a test id of other fields, a command for a function of the notebook.
    """
    test_id, changes = nearest_id(case)
    arguments = "".join(f", {name}={value!r}" for name, value in changes.items())
    return {
        "JSON": json.dumps(case.changes()),
        "command line": "" if case.backend.startswith("__main__:") else case.to_cli(),
        "from a test id": f'Case.from_test_id("{test_id}"{arguments})',
        "test id": test_id if not changes else "",
    }


def read_case(text: str) -> Case:
    """Return the Case of a text: JSON, a command line of ``attnlab run``, or a vLLM test id.

    Raises InvalidCase.
    """
    text = text.strip()
    if text.startswith("{"):
        return Case.from_json(text)
    if text.startswith("attnlab "):
        return _read_command(text)
    return Case.from_test_id(text)


class _CaseParser(Parser):
    """Parser of the flags of a Case that raises InvalidCase."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise InvalidCase(f"command line must be that of attnlab run: {message}")


def _read_command(text: str) -> Case:
    parser = _CaseParser(prog="attnlab run", add_help=False)
    add_case_flags(parser)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidCase(f"command line must have matching quotes: {error}") from error
    if words[1:2] != ["run"]:
        raise InvalidCase(f"command line must begin with attnlab run, got {text[:40]!r}")
    return case_of(parser.parse_args(words[2:]))


# XrayBox: the part of an explorer that measures the attention weights of its Case on demand.

VIEWS = ("measured", "expected", "difference", "log weights")
_SIZE, _MARGINS = (860, 380), (62, 125, 76, 30)
_SENTENCES = 4
_HINT = "Weights by output row and key; grey lines are block edges, dashed pink ones tile edges."


class XrayBox:
    """A button that measures the weights of a Case, and their pictures.

    The kernel runs again only when the button is pressed. ``found`` is the XRay that is shown, or None.
    """

    def __init__(self, lab: Callable[[], Lab], case: Callable[[], Case]) -> None:
        """``lab``, ``case``: return what the panel has now; ``case`` may raise InvalidCase."""
        self._lab, self._case = lab, case
        self.found: XRay | None = None
        self._measured: Case | None = None
        self.button = ipw.Button(
            description="Measure the weights",
            tooltip="Run the kernel with coded values, and read its attention weights from the outputs.",
            layout={"width": "170px"},
        )
        self.button.on_click(lambda button: self.measure())
        self.view = ipw.Dropdown(options=VIEWS, value="difference", tooltip="What is drawn.")
        self.seq = ipw.Dropdown(options=[0], tooltip="The sequence whose rows are drawn.")
        self.head = ipw.Dropdown(options=[0], tooltip="The query head that is drawn.")
        for choice in (self.view, self.seq, self.head):
            choice.observe(lambda change: self._draw(), "value")
        self.text = ipw.HTML(tooltip="")
        self.picture = Picture(hint=_HINT)
        self.picture.observe(lambda change: self._draw(), "dark")
        self.progress = Progress(self.cancel)
        self._worker: LatestOnly[Case] = LatestOnly(self._run, self._on_error)
        named = {"view": self.view, "sequence": self.seq, "query head": self.head}
        self.choices = ipw.HBox([ipw.VBox([labelled(*item)]) for item in named.items()])
        self.choices.add_class("attnlab-xray-choices").layout.display = "none"
        top = ipw.HBox([self.button, self.progress.widget])
        parts = [top, self.text, self.choices, self.picture]
        self.widget = ipw.Accordion(
            children=[ipw.VBox(parts)], titles=["X-ray: the attention weights of the kernel"]
        )
        self.widget.selected_index = None
        self.widget.add_class("attnlab-xray")

    def measure(self) -> None:
        """Measure the panel's Case in the background."""
        self.progress.begin()
        try:
            self._measured = self._case()
            self._worker.submit(self._measured)
        except Exception as error:
            self._on_error(None, error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no measurement runs; return whether that was in time."""
        return self._worker.wait(timeout_s)

    def cancel(self) -> None:
        """Stop the measurement."""
        with self._worker.lock:
            self._worker.cancel()
            self.progress.end("cancelled")

    def follow(self, case: Case) -> None:
        """Take a new Case of the panel: a picture of another one is marked, a measurement of it stops."""
        if self._worker.is_busy and case != self._measured:
            self.cancel()
        self.picture.stale = self.found is not None and case != self._measured

    def _run(self, case: Case, job: Job) -> None:
        lab = copy(self._lab())  # with the same shared products
        lab.on_step = self.progress.on_step_of(job)
        lab.on_step("measuring the weights")
        found = xray(case, lab=lab)
        job.publish(lambda: self._show(found))

    def _show(self, found: XRay) -> None:
        """Show an XRay, first the sequence and head with the largest difference."""
        self.found = None  # no picture while the choices change
        worst = key_columns(found)
        self.seq.options = found.setup.seq.unique().tolist()
        self.head.options = found.setup.heads.tolist()
        self.seq.value, self.head.value = worst.seq, worst.head
        self.found = found
        lines = [f"<b>{escape(found.status)}</b>", *map(escape, found.sentences[:_SENTENCES])]
        self.text.value = "<br>".join(lines)
        self.choices.layout.display = ""
        self._draw()
        self.progress.end(f"{found.measurement.runs} runs, {found.seconds:.1f} s")

    def _draw(self) -> None:
        if self.found is None:
            return
        columns = key_columns(self.found, self.seq.value, self.head.value)
        is_dark = bool(self.picture.dark)
        if self.view.value == "log weights":
            self.picture.show(_law(self.found, is_dark))
        else:
            self.picture.show(_weights(columns, self.view.value, is_dark))

    def _on_error(self, case: Case | None, error: Exception) -> None:
        """Show why there is no measurement."""
        self.text.value = failure_html(error)
        self.progress.end("")


def _weights(columns: KeyColumns, which: Any, is_dark: bool) -> Rendered:
    """Render the weights of some rows and keys."""
    rect = axes_rect(_SIZE, _MARGINS)

    def plot(ax: Axes) -> None:
        plot_weights(columns, which=which, ax=ax)
        place_color_bar(ax, rect)

    names = [f"key at position {at}" for at in range(columns.positions)]
    names += [f"slot {at} after the end" for at in range(columns.tail)]
    width, values = columns.foreign_width, getattr(columns, which).numpy().astype(np.float32)
    names += [f"all slots: {name}" for name in columns.foreign for _ in range(width)]
    foreign = values[:, columns.own :].repeat(width, axis=1)
    cells = Cells(
        rows=[f"row {row}" for row in columns.rows.tolist()],
        columns=names,
        values=np.hstack([values[:, : columns.own], foreign]),
        unit="weight",
    )
    return render(plot, _SIZE, rect, cells, is_dark=is_dark)


def _law(found: XRay, is_dark: bool) -> Rendered:
    """Render log weights against the right ones."""
    points, rect = law_points(found), axes_rect((520, 380), (62, 20, 56, 30))
    nothing = Cells(rows=[], columns=[], values=np.zeros((0, 0), dtype=np.float32), unit="")
    return render(lambda ax: plot_law(points, ax=ax), (520, 380), rect, nothing, is_dark=is_dark)


# CaseTextBox: the part of an explorer that shows its Case as text and reads a pasted one.

_TOOLTIPS = {
    "code": "A cell that makes this case and shows it in an explorer.",
    "JSON": "The fields that differ from their defaults, for Case.from_json.",
    "command line": "The command that runs this case in a terminal.",
    "from a test id": "A Python expression: the nearest test of vLLM, and the fields that differ.",
    "test id": "The parameters of vLLM's test that runs this case, if there is one.",
}
_NO_TEXT = {
    "command line": "a terminal cannot run a function of this notebook",
    "test id": "no test of vLLM has these parameters",
}
_PASTE_TOOLTIP = "Set all controls from a test id, JSON or a command line of attnlab run."


class CaseTextBox:
    """Texts of the current Case to copy, and an input that calls ``on_case`` with a pasted Case."""

    def __init__(self, on_case: Callable[[Case], None]) -> None:
        self._on_case = on_case
        shared: dict[str, Any] = {"layout": {"width": "auto"}}
        self.texts = {
            name: ipw.Textarea(tooltip=tooltip, rows=4 if name == "code" else 2, **shared)
            for name, tooltip in _TOOLTIPS.items()
        }
        self.texts["code"].add_class("attnlab-code")
        self.pasted = ipw.Text(
            tooltip=_PASTE_TOOLTIP,
            placeholder="a test id, JSON or a command line, then Enter",
            continuous_update=False,
            **shared,
        )
        self.message = ipw.HTML(tooltip="")
        self.pasted.observe(self._on_paste, "value")
        texts = [labelled(name, text) for name, text in self.texts.items()]
        content = ipw.VBox([labelled("paste", self.pasted), self.message, *texts])
        self.widget = ipw.Accordion(children=[content], titles=["copy as code, or paste a case"])
        self.widget.selected_index = None
        self.widget.add_class("attnlab-texts")

    def show(self, case: Case, code: str) -> None:
        """Show the Case as text; ``code`` is a cell with its explorer."""
        for name, text in {"code": code, **case_texts(case)}.items():
            self.texts[name].value = text or _NO_TEXT[name]

    def _on_paste(self, change: Any) -> None:
        text = change["new"]
        if not text.strip():
            self.message.value = ""
            return
        try:
            case = read_case(text)
        except InvalidCase as error:
            self.message.value = f'<span class="attnlab-wrong">{escape(str(error))}</span>'
            return
        self.message.value = "The controls show the pasted case."
        self._on_case(case)
