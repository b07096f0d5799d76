"""An edit of one expression with which every output is right describes a planted fault."""

import dataclasses
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import hostile
from helpers.claims import REPAIR, candidate
from helpers.faulty_labs import planted_release
from helpers.sources import needs_triton
from helpers.triton_example import CASE, EXAMPLE, SMALL, TRITON, planted

from attnlab.case.case import Case
from attnlab.diagnosis import repair_check, trials
from attnlab.diagnosis.candidates import Scope
from attnlab.diagnosis.claims import AccessClaim, LeakClaim, RepairClaim
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.lines import locate_lines
from attnlab.diagnosis.repair_check import (
    Proof,
    find_claim,
    varied_cases,
    with_contents,
    with_repair,
)
from attnlab.diagnosis.reruns import further_cases
from attnlab.diagnosis.trials import KernelText, Limit, Repair, kernel_text
from attnlab.kernels.triton.kernel_text import place_of, text_of
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.triton.source_edits import Edit
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import freed_blocks

LIMIT = Limit(edits=400)
TOOLS = Path(__file__).parents[2] / "tools"
MERGE = CASE.replace(
    op="merge_attn_states", backend="vllm", op_argument="fp8_output", fill="all_rows",
    head_size=64, sm_scale=0.125, query_lens=(1, 3, 3), ctx_lens=(20, 37, 0), num_blocks=None,
)  # fmt: skip
# Texts of 0.33.0's triton_merge_attn_states.py.
LSE = ("                s_lse,\n", "                s_lse + 1,\n")
COPY = (
    "s_out = s_out * (1.0 / tl.load(output_scale))",
    "s_out = s_out / (1.0 / tl.load(output_scale))",
)


NEVER = candidate("rows_never_written")
TWICE = "twice as many iterations of this loop"
LINE = 1 + TRITON[: TRITON.index("first // BLOCK).to")].count("\n")  # of the fault of `case`


