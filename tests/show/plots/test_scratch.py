"""The plot of scratch memory: read, not read, and another head's."""

import numpy as np

from attnlab.show.plots import plot_merge
from attnlab.show.plots.cache import NOT_READ, OTHER_HEAD, OWN


def test_another_heads_entry_is_hatched():
    reads, own = np.eye(3, 4, dtype=bool), np.eye(3, 4, dtype=bool)
    reads[1, 2] = True
    ax = plot_merge(reads, own)
    codes = ax.images[0].get_array()
    assert codes[1, 2] == OTHER_HEAD
    assert int((codes == OWN).sum()) == 3
    assert int((codes == NOT_READ).sum()) == 8
    (cells,) = ax.collections
    assert [path.vertices.min(0).tolist() for path in cells.get_paths()] == [[1.5, 0.5]]
    assert ax.get_title().startswith("1 ")


def test_without_a_strange_entry_nothing_is_hatched():
    ax = plot_merge(np.eye(3, dtype=bool), np.eye(3, dtype=bool))
    assert len(ax.collections) == 0
    assert len(ax.get_legend().get_texts()) == 2
