"""What a diagnosis finds, on what evidence, and when it finds no cause."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fault_injection import correct_run, plant
from helpers.cases import hostile
from helpers.claims import candidate

from attnlab.case.case import Case
from attnlab.case.flags import case_of
from attnlab.cli.main import make_parser
from attnlab.defects import DEFECTS
from attnlab.diagnosis import refinement
from attnlab.diagnosis.candidates import Confirmation, Scope, is_by_chance
from attnlab.diagnosis.decision import select_cause
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.reruns import find_dependence
from attnlab.lab.lab import Lab
from attnlab.show.sheets import plain
from attnlab.tensors.cache import make_batch, make_cache
from attnlab.tensors.case_call import make_output


def test_a_correct_run_has_nothing_wrong():
    diagnosis = diagnose(hostile())
    assert diagnosis.status == "nothing wrong"
    assert diagnosis.cause is None
    assert diagnosis.candidates == []
    assert diagnosis.place is None
    assert len(diagnosis.sentences()) == 1


def count_calls(monkeypatch, function) -> list[object]:
    """Return a list that grows by one with each call of a function, in whatever module it is used."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("attnlab.") and getattr(module, function.__name__, None) is function:
            monkeypatch.setattr(module, function.__name__, counted)
    return calls


@contextmanager
def few_cases(monkeypatch) -> Iterator[None]:
    """Assert that an explained case builds one batch, one cache for each content of the unwritten slots,
    which the reruns need, and the further cases, in which the explanation must hold."""
    batches, caches = count_calls(monkeypatch, make_batch), count_calls(monkeypatch, make_cache)
    yield
    assert len(batches) <= 9
    assert len(caches) <= 12  # one may be made again: the lab keeps two


@pytest.mark.parametrize(
    ("output", "empty"), [("recycled", "zeros"), ("nan", "garbage"), ("zeros", "nan")]
)
@pytest.mark.quick("recycled-zeros")
def test_query_start_loc_is_found(monkeypatch, output, empty):
    """One cause for five unwritten rows and one computed from another sequence."""
    with few_cases(monkeypatch):
        diagnosis = diagnose(
            hostile(stage="int32_before_cumsum", output_init=output, empty_slots=empty)
        )
    assert diagnosis.status == "explained"
    assert diagnosis.distinction is None
    assert diagnosis.cause.name == "query_start_loc_as_int32"
    assert diagnosis.cause.linked == ("index_dtype",)
    assert diagnosis.unwritten == [31, 49, 90, 91, 95]
    assert diagnosis.unwritten_by == "reruns"
    if empty != "zeros":
        assert diagnosis.slot_dependent == [0]


@pytest.mark.parametrize(
    ("platform", "empty"), [("gfx942", "zeros"), ("sm_90", "nan"), ("gfx942", "garbage")]
)
@pytest.mark.quick("sm_90-nan")
def test_the_missing_token_is_found(monkeypatch, platform, empty):
    """Reruns find the rows that read the unwritten slot."""
    case = hostile(stage="cast_after_cumsum", empty_slots=empty, platform=platform)
    with few_cases(monkeypatch):
        diagnosis = diagnose(case)
    assert diagnosis.cause.name == "newest_slot_unwritten"
    assert diagnosis.slot_dependent == [0, 31, 49, 90, 91, 95]


@pytest.fixture
def short_xrays(monkeypatch):
    """Do not search for a description of the weights, which takes most of the time."""
    monkeypatch.setattr(refinement, "_XRAY_S", 0.0)


def test_the_missing_token_is_found_below_the_tolerance():
    """The errors are below 1e-4, but above the rounding bound of a decode."""
    fields = {"query_lens": (5, 1), "ctx_lens": (30, 929), "stage": "cast_after_cumsum", "x": 8}
    case = Case(num_heads=4, num_queries_per_kv=4, atol=1e-4, **fields)
    assert Lab().run(case).status == "match"
    diagnosis = diagnose(case)
    assert diagnosis.cause.name == "newest_slot_unwritten"
    assert diagnosis.largest < 1e-5
    assert diagnosis.is_within_tolerance


def test_the_largest_error_is_not_the_largest_in_units_of_its_bound():
    """An error of 0.9 in a row with a sharp bound was stated as the largest, although one is 1."""
    case, lab = hostile(output_init="recycled"), Lab(device="cpu")
    output = lab.output(case).clone()
    output[31, 2, 5] += 1.0
    output[20, 3, 7] += 0.9  # its bound is sharper
    found = diagnose(case, output, lab=lab, propose=False)
    assert found.largest == pytest.approx(1.0, abs=0.01)
    assert (found.place.row, found.place.head) == (31, 2)
    assert (found.place_in_bounds.row, found.place_in_bounds.head) == (20, 3)
    (places,) = (text for text in found.sentences() if "rows are wrong" in text)
    assert "the largest absolute error, 0.9998, is in" in places
    assert "relative to its rounding bound, the largest is" in places
    document = found.to_dict()
    assert (document["place"]["row"], document["place_in_bounds"]["row"]) == (31, 20)


