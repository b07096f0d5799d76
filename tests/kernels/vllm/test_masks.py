"""Masks: models agree with vLLM's ops, faults of 0.33.0 are found and named, older releases refuse masks."""

import dataclasses

import pytest
from helpers.agreement import agrees, bound, modelled, real
from helpers.cases import hostile, refused
from helpers.masked_cases import random_case
from helpers.sources import needs_triton, of_release

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected, Unsupported
from attnlab.case.masks import MASKS
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import PREFILL, UNIFIED, WRAPPER
from attnlab.checker.case_check import check_case
from attnlab.checker.hostile import DEFAULT_CASES, hostile_cases
from attnlab.contracts.contract import Target
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.backend import run
from attnlab.lab.lab import Lab

pytestmark = [needs_triton, pytest.mark.releases]
MASKED = tuple(name for name in MASKS if name != "causal")
EACH = 4  # Cases per mask; 200 agree (docs/coverage.md)


@pytest.mark.parametrize("mask", MASKED)
def test_models_agree_with_unified_attention(mask):
    source, seen = of_release("0.33.0"), 0
    for number in range(EACH):
        case = random_case(mask, number)
        model, within = modelled(case).output, bound(case)
        assert agrees(model, real(case, source).output, within), number
        causal = case.replace(mask="causal", **dict.fromkeys(_data(case)))
        seen += not agrees(modelled(causal).output, model, within)
    assert seen  # the bound is small enough to show another mask


def _data(case):
    """Return the fields with mask data that a Case gives."""
    return [m.data for m in MASKS.values() if m.data and getattr(case, m.data) is not None]


@pytest.mark.parametrize("op", [WRAPPER, PREFILL])
def test_models_agree_with_a_bidirectional_prefill(op):
    source = of_release("0.33.0")
    for window in (0, 7):
        case = hostile(op=op, mask="bidirectional", sliding_window=window, platform="sm_90")
        case = case.replace(num_heads=2, empty_slots="garbage")
        assert agrees(modelled(case).output, real(case, source).output, bound(case))


def test_a_tree_in_0_11_2():
    source = of_release("0.11.2")
    for number in range(2):
        case = random_case("tree", number, release="0.11.2", num_splits=None)
        assert agrees(modelled(case).output, real(case, source).output, bound(case))


@pytest.mark.parametrize("mask", ["bidirectional", "ranges", "chunks"])
def test_a_release_without_the_argument_refuses_the_call(mask):
    """The Case is refused before anything is allocated, a call with such a mask when it is passed."""
    source = of_release("0.11.2")
    case = random_case(mask, 0, num_splits=None)
    with refused("mask"):
        case.replace(release="0.11.2")
    call = Lab().call(case)
    with pytest.raises((Unsupported, KernelRejected), match=r"mask must be|Only causal"):
        run(call, Target.of(case), (UNIFIED,), source)


def test_the_faults_of_0_33_0_are_found_and_named():
    """V is masked by the window of a block's first row, whose rows may be several."""
    backend = find_backend("vllm", of_release("0.33.0").path, "cpu")
    lab = Lab(source=backend.path, device="cpu")
    found = {}
    for case in hostile_cases(backend, UNIFIED, "sm_90", DEFAULT_CASES, 0):
        if case.mask == "causal" or case.num_splits or case.op_argument != NONE:
            continue
        for finding in check_case(lab, backend, case):
            if finding.is_fault:
                found.setdefault(case.mask, []).append((finding.diagnosis, finding.names))
    assert set(found) == {"bidirectional", "causal_by_sequence", "ranges"}
    for faults in found.values():
        for diagnosis, names in faults:
            assert diagnosis == "window_of_first_row" or "window_of_first_row" in names


@pytest.mark.parametrize(("group", "rows"), [(3, 5), (5, 3)])
def test_blocks_whose_rows_are_no_power_of_two(group, rows):
    """A block has 16 // num_queries_per_kv rows."""
    fields = {"query_lens": (8,), "ctx_lens": (17,), "num_heads": group, "head_size": 32}
    fields |= {"num_queries_per_kv": group, "backend": "vllm", "num_splits": 0}
    case = hostile(op=UNIFIED, mask="bidirectional", sliding_window=7, platform="sm_90", **fields)
    lab = Lab(source=of_release("0.33.0").path, device="cpu")
    found = diagnose(case, lab.output(case), lab=lab, propose=False)
    assert "window_of_first_row" in {one.name for one in found.explanations}
    assert any(f"blocks of {rows} rows" in one for one in found.sentences())


def test_sound_models_have_no_findings():
    """Every hostile Case with a mask, on the models."""
    backend = find_backend("model")
    lab = Lab(device="cpu")
    cases = [
        case
        for op in (UNIFIED, WRAPPER, PREFILL)
        for case in hostile_cases(backend, op, "sm_90", DEFAULT_CASES, 0)
        if case.mask != "causal"
    ]
    assert {case.mask for case in cases} == set(MASKED)
    assert [one for case in cases for one in check_case(lab, backend, case)] == []


def test_another_mask_than_that_of_the_case_is_found():
    """The op gets the call without its mask: the check fails and names the mask."""
    backend = find_backend("model")

    class Plain(type(backend)):
        """The models, which ignore masks."""

        def run(self, call, target, kernels, options):
            plain = dataclasses.replace(call, causal=True, mm_prefix_range=None, qq_bias=None)
            return super().run(plain, target, kernels, options)

    lab = Lab(device="cpu", runner=Plain(rules="0.33.0"))
    names = {
        "bidirectional": "bidirectional_ignored",
        "ranges": "ranges_ignored",
        "tree": "tree_ignored",
    }
    for mask, name in names.items():
        case = Case(
            op=UNIFIED,
            mask=mask,
            query_lens=(1, 19, 3),
            ctx_lens=(20, 5, 37),
            num_heads=4,
            distribution="normal",
            platform="sm_90",
        )
        (finding,) = check_case(lab, lab.runner, case)
        assert name in finding.names
