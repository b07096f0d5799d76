"""A Case as text, and the box of an explorer that shows and reads it."""

import pytest
from helpers.examples import examples
from helpers.panels import LOST, SMALL
from helpers.strategies import cases
from hypothesis import HealthCheck, given, settings

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.pytest_id import nearest_id
from attnlab.show.panels import explorer
from attnlab.show.panels.boxes import case_texts, read_case


@given(case=cases())
@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])
def test_texts_round_trip(case: Case) -> None:
    texts = case_texts(case)
    assert read_case(texts["JSON"]) == case
    assert read_case(texts["command line"]) == case
    assert eval(texts["from a test id"], {"Case": Case}) == case
    names: dict[str, object] = {}
    exec(texts["code"].removesuffix("\nattnlab.explorer(case)"), names)
    assert names["case"] == case
    if texts["test id"]:
        assert read_case(texts["test id"]) == case


def test_a_test_id_round_trips() -> None:
    for test_id in (
        "test_contexted_kv_attention[chunked_prefill_paged_decode-16-cuda:0-fp8-dtype0-24-64-64]",
        "test_contexted_kv_attention_alibi[context_attention_fwd-cuda:0-auto-dtype0-128-1-64]",
        "test_contexted_kv_attention_f32"
        "[True-chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]",
    ):
        assert nearest_id(Case.from_test_id(test_id)) == (test_id, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "case must be a JSON object"),
        ('{"sinks_of_mine": 1}', "sinks_of_mine is not a field"),
        ("attnlab explain", "must begin with attnlab run"),
        ("attnlab run --num-heads eight", "num_heads must be an integer"),
        ("attnlab run --no-such-flag 1", "command line must be that of attnlab run"),
        ("attnlab run '", "matching quotes"),
        ("some words", "test_id must be like"),
    ],
)
def test_a_wrong_text_is_rejected(text: str, message: str) -> None:
    """The message is that of the form that the text begins like."""
    with pytest.raises(InvalidCase, match=message):
        read_case(text)


def test_pasting_a_text_sets_all_controls() -> None:
    view = explorer(SMALL)
    text = case_texts(LOST)["command line"]
    view.case_text.pasted.value = text
    assert view.wait(30)
    assert view.case == LOST
    assert view.controls["platform"].read() == "gfx942"
    assert view.case_text.texts["command line"].value == text
    view.case_text.pasted.value = "nonsense"
    assert "test_id must be like" in view.case_text.message.value
    assert view.case == LOST
