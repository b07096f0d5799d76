"""An edit of one expression with which every output is right describes a planted fault."""

import shutil
from itertools import islice
from pathlib import Path

import pytest
from helpers.sources import needs_triton, of_release
from helpers.triton_example import SMALL, planted

from attnlab.case.case import Case
from attnlab.diagnosis import repair_check
from attnlab.diagnosis.access_claim import AccessClaim
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.kernel_lines import locate_lines
from attnlab.diagnosis.kernel_trials import Limit
from attnlab.diagnosis.repair_check import find_claim, with_contents, with_repair
from attnlab.diagnosis.repair_claim import RepairClaim
from attnlab.diagnosis.second_case import further_cases
from attnlab.lab.lab import Lab

LIMIT = Limit(edits=400)
MERGE = Case(
    op="merge_attn_states",
    platform="sm_90",
    backend="vllm",
    op_argument="fp8_output",
    num_heads=4,
    num_queries_per_kv=2,
    head_size=64,
    block_size=16,
    sm_scale=0.125,
    query_lens=(1, 3, 3),
    ctx_lens=(20, 37, 0),
    fill="all_rows",
    distribution="normal",
    empty_slots="nan",
    output_init="nan",
    reference_dtype="float64",
)
# Texts of 0.33.0's triton_merge_attn_states.py.
LSE = ("                s_lse,\n", "                s_lse + 1,\n")
COPY = (
    "s_out = s_out * (1.0 / tl.load(output_scale))",
    "s_out = s_out / (1.0 / tl.load(output_scale))",
)


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """Confirm repairs in three further cases, for time."""
    monkeypatch.setattr(
        repair_check, "further_cases", lambda case: islice(further_cases(case), 0, 6, 2)
    )


def planted_merge(folder: Path, old: str, new: str) -> Lab:
    """Return a lab with 0.33.0 in which the merge has a change."""
    shutil.copytree(of_release("0.33.0").root / "vllm", folder / "vllm")
    file = folder / "vllm/v1/attention/ops/triton_merge_attn_states.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return Lab(source=folder, device="cpu")


def test_a_fault_of_one_expression_is_described_by_its_repair(tmp_path):
    lab = Lab(device="cpu")
    case, line = planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")
    location = locate_lines(lab, case, None, LIMIT)
    weak = Diagnosis(
        status="unexplained",
        wrong_rows=2,
        accesses=AccessClaim(facts=("a read is wrong",), cases=2),
        location=location,
    )
    found = with_repair(lab, case, weak, location.repairs)
    claim = found.repair
    assert (found.status, found.is_by_repair) == ("described", True)
    assert (claim.file, claim.line) == (case.backend.split(":")[0], line)
    assert claim.repair.edit.text == "`first // BLOCK` in place of `first % BLOCK`"
    assert (claim.only_finite, claim.cases) == (False, 3)
    assert (found.accesses, found.observed) == (None, ("a read is wrong",))
    assert found.locations[0].line == line
    assert any(claim.text in sentence for sentence in found.sentences())
    assert not any(sentence.startswith("location") for sentence in found.sentences())
    assert found.to_dict()["repair"]["line"] == line
    assert with_repair(lab, case, weak, ()) is weak


def test_an_edit_that_a_further_case_refutes_is_no_claim(tmp_path):
    """A second fault makes long sequences wrong, so the edit of the first one repairs short ones only."""
    lab = Lab(device="cpu")
    case, line = planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")
    file = tmp_path / "kernel.py"
    file.write_text(file.read_text().replace("slot < BLOCK\n", "slot < BLOCK - (first > 40)\n"))
    repairs = locate_lines(lab, case, None, LIMIT).repairs
    assert [one.line[1] for one in repairs] == [line]
    assert find_claim(lab, case, repairs) is None


def test_an_op_argument_keeps_the_output_buffer_that_it_asks_for():
    assert with_contents(SMALL, "nan").output_init == "recycled"
    case = Case(op="context_attention_fwd", backend="vllm", output_init="zeros")
    case = case.replace(op_argument="skip_decode")
    assert with_contents(case, "nan").output_init == "zeros"


def test_an_edit_that_changes_no_verdict_is_no_claim(tmp_path, monkeypatch):
    """The further case is right without the edit."""
    lab = Lab(device="cpu")
    case, _ = planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")
    repairs = locate_lines(lab, case, None, LIMIT).repairs
    short = case.replace(query_lens=(1,), ctx_lens=(3,))
    monkeypatch.setattr(repair_check, "further_cases", lambda case: [short])
    assert (lab.run(short).status, len(repairs)) == ("match", 1)
    assert find_claim(lab, case, repairs) is None


@needs_triton
@pytest.mark.releases
def test_a_wrong_log_sum_exp_is_described_by_its_repair(tmp_path):
    lab = planted_merge(tmp_path, *LSE)
    found = diagnose(MERGE, lab=lab, propose=False, defects=(), limit=Limit(edits=150))
    assert (found.status, found.wrong_rows, found.is_by_repair) == ("described", 0, True)
    assert found.side_errors
    assert found.observed
    assert is_line_of(found.repair, LSE)


@needs_triton
@pytest.mark.releases
def test_a_case_with_an_op_argument_has_a_repair(tmp_path):
    lab = planted_merge(tmp_path, *COPY)
    claim = find_claim(lab, MERGE, locate_lines(lab, MERGE, None, Limit(edits=150)).repairs)
    assert is_line_of(claim, COPY)


def is_line_of(claim: RepairClaim, fault: tuple[str, str]) -> bool:
    """Answer whether a repair is in the line of a planted fault."""
    file = Path(claim.file)
    assert file.name == "triton_merge_attn_states.py"
    return file.read_text().splitlines()[claim.line - 1].strip() == fault[1].strip()
