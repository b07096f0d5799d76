"""A verdict is recorded and displayed at once, and a wrong one fails the notebook."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from helpers.html import Page

from attnlab import __version__
from attnlab.case.errors import AttnLabError, VerdictFailed
from attnlab.show.notebook import (
    PROVENANCE_MIME,
    VERDICT_MIME,
    VERDICTS_MIME,
    Verdict,
    Verdicts,
    plain,
    provenance,
    versions,
)


@pytest.fixture
def shown(monkeypatch):
    """Return a list that collects what is displayed."""
    displayed = []
    monkeypatch.setattr(
        "attnlab.show.notebook._display", lambda thing, **_: displayed.append(thing)
    )
    return displayed


def verdict(**changes):
    facts = {"name": "rows kept", "expected": 3, "found": 3, "evidence": {}}
    return Verdict(**(facts | changes))


@pytest.mark.parametrize(
    ("expected", "found", "ok"),
    [
        (3, 3, True),
        (3, 4, False),
        ([1, 2], (1, 2), True),
        (True, np.bool_(True), True),
        (0.5, torch.tensor(0.5), True),
        (math.nan, float("nan"), True),
        (math.inf, -math.inf, False),
        ({"a": [np.int64(1)]}, {"a": [1]}, True),
    ],
)
def test_a_verdict_is_ok_where_found_is_what_was_expected(shown, expected, found, ok):
    assert Verdicts().record("it", expected=expected, found=found).ok is ok


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (np.float64(2.5), 2.5),
        (torch.tensor([7]), 7),
        (torch.tensor(True), True),
        (np.str_("x"), "x"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (torch.tensor(math.inf), "inf"),
        ({1: (np.int32(2), None)}, {"1": [2, None]}),
    ],
)
def test_plain_gives_json_values(value, result):
    given = plain(value, "it")
    assert given == result
    assert type(given) is type(result)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), "must be a single number, got shape (2, 3)"),
        (np.zeros(4), "must be a single number, got shape (4,)"),
        ({1, 2}, "must be a JSON value, got set"),
        (1j, "must be a JSON value, got complex"),
        (torch.float16, "must be a JSON value, got dtype"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(shown, value, message):
    with pytest.raises(AttnLabError) as error:
        Verdicts().record("it", expected=1, found=1, places=[0, {"x": value}])
    assert str(error.value) == f"it: places[1]['x'] {message}"
    assert not shown


def test_json_there_and_back():
    before = verdict(found=[1, "nan"], evidence={"rows": 14})
    after = Verdict.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    assert after != verdict(found=[1, "inf"], evidence={"rows": 14})


def test_from_json_names_the_key_that_is_missing():
    with pytest.raises(AttnLabError, match="must have the key found, got"):
        Verdict.from_json({"name": "x", "expected": 1, "evidence": {}})


def test_a_verdict_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict().found = 4


def test_the_card_escapes_what_the_user_wrote():
    card = verdict(
        name="<b>1</b>", expected="<i>", found="&", evidence={"<u>": "<s>"}
    )._repr_mimebundle_()
    assert card[VERDICT_MIME]["name"] == "<b>1</b>"
    for raw in ("<b>1", "<i>", "<u>", "<s>"):
        assert raw not in card["text/html"]
    assert ["<u>", "<s>"] in Page(card["text/html"]).rows
    assert "<b>1</b>" in Page(card["text/html"]).text


def test_the_card_shows_tick_or_cross():
    for one, mark in ((verdict(), "✓"), (verdict(found=4), "✗")):
        bundle = one._repr_mimebundle_()
        assert f"{mark} rows kept" in Page(bundle["text/html"]).text
        assert bundle["text/plain"] == f"{mark} {one}"


def test_record_shows_the_verdict_and_its_evidence(shown):
    given = Verdicts().record("it", expected=1, found=2, rows=np.int64(14))
    assert shown == [given]
    assert given.evidence == {"rows": 14}


def test_a_verdict_shows_once_a_cell(shown):
    """IPython displays it again if record is the last line of a cell."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        one = verdict()
        one._ipython_display_()
        one._ipython_display_()
        assert len(shown) == 1
        shell.execution_count += 1
        one._ipython_display_()
        assert len(shown) == 2
    finally:
        InteractiveShell.clear_instance()
        shell.history_manager.end_session()


def test_a_name_is_taken_once(shown):
    verdicts = Verdicts()
    verdicts.record("it", expected=1, found=1)
    with pytest.raises(AttnLabError, match="'it'"):
        verdicts.record("it", expected=1, found=2)
    assert len(verdicts) == 1


def test_conclude_shows_all_and_passes_where_all_are_right(shown):
    verdicts = Verdicts()
    verdicts.record("one", expected=1, found=1)
    verdicts.record("two", expected="<a>", found="<a>")
    verdicts.conclude()
    bundle = shown[-1]._repr_mimebundle_()
    assert [one["name"] for one in bundle[VERDICTS_MIME]] == ["one", "two"]
    assert bundle["text/html"].count("✓") == 2
    assert ["✓ two", "<a>", "<a>"] in Page(bundle["text/html"]).rows


def test_conclude_names_each_wrong_verdict(shown):
    verdicts = Verdicts()
    verdicts.record("one", expected=1, found=2)
    verdicts.record("right", expected=0, found=0)
    verdicts.record("two", expected="a", found=None)
    with pytest.raises(VerdictFailed) as error:
        verdicts.conclude()
    assert str(error.value) == (
        "2 verdicts differ: one: expected 1, found 2; two: expected a, found null"
    )
    assert shown[-1] is verdicts


def test_conclude_without_a_verdict_fails(shown):
    with pytest.raises(VerdictFailed, match="no verdict was recorded"):
        Verdicts().conclude()


def test_provenance_carries_case_origins_and_versions(shown):
    provenance(case={"block_size": np.int64(16)}, backends=["rocm: model"])
    (bundle,) = shown
    assert bundle[PROVENANCE_MIME] == {
        "versions": versions(),
        "case": {"block_size": 16},
        "backends": ["rocm: model"],
    }
    assert "block_size" in bundle["text/plain"]


def test_versions_name_the_packages_and_the_machine():
    found = versions()
    assert found["attnlab"] == __version__
    assert found["torch"] == torch.__version__
    assert {"python", "system", "cpus"} <= set(found)
