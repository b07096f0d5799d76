"""Panel: controls and views of one Case, on kernels by name or on functions of a notebook."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from html import escape
from operator import is_not
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakMethod

import ipywidgets as ipw

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.diagnosis.captured import where_it_ran
from attnlab.kernels import find_backend
from attnlab.kernels.model import ModelBackend
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.run_call import for_call
from attnlab.kernels.runner import one_backend
from attnlab.lab.call_lab import CallLab, call_lab
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.show.panels import controls as inputs
from attnlab.show.panels.boxes import (
    PICTURES,
    CaseTextBox,
    Job,
    LatestOnly,
    Progress,
    XrayBox,
    cell_text,
)
from attnlab.show.panels.controls import Control, Draft, check_knobs, groups, labelled, set_class
from attnlab.show.panels.rendering import Picture, Rendered
from attnlab.show.panels.views import (
    FACTS,
    VIEWS,
    XRAY,
    Frames,
    PanelData,
    Pointer,
    Selection,
    check_views,
    compared,
    failure_html,
    make_panel_data,
    result_html,
)
from attnlab.tensors.call import KernelCall

# What an explorer runs: a Case or a saved call, on kernels by name or on functions of a notebook.

Kernel = Callable[..., Any]
# A small Case of a user's kernel: prefill and decode, at and around the ends of blocks.
_SMALL: dict[str, Any] = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 64,
    "query_lens": (18, 1, 5),
    "ctx_lens": (0, 64, 37),
    "distribution": "normal",
    "stage": "sound",
}


@dataclass(slots=True, kw_only=True)
class NotebookKernels:
    """Functions of a notebook that Cases name as backend, "MODULE:FUNCTION".

    A cell that defines one anew, or what it uses, replaces it: :meth:`changed` finds that out.
    """

    functions: dict[str, Kernel] = field(default_factory=dict)
    _parts: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, kernel: Kernel | str) -> str:
        """Return the name of a kernel as a backend; a function is kept."""
        if isinstance(kernel, str):
            return kernel
        name = f"{kernel.__module__}:{kernel.__name__}"
        self.functions[name] = kernel
        self._parts[name] = [*_used(kernel, set())]
        return name

    def expression(self, name: str) -> str:
        """Return the Python of a backend: the name of a function of the notebook, or a text."""
        return self.functions[name].__name__ if name in self.functions else repr(name)

    def changed(self) -> bool:
        """Take functions that their module has defined anew; return whether there is one."""
        is_changed = False
        for name, kernel in [*self.functions.items()]:
            found: dict[str, Any] = getattr(getattr(kernel, "fn", kernel), "__globals__", {})
            new = found.get(kernel.__name__, kernel)
            parts, before = [*_used(new, set())], self._parts[name]
            if len(parts) != len(before) or any(map(is_not, parts, before)):
                self.add(new)
                is_changed = True
        return is_changed

    def lab_of(self, lab: Lab, case: Case) -> Lab:
        """Return the lab that runs a Case, with the products of ``lab``."""
        lab = copy(lab)
        if case.backend in self.functions:
            lab.runner = PluginBackend(spec=case.backend, function=self.functions[case.backend])
        elif isinstance(lab, CallLab):
            lab.runner = find_backend(case.backend, lab.source, lab.device)
        if isinstance(lab, CallLab):
            lab.runner = for_call(lab.given, lab.runner)
        return lab


def after_each_cell(follow: Callable[..., None]) -> None:
    """Call a method after each cell of the notebook as long as its object exists; not without IPython."""
    from IPython import get_ipython

    shell, method = get_ipython(), WeakMethod(follow)
    if shell is None:
        return

    def ended(*_: Any) -> None:
        if (alive := method()) is not None:
            alive()
        else:
            shell.events.unregister("post_run_cell", ended)

    shell.events.register("post_run_cell", ended)


def _used(one: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a function, and the functions and numbers of its module that it uses."""
    function = getattr(one, "fn", one)  # of triton.jit
    if id(one) in seen:
        return
    seen.add(id(one))
    yield one
    if not isinstance(function, FunctionType):
        return
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if callable(used) or isinstance(used, int | float):
            yield from _used(used, seen)


