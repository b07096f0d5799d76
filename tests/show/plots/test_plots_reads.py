"""The map of a cache shows who wrote and who read; asserted on the artists' data."""

import matplotlib
import pytest
import torch

matplotlib.use("agg")
import matplotlib.pyplot as plt

from attnlab.lab.reads import MemoryReport, SlotsRead
from attnlab.show.plots.reads import plot_cache_map
from attnlab.tensors.cache import NOBODY, Provenance

SEQ = torch.tensor([[0, 0, 0, NOBODY], [1, 1, NOBODY, NOBODY], [NOBODY] * 4], dtype=torch.int32)
CACHE = Provenance(seq=SEQ, pos=SEQ, block_table=torch.tensor([[0], [1]]))
READ = MemoryReport(
    slots=(
        SlotsRead(
            tensor="k", seq=0, counts={}, slots={"own": ((0, 0),), "other sequence": ((1, 1),)}
        ),
        SlotsRead(
            tensor="v", seq=1, counts={}, slots={"own": ((1, 0),), "never mapped": ((2, 3),)}
        ),
    ),
    unwritten=(),
)


@pytest.fixture(autouse=True)
def closed():
    """Close what a test drew."""
    yield
    plt.close("all")


def marks(ax) -> dict[str, list[tuple[int, int]]]:
    """Return the marked (slot, row) by marker."""
    return {line.get_marker(): list(zip(*line.get_data(), strict=True)) for line in ax.lines}


def test_writers_and_readers() -> None:
    """Colours follow the writers, marks the readers; the legend names those that are there."""
    ax = plot_cache_map(CACHE, READ, title="t")
    assert (ax.images[0].get_array() == (SEQ + 1).numpy()).all()
    assert marks(ax) == {".": [(0, 0), (0, 1)], "x": [(1, 1), (3, 2)]}
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names[:3] == ["nobody", "sequence 0", "sequence 1"]
    assert len(names) == 5


def test_one_sequence_and_some_blocks() -> None:
    """Only the reads of the sequence, only in the blocks asked for, in their order; on the axes given."""
    _, given = plt.subplots()
    ax = plot_cache_map(CACHE, READ, blocks=[1, 0], seq=0, ax=given)
    assert ax is given
    assert marks(ax) == {".": [(0, 1)], "x": [(1, 0)]}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["block 1", "block 0"]
    assert (ax.images[0].get_array() == (SEQ[[1, 0]] + 1).numpy()).all()
