"""Pictures of memory show what they are given; asserted on the artists' data."""

import matplotlib
import numpy as np
import pytest

matplotlib.use("agg")
import matplotlib.pyplot as plt

from attnlab.lab.reads import KINDS
from attnlab.show.plots.memory import plot_fits, plot_merge, plot_reads


@pytest.fixture(autouse=True)
def closed():
    """Close what a test drew."""
    yield
    plt.close("all")


def test_reads_show_kinds_and_pale_what_was_not_read() -> None:
    """The rows are the blocks asked for, in their order; a kind that is not there is not in the legend."""
    kinds = np.zeros((4, 8), int)
    kinds[2, 5:] = KINDS.index("unwritten tail")
    read = np.ones((4, 8), bool)
    read[0, 3] = False
    ax = plot_reads(kinds, read, blocks=[2, 0], title="t")
    (image,) = ax.images
    assert image.get_array().tolist() == kinds[[2, 0]].tolist()
    assert image.get_alpha()[1, 3] < 0.5 < image.get_alpha()[0, 3]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["own", "unwritten tail"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["block 2", "block 0"]


def test_merge_marks_another_heads_entry() -> None:
    """Read and own, read and not own, not read: three states, the second marked."""
    reads, own = np.eye(3, 4, dtype=bool), np.eye(3, 4, dtype=bool)
    reads[1, 2] = True
    ax = plot_merge(reads, own)
    state = ax.images[0].get_array()
    assert state[1, 2] == 2
    assert int((state == 1).sum()) == 3
    assert [text.get_position() for text in ax.texts] == [(2, 1)]


def test_fits_make_the_nearest_stand_out() -> None:
    """One bar a hypothesis; only the smallest has the colour."""
    ax = plot_fits({"a": 0.5, "b": 1e-4, "c": 0.0})
    colours = [patch.get_facecolor() for patch in ax.patches]
    assert colours[0] == colours[1] != colours[2]
    assert [patch.get_width() for patch in ax.patches] == [0.5, 1e-4, 1e-9]
