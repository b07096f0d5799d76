"""The benchmark of the diagnosis, and that it notices a diagnosis that guesses."""

import dataclasses
import json
import random

import pytest
import torch
from bench_diagnosis import bench_diagnose
from fault_injection import (
    applicable,
    are_equivalent,
    correct_run,
    is_distinguishable,
    is_visible,
    plant,
    seqs_of,
)
from helpers.cases import hostile, same_bits

from attnlab.defects import DEFECTS
from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab


def test_planting_changes_no_other_row():
    """Rows out of scope, and heads that a defect does not change, keep their bits."""
    case, lab = hostile(), Lab()
    problem, output = correct_run(lab, case)
    planted = plant(problem, output, DEFECTS["newest_slot_zero"], "all")
    decode_rows = [0, 31, 49, 90, 91, 95]
    changed = torch.nonzero((planted != output).flatten(1).any(1)).flatten().tolist()
    assert changed == decode_rows
    others = [row for row in range(len(output)) if row not in decode_rows]
    assert same_bits(planted[others], output[others])


def test_equivalent_defects_are_not_distinguishable():
    """Among decodes, the newest token dropped equals a strict causal mask; a doubled scale does not."""
    problem, _ = correct_run(Lab(), hostile(query_lens=(1, 1), ctx_lens=(40, 20)))
    dropped, strict = DEFECTS["newest_token_dropped"], DEFECTS["causal_minus_one"]
    seqs, others = seqs_of(problem, "all"), applicable(problem)
    assert seqs == {0, 1}
    assert are_equivalent(problem, dropped, seqs, strict, seqs)
    assert not are_equivalent(problem, dropped, seqs, strict, {0})
    assert not are_equivalent(problem, dropped, seqs, DEFECTS["scale_doubled"], seqs)
    assert not is_distinguishable(problem, dropped, seqs, others)
    assert is_distinguishable(problem, DEFECTS["scale_doubled"], seqs, others)


def test_a_defect_is_invisible_in_rows_that_it_does_not_touch():
    problem, _ = correct_run(Lab(), hostile())
    assert is_visible(problem, DEFECTS["newest_slot_zero"], "decode")
    assert not is_visible(problem, DEFECTS["newest_slot_zero"], "prefill")


@pytest.mark.slow
def test_the_diagnosis_names_planted_defects():
    figures = bench_diagnose(trials=25, sound=10, seed=424242)
    assert figures["top_1"] >= 0.98
    assert figures["distinguishable"] > 10
    assert figures["false_explanations"] == []
    assert figures["without_wrong"] == []
    assert figures["alarms"] == []
    assert sum(sum(row.values()) for row in figures["matrix"].values()) == 25
    json.dumps(figures, allow_nan=False)


@pytest.mark.slow
def test_the_benchmark_notices_a_diagnosis_that_guesses(monkeypatch):
    """A random candidate as the cause."""

    def guess(case, output=None, **options):
        diagnosis = diagnose(case, output, **options)
        if not diagnosis.candidates:
            return diagnosis
        candidate = random.Random(case.seed).choice(diagnosis.candidates)
        return dataclasses.replace(
            diagnosis, cause=candidate, status="explained", explanations=[candidate]
        )

    monkeypatch.setattr("bench_diagnosis.diagnose", guess)
    figures = bench_diagnose(trials=10, sound=1, seed=3)
    assert figures["top_1"] < 0.5
    assert figures["false_explanations"]


def test_the_benchmark_notices_false_alarms(monkeypatch):
    """A diagnosis that calls correct outputs unexplained."""

    def alarm(case, output=None, **options):
        return dataclasses.replace(diagnose(case, output, **options), status="unexplained")

    monkeypatch.setattr("bench_diagnosis.diagnose", alarm)
    assert len(bench_diagnose(trials=1, sound=2, seed=3)["alarms"]) == 2
