"""The pictures of a survey: for each kernel, a plot of the margin against the context length."""

import base64
import io
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.horizon.deployment import GPUS, Deployment
from attnlab.horizon.survey import Row, Survey
from attnlab.reports.shared_page import Picture, themed_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CONTEXTS = [2**i for i in range(10, 31)]
_MOST_LINES = 8


def margins(rows: list[Row], deployment: Deployment) -> dict[str, list[tuple[int, float]]]:
    """Return (context length, margin) by expression: the horizon over the size that the context needs."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        one = row.statement
        points = []
        for context in _CONTEXTS:
            needed = deployment.needed(one.size, context) or row.limits.get(one.size)
            if one.wrong_at and needed:
                points.append((context, one.wrong_at / needed))
        if points:
            text = textwrap.shorten(one.site.text, 90, placeholder=" …")
            found.setdefault(f"{one.size}: line {one.site.line}: {text}", points)
    return dict(list(found.items())[:_MOST_LINES])


def plot_margins(
    lines: Mapping[str, list[tuple[int, float]]],
    memory: Mapping[str, int],
    *,
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw margins by expression against the context length; below 1 an access is wrong.

    ``memory``: the context length that fills the memory of each GPU.
    """
    import matplotlib.pyplot as plt

    ax = ax or plt.subplots(figsize=(9, 4.2), layout="constrained")[1]
    for name, points in lines.items():
        ax.plot(*zip(*points, strict=True), label=name, linewidth=1.6)
    ax.axhline(1, color="#c8553d", linewidth=1, label="horizon")
    for style, (name, context) in zip((":", "--", "-."), memory.items(), strict=False):
        ax.axvline(
            context, color="#808080", linestyle=style, linewidth=1, label=f"cache fills {name}"
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="tokens of one sequence", ylabel="horizon / needed size", title=title)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.18), fontsize="small", frameon=False)
    return ax


def _picture(rows: list[Row], deployment: Deployment, *, is_dark: bool) -> str:
    """Return a PNG in base64, "" without lines."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    lines = margins(rows, deployment)
    if not lines:
        return ""
    memory = {f"{name} ({gb} GB)": deployment.cache_tokens(gb) for name, gb in GPUS.items()}
    with plt.style.context("dark_background" if is_dark else "default"):
        figure = Figure(figsize=(9, 4.2 + 0.22 * len(lines)), layout="constrained")
        plot_margins(lines, memory, ax=figure.add_subplot())
        room = io.BytesIO()
        figure.savefig(room, format="png", dpi=110, transparent=True)
    return base64.b64encode(room.getvalue()).decode()


def margin_pictures(one: Survey) -> list[Picture]:
    """Return a plot for each kernel with a described launch."""
    deployment = one.deployment or Deployment()
    by_kernel: dict[str, list[Row]] = {}
    for row in one.rows:
        if row.kernel.launch is not None and not row.kernel.launch.is_assumed:
            title = f"{row.kernel.kernel} ({Path(row.kernel.file).name})"
            by_kernel.setdefault(title, []).append(row)
    found = []
    for title, rows in by_kernel.items():
        light, dark = (_picture(rows, deployment, is_dark=is_dark) for is_dark in (False, True))
        alt = f"Margin to the horizon of {title} against the tokens of one sequence"
        found += [themed_picture(f"Margin of {title}", alt, light, dark)] if light else []
    return found
