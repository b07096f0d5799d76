"""Findings are grouped by the rule that explains them: not by the status of a diagnosis."""

import pytest
from helpers.plugins import RIGHT, checked, planted

FAULTY = (
    RIGHT
    + """
import dataclasses


def faulty(call):
    heads = torch.arange(call.query.shape[1])
    wrong = {{"kv": heads // call.num_queries_per_kv, "zero": heads * 0}}
    query = call.query[:, wrong[{chosen}]].contiguous()
    my_attention(dataclasses.replace(call, query=query))


faulty.op = my_attention.op
faulty.kv_cache_dtypes = my_attention.kv_cache_dtypes
"""
)


@pytest.mark.parametrize(
    ("chosen", "count"),
    [('"kv"', 1), ('"kv" if call.query.shape[1] == 4 else "zero"', 2)],
    ids=["one fault in several cases", "two faults without a name"],
)
def test_each_fault_is_one_finding(tmp_path, chosen, count):
    backend = planted(tmp_path, FAULTY.format(chosen=chosen), "faulty")
    found = [one for one in checked(backend, cases=3).findings if one.kind == "wrong_output"]
    assert len(found) == count
    assert all("queries are read at a wrong address" in one.diagnosis for one in found)
    assert sum(one.seen for one in found) > count
