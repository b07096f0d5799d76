"""The plot of formats: one line per format, gaps where a byte has no positive number."""

import numpy as np

from attnlab.show.plots import plot_formats


def test_gaps_are_zero_infinity_and_nan():
    values = np.arange(256, dtype=float)
    values[5], values[6] = np.inf, np.nan
    ax = plot_formats({"a": values, "b": values * 2})
    first, second = (line.get_ydata() for line in ax.lines)
    assert np.flatnonzero(np.isnan(first)).tolist() == [0, 5, 6]
    assert len(first) == 128
    assert second[7] == 14
