"""Drawing a picture of a panel to a PNG, off the screen, and the way from its pixels to its data."""

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave

DPI = 96
SHARP = 1.5  # pixels of the PNG for one on a plain screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where the axes of a picture lie, and what they show.

    - ``left``, ``top``, ``right``, ``bottom``: in parts of the picture, from its upper left corner.
    - ``x``, ``y``: what the axes show there, from left to right and from top to bottom; linear.
    """

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def data(self, across: float, down: float) -> tuple[float, float] | None:
        """Return the data at a place of the picture, or None outside the axes."""
        u = (across - self.left) / (self.right - self.left)
        v = (down - self.top) / (self.bottom - self.top)
        if not (0 <= u < 1 and 0 <= v < 1):
            return None
        return self.x[0] + u * (self.x[1] - self.x[0]), self.y[0] + v * (self.y[1] - self.y[0])

    def box(self, x: float, y: float) -> list[float]:
        """Return left, top, width and height of the unit square around a point of the data."""
        wide = (self.right - self.left) / (self.x[1] - self.x[0])
        tall = (self.bottom - self.top) / (self.y[1] - self.y[0])
        left = self.left + (x - 0.5 - self.x[0]) * wide
        return [left, self.top + (y - 0.5 - self.y[0]) * tall, wide, tall]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A picture: its PNG, its width on a plain screen, its title, and the way back to its data."""

    png: bytes
    width: int
    title: str
    frame: Frame


def placed(
    size: tuple[int, int], margins: tuple[int, int, int, int]
) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height of axes in parts of a picture of ``size`` pixels;
    ``margins`` are pixels left, right, below and above."""
    (width, height), (left, right, below, above) = size, margins
    return (
        left / width,
        below / height,
        1 - (left + right) / width,
        1 - (below + above) / height,
    )


def draw(
    plot: Callable[[Axes], object],
    size: tuple[int, int],
    where: tuple[float, float, float, float],
) -> Rendered:
    """Draw what ``plot`` draws on an Axes, ``size`` pixels wide and high on a plain screen.

    ``where`` is the place of the axes (:func:`placed`). It is given, since matplotlib's own layout takes
    longer than the rest. Uses no pyplot: this runs beside the notebook's own thread.
    """
    width, height = size
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI * SHARP)
    canvas = FigureCanvasAgg(figure)
    ax = figure.add_axes(where)
    plot(ax)
    ax.title.set_fontsize("medium" if size[0] > 400 else "small")
    canvas.draw()
    return Rendered(png=_png(canvas), width=width, title=ax.get_title(), frame=_frame(ax))


def _png(canvas: FigureCanvasAgg) -> bytes:
    buffer = io.BytesIO()
    pixels = np.asarray(canvas.buffer_rgba())
    imsave(buffer, pixels, format="png", pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def _frame(ax: Axes) -> Frame:
    where = ax.get_position()
    first_x, last_x = ax.get_xlim()
    first_y, last_y = ax.get_ylim()  # from bottom to top
    return Frame(
        left=where.x0,
        top=1 - where.y1,
        right=where.x1,
        bottom=1 - where.y0,
        x=(first_x, last_x),
        y=(last_y, first_y),
    )
