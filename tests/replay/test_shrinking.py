"""Shrinking a call: what remains fails in the same way and violates nothing new; its script reproduces it."""

import ast
import dataclasses
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.clones import UNIFIED_FAULT, clone_of
from helpers.commands import document, error_line
from helpers.plugins import RIGHT
from helpers.saved_calls import WRONG, call_of, flash_call, kernel_file
from helpers.sources import of_release
from helpers.upstream import outcome_of, script_outcome

import attnlab
from attnlab.case.errors import InvalidCall
from attnlab.contracts.contract import Target
from attnlab.kernels.run_call import run_call
from attnlab.kernels.runner import one_backend
from attnlab.kernels.vllm.source import find_source
from attnlab.replay.parts import (
    KeptSequence,
    can_drop_first_rows,
    with_head_size,
    with_kv_heads,
    with_query_head,
    with_sequences,
    without_tokens,
)
from attnlab.replay.shrinking import Judge
from attnlab.reports.upstream import script_of
from attnlab.tensors.case_call import mask_of

LARGE = {"query_lens": (5, 1, 9), "ctx_lens": (40, 33, 70), "num_heads": 8}
SIZES = {"sequences": 1, "rows": 2, "heads": 1, "KV heads": 1, "head_size": 16, "blocks": 1}


def test_the_smallest_call_still_fails(tmp_path):
    """A row that sees one key too many needs a next row, if that key is to be one of the sequence."""
    wrong = kernel_file(tmp_path, WRONG, "wrong")
    found = attnlab.shrink_call(call_of(**LARGE), backend=wrong)
    assert (found.status, found.causes) == ("mismatch", ("causal_plus_one",))
    assert {**found.after, **SIZES, "longest context": 0} == found.after
    assert found.is_complete
    assert attnlab.diagnose(found.call).is_wrong
    (one,) = attnlab.replay_call(found.call, backends=[wrong]).replays
    assert (one.status, one.from_recorded.other_bits) == ("mismatch", 0)
    assert attnlab.replay_call(found.call).replays[0].status == "match"


def test_all_defects_that_explain_every_call_are_stated(tmp_path, monkeypatch):
    """A defect that a smaller call excludes is not; a call that none of them explains is not taken."""
    wrong = kernel_file(tmp_path, WRONG, "wrong")
    answers = iter([("a", "b", "c"), ("b", "c"), ("d",)])
    monkeypatch.setattr(Judge, "causes", lambda self, failure: next(answers, ("c", "b")))
    found = attnlab.shrink_call(call_of(**LARGE), backend=wrong)
    assert found.causes == ("b", "c")
    assert found.sentences()[0].endswith("b, c each explain it")


def test_the_recorded_output_is_cut_without_a_run(tmp_path):
    wrong = one_backend(None, kernel_file(tmp_path, WRONG, "wrong"), None)
    call = call_of(**LARGE)
    call = dataclasses.replace(call, output=run_call(call, wrong, attnlab.Case()))
    found = attnlab.shrink_call(call)
    assert (found.after["rows"], found.after["heads"], found.backend) == (2, 1, "")
    assert found.after["head_size"] == 32
    assert attnlab.diagnose(found.call).is_wrong


def test_no_violation_is_added():
    """The row that is never written needs an int64 query_start_loc; a call without one violates nothing."""
    call = call_of(
        op="chunked_prefill_paged_decode", stage="int32_before_cumsum", platform="gfx942"
    )
    found = attnlab.shrink_call(call, backend="model")
    assert found.is_failing
    kinds = [{one.kind for one in attnlab.violations(one)} for one in (call, found.call)]
    assert kinds[1] <= kinds[0]
    assert found.call.query_start_loc.dtype == torch.int64


def test_a_rejection_is_shrunk_to_the_same_rejection(tmp_path):
    text = RIGHT.replace(
        "    key_cache, value", "    assert len(call.query) < 4, 'too many'\n    key_cache, value"
    )
    found = attnlab.shrink_call(call_of(**LARGE), backend=kernel_file(tmp_path, text, "rejecting"))
    assert (found.status, found.after["rows"]) == ("rejected", 4)
    assert "too many" in found.reason


