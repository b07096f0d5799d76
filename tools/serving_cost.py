"""Measure what the capture costs vLLM's CPU engine, and write docs/capture-cost.json.

python tools/serving_cost.py [--inactive] [--write]

Inactive, the plug-in runs once when a process starts and hooks nothing (tests/serving/test_plugin.py), so a
step costs the same; measured are the CPU seconds of its start in new processes. For the checks, a process for
each mode alternates runs with and without: with the default sample, and with all values. Rates are generated
tokens per second of CPU time, on a random model so small that Python is most of the cost. attnlab must be
installed with its entry points.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOKENS, STEPS = 640, 209  # of a run
FILE = ROOT / "docs" / "capture-cost.json"
SCRIPT = ROOT / "tests" / "helpers" / "serving_engine.py"
STARTS = 15  # processes
START = """
import importlib.metadata, os, time
os.environ.pop("ATTNLAB_CAPTURE", None)
named = ("attnlab", "attnlab.serving.plugin:activate", "vllm.general_plugins")
point = importlib.metadata.EntryPoint(*named)
began = time.process_time()
point.load()()
print(time.process_time() - began)
"""
MODES: dict[str, dict[str, Any]] = {
    "active": {"sample": 1 / 16},
    "active, all values": {"sample": 1.0, "rows": None, "heads": None},
}


def measure(mode: str, folder: Path) -> dict[str, list[float]]:
    """Return the rates of one process, "with" and "without"."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "attnlab",
        "OMP_NUM_THREADS": "1",
    }
    settings = {"out": str(folder / "capture"), **MODES[mode]}
    environment["ATTNLAB_CAPTURE"] = json.dumps(settings)
    result = folder / "result.json"
    command = [sys.executable, "-P", str(SCRIPT), str(result), "--rates"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    found: dict[str, list[float]] = json.loads(result.read_text())
    return found


def start_seconds() -> list[float]:
    """Return the CPU seconds that the inactive plug-in takes in new processes."""
    command = [sys.executable, "-c", START]
    runs = (
        subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(STARTS)
    )
    return [float(one.stdout) for one in runs]


def summary(rates: dict[str, dict[str, list[float]]], starts: list[float]) -> dict[str, Any]:
    """Return the median rates, their ratio, and the milliseconds that a step takes longer."""
    found: dict[str, Any] = {}
    for mode, one in rates.items():
        median = {kind: statistics.median(values) for kind, values in one.items()}
        longer = (1 / median["with"] - 1 / median["without"]) * TOKENS / STEPS
        found[mode] = {
            "tokens_per_cpu_second": {kind: round(rate, 1) for kind, rate in median.items()},
            "ratio": round(median["with"] / median["without"], 4),
            "more_ms_per_step": round(1000 * longer, 3),
        }
    inactive = {
        "start_s": round(statistics.median(starts), 5),
        "slowest_start_s": round(max(starts), 5),
    }
    return {
        "date": date.today().isoformat(),
        "inactive": inactive,
        "modes": found,
        "rates": rates,
        "starts_s": starts,
    }


def main() -> int:
    """Measure each mode; print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/capture-cost.json")
    parser.add_argument("--inactive", action="store_true", help="measure only the inactive plug-in")
    args = parser.parse_args()
    starts, rates = start_seconds(), dict[str, dict[str, list[float]]]()
    print("inactive", json.dumps(summary(rates, starts)["inactive"]), flush=True)
    if args.inactive:
        before = json.loads(FILE.read_text())["rates"]
        rates = {mode: before[mode] for mode in MODES}
    for mode in () if args.inactive else MODES:
        with tempfile.TemporaryDirectory(prefix="attnlab-cost-") as folder:
            rates[mode] = measure(mode, Path(folder))
        print(mode, json.dumps(summary(rates, starts)["modes"][mode]), flush=True)
    if args.write:
        FILE.write_text(json.dumps(summary(rates, starts), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
