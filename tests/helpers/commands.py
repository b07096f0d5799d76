"""Commands: run the command line in this process and check its exit code and its streams."""

import functools
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from attnlab.cli import main as command_line
from attnlab.cli.main import main

SMALL = (
    *("--num-heads", "4", "--num-queries-per-kv", "2", "--head-size", "64"),
    *("--query-lens", "5,1", "--ctx-lens", "40,33"),
)
FAILING = (*SMALL, "--stage", "int32_before_cumsum")
SEED_ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"


# A parser for tests of many command lines without --help, which changes it.
one_parser = functools.cache(command_line.make_parser)


def strict_json(text: str) -> Any:
    """Return one JSON document; raise AssertionError for the NaN and infinities of Python's dialect."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def document(capsys: pytest.CaptureFixture[str], argv: Sequence[str], code: int) -> Any:
    """Run a command with --json; check its exit code and that it prints one document and nothing else."""
    assert main([*argv, "--json"]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return strict_json(printed.out)


def printed(capsys: pytest.CaptureFixture[str], argv: Sequence[str], code: int) -> str:
    """Run a command; check its exit code and return its text with single spaces.

    The text is wide, so that no word of a table is broken.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        assert main([*argv]) == code
    shown = capsys.readouterr()
    assert shown.err == ""
    return " ".join(shown.out.split())


def error_line(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> str:
    """Run a command that gets bad input; check for exit code 2 and one line, and return that line."""
    try:
        code = main([*argv])
    except SystemExit as stopped:  # argparse's own errors
        code = stopped.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("attnlab")
    return shown.err
