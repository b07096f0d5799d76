"""A picture on a panel: a PNG that tells where it was clicked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from attnlab.show.panels.draw import Rendered

_HERE = Path(__file__).parent


class Picture(anywidget.AnyWidget):
    """Shows a PNG, with a mark on it, and passes on clicks and arrow keys.

    ``version`` changes last, and with it the front-end takes ``png``. ``mark`` is left, top, width and
    height in parts of the picture; no width is no mark.
    """

    _esm = _HERE / "picture.js"
    _css = _HERE / "panel.css"
    png = traitlets.Bytes().tag(sync=True)
    width = traitlets.Int().tag(sync=True)
    version = traitlets.Int().tag(sync=True)
    alt = traitlets.Unicode().tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)
    mark = traitlets.List([0.0, 0.0, 0.0, 0.0]).tag(sync=True)
    stale = traitlets.Bool().tag(sync=True)

    def show(self, drawn: Rendered | None) -> None:
        """Show a picture, or none."""
        with self.hold_sync():
            self.png = drawn.png if drawn is not None else b""
            self.width = drawn.width if drawn is not None else 0
            self.alt = drawn.title if drawn is not None else ""
            self.stale = False
            self.version += 1

    def on_point(
        self,
        click: Callable[[float, float], None],
        step: Callable[[int, int], None] = lambda right, down: None,
    ) -> None:
        """Call ``click`` with where the picture was clicked, in parts of its width and height, and
        ``step`` with the direction of an arrow key."""

        def told(widget: Any, message: Any, buffers: Any) -> None:
            if "click" in message:
                click(*message["click"])
            elif "step" in message:
                step(*message["step"])

        self.on_msg(told)
