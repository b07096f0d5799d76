"""Run the scripts of a check's findings on this machine's GPU, with the vLLM that is installed.

attnlab check --source vllm-0.33.0.whl --json > check.json
python tools/native_scripts.py check.json --out docs/h100-findings.json

A script needs no attnlab (:mod:`attnlab.reports.upstream`). One that lacks memory runs once more, alone.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from attnlab.checker.finding import Finding
from attnlab.reports.upstream import write_reports

_LIMIT_S = 120.0
_NO_MEMORY = re.compile("too little memory|OutOfMemory")
_NO_SCRIPT = "there is no script for this Case"


def main() -> int:
    """Run every script, write the document and print a line for each; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("check", type=Path, help="the document of attnlab check --json")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--processes", type=int, default=8)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("native_scripts.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    findings = [one for one in _found(args.check) if not one.horizon]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(one, _written(one, Path(folder, str(i)))) for i, one in enumerate(findings)]
        for one in _results(jobs, args.processes):
            results.append(one)
            args.out.write_text(json.dumps(_document(results), indent=1) + "\n")
            print(one["op"], one["diagnosis"], one["exit_code"], one["output"], flush=True)
    return 0


def _found(document: Path) -> Iterator[Finding]:
    """Yield the findings of a check, each at its smallest Case."""
    names = ("op", "kind", "evidence", "diagnosis", "case", "horizon")
    for one in json.loads(document.read_text())["findings"]:
        yield Finding.from_verdict({name: one[name] for name in names if name in one})


def _written(finding: Finding, folder: Path) -> Path | None:
    """Write the script of a finding; return None if it has none."""
    files = write_reports([finding], folder, "the vLLM that is installed", "cuda")
    return next((file for file in files if file.suffix == ".py"), None)


def _results(jobs: list[tuple[Finding, Path | None]], processes: int) -> Iterator[dict[str, Any]]:
    """Run the scripts and yield what each shows; those that lack memory run once more, alone."""
    again = []
    with ThreadPoolExecutor(processes) as pool:
        for job, found in zip(jobs, pool.map(lambda job: _result(*job), jobs), strict=True):
            if _NO_MEMORY.search(found["output"]):
                again.append(job)
            else:
                yield found
    yield from (_result(*job) for job in again)


def _result(finding: Finding, script: Path | None) -> dict[str, Any]:
    """Run a script; return its exit code and the last line that it prints."""
    facts = {
        "op": finding.op,
        "kind": finding.kind,
        "diagnosis": finding.diagnosis,
        "run": finding.command,
    }
    if script is None:
        return {**facts, "exit_code": None, "output": _NO_SCRIPT}
    command = [sys.executable, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {**facts, "exit_code": None, "output": f"it did not end within {_LIMIT_S:g} s"}
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    summary = next((one for one in reversed(lines) if one.startswith("vLLM ")), None)
    return {**facts, "exit_code": done.returncode, "output": summary or " ".join(lines[-1:])[:300]}


def _document(results: list[dict[str, Any]]) -> dict[str, Any]:
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": gpu.stdout.strip(),
        "versions": {
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "python": platform.python_version(),
        },
        "findings": results,
    }


if __name__ == "__main__":
    sys.exit(main())
