"""Capture of another library's ops: how their arguments are read, and how processes are reached."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import library_server
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.cli.main import main
from attnlab.contracts.contract import Target
from attnlab.diagnosis.captured import problem_of
from attnlab.kernels.binding import arguments_of
from attnlab.kernels.vllm.source import fetch_ops, find_source
from attnlab.lab.lab import Lab
from attnlab.library.op import Op, ops_of, package_of
from attnlab.recorder.arguments import BoundArguments
from attnlab.recorder.records import call_of, output_of
from attnlab.serving.begun_op import check_values
from attnlab.serving.plugin import SITE
from attnlab.serving.settings import CaptureSettings, captured_libraries
from attnlab.tensors.call import KernelCall, Origin

# Their caches have other numbers, or another form, than that of a call.
UNREAD = ("_int8", "_int4", "_per_token", "_int8kv")
OPS = {op.name: op for name in captured_libraries() for op in ops_of(name) if op.scores}
READ = [name for name in OPS if not name.endswith(UNREAD)]
FEATURES = (
    *({}, {"sliding_window": 7}, {"softcap": 3.0}, {"alibi": True}, {"sinks": True}),
    {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 0.25},
)


def arguments(op: Op, **fields) -> tuple[KernelCall, BoundArguments]:
    """Return a call with its correct output, and the arguments that the library's caller passes."""
    lens = {"query_lens": (3, 2), "ctx_lens": (20, 5)}
    if not op.prefill:
        lens = {"query_lens": (1, 1), "ctx_lens": (20, 5)}
    if not op.context:
        lens["ctx_lens"] = (0, 0)
    case = Case(
        **{"op": op.name, "backend": f"library:{op.library}", "num_heads": 4, "head_size": 32},
        **{"num_queries_per_kv": 2, "block_size": 16, "distribution": "normal", **lens, **fields},
        platform=op.platform_of("sm_90"),
    )
    call = Lab().call(case).with_buffer()
    rows, heads = torch.arange(len(call.query)), torch.arange(4)
    right = problem_of(call).correct_rows(rows, heads).output.to(call.query.dtype)
    given = arguments_of(dataclasses.replace(call, output=right), Target.of(case))
    return dataclasses.replace(call, output=right), BoundArguments(given, {})


def read(op: Op, given: BoundArguments, output: torch.Tensor) -> KernelCall:
    origin = Origin(op=f"{op.library}.{op.function}", program=op.library)
    return call_of(op, given, origin, output)


def num_wrong(call: KernelCall) -> int:
    return len(check_values(call, rows=None, heads=None, seed=0).wrong)


@pytest.mark.parametrize("name", READ)
def test_arguments_are_read_as_the_record_binds_them(name):
    op, tried = OPS[name], 0
    for fields in FEATURES:
        try:
            call, given = arguments(op, **fields)
        except InvalidCase:
            continue  # the op has no such feature
        made, tried = read(op, given, call.output), tried + 1
        assert made.unknown_arguments == ()
        assert num_wrong(made) == 0
        bad = call.output.clone()
        bad[1, 1] *= -2
        assert num_wrong(dataclasses.replace(made, output=bad)) == 1
        assert not made.is_foreign
    assert tried


@pytest.mark.parametrize("name", sorted(OPS.keys() - set(READ)))
def test_caches_that_no_call_has_are_refused(name):
    call, given = arguments(OPS[name])
    with pytest.raises(InvalidCall, match="key_cache must be one that a call can hold"):
        read(OPS[name], given, call.output)


def test_what_a_call_does_not_state_is_not_decided():
    op = OPS["sglang_extend_attention"]
    call, given = arguments(op, mask="tree")
    assert set(read(op, given, call.output).unknown_arguments) >= {"custom_mask", "mask_indptr"}
    call, given = arguments(op)
    for name, value in {"sliding_window_size": 3, "score_mod": "a function"}.items():
        changed = BoundArguments({**given, name: value}, {"score_mod": None})
        found = read(op, changed, call.output)
        assert (name in found.unknown_arguments) == (name == "score_mod")
        assert found.sliding_window == (4 if name == "sliding_window_size" else 0)
    lens = BoundArguments({**given, "qo_indptr": given["qo_indptr"] * 1, "max_len_extend": 2}, {})
    assert read(op, lens, call.output).unknown_arguments == ()
    call, given = arguments(OPS["lightllm_llama_context"])
    moved = BoundArguments({**given, "b_start_loc": given["b_start_loc"] + 1}, {})
    assert read(OPS["lightllm_llama_context"], moved, call.output).unknown_arguments == (
        "b_start_loc",
    )


