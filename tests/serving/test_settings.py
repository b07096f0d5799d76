"""Settings: their text in the environment and on the command line, and bad values."""

import pytest

from attnlab.case.errors import InvalidCase
from attnlab.serving.settings import (
    CaptureSettings,
    parse_bytes,
    parse_count,
    parse_range,
    parse_share,
)


def test_settings_as_text_and_as_a_file(tmp_path):
    one = CaptureSettings(out="x", layer=(3, 4), step=(40, 60), rank=(0, 1), sample=0.5, rows=None)
    assert CaptureSettings.of_text(one.to_json()) == one
    file = tmp_path / "settings.json"
    file.write_text(one.to_json())
    assert CaptureSettings.of_text(str(file)) == one
    assert CaptureSettings.of_text('{"out": "x"}') == CaptureSettings(out="x")


@pytest.mark.parametrize(
    "text", ["", "/no/such/file", "{", "[]", "{}", '{"out": 3}', '{"out": "x", "layers": 3}']
)
def test_bad_text_is_one_line(text):
    with pytest.raises(InvalidCase) as error:
        CaptureSettings.of_text(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer", (3, 3)),
        ("step", (-1, 2)),
        ("rank", (1,)),
        ("max_bytes", -1),
        ("sample", 0.0),
        ("sample", 1.5),
        ("rows", 0),
        ("heads", True),
    ],
)
def test_wrong_values_are_refused(name, value):
    with pytest.raises(InvalidCase):
        CaptureSettings(out="x", **{name: value})


@pytest.mark.parametrize(
    ("layer", "step", "requested"),
    [
        (None, None, {}),
        ((3, 4), None, {(3, 0), (3, 50)}),
        (None, (40, 60), {(2, 50), (3, 50), (None, 50)}),
        ((3, 4), (40, 60), {(3, 50)}),
    ],
)
def test_requested_calls(layer, step, requested):
    one = CaptureSettings(out="x", layer=layer, step=step)
    calls = [(2, 0), (3, 0), (2, 50), (3, 50), (None, 50)]
    assert {call for call in calls if one.is_requested(*call)} == set(requested)


def test_command_line_texts():
    assert parse_range("step", "40:60") == (40, 60)
    assert parse_range("layer", "3") == (3, 4)
    assert [parse_bytes("x", t) for t in ("2GiB", "1.5 MB", "7", "3kib")] == [
        2 << 30,
        1_500_000,
        7,
        3 << 10,
    ]
    assert (parse_count("rows", "all"), parse_count("rows", "5")) == (None, 5)
    assert (parse_share("sample", "1/16"), parse_share("sample", "0.5")) == (1 / 16, 0.5)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_range, "a:3"),
        (parse_range, ""),
        (parse_bytes, "2 parsecs"),
        (parse_bytes, "GiB"),
        (parse_bytes, "infGB"),
        (parse_count, "some"),
        (parse_share, "1/0"),
        (parse_share, "half"),
    ],
)
def test_bad_command_line_texts(parse, text):
    with pytest.raises(InvalidCase, match="name must be"):
        parse("name", text)
