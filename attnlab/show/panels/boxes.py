"""A Case as text: convert it to JSON, a command line or a test id, and read it back."""

import gc
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any, Generic, TypeVar

import ipywidgets as ipw
import numpy as np
from matplotlib.axes import Axes

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.flags import Parser, add_case_flags, case_of
from attnlab.case.pytest_id import nearest_id
from attnlab.kernels.backend import STEPS, OnStep, time_left
from attnlab.lab.lab import Lab
from attnlab.show.panels.controls import labelled
from attnlab.show.panels.rendering import Cells, Picture, Rendered, axes_rect, render
from attnlab.show.panels.views import failure_html, place_color_bar
from attnlab.show.plots import plot_law, plot_weights
from attnlab.weights.conclude import xray
from attnlab.weights.xray import KeyColumns, XRay, key_columns, law_points

R = TypeVar("R")


class Outdated(BaseException):
    """Raised in a job whose request is no longer the newest.

    It is not an Exception, so that no ``except Exception`` of a kernel catches it.
    """


@dataclass(slots=True)
class Job:
    """The work on one request; its results are published only while the request is the newest."""

    generation: int
    worker: "LatestOnly[object]"
    start: float = field(default_factory=time.perf_counter)

    def check(self) -> None:
        """Raise Outdated if a newer request exists or the job was cancelled."""
        if self.generation != self.worker.generation:
            raise Outdated

    def publish(self, show: Callable[[], None]) -> None:
        """Call ``show`` under the worker's lock, or raise Outdated."""
        with self.worker.lock:
            self.check()
            show()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Run a job without collections of cyclic garbage: each walks through all objects of torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LatestOnly(Generic[R]):
    """Background worker that keeps only the newest request.

    ``work(request, job)`` runs in one thread: at once, or, if the request follows another within
    ``quiet_s``, as those of a slider do, once it has been the newest for that time. It must call
    ``job.check()`` often and publish its results with ``job.publish``. An Exception that it raises goes to
    ``on_error(request, error)``, unless the request is outdated.
    """

    def __init__(
        self,
        work: Callable[[R, Job], None],
        on_error: Callable[[R, Exception], None],
        quiet_s: float = 0.03,
    ) -> None:
        self._work, self._on_error, self._quiet_s = work, on_error, quiet_s
        self._waiting: list[R] = []  # the newest request, if the thread has not taken it
        self._changed_at = self._start_at = 0.0
        self._thread: threading.Thread | None = None
        self._is_working = False
        self.generation = 0
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    def submit(self, request: R) -> None:
        """Replace the current request, if any, with this one."""
        with self._changed:
            self._drop()
            self._waiting = [request]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._loop, daemon=True, name="attnlab-panel"
                )
                self._thread.start()

    def cancel(self) -> None:
        """Drop the current request; its job ends at its next check and publishes nothing."""
        with self._changed:
            self._drop()

    def _drop(self) -> None:
        self.generation += 1
        now = time.perf_counter()
        is_burst = now - self._changed_at < self._quiet_s
        self._changed_at = now
        self._start_at = now + self._quiet_s if is_burst else now
        self._waiting = []
        self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Return whether a request waits or a job runs."""
        return bool(self._waiting) or self._is_working

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the worker is idle; return whether it was within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_busy, timeout_s)

    def _loop(self) -> None:
        while True:
            request, job = self._take()
            with suppress(Outdated):
                try:
                    with _no_collection():
                        self._work(request, job)
                except Exception as error:
                    job.publish(partial(self._on_error, request, error))
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def _take(self) -> tuple[R, Job]:
        """Wait until a request may start, and take it."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting)
                left_s = self._start_at - time.perf_counter()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._is_working = True
            job = Job(generation=self.generation, worker=self)  # type: ignore[arg-type]
            return self._waiting.pop(), job


