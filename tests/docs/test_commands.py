"""Every command that README, docs/ and --help show runs; what is not run has a reason."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import snippets
import torch

import attnlab
from attnlab.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent.parent

# A release of vLLM with one op, which is correct and needs no Triton.
MERGE = """
import torch


def merge_attn_states(
    output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None, *rest, **named
):
    lse = torch.stack([prefix_lse, suffix_lse]).double()
    lse[lse == torch.inf] = -torch.inf
    joined = lse.logsumexp(0)
    weights = (lse - joined).exp().nan_to_num(0.0).mT[..., None]
    parts = torch.stack([prefix_output, suffix_output]).double()
    output.copy_(torch.where(weights == 0, 0, weights * parts).sum(0))
    if output_lse is not None:
        output_lse.copy_(joined)
"""
GIVEN = {
    **{
        "op": "unified_attention",
        "num_heads": 2,
        "head_size": 32,
        "block_size": 16,
        "stage": "sound",
    },
    **{"query_lens": (5, 1), "ctx_lens": (40, 33), "distribution": "normal", "platform": "sm_90"},
}
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Does it match?"},
        {"cell_type": "code", "id": "b", "metadata": {"tags": ["parameters"]}, "outputs": [],
         "execution_count": None, "source": 'platform = "gfx942"\nrelease = "0.33.0"'},
    ],
    "metadata": {}, "nbformat": 4, "nbformat_minor": 5,
}  # fmt: skip


def tiny_release(path: Path, version: str) -> Path:
    """Write a wheel of a release with one op."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("vllm/v1/attention/ops/triton_merge_attn_states.py", MERGE)
        wheel.writestr(f"vllm-{version}.dist-info/METADATA", f"Version: {version}\n")
    return path


def furnish(work: Path, command: str) -> None:
    """Write the files that the commands name: kernels, calls and notebooks, and a program vllm."""
    kernel = (ROOT / "examples" / "my_attention.py").read_text()
    for name in ("mine.py", "my_kernel.py"):
        (work / name).write_text(kernel + "\n\nmy_kernel = my_attention\n")
    for snippet in snippets.snippets(ROOT / "CONTRIBUTING.md"):
        for file, has in (("acme.py", "def page_attention("), ("acme_ops.py", "PAGES = Op(")):
            if has in snippet.text:
                (work / file).write_text(snippet.text)
    (work / "generate.py").write_text("")
    (work / "test_small.py").write_text("def test_nothing():\n    pass\n")
    (work / "failure.txt").write_text(
        "Mismatched elements: 8192 / 43720704\n"
        "Greatest absolute difference: 1.6855 at index (5336, 0, 0)\n"
    )
    (work / "ids.txt").write_text(
        "tests/kernels/attention/test_prefix_prefill.py::"
        "test_contexted_kv_attention[context_attention_fwd-16-cuda:0-auto-dtype0-24-64-64]\n"
    )
    vllm = work / "bin" / "vllm"
    vllm.write_text("#!/bin/sh\n")
    vllm.chmod(0o755)
    call = attnlab.run(attnlab.Case(**GIVEN)).call
    call.output[3] *= 2
    call.save(work / "call.safetensors")
    names = {"query": "my_query", "key_cache": "key_cache", "value_cache": "value_cache"}
    if "query=q," in command:
        names = {"query": "q", "key_cache": "k", "value_cache": "v"}
    names |= {name: name for name in ("block_table", "seq_lens", "query_start_loc", "output")}
    dump = {name: getattr(call, field) for field, name in names.items()}
    torch.save(dump, work / "dump.pt")
    (work / "tiny").mkdir()
    for name in ("01-one", "03-three", "04-four", "99-last"):
        (work / "tiny" / f"{name}.ipynb").write_text(json.dumps(NOTEBOOK))
    (work / "releases").mkdir()


