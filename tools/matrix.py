"""Run vLLM's test matrix through the lab on this machine's GPU, and through vLLM's own pytest file.

python tools/matrix.py --source vllm-0.33.0.whl --tests vllm-0.33.0/tests --out docs/matrix.json

The ids are those of the plain and the ALiBi test of test_prefix_prefill.py. vLLM's file runs in a random
order for --seconds, with an empty cache of compiled kernels; the lab runs the same ids, cold, too. Then
the lab compiles the rest of the matrix, runs all of it warm, and vLLM's file runs its sample again.
--tests is the tests folder of a checkout; vllm must be importable. The lab's check is stricter: every slot
that nobody wrote holds NaN, the cache holds what production writes, and FP8 is encoded, not converted to
zeros.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

FILE = "kernels/attention/test_prefix_prefill.py"
_WORKERS = 12  # processes that compile
WORDS = "test_contexted_kv_attention and not cached_kv and not f32"


def main() -> int:
    """Run the matrix in every way and write the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--source", type=Path, required=True, help="a wheel, an sdist or a checkout"
    )
    parser.add_argument("--tests", type=Path, required=True, help="the tests folder of a checkout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100, help="for a run of vLLM's file")
    parser.add_argument("--lab", type=Path, help=argparse.SUPPRESS)  # the ids, for a child process
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("matrix.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    if args.lab:
        args.out.write_text(json.dumps(lab_run(args.source, json.loads(args.lab.read_text()))))
        return 0
    import triton

    with tempfile.TemporaryDirectory() as folder:
        figures = compare(args, Path(folder))
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    document = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {**versions, "python": platform.python_version()},
        **figures,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({k: v for k, v in document.items() if k != "cases"}, indent=1))
    return 0


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return seconds of vLLM's file and of the lab on the ids that both ran, cold and warm."""
    caches = {name: folder / name for name in ("vllm", "lab")}
    ids = collected(args)
    theirs = {"cold": pytest_run(args, caches["vllm"], folder / "cold.xml")}
    sample = list(theirs["cold"])
    mine = {"cold": lab_process(args, sample, caches["lab"], folder / "cold")()}
    rest = [name for name in ids if name not in sample]
    shares = [rest[i::_WORKERS] for i in range(_WORKERS)]
    started = [
        lab_process(args, share, caches["lab"], folder / f"share{i}")
        for i, share in enumerate(shares)
    ]
    for wait in started:
        wait()
    mine["warm"] = lab_process(args, ids, caches["lab"], folder / "warm")()
    theirs["warm"] = pytest_run(args, caches["vllm"], folder / "warm.xml")
    figures: dict[str, Any] = {"ids": len(ids), "sample": len(sample)}
    for name in ("cold", "warm"):
        both = [one for one in theirs[name] if theirs[name][one]["outcome"] == "passed"]
        seconds = sum(theirs[name][one]["seconds"] for one in both)
        own = sum(mine[name]["cases"][one]["seconds"] for one in both)
        figures[name] = {
            "compared": len(both),
            "vllm_seconds": seconds,
            "lab_seconds": own,
            "ratio": seconds / own,
        }
    all_seconds = sum(case["seconds"] for case in mine["warm"]["cases"].values())
    figures["whole_matrix_warm_lab"] = {"seconds": all_seconds, **mine["warm"]["totals"]}
    vllm = {one: theirs["warm"].get(one, {}).get("seconds") for one in ids}
    figures["cases"] = {one: {"vllm": vllm[one], **mine["warm"]["cases"][one]} for one in ids}
    return figures


def collected(args: argparse.Namespace) -> list[str]:
    """Return the test ids of the matrix."""
    command = [*pytest_command(args), "--collect-only"]
    done = subprocess.run(command, capture_output=True, text=True)
    return [line.split("::")[1] for line in done.stdout.splitlines() if "::test_" in line]


def lab_process(
    args: argparse.Namespace, ids: list[str], cache: Path, out: Path
) -> Callable[[], dict[str, Any]]:
    """Start the lab on some ids in a process of its own; what is returned waits for its figures."""
    out.with_suffix(".ids").write_text(json.dumps(ids))
    command = [sys.executable, __file__, "--source", str(args.source), "--tests", str(args.tests)]
    command += ["--lab", str(out.with_suffix(".ids")), "--out", str(out.with_suffix(".json"))]
    process = subprocess.Popen(command, env=environment(cache))

    def wait() -> dict[str, Any]:
        if process.wait():
            raise SystemExit(f"the lab ended with {process.returncode}")
        found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
        return found

    return wait


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a run with its own cache of compiled kernels."""
    return {**os.environ, "TRITON_CACHE_DIR": str(cache)}


def pytest_run(args: argparse.Namespace, cache: Path, report: Path) -> dict[str, dict[str, Any]]:
    """Run vLLM's file for at most ``args.seconds``; return seconds and outcome by test id."""
    stopper = report.with_suffix(".py")
    stopper.write_text(
        "import random, time\nstart = time.time()\n"
        "def pytest_collection_modifyitems(items):\n    random.Random(0).shuffle(items)\n"
        "def pytest_runtest_logfinish(nodeid, location):\n"
        f"    if time.time() - start > {args.seconds}:\n"
        "        import pytest\n"
        "        pytest.exit('time is up', 0)\n"
    )
    paths = os.pathsep.join([str(stopper.parent), os.environ.get("PYTHONPATH", "")])
    command = [*pytest_command(args), "-p", stopper.stem, f"--junitxml={report}"]
    done = subprocess.run(
        command,
        env={**environment(cache), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-1500:], done.stderr[-1500:], flush=True)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child.tag for child in case if child.tag != "system-out"), "passed")
        found[case.attrib["name"]] = {"seconds": float(case.attrib["time"]), "outcome": problem}
    return found


