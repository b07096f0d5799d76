"""The pictures of a panel, each drawn from what was seen of a Case."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes

from attnlab.plots import plot_error, plot_seq_error
from attnlab.plots_cache import plot_cache
from attnlab.widgets.draw import Drawn, draw, placed
from attnlab.widgets.seen import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A picture: its name, what a person can do with it, and how it is drawn; None where there is
    nothing to draw."""

    name: str
    hint: str
    draw: Callable[[Seen], Drawn | None]


def _draw_error(seen: Seen) -> Drawn | None:
    result = seen.result
    if result.errors is None:
        return None

    def plot(ax: Axes) -> None:
        plot_error(errors, unwritten=unwritten, ax=ax)
        _place_bar(ax, where)
        if legend := ax.get_legend():
            legend.set_loc("upper right")
            legend.set_bbox_to_anchor((1.0, -0.06))
            legend.set_frame_on(False)

    errors = result.errors
    unwritten = result.unwritten_rows() if seen.row_slots is None else None
    size, margins = (600, 390), (130, 135, 50, 30)
    where = placed(size, margins)
    return draw(plot, size, where)


def _place_bar(ax: Axes, where: tuple[float, float, float, float]) -> None:
    """Put the colour bar to the right of the axes, with room for its own labels between."""
    left, bottom, width, height = where
    ax.set_position(where)
    bar = next(other for other in ax.figure.axes if other is not ax)
    bar.set_box_aspect(None)
    bar.set_position((left + width + 0.125, bottom, 0.025, height))


def _draw_slots(seen: Seen) -> Drawn | None:
    size = (760, 215)
    return draw(lambda ax: plot_cache(seen.use, ax=ax), size, placed(size, (45, 10, 85, 28)))


def _draw_seqs(seen: Seen) -> Drawn | None:
    errors = seen.result.errors
    if errors is None:
        return None

    def plot(ax: Axes) -> None:
        series = {seen.result.case.platform: errors.seq_error()}
        title = "largest error of each sequence"
        plot_seq_error(series, errors.lengths, atol=errors.atol, title=title, ax=ax)
        ax.set(ylabel="", xlabel="sequence")

    size = (480, 215)
    return draw(plot, size, placed(size, (50, 120, 45, 28)))


VIEWS = {
    view.name: view
    for view in (
        View(name="error", hint="click a token and head", draw=_draw_error),
        View(name="slots", hint="click a slot", draw=_draw_slots),
        View(name="seqs", hint="", draw=_draw_seqs),
    )
}
