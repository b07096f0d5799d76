"""The command line: help, exit codes, and one line for bad input of every command."""

import io
import subprocess
import sys

import pytest
from helpers.commands import SEED_ID, SMALL, error_line

from attnlab.case.errors import AttnLabError
from attnlab.cli import main as command_line
from attnlab.cli.command import Command
from attnlab.cli.main import COMMANDS, main

# Arguments, and the text that the error line must contain: the field, and its value or the rule.
CASE_FLAGS = [
    (["--num-heads", "x"], "num_heads must be"),
    (["--num-heads", "-1"], "num_heads must be"),
    (["--num-queries-per-kv", "3"], "num_queries_per_kv must be"),
    (["--query-lens", "1,0", "--ctx-lens", "1,1"], "query_lens[1] must be"),
    (["--query-lens", "1,1"], "ctx_lens must be"),
    (["--query-lens", "a", "--ctx-lens", "1"], "query_lens must be"),
    (["--max-blocks-per-seq", "1"], "seq_lens[0] must be"),
    (["--dtype", "int8"], "dtype must be"),
    (["--platform", "tpu"], "platform must be"),
    (["--stage", "last"], "stage must be"),
    (["--alibi", "maybe"], "alibi must be"),
    (["--block-table", "[[1"], "block_table must be"),
    (["--k-scale", "nan"], "k_scale must be"),
    (["--head-size", "0"], "head_size must be"),
    (["--test-id", "hello"], "test_id must be"),
    (["--case", "/no/such/file"], "/no/such/file"),
    (["--case", "-", "--test-id", SEED_ID], "test-id must"),
    (["--nonsense"], "--nonsense"),
    (["--stage"], "--stage"),
]
OWN_FLAGS = [
    (["run", "--stages", "--platforms", "gfx942,tpu"], "platforms must be"),
    (["run", *SMALL, "--platforms", "gfx942"], "platforms must be"),
    (["run", *SMALL, "--stages", "--save-call", "x"], "save-call must"),
    (["run", *SMALL, "--save-call", "/no/such/folder/x"], "save-call must be"),
    (["run", *SMALL, "--source", "nowhere"], "source must"),
    (["run", *SMALL, "--device", "tpu"], "--device"),
    (["run", "--num-blocks", "99999999"], "the case needs"),
    (["run", "--backend", "cuda"], "backend must be"),
    (["explain", "extra"], "extra"),
    (["decode-error", "/no/such/file"], "/no/such/file"),
    (["diagnose", "--output-file", "a", "--call", "b"], "output-file and call must"),
    (["diagnose", "--output-file", "nowhere"], "nowhere"),
    (["diagnose", "--call", "nowhere"], "nowhere"),
    (["diagnose", "--source", "nowhere"], "source must"),
    (["power", "--op", "reshape_and_cache_flash"], "op must be"),
    (["check", "--cases", "0"], "cases must be"),
    (["check", "--cases", "x"], "--cases"),
    (["check", "--seconds", "0"], "seconds must be"),
    (["check", "--seconds", "nan"], "seconds must be"),
    (["check", "--seed", "-1"], "seed must be"),
    (["check", "--platform", "tpu"], "platform must be"),
    (["check", "--release", "0.1"], "release must be"),
    (["check", "--device", "cuda"], "device must be"),
    (["check", "--op", "softmax"], "--op"),
    (["check", "--installed", "--source", "x"], "kernel, source and installed must"),
    (["check", "mine.py:f", "--installed"], "kernel, source and installed must"),
    (["check", "/no/such.py:f"], "/no/such.py"),
    (["check", "--source", "/no/such"], "/no/such"),
    (["check", "--report", "x"], "report must"),
    (["check", "--shard", "0/3"], "shard must be"),
    (["releases", "--sources", "/no/such"], "sources must be"),
    (["releases", "--sources", ".", "--shard", "4/3"], "shard must be"),
    (["check", "--shard", "4/3"], "shard must be"),
    (["check", "--engine", "spark"], "engine must be"),
    (["check", "--engine", "local:0"], "engine must be"),
    (["check", "--out", "/proc/x"], "out must be"),
    (["check", "--known", "/no/such"], "known must be"),
    (["check", "--times", "/no/such"], "/no/such"),
    (["merge"], "DIR"),
    (["merge", "/no/such"], "/no/such must be a store"),
    (["claims", "C1"], "C1"),
    (["investigate", "99"], "99"),
    (["investigate", "01", "-p", "platform"], "parameter must be"),
    (["investigate", "01", "-p", "platform=tpu"], "platform must be"),
    (["investigate", "01", "--jobs", "0"], "jobs must be"),
    (["investigate", "01", "--timeout", "nan"], "timeout must be"),
    (["investigate", "01", "--notebooks-folder", "/no/such"], "/no/such"),
    (["investigate", "01", "--baseline", "/no/such"], "baseline must be"),
    (["fetch"], "VERSION"),
    (["fetch", "newest"], "newest"),
    (["fetch", "newest", "--sdist"], "newest"),
    (["defects", "nothing"], "defect must be one of"),
    (["defects", "a", "b"], "b"),
    (["stages", "last"], "stage must be one of"),
    (["stages", "--nonsense"], "--nonsense"),
    (["platforms", "tpu"], "platform must be one of"),
    (["platforms", ""], "platform must be one of"),
    (["env", "x"], "x"),
    (["--print-completion", "dos"], "--print-completion"),
    (["--print-completion"], "--print-completion"),
    (["check", "--case-seconds", "0"], "case_seconds must be"),
    (["check", "--case-seconds", "nan"], "case_seconds must be"),
    (["bench", "everything"], "everything"),
    (["bench", "diagnose", "--trials", "0"], "trials must be"),
    (["bench", "diagnose", "--seed", "-1"], "seed must be"),
    (["bench", "diagnose", "--source", "x"], "source must not"),
    (["bench", "diagnose", "--rocm"], "rocm must not"),
    (["bench", "--source", "/no/such"], "/no/such"),
    (["bench", "--rocm", "--source", "/no/such"], "/no/such"),
    (["dance"], "dance"),
    (["xray", "--call", "nowhere"], "nowhere"),
    (["mla", "--path", "encode"], "path must be"),
    (["writes", "--backend", "rocm"], "backend must be"),
    (["writes", "--source", "/no/such"], "/no/such"),
    (["mla", "--query-lens", "3,x"], "query_lens must be"),
    (["mla", "--fault", "value_offset"], "fault must be"),
    (["mla", "--backend", "rocm"], "backend must be"),
    (["mla", "--backend", "vllm", "--source", "/no/such"], "/no/such"),
    (["mla", "--hostile", "--path", "decode"], "hostile takes no fault"),
    (["mla", "--hostile", "--release", "9"], "release must be"),
    (["capture"], "--out"),
    (["capture", "--out", "/no/such"], "out must be"),
    (["capture", "--out", "/no/such", "--sample", "2"], "sample must be"),
    (["capture", "--out", "/no/such", "--rows", "few"], "rows must be"),
    (["capture", "--out", "/no/such", "--step", "9:3"], "step must be"),
    (["capture", "--out", "/no/such", "--max-bytes", "much"], "max-bytes must be"),
    (["capture", "--out", "/no/such", "--"], "command must be"),
    (["capture", "--out", "/proc/x", "--", "true"], "out must be"),
    (["replay"], "CALL"),
    (["replay", "nowhere"], "nowhere"),
    (["shrink", "nowhere"], "nowhere"),
    (["shrink", "nowhere", "--seconds", "0"], "seconds must be"),
]
WITH_CASE = ("run", "explain", "decode-error", "diagnose", "power", "xray")


