"""A user's code cannot end attnlab, and its exceptions name the line of the user's file."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from helpers.plugins import RIGHT, planted
from helpers.processes import popen

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.cli.main import main
from attnlab.kernels import child_process
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


@pytest.fixture
def interrupts():
    """Handle interrupts as Python does; a shell lets what it runs in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
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


# Child processes end with their parent.


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=sys.stdout)
child.wait()
"""
CHILD = """
import os, sys, time
{end}
print(os.getpid(), flush=True)
time.sleep(60)
"""
END = "from attnlab.kernels.child_process import end_with_parent; end_with_parent(os.getppid())"


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def child_survives(end: str, how: signal.Signals) -> bool:
    """Kill a parent by a signal; return whether its child is alive two seconds later."""
    command = [sys.executable, "-c", PARENT, CHILD.format(end=end)]
    parent = popen(command, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(how)
    parent.wait()
    deadline = time.monotonic() + 2
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    survives = is_alive(child)
    if survives:
        os.kill(child, signal.SIGKILL)
    parent.stdout.close()
    return survives


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_child_ends_with_its_parent(how: signal.Signals) -> None:
    assert not child_survives(END, how)


def test_a_plain_child_survives() -> None:
    """Without the call the child survives, so the test above can fail."""
    assert child_survives("", signal.SIGKILL)


def test_what_a_copy_sends_survives_its_crash() -> None:
    """A wild pointer, an endless loop and an exception end the copy; this process goes on."""
    found: list[object] = []

    def crash(send: Callable[[object], None]) -> None:
        send("before")
        ctypes.string_at(1)

    def loop(send: Callable[[object], None]) -> None:
        while True:
            pass

    def fail(send: Callable[[object], None]) -> None:
        raise ValueError("no edit")

    assert child_process.run_in_copy(lambda send: send(1), found.append, 10.0) == ""
    assert child_process.run_in_copy(crash, found.append, 10.0) == "SIGSEGV"
    assert child_process.run_in_copy(loop, found.append, 0.5) == "SIGXCPU"
    with pytest.raises(ValueError, match="no edit"):
        child_process.run_in_copy(fail, found.append, 10.0)
    assert found == [1, "before"]


def test_copies_run_at_the_same_time_until_nothing_else_is_needed() -> None:
    found: list[object] = []

    def crash(send: Callable[[object], None]) -> None:
        send("crash")
        ctypes.string_at(1)

    def loop(send: Callable[[object], None]) -> None:
        time.sleep(0.5)
        send("loop")
        while True:
            pass

    def receive(thing: object) -> bool:
        found.append(thing)
        return len(found) == 3

    ended = child_process.run_in_copies([lambda send: send("end"), crash], found.append, 10.0)
    assert (ended, sorted(map(str, found))) == (["", "SIGSEGV"], ["crash", "end"])
    assert child_process.run_in_copies([loop, crash], receive, 10.0) == ["", ""]
    assert found[2] == "crash"
    assert child_process.run_in_copies([], receive, 10.0) == []


def test_without_copies_the_function_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without fork, or with a GPU in use."""
    monkeypatch.setattr(child_process, "can_copy", lambda: False)
    process: list[object] = []
    assert child_process.run_in_copy(lambda send: send(os.getpid()), process.append, 1.0) == ""
    assert process == [os.getpid()]


def squares(number: int) -> tuple[int, int]:
    if number == 5:
        raise ValueError("no 5")
    return number * number, os.getpid()


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_copies_share_items_and_keep_their_order(count: int) -> None:
    found = list(child_process.in_copies(squares, [3, 1, 2, 4], count))
    assert [one for one, _ in found] == [9, 1, 4, 16]
    assert len({process for _, process in found}) == min(count, 4)
    assert list(child_process.in_copies(squares, [], count)) == []


def test_a_copy_raises_when_its_item_is_due_and_ends_with_the_loop() -> None:
    """Items after the one that fails are not needed, and one that takes for ever ends."""

    def slow(number: int) -> int:
        time.sleep(1000.0 * (number > 5))
        return squares(number)[0]

    with contextlib.closing(child_process.in_copies(slow, [1, 2, 3, 5, 4, 6], 2)) as shared:
        assert [next(shared) for _ in range(3)] == [1, 4, 9]
        with pytest.raises(ValueError, match="no 5"):
            next(shared)
    with contextlib.closing(child_process.in_copies(slow, [1, 6], 2)) as shared:
        assert next(shared) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_the_items_of_a_copy_that_crashes_are_left_to_this_process() -> None:
    here = os.getpid()

    def crash(number: int) -> tuple[int, int]:
        if number == 4 and os.getpid() != here:
            ctypes.string_at(1)
        return squares(number)

    found = list(child_process.in_copies(crash, [1, 2, 3, 4, 6, 7], 2))
    assert [one for one, _ in found] == [1, 4, 9, 16, 36, 49]
    assert [process == here for _, process in found] == [True, False, True, True, True, True]


@pytest.mark.parametrize("count", [1, 2])
def test_a_function_in_the_background_is_asked_or_ends(count: int) -> None:
    with child_process.in_background(lambda: squares(3), count) as asked:
        found, process = asked()
    assert (found, process != os.getpid()) == (9, count > 1)
    with child_process.in_background(lambda: time.sleep(1000.0), count):
        pass
    fails = pytest.raises(ValueError, match="no 5")
    with child_process.in_background(lambda: squares(5), count) as asked, fails:
        asked()
