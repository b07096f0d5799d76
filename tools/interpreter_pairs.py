"""Check a vLLM under Triton's interpreter with each pair of a Triton and a NumPy, and write the table.

python tools/interpreter_pairs.py FOLDER                          all pairs; FOLDER keeps the packages (3 GB)
python tools/interpreter_pairs.py FOLDER --triton 3.6.0 --numpy 2.4.6   one pair; the others keep their rows
python tools/interpreter_pairs.py FOLDER --here                   the pair that is installed here

Each pair runs in a process of its own, with the two packages before all others on its path. A pair is good
if every case runs and the findings are those of the reference pair, which the lab is developed with. 0.11.2
is checked because it has faults that must be found. The result is docs/interpreter-pairs.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "docs" / "interpreter-pairs.json"
TRITONS = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
NUMPYS = ("2.0.2", "2.1.3", "2.2.6", "2.3.5", "2.4.6")
REFERENCE = ("3.9.0", "2.3.5")
RELEASE = "0.11.2"
CASES = 6  # for each op: the first variants, among them GQA, odd heads, windows, ALiBi and FP8


def main() -> None:
    """Measure the pairs that are asked for, the reference first, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--triton", nargs="+", default=TRITONS)
    parser.add_argument("--numpy", nargs="+", default=NUMPYS)
    parser.add_argument("--here", action="store_true")
    args = parser.parse_args()
    rows = known_rows()
    if args.here:
        pairs = [(version("triton"), version("numpy"))]
    else:
        pairs = [(triton, numpy) for triton in args.triton for numpy in args.numpy]
    if REFERENCE not in rows:
        pairs = [REFERENCE, *(pair for pair in pairs if pair != REFERENCE)]
    for triton, numpy in pairs:
        paths = (
            []
            if args.here
            else [package(args.folder, "triton", triton), package(args.folder, "numpy", numpy)]
        )
        row = {"triton": triton, "numpy": numpy, **measure(paths)}
        reference = rows.get(REFERENCE, row)
        row["good"] = all(row[key] == reference[key] for key in ("cases_run", "findings"))
        rows[triton, numpy] = row
        write(rows)
        print(triton, numpy, "good" if row["good"] else row, f"{row['seconds']} s", flush=True)


def package(folder: Path, name: str, release: str) -> Path:
    """Return a folder that contains only this release of a package; install it if it is not there."""
    target = folder / f"{name}-{release}"
    if not target.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(target), f"{name}=={release}"]
        subprocess.run(command, check=True)
    return target


def measure(paths: list[Path]) -> dict[str, Any]:
    """Return what ``attnlab check`` of the release reports with these folders first on the path."""
    from attnlab.kernels.vllm.source import fetch

    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "attnlab", "check", "--source", str(fetch(RELEASE)), "--json"]
    command += ["--cases", str(CASES), "--seconds", "3600"]
    started = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    if not done.stdout:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"cases_run": 0, "findings": [], "error": lines[-1], "seconds": 0}
    report = json.loads(done.stdout)
    findings = sorted({(f["op"], f["kind"], f["diagnosis"]) for f in report["findings"]})
    return {
        "cases_run": report["cases_run"],
        "findings": [list(finding) for finding in findings],
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started),
    }


def known_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the table by (Triton, NumPy)."""
    if not TABLE.is_file():
        return {}
    rows = json.loads(TABLE.read_text())["pairs"]
    return {(row["triton"], row["numpy"]): row for row in rows}


def write(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write the table, sorted by version."""
    facts = {"vllm": RELEASE, "cases": CASES, "reference": list(REFERENCE)}
    table = {**facts, "pairs": [rows[pair] for pair in sorted(rows)]}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
