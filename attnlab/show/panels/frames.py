"""Frames: what a picture shows of any data, drawn once and kept as pixels.

Most of the time to draw a picture goes to its axes, ticks and labels, which a change of a Case seldom
changes. Only the content is drawn anew, over the pixels of the frame.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from attnlab.show.panels.rendering import Cells, Rendered, as_rendered, new_axes, style_texts

Rect = tuple[float, float, float, float]
_KEEP = 8  # frames of a panel; each has about 2 MB of pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedPlot:
    """A plot in two parts.

    - ``frame(ax)`` draws the axes and sets their limits. It returns the artists that ``content`` changes.
    - ``content(ax)`` adds the artists of the data, and may set the title and a legend.
    - ``key``: everything that ``frame`` depends on.
    - ``size``: CSS pixels; ``rect``: the place of the axes, see
      :func:`attnlab.show.panels.rendering.axes_rect`.
    """

    key: Hashable
    size: tuple[int, int]
    rect: Rect
    frame: Callable[[Axes], Sequence[Artist]]
    content: Callable[[Axes], None]


class Frames:
    """The frames of a panel that were used last; for one thread at a time."""

    def __init__(self) -> None:
        self._frames: OrderedDict[Hashable, _Frame] = OrderedDict()

    def render(self, plot: FramedPlot, cells: Cells, *, is_dark: bool = False) -> Rendered:
        """Render a plot, with the frame of an earlier one that has the same key, size and theme."""
        key = (plot.size, plot.rect, is_dark, plot.key)
        frame = self._frames.pop(key, None) or _Frame(plot, is_dark)
        rendered = frame.render(plot.content, cells)  # a frame whose content raised is not kept
        self._frames[key] = frame
        if len(self._frames) > _KEEP:
            self._frames.popitem(last=False)
        return rendered


class _Frame:
    """A figure with the frame of a plot, and its pixels without what is drawn over the content."""

    def __init__(self, plot: FramedPlot, is_dark: bool) -> None:
        self._width, self._is_dark = plot.size[0], is_dark
        self._canvas, self._ax = new_axes(plot.size, plot.rect)
        changed = plot.frame(self._ax)
        self._above = [*changed, *self._ax.spines.values(), self._ax.title]
        for artist in self._above:
            artist.set_animated(True)  # the canvas does not draw it
        self._ax.set_autoscale_on(False)  # the content does not change the limits
        style_texts(self._ax, self._width, is_dark)
        self._canvas.draw()
        self._pixels = self._canvas.copy_from_bbox(self._ax.figure.bbox)
        self._own = set(self._ax.get_children())

    def render(self, content: Callable[[Axes], None], cells: Cells) -> Rendered:
        """Render the content over the frame."""
        ax, renderer = self._ax, self._canvas.get_renderer()
        content(ax)
        style_texts(ax, self._width, self._is_dark)
        added = [artist for artist in ax.get_children() if artist not in self._own]
        self._canvas.restore_region(self._pixels)
        for artist in sorted([*added, *self._above], key=Artist.get_zorder):
            artist.draw(renderer)
        rendered = as_rendered(self._canvas, ax, self._width, cells)
        for artist in added:
            artist.remove()
        ax.set_prop_cycle(None)  # the next content begins with the first colour again
        return rendered
