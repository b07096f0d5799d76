"""ErrorMap: the figures of torch.testing.assert_close, and their places."""

import math
import re

import pytest
import torch
from helpers.examples import examples
from helpers.other_device import DEVICE, other_device
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.case.case import Lengths
from attnlab.lab import result as result
from attnlab.lab.result import map_errors

INF, NAN = math.inf, math.nan


def message_of_torch(output, expected, atol, rtol):
    """Return the text of assert_close's AssertionError; "" if it raises none."""
    try:
        torch.testing.assert_close(output, expected, atol=atol, rtol=rtol)
    except AssertionError as error:
        return str(error)
    return ""


def lengths_of(tokens):
    """Return lengths of one or two sequences with this number of new tokens in total."""
    query_lens = (tokens - 1, 1) if tokens > 1 else (1,)
    return Lengths(query_lens=query_lens, ctx_lens=(0,) * len(query_lens))


@st.composite
def pairs(draw):
    """Return an output and an expected tensor with small and large errors, NaN and infinities."""
    tokens, heads, size = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    expected = torch.randn(tokens, heads, size, generator=generator).to(dtype)
    output = expected + draw(st.sampled_from([0, 1e-5, 1e-3])) * torch.randn(
        expected.shape, generator=generator
    ).to(dtype)
    special = st.sampled_from([0.0, 5.0, NAN, INF, -INF])
    for tensor in (output, expected):
        for _ in range(draw(st.integers(0, 3))):
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(special)
    if draw(st.booleans()):
        at = draw(st.integers(0, output.numel() - 1))
        output.view(-1)[at] = expected.view(-1)[at] = draw(special)
    return output, expected


@given(pairs(), st.sampled_from([0.0, 1e-4]), st.sampled_from([0.0, 1e-3]), st.integers(1, 5))
@settings(max_examples=examples(300), deadline=None)
def test_the_message_equals_that_of_torch(pair, atol, rtol, rows_at_a_time):
    """The texts are equal for any chunk size."""
    output, expected = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result, "_ROWS_AT_A_TIME", {"cpu": rows_at_a_time})
        errors = map_errors(output, expected, lengths_of(len(output)), atol, rtol)
    assert errors.message() == message_of_torch(output, expected, atol, rtol)


@given(pairs(), st.sampled_from([0.0, 1e-3]))
@settings(max_examples=examples(60), deadline=None)
def test_figures_by_counting(pair, rtol):
    """Counts, first index and places equal those of a comparison element by element."""
    output, expected = pair
    errors = map_errors(output, expected, lengths_of(len(output)), 1e-4, rtol)
    close = torch.isclose(output, expected, atol=1e-4, rtol=rtol)
    wrong = torch.nonzero(~close)
    assert errors.mismatched == len(wrong)
    assert errors.total == output.numel()
    assert errors.first_index == (tuple(wrong[0].tolist()) if len(wrong) else None)
    assert torch.equal(errors.mismatches, (~close).sum(2, dtype=torch.int32))
    assert errors.nan_elements == int(output.isnan().sum())
    rows = sorted({row for row, _, _ in wrong.tolist()})
    assert [place.row for place in errors.places()] == rows
    for place in errors.places():
        here = wrong[wrong[:, 0] == place.row]
        assert place.elements == len(here)
        assert place.heads == tuple(sorted(set(here[:, 1].tolist())))


def test_many_rows_in_chunks():
    """First index and greatest error are those of all chunks."""
    expected = torch.zeros(600, 2, 3)
    output = expected.clone()
    output[130, 1, 2], output[400, 0, 1], output[599, 0, 0] = 1.0, -3.0, 2.0
    errors = map_errors(
        output, expected, Lengths(query_lens=(500, 100), ctx_lens=(0, 0)), 1e-4, 0.0
    )
    assert errors.first_index == (130, 1, 2)
    assert (errors.greatest_abs.value, errors.greatest_abs.index) == (3.0, (400, 0, 1))
    assert errors.message() == message_of_torch(output, expected, 1e-4, 0.0)
    assert [(p.seq, p.token) for p in errors.places()] == [(0, 130), (0, 400), (1, 99)]
    assert errors.seq_error() == [3.0, 2.0]
    assert errors.token_error[599] == 2.0
    assert errors.error[130].tolist() == [0.0, 1.0]


