"""The plots of stages show the status and the number of wrong elements of each cell."""

import matplotlib.pyplot as plt
import pytest

from attnlab.lab.run import Cell
from attnlab.show.plots import plot_stages, plot_story


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
    assert found == ["rejected", "0 wrong", "8192 wrong", "0 wrong"]


def test_stages_are_numbered_and_described_in_their_order(ax):
    texts = [text.get_text() for text in ax.texts]
    assert [text for text in texts if text in ("1", "2", "int64", "fill_all")] == [
        "1",
        "int64",
        "2",
        "fill_all",
    ]
    assert "the first cache fix,\non top of the others" in texts
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
    assert found == ["rejected", "0 wrong", "8192 wrong", "0 wrong"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["int64", "fill_all"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["gfx942", "sm_90"]
    assert ax.get_title().startswith("2 of 4")
