"""LMDeploy's records, with a made-up LMDeploy whose text is ours."""

import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers.plugins import faults_of
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import OPS
from attnlab.checker.check import check
from attnlab.checker.hostile import hostile_cases
from attnlab.cli.main import main
from attnlab.contracts.contract import Target
from attnlab.diagnosis.confirmation import with_leaks
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.reruns import find_dependence
from attnlab.diagnosis.trials import Limit
from attnlab.kernels import find_backend
from attnlab.kernels.binding import Values, arguments_of, evaluate
from attnlab.kernels.runner import runners
from attnlab.kernels.vllm.source import fetch_ops, find_source
from attnlab.lab.lab import Lab
from attnlab.library.op import package_of
from attnlab.tensors.case_call import visibility_of
from attnlab.tensors.formats import on_levels, spanning

DECODE, PREFILL, FILL = (
    f"lmdeploy_{name}" for name in ("paged_attention", "flash_attention", "fill_kv_cache")
)
INTEGERS = [f"{op}_int{bits}" for op in (DECODE, FILL) for bits in (4, 8)]
# Each sequence alone, with what LMDeploy's arguments mean.
ATTEND = """
import torch
import triton
import triton.language as tl
from lmdeploy.messages import QuantPolicy
from lmdeploy.utils import get_logger

logger, tanh = get_logger("lmdeploy"), tl.extra.cuda.libdevice.tanh
assert torch.cuda.get_device_properties(None).multi_processor_count > 1
assert triton.runtime.driver.active.get_current_target().backend == "cuda"

def attend(q, k, v, n, scale, window, softcap, causal, slopes, sinks):
    group = q.shape[1] // k.shape[1]
    k, v = (one.float().repeat_interleave(group, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), k) * (scale or q.shape[2] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    at, keys = torch.arange(n - len(q), n)[:, None, None], torch.arange(len(k))
    scores = scores - (at - keys).abs() * (0 if slopes is None else slopes[:, None])
    hidden = ((keys > at) & causal) | (keys >= n)
    if window > 0:
        hidden = hidden | (keys < at - window{window})
    scores = scores.masked_fill(hidden, -float("inf"))
    if sinks is not None:
        sink = sinks.float()[None, :, None].expand(len(q), -1, 1)
        scores = torch.cat([scores, sink], 2)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("qhk,khd->qhd", weights, v)
"""
FILES = {
    "pagedattention": ATTEND
    + """
def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale=None,
                            window_size=None, softcap=None, alibi_slopes=None, k_scales_zeros=None,
                            v_scales_zeros=None, quant_policy=QuantPolicy.NONE, sinks=None):
    if quant_policy in (QuantPolicy.INT4, QuantPolicy.INT8):
        halves = ((k_cache, k_scales_zeros), (v_cache, {scales}_scales_zeros))
        k_cache, v_cache = (
            (torch.cat([n & 15, n >> 4], -1) if quant_policy == QuantPolicy.INT4 else n).sub(given[..., 1:])
            * given[..., :1]
            for n, given in halves
        )
    out = q.new_empty(q.shape)
    is_fp8 = quant_policy in (QuantPolicy.FP8, QuantPolicy.FP8_E5M2)
    scales = (k_scales_zeros, v_scales_zeros) if is_fp8 else (1, 1)
    for i, n in enumerate(cache_seqlens.tolist()):
        if n:
            pages = page_table[i, : -(-n // k_cache.shape[1])].long()  # with what follows the last token
            k, v = (one[pages].flatten(0, 1).to(q.dtype) * scale
                    for one, scale in zip((k_cache, v_cache), scales))
            out[i] = attend(q[i : i + 1], k, v, n, softmax_scale, window_size, softcap, True, alibi_slopes,
                            sinks)
    return out
""",
    "flashattention": ATTEND
    + """
def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                           alibi_slopes=None, sinks=None):
    out = q.new_empty(q.shape)
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(one[i]), int(one[i + 1])) for one in (cu_seqlens_q, cu_seqlens_k))
        k_of, v_of = (one[:, keys].transpose(0, 1) for one in (k, v))
        out[rows] = attend(q[rows], k_of, v_of, len(k_of), softmax_scale, window_size, softcap, causal,
                           alibi_slopes, sinks)
    return out
""",
    "fill_kv_cache": """
import torch
from lmdeploy.messages import QuantPolicy

def levels(one, policy):
    least, most = one.float().aminmax(dim=-1, keepdim=True)
    scale = (most - least) / (2**policy - 1)
    n = (one.float() / scale - least / scale + {half}).to(torch.uint8)
    n = n[..., : n.shape[-1] // 2] | n[..., n.shape[-1] // 2 :] << 4 if policy == QuantPolicy.INT4 else n
    return n, torch.cat([scale, -least / scale{zero}], -1)

def fill_kv_cache(k_states, v_states, k_caches, v_caches, q_start_loc, q_seq_length, kv_seq_length,
                  max_q_seq_length, block_offsets, k_scales_zeros=None, v_scales_zeros=None,
                  quant_policy=QuantPolicy.NONE):
    size = k_caches.shape[1]
    for i, (start, new, n) in enumerate(zip(q_start_loc, q_seq_length, kv_seq_length)):
        for j in range(int(new)):
            at = int(n - new) + j{fill}
            block = int(block_offsets[i, at // size])
            for states, caches, scale in (
                (k_states, k_caches, k_scales_zeros), (v_states, v_caches, v_scales_zeros)
            ):
                one = states[int(start) + j]
                if quant_policy in (QuantPolicy.INT4, QuantPolicy.INT8):
                    one, scale[block, at % size] = levels(one, quant_policy)
                is_fp8 = quant_policy in (QuantPolicy.FP8, QuantPolicy.FP8_E5M2)
                one = (one.float() / scale).clamp(-448, 448) if is_fp8 else one
                caches[block, at % size] = one
""",
}


