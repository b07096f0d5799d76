"""SGLang's records: lists of slots, windows and masks as SGLang passes them, on ops whose text is ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.plugins import faults_of
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import OPS
from attnlab.checker.check import check, release_plan
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import DEFAULT_CASES, hostile_cases
from attnlab.checker.releases import check_releases, releases_of
from attnlab.contracts.contract import Target
from attnlab.diagnosis.divisions import divisions
from attnlab.kernels import find_backend
from attnlab.kernels.binding import arguments_of
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.reports.upstream import write_reports
from attnlab.tasks.task import InProcess

EXTEND, UNIFIED = "sglang_extend_attention", "sglang_extend_attention_unified"
PREFILL, DECODE = "sglang_prefill_attention", "sglang_decode_attention"
WRITE = "sglang_reshape_and_cache_flash"

OPS_TEXT = """
import torch

def attend(q, k, v, seen, scale, cap):
    group = q.shape[1] // k.shape[1]
    key, value = (one.float().repeat_interleave(group, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), key) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)

def extend_attention_fwd(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr,
                         kv_indices, custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale,
                         sm_scale=None, logit_cap=0.0, sliding_window_size=-1, window_kv_offsets=None):
    for i in range(len(qo_indptr) - 1):
        new = slice(qo_indptr[i], qo_indptr[i + 1])
        old = kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
        key = torch.cat([k_buffer[old].float() * k_scale, k_extend[new].float()])
        value = torch.cat([v_buffer[old].float() * v_scale, v_extend[new].float()])
        at = torch.arange(len(old), len(key))[:, None]
        seen = at >= torch.arange(len(key)) if is_causal else torch.ones(len(at), len(key), dtype=bool)
        if custom_mask is not None:
            skipped = int(window_kv_offsets[i])
            given = custom_mask[mask_indptr[i] : mask_indptr[i + 1]].bool()
            seen = given.view(len(at), skipped + len(key))[:, skipped:]
        if sliding_window_size > -1:
            away = at - torch.arange(len(key))
            seen = seen & (away <= sliding_window_size{fault})
            seen = seen if is_causal else seen & (away >= -sliding_window_size)
        scale = q_extend.shape[2] ** -0.5 if sm_scale is None else sm_scale
        o_extend[new] = attend(q_extend[new], key, value, seen, scale, logit_cap).to(o_extend.dtype)
"""
# That of a release without an argument for the scale.
PREFILL_TEXT = """
from sglang.kernels.ops.attention.extend_attention import attend

def context_attention_fwd(q, k, v, o, b_start_loc, b_seq_len, max_input_len, is_causal=True):
    import torch
    for i in range(len(b_seq_len)):
        rows = slice(b_start_loc[i], b_start_loc[i + 1])
        at = torch.arange(rows.stop - rows.start)
        seen = at[:, None] >= at if is_causal else torch.ones(len(at), len(at), dtype=bool)
        o[rows] = attend(q[rows], k[rows], v[rows], seen, q.shape[2] ** -0.5, 0.0).to(o.dtype)
"""

# The stride of new keys serves for new values, or the lowest bit of a slot is wrong.
WRITE_TEXT = """
def launch_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping):
    size = key_cache.shape[1]
    if {strides}:
        value = value.as_strided(value.shape, (key.stride(0), *value.stride()[1:]))
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            at = divmod(slot ^ {bit}, size)
            key_cache[at], value_cache[at] = key[token], value[token]