def pytest_command(args: argparse.Namespace) -> list[str]:
    """Return pytest's command line for the ids, without a checkout's own configuration."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", WORDS, "-c", os.devnull]
    return [*command, "--rootdir", str(args.tests), str(args.tests / FILE)]


def lab_run(source: Path, ids: list[str]) -> dict[str, Any]:
    """Run ids as `attnlab matrix` does on the GPU; return seconds of each, by step, and the outcomes.

    The seconds of an id include only what it waits for its batch, which is drawn in the background.
    """
    import torch

    from attnlab.checker.matrix import KEEP, run_many
    from attnlab.lab.lab import Lab

    lab = Lab(source=source, device="cuda", keep=KEEP)
    start = time.perf_counter()
    names = {case_of(name): name for name in ids}
    first = next(iter(names))
    lab.backend(first).check(first)
    torch.zeros(1, device="cuda")
    setup = time.perf_counter() - start
    cases, steps, outcomes = {}, dict[str, float](), dict[str, int]()
    began = start = time.perf_counter()
    for result in run_many(list(names), lab=lab):
        torch.cuda.synchronize()
        now = time.perf_counter()
        greatest = result.errors.greatest_abs.value if result.errors else None
        verdict = {"verdict": result.verdict, "greatest_error": greatest}
        cases[names[result.case]] = {"seconds": now - began, **verdict}
        outcomes[result.status] = outcomes.get(result.status, 0) + 1
        for step, seconds in result.seconds.items():
            steps[step] = steps.get(step, 0.0) + seconds
        began = time.perf_counter()
    wall = time.perf_counter() - start
    totals = {"by_step": steps, "outcomes": outcomes, "setup_seconds": setup, "wall_seconds": wall}
    return {"cases": cases, "totals": totals}


def case_of(name: str) -> Any:
    """Return the Case of an id, with NaN in every slot that holds no token."""
    from attnlab.case.case import Case

    fields: dict[str, Any] = {"backend": "vllm", "platform": "sm_90", "stage": "sound"}
    case = Case.from_test_id(name, **fields, empty_slots="nan")
    return case.replace(cache_write="scaled") if case.is_fp8 else case


if __name__ == "__main__":
    sys.exit(main())
