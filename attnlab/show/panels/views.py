"""The pictures of a panel, each drawn from what was seen of a Case."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from attnlab.show.panels.draw import Rendered, draw, placed
from attnlab.show.panels.panel_data import PanelData
from attnlab.show.plots.cache import plot_cache
from attnlab.show.plots.errors import plot_error, plot_seq_error


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A picture: its name, what a person can do with it, and how it is drawn; None where there is
    nothing to draw."""

    name: str
    hint: str
    draw: Callable[[PanelData], Rendered | None]


def _draw_error(seen: PanelData) -> Rendered | None:
    result = seen.result
    if result.errors is None:
        return None

    def plot(ax: Axes) -> None:
        plot_error(errors, unwritten=unwritten, ax=ax)
        _place_bar(ax, where)
        _move_legend(ax)

    errors = result.errors
    unwritten = result.unwritten_rows() if seen.row_slots is None else None
    size, margins = (600, 395), (130, 135, 66, 28)
    where = placed(size, margins)
    return draw(plot, size, where)


def _place_bar(ax: Axes, where: tuple[float, float, float, float]) -> None:
    """Put the colour bar to the right of the axes, with room for its own labels between."""
    left, bottom, width, height = where
    ax.set_position(where)
    bar = next(other for other in ax.figure.axes if other is not ax)
    bar.set_box_aspect(None)
    bar.set_position((left + width + 0.14, bottom, 0.025, height))
    _plain_ticks(bar)


def _plain_ticks(ax: Axes) -> None:
    """Label a logarithmic axis with plain text and no small ticks: mathematical text takes a fifth of
    the time of a picture."""
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    ax.yaxis.set_minor_locator(NullLocator())


def _move_legend(ax: Axes) -> None:
    """Put the legend below the axes, where it hides nothing."""
    if legend := ax.get_legend():
        ax.legend(
            handles=legend.legend_handles,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
            ncols=3,
            fontsize="small",
            frameon=False,
        )


def _draw_slots(seen: PanelData) -> Rendered | None:
    size = (600, 198)
    return draw(lambda ax: plot_cache(seen.use, ax=ax), size, placed(size, (52, 10, 75, 26)))


def _draw_seqs(seen: PanelData) -> Rendered | None:
    errors = seen.result.errors
    if errors is None:
        return None

    def plot(ax: Axes) -> None:
        series = {seen.result.case.platform: errors.seq_error()}
        title = "largest error of each sequence; atol dashed"
        plot_seq_error(series, errors.lengths, atol=errors.atol, title=title, ax=ax)
        ax.set(ylabel="", xlabel="sequence")
        _plain_ticks(ax)
        if legend := ax.get_legend():
            legend.remove()

    size = (300, 198)
    return draw(plot, size, placed(size, (60, 8, 45, 26)))


VIEWS = {
    view.name: view
    for view in (
        View(name="error", hint="click a token and head", draw=_draw_error),
        View(name="slots", hint="click a slot", draw=_draw_slots),
        View(name="seqs", hint="", draw=_draw_seqs),
    )
}