_DELAY_S, _INTERVAL_S = 0.4, 0.1  # until progress is first shown, and between two updates
PICTURES = "pictures"
_ALL_STEPS = (*STEPS, PICTURES)


class Progress:
    """A bar, the name of the current step and a Cancel button; visible only during long work.

    In the HTML, ``data-state`` is "working" or "idle".
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._bar = ipw.FloatProgress(
            max=1.0, tooltip="The part of the steps that is done.", layout={"width": "160px"}
        )
        self._button = ipw.Button(
            description="Cancel",
            tooltip="Stop the run and keep the results shown.",
            layout={"width": "80px"},
        )
        self._button.on_click(lambda button: on_cancel())
        self._text = ipw.HTML(tooltip="")
        self._working = [self._bar, self._button]
        self._job: Job | None = None  # the job whose progress is shown
        self.widget = ipw.HBox([*self._working, self._text]).add_class("attnlab-progress")
        self.end("")

    def begin(self) -> None:
        """Set the state to working; the bar appears only if the work takes long."""
        self._bar.value = 0.0
        self._show_text("", "working")

    def end(self, text: str) -> None:
        """Set the state to idle and show ``text``."""
        self._job = None
        for part in self._working:
            part.layout.display = "none"
        self._show_text(text, "idle")

    def on_step_of(self, job: Job) -> OnStep:
        """Return the function to call before each step of a job; it raises Outdated if the job is."""
        last_shown, current = job.start + _DELAY_S - _INTERVAL_S, ("", None, None)
        begun = job.start  # the current step

        def on_step(step: str, done: int | None = None, total: int | None = None) -> None:
            nonlocal last_shown, current, begun
            job.check()
            if step != current[0]:
                begun = time.perf_counter()
            current = (step, done, total)  # type: ignore[assignment]
            if time.perf_counter() - last_shown >= _INTERVAL_S:
                last_shown = time.perf_counter()
                left = time_left(time.perf_counter() - begun, done, total)
                job.publish(lambda: self._show(step, done, total, left))

        def show_long_step() -> None:
            """Show a step that takes longer than the delay and does not report in the meantime."""
            with suppress(Outdated):
                job.publish(lambda: self._show(*current) if self._job is job else None)

        self._job = job
        timer = threading.Timer(_DELAY_S, show_long_step)
        timer.daemon = True
        timer.start()
        return on_step

    def _show(self, step: str, done: int | None, total: int | None, left: str = "") -> None:
        for part in self._working:
            part.layout.display = ""
        self._bar.value = share_done(step, done, total, self._bar.value)
        count = "" if done is None or total is None else f": {done} of {total}"
        self._show_text(f"{step}{count}{left}", "working")

    def _show_text(self, text: str, state: str) -> None:
        self._text.value = f'<span data-state="{state}">{escape(text)}</span>'


def share_done(step: str, done: int | None, total: int | None, before: float) -> float:
    """Return the share of the work that is done, from 0 to 1, and never less than ``before``.

    An unknown step leaves the share as it is.
    """
    if step not in _ALL_STEPS:
        return before
    within = done / total if done is not None and total else 0.0
    return max(before, (_ALL_STEPS.index(step) + within) / len(_ALL_STEPS))


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
    """Return the Case of a text: JSON, a command line of ``attnlab run``, or a vLLM test id."""
    text = text.strip()
    if text.startswith("{"):
        return Case.from_json(text)
    if text.startswith("attnlab "):
        parser = _CaseParser(prog="attnlab run", add_help=False)
        add_case_flags(parser)
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise InvalidCase(f"command line must have matching quotes: {error}") from error
        if words[1:2] != ["run"]:
            raise InvalidCase(f"command line must begin with attnlab run, got {text[:40]!r}")
        return case_of(parser.parse_args(words[2:]))
    return Case.from_test_id(text)


class _CaseParser(Parser):
    """Parser of the flags of a Case that raises InvalidCase."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise InvalidCase(f"command line must be that of attnlab run: {message}")


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
