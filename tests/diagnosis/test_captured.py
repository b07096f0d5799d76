"""Calls without a Case: scales as tensors, K and V of different width, no mask, and what stays unknown."""

import dataclasses

import pytest
import torch
from helpers.cases import call_of, hostile

import attnlab
from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.ops import UNIFIED, WRAPPER
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide, kernels_of
from attnlab.defects import DEFECTS
from attnlab.diagnosis.captured import check_diagnosable, diagnose_captured, where_it_ran
from attnlab.diagnosis.diagnose import diagnose, diagnose_call
from attnlab.diagnosis.output_rules import scratch_defects
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.tensors.call import KernelCall, Origin
from attnlab.weights.measurement import as_measurable

KEPT = {"unknown_arguments": ("temperature=0.5",)}
TABLE = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32)
SEQ_LENS, STARTS = (40, 33), (0, 5, 6)


def attention(query, key, value, table, scale=None, causal=True):
    """Attention in float64 over caches [blocks, 16, kv_heads, size] that are already decoded."""
    rows = []
    for seq, length in enumerate(SEQ_LENS):
        keys, values = (
            cache[table[seq].long()].flatten(0, 1)[:length].double().repeat_interleave(2, 1)
            for cache in (key, value)
        )
        new = query[STARTS[seq] : STARTS[seq + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", new, keys) * (scale or query.shape[2] ** -0.5)
        if causal:
            at = torch.arange(length - len(new), length)[:, None]
            scores = scores.masked_fill(torch.arange(length) > at, -torch.inf)
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(rows)


def made(key, value, query, output, **options):
    return KernelCall.from_tensors(
        query=query,
        key_cache=key,
        value_cache=value,
        block_table=TABLE,
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        query_start_loc=torch.tensor(STARTS, dtype=torch.int32),
        output=output,
        op=UNIFIED,
        layout="flash",
        **options,
    )


def tensors(value_size=64):
    torch.manual_seed(0)
    return (
        torch.randn(6, 4, 64).half(),
        torch.randn(6, 16, 2, 64),
        torch.randn(6, 16, 2, value_size),
    )


def by_sequence(scale):
    """Return the scale of each slot of each block, for scales by sequence and head."""
    slots = torch.ones(6, 16, 2)
    for seq in (0, 1):
        slots[TABLE[seq].long()] = scale[seq]
    return slots


@pytest.mark.parametrize("kind", ["sequence and head", "slot"])
def test_scales_as_tensors(kind):
    """FP8 bytes with a scale per sequence and head, or per slot; ignored keys' scales are found."""
    query, key, value = tensors()
    shape = (2, 2) if kind == "sequence and head" else (6, 16, 2)
    k_scale, v_scale = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    slots = [by_sequence(s) if len(shape) == 2 else s for s in (k_scale, v_scale)]
    stored = [
        (c / s[..., None]).to(torch.float8_e4m3fn) for c, s in zip((key, value), slots, strict=True)
    ]
    decoded = [(c.double() * s[..., None]) for c, s in zip(stored, slots, strict=True)]
    output = attention(query, *decoded, TABLE).half()
    origin = Origin(platform="sm_90")
    call = made(*stored, query, output, k_scale=k_scale, v_scale=v_scale, origin=origin)
    assert attnlab.diagnose(call).status == "nothing wrong"
    wrong = attention(query, stored[0].double(), decoded[1], TABLE).half()
    found = attnlab.diagnose(call, wrong)
    assert "k_scale_ignored" in [one.name for one in found.explanations]


def test_keys_and_values_of_different_width():
    query, key, value = tensors(value_size=32)
    key, value = key.half(), value.half()
    call = made(key, value, query, attention(query, key, value, TABLE).half())
    assert attnlab.diagnose(call).status == "nothing wrong"
    wrong = attention(query, key, value, TABLE, scale=0.25).half()
    assert attnlab.diagnose(call, wrong).cause.name == "scale_doubled"


def test_without_a_mask():
    query, key, value = tensors()
    key, value = key.half(), value.half()
    output = attention(query, key, value, TABLE, causal=False).half()
    call = made(key, value, query, output, causal=False)
    assert attnlab.diagnose(call).status == "nothing wrong"
    assert attnlab.diagnose(dataclasses.replace(call, causal=True)).wrong_rows == 4


def small(**options):
    query, key, value = tensors()
    return made(key.half(), value.half(), query, torch.zeros_like(query), **options)


@pytest.mark.parametrize(
    ("origin", "given", "platform", "release", "assumed"),
    [
        (Origin(), (), "gfx942", "0.33.0", ("the platform", "the release")),
        (Origin(platform="sm_90", release="0.33.0"), (), "sm_90", "0.33.0", ()),
        (Origin(platform="sm_90", release="0.15.1"), (), "sm_90", "0.11.2", ("the release",)),
        (Origin(platform="sm_90", release="0.9"), (), "sm_90", "0.11.2", ("the release",)),
        (Origin(platform="sm_90"), ("platform", "release"), "gfx942", "0.33.0", ()),
        (Origin(platform="sm_120", release="0.33.0"), (), "gfx942", "0.33.0", ("the platform",)),
        (Origin(platform="cpu", op="my.kernel"), (), "cpu", "0.33.0", ()),
    ],
)
def test_where_a_call_ran(origin, given, platform, release, assumed):
    """What the call states, unless the user states it; the rest is assumed, and listed."""
    ran = where_it_ran(small(origin=origin), Case(), given)
    assert (ran.case.platform, ran.case.release) == (platform, release)
    assert tuple(text.partition(":")[0] for text in ran.assumed) == assumed


def test_what_is_unknown():
    """Each fact that the call holds removes a line, and so does a kernel to run."""
    call = small()
    known = dataclasses.replace(
        call,
        new_tokens="given",
        before=torch.ones_like(call.output),
        origin=Origin(platform="sm_90", release="0.33.0"),
    )
    assert len(diagnose_captured(call, Case()).unknown) == 6
    assert len(diagnose_captured(known, Case()).unknown) == 2


def test_an_unknown_argument_leaves_the_output_undecided():
    """What does not depend on it is stated: that the call violates a contract, and how far attention without
    the argument is from the output."""
    call = small(**KEPT)
    query, key, value = tensors()
    exact = attention(query, key.half().double(), value.half().double(), TABLE).half()
    right, wrong = (
        diagnose_captured(dataclasses.replace(call, output=one), Case())
        for one in (exact, exact + 1)
    )
    for found, rows in ((right, 0), (wrong, 6)):
        assert (found.status, found.wrong_rows, found.is_wrong) == ("not decided", rows, False)
        assert found.sentences()[0].startswith(
            "not decided because of the argument temperature=0.5"
        )
        assert (found.cause, found.candidates, found.explanations) == (None, [], [])
    assert "6 of 6 rows differ" in wrong.sentences()[1]
    case = hostile(op=WRAPPER, query_lens=(5, 1), ctx_lens=(20, 33), stage="int32_before_cumsum")
    violating, known = dataclasses.replace(call_of(case)[0], **KEPT), call_of(case)[0]
    found = diagnose_captured(violating, Case())
    assert found.status == "not decided"
    assert list(found.violations) == list(diagnose_captured(known, Case()).violations) != []
    with pytest.raises(InvalidCall, match=r"temperature=0\.5"):
        check_diagnosable(call)
    with pytest.raises(InvalidCall, match=r"temperature=0\.5"):
        as_measurable(call)


def test_calls_without_a_reference():
    with pytest.raises(InvalidCall):
        diagnose_captured(small(unmodelled=("qq_bias",)), Case())


# Diagnosis of saved calls and outputs.


def test_an_output_is_diagnosed_without_a_run():
    """Unwritten rows are found by the buffer's known contents."""
    case = hostile(stage="int32_before_cumsum", output_init="recycled", empty_slots="garbage")
    diagnosis = diagnose(case, Lab().output(case))
    assert diagnosis.cause.name == "query_start_loc_as_int32"
    assert diagnosis.unwritten_by == "buffer"
    assert diagnosis.slot_dependent is None


def test_a_saved_call_is_diagnosed(tmp_path):
    """The buffer is unknown, so unwritten rows follow from the contracts."""
    case = hostile(stage="int32_before_cumsum", empty_slots="garbage", ctx_lens=(20,) * 12)
    lab = Lab()
    call = dataclasses.replace(lab.call(case), output=lab.output(case))
    path = tmp_path / "call.safetensors"
    call.save(path)
    diagnosis = diagnose_captured(KernelCall.load(path), Case())
    assert diagnosis.unwritten == [31, 49, 90, 91, 95]
    assert diagnosis.unwritten_by == "contracts"
    assert {violation.kind for violation in diagnosis.violations} >= {"index_dtype"}


def test_a_saved_call_with_rows_unwritten_and_nothing_else(tmp_path):
    """The one row that is computed from another sequence is corrected first."""
    case = hostile(stage="int32_before_cumsum", empty_slots="garbage", output_init="recycled")
    lab = Lab()
    output = lab.output(case)
    output[0] = lab.output(case.replace(stage="sound"))[0]
    call = dataclasses.replace(lab.call(case), output=output)
    diagnosis = diagnose_call(call, Target.of(case), decide(case).kernels)
    assert diagnosis.status == "explained"
    assert diagnosis.cause.name == "query_start_loc_as_int32"
    causes = ("query_start_loc_as_int32", "rows_never_written")
    rest = [defect for defect in DEFECTS.values() if defect.name not in causes]
    blind = diagnose_call(call, Target.of(case), decide(case).kernels, defects=rest)
    assert blind.status == "unexplained"


def test_kernels_of_a_call_are_those_of_its_case():
    """Dispatch reads the call's own tensors."""
    for changes in ({}, {"platform": "sm_90"}, {"sinks": True}, {"sliding_window": 7}):
        case = hostile(**changes)
        plain = Case(platform=case.platform)
        assert kernels_of(plain, Lab().call(case)) == decide(case).kernels


def test_a_wrong_output_is_refused():
    case = hostile()
    with pytest.raises(
        InvalidCall, match=r"^output must have shape \(98, 6, 64\), got \(3, 2, 1\)$"
    ):
        diagnose(case, torch.zeros(3, 2, 1, dtype=torch.float16))
    with pytest.raises(
        InvalidCall, match=r"output must have dtype torch.float16, got torch.float32"
    ):
        diagnose(case, torch.zeros(98, 6, 64))


def test_diagnosing_changes_no_tensor(tmp_path):
    case, lab = hostile(stage="int32_before_cumsum"), Lab()
    output = lab.output(case)
    lab.call(case).save(tmp_path / "before")
    kept = output.clone()
    diagnose(case, output, lab=lab)
    lab.call(case).save(tmp_path / "after")
    assert output.nan_to_num(9).equal(kept.nan_to_num(9))
    before, after = (KernelCall.load(tmp_path / name) for name in ("before", "after"))
    assert before.key_cache.nan_to_num(9).equal(after.key_cache.nan_to_num(9))


def test_rows_that_equal_the_buffer_are_not_known_to_be_unwritten():
    """One output shows no more; a call whose contracts leave the rows out does."""
    changes = {"query_lens": (4, 3), "ctx_lens": (9, 40), "platform": "sm_90"}
    case, lab = hostile(stage="sound", empty_slots="zeros", **changes), Lab()
    output, call = lab.output(case).clone(), lab.call(case)
    before = torch.randn_like(output.float()).to(output.dtype)
    output[-3:] = before[-3:]
    defects = [DEFECTS[name] for name in ("rows_never_written", "causal_plus_one")]
    given = {"output": output, "before": before, "defects": defects}
    diagnosis = diagnose_call(call, Target.of(case), decide(case).kernels, **given)
    assert (diagnosis.status, diagnosis.cause) == ("ambiguous", None)
    assert [one.name for one in diagnosis.explanations] == ["rows_never_written"]
    assert "ambiguous: the output does not contradict" in " ".join(diagnosis.sentences())


def test_equal_factors_of_all_parts_are_also_a_missing_rescale():
    """A maximum at one address for all parts and a lost rescale of both numbers give the same outputs."""
    case = hostile(op="unified_attention", query_lens=(1, 2), ctx_lens=(70, 40), platform="sm_90")
    texts = [
        one.text
        for one in scratch_defects(
            Problem.of_call(Lab().call(case), Target.of(case), decide(case).kernels)
        )
    ]
    both = [one for one in texts if "are rescaled; or, which no output distinguishes" in one]
    assert any("maxima of the parts are read" in one for one in both)
    assert len(both) < len(texts)
