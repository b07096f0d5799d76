"""CaseTextBox: the part of an explorer that shows its Case as text and reads a pasted one."""

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as ipw

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.show.panels.case_text import case_texts, read_case
from attnlab.show.panels.controls import labelled

_TOOLTIPS = {
    "JSON": "The fields that differ from their defaults, for Case.from_json.",
    "command line": "The command that runs this case in a terminal.",
    "from a test id": "A Python expression: the nearest test of vLLM, and the fields that differ.",
    "test id": "The parameters of vLLM's test that runs this case, if there is one.",
}
_PASTE_TOOLTIP = "Set all controls from a test id, JSON or a command line of attnlab run."


class CaseTextBox:
    """Texts of the current Case to copy, and an input that calls ``on_case`` with a pasted Case."""

    def __init__(self, on_case: Callable[[Case], None]) -> None:
        self._on_case = on_case
        shared: dict[str, Any] = {"layout": {"width": "auto"}}
        self.texts = {
            name: ipw.Textarea(tooltip=tooltip, rows=2, **shared)
            for name, tooltip in _TOOLTIPS.items()
        }
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
        self.widget = ipw.Accordion(children=[content], titles=["copy or paste a case as text"])
        self.widget.selected_index = None
        self.widget.add_class("attnlab-texts")

    def show(self, case: Case) -> None:
        """Show the Case as text."""
        for name, text in case_texts(case).items():
            self.texts[name].value = text or "no test of vLLM has these parameters"

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
