"""Plot of a mask: which keys the rows of a sequence see."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from attnlab.show.plots.artists import put_legend
from attnlab.tensors.visibility import SequenceMask

# What a key is to a row, by its code in the image: colour and text.
HIDDEN, VISIBLE, FUTURE, BIASED = range(4)
_KINDS = {
    HIDDEN: ("#e3e3e3", "hidden"),
    VISIBLE: ("#3f6f9f", "visible"),
    FUTURE: ("#f28e2b", "visible, after the row"),
    BIASED: ("#59a14f", "visible, with a bias"),
}
MOST_ROWS = 512


def mask_codes(mask: SequenceMask) -> Any:
    """Return what each key is to each new token, [rows, seq_len] codes; of at most 512 rows."""
    last = min(mask.seq_len, mask.ctx_len + MOST_ROWS)
    at = torch.arange(mask.ctx_len, last)
    seen, bias = mask.visible(at), mask.bias(at)
    codes = seen.int() * VISIBLE
    codes[seen & (torch.arange(mask.seq_len) > at[:, None])] = FUTURE
    if bias is not None:
        codes[seen & (bias != 0)] = BIASED
    return codes.numpy()


def plot_mask(mask: SequenceMask, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw which keys the rows of a sequence see: a row per new token, a column per key.

    The line is the end of the context.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.4), layout="constrained")[1]
    codes = mask_codes(mask)
    colours = ListedColormap([colour for colour, _ in _KINDS.values()])
    ax.imshow(codes, cmap=colours, vmin=-0.5, vmax=3.5, aspect="auto", interpolation="none")
    ax.axvline(mask.ctx_len - 0.5, color="black", linewidth=1.2)
    found = {int(code) for code in np.unique(codes)}
    entries = [
        Patch(facecolor=c, label=text) for code, (c, text) in _KINDS.items() if code in found
    ]
    put_legend(ax, entries, below=True)
    share = float((codes != HIDDEN).mean()) if codes.size else 0.0
    where = f"sequence {mask.seq}: rows see {share:.0%} of {mask.seq_len} keys"
    ax.set(xlabel="key position", ylabel="new token", title=title or where)
    return ax