"""


def sglang(folder: Path, fault: str = "") -> Path:
    """Return a made-up SGLang with two ops."""
    ops = folder / "sglang/kernels/ops/attention"
    ops.mkdir(parents=True)
    (ops / "extend_attention.py").write_text(OPS_TEXT.replace("{fault}", fault))
    (ops / "prefill_attention.py").write_text(PREFILL_TEXT)
    return folder


def arguments(op: str, **fields) -> dict[str, object]:
    lens = {"query_lens": (3, 2), "ctx_lens": (20, 5), "block_size": 16, **fields}
    case = Case(op=op, num_heads=2, backend="library:sglang", **lens)
    return arguments_of(Lab().call(case), Target.of(case))


def test_a_window_shortens_the_lists_of_slots():
    """The first new token, at position 20, sees 7 keys with a window of 7: 6 of them of the context."""
    whole, given = arguments(EXTEND), arguments(EXTEND, sliding_window=7)
    assert whole["kv_indptr"].tolist() == [0, 20, 25]
    assert given["kv_indptr"].tolist() == [0, 6, 11]
    assert given["kv_indices"].tolist() == whole["kv_indices"][14:].tolist()
    assert given["kv_indices"].dtype == torch.int64  # with int32, offsets of the kernel would wrap
    assert (whole["sliding_window_size"], given["sliding_window_size"]) == (-1, 6)
    every = arguments(UNIFIED, sliding_window=7)
    assert every["kv_indptr"].tolist() == [0, 9, 16]
    assert (every["prefix_lens"].tolist(), every["window_start_pos"].tolist()) == ([6, 5], [14, 0])


@pytest.mark.parametrize(("op", "first"), [(EXTEND, 0), (UNIFIED, 14)])
def test_a_tree_is_a_mask_of_bytes(op, first):
    """A row has all keys, in the unified op only those in its list. Nothing is added to scores."""
    given = arguments(op, sliding_window=7, mask="tree", tree_parents=(0, 0, 0))
    mask, starts = given["custom_mask"], given["mask_indptr"]
    assert starts.tolist() == [0, 3 * (23 - first), 3 * (23 - first) + 2 * 7]
    assert mask[: starts[1]].view(3, -1)[:, -3:].tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert bool(mask[: starts[1]].view(3, -1)[:, :-3].all())
    drawn = Lab().call(
        Case(op=op, backend="library:sglang", query_lens=(5,), ctx_lens=(9,), mask="tree")
    )
    assert set(drawn.qq_bias.unique().tolist()) == {0.0, -torch.inf}


MERGE_TEXT = """
def merge_state_triton(prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse):
    prefix = prefix_lse.masked_fill(prefix_lse.isposinf(), -float("inf"))
    suffix = suffix_lse.masked_fill({tested}.isposinf(), -float("inf"))
    output_lse.copy_(prefix.logaddexp(suffix))
    parts = ((prefix, prefix_output), (suffix, suffix_output))
    output.copy_(sum((lse - output_lse).exp()[..., None] * one for lse, one in parts))
"""


def hostile(root: Path, op: str, **fields) -> list[tuple[Case, list[Finding]]]:
    """Return the hostile Cases with some fields, and the faults that each shows."""
    backend = find_backend("library:sglang", root)
    cases = [*hostile_cases(backend, op, "sm_90", DEFAULT_CASES, 0)]
    kept = [one for one in cases if all(getattr(one, k) == v for k, v in fields.items())]
    return [(one, faults_of(backend, one)) for one in kept]


@needs_triton
def test_parts_without_keys_have_both_infinities(tmp_path):
    """A suffix of +inf that is not replaced makes the output NaN."""
    lens = {"query_lens": (3, 3, 1), "ctx_lens": (0, 0, 20)}
    for tested, is_right in (("suffix_lse", True), ("prefix_lse", False)):
        root = sglang(tmp_path / tested)
        file = root / "sglang/kernels/ops/attention/merge_state.py"
        file.write_text(MERGE_TEXT.replace("{tested}", tested))
        ((case, found),) = hostile(root, "sglang_merge_state", **lens)
        assert (found == []) == is_right, found
    given = arguments_of(Lab().call(case), Target.of(case))
    for name in ("prefix_lse", "suffix_lse"):
        infinities = given[name][:6, 0][given[name][:6, 0].isinf()].tolist()
        assert sorted({*infinities}) == [-torch.inf, torch.inf]


@needs_triton
def test_a_scale_that_multiplies_earlier_tiles_again_shows(tmp_path):
    """It needs a context of several tiles of 64 keys, and a scale that is not 1."""
    again = (
        "value[: len(old) - (len(old) - 1) % 64 - 1] *= v_scale\n        at = torch.arange(len(old)"
    )
    for fault in ("", again):
        root = sglang(tmp_path / str(len(fault)))
        file = root / "sglang/kernels/ops/attention/extend_attention.py"
        text = file.read_text()
        file.write_text(text.replace("at = torch.arange(len(old)", fault, 1) if fault else text)
        ((_, found),) = hostile(root, EXTEND, ctx_lens=(70, 140), is_fp8=True)
        assert bool(found) == bool(fault)


@needs_triton
def test_parts_that_tiles_do_not_divide_show_hidden_keys(tmp_path):
    """Keys of the next part, in the last tile of a part, count with a score of 0."""
    usual, tiles = "min(first + size, n)", "min(first + -(-size // 64) * 64, n)"
    for end in (usual, tiles):
        root = sglang(tmp_path / str(len(end)))
        file = root / "sglang/kernels/ops/attention/decode_attention.py"
        file.write_text(DECODE_TEXT.replace(usual, end))
        lens = {"num_splits": 2, "ctx_lens": (60, 150), "num_queries_per_kv": 1}
        ((_, found),) = hostile(root, DECODE, **lens)
        assert bool(found) == (end == tiles)


# Parts of a multiple of 32 keys; the hidden keys of the last tile of 64 have score and value 0.
DECODE_TEXT = """
import torch