def local_releases(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the downloads by files: an index of two tiny releases, and wheels in the current folder."""
    versions = ("0.32.0", "0.33.0")
    for version in versions:
        tiny_release(work / f"vllm-{version}.whl", version)
        tiny_release(work / "releases" / f"vllm-{version}.whl", version)
    places = "attnlab.kernels.vllm.source"
    monkeypatch.setattr(f"{places}.releases_between", lambda *ends: [*versions])
    monkeypatch.setattr(f"{places}.fetch_ops", lambda version, _: work / f"vllm-{version}.whl")


# A release stays loaded in a process, so each of these commands has a process of its own.
PROGRAM = """#!{python}
import sys
from pathlib import Path

from attnlab.cli.main import main
from attnlab.kernels.vllm import source

source.fetched = lambda version, *package: Path("vllm-0.33.0.whl").resolve()
if __name__ == "__main__":
    sys.exit(main())
"""


def run_on_release(work: Path, command: str) -> tuple[int, str]:
    """Run a command with the ops of a release, 1 MB, where it has the wheel; return exit code and output."""
    from attnlab.kernels.vllm.source import fetch_ops

    (work / "vllm-0.33.0.whl").symlink_to(fetch_ops("0.33.0"))
    (work / "bin" / "attnlab").write_text(PROGRAM.format(python=sys.executable))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _parameters() -> list[object]:
    """Return the commands that no page compares; of each name the first two without a marker are quick."""
    found, quick, compared = [], Counter[str](), snippets.printed_commands()
    for command, place in snippets.shown_commands().items():
        rule = snippets.rule_of(command)
        if command in compared or (rule is not None and rule.added is None):
            continue
        marks = [getattr(pytest.mark, rule.marker)] if rule is not None and rule.marker else []
        name = command.partition("attnlab ")[2].partition(" ")[0]
        quick[name] += not marks
        marks += [pytest.mark.slow] if quick[name] > 2 and not marks else []
        found.append(pytest.param(command, place, id=command[:60], marks=marks))
    return found


def _before(command: str) -> list[str]:
    """Return the commands that a reader has run before one."""
    if command.startswith("attnlab merge"):
        check = f"attnlab check --source vllm-0.33.0.whl {snippets.ONE_CASE}"
        return [f"{check} --shard {i}/3 --out shard-{i}" for i in (1, 2, 3)]
    if command.startswith("attnlab capture") and " -- " not in command:
        return ["attnlab capture --out found -- vllm serve MODEL"]
    return ["attnlab investigate --notebooks-folder tiny"] if "baseline.json" in command else []


@pytest.mark.parametrize(("command", "place"), _parameters())
def test_a_command_runs(command: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is a result, not bad input or a crash, and nothing is a traceback."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    own = str(Path(sys.executable).parent)  # where "python" is the tests' own
    monkeypatch.setenv("PATH", os.pathsep.join((own, os.environ["PATH"])))
    rule = snippets.rule_of(command)
    with snippets.workplace() as work:
        furnish(work, command)
        is_real = rule is not None and rule.marker == "releases"
        if not is_real:
            local_releases(work, monkeypatch)
        for first in _before(command):
            assert snippets.run_command(first)[0] in (0, 1, 3), first
        if "baseline.json" in command:
            shutil.copy("reports/verdicts.json", "baseline.json")
        as_run = snippets.as_run(command)
        code, printed = run_on_release(work, as_run) if is_real else snippets.run_command(as_run)
    incomplete = (
        "attnlab capture",
        "attnlab horizon",
        "attnlab check",
        "attnlab releases",
        "attnlab merge",
    )
    assert code in (0, 1, *([3] if command.startswith(incomplete) else [])), f"{place}: {printed}"
    assert "Traceback (most recent call last)" not in printed
    assert "got None" not in printed


def test_a_command_that_is_not_run_has_a_reason() -> None:
    """And every rule is of a command that is shown."""
    rules = {command: snippets.rule_of(command) for command in snippets.shown_commands()}
    not_run = [rule for rule in rules.values() if rule is not None and rule.added is None]
    assert not_run
    assert all(rule.reason for rule in not_run)
    assert [rule.pattern for rule in snippets.RULES if rule not in rules.values()] == []


def test_every_command_is_run() -> None:
    """Of each name one command is run, with the flags that are added, or a named test runs one."""
    rules = {command: snippets.rule_of(command) for command in snippets.shown_commands()}
    ran = [words.values[0] for words in _parameters()] + sorted(snippets.printed_commands())
    ran += [command for command, rule in rules.items() if rule and "; tests/" in rule.reason]
    assert [one.name for one in COMMANDS if not any(f"attnlab {one.name}" in c for c in ran)] == []


def test_a_command_that_ends_with_bad_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with snippets.workplace():
        assert snippets.run_command("attnlab explain --platform gfx1")[0] == 2
