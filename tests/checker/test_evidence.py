"""Findings are grouped by the rule that explains them: not by the status of a diagnosis."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
from helpers.cases import hostile
from helpers.faulty_labs import FaultyLab
from helpers.plugins import RIGHT, faults_of, planted

from attnlab.case.case import Case
from attnlab.checker.case_run import Rules, evidence_fields, remembering
from attnlab.checker.finding import HORIZON, UNNAMED, Finding, merged_findings
from attnlab.checker.plan import Plan, groups, named_outcomes, naming_tasks
from attnlab.checker.report import merged_by_line
from attnlab.cli import demo
from attnlab.defects import DEFECTS
from attnlab.diagnosis import confirmation
from attnlab.diagnosis.claims import KernelLine
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import find_backend
from attnlab.lab.lab import Lab
from attnlab.tasks.store import Shard
from attnlab.tasks.task import DONE, Outcome, Task

FAULTY = (
    RIGHT
    + """
import dataclasses


def faulty(call):
    heads = torch.arange(call.query.shape[1])
    wrong = heads // call.num_queries_per_kv if call.num_queries_per_kv == 2 else heads * 0
    query = call.query[:, wrong].contiguous()
    my_attention(dataclasses.replace(call, query=query))


faulty.op = my_attention.op
faulty.kv_cache_dtypes = my_attention.kv_cache_dtypes
"""
)


PLANTED = "        hidden = away > 0\n"


def without_newest_key(condition: str) -> str:
    """Return the source of a kernel that hides the newest key of a row under a condition."""
    assert PLANTED in RIGHT
    is_decode = "is_decode, has_cap = query.shape[1] == 1, call.softcap is not None"
    extra = f"        {is_decode}\n        hidden = hidden | ((away == 0) & ({condition}))\n"
    return RIGHT.replace(PLANTED, PLANTED + extra)


def test_each_fault_is_one_finding(tmp_path, monkeypatch):
    """Two faults without a name, which more than two cases show; other rules would take seconds."""
    rules = confirmation.rules_of
    monkeypatch.setattr(
        confirmation,
        "rules_of",
        lambda *given: [r for r in rules(*given) if r.text.startswith("queries")],
    )
    backend = planted(tmp_path, FAULTY, "faulty")
    case = hostile(
        op=backend.op, backend=backend.name, platform="sm_90", query_lens=(1, 5), ctx_lens=(20, 3),
        num_heads=6,
    )  # fmt: skip
    with remembering():
        found = [
            one
            for each in (case, case.replace(seed=1), case.replace(num_queries_per_kv=3))
            for one in faults_of(backend, each, searches=True)
        ]
    seen = grouped_findings(*found)
    assert [count for _, count in seen] == [2, 1]
    assert all("queries are read at a wrong address" in diagnosis for diagnosis, _ in seen)


FINDING = Finding(
    op="unified_attention",
    kind="wrong_output",
    case=Case(op="unified_attention"),
    evidence="",
    diagnosis="ambiguous",
)


def grouped(*found: tuple[str, tuple[str, ...]]) -> list[tuple[str, int]]:
    """Return the diagnosis and the number of cases of each group; ``found``: label and names of each case."""
    return grouped_findings(
        *(dataclasses.replace(FINDING, diagnosis=label, names=names) for label, names in found)
    )


def outcomes_of(*found: Finding) -> tuple[list[Task], dict[str, Outcome]]:
    """Return a task for each finding, and the outcomes."""
    tasks = [Task(key=str(i), payload={"library": ""}) for i in range(len(found))]
    outcomes = {
        task.key: Outcome(key=task.key, status=DONE, verdict={"findings": [one.to_verdict()]})
        for task, one in zip(tasks, found, strict=True)
    }
    return tasks, outcomes


def grouped_findings(*found: Finding) -> list[tuple[str, int]]:
    """Return the diagnosis and the number of cases of each group of findings."""
    tasks, outcomes = outcomes_of(*found)
    return [(one.finding.diagnosis, one.seen) for one in groups(tasks, outcomes).values()]


def test_a_case_that_does_not_decide_joins_the_fault_that_another_case_names():
    found = grouped(("ambiguous", ("a", "b")), ("b", ("b",)), ("c", ("c",)), ("b", ("b",)))
    assert found == [("b", 3), ("c", 1)]


def test_what_is_shrunk_does_not_depend_on_the_shards():
    """Each case that stands for a group of the whole check is shrunk, in the same way, in its own shard."""
    plan, draw = Plan(backend=find_backend("model"), ops=()), random.Random(0)
    for _ in range(300):
        found = []
        for _ in range(draw.randint(2, 8)):
            names = tuple(sorted(draw.sample("abc", draw.randint(0, 3))))
            label = {0: "unexplained", 1: "".join(names)}.get(len(names), "ambiguous")
            wrong_in = draw.choice(((), ("decode",), ("prefill",)))
            fields = {"names": names, "diagnosis": label, "wrong_in": wrong_in}
            found.append(dataclasses.replace(FINDING, **fields))
        tasks, outcomes = outcomes_of(*found)
        whole = plan.shrink_tasks(tasks, outcomes)
        parts = [
            plan.shrink_tasks(tasks[i - 1 :: 3], outcomes, Shard(index=i, count=3))
            for i in (1, 2, 3)
        ]
        assert {one.key for one in whole} <= {one.key for part in parts for one in part}


def test_the_case_that_decides_stands_for_its_group():
    """An ambiguous case before it is not shrunk, and its description is not kept."""
    vague = dataclasses.replace(FINDING, names=("a", "b"), description="a: one; b: two")
    clear = dataclasses.replace(FINDING, names=("b",), diagnosis="b", description="b: two")
    ((key, group),) = groups(*outcomes_of(vague, clear, vague)).items()
    assert (key[2], group.task.key, group.own, group.seen) == ("b", "1", clear, 3)
    assert (group.finding.names, group.finding.description) == (("b",), "b: two")


def test_wrong_outputs_with_the_same_names_are_named_together():
    """Where a rule is looked for, the smallest first; the verdicts of their cases have what was found."""
    unnamed = dataclasses.replace(FINDING, diagnosis=UNNAMED)
    small = dataclasses.replace(unnamed, case=Case(num_heads=1, num_queries_per_kv=1))
    with_name = dataclasses.replace(unnamed, names=("a",))
    tasks, outcomes = outcomes_of(unnamed, with_name, small, FINDING)
    whole, other = naming_tasks(tasks, outcomes)
    assert (whole.payload["keys"], other.payload["keys"]) == (["2", "0"], ["1"])
    found = [dataclasses.replace(one, diagnosis="rule") for one in (small, unnamed)]
    verdict = {"findings": [one.to_verdict() for one in found]}
    named = named_outcomes(whole, Outcome(key=whole.key, status=DONE, verdict=verdict), outcomes)
    outcomes |= {one.key: one for one in named}
    titles = [one.finding.title for one in groups(tasks, outcomes).values()]
    assert [group.seen for group in groups(tasks, outcomes).values()] == [2, 1, 1]
    assert "rule" in titles[0]
    assert "did not end" in titles[1]
    assert [one.payload["keys"] for one in naming_tasks(tasks, outcomes)] == [["1"]]


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


def found_in(**fields) -> Finding:
    return dataclasses.replace(FINDING, diagnosis="a", names=("a",), **fields)


def test_two_faults_with_one_name_are_two_findings():
    """Each is in another kernel: where both run, the rows of the other one are right."""
    decode = found_in(wrong_in=("decode",), right_in=("prefill",))
    prefill = found_in(wrong_in=("prefill",), right_in=("decode",))
    alone = found_in(wrong_in=("decode",))
    assert grouped_findings(decode, prefill, alone) == [("a", 2), ("a", 1)]
    assert grouped_findings(alone, decode, prefill) == [("a", 2), ("a", 1)]
    assert grouped_findings(found_in(wrong_in=("decode", "prefill")), alone) == [("a", 2)]


def test_errors_without_a_name_are_separated_by_what_the_outputs_hold():
    zeros, nan, none = (
        dataclasses.replace(FINDING, diagnosis="unexplained", contents=contents)
        for contents in (("zeros",), ("nan",), ())
    )
    assert grouped_findings(zeros, nan, none) == [("unexplained", 2), ("unexplained", 1)]


@pytest.mark.parametrize(
    ("condition", "count"), [("is_decode", 1), ("is_decode != has_cap", 2)], ids=["one", "two"]
)
@pytest.mark.quick("two")
def test_two_planted_faults_with_one_name_are_both_found(tmp_path, condition, count):
    """Decodes lose their newest key without a soft cap, prefills lose it with one."""
    backend = planted(tmp_path, without_newest_key(condition))
    case = hostile(
        op=backend.op, backend=backend.name, platform="sm_90",
        query_lens=(1, 5, 1), ctx_lens=(20, 18, 40),
    )  # fmt: skip
    alone = case.replace(query_lens=(1, 1), ctx_lens=(20, 40))
    cases = (case, case.replace(softcap=3.0), *((alone,) if count == 1 else ()))
    found = [one for each in cases for one in faults_of(backend, each)]
    assert len(grouped_findings(*found)) == count


@pytest.mark.slow
def test_a_fault_that_only_its_rows_show_is_one_finding(tmp_path):
    """Rows at every 32nd position lose their newest key: a decode in one case, a prefill in another, and a
    row that equals its neighbour in one whose keys are equal."""
    text = PLANTED + "        hidden = hidden | ((away == 0) & (at % 32 == 31))\n"
    backend = planted(tmp_path, RIGHT.replace(PLANTED, text))
    plain = {"op": backend.op, "backend": backend.name, "platform": "sm_90"}
    found = []
    for query_lens, ctx_lens, values in (
        ((1, 5, 1), (16, 15, 31), "normal"), ((1, 3), (50, 93), "normal"), ((3, 1), (29, 37), "ties"),
    ):  # fmt: skip
        case = hostile(**plain, query_lens=query_lens, ctx_lens=ctx_lens, distribution=values)
        found += faults_of(backend, case, searches=not found)  # which take seconds
    ((_, seen),) = grouped_findings(*found)
    assert seen == 3


@pytest.mark.slow
def test_a_wrong_head_is_one_finding_in_every_layout(tmp_path):
    """A function of tensors gets its caches with the strides that a rule about addresses is tried with."""
    text = (Path(demo.KERNEL)).read_text().replace(demo.RIGHT, demo.WRONG)
    backend = planted(tmp_path, text, "paged_attention")
    fields = {
        "op": backend.ops[0],
        "backend": backend.name,
        "num_heads": 6,
        "num_queries_per_kv": 3,
    }
    case = hostile(**fields, query_lens=(1, 9), ctx_lens=(64, 40), kv_layout="HND")
    (found,) = faults_of(backend, case, searches=True)
    assert found.diagnosis.endswith("with head within its group in place of KV head")


def test_a_fault_has_its_name_also_where_the_window_has_freed_blocks(tmp_path):
    """A window that is one key too wide reads a block that is empty there; that is no second fault."""
    wide = RIGHT.replace("hidden |= away <= -call", "hidden |= away < -call")
    backend = planted(tmp_path, wide)
    fields = {"op": backend.op, "backend": backend.name, "platform": "sm_90"}
    lens = {"query_lens": (1, 8, 2), "ctx_lens": (79, 88, 126)}
    for freed in ("kept", "empty", "recycled"):
        case = hostile(**fields, **lens, sliding_window=20, freed=freed)
        (found,) = faults_of(backend, case)
        assert (found.diagnosis, found.case.freed) == ("window_plus_one", "kept")


def test_a_finding_without_a_name_says_what_is_known():
    """A described output has the rules that reproduce it, said of this case alone, an ambiguous one the text
    of each name."""
    case = hostile(query_lens=(17, 5), ctx_lens=(16, 40))
    zeros = Lab().output(case).clone()
    zeros[3] = 0.0
    found = diagnose(case, zeros, defects=(), propose=False)
    assert found.status == "described"
    fields = evidence_fields(Lab(), case, zeros, found, found.status)
    assert fields["description"] == "in the smallest case, row 3: all zeros"
    one = dataclasses.replace(FINDING, diagnosis="described", **fields)
    assert one.title == fields["description"]
    again = Finding.from_verdict(one.to_verdict())
    assert again.description == one.to_dict()["description"] == fields["description"]
    two = dataclasses.replace(FINDING, names=("a", "b"))
    assert two.title == "several faults explain it: a, b"


def test_every_fault_of_the_release_table_has_a_sentence():
    """No diagnosis stands alone as a name: a label without words would end its kind's text."""
    faults = json.loads((Path(__file__).parents[2] / "docs" / "releases.json").read_text())[
        "faults"
    ]
    assert len(faults) > 50
    for row in faults:
        fields = {
            name: row[name] for name in ("op", "kind", "diagnosis", "evidence", "description")
        }
        horizon = ("--kernel",) if row["kind"] == HORIZON else ()
        title = Finding(case=Case(), names=tuple(row["names"]), horizon=horizon, **fields).title
        assert (
            row["kind"] == "fails"
            or row["diagnosis"] not in (title, title.rpartition(": ")[2])
            or (row["description"] == title)
        )
    unknown = Finding(op="x", kind="wrong_output", case=Case(), evidence="", diagnosis="new label")
    assert unknown.title.endswith(": new label")


