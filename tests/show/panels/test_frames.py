"""Frames: a picture over a kept frame is the picture that is drawn anew."""

import io
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from helpers.panels import LOST

from attnlab.show.panels import panel
from attnlab.show.panels.rendering import Cells, Rendered, axes_rect, render
from attnlab.show.panels.views import VIEWS, FramedPlot, Frames

NAMES = ("error", "slots", "seqs")
NOTHING = Cells(rows=[], columns=[], values=np.zeros((0, 0), dtype=np.float32))
SIZE = (300, 200)


def pixels(rendered: Rendered) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(rendered.png))


class Compared(Frames):
    """Frames that draw each picture anew, too, and count the pixels that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.different: list[int] = []

    def render(self, plot: FramedPlot, cells: Cells, *, is_dark: bool = False) -> Rendered:
        def whole(ax: object) -> None:
            plot.frame(ax)
            plot.label(ax)
            plot.content(ax)

        found = super().render(plot, cells, is_dark=is_dark)
        anew = render(whole, plot.size, plot.rect, cells, is_dark=is_dark)
        assert (found.title, found.transform) == (anew.title, anew.transform)
        self.different.append(int((pixels(found) != pixels(anew)).any(2).sum()))
        return found


def test_a_picture_over_a_kept_frame_is_that_drawn_anew() -> None:
    """Wrong, NaN, unwritten and right rows, other lengths, and heads that did not run."""
    view = panel(LOST, knobs=("stage", "seed"), views=NAMES)
    assert view.wait(120)
    view._frames = frames = Compared()
    changes = [
        {"stage": "sound"},
        {"stage": "fill_decode", "empty_slots": "nan"},
        {"stage": "int32_before_cumsum", "output_init": "nan"},
        {"query_lens": (3, 8, 1, 1), "ctx_lens": (4, 20, 9, 31)},
        {"stage": "sound"},
        {"query_lens": LOST.query_lens, "ctx_lens": LOST.ctx_lens},
        {"atol": 1e-7},
    ]
    for change in changes:
        view._is_dark = "output_init" in change
        view.set(**change)
        assert view.wait(120)
        assert view.error is None, change
    data = view.data
    errors = replace(data.result.errors, heads=range(1, 3))
    part = replace(data, result=replace(data.result, errors=errors))
    VIEWS["error"].render(part, frames, True)
    VIEWS["error"].render(data, frames, True)
    assert len(frames.different) == len(NAMES) * len(changes) + 2
    assert set(frames.different) == {0}


def of_bars(heights: list[float], key: object = "bars") -> FramedPlot:
    def frame(ax):
        ax.set(xlim=(-1, 3), ylim=(0, 3), xlabel="bar")
        return []

    def content(ax):
        ax.plot(heights, "o")
        if not heights:
            raise ValueError("no bars")

    rect = axes_rect(SIZE, (40, 10, 40, 20))
    return FramedPlot(key=key, size=SIZE, rect=rect, frame=frame, content=content)


def test_no_content_is_left_for_the_next_picture() -> None:
    """Neither its artists nor the next colour."""
    frames = Frames()
    first = frames.render(of_bars([1, 2]), NOTHING)
    assert frames.render(of_bars([2, 1]), NOTHING).png != first.png
    assert frames.render(of_bars([1, 2]), NOTHING).png == first.png
    assert len(frames._frames) == 1


def test_content_that_raises_leaves_no_frame() -> None:
    frames = Frames()
    with pytest.raises(ValueError, match="no bars"):
        frames.render(of_bars([]), NOTHING)
    assert not frames._frames


def test_only_the_frames_used_last_are_kept() -> None:
    frames = Frames()
    for key in range(12):
        frames.render(of_bars([1], key), NOTHING)
    kept = [key[-1] for key in frames._frames]
    assert kept == list(range(4, 12))
