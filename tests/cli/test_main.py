"""The command line: help, exit codes, and one line for bad input of every command."""

import io
import json
import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.bad_input import CASE_FLAGS, OWN_FLAGS, WITH_CASE, WITH_TORCH, refused
from helpers.commands import SMALL, error_line, one_parser, strict_json

from attnlab.case.errors import AttnLabError
from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.case.shown import json_value
from attnlab.cli import main as command_line
from attnlab.cli.command import Command, print_json
from attnlab.cli.main import COMMANDS, main

HEAVY = ("torch", "triton", "matplotlib", "numpy", "vllm")
# Runs each command line in a forked process; prints the exit code and the heavy modules of each.
FORKS = """
import contextlib, io, json, os, sys
from attnlab.cli import main as command_line
parser = command_line.make_parser()
command_line.make_parser = lambda: parser
lines, heavy = json.load(sys.stdin)
for argv in lines:
    if os.fork():
        os.wait()
        continue
    sys.stdin = io.StringIO("")
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = command_line.main(argv)
        except SystemExit as stopped:
            code = stopped.code
    print(json.dumps([code, [name for name in heavy if name in sys.modules]]), flush=True)
    os._exit(0)
"""


def starts_with(words, line):
    """Answer whether an error line names the field first, after the program and its command."""
    return line.partition(": ")[2].startswith(words)


def test_what_needs_no_tensors_imports_no_heavy_module(tmp_path):
    """A user waits three seconds for torch; a wrong argument, a help or a catalogue needs none of it."""
    helps = [[], ["--help"], *([command.name, "--help"] for command in COMMANDS)]
    helps += [["stages"], ["platforms", "gfx942"], ["explain", "--json"]]
    lines = [argv for argv in refused() if argv not in WITH_TORCH] + helps
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([lines, HEAVY]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [[0 if argv in helps else 2, []] for argv in lines]
    assert [(a, f) for a, f, e in zip(lines, found, expected, strict=True) if f != e] == []


@pytest.mark.parametrize("command", WITH_CASE)
@pytest.mark.parametrize(
    ("argv", "words"),
    CASE_FLAGS,
    ids=lambda value: "" if isinstance(value, str) else " ".join(value)[:50],
)
def test_a_wrong_case_is_one_line(capsys, monkeypatch, command, argv, words):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr(command_line, "make_parser", one_parser)
    assert starts_with(words, error_line(capsys, [command, *argv]))


@pytest.mark.parametrize(
    ("argv", "words"),
    OWN_FLAGS,
    ids=lambda value: "" if isinstance(value, str) else " ".join(value)[:50],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "make_parser", one_parser)
    assert starts_with(words, error_line(capsys, argv))
    assert [*tmp_path.iterdir()] == []


def test_the_tables_cover_every_command():
    assert {command.name for command in COMMANDS} <= {argv[0] for argv, _ in OWN_FLAGS}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "case must be"),
        ("[1]", "case must be"),
        ('{"kv_head_range": 3}', "kv_head_range must be"),
        ('{"num_heads": true}', "num_heads must be"),
    ],
)
@pytest.mark.parametrize("command", ["run", "explain", "power"])
def test_json_that_is_no_case_is_one_line(capsys, monkeypatch, command, text, words):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert starts_with(words, error_line(capsys, [command, "--case", "-"]))


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


def test_a_bare_attnlab_names_every_command_in_ten_lines(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10
    names = {word for line in lines for word in line.split()}
    assert {command.name for command in COMMANDS} <= names


def flags_of(capsys, argv):
    """Return the flags that a help lists."""
    with pytest.raises(SystemExit):
        main(argv)
    words = re.findall(r"^  (?:-h, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    return {*words} - {"--help", "--help-all"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_few_flags_and_help_all_every_one(capsys, command):
    few, every = (flags_of(capsys, [command.name, one]) for one in ("--help", "--help-all"))
    assert len(few) <= 12
    assert few <= every
    assert "--json" in few


def test_the_help_says_what_each_op_argument_does(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    for name, one in OP_ARGUMENTS.items():
        assert f"{name}: {one.summary}" in text


def test_flags_of_one_test_of_vllm_have_a_group_of_their_own(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    text = capsys.readouterr().out
    own = text[text.index("only for vLLM's test_prefix_prefill") :].split("\n\n")[0]
    names = ("--stage", "--fill", "--num-seqs", "--draw-max-query-len", "--force-decode")
    assert [name for name in names if name not in own] == []
    assert "--query-lens" not in own


# Every OSError is one line and exit code 2; exit code 1 never comes from an error.


RUN = (sys.executable, "-m", "attnlab")


def run(argv, **options):
    """Run a command in a process; return its exit code and its standard error."""
    done = subprocess.run([*RUN, *argv], stderr=subprocess.PIPE, text=True, timeout=120, **options)
    return done.returncode, done.stderr


def closed_pipe():
    """Return the write end of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("argv", "end"),
    [
        (["explain"], "full"),
        (["explain", "--json"], "closed"),
        (["--help"], "full"),
        ([], "closed"),
    ],
)
def test_output_that_cannot_be_written(argv, end):
    writer = closed_pipe() if end == "closed" else os.open("/dev/full", os.O_WRONLY)
    try:
        code, error = run(argv, stdout=writer)
    finally:
        os.close(writer)
    assert (code, error.count("\n")) == (2, 1), error
    assert error.startswith("attnlab: ")


def test_a_closed_standard_output():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m attnlab explain >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


@pytest.mark.parametrize("cache", ["/proc", "/dev/null", "a file"])
def test_a_cache_that_cannot_be_used(capsys, monkeypatch, tmp_path, cache):
    if cache == "a file":
        (tmp_path / "file").write_text("")
        cache = str(tmp_path / "file")
    monkeypatch.setenv("ATTNLAB_CACHE", cache)
    error = error_line(capsys, ["fetch", "0.33.0"])
    assert error.startswith(f"attnlab: the cache folder {cache}"), error


def test_a_folder_as_input(capsys, tmp_path):
    for flags in (["diagnose", "--call"], ["diagnose", "--output-file"], ["explain", "--case"]):
        assert str(tmp_path) in error_line(capsys, [*flags, str(tmp_path)])


def test_standard_input_that_is_no_text(capsys, monkeypatch):
    for argv in (["explain", "--case", "-"], ["decode-error"]):
        text = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x80"), encoding="utf-8", errors="strict")
        monkeypatch.setattr("sys.stdin", text)
        error = error_line(capsys, argv)
        assert error.startswith("attnlab: standard input must be a readable text file")


def test_save_call_replaces_no_device(capsys, tmp_path):
    """As root a rename would replace the device node itself."""
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    for path in (link, Path("/dev/full")):
        assert "save-call must" in error_line(capsys, ["run", *SMALL, "--save-call", str(path)])
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


# JSON output is strict: NaN and infinities have one representation each.


def test_numbers_that_json_lacks_are_strings(capsys):
    print_json({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": None, "e": 3}})
    found = strict_json(capsys.readouterr().out)
    assert found == {"a": [1.5, "nan", ["inf"]], "b": {"c": "-inf", "d": None, "e": 3}}


@pytest.mark.parametrize("value", [True, 0, -1.5, "nan", None, [], {}])
def test_other_values_stay(value):
    assert json_value(value) == value


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_the_strict_reader_refuses_pythons_dialect(text):
    with pytest.raises(AssertionError):
        strict_json(text)
