"""The command ``attnlab run``: the size of a Case that no flag describes."""

import pytest

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