def test_nan_is_the_greatest():
    """NaN is greater than every number, in the map too."""
    expected = torch.ones(3, 1, 2)
    output = expected.clone()
    output[0, 0, 1], output[2, 0, 0] = 1e30, NAN
    errors = map_errors(output, expected, lengths_of(3), 1e-4, 0.0)
    assert math.isnan(errors.greatest_abs.value)
    assert errors.greatest_abs.index == (2, 0, 0)
    assert math.isnan(errors.seq_error()[1])
    assert errors.to_dict()["max_abs_error"] == "nan"
    assert errors.nan_elements == 1


def test_nothing_mismatched():
    """A match has no first index, places or message, but a greatest error."""
    expected = torch.ones(4, 2, 2)
    output = expected.clone()
    output[2, 1, 0] += 2**-14
    errors = map_errors(output, expected, lengths_of(4), 1e-4, 0.0)
    assert (errors.mismatched, errors.first_index) == (0, None)
    assert errors.places() == []
    assert errors.message() == ""
    assert (errors.greatest_abs.value, errors.greatest_abs.index) == (2**-14, (2, 1, 0))
    assert errors.to_dict()["first_index"] is None


def test_the_tolerance_itself_is_inside():
    """An error of exactly atol passes, the next larger number does not."""
    expected = torch.zeros(2, 1, 1)
    for value, count in ((0.5, 0), (math.nextafter(0.5, 1.0), 1)):
        output = torch.full((2, 1, 1), value, dtype=torch.float64)
        output[1] = 0
        assert map_errors(output, expected.double(), lengths_of(2), 0.5, 0.0).mismatched == count


def test_the_output_is_read_in_the_references_dtype():
    """A float16 output is compared in float64 if the reference is float64."""
    expected = torch.full((1, 1, 1), 1.00001, dtype=torch.float64)
    errors = map_errors(torch.ones(1, 1, 1).half(), expected, lengths_of(1), 1e-9, 0.0)
    assert errors.mismatched == 1
    assert errors.greatest_abs.value == pytest.approx(1e-5)


def test_equal_infinities_hide_no_other_error():
    """The errors next to an expected infinity remain in the map."""
    expected = torch.zeros(2, 2, 1)
    expected[0, 0] = INF
    output = expected.clone()
    output[0, 1] = 2**-20
    errors = map_errors(output, expected, lengths_of(2), 1e-4, 1e-3)
    assert errors.mismatched == 0
    assert errors.error[0].tolist() == [0.0, 2**-20]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_locate_inverts_the_flat_index(query_lens):
    lengths = Lengths(query_lens=tuple(query_lens), ctx_lens=(0,) * len(query_lens))
    rows = [(seq, token) for seq, n in enumerate(query_lens) for token in range(n)]
    assert [lengths.locate(row) for row in range(len(rows))] == rows


def test_the_text_of_torch_has_count_and_index():
    """Another count or index gives another text, so the comparison can fail."""
    expected = torch.zeros(3, 1, 2)
    output = expected.clone()
    output[1] = 7.0
    text = map_errors(output, expected, lengths_of(3), 1e-4, 0.0).message()
    assert re.search(r"Mismatched elements: 2 / 6 \(33\.3%\)", text)
    assert re.search(r"7\.0 at index \(1, 0, 0\) \(up to 0\.0001 allowed\)", text)
    output[2] = 9.0
    assert text != message_of_torch(output, expected, 1e-4, 0.0)


@pytest.mark.parametrize("special", [None, torch.nan, torch.inf, -torch.inf])
def test_a_gpu_finds_the_same_largest_magnitudes(special):
    values = torch.randn(3, 2, 16)
    if special is not None:
        values[1, 1, 5] = special
    with other_device():
        found = result._largest(values.to(DEVICE)).cpu()
    torch.testing.assert_close(found, result._largest(values), rtol=0, atol=0, equal_nan=True)
