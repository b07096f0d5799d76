"""attnlab explain: the kernels and the conditions."""

from helpers.commands import document, printed

from attnlab.case.case import Case
from attnlab.contracts.dispatch import decide

ARGV = ["explain", "--platform", "gfx1100", "--num-queries-per-kv", "4"]


def test_the_text_has_each_term_and_reason(capsys):
    text = printed(capsys, ARGV, 0)
    decision = decide(Case(platform="gfx1100", num_queries_per_kv=4))
    assert {"block_size"} <= {term.name for term in decision.refused}
    for words in (*decision.kernels, *decision.reasons, *(term.name for term in decision.terms)):
        assert words in text


def test_the_document_has_the_terms(capsys):
    found = document(capsys, ARGV, 0)
    assert found["decode"] == "kernel_paged_attention_2d"
    assert [term["name"] for term in found["terms"] if not term["holds"]] == ["block_size"]
