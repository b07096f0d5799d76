"""Whatever ends a command ends all processes that it has started, and closes its standard output."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers.notebooks import write_notebook
from helpers.processes import descendants, popen, survivors, wait_for

pytestmark = pytest.mark.slow

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
LOOP = """
import pathlib, time

def my_attention(call):
    pathlib.Path({started!r}).touch()
    while True:
        time.sleep(0.01)
"""
SLEEP = """
import pathlib, time
pathlib.Path("started").touch()
time.sleep(100)
"""
PARENT = """
import subprocess, sys
from attnlab.kernels.child_process import ending_with_parent
command = [sys.executable, "-c", "print('started', flush=True); import time; time.sleep(60)"]
subprocess.run(ending_with_parent(command) if sys.argv[1] == "wrapped" else command)
"""


def start(*argv, **options):
    return popen(
        [sys.executable, "-m", "attnlab", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def left_by(process, how, limit_s=30.0):
    """End a process by a signal; return which descendants live on, and read its output to the end."""
    children = descendants(process.pid)
    process.send_signal(how)
    process.wait(timeout=60)
    left = survivors(children, limit_s)
    process.communicate(timeout=10)
    return len(children), left


@pytest.fixture
def loop(tmp_path):
    """Return a kernel that does not end, and the file that shows that it runs."""
    started = tmp_path / "started"
    (tmp_path / "loop.py").write_text(LOOP.format(started=str(started)))
    return f"{tmp_path}/loop.py:my_attention", started


@pytest.mark.parametrize("how", SIGNALS)
def test_check_leaves_no_worker(loop, how):
    kernel, started = loop
    with start("check", kernel) as process:
        wait_for(started.exists)
        count, left = left_by(process, how)
    assert count >= 1
    assert left == []


@pytest.mark.parametrize("how", SIGNALS)
def test_investigate_leaves_no_kernel(tmp_path, how):
    write_notebook(tmp_path / "01-one.ipynb", "One", SLEEP)
    folders = ("--notebooks-folder", str(tmp_path), "--reports", str(tmp_path / "r"))
    with start("investigate", *folders) as process:
        wait_for((tmp_path / "started").exists)
        count, left = left_by(process, how)
    assert count >= 1
    assert left == []


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("wrapped", ["wrapped", "plain"])
def test_a_command_that_a_command_starts(how, wrapped):
    """The engine, the compiler and pip are started like this; a plain child survives."""
    with popen([sys.executable, "-c", PARENT, wrapped], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"
        count, left = left_by(process, how, 30.0 if wrapped == "wrapped" else 2.0)
    assert (count, len(left)) == (1, 0 if wrapped == "wrapped" else 1)


def test_a_missing_command_is_one_line():
    from attnlab.kernels.child_process import ending_with_parent

    done = subprocess.run(ending_with_parent(["/no/such"]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "/no/such: No such file or directory\n")


@pytest.mark.parametrize("command", ["run", "diagnose", "check"])
def test_an_interrupt_ends_a_kernel_that_loops(loop, command):
    kernel, started = loop
    small = (
        "--num-heads",
        "2",
        "--num-queries-per-kv",
        "1",
        "--query-lens",
        "3",
        "--ctx-lens",
        "5",
    )
    argv = ("check", kernel) if command == "check" else (command, "--backend", kernel, *small)
    with start(*argv) as process:
        wait_for(started.exists)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.startswith(b"attnlab: interrupted")
    assert stderr.count(b"\n") == 1
    if command == "check":
        assert b"did not run: the check was interrupted" in stdout.replace(b"\n", b" ")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_report_of_what_ran(loop, tmp_path, how):
    """All workers end, the report is one JSON document, and the exit code is that of the signal."""
    kernel, started = loop
    with start("check", kernel, "--cases", "2", "--json", "--out", str(tmp_path / "s")) as process:
        wait_for(started.exists)
        children = descendants(process.pid)
        process.send_signal(how)
        stdout, _ = process.communicate(timeout=60)
    assert survivors(children) == []
    assert process.returncode == 128 + how
    report = json.loads(stdout)
    assert (report["cases"], report["cases_run"]) == (2, 0)
    assert [entry["reason"] for entry in report["not_run"]] == ["the check was interrupted"]


def test_a_worker_asks_to_end_before_it_loads_the_kernel(tmp_path):
    """Loading may take long: torch, and the user's file."""
    from attnlab.kernels import child_process

    source = [sys.executable, "-X", "importtime", "-c", f"import {child_process.__name__}"]
    done = subprocess.run(source, capture_output=True, text=True, env={**os.environ})
    assert "torch" not in done.stderr
