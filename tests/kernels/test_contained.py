"""A user's code cannot end attnlab, and its exceptions name the line of the user's file."""

import os
import signal
import sys

import pytest
from helpers.plugins import RIGHT, planted

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.cli.main import main
from attnlab.kernels.plugin import UserCodeFailed, contained
from attnlab.lab.lab import Lab

SMALL = {"num_heads": 2, "num_queries_per_kv": 1, "head_size": 32, "block_size": 16}
FLAGS = ("--num-heads", "2", "--num-queries-per-kv", "1", "--head-size", "32", "--block-size", "16")
BODY = """import os, sys, torch
def helper(call):
    {line}
def my_attention(call):
    {call}
"""


def error_of(folder, line, call="helper(call)"):
    """Return the error of a run of a kernel, and its exit code."""
    backend = planted(folder, BODY.format(line=line, call=call))
    case = Case(
        op=backend.ops[0], backend=backend.name, query_lens=(2, 1), ctx_lens=(3, 9), **SMALL
    )
    result = Lab().run(case)
    assert result.failed
    lens = ("--query-lens", "2,1", "--ctx-lens", "3,9")
    return result.error, main(["run", "--backend", backend.name, *lens, *FLAGS])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("raise ValueError('no')", "kernel.py:3: ValueError: no"),
        ("torch.zeros(2) + torch.zeros(3)", "kernel.py:3: RuntimeError: The size"),
        ("assert call is None", "kernel.py:3: AssertionError"),
        ("sys.exit(5)", "kernel.py:3: SystemExit: 5"),
        ("raise SystemExit('stop')", "kernel.py:3: SystemExit: stop"),
        ("raise KeyboardInterrupt", "kernel.py:3: KeyboardInterrupt"),
        ("os._exit(0)", "kernel.py:3: os._exit(0)"),
    ],
)
def test_a_failure_names_its_line(tmp_path, line, text):
    error, code = error_of(tmp_path, line)
    assert error.startswith(text)
    assert code == 1


def test_a_result_that_is_returned(tmp_path):
    error, _ = error_of(tmp_path, "return torch.zeros_like(call.output)", "return helper(call)")
    assert "must write its result to call.output" in error


def test_a_result_that_is_written_and_returned(tmp_path):
    text = f"{RIGHT}\ninner = my_attention\n"
    text += "def my_attention(call):\n    inner(call)\n    return call.output\n"
    text += "my_attention.op = inner.op\n"
    backend = planted(tmp_path, text)
    case = Case(
        op=backend.ops[0], backend=backend.name, query_lens=(2, 1), ctx_lens=(3, 9), **SMALL
    )
    assert Lab().run(case.replace(fill="all_rows")).error is None


@pytest.mark.parametrize("line", ["sys.exit(5)", "os._exit(0)", "raise KeyboardInterrupt", "x = ("])
def test_a_file_that_ends_the_process_when_it_loads(tmp_path, line):
    with pytest.raises(InvalidCase, match=r"cannot run: kernel\.py:2: "):
        planted(tmp_path, f"import os, sys\n{line}\n")


def test_an_interrupt_is_not_contained():
    with pytest.raises(KeyboardInterrupt), contained():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_process_is_restored():
    before = os._exit
    with pytest.raises(UserCodeFailed), contained():
        sys.exit(3)
    assert os._exit is before


def test_a_child_process_still_ends():
    with contained():
        child = os.fork()
        if not child:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
