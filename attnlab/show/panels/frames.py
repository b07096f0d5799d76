"""Frames: what a picture shows of any data, drawn once and kept as pixels.

Most of the time to draw a picture goes to its axes, ticks and labels, which a change of a Case seldom
changes. Only the content is drawn anew, over the pixels of the frame and its labels.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from attnlab.show.panels.rendering import Cells, Rendered, as_rendered, new_axes, style_texts

T = TypeVar("T")
Rect = tuple[float, float, float, float]
_KEEP = 8  # frames of a panel, and labels of a frame; each has about 2 MB of pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedPlot:
    """A plot in three parts; ``key`` is everything that the first depends on, ``label_key`` the second.

    - ``frame(ax)`` draws the axes and sets their limits. It returns the artists that ``label`` changes.
    - ``label(ax)`` changes labels and ticks.
    - ``content(ax)`` adds the artists of the data, and may set the title and a legend.
    - ``size``: CSS pixels; ``rect``: the place of the axes, see
      :func:`attnlab.show.panels.rendering.axes_rect`.
    """

    key: Hashable
    size: tuple[int, int]
    rect: Rect
    frame: Callable[[Axes], Sequence[Artist]]
    content: Callable[[Axes], None]
    label_key: Hashable = None
    label: Callable[[Axes], None] = lambda ax: None


class Frames:
    """The frames of a panel that were used last; for one thread at a time."""

    def __init__(self) -> None:
        self._frames: OrderedDict[Hashable, _Frame] = OrderedDict()

    def render(self, plot: FramedPlot, cells: Cells, *, is_dark: bool = False) -> Rendered:
        """Render a plot, with the frame of an earlier one that has the same key, size and theme."""
        key = (plot.size, plot.rect, is_dark, plot.key)
        frame = self._frames.pop(key, None) or _Frame(plot, is_dark)
        rendered = frame.render(plot, cells)  # a frame whose content raised is not kept
        _keep(self._frames, key, frame)
        return rendered


def _keep(kept: OrderedDict[Hashable, T], key: Hashable, value: T) -> None:
    """Add a value as the newest, and drop the oldest of too many; changes ``kept``."""
    kept[key] = value
    if len(kept) > _KEEP:
        kept.popitem(last=False)


class _Frame:
    """A figure with the frame of a plot, and its pixels without what is drawn over the content."""

    def __init__(self, plot: FramedPlot, is_dark: bool) -> None:
        self._width, self._is_dark = plot.size[0], is_dark
        self._canvas, self._ax = new_axes(plot.size, plot.rect)
        self._labels = plot.frame(self._ax)
        self._above = [*self._ax.spines.values(), self._ax.title]
        for artist in (*self._labels, *self._above):
            artist.set_animated(True)  # the canvas does not draw it
        self._ax.set_autoscale_on(False)  # the content does not change the limits
        style_texts(self._ax, self._width, is_dark)
        self._canvas.draw()
        self._pixels = self._copy()
        self._labelled: OrderedDict[Hashable, Any] = OrderedDict()  # pixels with labels
        self._own = set(self._ax.get_children())

    def render(self, plot: FramedPlot, cells: Cells) -> Rendered:
        """Render the labels and the content over the frame."""
        ax = self._ax
        self._put_labels(plot)
        plot.content(ax)
        style_texts(ax, self._width, self._is_dark)
        added = [artist for artist in ax.get_children() if artist not in self._own]
        self._draw([*added, *self._above])
        rendered = as_rendered(self._canvas, ax, self._width, cells)
        for artist in added:
            artist.remove()
        ax.set_prop_cycle(None)  # the next content begins with the first colour again
        return rendered

    def _put_labels(self, plot: FramedPlot) -> None:
        """Restore the pixels of the frame with labels, or draw these over those of the frame."""
        pixels = self._labelled.pop(plot.label_key, None)
        if pixels is None:
            plot.label(self._ax)
            style_texts(self._ax, self._width, self._is_dark)
            self._canvas.restore_region(self._pixels)
            self._draw(self._labels)
            pixels = self._copy()
        else:
            self._canvas.restore_region(pixels)
        _keep(self._labelled, plot.label_key, pixels)

    def _draw(self, artists: Iterable[Artist]) -> None:
        renderer = self._canvas.get_renderer()
        for artist in sorted(artists, key=Artist.get_zorder):
            artist.draw(renderer)

    def _copy(self) -> Any:
        return self._canvas.copy_from_bbox(self._ax.figure.bbox)