@pytest.mark.parametrize("command", WITH_CASE)
@pytest.mark.parametrize(("argv", "words"), CASE_FLAGS, ids=lambda value: " ".join(value)[:50])
def test_a_wrong_case_is_one_line(capsys, monkeypatch, command, argv, words):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert words in error_line(capsys, [command, *argv])


@pytest.mark.parametrize(("argv", "words"), OWN_FLAGS, ids=lambda value: " ".join(value)[:50])
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    assert words in error_line(capsys, argv)
    assert [*tmp_path.iterdir()] == []


def test_the_tables_cover_every_command():
    assert {command.name for command in COMMANDS} <= {argv[0] for argv, _ in OWN_FLAGS}


@pytest.mark.parametrize("text", ["{", "[1]", '{"kv_head_range": 3}', '{"num_heads": true}'])
@pytest.mark.parametrize("command", ["run", "explain", "power"])
def test_json_that_is_no_case_is_one_line(capsys, monkeypatch, command, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    error_line(capsys, [command, "--case", "-"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_purpose_example_and_exit_codes(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command.name, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert command.purpose in text
    assert command.examples
    assert all(f"attnlab {command.name}" in example for example in command.examples)
    assert all(example in text for example in command.examples)
    assert "exit codes: 0 " in text
    assert "--json" in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_argument_has_a_help(command):
    (commands,) = [a for a in command_line.make_parser()._actions if a.choices and a.dest == "name"]
    actions = commands.choices[command.name]._actions
    assert [action.dest for action in actions if not action.help] == []


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(command.name in text for command in COMMANDS)


def test_python_m_attnlab():
    argv = [sys.executable, "-m", "attnlab", "explain", "--head-size", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def planted(error):
    """Return a command that raises an error."""

    def run(args):
        raise error

    return Command(name="plant", purpose="Raise.", examples=(), exit_codes="0 never", run=run)


@pytest.mark.parametrize(
    ("error", "code"),
    [(AttnLabError("x must be y"), 2), (KeyboardInterrupt(), 130)],
)
def test_errors_become_exit_codes(capsys, monkeypatch, error, code):
    monkeypatch.setattr(command_line, "COMMANDS", (planted(error),))
    assert main(["plant"]) == code
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(28, "No space"), FileNotFoundError(2, "No file", "x")])
def test_an_os_error_is_one_line(capsys, monkeypatch, error):
    monkeypatch.setattr(command_line, "COMMANDS", (planted(error),))
    assert main(["plant"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_bug_is_not_hidden(capsys, monkeypatch):
    """The traceback is printed, and the exit code is not that of a mismatch."""
    monkeypatch.setattr(command_line, "COMMANDS", (planted(ZeroDivisionError()),))
    assert main(["plant"]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err