def test_an_output_with_a_dimension_of_its_own():
    op = OPS["lmdeploy_paged_attention"]
    call, given = arguments(op)
    assert output_of(op, given, call.output[None]).shape == call.output.shape
    assert output_of(OPS["sglang_decode_attention"], {}, None) is None


def test_settings():
    assert captured_libraries() == ["aiter", "lightllm", "lmdeploy", "sglang"]
    for fields in ({"library": "vllm"}, {"library": "sglang", "layer": (1, 2)}):
        with pytest.raises(InvalidCase):
            CaptureSettings(out="x", **fields)


DECODE = """
import torch

def gqa_decode_attention_fwd(q, k, v, o, req_to_tokens, b_req_idx, b_seq_len):
    for i, request in enumerate(b_req_idx):
        slots = req_to_tokens[request, FIRST : b_seq_len[i]].long()
        key, value = (one[slots].repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = torch.einsum("hd,khd->hk", q[i], key) * q.shape[2] ** -0.5
        o[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
"""


def made_up(folder: Path, first: str) -> Path:
    """Return a LightLLM whose decode begins at the key ``first``, an expression."""
    file = folder / f"{library_server.LIGHTLLM.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    file.write_text(DECODE.replace("FIRST", first))
    return folder


def captured(folder: Path, out: Path, method: str, library: str, capfd) -> tuple[int, dict]:
    """Return exit code and report of a server whose calls are all compared."""
    words = [sys.executable, library_server.__file__, str(folder), method, library]
    flags = ["--library", library, "--sample", "1", "--rows", "all", "--heads", "all", "--json"]
    code = main(["capture", "--out", str(out), *flags, "--step", "1", "--", *words])
    return code, json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_fault_in_a_child_is_found_and_kept(tmp_path, capfd, method):
    bad = made_up(tmp_path / "bad", "1 if i == 1 else 0")
    code, report = captured(bad, tmp_path / "out", method, "lightllm", capfd)
    assert code == 1
    (first,) = report["found"]
    assert first["kind"] == "value"
    assert (first["seq"], first["position"], first["times"]) == (1, 32, 2)
    assert first["layer"] == f"{library_server.LIGHTLLM}.gqa_decode_attention_fwd"
    assert "first" in first["diagnosis"]
    assert report["processes"][0]["counts"]["checked"] == 2
    call = KernelCall.load(tmp_path / "out" / first["facts"]["call"])
    assert call.op == "lightllm_llama_gqa_decode"
    assert call.origin.program == "lightllm"


def test_right_calls_are_right_and_kept_on_request(tmp_path, capfd):
    code, report = captured(
        made_up(tmp_path / "a", "0"), tmp_path / "b", "spawn", "lightllm", capfd
    )
    assert (code, report["found"], report["unchecked"], report["errors"]) == (0, [], {}, [])
    assert [one["why"] for one in report["saved"]] == ["requested"]


def test_a_process_without_the_library_is_not_touched(tmp_path, capfd):
    code = "import sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    words = ["--", sys.executable, "-c", code]
    assert main(["capture", "--out", str(tmp_path), "--library", "sglang", *words]) == 3
    assert "no process of the command called an attention op of SGLang" in capfd.readouterr().out


def test_another_sitecustomize_runs_first(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.environ['SEEN'] = __file__\nNAME = 1\n"
    )
    paths = os.pathsep.join((str(SITE), str(tmp_path), *sys.path))
    code = "import os, sys, sitecustomize; print(os.environ['SEEN'], sitecustomize.NAME)"
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop("ATTNLAB_CAPTURE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py"), "1"]
    assert done.stderr == ""


@pytest.mark.releases
@needs_triton
def test_sglangs_own_kernel(tmp_path, capfd):
    ops = find_source(fetch_ops("0.5.23", package_of("sglang")), package_of("sglang")).root
    code, report = captured(ops, tmp_path / "right", "spawn", "sglang", capfd)
    assert (code, report["found"]) == (0, [])
    name = library_server.SGLANG.replace(".", "/") + ".py"
    for file in ops.rglob("*.py"):
        copy = tmp_path / "ops" / file.relative_to(ops)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text()
        if str(file).endswith(name):
            right = "kv_len_per_split * split_kv_id\n"
            assert right in text
            text = text.replace(right, "kv_len_per_split * split_kv_id + 1\n")
        copy.write_text(text)
    code, report = captured(tmp_path / "ops", tmp_path / "wrong", "spawn", "sglang", capfd)
    assert code == 1
    assert {one["seq"] for one in report["found"]} >= {0}
