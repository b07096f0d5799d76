"""The part of an explorer where a Case is copied out as text, and pasted in."""

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as ipw

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.show.panels.case_text import case_texts, read_case

_STYLE = {"description_width": "130px"}


class ExchangeBox:
    """Texts to copy, and a field to paste one into; ``on_case`` gets the Case of what was pasted."""

    def __init__(self, on_case: Callable[[Case], None]) -> None:
        self._on_case = on_case
        wide = {"width": "auto"}
        self.outs = {
            name: ipw.Textarea(description=name, rows=2, style=_STYLE, layout=wide)
            for name in ("JSON", "command line", "from a test id", "test id")
        }
        self.pasted = ipw.Text(
            description="paste",
            placeholder="a test id, JSON or a command line, then Enter",
            continuous_update=False,
            style=_STYLE,
            layout=wide,
        )
        self.message = ipw.HTML()
        self.pasted.observe(self._on_paste, "value")
        inside = ipw.VBox([self.pasted, self.message, *self.outs.values()])
        self.widget = ipw.Accordion(children=[inside], titles=["copy this case out, or paste one"])
        self.widget.add_class("attnlab-texts")

    def show(self, case: Case) -> None:
        """Write the Case as text."""
        for name, text in case_texts(case).items():
            self.outs[name].value = text or "none: the test has no such parameters"

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
        self.message.value = "taken over"
        self._on_case(case)
