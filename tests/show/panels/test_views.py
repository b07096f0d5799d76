"""Views: pictures, clicks and arrow keys."""

import io
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from helpers.cases import hostile
from helpers.panels import LOST, SMALL, ignore_step
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlab.case.errors import Unavailable
from attnlab.case.ops import OPS, VLLM_OPS, WRITE
from attnlab.case.platforms import STAGES
from attnlab.contracts.contract import Target, contracts_of
from attnlab.contracts.slot_states import SlotState, slot_map
from attnlab.lab.lab import Lab
from attnlab.show.panels import explorer, panel
from attnlab.show.panels.rendering import Cells, Rendered, axes_rect, render
from attnlab.show.panels.views import (
    VIEWS,
    FramedPlot,
    Frames,
    bands_of,
    make_panel_data,
    select,
    select_band,
)
from attnlab.show.plots import BAND

ABSENT = {"mask", "other", "difference"}  # of a causal Case on one runner


def test_a_click_selects_what_the_picture_shows() -> None:
    """The middle of a cell selects its head and the worst token of its band."""
    view = panel(LOST, knobs=("stage",), views=("error", "slots"))
    assert view.wait(30)
    transform, errors = view._rendered["error"].transform, view.result.errors
    for band in range(BAND * 4):
        for head in range(4):
            left, top, width, height = transform.box(head, band)
            view.pointer.click_error(left + width / 2, top + height / 2)
            one = view.selection
            assert one is not None
            rows = errors.band_rows(band)
            assert one.row in rows
            assert one.head == head
            assert one.error == float(errors.error[rows.start : rows.stop, head].max())
            assert band in bands_of(view.data, one, BAND)
    assert view.selection.seq == 3
    assert "row 46" in view.texts["selection"].value
    view.pointer.click_error(0.001, 0.5)  # outside the axes: nothing
    assert view.selection.seq == 3


def test_the_transform_agrees_with_the_pixels() -> None:
    """The middle of a cell is black if and only if its row is NaN."""
    case = LOST.replace(query_start_loc_dtype="int32", empty_slots="nan")
    view = panel(case, knobs=("stage",))
    assert view.wait(30)
    rendered = view._rendered["error"]
    pixels = matplotlib.image.imread(io.BytesIO(rendered.png))
    height, width = pixels.shape[:2]
    for band in range(BAND * 4):
        left, top, wide, tall = rendered.transform.box(1, band)
        columns = slice(int((left + wide * 0.2) * width), int((left + wide * 0.8) * width))
        rows = slice(int((top + tall * 0.2) * height), int((top + tall) * height))
        is_black = bool((pixels[rows, columns, :3].max(2) < 0.2).any())  # between white hatches
        nan = view.result.errors.error[view.result.errors.band_rows(band), 1].isnan().any()
        assert is_black == bool(nan), band


def test_arrow_keys_move_the_selection() -> None:
    """One head or one row of the picture, within the edges."""
    view = panel(SMALL, knobs=("stage",))
    assert view.wait(30)
    view.pointer.select(0, 0, 0)
    view.pointer.step(1, 0)
    assert (view.selection.row, view.selection.head) == (0, 1)
    view.pointer.step(-5, -1)
    assert (view.selection.row, view.selection.head) == (0, 0)
    view.pointer.step(0, BAND)
    assert view.selection.seq == 1


def test_a_selection_is_kept_if_the_row_exists() -> None:
    view = panel(LOST, knobs=("stage",))
    assert view.wait(30)
    before = view.pointer.select(3, 0, 2)
    assert before.place.reader is None  # no sequence is served
    view.show(stage="sound")
    assert (view.selection.seq, view.selection.head) == (3, 2)
    assert view.selection.got != before.got
    assert view.selection.place.reader == (3, 31)
    view.show(stage="int64")
    assert view.selection is None
    with pytest.raises(ValueError, match="no output"):
        view.pointer.select(0, 0, 0)


@pytest.mark.parametrize("op", VLLM_OPS)
@pytest.mark.quick("decode_attention_fwd", "merge_attn_states", "triton_prefill_attention")
def test_every_op_has_its_pictures(op: str) -> None:
    changes = {"op": op, "x": None, "fill": "all_rows"}
    if not OPS[op].prefill:
        changes |= {"query_lens": (1, 1), "ctx_lens": (20, 3)}
    if not OPS[op].context:
        changes |= {"query_lens": (5, 3), "ctx_lens": (0, 0)}
    if op == "cpu_attention_with_kv_cache":
        changes |= {"backend": "vllm-cpu", "platform": "cpu"}
    view = explorer(SMALL.replace(**changes))
    assert view.wait(60)
    if isinstance(view.error, Unavailable):
        pytest.skip(str(view.error))
    assert view.error is None
    assert {name for name, picture in view.pictures.items() if not picture.png} == ABSENT
    assert view.result.status == "match"


