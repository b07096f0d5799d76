"""Plot of FP8 formats: the value of each byte."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

_STYLES = ("-", "--", ":", "-.")


def plot_formats(meaning: Mapping[str, Any], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the value of each positive byte in each format.

    ``meaning``: [256] values by the name of the format. Zero, infinity and NaN are gaps.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
    for i, (name, values) in enumerate(meaning.items()):
        positive = np.asarray(values)[:128]
        shown = np.where(np.isfinite(positive) & (positive > 0), positive, np.nan)
        ax.plot(shown, _STYLES[i % len(_STYLES)], label=name)
    ax.set_yscale("log")
    ax.set_xticks(range(0, 129, 16), [f"0x{byte:02X}" for byte in range(0, 129, 16)])
    ax.set(
        xlabel="byte",
        ylabel="value (gaps are zero, infinity, NaN)",
        title=title or "value of a byte by format",
    )
    ax.legend(frameon=False)
    return ax
