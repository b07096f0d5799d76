"""Judge one mutant in a process of its own, for the tools that plant many faults."""

import os
import subprocess
import sys
from pathlib import Path


def run_judge(
    script: str, order: Path, limit_s: float
) -> "subprocess.CompletedProcess[str] | None":
    """Run ``script --judge order`` with one thread; return None if it takes longer than the limit."""
    command = [sys.executable, script, "--judge", str(order)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=environment
        )
    except subprocess.TimeoutExpired:
        return None


def error_of(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line of what a failed process wrote to stderr, or its exit code."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