def test_a_mask_has_a_picture() -> None:
    """With the other masks than the causal one; its cells say what a key is to a row."""
    case = SMALL.replace(op="unified_attention", x=None, fill="all_rows", mask="bidirectional")
    view = explorer(case)
    assert view.wait(60)
    picture = view.pictures["mask"]
    assert picture.png
    codes = np.frombuffer(picture.cells["values"], dtype="<f4")
    codes = codes.reshape(len(picture.cells["rows"]), len(picture.cells["columns"]))
    shown = {picture.cells["names"][int(code)] for code in np.unique(codes)}
    assert shown == {"visible", "visible, after the row"}
    view.show(mask="causal")
    assert not picture.png


def test_a_click_on_a_sequence_selects_its_worst_token() -> None:
    view = panel(LOST, knobs=("stage",), views=("error", "seqs"))
    assert view.wait(30)
    left, top, width, height = view._rendered["seqs"].transform.column(2)
    view.pointer.click_seq(left + width / 2, top + height / 2)
    errors = view.result.errors.error[6:46]  # the rows of sequence 2
    assert view.selection.seq == 2
    assert view.selection.error == float(errors.max())
    assert view.pictures["seqs"].mark == [left, top, width, height]


@pytest.mark.parametrize("op", ["chunked_prefill_paged_decode", "reshape_and_cache_flash"])
def test_the_cells_of_a_picture_are_what_it_shows(op: str) -> None:
    """The front-end gets a name for each row and column, and the values."""
    view = explorer(SMALL.replace(op=op, x=None))
    assert view.wait(30)
    for name, rendered in view._rendered.items():
        cells, drawn = view.pictures[name].cells, rendered.cells
        values = np.frombuffer(cells["values"], dtype="<f4")
        assert len(values) == len(cells["rows"]) * len(cells["columns"])
        assert np.array_equal(values, np.asarray(drawn.values, np.float32).ravel(), equal_nan=True)
    cells = view.pictures["error"].cells
    slots = op == "reshape_and_cache_flash"
    assert cells["rows"][BAND] == (
        "sequence 1, positions 0 to 1 of 34" if slots else "sequence 1, token 0 of 1"
    )
    assert cells["columns"][0] == ("KV head 0" if slots else "head 0")
    assert view.pictures["slots"].cells["rows"][-1] == "slot 15"


def test_the_mark_covers_all_bands_of_a_token() -> None:
    view = panel(LOST, knobs=("stage",))
    assert view.wait(30)
    view.pointer.select(3, 0, 0)
    assert view.pictures["error"].mark == view._rendered["error"].transform.box(0, 3 * BAND, BAND)


def test_a_dark_page_has_dark_pictures() -> None:
    view = panel(SMALL, knobs=("stage",))
    assert view.wait(30)
    corner = lambda: matplotlib.image.imread(io.BytesIO(view.pictures["error"].png))[0, 0, 0]  # noqa: E731
    assert corner() > 0.9
    view.pictures["error"].dark = True
    assert view.wait(30)
    assert corner() < 0.2


