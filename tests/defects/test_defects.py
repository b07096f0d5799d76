"""Each defect changes the rows that it touches and no others, and predicts what wrong kernels compute."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import pytest
import torch
from fault_injection import correct_run, plant
from helpers.cases import hostile, same_bits

from attnlab import defects
from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.defects import DEFECTS, Defect
from attnlab.defects.masks import BIDIRECTIONAL, BRANCHES
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import find_distinction
from attnlab.kernels import model
from attnlab.lab.lab import Lab
from attnlab.lab.problem import (
    Predicted,
    Problem,
    RowSlice,
    all_rows,
    make_problem,
    sample_rows,
    scores_of,
)
from attnlab.lab.reference import reference
from attnlab.mutation.power import is_equivalent
from attnlab.tensors.call import KernelCall

VARIANTS = {
    "plain": hostile(),
    "context only": hostile(stage="int32_before_cumsum", output_init="recycled"),
    "alibi": hostile(alibi=True),
    "window": hostile(sliding_window=7),
    "freed blocks": hostile(sliding_window=7, freed="empty"),
    "fp8": hostile(kv_cache_dtype="fp8", k_scale=0.5, v_scale=0.25, empty_slots="garbage"),
    "fp8 fn": hostile(kv_cache_dtype="fp8", platform="gfx950", x=8, empty_slots="zeros"),
    "Triton": hostile(platform="sm_90", empty_slots="garbage"),
    "prefill op": hostile(op="context_attention_fwd"),
    "ratio": hostile(num_heads=40, num_queries_per_kv=20),
    "sinks": hostile(sinks=True, empty_slots="garbage"),
    "sinks, segments": hostile(
        sinks=True,
        op="unified_attention",
        query_lens=(1,) * 4,
        ctx_lens=(0, 40, 300, 530),
        empty_slots="zeros",
    ),
    "alibi and sinks": hostile(op="unified_attention", alibi=True, sinks=True),
    "soft cap": hostile(op="unified_attention", softcap=0.5, alibi=True),
    "soft cap and sinks": hostile(op="unified_attention", softcap=0.5, sinks=True),
    "soft cap, overflow": hostile(op="unified_attention", softcap=0.02, empty_slots="zeros"),
}
_SHORT = {"query_lens": (1, 17, 3, 20), "ctx_lens": (15, 0, 54, 40), "num_heads": 2}
VARIANTS |= {
    f"{mask}, window {window}": hostile(
        op="unified_attention", mask=mask, sliding_window=window, **_SHORT
    )
    for mask, window in (
        ("bidirectional", 7),
        ("causal_by_sequence", 0),
        ("ranges", 5),
        ("ranges_in_window", 5),
        ("prefix_and_window", 7),
        ("chunks", 12),
        ("tree", 0),
    )
}
LN_2 = math.log(2)  # added to the logit of a sink, it counts the sink twice
NO_CHANGE = {"alibi_shifted", "accumulation_order", "block_16_bit"}


# The rows of each sequence, with their correct output.
Rows = list[tuple[RowSlice, Predicted]]


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    """Build the problem of each variant."""
    return {name: make_problem(case) for name, case in VARIANTS.items()}


def small(case: Case) -> Case:
    """Return a Case with heads of 16 elements, and five of the twelve sequences of a hostile one."""
    pairs = [*zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)]
    if len(pairs) == 12:
        pairs = [pairs[i] for i in (0, 1, 4, 8, 9)]
    query_lens, ctx_lens = zip(*pairs, strict=True)
    changes = {"query_lens": query_lens, "ctx_lens": ctx_lens, "num_blocks": None}
    return case.replace(head_size=16, **changes)


@pytest.fixture(scope="module")
def small_problems() -> list[tuple[Problem, Rows]]:
    """Build the problem of each variant with heads of 16 elements and few sequences, and its correct rows."""
    found = [make_problem(small(case)) for case in VARIANTS.values()]
    return [(one, [(rows, one.correct(rows)) for rows in all_rows(one)]) for one in found]


@pytest.mark.parametrize("name", VARIANTS)
def test_correct_output_is_the_reference(problems, name):
    """Both with the batch and from the call alone."""
    case, problem = VARIANTS[name], problems[name]
    expected = reference(case, problem.batch)
    from_call = Problem.of_call(problem.call, problem.target, problem.kernels)
    for source in (problem, from_call):
        output = torch.cat([source.correct(rows).output for rows in all_rows(source)])
        assert output.shape == expected.shape
        assert (output - expected).abs().max() < 1e-12


def test_fields_of_the_catalogue_are_well_formed():
    assert len(DEFECTS) >= 45
    for name, defect in DEFECTS.items():
        assert name == defect.name
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert defect.text
        assert not defect.text.endswith(".")
        # Arguments that a caller exchanges: no public report is known.
        assert defect.seen_in or name == "keys_and_values_exchanged"
        assert [t for t in defect.seen_in if not re.fullmatch(r"[\w./-]+ #\d+", t)] == []
        assert defect.touches in ("all", "cached", "decode", "unwritten")


def test_each_family_is_a_table_of_its_own():
    """No defect is lost when the families are collected, and no name occurs twice."""
    families = sorted({defect.family for defect in DEFECTS.values()})
    members = []
    for family in families:
        defined = getattr(defects, family.upper())
        assert {defect.family for defect in defined} == {family}
        members += [defect.name for defect in defined]
    assert sorted(members) == sorted(DEFECTS)


def check_effect(problems: list[tuple[Problem, Rows]], defect: Defect) -> None:
    """Assert that a defect changes some element by more than rounding, and no row that it must not."""
    num_applied = num_changed = 0
    for problem, right in problems:
        if not defect.applies(problem):
            continue
        if defect.name == "alibi_shifted" and problem.call.sinks is not None:
            continue  # softmax with a sink does not cancel the shift
        num_applied += 1
        for row_slice, correct in right:
            wrong = defect.compute(problem, row_slice)
            if not may_touch(problem, defect, row_slice):
                assert same_bits(wrong.output, correct.output)
            changed = (wrong.output - correct.output).abs() > wrong.bound + correct.bound
            num_changed += int((changed | ~wrong.output.isfinite()).sum())
    if defect.name == "block_16_bit":  # needs more blocks than these caches have
        assert num_applied == 0
        return
    assert num_applied > 0
    assert (num_changed > 0) == (defect.name not in NO_CHANGE)


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=lambda defect: defect.name)
def test_a_defect_changes_only_the_rows_that_it_touches(small_problems, defect):
    check_effect(small_problems, defect)


def may_touch(problem: Problem, defect: Defect, row_slice: RowSlice) -> bool:
    """Answer whether a defect may change a sequence, by its ``touches``."""
    if defect.touches == "cached":
        return problem.cached_len(row_slice.seq) > 0
    if defect.touches == "decode":
        return problem.is_decode(row_slice.seq) or row_slice.seq == 0
    return True


@pytest.mark.parametrize(
    "change", [{"touches": "cached"}, {"compute": Problem.correct}], ids=["touches", "no effect"]
)
def test_check_effect_fails_for_a_wrong_defect(small_problems, change):
    with pytest.raises(AssertionError):
        check_effect(small_problems, dataclasses.replace(DEFECTS["scale_doubled"], **change))


def test_block_16_bit_reads_block_65537_as_block_1():
    lens = {"query_lens": (1,), "ctx_lens": (20,), "num_heads": 2, "num_queries_per_kv": 1}
    case = hostile(**lens, head_size=16, block_table=((65537, 1),), empty_slots="zeros")
    problem = make_problem(case)
    defect = DEFECTS["block_16_bit"]
    assert defect.applies(problem)
    row_slice = RowSlice(seq=0, tokens=torch.tensor([0]), heads=torch.arange(2))
    correct_read = problem.cache_read(0)
    truncated = dataclasses.replace(correct_read, block=lambda blocks: blocks & 0xFFFF)
    first = truncated.keys(problem.call, torch.arange(16), torch.arange(2))
    second = correct_read.keys(problem.call, torch.arange(16, 32), torch.arange(2))
    assert first.equal(second)
    difference = defect.compute(problem, row_slice).output - problem.correct(row_slice).output
    assert difference.abs().max() > 0.01


def test_softmax_cancels_a_shift_of_alibi():
    case = hostile(alibi=True)
    assert is_equivalent(case, DEFECTS["alibi_shifted"])
    assert not is_equivalent(case, DEFECTS["alibi_ignored"])
    distinction = find_distinction(case, DEFECTS["alibi_shifted"], DEFECTS["alibi_ignored"])
    assert distinction.case is not None
    assert distinction.gap > 1


def test_sampled_rows_have_the_ends_and_the_extreme_queries():
    problem = make_problem(hostile())
    sample = sample_rows(problem, tokens=3, heads=2, max_seqs=3)
    lengths = {row_slice.seq: problem.query_len(row_slice.seq) for row_slice in sample}
    assert len(sample) == 3
    assert max(lengths.values()) == 40
    assert min(lengths.values()) == 1
    for row_slice in sample:
        assert row_slice.tokens[[0, -1]].tolist() == [0, lengths[row_slice.seq] - 1]
        assert row_slice.heads.tolist() == [0, 1, 5]


def changed(call: KernelCall, **changes: object) -> KernelCall:
    """Return a call with other arguments and an output buffer of its own."""
    return dataclasses.replace(call, output=call.output.clone(), **changes)


def rolled(tensor: torch.Tensor, by: int) -> torch.Tensor:
    return torch.roll(tensor, by, 0)


MUTANTS: dict[str, tuple[dict[str, object], Callable[[KernelCall], dict[str, object]]]] = {
    "scale_doubled": ({}, lambda call: {"sm_scale": 2 * 64**-0.5}),
    "scale_missing": ({}, lambda call: {"sm_scale": 1.0}),
    "scale_by_num_heads": ({}, lambda call: {"sm_scale": 6**-0.5}),
    "table_row_next": ({}, lambda call: {"block_table": rolled(call.block_table, -1)}),
    "table_row_first": (
        {},
        lambda call: {"block_table": call.block_table[:1].expand_as(call.block_table)},
    ),
    "next_block": (
        {},
        lambda call: {"block_table": (call.block_table + 1) % call.key_cache.shape[0]},
    ),
    "alibi_ignored": ({"alibi": True}, lambda call: {"alibi_slopes": None}),
    "alibi_next_head": (
        {"alibi": True},
        lambda call: {"alibi_slopes": rolled(call.alibi_slopes, -1)},  # type: ignore[arg-type]
    ),
    "sink_ignored": ({"sinks": True}, lambda call: {"sinks": None}),
    "sink_counted_twice": ({"sinks": True}, lambda call: {"sinks": call.sinks + LN_2}),
    "sink_first_head": ({"sinks": True}, lambda call: {"sinks": call.sinks[:1].expand(6)}),
    "sink_next_head": (
        {"sinks": True},
        lambda call: {"sinks": rolled(call.sinks, -1)},  # type: ignore[arg-type]
    ),
    "sink_kv_head": (
        {"sinks": True},
        lambda call: {"sinks": call.sinks[:3].repeat_interleave(2)},  # type: ignore[index]
    ),
    "sink_scaled": ({"sinks": True}, lambda call: {"sinks": call.sinks * 64**-0.5}),
    "sink_base_2": ({"sinks": True}, lambda call: {"sinks": call.sinks * LN_2}),
    "softcap_ignored": ({"softcap": 0.5}, lambda call: {"softcap": None}),
    "window_plus_one": ({"sliding_window": 7}, lambda call: {"sliding_window": 8}),
    "window_minus_one": ({"sliding_window": 7}, lambda call: {"sliding_window": 6}),
    "window_ignored": ({"sliding_window": 7}, lambda call: {"sliding_window": 0}),
    "k_scale_ignored": ({"fp8": True}, lambda call: {"k_scale": 1.0}),
    "v_scale_ignored": ({"fp8": True}, lambda call: {"v_scale": 1.0}),
    "scales_swapped": (
        {"fp8": True},
        lambda call: {"k_scale": call.v_scale, "v_scale": call.k_scale},
    ),
    "v_scale_squared": ({"fp8": True}, lambda call: {"v_scale": call.v_scale**2}),
    "read_as_fp8_e5m2": ({"fp8": True}, lambda call: {"kv_cache_dtype": "fp8_e5m2"}),
    "kv_head_next": (
        {},
        lambda call: {
            name: torch.roll(getattr(call, name), -1, 1)
            for name in ("key", "value", "key_cache", "value_cache")
        },
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.quick("table_row_next", "sink_kv_head", "softcap_ignored", "read_as_fp8_e5m2")
def test_a_kernel_with_the_defect_is_diagnosed(name):
    """The models, run with wrong arguments, compute what the defect predicts."""
    fields, mutate = MUTANTS[name]
    fields, platform = dict(fields), ("gfx942", "sm_90")[[*MUTANTS].index(name) % 2]
    if fields.pop("fp8", False):
        fields |= {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 0.3}
    if name == "read_as_fp8_e5m2" or fields.get("sliding_window"):
        platform = "sm_90"
    if fields.get("softcap"):
        fields["op"] = "unified_attention"
    case = hostile(platform=platform, empty_slots="garbage", output_init="recycled", **fields)
    lab = Lab()
    call = changed(lab.call(case), **mutate(lab.call(case)))
    model.run(call, Target.of(case), decide(case).kernels)
    diagnosis = diagnose(case, call.output, lab=lab, propose=False)
    assert name in [candidate.name for candidate in diagnosis.explanations]
    cause = diagnosis.cause.name if diagnosis.cause is not None else diagnosis.status
    assert cause in (name, "ambiguous")


def test_newest_token_dropped_in_the_decode_kernel():
    """A decode kernel with seq_lens one too small; three defects predict the same."""
    case = hostile(
        empty_slots="garbage", output_init="recycled", platform="sm_90", ctx_lens=(20,) * 12
    )
    lab = Lab()
    call = lab.call(case)
    model.run(call, Target.of(case), decide(case).kernels[:1])
    short = dataclasses.replace(call, seq_lens=call.seq_lens - 1)
    model.run(short, Target.of(case), decide(case).kernels[1:])
    diagnosis = diagnose(case, call.output, lab=lab, propose=False)
    names = {candidate.name for candidate in diagnosis.explanations}
    assert names == {"newest_token_dropped", "causal_minus_one", "context_only"}


def test_the_catalogue_applies_to_a_plain_case():
    problem = make_problem(Case(num_heads=4, query_lens=(3, 1), ctx_lens=(4, 6)))
    assert sum(defect.applies(problem) for defect in DEFECTS.values()) > 20


# Defects of masks: each changes an output, and the diagnosis of that output names it.


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
@pytest.mark.quick("causality_of_next_sequence", "ranges_ignored", "prefix_hidden", "tree_ignored")
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
    assert diagnose(case_of(mask, 9), lab=LAB, propose=False).status == "nothing wrong"


def test_an_op_without_a_context_does_not_attend_to_the_context_alone():
    lens = {"query_lens": (5,), "ctx_lens": (0,), "platform": "sm_90"}
    applies = DEFECTS["context_only"].applies
    assert not applies(make_problem(hostile(op="triton_prefill_attention", **lens)))
    assert applies(make_problem(hostile(op="context_attention_fwd", **lens)))


def test_no_defect_of_a_mask_applies_to_causal_attention():
    case = Case(**{**FIELDS, "query_lens": (3, 1), "ctx_lens": (5, 9)}, sliding_window=4)
    problem = make_problem(case)
    assert [one.name for one in (*BIDIRECTIONAL, *BRANCHES) if one.applies(problem)] == []


# Defects of the softmax, scales and loops: each equals a kernel written with the fault, and is named.


LENS = {"query_lens": (1, 40, 1, 18), "ctx_lens": (75, 50, 300, 0)}
PLAIN = hostile(**LENS, empty_slots="garbage", platform="sm_90")
WINDOW = hostile(**LENS, empty_slots="garbage", platform="sm_90", sliding_window=21)
FP8 = hostile(
    **LENS, empty_slots="garbage", platform="sm_90", kv_cache_dtype="fp8", k_scale=0.7, v_scale=0.3
)
NEW = {
    "accumulator_not_rescaled": PLAIN,
    "sum_not_rescaled": PLAIN,
    "rescale_in_base_2": PLAIN,
    "exp2_for_exp": PLAIN,
    "log2e_in_scale": PLAIN,
    "tile_counted_twice": PLAIN,
    "merge_weights_exchanged": PLAIN,
    "merge_in_base_2": PLAIN,
    "short_part_not_rescaled": PLAIN,
    "page_is_tile": PLAIN,
    "k_scale_is_v_scale": FP8,
    "v_scale_is_k_scale": FP8,
    "window_ignored_in_context": WINDOW,
    "window_ignored_in_new_tokens": WINDOW,
    "window_off_in_context": WINDOW,
    "window_off_in_new_tokens": WINDOW,
    "alibi_sign": hostile(**LENS, empty_slots="garbage", platform="sm_90", alibi=True),
    "softcap_over_mask": hostile(
        **LENS, empty_slots="garbage", platform="sm_90", op="unified_attention", softcap=2.0
    ),
}


right_run = functools.cache(lambda case: correct_run(LAB, case))


def names_of(case: Case, planted: str, without: bool) -> list[str]:
    """Plant a defect and return the explanations, with or without it among the candidates."""
    wrong = plant(*right_run(case), DEFECTS[planted], "all")
    defects = [defect for name, defect in DEFECTS.items() if not (without and name == planted)]
    diagnosis = diagnose(case, wrong, lab=LAB, defects=defects, propose=False)
    assert diagnosis.is_wrong
    return [candidate.name for candidate in diagnosis.explanations]


@pytest.mark.parametrize("name", NEW)
@pytest.mark.quick("accumulator_not_rescaled", "merge_in_base_2", "k_scale_is_v_scale")
def test_a_planted_defect_is_named_and_nothing_else_is(name):
    """Without it among the candidates there is no explanation: no other defect equals it."""
    assert names_of(NEW[name], name, without=False) == [name]
    assert names_of(NEW[name], name, without=True) == []


def test_every_variant_of_a_tile_is_named():
    """The diagnosis finds the size of the tile, too."""
    problem, output = right_run(PLAIN)
    for variant in DEFECTS["accumulator_not_rescaled"].expand()[:3]:
        wrong = plant(problem, output, variant, "all")
        cause = diagnose(PLAIN, wrong, lab=LAB, propose=False).cause
        assert cause.text == variant.text


def tiles_of(problem: Problem, seq: int, size: int) -> list[range]:
    """Return the tiles of a loop over the cached keys, then of a loop over the others."""
    end, cached = problem.seq_len(seq), problem.cached_len(seq)
    tiles = [range(start, min(start + size, cached)) for start in range(0, cached, size)]
    return tiles + [range(start, min(start + size, end)) for start in range(cached, end, size)]


def online(problem: Problem, row_slice: RowSlice, size: int, fault: str) -> torch.Tensor:
    """Compute attention tile by tile, with a running maximum, as kernels do, and with a fault."""
    inputs = problem.attention_inputs(row_slice)
    scores, value = scores_of(inputs), inputs.value.transpose(0, 1)
    maximum = torch.full((*scores.shape[:2], 1), -1e30, dtype=torch.float64)
    total, accumulator = torch.zeros_like(maximum), torch.zeros_like(maximum) * value[:, :1]
    for tile in tiles_of(problem, row_slice.seq, size):
        part = scores[..., tile.start : tile.stop]
        raised = torch.maximum(maximum, part.amax(-1, keepdim=True))
        factor = (maximum - raised).exp2() if fault == "base 2" else (maximum - raised).exp()
        weights = (part - raised).exp()
        if fault != "sum":
            total = total * factor
        if fault != "accumulator":
            accumulator = accumulator * factor
        total = total + weights.sum(-1, keepdim=True)
        accumulator = accumulator + weights @ value[:, tile.start : tile.stop]
        maximum = raised
    return (accumulator / total).transpose(0, 1)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("accumulator_not_rescaled", "accumulator"),
        ("sum_not_rescaled", "sum"),
        ("rescale_in_base_2", "base 2"),
    ],
)
def test_the_prediction_is_that_of_a_loop_over_tiles(name, fault):
    problem = make_problem(PLAIN)
    variants = dict(zip((16, 32, 64, 128), DEFECTS[name].variants, strict=True))
    for seq in range(problem.num_seqs):
        tokens = torch.arange(problem.query_len(seq))
        row_slice = RowSlice(seq=seq, tokens=tokens, heads=torch.arange(6))
        assert (
            online(problem, row_slice, 32, "none") - problem.correct(row_slice).output
        ).abs().max() < 1e-9
        for size, (_, compute) in variants.items():
            predicted = compute(problem, row_slice).output
            assert (online(problem, row_slice, size, fault) - predicted).abs().max() < 1e-9


def test_the_merge_in_base_2_weighs_by_misread_logarithms():
    """Context and new tokens of one prefill, merged by hand."""
    problem = make_problem(PLAIN)
    row_slice = RowSlice(seq=1, tokens=torch.arange(40), heads=torch.arange(6))
    inputs = problem.attention_inputs(row_slice)
    scores, value = scores_of(inputs), inputs.value.transpose(0, 1)
    parts = [(scores[..., :50], value[:, :50]), (scores[..., 50:], value[:, 50:])]
    outputs = torch.stack([part.softmax(-1) @ values for part, values in parts])
    logs = torch.stack([part.logsumexp(-1) for part, _ in parts])
    for name, weights in (
        ("merge_in_base_2", (logs * math.log2(math.e)).softmax(0)),
        ("merge_weights_exchanged", logs.softmax(0).flip(0)),
    ):
        merged = (weights[..., None] * outputs).sum(0).transpose(0, 1)
        assert (merged - DEFECTS[name].compute(problem, row_slice).output).abs().max() < 1e-9


def test_a_cap_over_the_mask_leaves_weight_on_later_keys():
    problem = make_problem(NEW["softcap_over_mask"])
    row_slice = RowSlice(seq=3, tokens=torch.tensor([0]), heads=torch.arange(6))
    inputs = problem.attention_inputs(row_slice)
    scores = scores_of(dataclasses.replace(inputs, visible=torch.ones_like(inputs.visible)))
    scores[..., 1:] = -2.0
    expected = (scores.softmax(-1) @ inputs.value.transpose(0, 1)).transpose(0, 1)
    predicted = DEFECTS["softcap_over_mask"].compute(problem, row_slice).output
    assert (expected - predicted).abs().max() < 1e-9
