"""Wrong outputs of Cases with an op argument: the read that explains them, or a plain description."""

import dataclasses

import pytest
import torch
from helpers.argument_cases import FORMATS, random_format_case
from helpers.cases import hostile
from helpers.faulty_labs import planted_release
from helpers.sources import needs_triton, of_release

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import MERGE, OPS
from attnlab.checker.case_check import check_case
from attnlab.diagnosis import diagnose as diagnosing
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.output_rules import NO_CONTEXT, rows_of
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend, RunOutput
from attnlab.kernels.model import partials
from attnlab.kernels.vllm import op_arguments
from attnlab.lab.argument_reference import wrong_reads
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import presented
from attnlab.tensors.quantised import OUTPUT_SCALE

IGNORED = dataclasses.replace(OP_ARGUMENTS["alibi_sqrt"], passes={})


def case_of(name):
    """Return a small Case with more than one KV head and more than one block per sequence."""
    return random_format_case(
        name, 2, query_lens=(1, 5), ctx_lens=(32, 7), sliding_window=0, num_heads=4, block_size=8
    ).replace(num_queries_per_kv=2, dtype="float16", num_splits=None, head_size=16, sinks=False)


def named(diagnosis):
    """Return the names of the defects that explain the output."""
    return {one.name for one in diagnosis.explanations}


def output_of(lab, case, read=None):
    """Return the output of a Case, right or by a wrong read of its cache."""
    problem = Problem.of_case(case, lab.batch(case), lab.call(case))
    problem = problem if read is None else problem.misread(read)
    return problem.correct_output().output


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.quick("int4_per_token_head")
def test_each_wrong_read_is_described_by_its_name(name):
    """The output that a read gives is described by it; reads that change nothing are not wrong."""
    lab, case = Lab(device="cpu"), case_of(name)
    right = output_of(lab, case)
    assert diagnose(case, right.half(), lab=lab).status == "nothing wrong"
    reads = dict(list(wrong_reads(case).items())[::2])  # every second one, for time
    for read_name, read in reads.items():
        output = output_of(lab, case, read).half()
        found = diagnose(case, output, lab=lab)
        if bool(output.isnan().flatten(1).all(1).logical_not().any()):
            assert (found.status, named(found)) == ("explained", {read_name}), read_name
            assert found.sentences()
            assert found.to_dict()["place"]


def test_another_error_is_described_by_its_values():
    """A scaled output, NaN in a row, and an output of other numbers."""
    lab, case = Lab(device="cpu"), case_of("int8_per_token_head")
    right = output_of(lab, case)
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


@dataclasses.dataclass(slots=True)
class WithArgument(Lab):
    """A lab that runs a Case with an op argument by its model, on the numbers that the op must read."""

    def backend(self, case: Case) -> Backend:
        return find_backend("model")

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        output = output_of(self, case)
        call.output.copy_(self.changed(case, call, output.to(call.output.dtype)))
        return RunOutput()

    def changed(self, case: Case, call: KernelCall, output: torch.Tensor) -> torch.Tensor:
        return output


class LastRowFirst(WithArgument):
    """All rows are written to the first one, and the last one stays there."""

    def changed(self, case, call, output):
        written = call.output.clone()
        written[0] = output[-1]
        return written


@pytest.mark.slow
def test_an_output_that_is_written_to_a_wrong_address_is_described(monkeypatch):
    """A rule beyond the catalogue is found for numbers of an op argument, and confirmed by further cases."""
    monkeypatch.setattr(
        diagnosing, "_without_argument", lambda *given: None
    )  # it is wrong there, too
    case = case_of("int8_per_token_head")
    found = diagnose(case, lab=LastRowFirst(device="cpu"), propose=False, limit=None)
    assert found.status == "described"
    assert "the output is written to a wrong address" in found.rule.text


class FirstSuffix(WithArgument):
    """A merge copies the suffix of row 1 for the last sequences without context, into FP8."""

    def changed(self, case, call, output):
        problem = Problem.of_case(case, self.batch(case), call)
        parts = partials(presented(call), problem.target)
        output[rows_of(problem, NO_CONTEXT)] = parts.suffix_output[1]
        return (output.float() / OUTPUT_SCALE).to(torch.float8_e4m3fn).float() * OUTPUT_SCALE


def test_a_merge_with_an_fp8_output_has_the_rules_of_a_plain_one(monkeypatch):
    """They concern the last rows without context alone, which the op copies."""
    monkeypatch.setattr(
        diagnosing, "_without_argument", lambda *given: None
    )  # it is wrong there, too
    case = hostile(op=MERGE, query_lens=(2, 1, 3), ctx_lens=(9, 4, 0), num_heads=2, head_size=16)
    case = case.replace(op_argument="fp8_output", backend="vllm")
    found = diagnose(case, lab=FirstSuffix(device="cpu"), propose=False, limit=None)
    assert "outputs of the suffix are read at a wrong address" in found.rule.text
    assert NO_CONTEXT in found.rule.text


@pytest.mark.releases
@needs_triton
@pytest.mark.parametrize("name", ["fp8_output", "no_lse"])
def test_a_fault_of_an_included_argument_is_not_that_of_the_outer_one(tmp_path, name):
    """The tokens with a context are counted from the end. That is wrong with their number alone."""
    right = "prefix_mask = token_idx < prefill_tokens_with_context"
    wrong = right.replace("<", ">= tl.num_programs(0) -")
    lab = planted_release(tmp_path, OPS[MERGE].module, right, wrong)
    case = hostile(op=MERGE, query_lens=(2, 1, 3), ctx_lens=(9, 4, 0), num_heads=2, head_size=32)
    case = case.replace(op_argument=name, backend="vllm")
    found = diagnose(case, lab=lab, propose=False, limit=None)
    assert name not in found.conclusion
    assert found.unknown[-1].endswith(
        "this is about the output with suffix_only_tokens alone, wrong, too"
    )
    (finding,) = check_case(lab, find_backend("vllm", tmp_path, "cpu"), case)
    assert finding.diagnosis.startswith("op_argument suffix_only_tokens")


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
    assert (found.status, named(found)) == ("explained", {"k_scale_for_values"})
    monkeypatch.setitem(OP_ARGUMENTS, "alibi_sqrt", IGNORED)
    plain = case.replace(op_argument=NONE, alibi=True)
    found = diagnose(plain.replace(op_argument="alibi_sqrt"), lab=lab, limit=None)
    assert (found.status, named(found)) == ("explained", {"argument_ignored"})


@pytest.mark.releases
def test_an_output_that_is_wrong_without_the_argument_is_diagnosed_as_that(monkeypatch):
    """0.33.0 is wrong with ALiBi and sinks."""
    monkeypatch.setitem(OP_ARGUMENTS, "alibi_sqrt", IGNORED)
    case = case_of("diffkv").replace(op_argument="alibi_sqrt", alibi=True, sinks=True)
    found = diagnose(case, lab=Lab(source=of_release("0.33.0").path, device="cpu"), limit=None)
    assert (found.status, named(found)) == ("explained", {"sink_beside_alibi"})
    assert "op_argument alibi_sqrt" in found.unknown[-1]