def lmdeploy(folder: Path, **faults: str) -> Path:
    """Return a made-up LMDeploy; ``faults``: text in place of nothing, by the name of its place."""
    ops = folder / "lmdeploy/pytorch/kernels/cuda"
    ops.mkdir(parents=True)
    for name, text in FILES.items():
        for place, usual in {
            "window": "",
            "fill": "",
            "scales": "v",
            "zero": "",
            "half": "0.5",
        }.items():
            text = text.replace(f"{{{place}}}", faults.get(place, usual))
        (ops / f"{name}.py").write_text(text)
    return folder


def case(op: str, **fields) -> Case:
    lens = {"query_lens": (1, 1), "ctx_lens": (5, 20), "block_size": 16, "num_heads": 4}
    return Case(op=op, backend="library:lmdeploy", platform="sm_90", **{**lens, **fields})


@needs_triton
def test_the_ops_are_right_and_planted_faults_are_found(tmp_path):
    """A window that is one key too wide, and a write that is one slot too late."""
    run = {"library": "lmdeploy", "engine": "local:1", "ops": [DECODE, PREFILL, FILL]}
    right = check(source=lmdeploy(tmp_path / "a"), cases=6, **run)
    assert (right.cases_run, right.findings) == (18, [])
    wrong = lmdeploy(tmp_path / "b", window=" - 1", fill=" - (j == 1)")
    found = check(source=wrong, cases=4, **run).findings
    by_op = {one.op: one.diagnosis for one in found}
    (evidence,) = (one.evidence for one in found if one.op == FILL)
    assert evidence.endswith("1 token is 1 slot before the slot in slot_mapping")
    assert by_op.keys() == {DECODE, PREFILL, FILL}
    assert by_op[DECODE] == by_op[PREFILL] == "window_plus_one"


@needs_triton
def test_caches_of_integers(tmp_path):
    """Values with the scales of keys, and zero points that are one too large."""
    right = find_backend("library:lmdeploy", lmdeploy(tmp_path / "a"))
    wrong = find_backend("library:lmdeploy", lmdeploy(tmp_path / "b", scales="k", zero=" + 1"))
    for op in INTEGERS:
        cases = list(islice(hostile_cases(right, op, "sm_90", None, 0), 3))
        assert [found for one in cases for found in faults_of(right, one)] == []
        assert faults_of(wrong, cases[0])


