"""Picture of a test's power: how far each mutant moves the output, beside what the test allows."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from attnlab.mutation.power import Mutant

_OUTCOME = {
    "killed": ("#4c9a5b", "o"),
    "survived": ("#c8553d", "X"),
    "equivalent": ("#8c8c8c", "s"),
}


def plot_power(mutants: Sequence[Mutant], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw how far each mutant moves the output, in units of what the test allows: right of 1 it is
    killed. NaN and infinity sit at the right edge, no effect at all at the left one."""
    ax = ax or plt.subplots(figsize=(8, 0.8 + 0.2 * len(mutants)), layout="constrained")[1]
    edges = 1e-9, 1e6
    for outcome, (colour, marker) in _OUTCOME.items():
        at = [(y, m.margin) for y, m in enumerate(mutants) if m.outcome == outcome]
        ax.plot(
            [min(max(margin, edges[0]), edges[1]) for _, margin in at],
            [y for y, _ in at],
            marker,
            color=colour,
            label=f"{outcome}: {len(at)}",
        )
    ax.axvline(1.0, color="red", linestyle="--", linewidth=1, label="what the test allows")
    ax.set_xscale("log")
    ax.set_xlim(edges[0] / 3, edges[1] * 3)
    ax.set_yticks(range(len(mutants)), [mutant.name for mutant in mutants], fontsize="small")
    ax.set_ylim(len(mutants) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)
    ax.set(xlabel="largest effect / what the test allows", title=title)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax
