"""Measure `attnlab matrix` on this machine's GPU: nothing compiled, everything compiled, and step by step.

python tools/matrix_speed.py --source vllm-0.33.0.whl --out speed.json

The ids are the 192 of vLLM's test_prefix_prefill.py. The check is stricter than vLLM's: every slot that no
token was written to holds NaN, the cache holds what production writes, and FP8 is encoded.

- cold: the command with an empty cache of Triton; warm: the same again. Wall time of the whole process, and
  the seconds that the command states for its ids.
- passes: in a process of its own, `attnlab.run_many` three times, each with a new Lab. The first loads the
  compiled kernels; the second makes batches, caches and references anew; the third waits for the GPU after
  every step, which gives the time of each.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = {
    "backend": "vllm",
    "platform": "sm_90",
    "stage": "sound",
    "empty_slots": "nan",
    "cache_write": "scaled",
}


def main() -> int:
    """Measure, write the figures and print them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel, sdist or checkout")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, help="processes that are warm")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.out.write_text(json.dumps(passes(args.source)))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("matrix_speed.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    import triton

    document = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        **measure(args.source, args.rounds),
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return 0


def measure(source: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of the command, cold and warm, and of the passes in one process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        cold = command(source, environment)
        warm = [command(source, environment) for _ in range(rounds)]
        found = []
        for _ in range(rounds):
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                words = [sys.executable, __file__, "--child", "--source", str(source)]
                subprocess.run([*words, "--out", out.name], env=environment, check=True)
                found.append(json.loads(Path(out.name).read_text()))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    medians = {
        name: statistics.median(one[name]["seconds"] for one in found)
        for name in ("first_pass", "second_pass")
    }
    return {"cold": cold, "warm": warm, **medians, "passes": found}


def command(source: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run `attnlab matrix`; return its wall time, its own seconds and the outcomes."""
    words = [sys.executable, "-m", "attnlab", "matrix", "--json", "--source", str(source)]
    words += ["--device", "cuda"]
    for name, value in FLAGS.items():
        words += [f"--{name.replace('_', '-')}", value]
    began = time.perf_counter()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1, 3):
        raise SystemExit(f"attnlab matrix ended with {done.returncode}: {done.stderr[-2000:]}")
    table = json.loads(done.stdout)
    found = {"wall_s": seconds, "ids_s": table["seconds"], "counts": table["counts"]}
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def passes(source: Path) -> dict[str, Any]:
    """Run the matrix three times in this process."""
    from attnlab.case.case import Case
    from attnlab.case.pytest_id import vllm_test_ids

    cases = [Case.from_test_id(name, **FLAGS) for name in vllm_test_ids()]
    return {
        "first_pass": one_pass(source, cases),
        "second_pass": one_pass(source, cases),
        "waiting": one_pass(source, cases, wait=True),
    }


def one_pass(source: Path, cases: list[Any], wait: bool = False) -> dict[str, Any]:
    """Run the matrix in a new Lab; return seconds, seconds by step, outcomes and the largest error.

    With ``wait`` the GPU is idle when a step begins, and no batch is drawn ahead.
    """
    import torch

    from attnlab.checker.matrix import KEEP, in_order, run_many
    from attnlab.lab.lab import Lab

    lab = Lab(source=source, device="cuda", keep=KEEP)
    lab.on_step = (lambda *step: torch.cuda.synchronize()) if wait else None
    outcomes, steps, greatest = dict[str, int](), dict[str, float](), 0.0
    torch.cuda.synchronize()
    start = time.perf_counter()
    for result in map(lab.run, in_order(cases)) if wait else run_many(cases, lab=lab):
        outcomes[result.status] = outcomes.get(result.status, 0) + 1
        greatest = max(greatest, result.errors.greatest_abs.value if result.errors else 0.0)
        for step, seconds in result.seconds.items():
            steps[step] = steps.get(step, 0.0) + seconds
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    steps["other"] = seconds - sum(steps.values())
    return {"seconds": seconds, "by_step": steps, "outcomes": outcomes, "greatest_error": greatest}


if __name__ == "__main__":
    sys.exit(main())
