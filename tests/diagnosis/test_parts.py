"""Which kernel is wrong: the one that stores parts of sequences, or the one that merges them?"""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.cases import hostile
from helpers.faulty_labs import planted_release
from helpers.sources import RELEASES, needs_triton, of_release

from attnlab.case.ops import OPS
from attnlab.checker.hostile import hostile_cases
from attnlab.diagnosis.claims import AccessClaim, CaseFacts
from attnlab.diagnosis.diagnose import claim_of_facts, diagnose
from attnlab.diagnosis.parts import part_facts
from attnlab.kernels import find_backend
from attnlab.kernels.triton.probe import LaunchLog, Probe, ProgramLog, probing
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem

CASE = hostile(op="decode_attention_fwd", query_lens=(1, 1), ctx_lens=(20, 9))
PARTS = {"kernel": "merge", "values": "parts[..., :-1]", "logarithms": "parts[..., -1]"}
SUMS = {
    "kernel": "merge",
    "values": "parts[..., :-2]",
    "logarithms": "parts[..., -2] * ln2",
    "sums": "parts[..., -1]",
}
STORES_WRONG = {"split stores wrong parts: merge merges them rightly"}
MERGES_WRONG = {"merge merges wrongly: the parts that split stores are right"}


@pytest.fixture(scope="module")
def problem() -> Problem:
    lab = Lab()
    return Problem.of_case(CASE, lab.batch(CASE), lab.call(CASE))


def launches(parts: torch.Tensor, is_stored: torch.Tensor, **arguments) -> list[LaunchLog]:
    """Return the launch of a kernel that stores the parts of ``is_stored``, and that of the merge."""
    at = torch.nonzero(is_stored.expand(parts.shape).flatten()).flatten().numpy()
    addresses = (parts.data_ptr() + at * parts.element_size()).astype(np.uint64)
    stored = ProgramLog(program=(0, 0, 0), stores={("", 0): [addresses]})
    return [
        LaunchLog(
            function=SimpleNamespace(fn=SimpleNamespace(__name__=name)),
            arguments={"parts": parts, **arguments},
            converted={},
            sizes=(1, 1, 1),
            programs=programs,
        )
        for name, programs in (("split", [stored]), ("merge", []))
    ]


def two_parts(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three parts of each row, and which two are stored. These merge to the right output."""
    right = problem.correct_output().output.float()
    parts = torch.full((*right.shape[:2], 3, right.shape[2] + 1), torch.nan)
    weights = math.exp(1.0) + math.exp(-3.0)
    for part, logarithm in enumerate((1.0, -3.0)):
        parts[:, :, part, :-1] = right * weights / (2 * math.exp(logarithm))
        parts[:, :, part, -1] = logarithm
    return parts, torch.tensor([True, True, False])[:, None]


def said(problem: Problem, output: torch.Tensor, given: list[LaunchLog], parts=PARTS) -> set[str]:
    right = problem.correct_output()
    wrong = ((output.double() - right.output).abs() > right.bound).any(-1)
    wrong |= output.isnan().any(-1)
    found = dict(part_facts(parts, given, output, problem, wrong))
    assert all(bool((cells & wrong).any()) for cells in found.values())
    return {*found}


def test_right_parts_and_a_wrong_output_show_the_merge(problem):
    parts, is_stored = two_parts(problem)
    right = problem.correct_output().output.half()
    given = launches(parts, is_stored)
    assert said(problem, right, given) == set()
    assert said(problem, right * 1.1, given) == MERGES_WRONG
    assert said(problem, torch.full_like(right, torch.nan), given) == MERGES_WRONG


def test_a_grid_without_programs_stores_no_part(problem):
    parts, is_stored = two_parts(problem)
    split, merge = launches(parts, is_stored)
    given = [dataclasses.replace(split, programs=[]), merge]
    assert said(problem, problem.correct_output().output.half() * 1.1, given) == set()


def test_wrong_parts_that_give_the_output_show_the_kernel_that_stores_them(problem):
    parts, is_stored = two_parts(problem)
    parts[..., :-1] *= 1.1
    right = problem.correct_output().output
    given = launches(parts, is_stored)
    assert said(problem, (right * 1.1).half(), given) == STORES_WRONG
    assert said(problem, (right * 1.3).half(), given) == set()  # both differ
    parts[0, 0, 0, 0] = torch.nan
    output = (right * 1.1).half()
    output[0, 0, 0] = torch.nan
    assert said(problem, output, given) == STORES_WRONG


def test_a_part_that_is_not_stored_does_not_count(problem):
    parts, _ = two_parts(problem)
    parts[:, :, 2] = 7.0
    right = problem.correct_output().output.half()
    every = torch.tensor([True, True, True])[:, None]
    assert said(problem, right * 1.1, launches(parts, every)) == set()


def test_sums_and_sinks_belong_to_the_parts(problem):
    right = problem.correct_output().output.float()
    parts = torch.zeros(*right.shape[:2], 2, right.shape[2] + 2)
    parts[:, :, 0, :-2] = right * 3.0  # the sink takes a half of the weight
    parts[:, :, 0, -2], parts[:, :, 0, -1] = 1.0, 1.5  # a logarithm to base 2
    parts[:, :, 1, -2], parts[:, :, 1, -1] = -torch.inf, 1.0  # a part without a key
    sink = torch.full((right.shape[1],), math.log(2 * 1.5))
    given = launches(parts, torch.tensor([True, True])[:, None], sinks=sink)
    assert said(problem, right.half() * 1.1, given, {**SUMS, "sinks": "sinks"}) == MERGES_WRONG
    assert said(problem, right.half() * 1.1, given, SUMS) == set()


def test_an_op_that_did_not_merge_has_no_such_facts(problem):
    parts, is_stored = two_parts(problem)
    output = problem.correct_output().output.half() * 1.1
    first, merge = launches(parts, is_stored)
    assert said(problem, output, [first]) == set()
    assert said(problem, output, [merge]) == set()


@pytest.mark.parametrize("second", [*MERGES_WRONG, *STORES_WRONG])
def test_both_kernels_are_not_blamed_in_different_places(second):
    (first,) = MERGES_WRONG
    wrong = torch.ones(2, 2, dtype=torch.bool)
    found = [CaseFacts(places={fact: wrong}, is_wrong=wrong) for fact in (first, second)]
    assert (claim_of_facts(found, AccessClaim) is None) == (second != first)


@needs_triton
@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("op", ["unified_attention", "decode_attention_fwd"])
def test_the_parts_of_right_kernels_are_right(op, release):
    """The record of the op says what the parts mean."""
    lab, merged = Lab(source=of_release(release).path, device="cpu"), 0
    backend = find_backend("vllm", of_release(release).path, "cpu")
    for case in hostile_cases(backend, op, "sm_90", None, 0):
        if case.op_argument != "none" or merged == 8:
            continue
        with probing(Probe(accesses=True)) as probe:
            ran = lab.run(case)
        if ran.status != "match" or len(probe.launches) < 2:
            continue
        problem = Problem.of_case(case, lab.batch(case), lab.call(case))
        every = torch.ones(ran.output.shape[:2], dtype=torch.bool)
        ((fact, cells),) = part_facts(OPS[op].parts, probe.launches, ran.output, problem, every)
        assert "stores are right" in fact
        assert bool(cells.all())
        merged += 1
    assert merged == 8


SEGMENTS = "act_num_segments = cdiv_fn(seq_len, tiles_per_segment * TILE_SIZE)"


@needs_triton
@pytest.mark.releases
@pytest.mark.parametrize(
    ("module", "old", "new", "fact"),
    [
        (
            "triton_unified_attention",
            SEGMENTS,
            "act_num_segments = max(seq_len // (tiles_per_segment * TILE_SIZE), 1)",
            "reduce_segments merges wrongly: the parts that kernel_unified_attention stores are right",
        ),
        (
            "triton_attention_helpers",
            "tl.store(segm_expsum_ptr + segm_offset, L,",
            "tl.store(segm_expsum_ptr + segm_offset, L * (1 + 0.2 * (L > 2)),",
            "kernel_unified_attention stores wrong parts: reduce_segments merges them rightly",
        ),
    ],
)
def test_a_fault_of_one_of_two_kernels_is_told(tmp_path, module, old, new, fact):
    """A segment that is left out is one tile in most cases."""
    lab = planted_release(tmp_path, module, old, new)
    lens = {"query_lens": (1, 5, 1), "ctx_lens": (16, 15, 31)}
    case = hostile(op="unified_attention", backend="vllm", **lens)
    found = diagnose(case, lab=lab, propose=False, limit=None)
    assert found.conclusion.startswith(fact)
    assert found.accesses.cases > 1