def test_a_call_that_does_not_fail(capsys, tmp_path):
    assert attnlab.shrink_call(call_of()).status == "match"
    call_of().save(tmp_path / "call.safetensors")
    command = ["shrink", str(tmp_path / "call.safetensors"), "--out", str(tmp_path / "out")]
    assert document(capsys, command, 0)["files"] == []
    assert not (tmp_path / "out").exists()
    call = dataclasses.replace(call_of(op="context_attention_fwd"), qq_bias=torch.zeros(99, 99))
    with pytest.raises(InvalidCall, match="mask must be causal"):
        attnlab.shrink_call(call, backend="model")


def test_the_time_limit(tmp_path):
    wrong = kernel_file(tmp_path, WRONG, "wrong")
    found = attnlab.shrink_call(call_of(**LARGE), backend=wrong, seconds=1e-9)
    assert (found.is_complete, found.steps, found.tries) == (False, (), 1)
    assert found.is_failing


def test_the_command_writes_the_call(capsys, tmp_path):
    wrong, path = kernel_file(tmp_path, WRONG, "wrong"), tmp_path / "call.safetensors"
    call_of(**FAULTY).save(path)
    out = tmp_path / "small.safetensors"
    command = ["shrink", str(path), "--backend", wrong, "--out", str(out)]
    found = document(capsys, command, 1)
    assert found["files"] == [str(out)]
    assert "KernelCall" in found["no_script"]
    assert attnlab.read_call(out).query.shape == (2, 1, 16)
    assert "out must" in error_line(capsys, [*command[:-1], "/no/such/folder/x"])


def test_parts_keep_their_numbers(tmp_path):
    """A correct kernel returns the same rows for a part; keys of dropped blocks change them."""
    right = one_backend(None, kernel_file(tmp_path, RIGHT, "right"), None)
    call, case = flash_call(), attnlab.Case()
    output = run_call(call, right, case)

    def rows(part):
        return run_call(part, right, case)

    alone = with_sequences(call, [KeptSequence(seq=0, first=1, last=3)])
    assert (alone.seq_lens.tolist(), alone.max_seq_len, len(alone.block_table)) == ([43], 43, 1)
    assert torch.allclose(rows(alone), output[1:3], atol=1e-3)
    turned = with_sequences(
        call, [KeptSequence(seq=s, first=0, last=n) for s, n in ((1, 1), (0, 5))]
    )
    assert torch.allclose(rows(turned), output[[5, 0, 1, 2, 3, 4]], atol=1e-3)
    assert torch.allclose(rows(with_kv_heads(call, range(1, 2))), output[:, 2:], atol=1e-3)
    assert torch.allclose(rows(with_query_head(call, 3)), output[:, 3:], atol=1e-3)
    single = with_sequences(call, [KeptSequence(seq=1, first=0, last=1)])
    shorter = without_tokens(single, 16)
    blocks = with_sequences(single, [KeptSequence(seq=0, first=0, last=1, blocks=1)])
    assert torch.equal(rows(shorter), rows(blocks))
    assert not torch.allclose(rows(shorter), output[5:], atol=1e-2)
    smaller = with_head_size(call, 16)
    assert smaller.key_cache.shape[2] * smaller.key_cache.shape[4] == 16
    assert attnlab.replay_call(smaller, backends=["model"]).exit_code == 0


OWN = """'''A kernel in torch, with two backslashes: \\\\.'''
import torch

def mine(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, sm_scale):
    rows = []
    for seq, last in enumerate(seq_lens.tolist()):
        own = slice(int(query_start_loc[seq]), int(query_start_loc[seq + 1]))
        k, v = (c[block_table[seq].long()].flatten(0, 1)[:last].float() for c in (key_cache, value_cache))
        scores = torch.einsum("qhd,khd->hqk", query[own].float(), k) * sm_scale
        away = torch.arange(last) - torch.arange(last - (own.stop - own.start), last)[:, None]
        weights = scores.masked_fill(away > FIRST, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype))
    return torch.cat(rows)
"""