def test_no_label_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels and legend are inside the picture of the errors, and the legend is below the labels."""
    figures = []

    def kept(**options: object) -> Figure:
        figures.append(Figure(**options))
        return figures[-1]

    monkeypatch.setattr("attnlab.show.panels.rendering.Figure", kept)
    case = LOST.replace(atol=None, query_lens=(1000, 1), ctx_lens=(1000, 33))
    legend, tops = Axes.legend, []

    def noted(ax: Axes, **given: object) -> None:
        tops.append(legend(ax, **given).get_window_extent().y1)

    monkeypatch.setattr(Axes, "legend", noted)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 10.5)  # as in the notebooks of the study
    assert panel(case, knobs=("stage",), views=("error",)).wait(30)
    width, height = figures[-1].bbox.size
    labels = [
        label.get_window_extent()
        for ax in figures[-1].axes
        for label in (
            *(*ax.get_xticklabels(), *ax.get_yticklabels()),
            *(ax.xaxis.label, ax.yaxis.label),
        )
        if label.get_text() and label.get_visible()
    ]
    assert len(labels) > 8
    assert tops[0] < figures[-1].axes[0].xaxis.label.get_window_extent().y0
    assert all(
        one.x0 >= 0 and one.x1 <= width and one.y0 >= 0 and one.y1 <= height for one in labels
    )


def test_titles_are_inside_their_pictures() -> None:
    """The margin at each side of a picture has no ink in the row of its title."""
    view = explorer(SMALL.replace(atol=None))
    assert view.wait(30)
    for name, rendered in view._rendered.items():
        pixels = matplotlib.image.imread(io.BytesIO(rendered.png))
        title = pixels[: int(rendered.transform.top * pixels.shape[0]) - 3, :, :3]
        assert np.ptp(title[:, :3]) == np.ptp(title[:, -3:]) == 0, name


# PanelData and Selection: values, places in the cache, and the use of slots.


def test_a_selection_agrees_with_the_error_map() -> None:
    lab, case = Lab(), hostile(fill="context_only", empty_slots="garbage", output_init="zeros")
    data = make_panel_data(lab, case, ignore_step)
    errors, provenance = data.result.errors, data.result.cache.provenance
    assert errors is not None
    expected, output = lab.reference(case), data.result.call.output
    for row in range(case.lengths.num_tokens):
        head = row % case.num_heads
        one = select(data, row, head)
        seq, token = case.lengths.locate(row)
        position = case.lengths.ctx_lens[seq] + token
        assert (one.seq, one.token) == (seq, token)
        assert (one.place.block, one.place.slot) == provenance.slot(seq, position)
        assert one.place.owner == (seq, position)
        assert one.expected == float(expected[row, head, one.element])
        assert one.got == float(output[row, head, one.element])
        assert abs(one.got - one.expected) == pytest.approx(one.error, rel=1e-6)


def test_the_worst_row_of_a_band_is_selected() -> None:
    """NaN counts as the worst."""
    data = make_panel_data(Lab(), SMALL, ignore_step)
    errors = data.result.errors
    rows = errors.band_rows(2 * BAND + 3)  # sequence 2 has 40 tokens
    assert len(rows) > 1
    errors.error[rows.stop - 1, 2] = float("nan")
    assert select_band(data, 2 * BAND + 3, 2).row == rows.stop - 1


def test_a_selection_of_a_cache_write_is_a_slot() -> None:
    case = SMALL.replace(op=WRITE, x=None, num_blocks=40)
    view = panel(case, knobs=("stage",), views=("error", "slots"))
    assert view.wait(30)
    assert view.error is None
    slots = view.data.row_slots
    for row in (0, 30, 95, len(slots) - 1):
        one = select(view.data, row, 1)
        assert one.place.block * 16 + one.place.slot == int(slots[row])
    view.pointer.select(2, 7, 0)
    assert view.selection.place.owner == (2, 7)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.quick("sound", "fill_decode", "int32_before_cumsum")
def test_slots_by_writer_and_reader(stage: str) -> None:
    """The expected counts follow from the lengths alone."""
    data = make_panel_data(Lab(), SMALL.replace(stage=stage), ignore_step)
    lengths, fill = SMALL.lengths, data.result.case.staging.fill
    read = written = own = 0
    for query_len, ctx_len in zip(lengths.query_lens, lengths.ctx_lens, strict=True):
        reads = ctx_len + (query_len == 1)
        writes = {
            "context_only": ctx_len,
            "decode_rows": ctx_len + (query_len == 1),
            "all_rows": ctx_len + query_len,
        }[fill]
        read, written, own = read + reads, written + writes, own + min(reads, writes)
    expected = {SlotState.OWN: own, SlotState.UNWRITTEN: read - own}
    assert data.slot_map.counts() == {state: count for state, count in expected.items() if count}
    is_written = data.slot_map.provenance.seq >= 0
    assert int((is_written & ~data.slot_map.is_read).sum()) == written - own


def test_a_foreign_slot_is_recognized() -> None:
    """The call's block table names a block of another sequence."""
    data = make_panel_data(Lab(), SMALL, ignore_step)
    table = data.result.call.block_table.clone()
    table[0, 0] = table[1, 0]
    call = replace(data.result.call, block_table=table)
    provenance = data.result.cache.provenance
    kernels = data.result.decision.kernels
    contracts = contracts_of(kernels[:1], Target.of(SMALL), call.op)  # the prefill kernel alone
    slots = slot_map(call, contracts, provenance)
    assert slots.counts()[SlotState.OTHER_SEQUENCE] == 16
    block = int(provenance.block_table[1, 0])
    slot = slots.at(block, 3)
    assert (slot.writer, slot.reader, slot.owner) == ((1, 3), (0, 3), (1, 3))


