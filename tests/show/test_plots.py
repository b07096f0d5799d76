"""The plots of errors: NaN, unwritten rows and idle heads are outside the colour map."""

import dataclasses
from dataclasses import replace

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers import faulty_attention
from helpers.cases import hostile
from matplotlib.collections import PolyCollection

import attnlab
from attnlab.case.case import Case, Lengths
from attnlab.case.masks import MASKS
from attnlab.contracts.slot_states import NOT_READ, SlotMap, SlotState
from attnlab.lab.lab import Cell, Lab
from attnlab.lab.result import MemoryReport, SlotsRead
from attnlab.show.plots import (
    AT_LIMIT,
    BAND,
    BIASED,
    COLOURS,
    FUTURE,
    HIDDEN,
    NAN_AT,
    STATUS_COLOURS,
    UNUSED,
    VISIBLE,
    ErrorScale,
    plot_blocks,
    plot_cache,
    plot_error,
    plot_law,
    plot_seq_error,
    plot_stages,
    plot_weights,
)
from attnlab.tensors.cache import NOBODY, Provenance
from attnlab.tensors.case_call import longest_mask
from attnlab.weights.xray import key_columns, law_points
from study import plots as codes_of
from study.plots import FLOOR, plot_fits, plot_formats, plot_merge, plot_sizes, plot_story

LENGTHS = Lengths(query_lens=(2, 1), ctx_lens=(3, 4))


@pytest.fixture(scope="module")
def lost():
    """Return a run whose last sequence reads NaN from an unwritten slot."""
    case = hostile(query_lens=(3, 1), ctx_lens=(5, 20), fill="context_only", platform="sm_90")
    return Lab().run(case.replace(atol=1e-2))


def hatches(ax):
    """Return the rows of the image that each hatch covers in column 0."""
    found = {}
    for cells in (artist for artist in ax.collections if artist.get_hatch()):
        for path in cells.get_paths():
            left, top = path.vertices.min(0)
            bottom = path.vertices.max(0)[1]
            if left == -0.5:
                found[cells.get_hatch()] = range(int(top + 0.5), int(bottom + 0.5))
    return found


def test_nan_is_bad_in_the_image_and_hatched(lost):
    ax = plot_error(lost.errors)
    shown = np.ma.filled(ax.images[0].get_array().astype(float), np.nan)
    assert np.isnan(shown[BAND:]).all()
    assert not np.isnan(shown[:BAND]).any()
    assert hatches(ax) == {"xx": range(BAND, 2 * BAND)}
    assert ax.images[0].cmap.get_bad().tolist() != ax.images[0].cmap(0.5)


def test_unwritten_rows_are_covered(lost):
    ax = plot_error(lost.errors, unwritten=torch.tensor([True, True, True, False]))
    assert hatches(ax) == {"///": range(BAND), "xx": range(BAND, 2 * BAND)}
    assert len(ax.get_legend().get_texts()) == 2


def test_the_tolerance_is_marked_in_the_colour_bar(lost):
    ax = plot_error(lost.errors)
    bar = next(other for other in ax.figure.axes if other is not ax)
    labels = dict(zip([t.get_text() for t in bar.get_yticklabels()], bar.get_yticks(), strict=True))
    (line,) = bar.lines
    assert labels["atol\n0.01"] == line.get_ydata()[0] == AT_LIMIT
    assert ax.images[0].norm(1e-2) == AT_LIMIT


def test_the_title_counts_wrong_elements(lost):
    assert f"{lost.errors.mismatched} of {lost.errors.total}" in plot_error(lost.errors).get_title()


def test_sequence_errors_and_nan():
    ax = plot_seq_error({"a": [1e-3, float("nan")], "b": [0.0, 2.0]}, LENGTHS, atol=1e-2)
    (a, a_nan, b, b_nan, atol) = [line.get_xydata().tolist() for line in ax.lines]
    assert [y for _, y in a] == [1e-3]
    assert [y for _, y in a_nan] == [NAN_AT]
    assert [y for _, y in b] == [1e-9, 2.0]
    assert b_nan == []
    assert {y for _, y in atol} == {1e-2}
    ticks = dict(zip(ax.get_yticks(), (t.get_text() for t in ax.get_yticklabels()), strict=True))
    assert ticks[NAN_AT] == "NaN"
    assert list(ax.texts) == []
    assert "1 of 2 sequences" in ax.get_title()


def colour(ax, band):
    """Return the colour of head 0 in a row of the image."""
    image = ax.images[0]
    return image.cmap(image.norm(image.get_array()[band, 0]))


