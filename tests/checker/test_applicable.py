"""What a check of made-up ops runs, leaves out and finds: their own signatures decide."""

import dataclasses
from pathlib import Path

import pytest
from helpers.fake_ops import made
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import Unsupported
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import DECODE_FWD, PREFILL, UNIFIED, WRAPPER, WRITE
from attnlab.checker.case_check import case_verdict, check_case
from attnlab.checker.hostile import covering_rows, hostile_cases
from attnlab.checker.plan import Plan
from attnlab.checker.report import check_library
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.source import fetch_ops
from attnlab.lab.lab import Lab

DECODE = """
def decode_attention_fwd(
    q, k_buffer, v_buffer, o, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale, page_size=1{more}
):
    for i in range(len(q)):
        length = int(b_seq_len[i])
        pages = req_to_token[i, : -(-length // page_size)].long()
        key, value = (
            one.float()[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // one.shape[2], 1)
            for one in (k_buffer, v_buffer)
        )
        {scaled}
        scores = torch.einsum("hd,nhd->hn", q[i].float(), key) * sm_scale
        o[i] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value).to(o.dtype)
"""
SCALED = "key, value = key * k_scale, value * v_scale"
WRITE_OP = """
def triton_reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    rows = slot_mapping >= 0
    slots = slot_mapping[rows]
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        tokens = {tokens}[: len(rows)]
        cache[slots // cache.shape[1], slots % cache.shape[1]] = tokens[rows].to(cache.dtype)
"""
NO_STRIDES = "tokens.as_strided(tokens.shape, (tokens.stride(0), tokens.shape[2], 1))"
FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0}
LENS = {"query_lens": (1, 1), "ctx_lens": (5, 20), "block_size": 16, "num_heads": 4}
PLAIN = {"distribution": "normal", "empty_slots": "nan", "output_init": "nan", "platform": "sm_90"}

pytestmark = needs_triton


def backend_of(folder: Path, **modules: str):
    made(folder, **modules)
    return find_backend("vllm", folder, "cpu")


def findings(backend, **fields):
    """Return kind and label of each fault of a Case."""
    case = Case(backend="vllm", fill="all_rows", sm_scale=0.125, **{**LENS, **PLAIN, **fields})
    if case.spec.writes_cache:
        case = case.replace(fill=None)
    found = check_case(Lab(source=backend.path, device="cpu"), backend, case)
    return [(one.kind, one.diagnosis) for one in found if one.is_fault]


def decode(folder: Path, more: str = "", scaled: str = "pass"):
    return backend_of(folder, triton_decode_attention=DECODE.format(more=more, scaled=scaled))


def test_what_the_signature_lacks_is_no_case_and_no_finding(tmp_path):
    """An op without soft cap, FP8 scales and lse: the check has none of these cases, and says so."""
    backend = decode(tmp_path)
    cases = [*hostile_cases(backend, DECODE_FWD, "sm_90", None, 0)]
    assert cases
    assert {case.softcap for case in cases} == {None}
    assert "default_scales" not in {case.op_argument for case in cases}
    capped = decode(tmp_path / "capped", ", logit_cap=0.0, k_scale=None, v_scale=None")
    assert {2.0, None} <= {
        case.softcap for case in hostile_cases(capped, DECODE_FWD, "sm_90", None, 0)
    }
    report = check_library(Plan(backend=backend, ops=(DECODE_FWD, UNIFIED), cases=2))
    lines = [line for line in report.left_out if "not applicable" in line]
    assert [line.partition(":")[0] for line in lines] == [DECODE_FWD, UNIFIED]
    assert "softcap (no argument logit_cap)" in lines[0]
    assert report.ops[UNIFIED] == 0


def test_a_python_error_of_an_op_is_not_run_rather_than_unsupported(tmp_path):
    """Also for a Case with a mask or an op argument; the exit code becomes 3."""
    op = "def decode_attention_fwd(q, k_buffer, v_buffer, o, num_kv_splits):\n    q.nothing\n"
    backend = backend_of(tmp_path, triton_decode_attention=op)
    lab = Lab(source=backend.path, device="cpu")
    for argument in (NONE, "flat_buffers"):
        case = Case(op=DECODE_FWD, backend="vllm", op_argument=argument, **LENS, **PLAIN)
        verdict = case_verdict(lab, backend, case)
        assert (verdict["ran"], verdict["unsupported"]) == (False, "")
        assert "has no attribute 'nothing'" in verdict["not_run"]
    report = check_library(Plan(backend=backend, ops=(DECODE_FWD,), cases=1))
    assert report.not_run
    assert report.exit_code == 3


def test_an_op_that_accepts_fp8_without_scales_is_at_fault(tmp_path):
    """With the arguments, or without FP8, there is no finding."""
    without = decode(tmp_path / "a")
    assert findings(without, op=DECODE_FWD) == []
    assert findings(without, op=DECODE_FWD, **FP8) == [("wrong_output", "FP8 cache without scales")]
    scaled = decode(tmp_path / "b", ", k_scale=None, v_scale=None", SCALED)
    assert findings(scaled, op=DECODE_FWD, **FP8) == []


@pytest.mark.parametrize(
    ("argument", "fields", "label"),
    [
        ("fp8_query", FP8, "FP8 query without a scale"),
        ("int8_per_token_head", {}, "int8 cache without scales"),
    ],
)
def test_an_op_must_refuse_tensors_whose_scales_it_cannot_get(tmp_path, argument, fields, label):
    """A refusal by the op, or by Triton, is right; the design has no row with such tensors."""
    given = {"op": DECODE_FWD, "op_argument": argument, **fields}
    more = ", k_scale=None, v_scale=None"
    accepting = decode(tmp_path / "a", more, SCALED)
    assert findings(accepting, **given) == [("wrong_output", label)]
    refusal = "assert q.element_size() > 1 and k_buffer.dtype != torch.int8; " + SCALED
    refusing = decode(tmp_path / "b", more, refusal)
    with pytest.raises(Unsupported):
        findings(refusing, **given)
    rows = covering_rows(accepting, DECODE_FWD, "sm_90", 0)
    assert {row["cache"] for row in rows} == {"plain", "fp8"}


