"""Timelines written by hand: orders, unwritten reads and the plot; each check can fail."""

import dataclasses
import json
from itertools import pairwise

import matplotlib
import pytest
from matplotlib.patches import Rectangle

matplotlib.use("Agg")

from attnlab.case.errors import AttnLabError
from study.timeline import Attention, CacheWrite, Timeline
from study.timeline_plot import plot_timeline

# Two prompts of 3 and 2 tokens in blocks of 2, one layer: both whole in step 0, one decode each in step 1.
# Prompt 0 owns blocks 5 and 4, prompt 1 blocks 1 and 7.
TABLE = ((5, 4), (1, 7))


def write(step: int, slots: tuple[int, ...], layer: int = 0) -> CacheWrite:
    blocks = tuple(sorted({slot // 2 for slot in slots}))
    dtypes = {"slot_mapping": "int64"}
    return CacheWrite(
        step=step, layer=layer, slot_mapping=slots, blocks_changed=blocks, dtypes=dtypes
    )


def attention(step: int, starts: tuple[int, ...], seq_lens: tuple[int, ...]) -> Attention:
    return Attention(
        step=step,
        layer=0,
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=TABLE,
        max_query_len=max(b - a for a, b in pairwise(starts)),
        blocks_changed=(),
        dtypes={"seq_lens": "int32"},
    )


EVENTS = (
    write(0, (10, 11, 8, 2, 3)),
    attention(0, (0, 3, 5), (3, 2)),
    write(1, (9, 14)),
    attention(1, (0, 1, 2), (4, 3)),
)
TIMELINE = Timeline(
    version="0",
    dtype="float32",
    block_size=2,
    prompt_lens=(3, 2),
    output_lens=(2, 2),
    events=EVENTS,
    seconds={"run": 1.0},
    peak_memory_gib=0.5,
    connections=(),
)


def test_lengths_of_a_batch():
    """New tokens from query_start_loc, the context is what seq_lens has besides."""
    first, second = TIMELINE.attentions
    assert (first.query_lens, first.ctx_lens, first.is_mixed) == ((3, 2), (0, 0), False)
    assert (second.query_lens, second.ctx_lens) == ((1, 1), (3, 2))
    assert attention(0, (0, 1, 4), (5, 3)).is_mixed


def test_new_slots_are_those_of_the_block_table():
    """Block times block size plus offset, sequence by sequence: what the writes hold."""
    for written, batch in zip(TIMELINE.writes, TIMELINE.attentions, strict=True):
        assert tuple(TIMELINE.new_slots(batch)) == written.slot_mapping
    wrong = dataclasses.replace(TIMELINE, block_size=3)
    assert tuple(wrong.new_slots(wrong.attentions[0])) != TIMELINE.writes[0].slot_mapping


def test_orders_keep_steps_and_layers_apart():
    """Calls of another layer are separate."""
    assert TIMELINE.orders() == dict.fromkeys([(0, 0), (1, 0)], ("write", "attention"))
    other = dataclasses.replace(TIMELINE, events=(EVENTS[0], write(0, (2,), layer=1), *EVENTS[1:]))
    assert other.orders()[0, 0] == ("write", "attention")
    assert other.orders()[0, 1] == ("write",)
    assert TIMELINE.with_attention_first().orders()[1, 0] == ("attention", "write")


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        (EVENTS, [0, 0]),
        (EVENTS[1:], [5, 5]),  # the first write did not happen
        ((EVENTS[0], EVENTS[1], EVENTS[3]), [0, 2]),  # nor the second
        ((EVENTS[1], EVENTS[0], EVENTS[3], EVENTS[2]), [5, 2]),  # both came late
        ((write(0, (10, 11, 8, 2, 3), layer=1), *EVENTS[1:]), [5, 5]),  # in another layer's cache
        ((EVENTS[0], EVENTS[1], write(1, (9, 15)), EVENTS[3]), [0, 1]),  # to the wrong slot
    ],
)
def test_unwritten_reads_are_counted(events, missing):
    """For each attention, count positions below seq_len that no earlier write of the layer filled."""
    assert dataclasses.replace(TIMELINE, events=events).unwritten_reads() == missing


def test_with_attention_first_only_swaps_calls():
    """Steps stay in order, and every new token is missing."""
    moved = TIMELINE.with_attention_first()
    assert [event.step for event in moved.events] == [0, 0, 1, 1]
    assert moved.unwritten_reads() == [5, 2]
    assert sorted(map(str, moved.events)) == sorted(map(str, EVENTS))


def test_sequences_are_identified_by_their_first_block():
    """The order in the batch does not matter."""
    later = dataclasses.replace(EVENTS[3], block_table=(TABLE[1], TABLE[0]))
    assert dataclasses.replace(TIMELINE, events=(*EVENTS[:3], later)).seq_ids(later) == [1, 0]
    assert TIMELINE.seq_ids(EVENTS[3]) == [0, 1]


def test_json_round_trip():
    """A timeline read from its JSON is equal; JSON without a field is refused."""
    assert Timeline.from_dict(json.loads(json.dumps(TIMELINE.to_dict()))) == TIMELINE
    broken = TIMELINE.to_dict()
    del broken["events"][0]["slot_mapping"]
    with pytest.raises(AttnLabError, match=r"^timeline must hold the fields of one"):
        Timeline.from_dict(broken)


def rectangles(ax) -> list[tuple[float, float, float, bool]]:
    """Return (column, first position in its lane, positions, is hatched) of each drawn rectangle."""
    lane = 4 * 1.25
    found = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return [(p.get_x(), p.get_y() % lane, p.get_height(), bool(p.get_hatch())) for p in found]


def test_the_plot_shows_writes_and_reads():
    """Each sequence of each call has a rectangle that covers its positions."""
    drawn = rectangles(plot_timeline(TIMELINE))
    first_written = [(0.0, 0.0, 3, False), (0.0, 0.0, 2, False)]
    assert drawn[:2] == first_written
    assert drawn[4:] == [
        (2.0, 3.0, 1, False),  # the fourth token of prompt 0
        (2.0, 2.0, 1, False),
        (3.0, 0.0, 4, False),  # all four are read
        (3.0, 0.0, 3, False),
    ]


def test_the_plot_hatches_unwritten_reads():
    """Only unwritten reads are hatched, and the legend explains it."""
    ax = plot_timeline(TIMELINE.with_attention_first(), title="early")
    hatched = [one[:3] for one in rectangles(ax) if one[3]]
    assert hatched == [(0.0, 0.0, 3), (0.0, 0.0, 2), (2.0, 3.0, 1), (2.0, 2.0, 1)]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[-1] == "read before it is written"
    assert ax.get_title() == "early"
    assert len(plot_timeline(TIMELINE).get_legend().get_texts()) == 2
