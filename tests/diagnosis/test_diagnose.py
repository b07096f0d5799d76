"""The diagnosis: what it finds, on what evidence, and where it abstains."""

import dataclasses
import json
import random

import pytest
import torch
from helpers.cases import call_of, hostile

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.cli.bench.diagnosis import bench_diagnose
from attnlab.contracts.dispatch import Target, decide
from attnlab.defects import CATALOGUE
from attnlab.diagnosis.candidates import Candidate, Confirmed, is_by_chance
from attnlab.diagnosis.diagnose import diagnose, diagnose_call
from attnlab.diagnosis.fault_injection import plant, sound_scene
from attnlab.diagnosis.files import diagnose_files, kernels_of
from attnlab.diagnosis.reruns import probe
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall

NAMED = {defect.name: defect for defect in CATALOGUE}


def test_a_sound_run_is_nothing_wrong():
    """Nothing is wrong, nothing is explained, and it says so."""
    told = diagnose(hostile())
    assert told.status == "nothing wrong"
    assert told.cause is None
    assert not told.candidates
    assert told.sentences() == [
        "nothing is wrong: every element is within its kernel's rounding of the right one"
    ]


@pytest.mark.parametrize("output", ["recycled", "nan", "zeros"])
@pytest.mark.parametrize("empty", ["zeros", "nan", "garbage"])
def test_query_start_loc_is_found(output, empty):
    """Read as int32 it leaves five rows unwritten and one computed from another sequence: one cause."""
    told = diagnose(hostile(stage="int32_before_cumsum", output_init=output, empty_slots=empty))
    assert told.status == "explained"
    assert told.cause is not None
    assert told.cause.name == "query_start_loc_as_int32"
    assert told.cause.linked == ("index_dtype",)
    assert told.unwritten == [31, 49, 90, 91, 95]
    assert told.unwritten_by == "two runs with other contents of the buffer"
    if empty != "zeros":
        assert told.by_slots == [0]


@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
@pytest.mark.parametrize("empty", ["zeros", "nan", "garbage"])
def test_the_missing_token_is_found(platform, empty):
    """It is linked to the slot that nobody wrote, and rows that read it are told by runs."""
    told = diagnose(hostile(stage="cast_after_cumsum", empty_slots=empty, platform=platform))
    assert told.cause is not None
    assert told.cause.name == "newest_slot_unwritten"
    assert told.by_slots == [0, 31, 49, 90, 91, 95]


def test_the_missing_token_is_found_below_the_tolerance():
    """With the test's data no element is over 1e-4; the rounding bound of a decode is closer."""
    case = Case(num_heads=16, query_lens=(5, 1), ctx_lens=(30, 929), stage="cast_after_cumsum", x=8)
    assert Lab().run(case).status == "match"
    told = diagnose(case)
    assert told.cause is not None
    assert told.cause.name == "newest_slot_unwritten"
    assert told.largest < 1e-5
    assert "the tolerance of 0.0001 does not see it" in told.sentences()


def test_the_suspects_table_shows_why_the_missing_token_is_out():
    """At the failing place the missing token predicts a millionth; what was seen is of order 1."""
    case = Case(num_heads=16, query_lens=(5, 1), ctx_lens=(30, 929), stage="int32_before_cumsum")
    told = diagnose(case)
    by_name = {candidate.name: candidate for candidate in told.candidates}
    token = by_name["newest_slot_zero"]
    assert token.verdict == "excluded by value"
    assert token.predicted < 1e-5 < 0.5 < token.observed
    assert told.cause is not None
    assert told.cause.residual == 0


def test_a_default_scale_is_linked_to_its_breach():
    """Up to 0.11.2 the scale comes from the number of heads; the violation says so too."""
    told = diagnose(hostile(release="0.11.2", empty_slots="zeros"))
    assert told.cause is not None
    assert (told.cause.name, told.cause.linked) == ("scale_by_num_heads", ("default_scale",))


def test_bytes_of_another_format_are_found():
    """A cache in e4m3fn on a platform that reads e4m3fnuz."""
    case = hostile(kv_cache_dtype="fp8", cache_format="fp8_e4m3fn", empty_slots="zeros")
    told = diagnose(case)
    assert told.cause is not None
    assert told.cause.name == "read_as_fp8_e4m3fnuz"


