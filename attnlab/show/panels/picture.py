"""Picture: a widget that shows a PNG, with the value at the pointer, and reports clicks and arrow keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from attnlab.show.panels.rendering import Rendered

_HERE = Path(__file__).parent


class Picture(anywidget.AnyWidget):
    """A PNG with a mark; it shows the value at the pointer and reports clicks and arrow keys.

    The front-end loads ``png`` when ``version`` changes; it sets ``dark``, whether the page's theme is
    dark. ``mark`` is left, top, width and height as fractions of the picture; a width of 0 hides it.
    ``cells`` is :meth:`attnlab.show.panels.rendering.Cells.state`. ``hint`` is the tooltip: a trait
    ``tooltip`` would replace that of ipywidgets and stop the front-end.
    """

    _esm = _HERE / "picture.js"
    _css = _HERE / "panel.css"
    png = traitlets.Bytes().tag(sync=True)
    width = traitlets.Int().tag(sync=True)
    version = traitlets.Int().tag(sync=True)
    alt = traitlets.Unicode().tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)
    mark = traitlets.List([0.0, 0.0, 0.0, 0.0]).tag(sync=True)
    cells = traitlets.Dict().tag(sync=True)
    stale = traitlets.Bool().tag(sync=True)
    dark = traitlets.Bool().tag(sync=True)

    def show(self, rendered: Rendered | None) -> None:
        """Show a picture; None hides it."""
        with self.hold_sync():
            self.png = rendered.png if rendered is not None else b""
            self.width = rendered.width if rendered is not None else 0
            self.alt = rendered.title if rendered is not None else ""
            self.cells = rendered.cells.state(rendered.transform) if rendered is not None else {}
            self.stale = False
            self.version += 1

    def on_point(
        self,
        click: Callable[[float, float], None],
        step: Callable[[int, int], None] = lambda right, down: None,
    ) -> None:
        """Call ``click`` with the clicked point as fractions of the picture, ``step`` for an arrow key."""

        def on_message(widget: Any, message: Any, buffers: Any) -> None:
            if "click" in message:
                click(*message["click"])
            elif "step" in message:
                step(*message["step"])

        self.on_msg(on_message)
