"""Views: pictures, clicks and arrow keys."""

import io

import matplotlib.image
import numpy as np
import pytest
from helpers.panels import LOST, SMALL
from matplotlib.figure import Figure

from attnlab.case.errors import Unavailable
from attnlab.case.ops import OPS, VLLM_OPS
from attnlab.show.panels import explorer, panel
from attnlab.show.panels.texts import bands_of
from attnlab.show.plots.errors import BAND

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
        column = int((left + wide / 2) * width)
        colours = pixels[int((top + tall * 0.2) * height) : int((top + tall) * height), column, :3]
        is_black = bool((colours.max(1) < 0.2).any())
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
def test_every_op_has_its_pictures(op: str) -> None:
    changes = {"op": op, "x": None, "fill": "all_rows"}
    if op == "decode_attention_fwd":
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
    """The labels of both axes and of the colour bar are inside the picture of the errors."""
    figures = []

    def kept(**options: object) -> Figure:
        figures.append(Figure(**options))
        return figures[-1]

    monkeypatch.setattr("attnlab.show.panels.rendering.Figure", kept)
    view = panel(LOST.replace(atol=None), knobs=("stage",), views=("error",))
    assert view.wait(30)
    width, height = figures[-1].bbox.size
    labels = [
        label.get_window_extent()
        for ax in figures[-1].axes
        for label in (*ax.get_xticklabels(), *ax.get_yticklabels())
        if label.get_text() and label.get_visible()
    ]
    assert len(labels) > 8
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