def test_the_key_layout_is_found():
    """x = 8 of an FP8 cache is 8 bytes, and ROCm's kernel takes it for 16."""
    told = diagnose(hostile(kv_cache_dtype="fp8", x=8, empty_slots="zeros"))
    assert told.cause is not None
    assert (told.cause.name, told.cause.scope) == ("key_x_of_16_bytes", "decode")
    assert told.cause.linked == ("key_layout",)


def test_rows_of_another_origin_are_diagnosed_without_a_run():
    """An output alone: the buffer's known contents tell the unwritten rows, nothing is run again."""
    case = hostile(stage="int32_before_cumsum", output_init="recycled", empty_slots="garbage")
    told = diagnose(case, Lab().output(case))
    assert told.cause is not None
    assert told.cause.name == "query_start_loc_as_int32"
    assert told.unwritten_by == "they hold what the buffer held"
    assert told.by_slots is None


def test_noise_in_one_row_is_unexplained():
    """What no defect predicts is said to be unexplained, with its place."""
    case, lab = hostile(), Lab()
    output = lab.output(case)
    output[20] += torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).half()
    told = diagnose(case, output, lab=lab)
    assert told.status == "unexplained"
    assert told.cause is None
    assert told.place is not None
    assert told.place["row"] == 20
    assert told.wrong_rows == 1


def test_two_defects_at_once_are_unexplained():
    """One defect that explains half is no explanation."""
    case, lab = hostile(), Lab()
    problem, output = sound_scene(lab, case)
    output = plant(problem, output, NAMED["scale_doubled"], "prefill")
    output = plant(problem, output, NAMED["kv_head_first"], "decode")
    assert diagnose(case, output, lab=lab).status == "unexplained"


def test_a_defect_in_one_kernel_alone_is_placed():
    """The scope is the kernel's rows; the others are right."""
    case, lab = hostile(), Lab()
    problem, output = sound_scene(lab, case)
    told = diagnose(case, plant(problem, output, NAMED["scale_doubled"], "prefill"), lab=lab)
    assert told.cause is not None
    assert (told.cause.name, told.cause.scope) == ("scale_doubled", "prefill")


@pytest.mark.parametrize("op", ["unified_attention", "decode_attention_fwd"])
@pytest.mark.parametrize("empty", ["zeros", "garbage", "nan"])
def test_ops_that_take_all_from_the_cache(op, empty):
    """Every new token that the cache lacks is read by them, not the newest alone."""
    lens = {"query_lens": (1,) * 12} if op == "decode_attention_fwd" else {}
    assert diagnose(hostile(op=op, **lens)).status == "nothing wrong"
    told = diagnose(
        hostile(op=op, stage="cast_after_cumsum", empty_slots=empty, **lens), propose=False
    )
    assert told.cause is not None
    assert told.cause.name == "newest_slot_unwritten"


def test_parts_that_did_not_run_are_not_looked_at():
    """Rows of other sequences and heads may hold anything."""
    case = hostile(backend="vllm", kv_head_range=(1, 2), seq_range=(2, 5), output_init="recycled")
    twin = hostile(output_init="recycled")
    output = Lab().call(twin).output
    right = Lab().output(twin)
    output[31:50, 2:4], rows = right[31:50, 2:4], case.query_rows
    output[16:31, 2:4] = right[16:31, 2:4]
    assert rows == range(16, 49)
    lab = Lab(device="cpu")
    assert diagnose(case, output, lab=lab).status == "nothing wrong"
    output[20, 3] *= 2
    told = diagnose(case, output, lab=lab, propose=False)
    assert told.place is not None
    assert (told.place["row"], told.place["head"]) == (20, 3)


def test_a_cache_write_is_no_attention():
    """Its output is a cache; that is told in one line."""
    with pytest.raises(InvalidCase, match="op must be an attention op"):
        diagnose(hostile(op="reshape_and_cache_flash"))