def subject(
    what: Case | KernelCall | Path | str | None,
    kernel: Kernel | str | None,
    source: Path | str | None,
    lab: Lab | None,
    kernels: NotebookKernels,
) -> tuple[Case, Lab]:
    """Return the Case of an explorer and its lab; a path is that of a saved KernelCall.

    Without a kernel and a source, a call runs on the models.
    """
    name = None if kernel is None else kernels.add(kernel)
    if isinstance(what, Path | str):
        what = KernelCall.load(Path(what))
    if isinstance(what, KernelCall):
        own = PluginBackend(spec=name, function=kernel) if name and callable(kernel) else None
        runner = own or one_backend(source, name, None) or ModelBackend()
        ran = where_it_ran(what, Case()).case
        of_call = call_lab(what.cpu(), ran, runner, source=source)
        return of_call.case, of_call
    lab = lab if lab is not None else Lab(source=source)
    if name is None:
        backend = {} if source is None else {"backend": "vllm"}
        return (what or Case()).replace(**backend), lab
    if what is None:
        function = kernel if callable(kernel) else None
        is_plugin = function is not None or ":" in name
        op = PluginBackend(spec=name, function=function).op if is_plugin else Case().op
        what = Case(**_SMALL, op=op)
    return what.replace(backend=name), lab


# The controls of the explorer that are always visible, by section.
MAIN = {
    "what runs": ("stage", "platform", "release", "op", "backend"),
    "cache and data": ("fill", "empty_slots", "distribution"),
    "sizes": (
        "num_heads",
        "num_queries_per_kv",
        "head_size",
        "block_size",
        "num_seqs",
        "draw_max_query_len",
        "draw_max_ctx_len",
    ),
}
_MAIN_NAMES = {name for names in MAIN.values() for name in names}


