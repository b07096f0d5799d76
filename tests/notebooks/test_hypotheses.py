"""Every hypothesis predicts a range by the same steps; only an unwritten row allows any size."""

from attnlab.case.case import Case
from attnlab.lab.lab import Lab
from study.claims.cases import like_the_test
from study.hypotheses import predict, table_of


def failing() -> Case:
    return like_the_test(num_heads=2, stage="int32_before_cumsum")


def observed() -> dict[str, object]:
    """Return the observations of the failure, at the size of failing()."""
    case = failing()
    row = case.lengths.num_tokens - 1
    elements = case.num_heads * case.head_size
    return {"row": row, "elements": elements, "largest": 1.6855, "after the cast moved": 0}


def test_an_unwritten_row_allows_any_size() -> None:
    prediction = predict(Lab(), failing(), {})
    assert prediction.smallest is not None
    assert prediction.smallest < 1e-2
    assert prediction.largest == 65504.0
    assert all(prediction.agrees(observed()).values())
    assert not prediction.agrees({**observed(), "row": 0})["row"]


def test_a_missing_token_predicts_its_own_size() -> None:
    changes = {"query_start_loc_dtype": "int32", "fill": "context_only", "empty_slots": "garbage"}
    prediction = predict(Lab(), failing(), changes)
    assert prediction.largest is not None
    assert prediction.largest < 1
    agrees = prediction.agrees(observed())
    assert (agrees["row"], agrees["largest"], agrees["after the cast moved"]) == (
        True,
        False,
        False,
    )


def test_a_rejected_call_has_no_range() -> None:
    prediction = predict(Lab(), failing(), {"stage": "int64"})
    assert (prediction.status, prediction.elements, prediction.largest) == ("rejected", None, None)
    ((name, output, *_),) = table_of({"rejected": prediction}, observed())
    assert (name, output) == ("rejected", "no: rejected")