def test_the_script_of_an_own_kernel(tmp_path):
    """Its script fails with a mask off by one, passes with the right one, and does not import attnlab."""
    found = {}
    for name, first in (("wrong", "1"), ("right", "0")):
        path = tmp_path / f"{name}.py"
        path.write_text(OWN.replace("FIRST", first))
        backend = one_backend(None, f"{path}:mine", None)
        call = call_of(op="unified_attention", query_lens=(3,), ctx_lens=(14,), num_heads=2)
        target = Target.of(attnlab.Case(platform=call.origin.platform))
        text, why = script_of(call, target, backend, "it is wrong")
        assert why == ""
        assert "attnlab" not in text
        script = tmp_path / f"script_{name}.py"
        script.write_text(text)
        run = partial(runpy.run_path, str(script), run_name="__main__")
        found[name], printed = outcome_of(run)
        assert "Traceback" not in printed
    assert found == {"wrong": 1, "right": 0}


def test_calls_without_a_script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN.replace("FIRST", "0"))
    own = one_backend(None, f"{path}:mine", None)
    whole = kernel_file(tmp_path, RIGHT, "whole")
    target = Target.of(attnlab.Case())

    def why(call, backend=own):
        return script_of(call, target, backend, "")[1]

    call = call_of(op="unified_attention")
    assert why(call) == ""
    assert "on a cache" in why(call_of(op="merge_attn_states"))
    assert "strides" in why(call_of(kv_layout="HND"))
    assert "KernelCall" in why(call, one_backend(None, whole, None))
    assert "argument causal" in why(dataclasses.replace(call, causal=False))
    assert "--kernel" in why(call, None)


FAULTY = {"query_lens": (2,), "ctx_lens": (14,), "num_heads": 2}
SOUND = {
    "fp8": {
        "op": "chunked_prefill_paged_decode",
        "query_lens": (3, 1),
        "ctx_lens": (17, 20),
        "num_heads": 2,
        "kv_cache_dtype": "fp8",
        "k_scale": 0.25,
        "v_scale": 2.0,
        "sliding_window": 9,
    },
    "decode": {"op": "decode_attention_fwd", "query_lens": (1, 1), "ctx_lens": (9, 20)},
    "mask": {"op": "context_attention_fwd", "mask": "bidirectional", "sliding_window": 6},
}


@pytest.mark.slow
@pytest.mark.releases
def test_scripts_reproduce_calls(capsys, tmp_path):
    """The script of a shrunk call fails on the clone, and scripts of sound calls do not."""
    clone = clone_of(of_release("0.33.0"), tmp_path / "clone", *UNIFIED_FAULT)
    path, files = tmp_path / "call.safetensors", []
    for name, changes in SOUND.items():
        call = call_of(**changes)
        script = tmp_path / f"{name}.py"
        target = Target.of(attnlab.Case(platform=call.origin.platform))
        text, why = script_of(call, target, one_backend(clone, None, "cpu"), "it is wrong")
        assert why == ""
        ast.parse(text)
        assert "attnlab" not in text
        script.write_text(text)
        files.append(str(script))
    call_of(**FAULTY).save(path)
    small = tmp_path / "small.safetensors"
    command = ["shrink", str(path), "--source", str(clone), "--device", "cpu", "--out", str(small)]
    written = document(capsys, command, 1)["files"]
    assert written == [str(small), str(small.with_suffix(".py"))]
    for script, code in [*((file, 0) for file in files), (written[1], 1)]:
        found, text = script_outcome(Path(script), find_source(clone))
        assert found == code, text


FLAKY = (
    RIGHT
    + """

right, runs = my_attention, []


def my_attention(call):
    right(call)
    runs.append(call)
    if len(runs) % 2 == 0:
        call.output[0] = 7.0


my_attention.op = right.op
my_attention.kv_cache_dtypes = right.kv_cache_dtypes
"""
)


def test_equal_runs_that_differ_have_no_verdict(capsys, tmp_path):
    """A kernel that damages a row now and then is neither shrunk nor replayed to a verdict."""
    call, flaky = call_of(), kernel_file(tmp_path, FLAKY, "flaky")
    found = attnlab.shrink_call(call, backend=flaky)
    assert (found.status, found.steps) == ("not deterministic", ())
    assert "the same call gives different outputs" in found.sentences()[0]
    replays = attnlab.replay_call(call, backends=[flaky])
    assert (replays.replays[0].status, replays.exit_code) == ("not deterministic", 1)
    path, out = tmp_path / "call.safetensors", tmp_path / "small"
    call.save(path)
    command = ["shrink", str(path), "--backend", flaky, "--out", str(out)]
    assert document(capsys, command, 1)["status"] == "not deterministic"
    assert not out.exists()


