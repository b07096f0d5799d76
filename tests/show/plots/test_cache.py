"""The plots of a cache: images, hatches and labels are those of the SlotMap."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.collections import PolyCollection

from attnlab.contracts.slot_states import NOT_READ, SlotMap, SlotState
from attnlab.lab.result import MemoryReport, SlotsRead
from attnlab.show.plots import plot_blocks, plot_cache
from attnlab.show.plots.cache import UNUSED
from attnlab.tensors.cache import NOBODY, Provenance

OWN, OTHER, MISSING = (
    state.code for state in (SlotState.OWN, SlotState.OTHER_SEQUENCE, SlotState.UNWRITTEN)
)
# Blocks 2, 0 are sequence 0's, block 1 is sequence 1's, block 3 is in no row.
WRITER = torch.tensor([[0, NOBODY, NOBODY], [1, 1, NOBODY], [0, 0, 0], [NOBODY] * 3])
STATES = torch.full((4, 3), NOT_READ)
STATES[2] = OWN
STATES[0, 0], STATES[0, 1], STATES[1, 1] = OWN, MISSING, OTHER


@pytest.fixture
def slots() -> SlotMap:
    provenance = Provenance(
        seq=WRITER.int(), pos=torch.zeros(4, 3), block_table=torch.tensor([[2, 0], [1, 1]])
    )
    reader = torch.where(STATES == NOT_READ, NOBODY, 0)
    return SlotMap(provenance=provenance, states=STATES, reader_seq=reader, reader_pos=reader)


def image(ax):
    return ax.images[0].get_array().tolist()


def hatched(ax):
    """Return (column, row) of the first cell of each hatched run, by hatch."""
    found = {}
    for cells in ax.collections:
        assert isinstance(cells, PolyCollection)
        corners = [path.vertices.min(0) + 0.5 for path in cells.get_paths()]
        found.setdefault(cells.get_hatch(), []).extend((int(x), int(y)) for x, y in corners)
    return found


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_the_cache_has_a_column_per_block_in_the_order_of_the_table(slots):
    ax = plot_cache(slots)
    assert image(ax) == [
        [OWN, OWN, NOT_READ, UNUSED],
        [OWN, MISSING, OTHER, UNUSED],
        [OWN, UNUSED, UNUSED, UNUSED],
    ]
    assert hatched(ax) == {"xx": [(1, 1)], "//": [(2, 1)]}
    circles = [tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == "o"]
    assert sorted(circles) == [(1, 1), (2, 1)]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1"]


def test_the_legend_has_an_entry_per_state_that_occurs(slots):
    assert len(legend(plot_cache(slots))) == 5
    everything = SlotMap(
        provenance=slots.provenance,
        states=torch.full((4, 3), OWN),
        reader_seq=slots.reader_seq,
        reader_pos=slots.reader_pos,
    )
    ax = plot_cache(everything)
    assert len(legend(ax)) == 1
    assert hatched(ax) == {}


def test_the_title_has_the_number_of_each_state(slots):
    title = plot_cache(slots).get_title()
    assert all(text in title for text in ("4 own", "1 own unwritten", "1 other sequence"))
    assert plot_cache(slots, title="given").get_title() == "given"


def test_blocks_are_rows_in_the_order_that_is_asked_for(slots):
    _, given = plt.subplots()
    ax = plot_blocks(slots, blocks=[1, 0], ax=given)
    assert ax is given
    assert image(ax) == [[NOT_READ, OTHER, UNUSED], [OWN, MISSING, UNUSED]]
    assert hatched(ax) == {"xx": [(1, 1)], "//": [(1, 0)]}
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert ["block 1" in labels[0], "block 0" in labels[1]] == [True, True]
    assert len(plot_blocks(slots).images[0].get_array()) == 4


def test_a_trace_is_drawn_as_a_contract_is(slots):
    """A MemoryReport gives a SlotMap: of all sequences, or of one."""
    report = MemoryReport(
        slots=(
            SlotsRead(
                tensor="k",
                seq=0,
                counts={},
                slots={SlotState.OWN: ((2, 0), (2, 1)), SlotState.OTHER_SEQUENCE: ((1, 1),)},
            ),
            SlotsRead(tensor="v", seq=1, counts={}, slots={SlotState.OWN: ((1, 0), (1, 1))}),
        ),
        unwritten=(),
    )
    both = report.slot_map(slots.provenance)
    assert both.states[1].tolist() == [OWN, OTHER, NOT_READ]
    assert both.reader_seq[1].tolist() == [1, 0, NOBODY]
    one = report.slot_map(slots.provenance, seq=1)
    assert one.states[1].tolist() == [OWN, OWN, NOT_READ]
    assert one.counts() == {SlotState.OWN: 2}
    assert image(plot_blocks(one, blocks=[1])) == [[OWN, OWN, UNUSED]]