def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse,
                         num_kv_splits, max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0):
    for i in range(len(q)):
        slots = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].long()
        n, splits = len(slots), int(num_kv_splits[i])
        size = -(-(-(-n // splits)) // 32) * 32
        parts = []
        for first in range(0, n, size):
            own = slots[first : first + size]
            group = q.shape[1] // k_buffer.shape[1]
            key, value = (one[own].float().repeat_interleave(group, 1) for one in (k_buffer, v_buffer))
            scores = torch.einsum("hd,khd->hk", q[i].float(), key * k_scale) * sm_scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            ghosts = min(first + size, n) - first - len(own)
            scores = torch.cat([scores, scores.new_zeros(len(scores), ghosts)], 1)
            weights = scores.softmax(-1)[:, : len(own)]
            parts.append((scores.logsumexp(-1), torch.einsum("hk,khd->hd", weights, value) * v_scale))
        lse = torch.stack([one for one, _ in parts]).softmax(0)[..., None]
        o[i] = (lse * torch.stack([one for _, one in parts])).sum(0).to(o.dtype)
"""


def test_only_masks_of_the_record_are_taken():
    with pytest.raises(InvalidCase, match=r"^mask must be causal or bidirectional or tree with"):
        Case(op=EXTEND, backend="library:sglang", query_lens=(5,), ctx_lens=(9,), mask="ranges")


def test_the_parts_of_a_decode_are_multiples_of_32_keys():
    lens = {"query_lens": (1,), "ctx_lens": (99,), "num_splits": 3, "backend": "library:sglang"}
    case = Case(op=DECODE, **lens)
    problem = Problem.of_call(Lab().call(case), Target.of(case), (DECODE,))
    (found,) = {str(_ends(one.parts(problem, 0))) for one in divisions(problem) if one.merge}
    assert found == "[64, 100]"


def _ends(parts):
    return [part[-1][1] for part in parts]


@needs_triton
def test_a_sound_op_has_no_finding_and_states_what_is_left_out(tmp_path):
    flags = {"library": "sglang", "ops": [EXTEND], "engine": "local:1"}
    right = check(source=sglang(tmp_path), cases=8, **flags)
    assert (right.cases_run, right.findings) == (8, [])
    reasons = [line for line in right.left_out if "left out: score_mod" in line]
    assert len(reasons) == 1
    assert reasons[0].startswith(
        f"{EXTEND}: left out: score_mod, xai_temperature_len: attnlab has no"
    )


@needs_triton
@pytest.mark.parametrize(
    ("strides", "bit", "verdict"), [("False", 0, "match"), ("True", 0, "mismatch")]
)
def test_new_values_have_a_stride_of_their_own(tmp_path, strides, bit, verdict):
    case = Case(
        **{"op": WRITE, "backend": "library:sglang", "op_argument": "gaps", "num_heads": 2},
        **{"query_lens": (3,), "ctx_lens": (5,), "block_size": 16, "head_size": 32},
    )
    assert Lab(source=write_source(tmp_path, strides, bit)).run(case).status == verdict


@needs_triton
def test_a_check_says_where_misplaced_tokens_are(tmp_path):
    source = write_source(tmp_path, "False", 1)
    flags = {"library": "sglang", "ops": [WRITE], "engine": "local:1", "cases": 1}
    (found,) = check(source=source, **flags).findings
    assert (
        "is not written: its slot holds what was there before; 1 token is 1 slot" in found.evidence
    )


def write_source(folder: Path, strides: str, bit: int) -> Path:
    """Return a made-up SGLang with a cache write."""
    ops = folder / "sglang/kernels/ops/kvcache"
    ops.mkdir(parents=True)
    text = WRITE_TEXT.replace("{strides}", strides).replace("{bit}", str(bit))
    (ops / "cache_ops.py").write_text(text)
    return folder


@needs_triton
def test_releases_of_a_library(tmp_path):
    """A window that is off by one is found; a scale without an argument is not passed, and no fault."""
    paths = {"0.1.0": sglang(tmp_path / "a", " - 1"), "0.2.0": sglang(tmp_path / "b")}
    plan = release_plan(releases_of(paths, "cpu", "sglang"), ops=[EXTEND, PREFILL], cases=4)
    table = check_releases(plan, InProcess())
    (fault,) = (one.to_dict() for one in table.faults)
    assert (fault["op"], fault["first"], fault["last"]) == (EXTEND, "0.1.0", "0.1.0")
    assert "window_minus_one" in fault["names"]
    assert ([*table.libraries], table.not_run) == (["SGLang"], [])
    line = next(iter(find_backend("library:sglang", paths["0.2.0"]).not_applicable(PREFILL)))
    assert line == f"{PREFILL}: not applicable: sm_scale (no argument sm_scale)"
    with pytest.raises(InvalidCase, match=r"^op must be one of .*, got 'unified_attention'"):
        release_plan(releases_of(paths, "cpu", "sglang"), ops=["unified_attention"])


@needs_triton
@pytest.mark.parametrize(("fault", "code"), [(" + 1", 1), ("", 0)])
def test_a_script_without_attnlab_finds_the_fault(tmp_path, fault, code):
    """It imports the op by its name, and its tensors share memory as in the call; freed slots are NaN."""
    root = sglang(tmp_path / "sglang-1", fault)
    backend = find_backend("library:sglang", root, "cpu")
    case = Case(
        **{"op": EXTEND, "backend": backend.name, "num_heads": 4, "num_queries_per_kv": 2},
        **{"query_lens": (3, 2), "ctx_lens": (40, 5), "block_size": 16, "sliding_window": 4},
        **{"head_size": 16, "sinks": False, "empty_slots": "nan", "distribution": "normal"},
        **{"stage": "sound", "sm_scale": 0.5, "num_blocks": 9},
    )
    found = Finding(op=EXTEND, kind="wrong_output", case=case, evidence="seen", diagnosis="a")
    files = write_reports([found], tmp_path / "out", backend.version, "cpu", backend)
    script, text = sorted(files, key=lambda file: file.suffix != ".py")
    assert "attnlab" not in script.read_text()
    assert "| SGLang |" in text.read_text()
    env = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, check=False
    )
    rows = "3 of 5 rows are wrong" if code else "every row is right"
    assert (done.returncode, rows in done.stdout) == (code, True), done.stdout + done.stderr


@needs_triton
@pytest.mark.parametrize(("slots", "code"), [("", 0), (" % 2**27", 1)])
def test_a_script_of_blocks_far_away(tmp_path, slots, code):
    """It holds the blocks in use alone, and room before them for offsets that wrap."""
    root = sglang(tmp_path / "sglang-1")
    backend = find_backend("library:sglang", root, "cpu")
    case = Case(
        **{"op": EXTEND, "backend": backend.name, "num_heads": 2, "head_size": 16},
        **{"query_lens": (3, 2), "ctx_lens": (40, 5), "block_size": 16, "stage": "sound"},
        **{"first_block": 2**23 + 1, "distribution": "normal", "sm_scale": 0.5},
    )
    found = Finding(op=EXTEND, kind="wrong_output", case=case, evidence="seen", diagnosis="a")
    files = write_reports([found], tmp_path / "out", backend.version, "cpu", backend)
    (script,) = (file for file in files if file.suffix == ".py")
    assert script.stat().st_size < 100_000
    for file in root.rglob("extend_attention.py"):
        file.write_text(file.read_text().replace("k_buffer[old]", f"k_buffer[old{slots}]"))
    env = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.library == "sglang"])
def test_what_a_record_leaves_out_has_a_reason(name):
    assert all(what and why for what, why in OPS[name].left_out.items())