def test_blocks_are_in_the_order_of_the_block_table() -> None:
    """Blocks that no sequence uses are last."""
    data = make_panel_data(Lab(), SMALL.replace(num_blocks=30), ignore_step)
    order = data.slot_map.order().tolist()
    table = data.result.cache.provenance.block_table.flatten().tolist()
    assert order[: len(table)] == table
    assert sorted(order) == list(range(30))


# Frames: a picture over a kept frame is the picture that is drawn anew.


NAMES = ("error", "slots", "seqs")
NOTHING = Cells(rows=[], columns=[], values=np.zeros((0, 0), dtype=np.float32))
SIZE = (300, 200)


def pixels(rendered: Rendered) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(rendered.png))


class Compared(Frames):
    """Frames that draw each picture anew, too, and count the pixels that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.different: list[int] = []

    def render(self, plot: FramedPlot, cells: Cells, *, is_dark: bool = False) -> Rendered:
        def whole(ax: object) -> None:
            plot.frame(ax)
            plot.label(ax)
            plot.content(ax)

        found = super().render(plot, cells, is_dark=is_dark)
        anew = render(whole, plot.size, plot.rect, cells, is_dark=is_dark)
        assert (found.title, found.transform) == (anew.title, anew.transform)
        self.different.append(int((pixels(found) != pixels(anew)).any(2).sum()))
        return found


def test_a_picture_over_a_kept_frame_is_that_drawn_anew() -> None:
    """Wrong, NaN, unwritten and right rows, other lengths, and heads that did not run."""
    view = panel(LOST, knobs=("stage", "seed"), views=NAMES)
    assert view.wait(120)
    view._frames = frames = Compared()
    changes = [
        {"stage": "sound"},
        {"stage": "fill_decode", "empty_slots": "nan"},
        {"stage": "int32_before_cumsum", "output_init": "nan"},
        {"query_lens": (3, 8, 1, 1), "ctx_lens": (4, 20, 9, 31)},
        {"stage": "sound"},
        {"query_lens": LOST.query_lens, "ctx_lens": LOST.ctx_lens},
        {"atol": 1e-7},
    ]
    for change in changes:
        view._is_dark = "output_init" in change
        view.set(**change)
        assert view.wait(120)
        assert view.error is None, change
    data = view.data
    errors = replace(data.result.errors, heads=range(1, 3))
    part = replace(data, result=replace(data.result, errors=errors))
    VIEWS["error"].render(part, frames, True)
    VIEWS["error"].render(data, frames, True)
    assert len(frames.different) == len(NAMES) * len(changes) + 2
    assert set(frames.different) == {0}


def of_bars(heights: list[float], key: object = "bars") -> FramedPlot:
    def frame(ax):
        ax.set(xlim=(-1, 3), ylim=(0, 3), xlabel="bar")
        return []

    def content(ax):
        ax.plot(heights, "o")
        if not heights:
            raise ValueError("no bars")

    rect = axes_rect(SIZE, (40, 10, 40, 20))
    return FramedPlot(key=key, size=SIZE, rect=rect, frame=frame, content=content)


def test_no_content_is_left_for_the_next_picture() -> None:
    """Neither its artists nor the next colour."""
    frames = Frames()
    first = frames.render(of_bars([1, 2]), NOTHING)
    assert frames.render(of_bars([2, 1]), NOTHING).png != first.png
    assert frames.render(of_bars([1, 2]), NOTHING).png == first.png
    assert len(frames._frames) == 1


def test_content_that_raises_leaves_no_frame() -> None:
    frames = Frames()
    with pytest.raises(ValueError, match="no bars"):
        frames.render(of_bars([]), NOTHING)
    assert not frames._frames


def test_only_the_frames_used_last_are_kept() -> None:
    frames = Frames()
    for key in range(12):
        frames.render(of_bars([1], key), NOTHING)
    assert [key[-1] for key in frames._frames] == list(range(4, 12))