def test_what_is_the_same_here_is_ambiguous_and_a_case_is_proposed():
    """In a decode the newest token dropped is the causal mask made strict; a prefill tells them apart."""
    case = hostile(query_lens=(1, 1), ctx_lens=(40, 20), empty_slots="garbage")
    lab = Lab()
    problem, output = sound_scene(lab, case)
    told = diagnose(case, plant(problem, output, NAMED["newest_token_dropped"], "all"), lab=lab)
    assert told.status == "ambiguous"
    names = {candidate.name for candidate in told.explanations}
    assert names == {"newest_token_dropped", "causal_minus_one", "context_only"}
    assert told.separation is not None
    assert told.separation.case is not None
    apart = told.separation.case
    problem, output = sound_scene(lab, apart)
    again = diagnose(apart, plant(problem, output, NAMED["newest_token_dropped"], "all"), lab=lab)
    left = {candidate.name for candidate in again.explanations}
    assert set(told.separation.pair) & left == {"newest_token_dropped"}


def test_left_out_of_the_catalogue_it_abstains():
    """Without the planted defect nothing is named."""
    case, lab = hostile(empty_slots="garbage"), Lab()
    problem, output = sound_scene(lab, case)
    for name in ("scale_doubled", "kv_head_modulo", "next_slot", "sink_counted"):
        rest = [defect for defect in CATALOGUE if defect.name != name]
        broken = plant(problem, output, NAMED[name], "all")
        assert diagnose(case, broken, lab=lab, catalogue=rest).status == "unexplained"


def test_probes_need_no_theory():
    """Rows that follow the buffer, and rows that follow empty slots, by finite contents and by NaN."""
    case = hostile(stage="int32_before_cumsum", empty_slots="zeros", output_init="zeros")
    lab = Lab()
    told = probe(lab.output, case, lab.output(case))
    assert told.unwritten.tolist() == [31, 49, 90, 91, 95]
    assert told.by_slots.tolist() == told.by_finite_slots.tolist() == [0]
    tail = hostile(release="0.11.2", empty_slots="zeros", sm_scale=0.125)
    told = probe(lab.output, tail, lab.output(tail))
    assert len(told.by_slots) > 0
    assert len(told.by_finite_slots) == 0


def test_a_saved_call_is_diagnosed(tmp_path):
    """A call with the output that a kernel left, from a file: contracts tell who wrote what."""
    case = hostile(stage="int32_before_cumsum", empty_slots="garbage", ctx_lens=(20,) * 12)
    lab = Lab()
    call = dataclasses.replace(lab.call(case), output=lab.output(case))
    path = tmp_path / "call.safetensors"
    call.save(path)
    told = diagnose_files(Case(), lab, None, path)
    assert told.unwritten == [31, 49, 90, 91, 95]
    assert told.unwritten_by == "by the kernels' contracts"
    assert diagnose_files(Case(), lab, None, path).violations


def test_a_saved_call_with_rows_unwritten_and_nothing_else(tmp_path):
    """With the wrong row put right, unwritten rows are all there is to explain."""
    case = hostile(stage="int32_before_cumsum", empty_slots="garbage", output_init="recycled")
    lab = Lab()
    output = lab.output(case)
    output[0] = lab.output(case.replace(stage="sound"))[0]
    call = dataclasses.replace(lab.call(case), output=output)
    told = diagnose_call(call, Target.of(case), decide(case).kernels)
    assert told.status == "explained"
    assert told.cause is not None
    assert told.cause.name == "rows_never_written"
    rest = [defect for defect in CATALOGUE if defect.name != "rows_never_written"]
    blind = diagnose_call(call, Target.of(case), decide(case).kernels, catalogue=rest)
    assert blind.status == "unexplained"


def test_a_call_of_another_defect_is_diagnosed_without_its_case():
    """The scale from the number of heads, found from a call alone."""
    case = hostile(release="0.11.2", empty_slots="zeros")
    call, _ = call_of(case)
    output = Lab().output(case)
    told = diagnose_call(call, Target.of(case), decide(case).kernels, output=output)
    assert told.cause is not None
    assert told.cause.name == "scale_by_num_heads"