def test_the_colours_break_at_the_tolerance(lost):
    """An element that is off by a little more than the tolerance has a colour of the upper half."""
    upper = {tuple(c) for c in COLOURS.colors[len(COLOURS.colors) // 2 :]}
    errors = replace(
        lost.errors, error=lost.errors.error.clone(), mismatches=lost.errors.mismatches
    )
    errors.error[0, 0], errors.error[1, 0] = errors.atol * 1.01, errors.atol * 0.99
    errors.mismatches[0, 0] = 1
    ax = plot_error(errors)
    assert colour(ax, 0) in upper
    assert colour(ax, BAND // 2) not in upper
    errors.mismatches[0, 0] = 0  # within a relative tolerance
    assert colour(plot_error(errors), 0) not in upper


@pytest.mark.parametrize("atol", [0.0, 1e-4, 0.002, 5.0])
def test_the_scale_is_monotonic_and_invertible(atol):
    scale = ErrorScale.of(atol, np.array([1e-3, np.nan, 2.0, -np.inf]))
    errors = np.geomspace(scale.least, scale.most, 50)
    shares = np.asarray(scale.norm()(errors))
    assert (np.diff(shares) > 0).all()
    assert shares[0] == 0
    assert shares[-1] == 1
    assert scale.norm().inverse(shares) == pytest.approx(errors, rel=1e-3)
    assert {scale.least, scale.atol, scale.most} <= set(scale.ticks())


def test_one_head_has_one_tick(lost):
    one = replace(
        lost.errors, error=lost.errors.error[:, :1], mismatches=lost.errors.mismatches[:, :1]
    )
    assert plot_error(one).get_xticks().tolist() == [0]


def test_rows_of_a_cache_write_are_labelled_as_slots(lost):
    labels = [t.get_text() for t in plot_error(lost.errors, cache_of=1).get_yticklabels()]
    assert labels == ["0: 3 slots", "none: 1 slots"]


# The plots of a cache: images, hatches and labels are those of the SlotMap.


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


# The plots of candidates: ranges, fits, and the candidate that stands out.


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


# The plot of formats: one line per format, gaps where a byte has no positive number.


def test_gaps_are_zero_infinity_and_nan():
    values = np.arange(256, dtype=float)
    values[5], values[6] = np.inf, np.nan
    ax = plot_formats({"a": values, "b": values * 2})
    first, second = (line.get_ydata() for line in ax.lines)
    assert np.flatnonzero(np.isnan(first)).tolist() == [0, 5, 6]
    assert len(first) == 128
    assert second[7] == 14


# The plot of a mask draws what each row sees.


@pytest.mark.parametrize("mask", list(MASKS))
def test_every_cell_is_that_of_the_mask(mask):
    case = Case(
        op="unified_attention",
        mask=mask,
        sliding_window=6,
        query_lens=(2, 11),
        ctx_lens=(5, 9),
        num_heads=1,
    )
    ax = attnlab.plot(case)
    (image,) = ax.images
    codes = np.ma.getdata(image.get_array())
    one = longest_mask(case)
    assert (one.seq, codes.shape) == (1, (11, 20))
    assert np.array_equal(codes != HIDDEN, one.visible(torch.arange(9, 20)).numpy())
    after = np.arange(20) > np.arange(9, 20)[:, None]
    assert not after[codes == VISIBLE].any()
    assert after[codes == FUTURE].all()
    has_future = mask in ("bidirectional", "causal_by_sequence", "ranges", "ranges_in_window")
    assert bool((codes == FUTURE).any()) == has_future
    assert bool((codes == BIASED).any()) == (mask == "tree")
    assert "sequence 1" in ax.get_title()


# The plot of scratch memory: read, not read, and another head's.


def test_another_heads_entry_is_hatched():
    reads, own = np.eye(3, 4, dtype=bool), np.eye(3, 4, dtype=bool)
    reads[1, 2] = True
    ax = plot_merge(reads, own)
    codes = ax.images[0].get_array()
    assert codes[1, 2] == codes_of.OTHER_HEAD
    assert int((codes == codes_of.OWN).sum()) == 3
    assert int((codes == codes_of.NOT_READ).sum()) == 8
    (cells,) = ax.collections
    assert [path.vertices.min(0).tolist() for path in cells.get_paths()] == [[1.5, 0.5]]
    assert ax.get_title().startswith("1 ")


def test_without_a_strange_entry_nothing_is_hatched():
    ax = plot_merge(np.eye(3, dtype=bool), np.eye(3, dtype=bool))
    assert len(ax.collections) == 0
    assert len(ax.get_legend().get_texts()) == 2


# The plots of stages show the status and the number of wrong elements of each cell.


def cell(stage, platform, status, mismatched):
    return Cell(
        stage=stage,
        platform=platform,
        status=status,
        verdict="",
        mismatched=mismatched,
        total=9,
        first_index=None,
        decode_kernel="kernel_paged_attention_2d",
        decode_error=None,
        prefill_error=None,
    )


CELLS = [
    cell("int64", "gfx942", "rejected", None),
    cell("int64", "sm_90", "match", 0),
    cell("fill_all", "gfx942", "mismatch", 8192),
    cell("fill_all", "sm_90", "match", 0),
]
STORIES = {"int64": "the first form", "fill_all": "the first cache fix, on top of the others"}


@pytest.fixture
def ax():
    return plot_story(CELLS, STORIES, title="two of four")


def test_each_cell_is_drawn_where_its_stage_and_platform_are(ax):
    boxes = {(round(p.get_x() - 0.03, 6), round(p.get_y() - 0.09, 6)): p for p in ax.patches}
    looks = {at: (box.get_hatch() or "", box.get_facecolor()) for at, box in boxes.items()}
    assert [looks[at][0] for at in ((0, 0), (0, 1), (1, 0), (1, 1))] == ["xx", "", "///", ""]
    assert looks[0, 1][1] == looks[1, 1][1]
    assert len({look[1] for look in looks.values()}) == 3


def test_each_cell_has_its_status_or_count(ax):
    texts = {text.get_position(): text.get_text() for text in ax.texts}
    found = [texts[at] for at in ((0.5, 0.5), (0.5, 1.5), (1.5, 0.5), (1.5, 1.5))]
    assert found == ["rejected", "0\nwrong", "8192\nwrong", "0\nwrong"]


def test_stages_are_numbered_and_described_in_their_order(ax):
    texts = [text.get_text() for text in ax.texts]
    assert [text for text in texts if text in ("1", "2", "int64", "fill_all")] == [
        "1",
        "int64",
        "2",
        "fill_all",
    ]
    assert "the first\ncache fix, on\ntop of the\nothers" in texts
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [f"{name}\nkernel_paged_\nattention_2d" for name in ("gfx942", "sm_90")]
    assert ax.get_title() == "two of four"


def test_the_legend_has_only_statuses_that_occur():
    axes = plot_story(CELLS[1:2], STORIES)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["match"]


def test_it_draws_on_the_given_axes():
    _, given = plt.subplots()
    assert plot_story(CELLS, STORIES, ax=given) is given


def test_the_table_has_a_row_per_stage():
    ax = plot_stages(CELLS)
    texts = {text.get_position(): text.get_text() for text in ax.texts}
    found = [texts[at] for at in ((0.5, 0.5), (1.5, 0.5), (0.5, 1.5), (1.5, 1.5))]
    assert found == ["rejected", "0\nwrong", "8192\nwrong", "0\nwrong"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["int64", "fill_all"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["gfx942", "sm_90"]
    assert ax.get_title().startswith("2 of 4")


# The plots of an X-ray draw its data.


CASE = Case(
    op="context_attention_fwd",
    num_heads=2,
    head_size=32,
    block_size=16,
    query_lens=(3, 9),
    ctx_lens=(40, 67),
    distribution="normal",
    backend=f"{faulty_attention.__file__}:next_sequence",
)


@pytest.fixture(scope="module")
def found():
    return attnlab.xray(CASE, confirm=False)


def drawn_columns(ax):
    """Return the numbers that the two images of a plot of weights draw."""
    return np.hstack([np.ma.getdata(image.get_array()) for image in ax.images])


def test_columns_hold_every_weight_once(found):
    columns = key_columns(found, seq=0, head=1)
    assert columns.measured.shape == (3, 48 + 2)  # 3 blocks, another sequence, unmapped blocks
    assert torch.allclose(columns.measured.sum(1), found.weights[:3, 1].sum(-1))
    assert torch.allclose(columns.expected.sum(1), torch.ones(3).double())
    assert torch.all(columns.expected[:, 43:] == 0)
    assert torch.all(columns.measured[:, -2] > 0.1)  # keys of the next sequence


@pytest.mark.parametrize("which", ["measured", "expected", "difference"])
def test_plot_weights(found, which):
    columns = key_columns(found)
    ax = plot_weights(columns, which=which)
    assert np.allclose(drawn_columns(ax), getattr(columns, which).numpy(), atol=2e-6)
    edges = {float(line.get_xdata()[0]) for line in ax.lines}
    assert columns.context - 0.5 in edges
    assert columns.positions - 0.5 in edges


def test_nan_of_a_foreign_column_is_hatched_where_it_is_drawn(found):
    columns = key_columns(found)
    measured = columns.measured.clone()
    measured[0, -1] = torch.nan
    ax = plot_weights(dataclasses.replace(columns, measured=measured))
    (hatched,) = ax.collections
    boxes = [path.vertices[:, 0] for path in hatched.get_paths()]
    assert len(boxes) == columns.foreign_width > 1
    assert max(box.max() for box in boxes) == ax.get_xlim()[1]


def test_plot_law(found):
    points = law_points(found)
    ax = plot_law(points)
    assert sum(len(line.get_xdata()) for line in ax.lines[:-1]) == len(points.measured)


def test_plot_of_an_xray_is_the_difference(found):
    assert np.allclose(drawn_columns(attnlab.plot(found)), key_columns(found).difference)


def test_unreadable_rows_draw_their_own_blocks_only() -> None:
    case = Case(
        **{"num_heads": 2, "head_size": 64, "platform": "gfx942", "stage": "int32_before_cumsum"},
        query_lens=(3, 1),
        ctx_lens=(40, 33),
        max_blocks_per_seq=20,
    )
    columns = key_columns(attnlab.xray(case, confirm=False), seq=1)
    assert columns.measured.isnan().any()
    assert columns.own == -(-columns.positions // columns.block_size) * columns.block_size
