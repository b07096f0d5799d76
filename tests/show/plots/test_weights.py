"""The plots of an X-ray draw its data."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import faulty_attention

import attnlab
from attnlab.case.case import Case
from attnlab.show.plots import plot_law, plot_weights
from attnlab.weights.xray import key_columns, law_points

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
    drawn = drawn_columns(ax)
    assert np.allclose(drawn, getattr(columns, which).numpy(), atol=2e-6)
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
    ax = attnlab.plot(found)
    assert np.allclose(drawn_columns(ax), key_columns(found).difference)


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