def group_boxes(
    controls: Mapping[str, Control], extra: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a folded box for each group of controls that are not in MAIN.

    ``extra`` has further inputs by group and name. A group without controls has no box.
    """
    boxes = {}
    for group, names in groups([name for name in controls if name not in _MAIN_NAMES]).items():
        inputs = [controls[name].widget for name in names]
        inputs += [
            ipw.VBox([labelled(*item)]).add_class("attnlab-control")
            for item in extra.get(group, {}).items()
        ]
        boxes[group] = ipw.Accordion(children=[ipw.VBox(inputs)], titles=[group])
        boxes[group].selected_index = None
    return boxes


def names_in(group: str, controls: Mapping[str, Control]) -> list[str]:
    """Return the fields in the box of a group."""
    return groups([name for name in controls if name not in _MAIN_NAMES]).get(group, [])


def small(
    controls: Mapping[str, Control],
    status: Any,
    texts: Mapping[str, Any],
    pictures: Mapping[str, Any],
    boxes: Sequence[Any],
) -> Any:
    """Return the layout of a panel in a notebook: controls in a row, the verdict, the pictures, the boxes."""
    line = _box([control.widget for control in controls.values()], "attnlab-line")
    plots = _box(list(pictures.values()), "attnlab-line")
    below = [text for name, text in texts.items() if name != "verdict"]
    parts = [line, texts["verdict"], status, plots, *below, *boxes]
    return _box(parts, "attnlab-panel attnlab-small")


def large(
    controls: Mapping[str, Control],
    boxes: Sequence[Any],
    status: Any,
    reset: Any,
    texts: Mapping[str, Any],
    pictures: Mapping[str, Any],
) -> Any:
    """Return the layout of the explorer.

    The main controls are at the left of the verdict and the errors; the selection, violations and dispatch
    are at the right of these if the page is wide, else below. ``boxes``, the folded groups, come last.
    """
    left = []
    for title, names in MAIN.items():
        head = ipw.HTML(f"<b>{title}</b>", tooltip="").add_class("attnlab-section")
        left.append(_box([head, *(controls[name].widget for name in names)], "attnlab-part"))
    grid = _box(
        [
            _box([reset, *left], "attnlab-left"),
            _box([texts["verdict"], status, pictures["error"]], "attnlab-middle"),
            _box(
                [
                    texts["against"],
                    pictures["other"],
                    *(texts[name] for name in ("selection", "violations", "dispatch")),
                ],
                "attnlab-facts",
            ),
            _box(
                [pictures[name] for name in ("difference", "slots", "seqs", "mask")],
                "attnlab-plots attnlab-line",
            ),
        ],
        "attnlab-grid",
    )
    return _box([grid, _box(boxes, "attnlab-groups")], "attnlab-panel attnlab-explorer")


def _box(children: Sequence[Any], classes: str) -> Any:
    box = ipw.Box(list(children))
    for name in classes.split():
        box.add_class(name)
    return box


_MAX_NAMES = 8  # fields that are listed; more are counted


def static_html(
    texts: Sequence[str], rendered: Mapping[str, Rendered], fields: Sequence[str]
) -> str:
    """Return texts and pictures as HTML without scripts and external resources."""
    pictures = [
        f'<img alt="{escape(picture.title)}" width="{picture.width}" style="max-width:100%" '
        f'src="data:image/png;base64,{base64.b64encode(picture.png).decode()}">'
        for picture in rendered.values()
    ]
    names = (
        ", ".join(fields) if len(fields) <= _MAX_NAMES else f"all {len(fields)} fields of a Case"
    )
    note = f'<p class="note"><small>In JupyterLab: controls for {names}.</small></p>'
    return f'<div class="attnlab-static">{"".join([*texts, *pictures, note])}</div>'


_TEXTS = "texts"
_MAX_DELAY_S = 0.5  # a panel that is ready within this time is displayed complete
_SOURCE_GROUP = FIELDS["backend"].metadata["group"]


class Panel:
    """Controls for some fields of a Case, and the results.

    Every change runs the Case in a background thread; only the newest result is shown. If the values do
    not form a Case, the control at fault shows why, and the old pictures are marked as stale. Without
    JupyterLab's front-end, as in a report, the panel is a static picture of its result.

    In Python, :meth:`set` and :meth:`show` change fields, :meth:`reset` restores the first Case,
    :meth:`wait` waits, :meth:`cancel` stops, ``pointer`` selects, and ``result`` is the Result, or None
    before the first one.
    """

    def __init__(
        self,
        case: Case,
        *,
        knobs: Sequence[str],
        views: Sequence[str],
        lab: Lab | None = None,
        kernels: NotebookKernels | None = None,
        against: str = "",
        call: str = "",
        is_explorer: bool = False,
    ) -> None:
        check_knobs(knobs)
        check_views([*FACTS, *VIEWS, XRAY], views)
        self._is_explorer, self._lab = is_explorer, lab if lab is not None else Lab()
        self._call = call  # the expression of the call that is explored, "" for a Case
        self._kernels, self.against = kernels or NotebookKernels(), against
        self._draft = self._first = Draft.of(case)
        self._is_showing_values = False  # if True, the events of the controls are ignored
        self._is_stale = self._is_dark = False
        self.data: PanelData | None = None
        self.error: Exception | None = None  # what ended the last run, if it has no Result
        self._rendered: dict[str, Rendered] = {}
        self._frames = Frames()  # used by the worker's thread alone
        values = self._draft.values
        self.controls = {name: Control(name, self._on_control, values[name]) for name in knobs}
        names = ("verdict", "against", *(n for n in FACTS if n in views), "selection")
        self.texts = {name: ipw.HTML(tooltip="") for name in names}
        for name, text in self.texts.items():
            text.add_class("attnlab-fact").add_class(f"attnlab-fact-{name}")
        self.pictures = {n: Picture(hint=VIEWS[n].hint) for n in VIEWS if n in views}
        for picture in self.pictures.values():
            picture.observe(self._on_theme, "dark")
        self.progress = Progress(self.cancel)
        self.pointer = Pointer(self.pictures, self.texts["selection"], self._rendered)
        self.case_text = CaseTextBox(self.put)
        self.xray = XrayBox(self._lab_now, lambda: self.case) if XRAY in views else None
        source = str(self._lab.source or "")
        self._source = inputs.text_input(inputs.SOURCE, source, "the installed vLLM")
        self._source.observe(self._on_source, "value")
        self._kernel = inputs.text_input(inputs.KERNEL)
        self._other = inputs.text_input(inputs.AGAINST, against)
        self._kernel.observe(
            lambda change: self.set(backend=change["new"].strip() or "model"), "value"
        )
        self._other.observe(self._on_against, "value")
        self._reset = ipw.Button(tooltip="Set all controls to the values of the first case.")
        self._reset.add_class("attnlab-reset").on_click(lambda button: self.reset())
        self._worker = LatestOnly(self._run, self._on_error)
        self._boxes: dict[str, Any] = {}
        self.widget = self._make_layout()
        if self._kernels.functions:
            after_each_cell(self.follow_cells)
        self._on_draft(self._draft)

    @property
    def case(self) -> Case:
        """Return the Case of the controls; raise InvalidCase if their values do not form one."""
        return self._draft.case()

    @property
    def result(self) -> Result | None:
        """Return the Result that is shown."""
        return None if self.data is None else self.data.result

    @property
    def selection(self) -> Selection | None:
        """Return the selected head of a row."""
        return self.pointer.selection

    @property
    def is_stale(self) -> bool:
        """Return whether the results shown are not those of the controls."""
        return self._is_stale

    def set(self, **changes: Any) -> None:
        """Change several fields at once; a contradiction is explained at a control, not raised."""
        check_knobs(list(changes))
        draft = self._draft
        for name, value in changes.items():
            draft = draft.with_value(name, value)
        self._show_values(draft)
        self._on_draft(draft)

    def put(self, case: Case) -> None:
        """Set every field to that of the Case."""
        self.set(**Draft.of(case).values)

    def reset(self) -> None:
        """Set every field to its value when the panel was made."""
        self.set(**self._first.values)

    def show(self, **changes: Any) -> Result:
        """Change fields, wait, and return the Result; raise the error if there is none."""
        self.set(**changes)
        self._draft.case()
        self.wait()
        if self.error is not None:
            raise self.error
        if self.data is None or self.is_stale:
            raise AttnLabError("the panel must not be cancelled while show() waits")
        return self.data.result

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the results are those of the controls; return whether that was in time."""
        return self._worker.wait(timeout_s)

    def cancel(self) -> None:
        """Stop the current run; its results are not shown."""
        with self._worker.lock:
            if self._worker.is_busy:
                self._worker.cancel()
                self.progress.end("cancelled; the results shown are those of an earlier case")

    # For the front-end.

    def _ipython_display_(self) -> None:
        """Display the panel, with a static picture for pages without front-end, added when it is ready."""
        from IPython.display import display

        if self.wait(_MAX_DELAY_S):
            display(self._repr_mimebundle_(), raw=True)
            return
        handle = display(self._widget_bundle(), raw=True, display_id=True)
        try:
            self.wait()
        except KeyboardInterrupt:
            self.cancel()
        handle.update(self._repr_mimebundle_(), raw=True)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        self.wait()
        return {**self._widget_bundle(), "text/html": self.to_html()}

    def _widget_bundle(self) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        text = f"attnlab panel: {', '.join(self.controls)}"
        return {"text/plain": text, "application/vnd.jupyter.widget-view+json": view}

    def to_html(self) -> str:
        """Return the current texts and pictures as static HTML."""
        parts = [t.value for name, t in self.texts.items() if name != "selection" or self.selection]
        return static_html(parts, self._rendered, list(self.controls))

    def _make_layout(self) -> Any:
        progress, boxes = self.progress.widget, [] if self.xray is None else [self.xray.widget]
        if not self._is_explorer:
            return small(self.controls, progress, self.texts, self.pictures, boxes)
        extra = {"source": self._source, "own_kernel": self._kernel, "against": self._other}
        self._boxes = group_boxes(self.controls, {_SOURCE_GROUP: extra})
        boxes += [*self._boxes.values(), self.case_text.widget]
        return large(self.controls, boxes, progress, self._reset, self.texts, self.pictures)

    def _on_control(self, name: str) -> None:
        if self._is_showing_values:
            return
        try:
            draft = self._draft.with_value(name, self.controls[name].read())
        except InvalidCase as error:
            draft = self._draft.with_unread(name, str(error))
        self._on_draft(draft)

    def _on_source(self, change: Any) -> None:
        """Take the kernels from another vLLM, in a new Lab."""
        self._lab = copy(self._lab)
        self._lab.source = change["new"].strip() or None
        self._on_draft(self._draft)

    def _lab_now(self) -> Lab:
        return self._kernels.lab_of(self._lab, self.case)

    def _cell_text(self, case: Case) -> str:
        """Return a cell that makes this explorer again."""
        first, kernels, given = self._first.values, self._kernels, {}
        if case.backend in kernels.functions:
            given["kernel"] = kernels.expression(case.backend)
        if self._lab.source:
            source = repr(str(self._lab.source))
            given |= {"source": source} if self._call else {"lab": f"attnlab.Lab(source={source})"}
        if self.against:
            given["against"] = kernels.expression(self.against)
        changes = {
            name: value for name, value in self._draft.values.items() if value != first[name]
        }
        return cell_text(case, self._call, changes, **given)

    def _on_against(self, change: Any) -> None:
        self.against = change["new"].strip()
        self._on_draft(self._draft)

    def follow_cells(self, *_: Any) -> None:
        """Run again if a cell of the notebook has defined a kernel of the panel anew."""
        if self._kernels.changed():
            self._on_draft(self._draft)

    def _on_theme(self, change: Any) -> None:
        """Render the pictures again if the page's theme is no longer that of the pictures."""
        if change["new"] != self._is_dark:
            self._is_dark = change["new"]
            self._on_draft(self._draft)

    def _show_values(self, draft: Draft) -> None:
        self._is_showing_values = True
        try:
            for name, control in self.controls.items():
                control.show(draft.values[name])
        finally:
            self._is_showing_values = False

    def _on_draft(self, draft: Draft) -> None:
        """Request the draft's Case, or explain why its values do not form one."""
        with self._worker.lock:
            self._draft, problem = draft, draft.problem()
            self._set_stale(True)
            at_fault = ""
            if problem is not None:
                at_fault = problem.field if problem.field in self.controls else draft.last
            for name, control in self.controls.items():
                control.explain(str(problem) if problem is not None and name == at_fault else "")
            self._mark_changes(at_fault)
            fixed = set() if problem is not None else inputs.without_effect(draft.case())
            for name, control in self.controls.items():
                control.input.disabled = name in fixed
            if problem is not None:
                self._worker.cancel()
                self.progress.end(f"invalid case: {problem}")
                return
            case = draft.case()
            self.case_text.show(case, self._cell_text(case))
            if self.xray is not None:
                self.xray.follow(case)
            self.progress.begin()
            self._worker.submit(case)

    def _mark_changes(self, at_fault: str) -> None:
        """Mark the fields that differ from the first Case, and open the group at fault."""
        first = self._first.values
        changed = {name for name, value in self._draft.values.items() if value != first[name]}
        changed |= set(self._draft.unread)
        for name, control in self.controls.items():
            control.mark(name in changed)
        self._reset.disabled = not changed
        self._reset.description = f"Reset {len(changed)} changed" if changed else "Reset"
        for group, box in self._boxes.items():
            names = names_in(group, self.controls)
            count = len(changed & set(names))
            box.titles = (f"{group} ({count} changed)" if count else group,)
            if at_fault in names:
                box.selected_index = 0

    def _set_stale(self, is_stale: bool) -> None:
        self._is_stale = is_stale
        for picture in self.pictures.values():
            picture.stale = is_stale
        for text in self.texts.values():
            set_class(text, "attnlab-stale", is_stale)

    # From a request to the views; these run in the worker's thread.

    def _run(self, case: Case, job: Job) -> None:
        on_step = self.progress.on_step_of(job)
        data = make_panel_data(self._kernels.lab_of(self._lab, case), case, on_step)
        if self.against:
            other = case.replace(backend=self.against)
            data = compared(data, self._kernels.lab_of(self._lab, other), other, on_step)
        parts = [*self.pictures]
        parts.insert(1, _TEXTS)  # after the first picture: the verdict may need a rounding bound
        for i, part in enumerate(parts):
            on_step(PICTURES, i, len(parts))
            if part == _TEXTS:
                job.publish(partial(self._show_texts, data, result_html(data)))
            else:
                rendered = VIEWS[part].render(data, self._frames, self._is_dark)
                job.publish(partial(self._show_picture, part, rendered))
        job.publish(self._finish)

    def _show_texts(self, data: PanelData, shown: Mapping[str, str]) -> None:
        self.data, self.error = data, None
        for name in shown.keys() & self.texts.keys():
            self.texts[name].value = shown[name]

    def _show_picture(self, name: str, rendered: Rendered | None) -> None:
        self.pictures[name].show(rendered)
        self._rendered.pop(name, None)
        if rendered is not None:
            self._rendered[name] = rendered

    def _finish(self) -> None:
        self._set_stale(False)
        self.pointer.follow(self.data)
        self.progress.end("")

    def _on_error(self, case: Case, error: Exception) -> None:
        """Show the error that ended a run."""
        self.error = error
        self.texts["verdict"].value = failure_html(error)
        self.progress.end("the results shown are those of an earlier case" if self.data else "")
