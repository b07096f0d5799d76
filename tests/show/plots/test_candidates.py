"""The plots of candidates: ranges, fits, and the candidate that stands out."""

import matplotlib.colors

from attnlab.show.plots import plot_fits, plot_sizes
from attnlab.show.plots.artists import STATUS_COLOURS
from attnlab.show.plots.errors import FLOOR


def test_a_range_that_contains_the_observed_error_is_green():
    ax = plot_sizes({"a": (0.0, 0.1), "b": (0.5, 2.0), "c": (3.0, 3.0)}, 1.0, atol=1e-3)
    bars = ax.lines[:6:2]
    assert [bar.get_xdata().tolist() for bar in bars] == [[FLOOR, 0.1], [0.5, 2.0], [3.0, 3.0]]
    wrong, right = STATUS_COLOURS["mismatch"], STATUS_COLOURS["match"]
    assert [bar.get_color() for bar in bars] == [wrong, right, wrong]
    assert [line.get_xdata()[0] for line in ax.lines[6:]] == [1.0, 1e-3]


def test_only_the_nearest_candidate_is_coloured():
    ax = plot_fits({"a": 0.5, "b": 1e-4, "c": 0.0})
    colours = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in ax.patches]
    assert colours[0] == colours[1] != colours[2]
    assert [patch.get_width() for patch in ax.patches] == [0.5, 1e-4, FLOOR]
