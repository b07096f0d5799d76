"""A rule is stated only if one of the wrong outputs can show all that it says."""

import pytest
from helpers.cases import hostile
from helpers.faulty_labs import FaultyLab

from attnlab.case.case import Case
from attnlab.diagnosis.rules import search
from attnlab.diagnosis.rules.addresses import address_defects
from attnlab.diagnosis.rules.softmax import softmax_defects
from attnlab.lab.problem import make_problem
from attnlab.tensors.call import KernelCall

SEGMENTS = 16
CASE = hostile(
    op="unified_attention",
    platform="sm_90",
    empty_slots="garbage",
    sinks=True,
    block_size=16,
    query_lens=(1, 3),
    ctx_lens=(20, 37),
    num_blocks=None,
)
SHORT = CASE.replace(query_lens=(2, 1), ctx_lens=(30, 50), seed=5)
LONG = CASE.replace(query_lens=(1,), ctx_lens=(299,), seed=5)
EARLIER, TERM = (
    "the sum of earlier tiles is lost",
    "the term (p // block_size) × stride 1 is missing",
)


def without_sinks(call: KernelCall) -> dict[str, object]:
    return {"sinks": None}


def from_the_segment(call: KernelCall) -> dict[str, object]:
    """Blocks are counted from the first one of each segment."""
    table, size = call.block_table.clone(), call.block_size
    for seq, length in enumerate(call.seq_lens.tolist()):
        step = -(-length // (SEGMENTS * size))
        for at in range(table.shape[1]):
            table[seq, at] = call.block_table[seq, at % step]
    return {"block_table": table}


def always_the_first(call: KernelCall) -> dict[str, object]:
    return {"block_table": call.block_table[:, :1].expand_as(call.block_table).contiguous()}


def texts(monkeypatch, change, rules_of, words: str, others: list[Case]) -> list[str]:
    """Return the rules with some words that are stated."""
    lab = FaultyLab(  # wrong in batches that unified_attention divides in segments
        change=lambda case, call: change(call) if max(case.lengths.query_lens) <= 8 else {}
    )
    some = [one for one in rules_of(make_problem(CASE)) if words in one.text]
    assert some
    monkeypatch.setattr(search, "rules_of", lambda problem: some)
    monkeypatch.setattr(search, "further_cases", lambda case: others)
    monkeypatch.setattr(search, "whole_tiles_case", lambda case: None)
    rule = search.find_rule(lab, CASE, lambda case: lab.output(case).cpu())
    return [] if rule is None else [rule.text]


def test_lost_sinks_are_no_lost_sum_of_earlier_tiles(monkeypatch):
    """Each segment has one tile of 16, so the lost sum is that of the sink alone."""
    assert texts(monkeypatch, without_sinks, softmax_defects, EARLIER, [SHORT]) == []


@pytest.mark.parametrize("others", [[SHORT], [LONG]], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("change", [from_the_segment, always_the_first])
def test_a_missing_term_is_stated_where_it_has_several_values_in_a_part(
    monkeypatch, change, others
):
    found = texts(monkeypatch, change, address_defects, TERM, others)
    assert len(found) == (others == [LONG] and change is always_the_first)
