"""Measure what the capture costs vLLM's CPU engine, and write docs/capture-cost.json.

python tools/serving_cost.py [--write]

A process for each mode alternates runs with and without: the idle plug-in, the checks with the default
sample, and the checks of all values. Rates are generated tokens per second of CPU time, on a random model so
small that Python is most of the cost. attnlab must be installed with its entry points.
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
SCRIPT = ROOT / "tests" / "helpers" / "serving_engine.py"
MODES: dict[str, dict[str, Any]] = {
    "inactive": {},
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
        "VLLM_PLUGINS": "none" if mode == "inactive" else "attnlab",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("ATTNLAB_CAPTURE", None)
    if MODES[mode]:
        settings = {"out": str(folder / "capture"), **MODES[mode]}
        environment["ATTNLAB_CAPTURE"] = json.dumps(settings)
    result = folder / "result.json"
    command = [sys.executable, "-P", str(SCRIPT), str(result), "--rates"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    found: dict[str, list[float]] = json.loads(result.read_text())
    return found


def summary(rates: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
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
    return {"date": date.today().isoformat(), "modes": found, "rates": rates}


def main() -> int:
    """Measure each mode; print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/capture-cost.json")
    args = parser.parse_args()
    rates = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory(prefix="attnlab-cost-") as folder:
            rates[mode] = measure(mode, Path(folder))
        print(mode, json.dumps(summary(rates)["modes"][mode]), flush=True)
    if args.write:
        text = json.dumps(summary(rates), indent=1)
        (ROOT / "docs" / "capture-cost.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