def test_kernels_of_a_call_are_those_of_its_case():
    """Dispatch reads the call's own tensors."""
    for changes in ({}, {"platform": "sm_90"}, {"sinks": True}, {"sliding_window": 7}):
        case = hostile(**changes)
        own = Case(platform=case.platform)
        assert kernels_of(own, Lab().call(case)) == decide(case).kernels


def test_a_wrong_output_is_refused():
    """An output of another shape or dtype is told in one line."""
    case = hostile()
    with pytest.raises(InvalidCall, match=r"output must have shape \(98, 6, 64\), got \(3, 2, 1\)"):
        diagnose(case, torch.zeros(3, 2, 1, dtype=torch.float16))
    with pytest.raises(
        InvalidCall, match=r"output must have dtype torch.float16, got torch.float32"
    ):
        diagnose(case, torch.zeros(98, 6, 64))


def test_a_diagnosis_is_json_and_html():
    """NaN and infinity have names, and the table is there."""
    told = diagnose(hostile(stage="int32_before_cumsum"))
    document = json.loads(json.dumps(told.to_dict(), allow_nan=False))
    assert document["cause"]["name"] == "query_start_loc_as_int32"
    assert "query_start_loc_as_int32" in told._repr_html_()


def test_chance_is_weighed():
    """A tenth of the squares left is no chance in a hundred directions, and may be one in five."""

    def one(squares: float, freedom: int) -> Confirmed:
        candidate = Candidate(
            name="x", text="", seen_in=(), verdict="explains", predicted=0, observed=0,
            residual=0, ratio=0, defect=CATALOGUE[0],
        )  # fmt: skip
        return Confirmed(candidate=candidate, squares=squares, freedom=freedom)

    assert not is_by_chance(one(1.0, 100), one(10.0, 100))
    assert is_by_chance(one(1.0, 5), one(10.0, 5))
    assert is_by_chance(one(1.0, 100), one(1.0, 100))


def test_planting_leaves_other_rows_alone():
    """Rows out of scope, and heads that a defect does not change, keep their bits."""
    case, lab = hostile(), Lab()
    problem, output = sound_scene(lab, case)
    broken = plant(problem, output, NAMED["newest_slot_zero"], "all")
    changed = torch.nonzero((broken != output).flatten(1).any(1)).flatten().tolist()
    assert changed == [0, 31, 49, 90, 91, 95]


@pytest.mark.slow
def test_the_benchmark_finds_what_is_planted():
    """A few dozen trials: all that can be told apart are named, nothing is explained falsely."""
    figures = bench_diagnose(trials=25, sound=10, seed=424242)
    assert figures["top_1"] >= 0.98
    assert figures["false_explanations"] == []
    assert figures["without_wrong"] == []
    assert figures["alarms"] == []
    assert sum(sum(row.values()) for row in figures["matrix"].values()) == 25


@pytest.mark.slow
def test_the_benchmark_sees_a_diagnosis_that_guesses(monkeypatch):
    """A diagnosis that always names the first candidate is caught by the same benchmark."""

    def guess(case, output=None, **options):
        told = diagnose(case, output, **options)
        if not told.candidates:
            return told
        candidate = random.Random(case.seed).choice(told.candidates)
        return dataclasses.replace(
            told, cause=candidate, status="explained", explanations=[candidate]
        )

    monkeypatch.setattr("attnlab.cli.bench.diagnosis.diagnose", guess)
    figures = bench_diagnose(trials=10, sound=1, seed=3)
    assert figures["top_1"] < 0.5
    assert figures["false_explanations"]


def test_a_call_is_what_it_was(tmp_path):
    """Diagnosing changes neither the call's cache nor the output that it is given."""
    case, lab = hostile(stage="int32_before_cumsum"), Lab()
    output = lab.output(case)
    call = lab.call(case)
    call.save(tmp_path / "before")
    kept = output.clone()
    diagnose(case, output, lab=lab)
    lab.call(case).save(tmp_path / "after")
    assert output.nan_to_num(9).equal(kept.nan_to_num(9))
    before, after = (KernelCall.load(tmp_path / name) for name in ("before", "after"))
    assert before.key_cache.nan_to_num(9).equal(after.key_cache.nan_to_num(9))
