"""The command ``attnlab run``: the size of a Case that no flag describes."""

import re
import shlex
from pathlib import Path

import pytest
from helpers.commands import document

from attnlab.case.case import Case
from attnlab.cli import command, run
from attnlab.cli.main import main

ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"


@pytest.mark.parametrize(
    ("argv", "heads"),
    [
        ([], 8),
        (["--stage", "int64", "--platform", "sm_90"], 8),
        (["--full"], 64),
        (["--num-heads", "16"], 16),
        (["--query-lens", "1", "--ctx-lens", "3"], 64),
        (["--test-id", ID], 64),
    ],
)
def test_only_a_case_that_is_not_described_is_reduced(argv, heads, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(run, "_run_run_case", lambda args, case, on_step: ran.append(case) or 0)
    assert main(["run", *argv]) == 0
    assert ran[0].num_heads == heads
    assert ("--full runs the size of the test" in capsys.readouterr().err) == (heads == 8)


SMALL = ("--num-heads", "2", "--query-lens", "3,1", "--ctx-lens", "4,5")


@pytest.mark.parametrize("name", ["run", "diagnose"])
@pytest.mark.parametrize(
    ("machine", "flags", "is_assumed"),
    [(None, (), True), ("sm_90", (), False), (None, ("--platform", "sm_90"), False)],
)
def test_the_first_line_says_that_a_platform_is_assumed(
    name, machine, flags, is_assumed, monkeypatch, capsys
):
    monkeypatch.setattr(command, "machine_platform", lambda: machine)
    assert main([name, *SMALL, *flags]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("; platform gfx942 is assumed") == is_assumed


# The command of a finding reproduces it: it exits with 1 until the kernel is repaired, then with 0.


# Without the rounding bound as default tolerance, a sound kernel differs on data of magnitude 1.
needs_bound = pytest.mark.skipif(
    Case().tolerance is not None, reason="the default tolerance is a constant"
)
KERNEL = """
import torch

from attnlab.tensors.cache import to_flash


def f(call):
    BREAK
    key_cache, value_cache = to_flash(call.key_cache, call.value_cache)
    starts, group = call.query_start_loc.tolist(), call.num_queries_per_kv
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        rows, blocks = slice(starts[seq], starts[seq + 1]), call.block_table[seq].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:seq_len].float().repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        query = call.query[rows].float()
        scale = call.sm_scale or query.shape[2] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale * FACTOR
        last = torch.arange(seq_len - len(query), seq_len)[:, None]
        hidden = torch.arange(seq_len) > last
        if call.sliding_window:
            hidden |= torch.arange(seq_len) <= last - call.sliding_window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        call.output[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(call.output.dtype)


f.op = "unified_attention"
f.kv_cache_dtypes = ("auto",)
"""


def write(file: Path, first: str = "pass", factor: str = "1") -> str:
    """Write the kernel with a statement before its work and a factor of its scores; return its name."""
    file.write_text(KERNEL.replace("BREAK", first).replace("FACTOR", factor))
    return f"{file}:f"


def run_command(command: str) -> int:
    """Run a command that was printed, and return its exit code."""
    words = shlex.split(command)
    assert words[0] == "attnlab"
    return main(words[1:])


@needs_bound
@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ({"factor": "2"}, "wrong_output"),
        ({"first": "return"}, "rows_not_written"),
        ({"first": 'raise ValueError("no")'}, "fails"),
    ],
    ids=["wrong output", "nothing written", "an exception"],
)
def test_a_fault_is_reproduced_until_it_is_repaired(capfd, tmp_path, broken, kind):
    file = tmp_path / "mine.py"
    name = write(file, **broken)
    checked = document(capfd, ["check", name, "--cases", "2"], 1)
    finding = next(found for found in checked["findings"] if found["kind"] == kind)
    assert finding["case"]["backend"] == name
    assert run_command(finding["run"]) == 1
    write(file)
    assert run_command(finding["run"]) == 0


@pytest.mark.slow
def test_an_output_that_follows_empty_slots(capfd, tmp_path):
    """The command makes both runs and compares them: one run of its own shows nothing."""
    file = tmp_path / "mine.py"
    name = write(file)
    text = file.read_text().replace(
        "call.output[rows] =",
        "unused = key_cache[blocks].flatten(0, 1)[seq_len:]\n"
        "        call.output[rows] = (1 + 0.6 * 2**-11 * bool(unused.isnan().any())) *",
    )
    file.write_text(text)
    (finding,) = document(capfd, ["check", name, "--cases", "1"], 0)["observations"]
    assert finding["kind"] == "follows_empty_slots"
    command = f"{finding['run']} --atol 1"
    assert run_command(command) == 1
    assert run_command(command.partition(" --against")[0] + " --atol 1") == 0
    write(file)
    assert run_command(command) == 0


@needs_bound
@pytest.mark.slow
def test_a_kernel_that_does_not_end(capfd, tmp_path):
    file = tmp_path / "mine.py"
    limits = ["--cases", "1", "--case-seconds", "2"]
    checked = document(
        capfd, ["check", write(file, "while call.output is not None: pass"), *limits], 1
    )
    (finding,) = checked["findings"]
    assert finding["diagnosis"] == "does not end"
    assert run_command(finding["run"]) == 1
    write(file)
    assert run_command(finding["run"]) == 0


@pytest.mark.slow
def test_text_and_page_have_the_same_command_on_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    name = write(tmp_path / "mine.py", factor="2")
    assert main(["check", Path(name).name, "--cases", "1", "--pictures", "pages"]) == 1
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("attnlab run")]
    assert [run_command(command) for command in commands] == [1]
    page = (tmp_path / "pages" / "index.html").read_text()
    assert re.findall("<pre>(attnlab run.*)</pre>", page) == commands


@pytest.mark.slow
def test_a_run_with_a_limit_prints_what_it_prints_without(capfd):
    flags = ["run", "--num-heads", "2", "--query-lens", "1", "--ctx-lens", "3"]
    assert document(capfd, [*flags, "--seconds", "60"], 0)["status"] == "match"
