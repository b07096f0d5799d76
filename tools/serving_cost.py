"""Measure what the capture costs vLLM's CPU engine, and write docs/capture-cost.json.

python tools/serving_cost.py [--rounds N] [--write]

Processes alternate: without the plug-in (VLLM_PLUGINS leaves it out), with it but inactive, and active
with the default sample and with all values. An active process alternates runs with and without its checks.
Rates are generated tokens per second of CPU time, on a random model so small that Python is most of the cost.
attnlab must be installed with its entry points.
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
SCRIPT = ROOT / "tests" / "helpers" / "serving_engine.py"
MODES = {
    "without": {},
    "inactive": {},
    "active": {"sample": 1 / 16},
    "active, all values": {"sample": 1.0, "rows": None, "heads": None},
}


def measure(mode: str, folder: Path) -> dict[str, list[float]]:
    """Return the rates of one process, by "plain" or "checked"."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "none" if mode == "without" else "attnlab",
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


def summary(rates: dict[str, list[dict[str, list[float]]]]) -> dict[str, Any]:
    """Return the median rates, and their ratios."""
    median = {
        f"{mode}/{kind}": statistics.median(r for one in found for r in one.get(kind, []))
        for mode, found in rates.items()
        for kind in ("plain", "checked")
        if any(kind in one for one in found)
    }
    ratios = {"inactive": median["inactive/plain"] / median["without/plain"]}
    for mode in ("active", "active, all values"):
        if f"{mode}/checked" in median:
            ratios[mode] = median[f"{mode}/checked"] / median[f"{mode}/plain"]
    return {
        "date": date.today().isoformat(),
        "tokens_per_cpu_second": {name: round(rate, 1) for name, rate in median.items()},
        "ratio": {name: round(ratio, 4) for name, ratio in ratios.items()},
    }


def main() -> int:
    """Measure in rounds; print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/capture-cost.json")
    args = parser.parse_args()
    rates: dict[str, list[dict[str, list[float]]]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            with tempfile.TemporaryDirectory(prefix="attnlab-cost-") as folder:
                rates[mode].append(measure(mode, Path(folder)))
    found = {**summary(rates), "rates": rates}
    print(json.dumps({k: v for k, v in found.items() if k != "rates"}, indent=2))
    if args.write:
        (ROOT / "docs" / "capture-cost.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
