"""Defects of masks: each changes an output, and the diagnosis of that output names it."""

import pytest
import torch

from attnlab.case.case import Case
from attnlab.defects import DEFECTS
from attnlab.defects.masks import BIDIRECTIONAL, BRANCHES
from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab
from attnlab.lab.problem import all_rows, make_problem

LAB = Lab()
FIELDS = {
    "op": "unified_attention",
    "platform": "sm_90",
    "num_heads": 2,
    "num_queries_per_kv": 2,
    "head_size": 16,
    "query_lens": (36, 5, 20),
    "ctx_lens": (24, 30, 41),
    "distribution": "normal",
    "fill": "all_rows",
    "reference_dtype": "float64",
}
RANGES = ((10, 55, 0, 0), (10, 33, 0, 0), (20, 40, 45, 60))
# For each defect the mask and the window of a Case in which it differs from all others.
CASES = {
    "bidirectional_ignored": ("bidirectional", 0),
    "causality_of_next_sequence": ("causal_by_sequence", 0),
    "window_right_side_open": ("bidirectional", 9),
    "window_of_first_row": ("bidirectional", 9),
    "ranges_ignored": ("ranges", 0),
    "range_cut_at_tile": ("ranges", 0),
    "range_one_shorter": ("ranges", 0),
    "ranges_of_next_sequence": ("ranges", 0),
    "window_lost_in_range": ("ranges_in_window", 12),
    "range_beyond_window": ("ranges_in_window", 12),
    "range_cut_by_window": ("ranges", 12),
    "prefix_hidden": ("prefix_and_window", 7),
    "prefix_one_longer": ("prefix_and_window", 7),
    "prefix_of_next_sequence": ("prefix_and_window", 7),
    "chunk_lookback_off_by_one": ("chunks", 12),
    "chunks_as_window": ("chunks", 12),
    "tree_ignored": ("tree", 0),
    "tree_row_shifted": ("tree", 0),
    "tree_at_sequence_start": ("tree", 0),
    "window_both_sides": ("causal_by_sequence", 9),
    "causal_plus_one": ("ranges", 5),
    "window_plus_one": ("prefix_and_window", 7),
}


def case_of(mask, window):
    """Return the Case of a mask and a window."""
    ranges = {"mm_prefix_range": RANGES} if mask.startswith("ranges") else {}
    return Case(**FIELDS, mask=mask, sliding_window=window, **ranges)


def test_every_defect_of_a_mask_has_a_case():
    assert {one.name for one in (*BIDIRECTIONAL, *BRANCHES)} <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_diagnosis_names_the_defect(name):
    """An output with the defect is wrong, and the defect is among the explanations."""
    defect, case = DEFECTS[name], case_of(*CASES[name])
    problem = make_problem(case, LAB.batch(case))
    assert defect.applies(problem)
    parts = [defect.compute(problem, rows).output for rows in all_rows(problem)]
    output = torch.cat(parts).to(problem.call.output.dtype)
    found = diagnose(case, output, lab=LAB, propose=False, limit=None)
    assert found.is_wrong
    assert name in {one.name for one in found.explanations}


@pytest.mark.parametrize("mask", sorted({mask for mask, _ in CASES.values()}))
def test_a_right_output_has_no_finding(mask):
    case = case_of(mask, 9)
    assert diagnose(case, lab=LAB, propose=False).status == "nothing wrong"


def test_no_defect_of_a_mask_applies_to_causal_attention():
    case = Case(**{**FIELDS, "query_lens": (3, 1), "ctx_lens": (5, 9)}, sliding_window=4)
    problem = make_problem(case)
    assert [one.name for one in (*BIDIRECTIONAL, *BRANCHES) if one.applies(problem)] == []
