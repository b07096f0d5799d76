"""What the programs of a launch store: conflicts between programs, and elements that none of them writes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.cases import hostile

from attnlab.diagnosis.access_check import claim_of_facts
from attnlab.diagnosis.claims import AccessClaim, AccessFacts, is_conflict, recorded_facts
from attnlab.kernels.triton.probe import LaunchLog, ProgramLog, current_probe

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
    function = SimpleNamespace()
    return LaunchLog(
        function=function, arguments=arguments, converted={}, sizes=(2, 1, 1), programs=programs
    )


def facts(launch: LaunchLog, wrong: torch.Tensor) -> set[str]:
    def run(case):
        current_probe().launches.append(launch)
        return SimpleNamespace(output=torch.zeros(len(wrong), HEADS, SIZE))

    return {name for name, _ in recorded_facts(CASE, wrong, run)}


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


def of_case(wrong: torch.Tensor, **places: torch.Tensor) -> AccessFacts:
    return AccessFacts(places=places, is_wrong=wrong)


ROW_0, ROW_1 = cells((0, 0), (0, 1)), cells((1, 0), (1, 1))
BOTH, NONE = ROW_0 | ROW_1, cells()


def test_a_right_output_refutes_only_facts_that_are_no_faults_there():
    conflict = "kernel.py:1 stores other numbers to elements of out that …"
    right = of_case(NONE, other=ROW_0, **{conflict: ROW_0})
    assert right.refuted == {"other"}
    assert of_case(ROW_0, other=ROW_0).refuted == frozenset()


def test_a_fact_of_some_wrong_rows_alone_yields_to_two_that_concern_all():
    """The claim names every wrong row: those that are not read and those that are not written."""
    first, second = of_case(ROW_0, read=ROW_0), of_case(BOTH, read=ROW_0, written=ROW_1)
    assert claim_of_facts([first, first]) == AccessClaim(facts=("read",), cases=1)
    claim = claim_of_facts([first, second])
    assert claim == AccessClaim(either=("read", "written"), cases=1)
    assert claim.holds_in(of_case(ROW_1, written=ROW_1))
    assert not claim.holds_in(of_case(BOTH, written=ROW_1))
    assert not claim.holds_in(of_case(NONE, written=ROW_1))


def test_without_that_a_fact_of_each_wrong_output_is_stated():
    claim = claim_of_facts([of_case(BOTH, read=ROW_0), of_case(ROW_1, read=ROW_0)])
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


def test_a_fact_that_a_wrong_output_lacks_is_no_claim():
    """A wrong slot of another sequence is one of the same sequence in a batch of one."""
    found = [of_case(ROW_0, read=ROW_0), of_case(ROW_1, read=ROW_1)]
    claim = claim_of_facts(found)
    assert claim == AccessClaim(facts=("read",), cases=1)
    assert not claim.holds_in(of_case(ROW_0))
    assert claim_of_facts([*found, of_case(ROW_0)]) is None


def test_nothing_is_stated_of_kernels_that_are_not_interpreted():
    wrong = torch.ones(1, 1, dtype=torch.bool)
    assert not list(recorded_facts(CASE.replace(backend="model"), wrong, None))