def test_findings_with_one_smallest_case_are_one():
    """A case has one output; without it, only a defect that explains both joins two findings."""
    small, other = Case(num_heads=2), Case(num_heads=4)
    one = dataclasses.replace(FINDING, case=small, diagnosis="unexplained", seen=2)
    same = dataclasses.replace(FINDING, case=small, diagnosis="b", names=("b",), seen=3)
    apart = dataclasses.replace(FINDING, case=other, diagnosis="unexplained")
    (joined, left) = merged_findings([one, same, apart])
    assert (joined.diagnosis, joined.names, joined.seen) == ("b", ("b",), 5)
    assert left == apart
    assert len(merged_findings([same, dataclasses.replace(same, kind="rows_not_written")])) == 2
    named = dataclasses.replace(same, case=other, names=("a", "b"), diagnosis="ambiguous")
    assert [each.seen for each in merged_findings([same, named])] == [6]
    separate = dataclasses.replace(named, wrong_in=("decode",))
    right = dataclasses.replace(same, right_in=("decode",))
    assert len(merged_findings([right, separate])) == 2


TILED = """
import torch
from helpers.faulty_attention import _cached

sound = _cached()


def wrong(call):
    sound(call)
    {fault}


scaled = _cached(score_factor=16.0)
wrong.op = scaled.op = "unified_attention"
"""
FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0}
# A value of an empty slot, in place of the first row.
READS_SLOT = (
    "call.output[0] = call.value_cache[call.block_table[0, 0], :, :, -1]"
    ".repeat_interleave(call.num_queries_per_kv, 0)"
)
NAN = "call.output[:1] = torch.nan"