@pytest.fixture
def lab() -> Lab:
    """Return a new lab."""
    return Lab(device="cpu")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Return a Case for the example with one wrong expression."""
    return planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")[0]


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """Confirm repairs in three further cases of as many heads, and in two varied ones, for time.

    Three are enough here; :func:`test_an_edit_needs_ten_further_cases` is about the number.
    """

    def few(case):
        return islice((one for one in further_cases(case) if one.num_heads == case.num_heads), 3)

    monkeypatch.setattr(repair_check, "_FEWEST", 3)
    monkeypatch.setattr(repair_check, "further_cases", few)
    monkeypatch.setattr(repair_check, "varied_cases", lambda case: islice(varied_cases(case), 2))


def confirm_in(monkeypatch, further, *, varied=(), similar=None) -> None:
    """Confirm repairs in some further and varied cases; ``similar`` None: in those of the package."""
    cases = {"further_cases": further, "varied_cases": varied, "similar_cases": similar}
    for name, given in cases.items():
        if given is not None:
            monkeypatch.setattr(repair_check, name, lambda _, given=given: given)


def decode(case: Case, **changes: object) -> Case:
    """Return the case with one decode of other numbers."""
    return case.replace(query_lens=(1,), ctx_lens=(30,), seed=3, **changes)


def seeded(case: Case) -> list[Case]:
    """Return cases that differ from this one in their numbers alone."""
    return [case.replace(seed=seed) for seed in range(20, 40)]


def test_a_fault_of_one_expression_is_described_by_its_repair(lab, case):
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
    assert (claim.file, claim.line) == (case.backend.split(":")[0], LINE)
    assert claim.repair.edit.text == "`first // BLOCK` in place of `first % BLOCK`"
    assert (claim.only_finite, claim.cases) == (False, 5)
    assert (found.accesses, found.observed) == (None, ("a read is wrong",))
    assert found.locations[0].line == LINE
    assert found.sentences()[0] == claim.text
    assert not any(sentence.startswith("source line") for sentence in found.sentences())
    assert found.to_dict()["repair"]["line"] == LINE
    assert with_repair(lab, case, weak, ()) is weak


def test_an_argument_is_named_if_another_value_of_it_passes_all_cases(tmp_path, lab):
    """The caller may pass the reciprocal of the scale, or the kernel divide by it."""
    case, line = planted(tmp_path, ", 1) * scale", ", 1) / scale")
    claim = find_claim(lab, case, locate_lines(lab, case, None, LIMIT).repairs)
    assert (claim.line, claim.argument, claim.to_dict()["argument"]) == (line, "scale", "scale")
    assert "or with another value passed as scale, the output is right" in claim.text


def test_an_edit_of_an_expression_over_two_lines_is_a_claim(tmp_path, lab):
    """Its text alone is no Python: the second line is indented."""
    faulty = "first\n                % BLOCK).to"
    case, line = planted(tmp_path, "first // BLOCK).to", faulty)
    claim = find_claim(lab, case, locate_lines(lab, case, None, LIMIT).repairs)
    assert (claim.line, "\n" in claim.repair.edit.before, claim.is_stated) == (line, True, True)
    assert claim.argument == ""


def test_an_edit_that_ends_its_process_ends_only_the_trials(tmp_path, monkeypatch):
    """With the edit `==`, the kernel ends the copy of this process in which edits are tried."""
    crash = "def crash():\n    import os\n    os.kill(os.getpid(), 9)\n\n\n@triton.jit"
    guard = "    if GROUP != GROUP:\n        crash()\n    end = tl.load"
    changed = TRITON.replace("@triton.jit", crash, 1).replace("    end = tl.load", guard, 1)
    monkeypatch.setattr("helpers.triton_example.TRITON", changed)
    case, _ = planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")
    location = locate_lines(Lab(device="cpu"), case, None, LIMIT)
    assert location.tried > 0
    (sentence,) = location.sentences()
    assert sentence.endswith("one ended the trials by SIGKILL")
    with_lines = dataclasses.replace(location, lines=(None,))
    assert with_lines.sentences()[0].endswith("trial edits; one ended the trials by SIGKILL")


def test_an_edit_that_a_further_case_refutes_is_no_claim(tmp_path, lab, case):
    """A second fault makes long sequences wrong, so the edit of the first one repairs short ones only."""
    file = tmp_path / "kernel.py"
    file.write_text(file.read_text().replace("slot < BLOCK\n", "slot < BLOCK - (first > 40)\n"))
    right = edit_of(lab, case, "first % BLOCK", "first // BLOCK")
    assert repair_check.is_right(lab, case, right)
    assert find_claim(lab, case, [right]) is None


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("was_right", [True, False])
def test_a_fault_of_another_mask_refutes_no_edit(mask, was_right):
    """The output is wrong with the edit; only of the same mask, or of a right output, that is its fault."""
    edit, numbers = SimpleNamespace(key="edit"), torch.zeros(2, 3)
    runs = {None: (was_right, numbers), "edit": (False, numbers + 1)}
    proof = Proof(case=1, mask=mask, has_slots=False)
    proof.runs = {("nan", key): ran for key, ran in runs.items()}
    is_refuted = repair_check._is_refuted(edit, proof, Proof(case=0, mask="causal"))
    assert is_refuted == (was_right or mask == "causal")


@pytest.mark.parametrize(
    ("old", "new", "wrong_text", "good", "after"),
    [
        # right with one KV head
        ("head // GROUP) *", "head % GROUP) *", "head % GROUP", "head // GROUP", "(head * 0)"),
        # right without a window
        ("if WINDOW:", "if WINDOW >= 0:", "WINDOW >= 0", "WINDOW > 0", "(WINDOW < 0)"),
    ],
    ids=["one KV head", "a branch that is never taken"],
)
@pytest.mark.quick("a branch that is never taken")
def test_an_edit_that_hides_behind_a_feature_or_a_size_is_no_claim(
    tmp_path, monkeypatch, old, new, wrong_text, good, after, lab
):
    case, _ = planted(tmp_path, old, new)
    right = edit_of(lab, case, wrong_text, good)
    wrong = dataclasses.replace(right, edit=dataclasses.replace(right.edit, after=after))
    monkeypatch.setattr(repair_check, "varied_cases", lambda case: [])
    hidden = find_claim(
        lab, case, [wrong]
    )  # a test that is never true is no claim, whatever the cases
    assert hidden is None if "WINDOW" in after else hidden.repair is wrong
    # other heads, then a window
    monkeypatch.setattr(repair_check, "varied_cases", lambda case: islice(varied_cases(case), 5))
    claim = find_claim(lab, case, [wrong, right])
    assert (claim.repair, claim.is_stated, claim.others) == (right, True, ())


@pytest.mark.parametrize("is_all", [True, False])
def test_an_edit_of_a_test_that_leaves_a_feature_wrong_is_no_claim(
    tmp_path, monkeypatch, is_all, lab
):
    """It switches the branch off where the feature is off, and the fault may be in the branch."""
    monkeypatch.setattr(repair_check, "varied_cases", lambda case: islice(varied_cases(case), 5))
    case, _ = planted(tmp_path, "if WINDOW:", "if WINDOW >= 0:")
    if not is_all:
        file = tmp_path / "kernel.py"
        file.write_text(file.read_text().replace("slot < BLOCK\n", "slot < BLOCK - (WINDOW > 0)\n"))
    right = edit_of(lab, case, "WINDOW >= 0", "WINDOW > 0")
    assert (find_claim(lab, case, [right]) is not None) == is_all


def test_a_further_case_that_loops_is_left_out(tmp_path, monkeypatch):
    """The kernel ends for the case, and loops for ever, without any access, for long sequences."""
    module = sys.modules[diagnose.__module__]
    monkeypatch.setattr(module, "_LEAST_RERUN_S", 0.3)
    monkeypatch.setattr(module, "_RERUN_SLACK", 0.3)
    case, _ = planted(tmp_path, "first // BLOCK).to", "first % BLOCK).to")
    file = tmp_path / "kernel.py"
    loop = "    while end > 30:\n        pass\n    mixed ="
    file.write_text(file.read_text().replace("    mixed =", loop, 1))
    found = diagnose(case, lab=Lab(device="cpu"), limit=None)
    assert found.wrong_rows == 2


def test_an_edit_that_ends_its_process_is_left_out(lab, case):
    """The edited kernels run in a copy of this process."""
    right = edit_of(lab, case, "first % BLOCK", "first // BLOCK")
    edit = dataclasses.replace(right.edit, after="(__import__('os')._exit(3))")
    assert find_claim(lab, case, [dataclasses.replace(right, edit=edit), right]).repair is right


def test_what_a_copy_learns_of_a_proof_comes_back(monkeypatch):
    """Also how long a run takes, which limits those with an edit."""

    class Known(Proof):
        def run(self, slots, probe):
            return True, torch.zeros(1, 1)

    monkeypatch.setattr(repair_check, "cores", lambda: 2)
    proofs = [Known(case=case) for case in range(4)]
    asked = list(repair_check._asked(proofs, lambda one: one.is_about_numbers))
    assert asked == proofs
    assert all(one.runs.keys() == {("garbage", None)} and one.seconds < 1 for one in proofs)


def test_varied_cases_have_a_sequence_as_long_as_that_of_the_case():
    """Else they may not show the fault at all, and refute no edit: a tile has up to 128 rows."""
    long = SMALL.replace(query_lens=(2, 258), ctx_lens=(20, 0), num_blocks=None)
    for case, most in ((long, 140), (SMALL, 67)):
        found = [max(one.lengths.seq_lens) for one in varied_cases(case)]
        assert set(found) == {most}


def test_an_edit_that_adds_a_constant_is_not_named(lab, case):
    """The stride of the elements of a row is 1 in all calls, so no call shows what it does in the edit."""
    right = edit_of(lab, case, "first % BLOCK", "first // BLOCK")
    edit = dataclasses.replace(right.edit, after="(first // BLOCK * out_dim)")
    claim = find_claim(lab, case, [dataclasses.replace(right, edit=edit)])
    assert (claim.is_stated, claim.line) == (False, LINE)
    what = "with another value of `first % BLOCK` the output is right"
    assert f"line {LINE}: {what}" in claim.text
    assert "out_dim" not in claim.text
    assert find_claim(lab, case, [claim.repair, right]).repair is right


def test_an_edit_needs_ten_further_cases(monkeypatch, lab, case):
    """Cases like those that show the fault are added until there are ten, or one refutes the edit."""
    monkeypatch.setattr(repair_check, "_FEWEST", 10)
    right = edit_of(lab, case, "first % BLOCK", "first // BLOCK")
    refuting = case.replace(query_lens=(1,), ctx_lens=(50,), num_blocks=6, seed=4)
    similar = seeded(case)
    confirm_in(monkeypatch, [decode(case)], similar=similar[:8])
    assert find_claim(lab, case, [right]) is None
    monkeypatch.setattr(repair_check, "similar_cases", lambda _: similar)
    assert find_claim(lab, case, [right]).cases == 10
    limited = edit_of(lab, case, "first % BLOCK", "(first // BLOCK) % 3")  # blocks 0 to 2 are right
    assert find_claim(lab, case, [limited]).cases == 10
    monkeypatch.setattr(repair_check, "similar_cases", lambda _: [refuting, *similar])
    assert find_claim(lab, case, [limited]) is None


def test_an_edit_that_holds_like_one_of_its_operands_states_its_line_alone(monkeypatch, lab, case):
    """The sum is right, and so is its first operand: the cases show the place, not the edit."""
    loose = edit_of(lab, case, "first % BLOCK", "(first // BLOCK + 0 * BLOCK)")
    right = edit_of(lab, case, "first % BLOCK", "first // BLOCK")
    confirm_in(monkeypatch, [case.replace(seed=3)], similar=seeded(case))
    assert find_claim(lab, case, [right]).is_stated
    assert not find_claim(lab, case, [loose]).is_stated


def test_an_edit_that_reads_outside_of_all_tensors_is_no_claim(tmp_path, monkeypatch, lab):
    """Under the interpreter such a read returns 0, on a GPU whatever is there."""
    mask = "value + at, mask=both"
    case, _ = planted(tmp_path, mask, "value + at, mask=(DIM > d)[None, :]")
    right = edit_of(lab, case, "(DIM > d)[None, :]", "both")
    outside = edit_of(lab, case, "value + at", "value + tl.where(both, at, 1 << 42)")
    confirm_in(monkeypatch, [case.replace(seed=3)], similar=seeded(case))
    assert find_claim(lab, case, [right]).repair is right
    assert find_claim(lab, case, [outside]) is None


def test_an_edit_that_removes_a_mask_is_no_claim(tmp_path, monkeypatch, lab):
    """It hides that the mask is wrong, and reads slots without a token, which the kernel does not."""
    mask = "value + at, mask=both"
    case, _ = planted(tmp_path, mask, "value + at, mask=both & (slot < end - first)[:, None]")
    confirm_in(monkeypatch, [case.replace(seed=3)])
    for new, is_claim in (("both", True), ("(DIM > d)[None, :]", False)):
        edit = edit_of(lab, case, "both & (slot < end - first)[:, None]", new)
        assert (find_claim(lab, case, [edit]) is not None) == is_claim


def edit_of(lab: Lab, case: Case, before: str, after: str) -> Repair:
    """Return the edit of the first place of an expression of the kernel of a Case, which must be wrong."""
    with probing(Probe(records=True)) as probe:
        assert lab.run(case).status == "mismatch"
    kernel = kernel_text(probe.launches[0].function, (), ())
    return edit_at(kernel, kernel.text.index(before), before, after)


def edit_at(kernel: KernelText, start: int, before: str, after: str) -> Repair:
    row, end = kernel.text[:start].count("\n") + 1, start + len(before)
    edit = Edit(line=row, statement=row, start=start, end=end, before=before, after=after, cost=1)
    return Repair(kernel=kernel, text=kernel.text, edit=edit, share=1.0)


def test_a_factor_in_a_product_with_an_argument_that_is_1_is_not_named(tmp_path, monkeypatch, lab):
    """The stride of the elements is 1 in all calls: the other stride must stand in its place."""
    right = "place = query + row * query_row + head * query_head"
    case, line = planted(tmp_path, right, "place = query + row * query_row + head * query_dim")
    case = case.replace(num_heads=4, num_queries_per_kv=2)
    added = edit_of(lab, case, "head * query_dim", "(head * query_dim * query_head)")
    within = edit_of(lab, case, "query_dim + d", "query_dim * query_head + d")
    replaced = edit_of(lab, case, "head * query_dim", "head * query_head")
    confirm_in(monkeypatch, [decode(case, head_size=32)])
    for repair in (added, within):
        claim = find_claim(lab, case, [repair])
        assert (claim.is_stated, claim.line) == (False, line)
    claim = find_claim(lab, case, [added, replaced])
    assert (claim.repair, claim.is_stated) == (replaced, True)


@pytest.mark.parametrize(
    ("right", "wrong", "is_stated"),
    [
        ("d * out_dim", "d * query_row", False),
        ("row * out_row", "row * out_row * 2", True),
    ],
)
def test_a_factor_that_is_left_out_may_stand_for_an_unused_argument(
    tmp_path, monkeypatch, right, wrong, is_stated, lab
):
    """An argument that the kernel does not use, and that is 1 in all calls, may be the right factor."""
    place = "place = out + row * out_row + head * out_head + d * out_dim"
    case, line = planted(tmp_path, place, place.replace(right, wrong))
    other = case.replace(query_lens=(2,), ctx_lens=(30,), head_size=32, seed=3)
    confirm_in(monkeypatch, [other])
    left = edit_of(lab, case, wrong, wrong.rpartition(" * ")[0])
    claim = find_claim(lab, case, [left])
    assert (claim.is_stated, claim.line) == (is_stated, line)


@pytest.mark.parametrize("is_stated", [False, True])
def test_an_edit_may_stand_for_an_unused_stride(tmp_path, monkeypatch, is_stated, lab):
    """A number stands for the stride of the table, unless a call has another stride."""
    used = "tl.load(seq + row) * table_stride"
    case, line = planted(tmp_path, used, "tl.load(seq + row)")
    case = case.replace(query_lens=(1, 1), ctx_lens=(20, 20), num_blocks=None, max_blocks_per_seq=2)
    others = [case.replace(seed=seed) for seed in (3, 4)]
    if is_stated:
        others.append(case.replace(query_lens=(1,), ctx_lens=(40,), max_blocks_per_seq=3))
    confirm_in(monkeypatch, others, similar=seeded(case))
    doubled = edit_of(lab, case, "tl.load(seq + row)", "tl.load(seq + row) * 2")
    claim = find_claim(lab, case, [doubled])
    assert (claim.is_stated, claim.line) == (is_stated, line)


def test_an_edit_that_removes_a_running_maximum_needs_large_scores(tmp_path, monkeypatch, lab):
    """The weights of a tile ignore earlier maxima. So may the new maximum, until an exponential overflows."""
    case, _ = planted(
        tmp_path, "tl.exp(scores - new)", "tl.exp(scores - tl.maximum(tl.max(scores, 0), -1e30))"
    )
    confirm_in(monkeypatch, [decode(case)])
    before = "tl.maximum(largest, tl.max(scores, 0))"
    unwrapped = edit_of(lab, case, before, "tl.max(scores, 0)")
    assert find_claim(lab, case, [unwrapped]) is None
    sound = edit_of(lab, case, "tl.maximum(tl.max(scores, 0), -1e30)", "new")
    assert find_claim(lab, case, [sound]).is_stated
    monkeypatch.setattr(repair_check, "large_score_cases", lambda _: [])
    assert find_claim(lab, case, [unwrapped]) is None


def test_a_floor_of_a_maximum_that_hides_nan_is_no_claim(tmp_path, monkeypatch, lab):
    """In a tile in which a row sees no key, -inf - -inf is NaN, until an argument that is 1 is the least
    maximum. That says nothing about the line of the maximum."""
    floored = "tl.maximum(tl.maximum(largest, tl.max(scores, 0)), -1e30)"
    case, _ = planted(tmp_path, floored, "tl.maximum(largest * 1, tl.max(scores, 0))")
    case = case.replace(query_lens=(3,), ctx_lens=(70,), sliding_window=9, num_blocks=None)
    other = case.replace(query_lens=(1,), ctx_lens=(90,), seed=3)
    confirm_in(monkeypatch, [other])
    floor = edit_of(lab, case, "largest * 1", "out_dim")
    assert repair_check.is_right(lab, case, floor)
    assert find_claim(lab, case, [floor]) is None


@pytest.mark.parametrize("reads_freed", [False, True])
def test_an_edit_that_makes_a_mask_constant_is_not_named(tmp_path, monkeypatch, reads_freed, lab):
    """Without the mask of the values, weights of 0 hide them, but not NaN in blocks that the window freed."""
    load = "        v = tl.load(value + at, mask=both, other=0.0).to(tl.float32)\n"
    own = load.replace("both", "((pos <= end)[:, None] & (d < DIM)[None, :])")
    masked = (own if reads_freed else load) + (
        "        if WINDOW:\n"
        "            near = (pos > end - WINDOW) & (pos < end)\n"
        "            v = tl.where(near[:, None], v, 0.0)\n"
    )
    case, line = planted(tmp_path, load, masked)
    case = case.replace(sliding_window=9)
    freed = case.replace(query_lens=(1,), ctx_lens=(40,), num_blocks=4, freed="empty")
    before = "(pos > end - WINDOW) & (pos < end)"
    constant = edit_of(lab, case, before, "((pos > end - WINDOW) | (pos < end))")
    right = edit_of(lab, case, before, "(pos > end - WINDOW)")
    confirm_in(monkeypatch, [decode(case)], varied=[freed])
    claim = find_claim(lab, case, [constant])
    if reads_freed:
        assert claim is None
    else:
        assert (claim.is_stated, claim.line) == (False, line + 2)
    claim = find_claim(lab, case, [constant, right])
    assert (claim.repair, claim.is_stated, claim.others) == (right, True, ())


def test_an_edit_that_leaves_out_the_branch_with_the_fault_is_no_claim(tmp_path, lab):
    """The branch skips tiles before the window: without it, the output is right, too."""
    loop = "    for first in range(0, end + 1, BLOCK):\n"
    pruned = (
        "    begin = 0\n"
        "    if WINDOW > 0:\n"
        "        begin = tl.maximum(0, (end - WINDOW + 1) // BLOCK + 1) * BLOCK\n"
        + loop.replace("range(0", "range(begin")
    )
    case, _ = planted(tmp_path, loop, pruned)
    case = case.replace(sliding_window=9)
    switch = edit_of(lab, case, "WINDOW > 0", "WINDOW < 0")
    with probing(Probe(texts=switch.texts())):
        assert lab.run(case).status == "match"
    assert find_claim(lab, case, [switch]) is None


def test_a_test_that_is_right_gives_the_branch_with_the_fault(tmp_path, monkeypatch, lab):
    """The branch is wrong with 16 elements and harmless with more: the opposite test is right everywhere."""
    store = "    place = out + row * out_row"
    branch = "    if DIM <= 16:\n        mixed = tl.minimum(mixed, (DIM - 16) * 1000.0)\n"
    case, line = planted(tmp_path, store, branch + store)
    confirm_in(
        monkeypatch, list(islice(further_cases(case), 3)), varied=[case.replace(head_size=32)]
    )
    claim = find_claim(lab, case, [edit_of(lab, case, "DIM <= 16", "DIM > 16")])
    assert (claim.line, claim.is_stated) == (line, True)
    assert f"with the branch in line {line + 1} never taken the output is right" in claim.text


def test_an_edit_that_makes_a_loop_longer_is_a_claim_about_the_loop(tmp_path, monkeypatch, lab):
    """The end of the loop is wrong in another line. Masks hide what a longer loop adds."""
    loop = "    for first in range(0, end + 1, BLOCK):\n"
    short = "    last = end // BLOCK * BLOCK\n" + loop.replace("end + 1", "last")
    case, line = planted(tmp_path, loop, short)
    confirm_in(monkeypatch, [decode(case)])
    at_its_line = edit_of(lab, case, "end // BLOCK * BLOCK", "(end + 1)")
    assert find_claim(lab, case, [at_its_line]).repair is at_its_line
    bounds = edit_of(lab, case, "last, BLOCK", "")
    fields = {"end": bounds.edit.start + len("last"), "before": "last"}
    for after in ("(2 * last)", "(last + BLOCK)", "(end + 1)"):
        repair = bounds.having(dataclasses.replace(bounds.edit, after=after, **fields))
        claim = find_claim(lab, case, [repair])
        assert (claim.line, claim.repair.change) == (line + 1, TWICE), after
        assert find_claim(lab, case, [repair, at_its_line]).repair is at_its_line


def test_a_number_from_which_the_end_of_a_loop_is_computed_is_a_claim_about_the_loop(
    tmp_path, monkeypatch, lab
):
    """The end is wrong in the line after that of the number, which may be any larger one."""
    loop = "    for first in range(0, end + 1, BLOCK):\n"
    short = (
        "    is_any = tl.where(end >= 0, 1, 0)\n    last = is_any * ((end + BLOCK) // BLOCK * 8)\n"
        + loop.replace("end + 1", "last")
    )
    case, line = planted(tmp_path, loop, short)
    confirm_in(monkeypatch, [decode(case)])
    number = edit_of(lab, case, "1, 0)\n    last", "2, 0)\n    last")
    fields = {"end": number.edit.start + 1, "before": "1", "after": "(2)"}
    number = number.having(dataclasses.replace(number.edit, **fields))
    claim = find_claim(lab, case, [number])
    assert (claim.line, claim.is_stated, claim.repair.change) == (line + 2, True, TWICE)
    at_its_line = edit_of(lab, case, "BLOCK * 8", "BLOCK * BLOCK")
    assert find_claim(lab, case, [number, at_its_line]).repair is at_its_line


@pytest.mark.parametrize(("test", "is_claim"), [("WINDOW >= 0", False), ("True", True)])
def test_an_edit_in_a_branch_that_may_not_run_is_no_claim(
    tmp_path, monkeypatch, test, is_claim, lab
):
    """Without a window no tile must be skipped: the statement works if it skips none, or is left out.

    If nothing else assigns the number, it cannot be left out.
    """
    loop = "    for first in range(0, end + 1, BLOCK):\n"
    pruned = (
        ("" if is_claim else "    begin = 0\n")
        + f"    if {test}:\n"
        + "        begin = tl.maximum(0, (end - WINDOW + 1) // BLOCK) * BLOCK\n"
        + loop.replace("range(0", "range(begin")
    )
    case, _ = planted(tmp_path, loop, pruned)
    confirm_in(monkeypatch, [decode(case)])
    none = edit_of(lab, case, "(end - WINDOW + 1) // BLOCK", "0")
    claim = find_claim(lab, case, [none])
    assert (claim is not None) == is_claim


@needs_triton
@pytest.mark.releases
def test_an_edit_holds_for_each_platform_for_which_the_source_is_loaded(tmp_path):
    lab = planted_release(tmp_path, MERGE.spec.module, "s_lse - max_lse", "s_lse + max_lse")
    case = MERGE.replace(op_argument="none")
    with probing(Probe(records=True)) as probe:
        assert lab.run(case).status == "mismatch"
    function = probe.launches[0].function
    texts = {place_of(function): text_of(function).replace("s_lse + max_lse", "s_lse - max_lse")}
    for platform in ("sm_90", "sm_80"):
        with probing(Probe(texts=texts)):
            assert lab.run(case.replace(platform=platform)).status == "match", platform


def test_varied_cases_vary_what_an_edit_could_hide_behind():
    cases = list(varied_cases(MERGE.replace(op="unified_attention", op_argument="none")))
    assert {case.num_heads // case.num_queries_per_kv for case in cases} >= {1, 2, 3}
    for name in ("softcap", "sliding_window", "alibi", "sinks", "dtype", "block_size", "head_size"):
        assert len({getattr(case, name) for case in cases}) > 1, name
    assert {case.is_fp8 for case in cases} == {True, False}
    assert any(case.sliding_window and freed_blocks(case)[0] for case in cases)
    sides = {(case.mask, bool(case.sliding_window)) for case in cases}
    assert {("causal", True), ("bidirectional", True)} < sides
    assert all(max(case.lengths.query_lens) > 1 for case in cases)
    # In a block of rows from 32 on, some rows see no key of the tile before it, which others do.
    assert any(
        new == length and new - 32 > case.sliding_window > 1
        for case in cases
        for new, length in zip(case.lengths.query_lens, case.lengths.seq_lens, strict=True)
    )


@pytest.mark.parametrize(
    "stronger",
    [
        {"leak": LeakClaim(cases=2)},
        {"accesses": AccessClaim(facts=("no kernel writes some rows of the output",), cases=2)},
        {"cause": NEVER, "explanations": [NEVER]},
    ],
    ids=["leak", "unwritten", "name"],
)
def test_a_repair_displaces_no_stronger_statement(monkeypatch, stronger):
    claim = RepairClaim(repair=REPAIR, source="", cases=2)
    monkeypatch.setattr(repair_check, "find_claim", lambda *_: claim)
    before = Diagnosis(status="described", wrong_rows=1, **stronger)
    if "cause" in stronger:
        before = dataclasses.replace(before, status="explained")
    found = with_repair(Lab(), SMALL, before, [REPAIR])
    assert found.sentences()[0] == f"{before.sentences()[0]} [k.py, line 7]"
    assert claim.text in found.sentences()
    assert found.withdrawn == ()


def test_an_op_argument_keeps_the_output_buffer_that_it_asks_for():
    assert with_contents(SMALL, "nan").output_init == "recycled"
    case = Case(op="context_attention_fwd", backend="vllm", output_init="zeros")
    case = case.replace(op_argument="skip_decode")
    assert with_contents(case, "nan").output_init == "zeros"


def test_an_edit_that_changes_no_verdict_is_no_claim(monkeypatch, lab, case):
    """The further case is right without the edit."""
    short = case.replace(query_lens=(1,), ctx_lens=(3,))
    confirm_in(monkeypatch, [short])
    assert lab.run(short).status == "match"
    right = edit_of(lab, case, "first % BLOCK", "first // BLOCK")
    assert repair_check.is_right(lab, case, right)
    assert find_claim(lab, case, [right]) is None


@needs_triton
@pytest.mark.releases
def test_a_wrong_log_sum_exp_is_described_by_its_repair(tmp_path):
    lab = planted_release(tmp_path, MERGE.spec.module, *LSE)
    found = diagnose(MERGE, lab=lab, propose=False, defects=(), limit=Limit(edits=150))
    assert (found.status, found.wrong_rows, found.is_by_repair) == ("described", 0, True)
    assert found.side_errors
    assert is_line_of(found.repair, LSE)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("more", [0, 3])
def test_a_log_sum_exp_stored_with_other_heads_is_no_target_of_edits(monkeypatch, more, is_turned):
    """The right numbers of the others are not known."""
    monkeypatch.setattr(trials, "Replay", lambda launches, shape, stored: None)
    case, lab = hostile(op="decode_attention_fwd", query_lens=(1, 1), ctx_lens=(20, 9)), Lab()
    expected = lab.expected_lse(case)[0]
    rows, heads = expected.shape
    stored = torch.zeros((heads + more, rows) if is_turned else (rows, heads + more))
    lse = (stored.T if is_turned else stored)[:, :heads]
    lse.copy_(expected)
    launch = SimpleNamespace(arguments={"lse": stored})
    target = trials._lse(lab, case, SimpleNamespace(lse=lse, side_outputs=()), [launch])
    assert (target is None) == (more > 0)
    assert target is None or bool(target.right.all())


@needs_triton
@pytest.mark.releases
def test_a_case_with_an_op_argument_has_a_repair(tmp_path):
    lab = planted_release(tmp_path, MERGE.spec.module, *COPY)
    claim = find_claim(lab, MERGE, locate_lines(lab, MERGE, None, Limit(edits=150)).repairs)
    assert is_line_of(claim, COPY)


def test_a_repair_of_one_of_two_planted_places_is_a_part_of_the_fault(tmp_path, monkeypatch):
    """The branch for long rows has the same fault; an edit of the other leaves these rows as they are."""
    monkeypatch.syspath_prepend(TOOLS)
    from fault_verification import judged_lines, repair_verdict

    lab = Lab(device="cpu")
    block = (
        "block = tl.load(table + tl.load(seq + row) * table_stride + first // BLOCK).to(tl.int64)"
    )
    wrong = block.replace("//", "%")
    branches = f"if end > 30:\n            {wrong}\n        else:\n            {wrong}"
    case, line = planted(tmp_path, block, branches)
    long = case.replace(query_lens=(1, 1), ctx_lens=(20, 40), num_blocks=6)
    with probing(Probe(records=True)) as probe:
        assert lab.run(case).status == "mismatch"
    kernel = kernel_text(probe.launches[0].function, (), ())
    first, last = kernel.text.index("first % BLOCK"), kernel.text.rindex("first % BLOCK")
    assert first < last

    def edited(at: int, after: str) -> Repair:
        return edit_at(kernel, at, "first % BLOCK", after)

    def claim_of(at: int, after: str) -> RepairClaim:
        return RepairClaim(repair=edited(at, after), source="", cases=1)

    sound = [
        (one, (lab.run(one.replace(backend=f"{EXAMPLE}:my_attention")).output.clone(), None, None))
        for one in (case, long)
    ]

    def verdict(claim: RepairClaim, planted_lines: set[int], count: int = 2) -> str:
        return repair_verdict(lab, claim, sound[:count], lambda _, at: at in planted_lines)

    lines = {line + 1, line + 3}
    assert verdict(claim_of(last, "first // BLOCK"), lines) == "a part of the fault"
    assert verdict(claim_of(last, "first // BLOCK"), lines, 1) == "the fault"
    assert verdict(claim_of(last, "first // BLOCK"), set()) == "misleading"
    assert verdict(claim_of(last, "first * 0"), lines, 1) == "misleading"

    right, all_long = edited(last, "first // BLOCK"), long.replace(query_lens=(1,), ctx_lens=(40,))
    confirm_in(monkeypatch, [case.replace(seed=3), all_long], similar=seeded(case))
    found = find_claim(lab, case, [right])
    assert (found.cases, found.untouched) == (3, 1)
    assert found.text.endswith(
        "in 3 further cases; in 1 other case it stays wrong, without a change"
    )
    assert find_claim(lab, case, [edited(last, "first * 0")]) is None

    part = claim_of(last, "first // BLOCK")
    status = {"status": "explained", "cause": NEVER, "explanations": [NEVER]}
    named = Diagnosis(wrong_rows=1, repair=part, **status)
    judged = judged_lines(lab, lab.backend(case), case, named, sound, lambda _, at: at in lines)
    assert {"sentence": part.text, "verdict": "a part of the fault"} in judged


def test_a_name_that_gives_the_fresh_outputs_up_to_rounding_is_right(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    from fault_verification import _fits

    verdicts = ("explains", "less likely", "excluded by value")
    some = [dataclasses.replace(NEVER, verdict=one) for one in verdicts]
    assert [_fits(one, in_all_rows=True) for one in some] == [True, True, False]
    narrow = dataclasses.replace(some[0], scope=Scope(rows="sequences", sequences=(0,)))
    assert [_fits(narrow, in_all_rows=one) for one in (True, False)] == [False, True]


def is_line_of(claim: RepairClaim, fault: tuple[str, str]) -> bool:
    """Answer whether a repair is in the line of a planted fault."""
    file = Path(claim.file)
    assert file.name == "triton_merge_attn_states.py"
    return file.read_text().splitlines()[claim.line - 1].strip() == fault[1].strip()
