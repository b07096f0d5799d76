"""Plot of the mutants of a test: how far each moves the output, in units of the test's tolerance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from attnlab.show.plots.artists import put_legend

if TYPE_CHECKING:
    from attnlab.mutation.power import Mutant

_LOOK = {  # colour and marker by outcome
    "killed": ("#4c9a5b", "o"),
    "survived": ("#c8553d", "X"),
    "equivalent": ("#8c8c8c", "s"),
}
_EDGES = 1e-9, 1e6


def plot_power(mutants: Sequence["Mutant"], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the largest effect of each mutant divided by the tolerance: above 1 the test kills it.

    NaN and infinity are at the right edge, no effect at the left edge.
    """
    ax = ax or plt.subplots(figsize=(8, 0.8 + 0.2 * len(mutants)), layout="constrained")[1]
    for outcome, (colour, marker) in _LOOK.items():
        at = [(y, m.margin) for y, m in enumerate(mutants) if m.outcome == outcome]
        ax.plot(
            [min(max(margin, _EDGES[0]), _EDGES[1]) for _, margin in at],
            [y for y, _ in at],
            marker,
            color=colour,
            label=f"{outcome}: {len(at)}",
        )
    ax.axvline(1.0, color="red", linestyle="--", linewidth=1, label="the test's tolerance")
    ax.set_xscale("log")
    ax.set_xlim(_EDGES[0] / 3, _EDGES[1] * 3)
    ax.set_yticks(range(len(mutants)), [mutant.name for mutant in mutants], fontsize="small")
    ax.set_ylim(len(mutants) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)
    ax.set(
        xlabel="largest effect / tolerance (NaN and infinity: right edge)",
        title=title or _finding(mutants),
    )
    put_legend(ax)
    return ax


def _finding(mutants: Sequence["Mutant"]) -> str:
    killed = sum(mutant.outcome == "killed" for mutant in mutants)
    fair = sum(mutant.outcome != "equivalent" for mutant in mutants)
    return f"the test kills {killed} of {fair} mutants that its data can show"