@pytest.mark.parametrize(
    ("name", "fault", "fields", "false"),
    [
        ("scaled", "pass", FP8, "k_scale_is_v_scale"),
        ("wrong", READS_SLOT, {}, "rows_never_written"),
        ("wrong", NAN, {}, "last_partial_block_dropped"),
        ("wrong", NAN, {"softcap": 0.005}, "softcap_overflows"),
    ],
    ids=["a saturated softmax", "a row of an empty slot", "a row of NaN", "NaN beside a soft cap"],
)
def test_one_degenerate_case_names_nothing(tmp_path, name, fault, fields, false):
    """A name needs a second case; a row that is NaN because of what it reads was written."""
    backend = planted(tmp_path, TILED.format(fault=fault), name)
    case = hostile(
        op=backend.op, backend=backend.name, platform="sm_90", num_heads=2, num_queries_per_kv=2,
        head_size=32, query_lens=(1,), ctx_lens=(9,), **fields,
    )  # fmt: skip
    found = faults_of(backend, case)
    assert [one.kind for one in found] == ["wrong_output"]
    assert found[0].diagnosis != false
    assert found[0].diagnosis not in DEFECTS


def test_a_row_that_no_program_writes_reads_no_slots(tmp_path):
    """All values are 0, so zeros in the output buffer make it right, whatever the slots hold."""
    start = "call.output[0] = before[0]"
    keeps = "    before = call.output.clone(); sound(call)"
    text = TILED.format(fault=start).replace("    sound(call)", keeps)
    backend = planted(tmp_path, text, "wrong")
    case = hostile(
        op=backend.op, backend=backend.name, platform="sm_90", query_lens=(1, 3), ctx_lens=(9, 20),
        kv_cache_dtype="fp8", distribution="uniform_1e-3", cache_write="numeric",
    )  # fmt: skip
    found = faults_of(backend, case)
    assert [(one.kind, one.diagnosis) for one in found] == [
        ("rows_not_written", "rows_never_written")
    ]


def test_a_size_that_fits_short_sequences_is_not_confirmed():
    """Block 0 for every key is what tiles of 128 give, too, in sequences of up to 128 keys."""
    case = hostile(
        op="decode_attention_fwd",
        query_lens=(1, 1),
        ctx_lens=(50, 95),
        block_size=48,
        backend="model",
    )
    faulty = FaultyLab(
        change=lambda case, call: {
            "block_table": call.block_table[:, :1].expand_as(call.block_table)
        }
    )
    found = diagnose(case, faulty.output(case), lab=Lab(device="cpu"), propose=False)
    assert "page_is_tile" in [one.name for one in found.explanations]
    left = Rules().confirmed(Lab(device="cpu"), case, found, faulty.output)
    assert "page_is_tile" not in [one.name for one in left.explanations]
