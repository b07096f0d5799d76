"""Rendered: a plot as a PNG, with the transform from its pixels to its data."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave

DPI = 105  # "small" texts have 12 CSS pixels
PIXEL_RATIO = 1.5  # pixels of the PNG per CSS pixel
_MAX_CELLS = 400_000  # larger pictures have no text at the pointer
_DARK, _LIGHT_TEXT = "#1c1c1c", "#d6d6d6"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxesTransform:
    """The place of the axes in a picture, and the data range that they show.

    - ``left``, ``top``, ``right``, ``bottom``: fractions of the picture, from its upper left corner.
    - ``x``, ``y``: the data at the left and right, and at the top and bottom edge; linear.
    """

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def to_data(self, across: float, down: float) -> tuple[float, float] | None:
        """Return the data at a point, given as fractions of the picture; None outside the axes."""
        u = (across - self.left) / (self.right - self.left)
        v = (down - self.top) / (self.bottom - self.top)
        if not (0 <= u < 1 and 0 <= v < 1):
            return None
        return self.x[0] + u * (self.x[1] - self.x[0]), self.y[0] + v * (self.y[1] - self.y[0])

    def box(self, x: float, y: float, rows: int = 1) -> list[float]:
        """Return left, top, width and height of cells of an image, as fractions of the picture.

        ``x``, ``y``: the centre of the first cell; ``rows``: the number of cells from it downwards.
        """
        width = (self.right - self.left) / (self.x[1] - self.x[0])
        height = (self.bottom - self.top) / (self.y[1] - self.y[0])
        left = self.left + (x - 0.5 - self.x[0]) * width
        return [left, self.top + (y - 0.5 - self.y[0]) * height, width, rows * height]

    def column(self, x: float) -> list[float]:
        """Return left, top, width and height of the full column around ``x``, as fractions."""
        left, _, width, _ = self.box(x, 0)
        return [left, self.top, width, self.bottom - self.top]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """What a picture shows in each cell, for the text at the pointer.

    - ``rows``, ``columns``: their names. With one row, the whole height of the axes is that row.
    - ``values``: [rows, columns] float32; if there are ``names``, indices into them.
    - ``unit``: the text before a number.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Any
    names: Sequence[str] = ()
    unit: str = ""

    def state(self, transform: AxesTransform) -> dict[str, Any]:
        """Return the cells and their place in a picture, for the front-end; {} if they are too many."""
        if len(self.rows) * len(self.columns) > _MAX_CELLS:
            return {}
        t = transform
        return {
            "rows": list(self.rows),
            "columns": list(self.columns),
            "values": np.ascontiguousarray(self.values, dtype="<f4").tobytes(),
            "names": list(self.names),
            "unit": self.unit,
            "place": [t.left, t.top, t.right, t.bottom],
            "range": [*t.x, *t.y],
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendered:
    """A PNG, its width in CSS pixels, its title, the transform to its data, and its cells."""

    png: bytes
    width: int
    title: str
    transform: AxesTransform
    cells: Cells


def axes_rect(
    size: tuple[int, int], margins: tuple[int, int, int, int]
) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height of the axes, as fractions of a picture of ``size`` pixels.

    ``margins`` are pixels left, right, below and above the axes.
    """
    (width, height), (left, right, below, above) = size, margins
    return (left / width, below / height, 1 - (left + right) / width, 1 - (below + above) / height)


def render(
    plot: Callable[[Axes], object],
    size: tuple[int, int],
    rect: tuple[float, float, float, float],
    cells: Cells,
    *,
    is_dark: bool = False,
) -> Rendered:
    """Render what ``plot`` draws on an Axes at ``rect`` into a picture of ``size`` CSS pixels.

    ``rect`` (see :func:`axes_rect`) is given because matplotlib's layout takes longer than all the rest.
    Does not use pyplot, which is not safe in a second thread.
    """
    canvas, ax = new_axes(size, rect)
    plot(ax)
    style_texts(ax, size[0], is_dark)
    canvas.draw()
    return as_rendered(canvas, ax, size[0], cells)


def new_axes(
    size: tuple[int, int], rect: tuple[float, float, float, float]
) -> tuple[FigureCanvasAgg, Axes]:
    """Return the canvas of a new figure of ``size`` CSS pixels, and its axes at ``rect``."""
    width, height = size
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI * PIXEL_RATIO)
    return FigureCanvasAgg(figure), figure.add_axes(rect)


def style_texts(ax: Axes, width: int, is_dark: bool) -> None:
    """Fit the title to a picture of ``width`` CSS pixels, and its colours to the theme; changes the axes."""
    ax.title.set_fontsize("medium" if width > 400 else "small")
    extent, figure = ax.title.get_window_extent(), ax.get_figure(root=True)
    assert figure is not None
    if extent.x0 < 0 or extent.x1 > figure.bbox.x1:  # in the middle of the picture, not of the axes
        place = ax.get_position()
        ax.title.set_x((0.5 - place.x0) / place.width)
    if is_dark:
        _make_dark(ax.figure)


def as_rendered(canvas: FigureCanvasAgg, ax: Axes, width: int, cells: Cells) -> Rendered:
    """Return what the canvas shows."""
    buffer = io.BytesIO()
    pixels = np.asarray(canvas.buffer_rgba())
    imsave(buffer, pixels, format="png", pil_kwargs={"compress_level": 1})
    return Rendered(
        png=buffer.getvalue(),
        width=width,
        title=ax.get_title(),
        transform=_axes_transform(ax),
        cells=cells,
    )


def _make_dark(figure: Any) -> None:
    """Give the figure a dark background and light texts; changes the figure."""
    figure.set_facecolor(_DARK)
    for ax in figure.axes:
        ax.set_facecolor(_DARK)
        texts = [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts]
        if legend := ax.get_legend():
            texts += legend.get_texts()
        for text in texts:
            text.set_color(_LIGHT_TEXT)
        ax.tick_params(which="both", colors=_LIGHT_TEXT)
        for spine in ax.spines.values():
            spine.set_color(_LIGHT_TEXT)


def _axes_transform(ax: Axes) -> AxesTransform:
    position = ax.get_position()
    left_x, right_x = ax.get_xlim()
    bottom_y, top_y = ax.get_ylim()
    return AxesTransform(
        left=position.x0,
        top=1 - position.y1,
        right=position.x1,
        bottom=1 - position.y0,
        x=(left_x, right_x),
        y=(top_y, bottom_y),
    )


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
