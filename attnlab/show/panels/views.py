"""The views of a panel: pictures rendered from its PanelData."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from attnlab.show.panels.panel_data import PanelData
from attnlab.show.panels.rendering import Rendered, axes_rect, render
from attnlab.show.plots.cache import plot_cache
from attnlab.show.plots.errors import plot_error, plot_seq_error


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A picture: its name, its tooltip, and the function that renders it or returns None."""

    name: str
    tooltip: str
    render: Callable[[PanelData], Rendered | None]


def _render_error(data: PanelData) -> Rendered | None:
    result = data.result
    if result.errors is None:
        return None

    def plot(ax: Axes) -> None:
        plot_error(errors, unwritten=unwritten, ax=ax)
        _place_color_bar(ax, rect)
        _move_legend(ax)

    errors = result.errors
    unwritten = result.unwritten_rows() if data.row_slots is None else None
    size, margins = (600, 395), (130, 135, 66, 28)
    rect = axes_rect(size, margins)
    return render(plot, size, rect)


def _place_color_bar(ax: Axes, rect: tuple[float, float, float, float]) -> None:
    """Move the colour bar to the right of the axes, with room for its labels."""
    left, bottom, width, height = rect
    ax.set_position(rect)
    bar = next(other for other in ax.figure.axes if other is not ax)
    bar.set_box_aspect(None)
    bar.set_position((left + width + 0.14, bottom, 0.025, height))
    _plain_ticks(bar)


def _plain_ticks(ax: Axes) -> None:
    """Use plain tick labels without minor ticks; math text takes a fifth of the rendering time."""
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    ax.yaxis.set_minor_locator(NullLocator())


def _move_legend(ax: Axes) -> None:
    """Move the legend below the axes."""
    if legend := ax.get_legend():
        ax.legend(
            handles=legend.legend_handles,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
            ncols=3,
            fontsize="small",
            frameon=False,
        )


def _render_slots(data: PanelData) -> Rendered | None:
    size = (600, 198)
    return render(
        lambda ax: plot_cache(data.slot_map, ax=ax), size, axes_rect(size, (52, 10, 75, 26))
    )


def _render_seqs(data: PanelData) -> Rendered | None:
    errors = data.result.errors
    if errors is None:
        return None

    def plot(ax: Axes) -> None:
        series = {data.result.case.platform: errors.seq_error()}
        title = "largest error per sequence (dashed: atol)"
        plot_seq_error(series, errors.lengths, atol=errors.atol, title=title, ax=ax)
        ax.set(ylabel="", xlabel="sequence")
        _plain_ticks(ax)
        if legend := ax.get_legend():
            legend.remove()

    size = (300, 198)
    return render(plot, size, axes_rect(size, (60, 8, 45, 26)))


VIEWS = {
    view.name: view
    for view in (
        View(
            name="error",
            tooltip="Errors by token and head. Click, or move with the arrow keys, to select.",
            render=_render_error,
        ),
        View(
            name="slots",
            tooltip="The use of each cache slot. Click a slot to select its token.",
            render=_render_slots,
        ),
        View(name="seqs", tooltip="The largest error of each sequence.", render=_render_seqs),
    )
}