def test_the_missing_token_is_excluded_by_value():
    """At the worst place it predicts an error of about 1e-6; the observed one is of order 1."""
    case = Case(num_heads=16, query_lens=(5, 1), ctx_lens=(30, 929), stage="int32_before_cumsum")
    diagnosis = diagnose(case)
    by_name = {candidate.name: candidate for candidate in diagnosis.candidates}
    token = by_name["newest_slot_zero"]
    assert token.verdict == "excluded by value"
    assert token.predicted < 1e-5 < 0.5 < token.observed
    assert diagnosis.cause.residual == 0


@pytest.mark.usefixtures("short_xrays")
def test_a_default_scale_is_linked_to_its_violation():
    """Up to vLLM 0.11.2 the default scale comes from the number of heads."""
    diagnosis = diagnose(hostile(release="0.11.2", empty_slots="zeros"))
    assert (diagnosis.cause.name, diagnosis.cause.linked) == (
        "scale_by_num_heads",
        ("default_scale",),
    )


def test_bytes_of_another_format_are_found():
    """The cache is in e4m3fn and the platform reads e4m3fnuz."""
    case = hostile(kv_cache_dtype="fp8", cache_format="fp8_e4m3fn", empty_slots="zeros")
    diagnosis = diagnose(case)
    assert diagnosis.cause.name == "read_as_fp8_e4m3fnuz"


def test_the_key_layout_is_found():
    """x = 8 of an FP8 cache is 8 bytes; ROCm's kernel assumes 16."""
    diagnosis = diagnose(hostile(kv_cache_dtype="fp8", x=8, empty_slots="zeros"))
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == ("key_x_of_16_bytes", "decode")
    assert diagnosis.cause.linked == ("key_layout",)


def test_noise_in_one_row_is_unexplained():
    """The place is still reported."""
    case, lab = hostile(), Lab()
    output = lab.output(case)
    output[20] += torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).half()
    diagnosis = diagnose(case, output, lab=lab)
    assert diagnosis.status == "unexplained"
    assert diagnosis.cause is None
    assert diagnosis.place.row == 20
    assert diagnosis.wrong_rows == 1


def test_two_defects_at_once_are_unexplained():
    """A defect that explains only some of the wrong rows is excluded."""
    case, lab = hostile(), Lab()
    problem, output = correct_run(lab, case)
    output = plant(problem, output, DEFECTS["scale_doubled"], "prefill")
    output = plant(problem, output, DEFECTS["kv_head_first"], "decode")
    assert diagnose(case, output, lab=lab).status == "unexplained"


def test_a_defect_in_one_kernel_alone_is_placed():
    """The scope is the rows of that kernel."""
    case, lab = hostile(), Lab()
    problem, output = correct_run(lab, case)
    diagnosis = diagnose(case, plant(problem, output, DEFECTS["scale_doubled"], "prefill"), lab=lab)
    assert (diagnosis.cause.name, diagnosis.cause.scope.rows) == ("scale_doubled", "prefill")


@pytest.mark.parametrize(
    ("op", "empty"), [("unified_attention", "nan"), ("decode_attention_fwd", "garbage")]
)
@pytest.mark.quick("decode_attention_fwd-garbage")
def test_ops_that_take_all_from_the_cache(op, empty):
    """They read every new token from the cache, so every missing one, not only the newest."""
    lens = {"query_lens": (1,) * 12} if op == "decode_attention_fwd" else {}
    assert diagnose(hostile(op=op, **lens)).status == "nothing wrong"
    diagnosis = diagnose(
        hostile(op=op, stage="cast_after_cumsum", empty_slots=empty, **lens), propose=False
    )
    assert diagnosis.cause.name == "newest_slot_unwritten"


def test_heads_and_sequences_that_did_not_run_are_ignored():
    """Their elements may hold anything."""
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
    diagnosis = diagnose(case, output, lab=lab, propose=False)
    assert (diagnosis.place.row, diagnosis.place.head) == (20, 3)


