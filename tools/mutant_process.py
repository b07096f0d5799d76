"""Judge one mutant in a process of its own, for the tools that plant many faults."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

_MOST_WAIT = 20  # wall time of a process that computes nothing, in units of its processor time


def run_judge(
    script: str, order: Path, limit_s: float
) -> "subprocess.CompletedProcess[str] | None":
    """Run ``script --judge order`` with one thread; return None if it takes longer than the limit.

    The limit is of processor time: on a busy machine, a process that ends may take much longer.
    """
    command = [sys.executable, script, "--judge", str(order)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
        try:
            out, err = process.communicate(timeout=_MOST_WAIT * limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    if process.returncode == -signal.SIGXCPU:
        return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def error_of(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line of what a failed process wrote to stderr, or its exit code."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
