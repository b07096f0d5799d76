"""Batches with and without ALiBi share the numbers that are drawn, and the cache."""

import pytest

from attnlab.case.case import Case
from attnlab.lab import shared
from attnlab.lab.lab import Lab
from attnlab.tensors.batch import make_batch

SMALL = {"num_heads": 2, "num_queries_per_kv": 2, "query_lens": (1, 17), "ctx_lens": (20, 3)}


def test_the_numbers_are_drawn_once(monkeypatch):
    drawn, draw = [], shared.draw

    def counted(case, where):
        drawn.append(case)
        return draw(case, where)

    monkeypatch.setattr(shared, "draw", counted)
    lab, plain = Lab(), Case(**SMALL)
    first, alibi = lab.run(plain), lab.run(plain.replace(alibi=True))
    assert drawn == [plain]
    assert alibi.cache is first.cache
    assert alibi.call.query is first.call.query
    assert (first.call.alibi_slopes, alibi.call.alibi_slopes is None) == (None, False)
    assert first.status == alibi.status == "match"
    lab.run(plain.replace(seed=1))
    assert len(drawn) == 2


@pytest.mark.parametrize("change", [{"alibi": True}, {"sinks": True, "op": "unified_attention"}])
def test_a_batch_is_the_same_as_one_drawn_alone(change):
    lab, case = Lab(), Case(**SMALL)
    lab.batch(case)
    found, expected = lab.batch(case.replace(**change)), make_batch(case.replace(**change))
    for name in ("query", "key", "value", "alibi_slopes", "sinks"):
        pair = getattr(found, name), getattr(expected, name)
        assert pair == (None, None) or pair[0].equal(pair[1])


def test_a_file_of_a_batch_has_its_own_numbers(tmp_path):
    lab, case = Lab(), Case(**SMALL)
    lab.shared.folder = tmp_path
    lab.batch(case)
    assert lab.shared.count("numbers") == 0
