"""What the programs of a launch store: conflicts between programs, and elements that none of them writes."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.cases import hostile
from helpers.triton_example import SMALL, TRITON

from attnlab.case.case import Case
from attnlab.diagnosis import confirmation, reruns
from attnlab.diagnosis import diagnose as diagnosing
from attnlab.diagnosis.address_rules import FAMILY
from attnlab.diagnosis.claims import AccessClaim, CaseFacts, is_conflict, recorded_facts
from attnlab.diagnosis.decision import examine
from attnlab.diagnosis.diagnose import (
    claim_of_facts,
    diagnose,
    with_outside_reads,
)
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.refinement import true_of_outside
from attnlab.kernels.triton.probe import LaunchLog, ProgramLog, current_probe
from attnlab.kernels.triton.replay import Replay
from attnlab.lab.lab import Lab

CASE = hostile(op="unified_attention", backend="vllm", query_lens=(1, 1), ctx_lens=(20, 9))
ROWS, HEADS, SIZE = 2, 6, 4
LINE = ("/somewhere/kernel.py", 290)


def stores(output: torch.Tensor, extra: int, numbers: float | None) -> LaunchLog:
    """Return a launch whose programs store one row each, and ``extra`` elements of the next row.

    These get ``numbers`` in place of those of the next row; None stores the same.
    """
    size = output.element_size()
    right = np.arange(output.numel(), dtype=np.float32)
    programs = []
    for row in range(ROWS):
        first = row * HEADS * SIZE
        at = np.arange(first, min(first + HEADS * SIZE + extra, output.numel()))
        values = right[at].copy()
        if numbers is not None:
            values[HEADS * SIZE :] = numbers
        addresses = (output.data_ptr() + at * size).astype(np.uint64)
        programs.append(
            ProgramLog(program=(row, 0, 0), stores={LINE: [addresses]}, values={LINE: [values]})
        )
    arguments = {"output_ptr": output}
    function = SimpleNamespace(fn=SimpleNamespace(__name__="kernel"))
    return LaunchLog(
        function=function, arguments=arguments, converted={}, sizes=(2, 1, 1), programs=programs
    )


def facts(launch: LaunchLog, wrong: torch.Tensor) -> set[str]:
    def run(case):
        current_probe().launches.append(launch)
        return SimpleNamespace(output=torch.zeros(len(wrong), HEADS, SIZE))

    return {name for name, _ in recorded_facts(CASE, wrong, run, None)}


@pytest.mark.parametrize(
    ("numbers", "is_fault"), [(7.5, True), (None, False), (float("nan"), True)]
)
def test_a_store_beyond_the_own_row_is_a_conflict_if_it_changes_the_next_row(numbers, is_fault):
    output, wrong = torch.zeros(ROWS, HEADS, SIZE), torch.zeros(ROWS, HEADS, dtype=torch.bool)
    found = facts(stores(output, 2, numbers), wrong)
    assert len(found) == is_fault
    assert all(is_conflict(one) and "kernel.py:290" in one for one in found)


def test_programs_that_store_their_rows_alone_have_no_facts():
    output, wrong = torch.zeros(ROWS, HEADS, SIZE), torch.ones(ROWS, HEADS, dtype=torch.bool)
    assert facts(stores(output, 0, None), wrong) == set()


@pytest.mark.parametrize("is_wrong", [True, False])
def test_an_element_that_no_program_stores_is_stated_where_the_output_is_wrong(is_wrong):
    output = torch.zeros(ROWS + 1, HEADS, SIZE)
    wrong = torch.zeros(ROWS + 1, HEADS, dtype=torch.bool)
    wrong[ROWS, 3] = is_wrong
    found = facts(stores(output, 0, None), wrong)
    assert found == ({"no kernel writes some elements of the output"} if is_wrong else set())


def test_scratch_memory_with_unwritten_elements_is_not_the_output():
    """Maxima of segments are [rows, heads, segments]."""
    scratch = torch.zeros(ROWS + 1, HEADS, SIZE + 1)
    wrong = torch.ones(ROWS + 1, HEADS, dtype=torch.bool)
    assert facts(stores(scratch, 0, None), wrong) == set()


def cells(*places: tuple[int, int]) -> torch.Tensor:
    """Return which of two rows and two heads are among ``places``."""
    found = torch.zeros(2, 2, dtype=torch.bool)
    for place in places:
        found[place] = True
    return found


def of_case(wrong: torch.Tensor, **places: torch.Tensor) -> CaseFacts:
    return CaseFacts(places=places, is_wrong=wrong)


ROW_0, ROW_1 = cells((0, 0), (0, 1)), cells((1, 0), (1, 1))
BOTH, NONE = ROW_0 | ROW_1, cells()


def test_a_right_output_refutes_only_facts_that_are_no_faults_there():
    conflict = "kernel.py:1 stores other numbers to elements of out that …"
    assert of_case(NONE, other=ROW_0, **{conflict: ROW_0}).refuted == {"other"}
    assert of_case(ROW_0, other=ROW_0).refuted == frozenset()


def test_a_fact_of_some_wrong_rows_alone_yields_to_two_that_concern_all():
    """The claim names every wrong row: those that are not read and those that are not written."""
    first, second = of_case(ROW_0, read=ROW_0), of_case(BOTH, read=ROW_0, written=ROW_1)
    assert claim_of_facts([first, first], AccessClaim) == AccessClaim(facts=("read",), cases=1)
    claim = claim_of_facts([first, second], AccessClaim)
    assert claim == AccessClaim(either=("read", "written"), cases=1)
    assert claim.holds_in(of_case(ROW_1, written=ROW_1))
    assert not claim.holds_in(of_case(BOTH, written=ROW_1))
    assert not claim.holds_in(of_case(NONE, written=ROW_1))


def test_without_that_a_fact_of_each_wrong_output_is_stated():
    claim = claim_of_facts([of_case(BOTH, read=ROW_0), of_case(ROW_1, read=ROW_0)], AccessClaim)
    assert claim == AccessClaim(some=("read",), cases=1)
    assert not claim.holds_in(of_case(ROW_1))


def test_an_input_that_is_read_for_other_rows_is_not_read_for_its_own():
    """Each program stores one row; the query of row 1 is read, but by no program that stores row 1."""
    wrong = torch.zeros(ROWS, HEADS, dtype=torch.bool)
    output, query = torch.zeros(ROWS, HEADS, SIZE), torch.zeros(ROWS, HEADS, SIZE)

    def loading(rows_of_programs: list[list[int]]) -> LaunchLog:
        launch = stores(output, 0, None)
        launch.arguments = {**launch.arguments, "query_ptr": query}
        for log, rows in zip(launch.programs, rows_of_programs, strict=True):
            size = HEADS * SIZE
            at = np.concatenate([np.arange(row * size, (row + 1) * size) for row in rows])
            log.loads[LINE] = [(query.data_ptr() + at * 4).astype(np.uint64)]
        return launch

    assert not facts(loading([[0], [1]]), wrong)
    assert not facts(loading([[0, 1], [0, 1]]), wrong)
    assert facts(loading([[0, 1], [0]]), wrong) == {
        "programs store rows of the output and do not read all of query_ptr for these rows"
    }


def test_a_grid_without_programs_has_no_facts():
    wrong = torch.ones(ROWS, HEADS, dtype=torch.bool)
    launch = stores(torch.zeros(ROWS, HEADS, SIZE), 0, None)
    launch.arguments = {**launch.arguments, "query_ptr": torch.zeros(ROWS, HEADS, SIZE)}
    launch.programs = []
    assert not facts(launch, wrong)


@pytest.mark.parametrize("has_exact", [True, False])
def test_the_output_is_what_fits_exactly_or_the_first_elements_of_each_head(has_exact):
    """The parts of a sequence that is not split have one element more in each head, and come first."""
    wide, exact = torch.zeros(ROWS, HEADS, SIZE + 1), torch.zeros(ROWS, HEADS, SIZE)
    given = {"counter": torch.zeros(()), "parts": wide, **({"o": exact} if has_exact else {})}
    launch = stores(wide, 0, None)
    launch.function = SimpleNamespace(fn=stores)
    first = [np.array([one.data_ptr()], dtype=np.uint64) for one in given.values()]
    launch.arguments, launch.programs = given, [ProgramLog(program=(0, 0, 0), stores={LINE: first})]
    found = Replay([launch], exact.shape).output
    assert found.shape == exact.shape
    assert found.data_ptr() == (exact if has_exact else wide).data_ptr()


def test_a_fact_that_a_wrong_output_lacks_is_no_claim():
    """A wrong slot of another sequence is one of the same sequence in a batch of one."""
    found = [of_case(ROW_0, read=ROW_0), of_case(ROW_1, read=ROW_1)]
    claim = claim_of_facts(found, AccessClaim)
    assert claim == AccessClaim(facts=("read",), cases=1)
    assert not claim.holds_in(of_case(ROW_0))
    assert claim_of_facts([*found, of_case(ROW_0)], AccessClaim) is None


def test_nothing_is_stated_of_kernels_that_are_not_interpreted():
    wrong = torch.ones(1, 1, dtype=torch.bool)
    assert not list(recorded_facts(CASE.replace(backend="model"), wrong, None, None))


# Reads outside of a tensor: the source line is the finding, and the same in every process.


LOAD = "v = tl.load(value + at, mask=both"
LINE_OUTSIDE = 1 + TRITON[: TRITON.index(LOAD)].count("\n")
BEFORE = (LOAD, "v = tl.load(value - at, mask=both")  # every slot but one is before the tensor
FAR = (LOAD, "v = tl.load(value + tl.where(both, at, at - 100000), mask=d[None, :] < DIM")
KEYS_BEFORE = ("k = tl.load(key + at", "k = tl.load(key - 1 - at")
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
    for module in (diagnosing, confirmation):
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
    assert (found.status, found.bad_lines) == ("described", (f"kernel.py:{LINE_OUTSIDE}",))
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
    lab, case = Lab(device="cpu"), SMALL.replace(backend="model")
    left = true_of_outside(lab, case, found, lambda one: lab.output(one))
    assert (left.rule is rule, left.status == "described") == (stays, stays)


@pytest.mark.usefixtures("one_further_case")
def test_keys_outside_are_the_finding_although_zeros_there_give_equal_scores(tmp_path):
    """Any one number there gives equal scores, too: all keys are alike."""
    found = diagnosed(planted(tmp_path, KEYS_BEFORE))
    assert found.outside_rows == (0, 1)
    assert (found.status, found.cause, found.xray) == ("described", None, None)
    assert [line.partition(":")[0] for line in found.bad_lines] == ["kernel.py"]


@pytest.mark.usefixtures("one_further_case")
def test_a_name_must_hold_with_other_numbers_outside(tmp_path, monkeypatch):
    """No further case confirms the line: without another run, zeros outside give a name."""
    monkeypatch.setattr(diagnosing, "with_bad_lines", lambda lab, case, diagnosis, run: diagnosis)
    case = planted(tmp_path, KEYS_BEFORE)
    found = diagnosed(case)
    assert found.outside_rows == (0, 1)
    assert (found.status, found.explanations, found.xray) == ("unexplained", [], None)
    (text,) = found.withdrawn
    assert text.startswith("scores_ignored does not explain a run with other numbers outside")
    for module in (confirmation, reruns):
        monkeypatch.setattr(module, "other_outside", contextlib.nullcontext)
    monkeypatch.setattr(diagnosing, "outside_rows", lambda case, ran, run: ())
    found = diagnosed(case)
    assert [one.name for one in found.explanations] == ["scores_ignored"]


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
