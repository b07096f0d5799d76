"""Plot functions: each draws the data that it receives on an Axes, and returns the Axes.

None of them computes results, shows a figure or saves one. Magnitudes use cividis on a logarithmic scale. NaN
and unwritten elements have a colour outside the colour map and a hatch.
"""

from attnlab.show.plots.cache import plot_blocks, plot_cache
from attnlab.show.plots.errors import plot_error, plot_seq_error
from attnlab.show.plots.stages import plot_mla, plot_power, plot_stages
from attnlab.show.plots.weights import plot_law, plot_mask, plot_weights

__all__ = [
    "plot_blocks",
    "plot_cache",
    "plot_error",
    "plot_law",
    "plot_mask",
    "plot_mla",
    "plot_power",
    "plot_seq_error",
    "plot_stages",
    "plot_weights",
]
