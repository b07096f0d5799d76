"""Replays of a call: verdicts, agreement with the recorded output, exit codes, and bad input."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from helpers.clones import UNIFIED, UNIFIED_FAULT, clone_of
from helpers.commands import document, error_line, printed
from helpers.plugins import RIGHT
from helpers.saved_calls import WRONG, call_of, flash_call, kernel_file
from helpers.sources import of_release

import attnlab
from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.cli.main import main
from attnlab.contracts.contract import Target
from attnlab.kernels.binding import arguments_of
from attnlab.kernels.run_call import on_device
from attnlab.kernels.runner import is_bisecting, runners
from attnlab.replay.new_investigation import read_start
from attnlab.replay.replay_call import (
    Replay,
    Replays,
    distance,
    other_bits,
)
from attnlab.show.notebook import VERDICT_MIME


def test_verdicts_and_agreement(tmp_path):
    right = kernel_file(tmp_path, RIGHT, "right")
    wrong = kernel_file(tmp_path, WRONG, "wrong")
    found = attnlab.replay_call(call_of(), backends=["model", right, wrong])
    assert found.recorded == "match"
    assert [one.status for one in found.replays] == ["match", "match", "mismatch"]
    model, other, bad = found.replays
    assert model.from_recorded.other_bits == 0
    assert other.from_recorded.other_bits > 0
    assert other.from_recorded.in_bounds < 2
    assert bad.error.rows == 4  # the last row of a sequence has no key after it
    assert bad.error.elements > 300
    assert found.exit_code == 1


def test_the_recorded_output_is_judged_apart(tmp_path):
    call = call_of()
    call.output[2] *= 2
    found = attnlab.replay_call(call)
    assert (found.recorded, found.recorded_error.rows) == ("mismatch", 1)
    assert found.replays[0].status == "match"
    assert found.replays[0].from_recorded.rows == 1
    assert found.exit_code == 0
    before = call.output.clone()
    attnlab.replay_call(call)
    assert torch.equal(call.output, before)


def test_a_call_without_an_output():
    found = attnlab.replay_call(flash_call())
    assert found.recorded == "unknown"
    assert found.replays[0].from_recorded is None


def test_an_output_of_nan_is_an_output():
    """A kernel has computed it: it is wrong, and not unknown."""
    call = flash_call(torch.full((6, 4, 32), torch.nan).half())
    found = attnlab.replay_call(call)
    assert (found.recorded, found.recorded_error.elements) == ("mismatch", 6 * 4 * 32)
    assert found.replays[0].from_recorded.elements == 6 * 4 * 32
    assert attnlab.probe_call(call).from_recorded is not None
    assert attnlab.probe_call(flash_call()).from_recorded is None
    assert attnlab.diagnose(call).wrong_rows == 6


def test_a_call_without_an_output_is_neither_diagnosed_nor_cut():
    with pytest.raises(InvalidCall, match="without a recorded output"):
        attnlab.diagnose(flash_call())
    with pytest.raises(InvalidCall, match="source must be given for a call without an output"):
        attnlab.shrink_call(flash_call())
    assert attnlab.shrink_call(flash_call(), backend="model").status == "match"


def test_unwritten_rows_are_wrong():
    call = call_of(
        op="chunked_prefill_paged_decode", stage="int32_before_cumsum", platform="gfx942"
    )
    (one,) = attnlab.replay_call(call).replays
    assert (one.status, one.error.rows, one.error.num_rows) == ("mismatch", 1, 6)


def test_a_rejection_and_a_backend_without_the_op(tmp_path):
    text = RIGHT.replace("    key_cache, value", "    raise ValueError('no')\n    key_cache, value")
    rejecting = kernel_file(tmp_path, text, "rejecting")
    call = call_of(op="context_attention_fwd")
    found = attnlab.replay_call(call, backends=["model", rejecting])
    assert [one.status for one in found.replays] == ["match", "cannot run"]
    assert "op must be unified_attention" in found.replays[1].reason
    assert found.exit_code == 3
    (one,) = attnlab.replay_call(call_of(), backends=[rejecting]).replays
    assert (one.status, one.failed) == ("rejected", True)
    found = attnlab.replay_call(dataclasses.replace(call, qq_bias=torch.zeros(99, 99)))
    assert found.replays[0].status == "cannot run"
    assert "mask must be causal" in found.replays[0].reason
    found = attnlab.replay_call(dataclasses.replace(flash_call(), causal=False))
    assert found.replays[0].status == "match"


def replays(recorded, *statuses, failed=False):
    made = [Replay(target="t", backend="b", status=one, failed=failed) for one in statuses]
    return Replays(
        call="c", op="o", origin="", recorded=recorded, recorded_error=None, replays=made
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (replays("match", "match", "match"), 0),
        (replays("match", "match", "mismatch"), 1),
        (replays("match", "rejected", "match"), 1),
        (replays("match", "cannot run", "match"), 3),
        (replays("match", "cannot run", "mismatch"), 1),
        (replays("mismatch", "match"), 0),
        (replays("mismatch", "mismatch"), 1),
        (replays("mismatch", "cannot run"), 125),
        (replays("mismatch", "rejected"), 125),
        (replays("mismatch", "rejected", failed=True), 1),
        (replays("rejected", "rejected"), 1),
    ],
)
def test_exit_codes(found, code):
    assert found.exit_code == code


@pytest.mark.parametrize(
    ("statuses", "at", "words"),
    [
        (("match", "match"), None, "no release is bad"),
        (("cannot run", "rejected"), None, "no release is bad; 2 do not run the call"),
        (("match", "rejected", "mismatch"), 2, "(mismatch); t before it does not run the call"),
        (("match", "not deterministic"), 1, "(not deterministic); before it, t: match"),
        (("mismatch", "match"), 0, "(mismatch); none ran before it"),
    ],
)
def test_the_first_bad_release(statuses, at, words):
    """A release that does not accept the call is not bad; one whose kernel fails is."""
    assert replays("match", "match", "rejected", failed=True).first_bad is not None
    found = replays("match", *statuses)
    assert found.first_bad is (None if at is None else found.replays[at])
    assert words in found.first_bad_sentence()


def test_targets_of_sources_and_backends(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    names = [(one.backend, one.given) for one in runners([str(tmp_path)], ["model"])]
    assert names == [("vllm", str(tmp_path)), ("model", "")]
    names = [one.name for one in runners([str(tmp_path)], ["rocm"])]
    assert names == [f"{tmp_path} (rocm)"]
    assert [one.name for one in runners([], ["vllm"])] == ["installed vLLM"]
    assert [one.name for one in runners([], [])] == ["model"]


@pytest.mark.parametrize(
    ("sources", "backends", "words"),
    [
        (["nowhere"], [], "source must be a wheel"),
        (["9.9.9"], [], "attnlab fetch 9.9.9"),
        (["."], [], "source must be a vLLM"),
        ([], ["nothing"], "backend must be"),
        ([], ["nowhere.py:f"], "backend must be"),
    ],
)
def test_targets_that_do_not_exist(tmp_path, monkeypatch, sources, backends, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidCase, match=words):
        runners(sources, backends)


def test_bad_calls(capsys, tmp_path):
    path = tmp_path / "call.safetensors"
    call_of().save(path)
    (tmp_path / "half").write_bytes(path.read_bytes()[:3000])
    assert "half" in error_line(capsys, ["replay", str(tmp_path / "half")])
    assert "platform must be" in error_line(capsys, ["replay", str(path), "--platform", "tpu"])
    assert attnlab.replay_call(call_of(op="merge_attn_states")).recorded == "match"
    (tmp_path / "other.py").write_text("import nothing_here\n")
    backend = ["--backend", f"{tmp_path / 'other.py'}:f"]
    assert document(capsys, ["replay", str(path), *backend], 125)["exit_code"] == 125


def test_the_command_prints_the_table(capsys, tmp_path):
    path = tmp_path / "call.safetensors"
    call_of().save(path)
    wrong = kernel_file(tmp_path, WRONG, "wrong")
    command = ["replay", str(path), "--backend", "model", "--backend", wrong]
    found = document(capsys, command, 1)
    assert [one["status"] for one in found["replays"]] == ["match", "mismatch"]
    assert found["replays"][1]["error"]["rows"] == 4
    text = printed(capsys, command, 1)
    assert "models of 0.33.0" in text
    assert "mismatch" in text


def test_bits_and_distances():
    one = torch.tensor([0.0, -0.0, torch.nan, 1.0, torch.inf, torch.nan])
    two = torch.tensor([0.0, 0.0, torch.nan, 2.0, torch.inf, 1.0])
    assert other_bits(one, two).tolist() == [False, True, False, True, False, True]
    assert distance(one, two).tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, torch.inf]


def test_an_op_gets_a_saved_cache_with_its_own_strides():
    call = flash_call()
    key = arguments_of(call, Target.of(attnlab.Case(platform="sm_90")))["k"]
    assert key.data_ptr() == call.key_cache.data_ptr()
    assert key.stride() == (2 * 16 * 2 * 32, 64, 32, 1)
    moved = on_device(call, "meta")
    assert moved.value_cache.stride() == call.value_cache.stride()
    assert moved.value_cache.storage_offset() == call.value_cache.storage_offset()


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def history(clone: Path) -> list[str]:
    """Make a repository of a clone; the third of five commits has a fault."""
    name, line, wrong_line = UNIFIED_FAULT
    file = clone / "vllm/v1/attention/ops" / name
    sound = file.read_text()
    wrong = sound.replace(line, wrong_line)
    texts = [sound, sound + "# 1\n", wrong, wrong + "# 2\n", wrong + "# 3\n"]
    git(clone, "init", "-q")
    for number, text in enumerate(texts):
        file.write_text(text)
        git(clone, "add", "-A")
        git(clone, "commit", "-q", "-m", f"change {number}")
    return git(clone, "rev-list", "--reverse", "HEAD").split()


@pytest.mark.slow
@pytest.mark.releases
def test_git_bisect_names_the_commit(tmp_path, monkeypatch, capsys):
    clone = clone_of(of_release("0.33.0"), tmp_path / "clone")
    commits = history(clone)
    call = tmp_path / "call.safetensors"
    call_of(query_lens=(2,), ctx_lens=(14,), num_heads=2).save(call)
    git(clone, "bisect", "start", commits[-1], commits[0])
    replay = [
        sys.executable,
        "-m",
        "attnlab",
        "replay",
        str(call),
        "--source",
        ".",
        "--device",
        "cpu",
    ]
    said = git(clone, "bisect", "run", *replay)
    assert f"{commits[2]} is the first bad commit" in said
    monkeypatch.chdir(clone)
    assert is_bisecting(clone)
    assert main(["replay", "nowhere", "--source", "."]) == 129
    assert capsys.readouterr().err.count("\n") == 1
    (clone / "vllm/v1/attention/ops" / UNIFIED).write_text("import nothing_here\n")
    assert "nothing_here" in document(capsys, [*replay[3:]], 125)["replays"][0]["reason"]


# The probe: kernels with planted faults, and a correct one whose order of sums depends on the batch.


END = "        call.output[rows] ="
NOISE = "import random\n" + RIGHT.replace(
    END, "        value = value + 0.1 * random.random()\n" + END
)
LEAK = (
    RIGHT.replace("[:seq_len]", "[:seq_len + 1]")
    .replace("torch.arange(seq_len) - at", "torch.arange(seq_len + 1).clamp(max=seq_len) - at")
    .replace("hidden = away > 0", "hidden = away > 1")
)
BATCH = RIGHT.replace(
    "scores = query @", "scale *= 1 + 0.2 * (len(starts) > 2)\n        scores = query @"
)
KEPT = RIGHT.replace(END, "        if query.shape[1] == 1:\n            continue\n" + END)
ORDERED = RIGHT.replace(
    "(weights @ value)",
    "((weights[..., 1::2] @ value[:, 1::2] + weights[..., ::2] @ value[:, ::2])"
    " if len(starts) > 2 else weights @ value)",
)


def probed(folder, text, **changes):
    return attnlab.probe_call(call_of(**changes), backend=kernel_file(folder, text, "kernel"))


@pytest.mark.parametrize(
    ("text", "verdict", "kind"),
    [
        (RIGHT, "no change", None),
        (WRONG, "wrong computation", None),
        (NOISE, "corruption", "repeat"),
        (LEAK, "corruption", "foreign"),
        (BATCH, "corruption", "batch"),
        (KEPT, "corruption", "foreign"),
        (ORDERED, "reduction order", "batch"),
    ],
    ids=["right", "wrong", "noise", "leak", "batch", "kept", "ordered"],
)
def test_verdicts(tmp_path, text, verdict, kind):
    found = probed(tmp_path, text, dtype="float32")  # float16 hides most orders of sums
    assert found.verdict == verdict
    assert found.conclusion.startswith(verdict)
    changed = {one.kind for one in found.variations if one.changes_bits}
    assert kind is None or kind in changed
    assert (verdict in ("wrong computation", "no change")) == (not changed)


def test_splits_of_an_op_that_has_them():
    """The model of an op ignores splits; a release without the argument is not asked for them."""
    names = [one.name for one in attnlab.probe_call(call_of()).variations]
    assert "4 splits" in names
    assert "without splits" in names
    call = call_of(op="chunked_prefill_paged_decode")
    assert not any("splits" in one.name for one in attnlab.probe_call(call).variations)


def test_the_command(capsys, tmp_path):
    path = tmp_path / "call.safetensors"
    call_of().save(path)
    assert document(capsys, ["replay", str(path), "--probe"], 0)["verdict"] == "no change"
    wrong = ["--backend", kernel_file(tmp_path, BATCH, "batch")]
    found = document(capsys, ["replay", str(path), "--probe", *wrong], 1)
    (alone,) = [one for one in found["variations"] if one["name"] == "each sequence alone"]
    assert alone["change"]["in_bounds"] > 2
    assert "probe must" in error_line(
        capsys, ["replay", str(path), "--probe", *wrong, "--backend", "model"]
    )


# Random cases on two kernels: which side is wrong, and that equal bits are not asked for.


def compared(capsys, *words):
    code = main(["compare", *words, "--random", "5", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_side_that_is_wrong_is_named(capsys, tmp_path):
    right, wrong = kernel_file(tmp_path, RIGHT, "right"), kernel_file(tmp_path, WRONG, "wrong")
    code, found = compared(capsys, right, "--against", wrong)
    assert code == found["exit_code"] == 1
    count = sum(one["outcomes"][1]["status"] == "mismatch" for one in found["cases"])
    assert count > 1
    assert found["sentences"] == [f"{wrong} is wrong in {count} of 5 cases"]
    code, found = compared(capsys, wrong, "--against", right)
    assert code == 1
    assert found["sentences"] == [f"{wrong} is wrong in {count} of 5 cases"]
    assert found["cases"][0]["run"].startswith("attnlab run ")


def test_right_kernels_with_other_bits_agree(capsys, tmp_path):
    right = kernel_file(tmp_path, RIGHT, "right")
    code, found = compared(
        capsys, right, "--against", "model", "--html", str(tmp_path / "page.html")
    )
    assert (code, len(found["cases"])) == (0, 5)
    assert all(one["status"] == "match" for case in found["cases"] for one in case["outcomes"])
    assert "both are right" in (tmp_path / "page.html").read_text()


# A new notebook: its experiments run, and a kernel that is repaired afterwards fails its verdicts.


@pytest.mark.slow
def test_a_new_notebook_has_run_and_finds_again_what_was_found(capsys, tmp_path, monkeypatch):
    """Its paths are relative to its folder, where JupyterLab and attnlab investigate run it."""
    kernel, folder = kernel_file(tmp_path, WRONG, "mine"), tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    call_of(query_lens=(3,), ctx_lens=(14,), num_heads=2).save(tmp_path / "call.safetensors")
    name = f"mine.py:{kernel.rpartition(':')[2]}"
    words = ["new-investigation", "Why?", "--from", "call.safetensors", "--kernel", name]
    found = document(capsys, [*words, "--notebooks-folder", "notebooks"], 0)
    assert found["notebook"] == "notebooks/01-why.ipynb"
    notebook = nbformat.read(folder / "01-why.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output.get("data", {}) for cell in code for output in cell.outputs]
    verdicts = [one[VERDICT_MIME] for one in outputs if VERDICT_MIME in one]
    assert len(verdicts) == 6
    assert all(one["expected"] == one["found"] for one in verdicts)
    assert sum("image/png" in one for one in outputs) == 2
    (tmp_path / "mine.py").write_text(RIGHT)
    monkeypatch.chdir(folder)
    text = "\n".join(cell.source for cell in code if not cell.source.startswith("attnlab.plot"))
    with pytest.raises(AssertionError) as failed:
        exec(compile(text, "notebook", "exec"), {})
    assert "the output" in str(failed.value)


def test_a_right_kernel_is_no_start(tmp_path, capsys):
    right = kernel_file(tmp_path, RIGHT, "right")
    words = ["new-investigation", "Why?", "--from", right, "--notebooks-folder", str(tmp_path)]
    assert "must be wrong in a random case" in error_line(capsys, words)


def test_a_test_id_begins_with_a_reduced_case():
    test_id = (
        "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"
    )
    given = {"kernel": "", "source": "", "stage": "int64"}
    reduced = read_start(test_id, **given).case
    full = read_start(test_id, **given, is_full=True).case
    assert reduced == full.reduced() != full
