"""The plots of errors: NaN, unwritten rows and idle heads are outside the colour map."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.cases import hostile

from attnlab.case.lengths import Lengths
from attnlab.lab.lab import Lab
from attnlab.show.plots import plot_error, plot_seq_error
from attnlab.show.plots.artists import AT_LIMIT, COLOURS, ErrorScale
from attnlab.show.plots.errors import BAND, NAN_AT

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
    series = [line.get_xydata().tolist() for line in ax.lines]
    (a, a_nan, b, b_nan, atol) = series
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
