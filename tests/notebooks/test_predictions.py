"""The predictions follow from the contracts; test_claims.py compares them with the experiments."""

import pytest

from attnlab.lab.lab import Lab
from study import predictions
from study.claims import FAILS, HOLDS
from study.claims.cases import like_the_test


def test_a_kernel_that_rejects_every_int64_tensor_changes_the_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rejects = dict.fromkeys(predictions.INDEX_TENSORS, "reject")
    monkeypatch.setattr(predictions, "on_int64", lambda case: rejects)
    claims = predictions.predict_claims()
    assert (claims["C1"], claims["C2"], claims["C4"]) == (HOLDS, HOLDS, FAILS)


@pytest.mark.parametrize("stage", ["int64", "int32_before_cumsum", "fill_all", "sound"])
@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
def test_the_predicted_status_is_that_of_the_run(stage: str, platform: str) -> None:
    lab, case = Lab(), like_the_test(num_heads=2, stage=stage, platform=platform)
    assert predictions.predict_status(lab, case) == lab.run(case).status


def test_a_misread_query_start_loc() -> None:
    case = like_the_test(
        query_lens=(1,) * 3, ctx_lens=(40,) * 3, stage="sound", query_start_loc_dtype="int64"
    )
    assert predictions.read_as_int32(Lab().run(case)) == {
        "read": [0, 0, 1, 0],
        "lengths": [0, 1, -1],
        "sequences": [1],
        "rows": [0],
    }
