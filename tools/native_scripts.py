"""Run the scripts of a check's findings on this machine's GPU, with the vLLM that is installed.

attnlab check --source vllm-0.33.0.whl --json > check.json
python tools/native_scripts.py check.json --source vllm-0.33.0.whl --arguments docs/h100-arguments.json \\
    --out docs/h100-findings.json

A script needs no attnlab (:mod:`attnlab.reports.upstream`). A check shrinks only the first Case of a finding,
so each hostile Case with tensors beyond 2^31 elements is added; with --arguments, those that were not right.
A script with such tensors takes about 20 GB of a GPU. One that lacks memory runs once more, alone.
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

from attnlab.case.ops import TRITON_OPS
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.reports.upstream import write_reports

_VARIANTS = 31  # variants before the Cases with an op argument
_FAR = "far_"
_LIMIT_S = 120.0
_NO_MEMORY = re.compile("too little memory|OutOfMemory")
_NO_SCRIPT = "there is no script for this Case"


def main() -> int:
    """Run every script, write the document and print a line for each; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("check", type=Path, help="the document of attnlab check --json")
    parser.add_argument("--source", type=Path, required=True, help="the wheel that was checked")
    parser.add_argument("--arguments", type=Path, help="the document of native_arguments.py")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--processes", type=int, default=8)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("native_scripts.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    wrong = None if args.arguments is None else _not_matching(args.arguments)
    checked = [*_found(args.check)]
    known = {(one.op, one.case.op_argument) for one in checked}
    far = [one for one in _far(args.source, wrong) if (one.op, one.diagnosis) not in known]
    findings = [*checked, *far]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(one, _written(one, Path(folder, str(i)))) for i, one in enumerate(findings)]
        for one in _results(jobs, args.processes):
            results.append(one)
            args.out.write_text(json.dumps(_document(results), indent=1) + "\n")
            print(one["op"], one["diagnosis"], one["exit_code"], one["output"], flush=True)
    return 0


def _not_matching(document: Path) -> set[str]:
    """Return the Cases that did not match, each as an op and its argument."""
    hostile = json.loads(document.read_text())["hostile"]
    return {one["name"] for one in hostile if one["status"] != "match"}


def _found(document: Path) -> Iterator[Finding]:
    """Yield the findings of a check, each at its smallest Case."""
    names = ("op", "kind", "evidence", "diagnosis", "case")
    for one in json.loads(document.read_text())["findings"]:
        yield Finding.from_verdict({name: one[name] for name in names})


def _far(source: Path, wrong: set[str] | None) -> Iterator[Finding]:
    """Yield the Cases of a source with tensors beyond 2^31 elements, in the form of findings.

    ``wrong``: the Cases to yield, None for all.
    """
    backend = VllmBackend(path=source)
    for op in TRITON_OPS:
        for case in hostile_cases(backend, op, "sm_90", _VARIANTS, 0):
            name = f"{op} {case.op_argument}"
            if _FAR in case.op_argument and (wrong is None or name in wrong):
                yield Finding(
                    op=op,
                    kind="wrong_output",
                    case=case,
                    evidence="a Case with tensors beyond 2^31 elements",
                    diagnosis=case.op_argument,
                )


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
