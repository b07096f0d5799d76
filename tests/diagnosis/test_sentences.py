"""The order of the lines of a diagnosis, and what they leave out."""

import dataclasses

import pytest
from helpers.claims import REPAIR, candidate
from helpers.triton_example import SMALL

from attnlab.diagnosis.claims import (
    ALL,
    EVERY,
    KernelLine,
    KernelLocation,
    PatternClaim,
    PrecisionClaim,
    RepairClaim,
)
from attnlab.diagnosis.diagnosis import Diagnosis, ErrorPlace
from attnlab.diagnosis.pattern import Fact, Pattern, Sizes, sequence_rules
from attnlab.diagnosis.reruns import further_cases
from attnlab.show import sheets
from attnlab.weights.plan import Edge

NAME = "newest_token_dropped"
CAUSE = candidate(NAME)
CLAIM = RepairClaim(repair=REPAIR, source="x = a", cases=9)
PRECISION = PrecisionClaim(largest=0.004, cases=5)
PLACES = Pattern(facts=(Fact("rows", "the only wrong row is 3"),))
EXPLAINED = Diagnosis(
    status="explained",
    cause=CAUSE,
    explanations=[CAUSE],
    pattern=PLACES,
    wrong_rows=1,
    looked_at=(4, 4),
    place=ErrorPlace(seq=0, token=3, row=3, head=0),
    outside=("k.py:90 reads 0 bytes after the end of B_Loc",),
    withdrawn=("other_name is withdrawn: it does not hold",),
    repair=CLAIM,
)


def test_the_cause_with_its_line_comes_first_then_the_evidence_then_the_places():
    first, second, *others = EXPLAINED.sentences()
    assert first == f"{NAME}: {CAUSE.text} [k.py, line 7]"
    assert second == CLAIM.text
    assert others[0].startswith("1 of 4 rows are wrong")
    assert others[1:] == ["the only wrong row is 3"]


def test_the_sheet_has_the_same_order():
    text = " ".join(sheets.plain(EXPLAINED).split())
    places = [
        text.index(part) for part in ("[k.py, line 7]", "with `b`", "1 of 4 rows", "row is 3")
    ]
    assert places == sorted(places)


def test_accesses_without_effect_and_withdrawn_names_are_data_alone():
    words, document = " ".join(EXPLAINED.sentences()), EXPLAINED.to_dict()
    assert "B_Loc" not in words
    assert "other_name" not in words
    assert document["outside"] == list(EXPLAINED.outside)
    assert document["withdrawn"] == list(EXPLAINED.withdrawn)
    used = dataclasses.replace(EXPLAINED, outside_rows=(3,))
    assert any("B_Loc" in one for one in used.sentences())


def test_fits_of_one_call_are_data_alone_if_the_kernel_can_run_again():
    fit = Fact(kind="softmax_scale", where="", what="a softmax scale of 19 fits", accounts_for=4)
    alone = dataclasses.replace(EXPLAINED, pattern=Pattern(facts=(*PLACES.facts, fit)))
    assert fit.sentence in alone.sentences()
    again = dataclasses.replace(alone, slot_dependent=[])
    assert fit.sentence not in again.sentences()
    assert "the only wrong row is 3" in again.sentences()
    assert [one["kind"] for one in again.to_dict()["pattern"]["facts"]] == ["rows", "softmax_scale"]


def test_lines_that_no_rerun_confirms_are_data_alone():
    line = KernelLine(
        file="k.py", line=5, source="load", score=0.4, evidence="load", reason="it loads slot 3"
    )
    place = KernelLocation(lines=(line,), tried=40)
    found = Diagnosis(status="unexplained", wrong_rows=1, location=place)
    assert found.sentences()[-1] == (
        "source line: unknown; further cases confirm none of 40 trial edits"
    )
    assert found.to_dict()["locations"][0]["line"] == 5
    assert place.confirmed_lines == ()
    own = dataclasses.replace(line, line=7)
    confirmed = dataclasses.replace(place, lines=(line, own), confirmed=CLAIM)
    assert confirmed.sentences() == [CLAIM.text]
    assert [one.line for one in confirmed.confirmed_lines] == [7]


def test_what_was_measured_in_this_call_is_the_conclusion_of_an_unexplained_output():
    facts = ("row 3 gives no weight to key 7, its own", "row 4 gives every key twice its weight")
    found = dataclasses.replace(
        EXPLAINED, status="unexplained", cause=None, explanations=[], repair=None, observed=facts
    )
    first, second, *others = found.sentences()
    assert first == found.conclusion == f"in this call, {facts[0]}"
    assert second == f"in this call, {facts[1]}"
    assert others[0].startswith("1 of 4 rows are wrong")
    without = dataclasses.replace(found, observed=())
    assert without.sentences()[0] == "unexplained: no rule of attnlab reproduces what is wrong"
    fact = Fact(kind="zeros", where="row 3", what="all zeros", accounts_for=4)
    part = dataclasses.replace(without, pattern=Pattern(facts=(fact,), wrong_cells=9))
    assert part.conclusion == "in this call, row 3: all zeros"
    unwritten = dataclasses.replace(part, unwritten=[3], unwritten_by="reruns")
    assert unwritten.conclusion.startswith("in this call, no kernel writes row 3")
    assert sum("no kernel writes row 3" in one for one in unwritten.sentences()) == 1


def test_a_line_that_makes_the_output_right_says_more_than_the_size_of_the_error():
    found = dataclasses.replace(
        EXPLAINED, status="described", cause=None, explanations=[], precision=PRECISION
    )
    assert found.conclusion == CLAIM.text
    assert dataclasses.replace(found, repair=None).conclusion == PRECISION.text


@pytest.mark.parametrize(
    ("sequences", "values", "text"),
    [
        ((EVERY,), {"all elements are NaN"}, "some rows are wrong: all elements are NaN"),
        (("with one new token",), (), "the wrong sequences are those with one new token"),
        ((), {"all zeros"}, "some rows are wrong: all zeros"),
    ],
)
def test_claims_are_plain_sentences(sequences, values, text):
    claim = PatternClaim(
        sequences=sequences,
        rows=(ALL,),
        heads=(0,),
        all_heads=True,
        elements=None,
        values=frozenset(values),
    )
    assert claim.text == text


def test_a_claim_about_all_heads_survives_another_number_of_heads():
    claim = PatternClaim(
        sequences=(EVERY,),
        rows=(ALL,),
        heads=(0, 1),
        all_heads=True,
        elements=None,
        values=frozenset({"all zeros"}),
    )
    more = dataclasses.replace(claim, heads=(0, 1, 2, 3))
    assert claim.common(more).values == claim.values
    assert claim.common(dataclasses.replace(more, all_heads=False)) is None


def test_further_cases_vary_the_number_of_kv_heads():
    """Reads of KV head 0 and of KV head h // 2 are the same with two KV heads."""
    counts = {one.num_heads // one.num_queries_per_kv for one in further_cases(SMALL)}
    assert len(counts) > 1
    assert max(counts) >= 4


def test_a_tile_is_not_given_a_size_that_only_fits():
    edge = Edge("cache end", 1, within=8)
    assert edge.text == "the last cached key that the row sees + 1 (inside its tile)"


def test_rules_of_sequences_are_plain():
    sizes = Sizes(
        seqs=(0,),
        query_lens=(1,),
        ctx_lens=(5,),
        row_starts=(0, 1),
        block_size=16,
        num_queries_per_kv=1,
    )
    texts = [text for text, _ in sequence_rules(sizes)]
    assert "whose seq_len is not a multiple of the block size" in texts
