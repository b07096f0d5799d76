"""Findings are grouped by the rule that explains them: not by the status of a diagnosis."""

import dataclasses

import pytest
from helpers.plugins import RIGHT, checked, planted

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.checker.plan import groups
from attnlab.checker.source_lines import merged_by_line
from attnlab.diagnosis.kernel_location import KernelLine
from attnlab.tasks.task import DONE, Outcome, Task

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


FINDING = Finding(
    op="unified_attention", kind="wrong_output", case=Case(), evidence="", diagnosis="ambiguous"
)


def grouped(*found: tuple[str, tuple[str, ...]]) -> list[tuple[str, int]]:
    """Return the diagnosis and the number of cases of each group; ``found``: label and names of each case."""
    tasks = [Task(key=str(i), payload={}, cost_s=1.0) for i in range(len(found))]
    verdicts = [
        dataclasses.replace(FINDING, diagnosis=label, names=names).to_verdict()
        for label, names in found
    ]
    outcomes = {
        task.key: Outcome(key=task.key, status=DONE, verdict={"findings": [verdict]})
        for task, verdict in zip(tasks, verdicts, strict=True)
    }
    return [(one.finding.diagnosis, one.seen) for one in groups(tasks, outcomes).values()]


def test_a_case_that_does_not_decide_joins_the_fault_that_another_case_names():
    found = grouped(("ambiguous", ("a", "b")), ("b", ("b",)), ("c", ("c",)), ("b", ("b",)))
    assert found == [("b", 3), ("c", 1)]


def test_faults_without_a_common_name_stay_apart():
    found = grouped(("ambiguous", ("a", "b")), ("c", ("c",)), ("unexplained", ()))
    assert found == [("ambiguous", 1), ("c", 1), ("unexplained", 1)]


def edited(*lines: int, evidence: str = "edit", diagnosis: str = "a") -> Finding:
    """Return a finding that is located in lines."""
    places = tuple(
        KernelLine(file="k.py", line=n, source="", score=1.0, evidence=evidence, reason="")
        for n in lines
    )
    return dataclasses.replace(FINDING, lines=places, diagnosis=diagnosis)


def test_findings_that_the_same_edit_repairs_are_one():
    found = merged_by_line([edited(7), edited(7, diagnosis="b"), edited(8)])
    assert [(one.diagnosis, one.lines[0].line, one.seen) for one in found] == [
        ("a", 7, 2),
        ("a", 8, 1),
    ]


def test_findings_that_no_edit_repairs_are_not_merged():
    suspects = [edited(7, evidence="spectrum"), edited(7, evidence="spectrum"), edited()]
    assert len(merged_by_line(suspects)) == 3
