"""Wrong outputs of Cases with an op argument: the read that explains them, or a plain description."""

import dataclasses

import pytest
import torch
from helpers.argument_cases import FORMATS, random_format_case
from helpers.cases import hostile
from helpers.sources import of_release

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import MERGE
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.argument_diagnosis import diagnose_argument
from attnlab.diagnosis.argument_pattern import KIND, ArgumentLab, argument_lab, coarse_lab
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.rules.rule import NO_CONTEXT, rows_of
from attnlab.kernels import model
from attnlab.kernels.backend import RunOutput
from attnlab.kernels.model import partials
from attnlab.kernels.vllm import op_arguments
from attnlab.lab.argument_reference import reference_with_argument, wrong_reads
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_output, presented
from attnlab.tensors.quantised import OUTPUT_SCALE


def case_of(name):
    """Return a small Case with more than one KV head and more than one block per sequence."""
    return random_format_case(
        name, 2, query_lens=(1, 5), ctx_lens=(32, 7), sliding_window=0, num_heads=4, block_size=8
    ).replace(num_queries_per_kv=2, dtype="float16", num_splits=None, head_size=16, sinks=False)


def named(diagnosis):
    """Return the names of the facts about the op argument."""
    return {fact.values["name"] for fact in diagnosis.pattern.of(KIND)}


@pytest.mark.parametrize("name", FORMATS)
def test_each_wrong_read_is_described_by_its_name(name):
    """The output that a read gives is described by it; reads that change nothing are not wrong."""
    lab, case = Lab(device="cpu"), case_of(name)
    right = reference_with_argument(case, lab.batch(case)).output
    assert diagnose(case, right.half(), lab=lab).status == "nothing wrong"
    reads = dict(list(wrong_reads(case).items())[::2])  # every second one, for time
    for read_name, read in reads.items():
        output = reference_with_argument(case, lab.batch(case), read).output.half()
        found = diagnose(case, output, lab=lab)
        if bool(output.isnan().flatten(1).all(1).logical_not().any()):
            assert (found.status, named(found)) == ("described", {read_name}), read_name
            assert found.sentences()
            assert found.to_dict()["place"]


def test_another_error_is_described_by_its_values():
    """A scaled output, NaN in a row, and an output of other numbers."""
    lab, case = Lab(device="cpu"), case_of("int8_per_token_head")
    right = reference_with_argument(case, lab.batch(case)).output
    scaled = diagnose(case, (2 * right).half(), lab=lab)
    assert (scaled.status, named(scaled)) == ("described", set())
    assert scaled.pattern.of("factor")
    row = right.half()
    row[3] = float("nan")
    found = diagnose(case, row, lab=lab)
    assert (found.wrong_rows, found.place.row) == (1, 3)
    generator = torch.Generator().manual_seed(0)
    other = diagnose(case, torch.randn(right.shape, generator=generator).half(), lab=lab)
    assert (other.status, named(other)) == ("unexplained", set())


def test_an_output_that_is_written_to_a_wrong_address_is_described():
    """All rows are written to the first one, and the last one stays there."""
    lab, case = Lab(device="cpu"), case_of("int8_per_token_head")
    right = reference_with_argument(case, lab.batch(case)).output.half()
    output = make_output(case)
    output[0] = right[-1]
    found = diagnose(case, output, lab=lab)
    assert found.status == "described"
    assert any("written to a wrong address" in fact.what for fact in found.pattern.of(KIND))
    output[2] = 1.0  # which no row's result is
    assert not diagnose(case, output, lab=lab).pattern.of(KIND)


@pytest.mark.parametrize(
    ("name", "is_plain"), [("gaps", True), ("fp8_output", False), ("int8_per_token_head", False)]
)
def test_an_argument_that_changes_no_number_leaves_a_plain_case(name, is_plain):
    """Such a Case runs with its argument, and everything else is that of the plain one."""
    lab, ran = Lab(device="cpu"), []
    case = case_of("int8_per_token_head").replace(op_argument=name, backend="vllm")
    found = argument_lab(lab, case)
    assert (found is not None) == is_plain
    if found is not None:
        found.shared.get("backend", "vllm", lambda: Recorded(ran))
        plain = case.replace(op_argument=NONE)
        found._run_kernels(plain, found.call(plain))
        assert ran == [name]


