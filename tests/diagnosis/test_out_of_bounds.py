"""Reads outside of a tensor: the source line is the finding, and the same in every process."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.triton_example import SMALL, TRITON

from attnlab.case.case import Case
from attnlab.diagnosis import access_check, confirmation
from attnlab.diagnosis.access_check import with_outside_reads, without_unfounded_rule
from attnlab.diagnosis.decision import examine
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.rules import search
from attnlab.diagnosis.rules.addresses import FAMILY
from attnlab.lab.lab import Lab

LOAD = "v = tl.load(value + at, mask=both"
LINE = 1 + TRITON[: TRITON.index(LOAD)].count("\n")
BEFORE = (LOAD, "v = tl.load(value - at, mask=both")  # every slot but one is before the tensor
FAR = (LOAD, "v = tl.load(value + tl.where(both, at, at - 100000), mask=d[None, :] < DIM")
DOUBLED = ("mixed / total", "mixed / total * 2.0")


def planted(folder: Path, *changes: tuple[str, str]) -> Case:
    """Return a Case for the example with changes of its source."""
    source = TRITON
    for old, new in changes:
        assert old in source
        source = source.replace(old, new, 1)
    file = folder / "kernel.py"
    file.write_text(source)
    return SMALL.replace(backend=f"{file}:my_attention")


@pytest.fixture
def one_further_case(monkeypatch):
    """Let one further case confirm what is stated; more would only take longer."""
    for module in (access_check, confirmation, search):
        further = [SMALL.replace(query_lens=(3,), ctx_lens=(17,), sm_scale=0.31)]
        monkeypatch.setattr(
            module,
            "further_cases",
            lambda case, further=further: [one.replace(backend=case.backend) for one in further],
        )


def diagnosed(case: Case) -> Diagnosis:
    return diagnose(case, lab=Lab(), propose=False, limit=None)


@pytest.mark.usefixtures("one_further_case")
def test_a_read_outside_is_the_finding_and_values_are_not_described(tmp_path):
    found = diagnosed(planted(tmp_path, BEFORE))
    assert found.outside_rows == (0, 1)
    assert (found.status, found.bad_lines) == ("described", (f"kernel.py:{LINE}",))
    assert (found.explanations, found.weights, found.claim, found.xray) == ([], None, None, None)
    assert {fact.kind for fact in found.pattern.facts} <= {"sequences", "rows", "heads"}
    (text,) = found.outside
    assert text.endswith("before value")


def test_a_read_outside_that_changes_no_row_is_not_the_fault(tmp_path):
    """Slots without a token are read far outside and have weight 0; the fault is another one."""
    lab, case = Lab(), planted(tmp_path, FAR, DOUBLED)
    ran = lab.run(case)
    first = examine(lab, case, ran.output, ()).diagnosis
    assert ran.outside
    assert with_outside_reads(lab, case, first, ran, lab.run) is first


@pytest.mark.parametrize(
    ("family", "outside", "stays"), [(FAMILY, 2, False), (FAMILY, 1, True), ("softmax", 2, True)]
)
def test_a_rule_about_addresses_needs_a_row_without_loads_from_outside(family, outside, stays):
    rule = SimpleNamespace(candidate=SimpleNamespace(defect=SimpleNamespace(family=family)))
    found = Diagnosis(
        status="described",
        tolerance=SMALL.tolerance,
        looked_at=(0, 2),
        rule=rule,
        wrong_rows=2,
        outside_rows=tuple(range(outside)),
    )
    left = without_unfounded_rule(found)
    assert (left.rule is rule, left.status == "described") == (stays, stays)


@pytest.mark.slow
def test_the_answer_does_not_depend_on_where_a_process_puts_its_tensors(tmp_path):
    """With this threshold, malloc gives every tensor pages of its own."""
    case, lab = planted(tmp_path, BEFORE), Lab()
    program = tmp_path / "program.py"
    program.write_text(
        "from attnlab.case.case import Case\n"
        "from attnlab.lab.lab import Lab\n"
        f"ran = Lab().run(Case(**{case.changes()!r}))\n"
        "print(ran.outside, ran.output.tolist())\n"
    )
    again = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "64"},
        capture_output=True,
        text=True,
        check=True,
    )
    ran = lab.run(case)
    assert again.stdout == f"{ran.outside} {ran.output.tolist()}\n"
    assert "before value" in again.stdout
