"""Panel: controls and views of one Case, kept together."""

import base64
import traceback
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as ipw

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.show.panels import layout as arrange
from attnlab.show.panels import texts
from attnlab.show.panels.controls import Control, check_knobs, source_input
from attnlab.show.panels.draft import Draft
from attnlab.show.panels.draw import Rendered
from attnlab.show.panels.exchange_box import ExchangeBox
from attnlab.show.panels.latest import Job, LatestOnly
from attnlab.show.panels.panel_data import PanelData, Selection, look
from attnlab.show.panels.picture import Picture
from attnlab.show.panels.pointing import Pointer
from attnlab.show.panels.progress import Progress
from attnlab.show.panels.views import VIEWS

FACTS = {
    "dispatch": lambda result: texts.dispatch_html(result.decision),
    "violations": lambda result: texts.breaches_html(result.violations),
}
_PATIENCE_S = 0.5  # a panel that is ready within this shows itself at once, whole
_ORIGIN_GROUP = FIELDS["backend"].metadata["group"]


class Panel:
    """Toggles for some knobs of a Case, and what comes of it.

    Each change asks for the Case anew, in a thread of the panel's own; only the last answer is shown. A
    change that gives no Case is explained at the control that is wrong, and the pictures stay, marked as
    stale. Displayed without JupyterLab's front-end, as in a report, the panel is a static picture of its
    answer.

    From Python: :meth:`set` and :meth:`show` turn the knobs, :meth:`wait` waits, :meth:`cancel` stops,
    ``pointer`` selects. ``result`` is the answer, None until there is one.
    """

    def __init__(
        self,
        case: Case,
        *,
        knobs: Sequence[str],
        views: Sequence[str],
        lab: Lab | None = None,
        is_explorer: bool = False,
    ) -> None:
        check_knobs(knobs)
        check_views(views)
        self._lab = lab if lab is not None else Lab()
        self._draft, self._quiet = Draft.of(case), False
        self._stale = False
        self.seen: PanelData | None = None
        self.error: Exception | None = None  # what ended the last answer, where it has no Result
        self._drawn: dict[str, Rendered] = {}
        values = self._draft.values
        self.controls = {name: Control(name, self._on_control, values[name]) for name in knobs}
        shown = ("verdict", *(name for name in FACTS if name in views), "selection")
        self.texts = {name: ipw.HTML() for name in shown}
        self.pictures = {name: Picture(hint=VIEWS[name].hint) for name in VIEWS if name in views}
        self.progress = Progress(self.cancel)
        self.pointer = Pointer(self.pictures, self.texts["selection"], self._drawn)
        self.exchange = ExchangeBox(self.put)
        self._source = source_input(str(self._lab.source or ""))
        self._source.observe(self._on_source, "value")
        self._latest: LatestOnly[Case] = LatestOnly(self._answer, self._on_error)
        self._boxes: dict[str, Any] = {}
        self.widget = self._arranged(is_explorer)
        self._on_draft(self._draft)

    # From Python.

    @property
    def case(self) -> Case:
        """Return the Case that the controls say; raise InvalidCase where they say none."""
        return self._draft.case()

    @property
    def result(self) -> Result | None:
        """Return the Result that is shown."""
        return None if self.seen is None else self.seen.result

    @property
    def selection(self) -> Selection | None:
        """Return what is selected."""
        return self.pointer.selection

    @property
    def is_stale(self) -> bool:
        """Answer whether what is shown is not of the Case that the controls say."""
        return self._stale

    def set(self, **changes: Any) -> None:
        """Turn knobs, all at once; a wrong combination is explained, as when a person turned them."""
        check_knobs(list(changes))
        draft = self._draft
        for name, value in changes.items():
            draft = draft.with_value(name, value)
        self._show_values(draft)
        self._on_draft(draft)

    def put(self, case: Case) -> None:
        """Turn every knob to what the Case says."""
        self.set(**Draft.of(case).values)

    def show(self, **changes: Any) -> Result:
        """Turn knobs, wait, and return the Result; raise what went wrong instead."""
        self.set(**changes)
        self._draft.case()
        self.wait()
        if self.error is not None:
            raise self.error
        if self.seen is None or self.is_stale:
            raise AttnLabError("the panel must not be cancelled while show() waits")
        return self.seen.result

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the pictures are those of the controls; answer whether that came in time."""
        return self._latest.wait(timeout_s)

    def cancel(self) -> None:
        """End what is under way; its answer is not shown."""
        with self._latest.lock:
            if self._latest.busy:
                self._latest.cancel()
                self.progress.end("cancelled; what is shown is of an earlier case")

    # What the front-end sees.

    def _ipython_display_(self) -> None:
        """Show the panel and, where no front-end is, a static picture: at once, or when there is one."""
        from IPython.display import display

        if self.wait(_PATIENCE_S):
            display(self._repr_mimebundle_(), raw=True)
            return
        handle = display(self._live(), raw=True, display_id=True)
        try:
            self.wait()
        except KeyboardInterrupt:
            self.cancel()
        handle.update(self._repr_mimebundle_(), raw=True)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        self.wait()
        return {**self._live(), "text/html": self.to_html()}

    def _live(self) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        text = f"attnlab panel: {', '.join(self.controls)}"
        return {"text/plain": text, "application/vnd.jupyter.widget-view+json": view}

    def to_html(self) -> str:
        """Return the panel as it stands, without anything to click: texts and pictures."""
        selected = self.selection is not None
        parts = [box.value for name, box in self.texts.items() if name != "selection" or selected]
        parts += [
            f'<img alt="{escape(drawn.title)}" width="{drawn.width}" style="max-width:100%" '
            f'src="data:image/png;base64,{base64.b64encode(drawn.png).decode()}">'
            for drawn in self._drawn.values()
        ]
        names = list(self.controls)
        toggles = ", ".join(names) if len(names) <= 8 else f"all {len(names)} knobs"
        parts.append(f'<p class="note"><small>In JupyterLab: toggles for {toggles}.</small></p>')
        return f'<div class="attnlab-static">{"".join(parts)}</div>'

    def _arranged(self, is_explorer: bool) -> Any:
        if not is_explorer:
            return arrange.small(
                list(self.controls.values()), self.progress.widget, self.texts, self.pictures
            )
        self._boxes = arrange.group_boxes(self.controls, {_ORIGIN_GROUP: self._source})
        boxes, exchange = list(self._boxes.values()), self.exchange.widget
        return arrange.large(boxes, self.progress.widget, self.texts, self.pictures, exchange)

    # From a control to a question.

    def _on_control(self, name: str) -> None:
        if self._quiet:
            return
        try:
            draft = self._draft.with_value(name, self.controls[name].read())
        except InvalidCase as error:
            draft = self._draft.with_unread(name, str(error))
        self._on_draft(draft)

    def _on_source(self, change: Any) -> None:
        """Take vLLM from another place; nothing of the Lab before is kept."""
        self._lab = Lab(source=change["new"].strip() or None, device=self._lab.device)
        self._on_draft(self._draft)

    def _show_values(self, draft: Draft) -> None:
        self._quiet = True
        try:
            for name, control in self.controls.items():
                control.show(draft.values[name])
        finally:
            self._quiet = False

    def _on_draft(self, draft: Draft) -> None:
        """Ask for the draft's Case, or explain why it is none."""
        with self._latest.lock:
            self._draft, problem = draft, draft.problem()
            self._set_stale(True)
            at = problem.knob if problem is not None else ""
            at = at if at in self.controls else draft.last
            for name, control in self.controls.items():
                is_wrong = problem is not None and name == at
                control.explain(problem.text if problem is not None and is_wrong else "")
            self._mark_groups(at if problem is not None else "")
            if problem is not None:
                self._latest.cancel()
                self.progress.end(f"not a case: {problem.text}")
                return
            case = draft.case()
            self.exchange.show(case)
            self.progress.begin()
            self._latest.ask(case)

    def _mark_groups(self, wrong: str) -> None:
        """Count in each group's title what differs from the defaults; open the group that is wrong."""
        changed = {n for n, v in self._draft.values.items() if v != FIELDS[n].default}
        for group, box in self._boxes.items():
            names = [name for name in self.controls if FIELDS[name].metadata["group"] == group]
            count = len(changed & set(names))
            box.titles = (f"{group} ({count} changed)" if count else group,)
            if wrong in names:
                box.selected_index = 0

    def _set_stale(self, stale: bool) -> None:
        self._stale = stale
        for picture in self.pictures.values():
            picture.stale = stale

    # From an answer to the views; these run in the panel's thread.

    def _answer(self, case: Case, turn: Job) -> None:
        step = self.progress.steps(turn)
        seen = look(self._lab, case, step)
        turn.give(lambda: self._show_texts(seen))
        for name in self.pictures:
            step(f"picture of {name}")
            drawn = VIEWS[name].draw(seen)
            turn.give(lambda name=name, drawn=drawn: self._show_picture(name, drawn))  # type: ignore[misc]
        turn.give(self._finish)

    def _show_texts(self, seen: PanelData) -> None:
        self.seen, self.error = seen, None
        self.texts["verdict"].value = texts.verdict_html(seen.result)
        for name, box in self.texts.items():
            if name in FACTS:
                box.value = FACTS[name](seen.result)

    def _show_picture(self, name: str, drawn: Rendered | None) -> None:
        self.pictures[name].show(drawn)
        self._drawn.pop(name, None)
        if drawn is not None:
            self._drawn[name] = drawn

    def _finish(self) -> None:
        self._set_stale(False)
        self.pointer.follow(self.seen)
        self.progress.end("")

    def _on_error(self, case: Case, error: Exception) -> None:
        """Show what ended an answer: what the lab says on purpose in its words, else with its place."""
        self.error = error
        title = f"{type(error).__name__}:"
        if isinstance(error, AttnLabError):
            self.texts["verdict"].value = texts.failure_html(title, str(error))
        else:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{error} ({Path(where.filename).name}, line {where.lineno})"
            self.texts["verdict"].value = texts.failure_html(
                "a fault of the lab,", f"{title} {text}"
            )
        self.progress.end("what is shown below is of an earlier case" if self.seen else "")


def check_views(names: Sequence[str]) -> None:
    """Raise AttnLabError for a name that is no view."""
    known = (*FACTS, *VIEWS)
    for name in names:
        if name not in known:
            raise AttnLabError(f"view must be one of {', '.join(known)}, got {name}")
