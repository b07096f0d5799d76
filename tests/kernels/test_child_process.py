"""Child processes end with their parent."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from helpers.processes import popen

from attnlab.kernels import child_process

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
    assert parent.stdout is not None
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
