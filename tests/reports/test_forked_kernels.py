"""Kernels that are forked end with the process that wanted them, and only a plain command is forked."""

import subprocess
import sys
import threading

import pytest
from helpers.processes import is_running, popen, wait_for

from attnlab.reports.investigate import can_fork, start_fork_server

START = """
import os, sys, tempfile, time
from attnlab.reports.investigate import fork_kernel, start_fork_server
assert start_fork_server({})
with tempfile.TemporaryFile() as words:
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", sys.argv[1]]
    print(fork_kernel(command, os.environ, None, words).pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([sys.executable, "-m", "ipykernel_launcher", "-f", "file"], True),
        ([sys.executable, "-m", "ipykernel_launcher", "-f", "file", "--debug"], True),
        ([sys.executable, "-X", "dev", "-m", "ipykernel_launcher", "-f", "file"], False),
        (["another-python", "-m", "ipykernel_launcher", "-f", "file"], False),
        ([sys.executable, "-m", "another_kernel", "-f", "file"], False),
    ],
)
def test_which_commands_are_forked(command, expected):
    assert can_fork(command) is expected


def test_a_thread_starts_no_fork_server():
    found = []
    thread = threading.Thread(target=lambda: found.append(start_fork_server({})))
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")
def test_a_kernel_ends_with_a_process_that_is_killed(tmp_path):
    connection = tmp_path / "connection.json"
    words = [sys.executable, "-c", START, str(connection)]
    with popen(words, stdout=subprocess.PIPE, text=True) as starter:
        kernel = int(starter.stdout.readline())
        wait_for(connection.exists)  # ipykernel has started
        assert is_running(kernel)
        starter.kill()
        wait_for(lambda: not is_running(kernel))