# Parts of calls with a mask: the kept rows see the same kept keys as before.


LENGTHS = {"query_lens": (6, 5), "ctx_lens": (40, 50)}
CALLS = {
    "bidirectional": {"sliding_window": 5},
    "causal_by_sequence": {"causal_seqs": (0, 1)},
    "ranges": {"mm_prefix_range": ((2, 18, 30, 43), (0, 0, 49, 54)), "sliding_window": 4},
    "ranges_in_window": {"mm_prefix_range": ((36, 42), (17, 52)), "sliding_window": 7},
    "prefix_and_window": {"rswa_prefix_lens": (25, 9), "sliding_window": 3},
    "chunks": {"sliding_window": 16, "chunk_lookback": 1},
    "tree": {"tree_parents": (0, 0, 1, 1, 0, 4)},
}


def seen(call, seq, rows):
    """Return which keys some rows of a sequence see, [rows, keys]."""
    mask = mask_of(call, seq)
    return mask.visible(torch.arange(mask.ctx_len, mask.seq_len)[rows.start : rows.stop])


@pytest.mark.parametrize("mask", CALLS)
def test_the_rows_see_the_same_keys(mask):
    """Rows are dropped at the end of one sequence, and a block of 16 keys at the begin of the other."""
    call = call_of(mask=mask, **LENGTHS, **CALLS[mask])
    kept = [
        KeptSequence(seq=1, first=0, last=5, blocks=1),
        KeptSequence(seq=0, first=0, last=4),
    ]
    part = with_sequences(call, kept)
    assert torch.equal(seen(part, 0, range(5)), seen(call, 1, range(5))[:, 16:])
    assert torch.equal(seen(part, 1, range(4)), seen(call, 0, range(4))[:, :44])
    shorter = without_tokens(with_sequences(call, [KeptSequence(seq=0, first=0, last=6)]), 16)
    assert torch.equal(seen(shorter, 0, range(6)), seen(call, 0, range(6))[:, 16:])


@pytest.mark.parametrize("mask", [mask for mask in CALLS if mask != "tree"])
def test_dropped_first_rows_become_context(mask):
    call = call_of(mask=mask, **LENGTHS, **CALLS[mask])
    part = with_sequences(call, [KeptSequence(seq=0, first=2, last=6)])
    assert torch.equal(seen(part, 0, range(4)), seen(call, 0, range(2, 6)))


def test_a_tree_without_its_first_rows_keeps_their_branches():
    """The bias is cut by the rows that every sequence drops; one sequence alone cannot drop any."""
    call = call_of(mask="tree", **LENGTHS, **CALLS["tree"])
    part = with_sequences(call, [KeptSequence(seq=0, first=2, last=5)])
    assert torch.equal(part.qq_bias, call.qq_bias[2:5, 2:5])
    assert (can_drop_first_rows(call), can_drop_first_rows(part)) == (False, True)


def test_a_call_with_a_mask_loses_rows_and_context(tmp_path):
    """A kernel that is causal is wrong on a call with ranges: two rows and no context show it."""
    call = call_of(mask="ranges", **LENGTHS, mm_prefix_range=((38, 45), (0, 0)))
    causal = RIGHT + "\nmy_attention.masks = ('causal', 'ranges')\n"
    found = attnlab.shrink_call(call, backend=kernel_file(tmp_path, causal, "causal"))
    assert found.is_failing
    assert found.is_complete
    sizes = {name: found.after[name] for name in ("sequences", "rows", "heads")}
    assert sizes == {"sequences": 1, "rows": 2, "heads": 1}
    assert found.after["longest context"] == 0
    assert found.call.mm_prefix_range.tolist() == [[[0, 1]]]
    assert dataclasses.replace(found.call, mm_prefix_range=None).visibility.is_plain
