"""The catalogue: each defect changes what it says, leaves the rest bitwise alone, and is what kernels do."""

import dataclasses
import math
import re
from collections.abc import Callable

import pytest
import torch
from helpers.cases import hostile, same_bits

from attnlab.case.case import Case
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.problem import Problem, RowSlice
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.distinguish import problem_of, separate
from attnlab.diagnosis.fault_injection import rows_of
from attnlab.kernels.model import backend as model
from attnlab.lab.lab import Lab
from attnlab.lab.reference import reference
from attnlab.mutation.remedies import is_equivalent
from attnlab.tensors.call import KernelCall

NAMED = {defect.name: defect for defect in CATALOGUE}
VARIANTS = {
    "plain": hostile(),
    "context only": hostile(stage="int32_before_cumsum", output_init="recycled"),
    "alibi": hostile(alibi=True),
    "window": hostile(sliding_window=7),
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
LN_2 = math.log(2)  # the logit of a sink that counts twice is larger by it
NO_CHANGE = {"alibi_shifted", "accumulation_order", "block_16_bit"}


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    """Give the scene of each variant."""
    return {name: problem_of(case) for name, case in VARIANTS.items()}


def right_of(problem: Problem) -> dict[int, torch.Tensor]:
    """Return the right output of each sequence."""
    return {row_slice.seq: problem.right(row_slice).output for row_slice in rows_of(problem, "all")}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_right_output_is_the_reference(problems, name):
    """A scene's right output is the oracle's, from the batch and from the call alone."""
    case, problem = VARIANTS[name], problems[name]
    assert problem.batch is not None
    expected = reference(case, problem.batch)
    alone = Problem.of_call(problem.call, problem.target, problem.kernels)
    for one in (problem, alone):
        found = torch.cat(list(right_of(one).values()))
        assert (found - expected).abs().max() < 1e-12


def test_names_are_unique_and_facts_are_there():
    """Every defect has its own name, a sentence, and threads of the form owner #number."""
    assert len(NAMED) == len(CATALOGUE) >= 45
    for defect in CATALOGUE:
        assert re.fullmatch(r"[a-z0-9_]+", defect.name)
        assert defect.text
        assert not defect.text.endswith(".")
        assert defect.seen_in
        assert all(re.fullmatch(r"[\w./-]+ #\d+", thread) for thread in defect.seen_in)
        assert defect.touches in ("all", "cached", "decode", "unwritten")


@pytest.mark.parametrize("defect", CATALOGUE, ids=lambda defect: defect.name)
def test_a_defect_moves_what_it_says_and_nothing_else(problems, defect):
    """Somewhere it moves an element past rounding; rows that it cannot touch keep their bits."""
    applied = moved = False
    for problem in problems.values():
        if not defect.applies(problem):
            continue
        if defect.name == "alibi_shifted" and problem.call.sinks is not None:
            continue  # no longer the same to a row's sum
        applied = True
        for row_slice in rows_of(problem, "all"):
            told, right = defect.compute(problem, row_slice), problem.right(row_slice)
            if not may_touch(problem, defect, row_slice):
                assert same_bits(told.output, right.output)
            apart = (told.output - right.output).abs() > told.noise + right.noise
            moved |= bool((apart | ~told.output.isfinite()).any())
    if defect.name == "block_16_bit":  # needs more blocks than a small cache has
        assert not applied
        return
    assert applied
    assert moved != (defect.name in NO_CHANGE)


def may_touch(problem: Problem, defect: Defect, row_slice: RowSlice) -> bool:
    """Answer whether a defect may change a sequence at all, by what it says of itself."""
    if defect.touches == "cached":
        return problem.cached_len(row_slice.seq) > 0
    if defect.touches == "decode":
        return problem.is_decode(row_slice.seq) or row_slice.seq == 0
    return True


def test_the_check_of_untouched_rows_fails_for_a_defect_that_lies(problems):
    """A planted defect that says "cached" and moves every row is caught."""
    liar = dataclasses.replace(NAMED["scale_doubled"], touches="cached")
    with pytest.raises(AssertionError):
        test_a_defect_moves_what_it_says_and_nothing_else(problems, liar)


def test_a_high_block_is_read_with_its_low_bits_only():
    """Block 65537 is read as block 1."""
    lens = {"query_lens": (1,), "ctx_lens": (20,), "num_heads": 2, "num_queries_per_kv": 1}
    case = hostile(**lens, head_size=16, block_table=((65537, 1),), empty_slots="zeros")
    problem = problem_of(case)
    defect = NAMED["block_16_bit"]
    assert defect.applies(problem)
    row_slice = RowSlice(seq=0, tokens=torch.tensor([0]), heads=torch.arange(2))
    reading = problem.reading(0)
    low = dataclasses.replace(reading, block=lambda blocks: blocks & 0xFFFF)
    first = problem.stored_key(low, torch.arange(16), torch.arange(2))
    second = problem.stored_key(reading, torch.arange(16, 32), torch.arange(2))
    assert first.equal(second)
    assert (
        defect.compute(problem, row_slice).output - problem.right(row_slice).output
    ).abs().max() > 0.01


def test_alibi_shifted_is_softmax_invariant():
    """Adding a constant to all distances changes nothing: no Case tells it from the right output."""
    case = hostile(alibi=True)
    assert is_equivalent(case, NAMED["alibi_shifted"])
    assert not is_equivalent(case, NAMED["alibi_ignored"])
    apart = separate(case, NAMED["alibi_shifted"], NAMED["alibi_ignored"])
    assert apart.case is not None
    assert apart.gap > 1


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


@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_with_the_defect_is_diagnosed(name, platform):
    """The models, run on arguments that are wrong in that way, give what the catalogue predicts."""
    fields, mutate = MUTANTS[name]
    fields = dict(fields)
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
    told = diagnose(case, call.output, lab=lab, propose=False)
    assert told.status in ("explained", "ambiguous")
    assert name in [candidate.name for candidate in told.explanations]
    if told.status == "explained":
        assert told.cause is not None
        assert told.cause.name == name


def test_the_newest_token_dropped_by_a_kernel():
    """seq_lens one too small in the decode kernel alone is the newest token dropped, in decode."""
    case = hostile(
        empty_slots="garbage", output_init="recycled", platform="sm_90", ctx_lens=(20,) * 12
    )
    lab = Lab()
    call = lab.call(case)
    model.run(call, Target.of(case), decide(case).kernels[:1])
    short = dataclasses.replace(call, seq_lens=call.seq_lens - 1)
    model.run(short, Target.of(case), decide(case).kernels[1:])
    told = diagnose(case, call.output, lab=lab, propose=False)
    names = {candidate.name for candidate in told.explanations}
    assert "newest_token_dropped" in names
    assert names <= {"newest_token_dropped", "causal_minus_one", "context_only"}


def test_case_without_heads_named_is_unchanged():
    """The catalogue can be built on the default Case: nothing in it needs a hostile one."""
    case = Case(num_heads=4, query_lens=(3, 1), ctx_lens=(4, 6))
    problem = problem_of(case)
    assert sum(defect.applies(problem) for defect in CATALOGUE) > 20