def test_an_ambiguous_output_gets_a_case_that_distinguishes():
    """In a decode, the newest token dropped equals a strict causal mask; in a prefill it does not."""
    case = hostile(query_lens=(1, 1), ctx_lens=(40, 20), empty_slots="garbage")
    lab = Lab()
    planted = DEFECTS["newest_token_dropped"]
    problem, output = correct_run(lab, case)
    diagnosis = diagnose(case, plant(problem, output, planted, "all"), lab=lab)
    assert diagnosis.status == "ambiguous"
    names = {candidate.name for candidate in diagnosis.explanations}
    assert names == {"newest_token_dropped", "causal_minus_one", "context_only"}
    distinction = diagnosis.distinction
    assert distinction.case is not None
    words = shlex.split(str(distinction.command))
    assert words[:2] == ["attnlab", "diagnose"]
    assert case_of(make_parser().parse_args(words[1:])) == distinction.case
    assert diagnosis.to_dict()["distinction"]["run"] == distinction.command
    assert str(distinction.command) in plain(diagnosis)
    problem, output = correct_run(lab, distinction.case)
    again = diagnose(distinction.case, plant(problem, output, planted, "all"), lab=lab)
    remaining = {candidate.name for candidate in again.explanations}
    assert set(distinction.pair) & remaining == {"newest_token_dropped"}


def test_an_ambiguous_case_builds_further_cases(monkeypatch):
    """The counters of :func:`few_cases` do count the search."""
    case, lab = hostile(query_lens=(1, 1), ctx_lens=(40, 20), empty_slots="garbage"), Lab()
    problem, output = correct_run(lab, case)
    wrong = plant(problem, output, DEFECTS["newest_token_dropped"], "all")
    batches = count_calls(monkeypatch, make_batch)
    assert diagnose(case, wrong, lab=lab, propose=False).status == "ambiguous"
    assert len(batches) == 0
    assert diagnose(case, wrong, lab=lab).distinction is not None
    assert len(batches) > 1


def test_a_row_that_writes_what_the_buffer_held_is_not_unwritten():
    """Recycled memory may hold the result; a second run with another buffer decides, for wrong rows alone."""
    case, lab = hostile(output_init="recycled"), Lab()
    before = make_output(case)

    def same_as_before(one):
        output = lab.output(one).clone()
        output[20] = before[20]
        return output

    every = torch.ones(case.lengths.num_tokens, dtype=torch.bool)
    assert (
        find_dependence(same_as_before, case, same_as_before(case), every).unwritten.tolist() == []
    )
    unwritten = hostile(stage="int32_before_cumsum")
    right = torch.zeros(unwritten.lengths.num_tokens, dtype=torch.bool)
    found = find_dependence(lab.output, unwritten, lab.output(unwritten), right)
    assert found.unwritten.tolist() == []


def test_reruns_find_rows_that_depend_on_nan_alone():
    """Up to vLLM 0.11.2, values after the last token are multiplied by 0."""
    case, lab = hostile(release="0.11.2", empty_slots="zeros", sm_scale=0.125), Lab()
    every = torch.ones(case.lengths.num_tokens, dtype=torch.bool)
    dependence = find_dependence(lab.output, case, lab.output(case), every)
    assert len(dependence.on_slots) > 0
    assert len(dependence.on_finite_slots) == 0


def test_a_diagnosis_is_strict_json_and_html():
    """The output is NaN where rows are unwritten; JSON has no NaN."""
    diagnosis = diagnose(hostile(stage="int32_before_cumsum"))
    document = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert document["cause"]["name"] == "query_start_loc_as_int32"
    assert document["cause"]["scope"]["rows"] == "all"
    assert "inf" in [candidate["residual"] for candidate in document["candidates"]]
    assert "query_start_loc_as_int32" in diagnosis._repr_html_()


def test_a_better_fit_may_be_chance():
    """A tenth of the squares remains: not by chance in 100 directions, possible in 5."""

    def confirmation(squares: float, freedom: int) -> Confirmation:
        return Confirmation(candidate=candidate("scale_doubled"), squares=squares, freedom=freedom)

    assert not is_by_chance(confirmation(1.0, 100), confirmation(10.0, 100))
    assert is_by_chance(confirmation(1.0, 5), confirmation(10.0, 5))
    assert is_by_chance(confirmation(1.0, 100), confirmation(1.0, 100))


def test_the_selected_cause_is_linked_and_has_the_widest_scope():
    everywhere = Scope(rows="all", sequences=(0, 1))
    fitted = Scope(rows="sequences", sequences=(1,))
    wide = candidate("scale_doubled", name="wide", scope=everywhere, linked=("index_dtype",))
    narrow = candidate("scale_doubled", name="narrow", scope=fitted, linked=("unwritten_rows",))
    unlinked = candidate("scale_doubled", name="unlinked", scope=everywhere)
    assert select_cause([]) is None
    assert select_cause([unlinked]) is None  # the output shows nothing of it
    shown = dataclasses.replace(unlinked, shown=1)
    assert select_cause([shown]) is shown
    assert select_cause([dataclasses.replace(shown, cases=0)]) is None
    assert select_cause([unlinked, narrow]) is narrow
    assert select_cause([unlinked, narrow, wide]) is wide
    assert select_cause([unlinked, wide, dataclasses.replace(wide, name="other")]) is None
    assert select_cause([unlinked, dataclasses.replace(unlinked, name="other")]) is None
