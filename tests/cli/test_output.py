"""JSON output is strict: NaN and infinities have one representation each."""

import math

import pytest
from helpers.commands import strict_json

from attnlab.case.shown import json_value
from attnlab.cli.command import print_json


def test_numbers_that_json_lacks_are_strings(capsys):
    print_json({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": None, "e": 3}})
    found = strict_json(capsys.readouterr().out)
    assert found == {"a": [1.5, "nan", ["inf"]], "b": {"c": "-inf", "d": None, "e": 3}}


@pytest.mark.parametrize("value", [True, 0, -1.5, "nan", None, [], {}])
def test_other_values_stay(value):
    assert json_value(value) == value


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_the_strict_reader_refuses_pythons_dialect(text):
    with pytest.raises(AssertionError):
        strict_json(text)
