"""Run vLLM's test matrix through the lab on this machine's GPU, and through vLLM's own pytest file.

python tools/matrix.py --source vllm-0.33.0.whl --tests vllm-0.33.0/tests --out docs/matrix.json

The ids are those of the plain and the ALiBi test of test_prefix_prefill.py that the lab takes: value
caches that are not interleaved. vLLM's file runs in a process of its own with an empty Triton cache, the
lab in another, first with an empty cache ("cold"), then again with the compiled kernels ("warm"), then
vLLM's again. --tests is a checkout's folder; vllm must be importable. The lab's check is stricter: every
slot that nobody wrote holds NaN, and the cache holds what production writes.
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
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

FILE = "kernels/attention/test_prefix_prefill.py"
WORDS = "(test_contexted_kv_attention and not cached_kv and not f32) and not True-"


def main() -> int:
    """Run the matrix in every way and write the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--source", type=Path, required=True, help="a wheel, an sdist or a checkout"
    )
    parser.add_argument("--tests", type=Path, required=True, help="the tests folder of a checkout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=280, help="at most, for a run of vLLM's file"
    )
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
    theirs = {"cold": pytest_run(args, caches["vllm"], folder / "cold.xml")}
    ids = list(theirs["cold"])
    (folder / "ids.json").write_text(json.dumps(ids))
    mine = {}
    for name in ("cold", "warm"):
        out = folder / f"{name}.json"
        command = [
            sys.executable,
            __file__,
            "--source",
            str(args.source),
            "--tests",
            str(args.tests),
        ]
        command += ["--lab", str(folder / "ids.json"), "--out", str(out)]
        subprocess.run(command, check=True, env=environment(caches["lab"]))
        mine[name] = json.loads(out.read_text())
    theirs["warm"] = pytest_run(args, caches["vllm"], folder / "warm.xml")
    both = [name for name in theirs["warm"] if theirs["warm"][name]["outcome"] == "passed"]
    figures: dict[str, Any] = {"ids": len(ids), "compared": len(both)}
    for name in ("cold", "warm"):
        seconds = sum(theirs[name][one]["seconds"] for one in both)
        share = {one: mine[name]["cases"][one]["seconds"] for one in both}
        figures[name] = {
            "vllm_seconds": seconds,
            "lab_seconds": sum(share.values()),
            "ratio": seconds / sum(share.values()),
            "lab_seconds_by_step": mine[name]["by_step"],
            "lab_setup_seconds": mine[name]["setup_seconds"],
        }
    figures["outcomes"] = mine["warm"]["outcomes"]
    figures["cases"] = {
        one: {"vllm": theirs["warm"].get(one, theirs["cold"][one]), **mine["warm"]["cases"][one]}
        for one in ids
    }
    return figures


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a run with its own cache of compiled kernels."""
    return {**os.environ, "TRITON_CACHE_DIR": str(cache)}


def pytest_run(args: argparse.Namespace, cache: Path, report: Path) -> dict[str, dict[str, Any]]:
    """Run vLLM's file for at most ``args.seconds``; return seconds and outcome by test id."""
    stopper = report.with_suffix(".py")
    stopper.write_text(
        "import time\nstart = time.time()\n"
        "def pytest_runtest_logfinish(nodeid, location):\n"
        f"    if time.time() - start > {args.seconds}:\n"
        "        import pytest\n"
        "        pytest.exit('time is up', 0)\n"
    )
    paths = os.pathsep.join([str(stopper.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", stopper.stem, "-k", WORDS]
    command += ["-c", os.devnull, "--rootdir", str(args.tests), f"--junitxml={report}"]
    done = subprocess.run(
        [*command, str(args.tests / FILE)],
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


def lab_run(source: Path, ids: list[str]) -> dict[str, Any]:
    """Run ids through one Lab on the GPU; return seconds of each, by step, and the outcomes."""
    import torch

    from attnlab.case import Case
    from attnlab.run import Lab

    lab = Lab(source=source, device="cuda", keep=4)
    start = time.perf_counter()
    lab.vllm(Case(origin="vllm"))
    torch.zeros(1, device="cuda")
    setup = time.perf_counter() - start
    cases, steps, outcomes = {}, dict[str, float](), dict[str, int]()
    for name in sorted(
        ids, key=lambda name: name.split("-")[::-1]
    ):  # those that share a batch together
        case = Case.from_test_id(name, origin="vllm", platform="sm_90", stage="sound", empty="nan")
        if case.is_fp8:
            case = case.replace(cache_write="scaled")
        start = time.perf_counter()
        result = lab.run(case)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        greatest = result.errors.greatest_abs.value if result.errors else None
        cases[name] = {"seconds": seconds, "verdict": result.verdict, "greatest_error": greatest}
        outcomes[result.status] = outcomes.get(result.status, 0) + 1
        for step, s in result.seconds.items():
            steps[step] = steps.get(step, 0.0) + s
    return {"cases": cases, "by_step": steps, "outcomes": outcomes, "setup_seconds": setup}


if __name__ == "__main__":
    sys.exit(main())