class Recorded:
    """A backend that records the op arguments of its runs."""

    models_prefill, device = False, "cpu"

    def __init__(self, ran):
        self.ran = ran

    def run(self, call, target, kernels, options):
        self.ran.append(options.argument_of.op_argument)


@dataclasses.dataclass(slots=True)
class FirstSuffix(ArgumentLab):
    """A lab whose merge copies the suffix of row 1 for the last sequences without context, into FP8."""

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        model.run(call, Target.of(case), decide(case).kernels)
        problem = Problem.of_case(case, self.batch(case), call)
        parts = partials(presented(call), problem.target)
        call.output[rows_of(problem, NO_CONTEXT)] = parts.suffix_output[1]
        stored = (call.output.float() / OUTPUT_SCALE).to(torch.float8_e4m3fn)
        call.output.copy_(stored.float() * OUTPUT_SCALE)
        return RunOutput()


def test_a_merge_with_an_fp8_output_has_the_rules_of_a_plain_one():
    """They concern the last rows without context alone, which the op copies."""
    case = hostile(op=MERGE, query_lens=(2, 1, 3), ctx_lens=(9, 4, 0), num_heads=2, head_size=16)
    lab = FirstSuffix(op_argument="fp8_output")
    found = diagnose(case, lab=lab, propose=False, limit=None)
    assert found.rule is not None
    assert "outputs of the suffix are read at a wrong address" in found.rule.text
    assert NO_CONTEXT in found.rule.text
    coarse = coarse_lab(Lab(device="cpu"), case.replace(op_argument="fp8_output", backend="vllm"))
    assert coarse is not None
    assert coarse.op_argument == "fp8_output"
    assert coarse_lab(Lab(device="cpu"), case) is None


@pytest.mark.releases
@pytest.mark.slow
def test_a_run_is_confirmed_with_other_data(monkeypatch):
    """The op gets the scales of keys for values, then the call without its argument."""
    case = case_of("fp8_per_token_head")
    lab = Lab(source=of_release("0.33.0").path, device="cpu")
    make = op_arguments._MAKERS[case.op_argument]
    assert diagnose(case, lab=lab).status == "nothing wrong"

    def exchanged(case, given):
        made = make(case, given)
        return {**made, "v_scale_cache": made["k_scale_cache"]}

    monkeypatch.setitem(op_arguments._MAKERS, case.op_argument, exchanged)
    found = diagnose(case, lab=lab, limit=None)
    assert (found.status, named(found)) == ("described", {"k_scale_for_values"})
    monkeypatch.setitem(op_arguments._MAKERS, "alibi_sqrt", lambda case, given: {})
    plain = case.replace(op_argument=NONE, alibi=True)
    found = diagnose(plain.replace(op_argument="alibi_sqrt"), lab=lab, limit=None)
    assert (found.status, named(found)) == ("described", {"argument_ignored"})


@pytest.mark.releases
def test_an_output_that_is_wrong_without_the_argument_is_diagnosed_as_that(monkeypatch):
    """0.33.0 is wrong with ALiBi and sinks."""
    monkeypatch.setitem(op_arguments._MAKERS, "alibi_sqrt", lambda case, given: {})
    case = case_of("diffkv").replace(op_argument="alibi_sqrt", alibi=True, sinks=True)
    lab = Lab(source=of_release("0.33.0").path, device="cpu")
    asked = []

    def plain(case, lab):
        asked.append(case.op_argument)
        return Diagnosis(status="explained", unknown=["more"])

    found = diagnose_argument(lab, case, None, plain)
    assert (found.status, asked, len(found.unknown)) == ("explained", [NONE], 2)