@pytest.mark.parametrize("argument", [NONE, "padded_tokens"])
def test_a_write_that_ignores_strides_is_at_fault(tmp_path, argument):
    right, wrong = (
        backend_of(tmp_path / name, triton_reshape_and_cache_flash=WRITE_OP.format(tokens=tokens))
        for name, tokens in (("right", "tokens"), ("wrong", NO_STRIDES))
    )
    fields = {"op": WRITE, "op_argument": argument}
    assert findings(right, **fields) == []
    label = f"strides ignored: {argument}"
    expected = [] if argument == NONE else [("wrong_bytes", label)]
    assert findings(wrong, **fields) == expected


def test_a_window_that_is_ignored_with_alibi_is_found():
    """The sound models have no finding; a kernel that drops the window with ALiBi has one, by name."""
    backend = find_backend("model")
    fields = {"query_lens": (1, 19, 3), "ctx_lens": (20, 0, 37), "alibi": True}
    for op in (PREFILL, WRAPPER, UNIFIED):
        assert findings(backend, op=op, sliding_window=7, **fields) == []

    class Wrong(type(backend)):
        """The models, without a window if there is ALiBi."""

        def run(self, call, target, kernels, options):
            plain = dataclasses.replace(call, sliding_window=0)
            return super().run(plain, target, kernels, options)

    lab = Lab(device="cpu", runner=Wrong(rules="0.33.0"))
    case = Case(op=UNIFIED, sliding_window=7, block_size=16, num_heads=4, **fields, **PLAIN)
    (found,) = check_case(lab, lab.runner, case)
    assert found.diagnosis == "window_ignored" or "window_ignored" in found.names


def test_the_hostile_cases_have_a_window_with_alibi():
    backend = find_backend("model")
    for op in (PREFILL, WRAPPER, UNIFIED):
        cases = hostile_cases(backend, op, "sm_90", None, 0)
        assert any(case.alibi and case.sliding_window for case in cases)


@pytest.mark.releases
@pytest.mark.parametrize("version", ["0.11.2", "0.20.2", "0.33.0"])
def test_the_prefill_kernel_ignores_a_window_with_alibi(version):
    """_fwd_kernel_alibi (prefix_prefill.py) gets no window; unified_attention computes both."""
    backend = find_backend("vllm", fetch_ops(version), "cpu")
    fields = {"alibi": True, "sliding_window": 7, "release": backend.release}
    lens = {"query_lens": (1, 19, 3), "ctx_lens": (20, 0, 37)}
    assert ("wrong_output", "window_ignored") in findings(backend, op=PREFILL, **fields, **lens)
    assert not [
        one for one in findings(backend, op=UNIFIED, **fields, **lens) if one[0] == "wrong_output"
    ]


@pytest.mark.releases
@pytest.mark.parametrize(
    ("version", "op", "fields", "label"),
    [
        ("0.17.1", DECODE_FWD, FP8, "FP8 cache without scales"),
        ("0.26.0", UNIFIED, {**FP8, "op_argument": "diffkv"}, "FP8 cache without scales"),
        ("0.33.0", UNIFIED, {**FP8, "op_argument": "diffkv"}, None),
        ("0.33.0", DECODE_FWD, FP8, None),
        ("0.33.0", DECODE_FWD, {**FP8, "op_argument": "fp8_query"}, "FP8 query without a scale"),
        ("0.33.0", WRAPPER, {**FP8, "op_argument": "fp8_query"}, "FP8 query without a scale"),
        ("0.33.0", UNIFIED, {**FP8, "op_argument": "fp8_query"}, None),
        (
            "0.33.0",
            PREFILL,
            {"op_argument": "block_pointers", "alibi": True},
            "op_argument block_pointers with ALiBi",
        ),
        ("0.33.0", PREFILL, {"op_argument": "block_pointers"}, None),
    ],
)
def test_arguments_that_a_release_ignores(version, op, fields, label):
    backend = find_backend("vllm", fetch_ops(version), "cpu")
    found = findings(backend, op=op, release=backend.release, **fields)
    assert [one[1] for one in found if one[0] == "wrong_output"] == (
        [] if label is None else [label]
    )


@pytest.mark.releases
@pytest.mark.parametrize(
    ("argument", "is_ignored"),
    [
        ("padded_tokens", True),
        ("diffkv_padded_tokens", True),
        ("head_major_padded_tokens", True),
        ("head_major_packed_padded_tokens", True),
        ("int8_per_token_head_padded_tokens", False),
        ("fp8_per_token_head_padded_tokens", False),
        ("int4_per_token_head_padded_tokens", False),
        ("spaced_values", True),
        ("head_major_spaced_values", True),
        ("head_major_packed_spaced_values", True),
    ],
)
def test_strides_that_the_cache_writes_of_0_33_0_ignore(argument, is_ignored):
    """The kernels get one stride of the tokens, and those of the key cache for both caches."""
    backend = find_backend("vllm", fetch_ops("0.33.0"), "cpu")
    found = findings(backend, op=WRITE, op_argument=argument, query_lens=(3, 2))
    expected = ("wrong_bytes", f"strides ignored: {argument}")
    assert found == ([expected] if is_ignored else [])