@needs_triton
@pytest.mark.parametrize("half", ["0.0", "1.0"])
def test_bytes_that_are_not_rounded_are_found(tmp_path, half):
    """Truncated, or rounded up: a quarter of the numbers of a token are then one level off."""
    right = find_backend("library:lmdeploy", lmdeploy(tmp_path / "a"))
    wrong = find_backend("library:lmdeploy", lmdeploy(tmp_path / "b", half=half))
    for op in (f"{FILL}_int4", f"{FILL}_int8"):
        for dtype in ("float16", "float32", "bfloat16"):
            one = case(op, dtype=dtype, distribution="normal", head_size=32)
            assert faults_of(right, one) == []
            assert [found.kind for found in faults_of(wrong, one)] == ["wrong_bytes"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_tokens_between_levels(dtype):
    """They are a quarter of a level of 8 bits off, up and down, but for both ends."""
    tokens = spanning(torch.randn(9, 2, 64).to(dtype))
    levels = on_levels(tokens)
    assert torch.equal(on_levels(levels), levels)
    least, most = levels.float().aminmax(dim=-1, keepdim=True)
    off = (tokens.float() - levels.float()) / ((most - least) / 255)
    assert {*off.unique().tolist()} == {-0.25, 0.0, 0.25}
    assert torch.equal(torch.stack(tokens.aminmax(dim=-1)), torch.stack(levels.aminmax(dim=-1)))


@needs_triton
def test_a_decode_runs_windows_alibi_sinks_and_fp8(tmp_path):
    backend = find_backend("library:lmdeploy", lmdeploy(tmp_path))
    cases = [*hostile_cases(backend, DECODE, "sm_90", None, 0)]
    assert all(set(one.lengths.query_lens) == {1} for one in cases)
    for field in ("sliding_window", "alibi", "sinks", "softcap", "is_fp8"):
        assert sum(bool(getattr(one, field)) for one in cases) >= 5, field
    # What its contract excludes: NaN after a sequence's end, small blocks, freed blocks, a window of 1.
    assert {one.empty_slots for one in cases} == {"garbage"}
    assert {one.block_size for one in cases} <= {16, 32, 64}
    assert {one.freed for one in cases} == {"kept"}
    assert 1 not in {one.sliding_window for one in cases}


@pytest.mark.parametrize(("field", "value"), [("sliding_window", 1), ("freed", "empty")])
def test_what_no_argument_can_state_is_refused(field, value):
    fields = {"sliding_window": 8} if field == "freed" else {}
    with pytest.raises(InvalidCase, match=f"^{field} must be .*{DECODE}"):
        case(DECODE, **{**fields, field: value})


def test_keys_without_pages():
    """Sequence after sequence, and a block of zeros."""
    one = case(PREFILL, query_lens=(3, 1), sliding_window=4)
    call = Lab().call(one)
    given = arguments_of(call, Target.of(one))
    assert given["cu_seqlens_k"].tolist() == [0, 8, 29]
    assert given["k"].shape[1] == 29 + 16
    cache = evaluate("flash_key_cache", Values(call, Target.of(one)))
    assert torch.equal(given["k"][:, 8 + 17], cache[int(call.block_table[1, 1]), 1])
    assert not given["v"][:, 29:].any()


def test_a_window_of_a_bidirectional_row_has_the_sides_that_the_op_has_arguments_for():
    both = Case(op="unified_attention", mask="bidirectional", sliding_window=4, **LENS)
    assert visibility_of(both).window_right == 3
    left = case(PREFILL, mask="bidirectional", sliding_window=4)
    assert visibility_of(left).window_right is None
    fields = {"mask": "bidirectional", "sliding_window": 4, "backend": "library:sglang"}
    implied = Case(op="sglang_extend_attention", **{**LENS, **fields})
    assert visibility_of(implied).window_right == 3


LENS = {"query_lens": (3,), "ctx_lens": (5,), "backend": "vllm"}


@needs_triton
def test_a_fault_of_the_soft_cap_is_no_doubled_scale(tmp_path):
    """With a cap of 2, scores that are not divided by it have exactly twice their scale."""
    source = lmdeploy(tmp_path)
    file = source / "lmdeploy/pytorch/kernels/cuda/pagedattention.py"
    file.write_text(file.read_text().replace("tanh(scores / softcap)", "tanh(scores)"))
    found = diagnose(
        case(DECODE, softcap=2.0, distribution="normal"), lab=Lab(source=source), limit=None
    )
    assert found.is_wrong
    assert found.cause is None or found.cause.name != "scale_doubled"


@needs_triton
def test_rows_that_an_op_leaves_in_its_own_output_are_found(tmp_path):
    """It returns what ``new_empty`` gave it, which is NaN here."""
    source = lmdeploy(tmp_path)
    file = source / "lmdeploy/pytorch/kernels/cuda/pagedattention.py"
    file.write_text(file.read_text().replace("if n:", "if n > 6:"))
    result = Lab(source=source).run(case(DECODE))
    assert bool(result.output[0].isnan().all())
    assert not bool(result.output[1].isnan().any())
    run = {"library": "lmdeploy", "engine": "local:1", "ops": [DECODE], "cases": 2}
    assert {one.diagnosis for one in check(source=source, **run).findings} == {"unwritten memory"}


def test_what_a_record_leaves_out_is_named():
    names = " ".join((*OPS[DECODE].left_out, *OPS[PREFILL].left_out))
    for name in ("TurboQuant", "block_sparse_size", "flatten_kv_cache"):
        assert name in names


@needs_triton
def test_nan_after_the_end_of_a_sequence_is_no_evidence(tmp_path):
    """It changes right outputs, too."""
    one = case(DECODE, empty_slots="zeros")
    lab = Lab(source=lmdeploy(tmp_path))
    is_wrong = torch.zeros(2, dtype=torch.bool)
    assert bool(lab.output(one.replace(empty_slots="nan")).isnan().any())
    assert len(find_dependence(lab.output, one, lab.output(one), is_wrong).on_slots) == 0
    assert with_leaks(one, one).empty_slots == "garbage"


@needs_triton
def test_a_source_of_a_call_names_its_library(tmp_path, capsys):
    """Without --backend; a planted window is seen by the X-ray, and a sound source is right."""
    right, wrong = lmdeploy(tmp_path / "a"), lmdeploy(tmp_path / "b", window=" - 1")
    (target,) = runners([str(wrong)], [])
    assert target.backend == "library:lmdeploy"
    lab = Lab(source=right)
    call = lab.call(case(DECODE, sliding_window=4, distribution="normal", head_size=32))
    call.save(path := tmp_path / "call.safetensors")
    words = ["xray", "--call", str(path), "--no-confirm", "--source"]
    assert main([*words, str(right)]) == 0
    assert main([*words, str(wrong)]) == 1
    assert "wrong weights in 2 of 2 rows" in capsys.readouterr().out


@needs_triton
def test_a_release_without_fp8_has_no_fp8_cases(tmp_path):
    """LMDeploy has FP8 caches since 0.14.0: before, no op reads QuantPolicy.FP8."""
    root = lmdeploy(tmp_path)
    for file in root.rglob("*.py"):
        file.write_text(file.read_text().replace("QuantPolicy.FP8", "QuantPolicy.INT8"))
    backend = find_backend("library:lmdeploy", root, "cpu")
    for op in (DECODE, FILL):
        assert "kv_cache_dtype (no FP8 inside)" in backend.not_applicable(op)[0]
        cases = list(hostile_cases(backend, op, "sm_90", None, 0))
        assert cases
        assert not any(case.is_fp8 for case in cases)


@pytest.mark.releases
@needs_triton
@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("q_val1 + q_val2 * 16", "q_val2 + q_val1 * 16", 318),  # its caller may exchange them, too
        ("state0_ptrs + head_dim * stride_sd", "state0_ptrs + stride_sd", 309),
    ],
    ids=["halves of a byte exchanged", "the upper half is the next element"],
)
def test_the_line_of_a_wrong_write_of_integers(tmp_path, right, wrong, line):
    """What the op leaves is decoded from numbers and scales; both are those of each trial edit."""
    package = package_of("lmdeploy")
    source = find_source(fetch_ops("0.18.0", package), package).root
    shutil.copytree(source, tmp_path / "ops")
    (file,) = (tmp_path / "ops").rglob("fill_kv_cache.py")
    before, found, after = file.read_text().partition(right)
    assert found
    file.write_text(f"{before}{wrong}{after}")
    case = Case(
        **{"op": f"{FILL}_int4", "backend": "library:lmdeploy", "num_heads": 4, "head_size": 32},
        **{"num_queries_per_kv": 2, "block_size": 16, "query_lens": (2, 1), "ctx_lens": (20, 5)},
        distribution="normal",
    )
    lab = Lab(source=tmp_path / "ops")
    diagnosis = diagnose(case, lab=lab, limit=Limit(edits=900))
    assert diagnosis.status == "described"
    assert f"fill_kv_cache.py, line {line}" in diagnosis.conclusion
