"""Run the hostile and random cases of MLA natively on this machine's GPU; compare with exact attention.

python tools/native_mla.py --source vllm-0.33.0.whl --out docs/h100-mla.json

--device cpu runs them under Triton's interpreter, to compare the verdicts.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import AttnLabError
from attnlab.mla.mla_case import PATHS, MlaCase, variants_of
from attnlab.mla.ops import VllmOps
from attnlab.mla.run import run_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.drawn_cases import draw_cases


def main() -> int:
    """Run every case, write the document and print its counts; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel, sdist or checkout")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--random", type=int, default=20, help="random cases of each path")
    parser.add_argument("--seconds", type=float, default=150.0, help="no case begins after these")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("native_mla.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    cases = [(one.reason, one.case) for one in variants_of("0.33.0")]
    cases += [
        (f"random {path}", case) for path in PATHS for case in draw_cases(path, args.random, seed=5)
    ]
    end, results = time.perf_counter() + args.seconds, []
    for reason, case in cases:
        if time.perf_counter() < end:
            results.append(outcome(args.source, args.device, reason, case))
    where = torch.cuda.get_device_name() if args.device == "cuda" else "Triton interpreter"
    statuses = [one["status"] for one in results]
    document = {
        "date": datetime.date.today().isoformat(),
        "where": where,
        "versions": {
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "python": platform.python_version(),
        },
        "not_run": len(cases) - len(results),
        "counts": {name: statuses.count(name) for name in sorted(set(statuses))},
        "cases": results,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: document[name] for name in ("where", "counts", "not_run")}))
    for one in results:
        if one["status"] != "match":
            print(one["reason"], one["status"], one.get("cause"), one.get("error", ""))
    return 0


def outcome(source: Path, device: str, reason: str, case: MlaCase) -> dict[str, Any]:
    """Return the verdict of a case, its largest error as a multiple of its bound, and the named cause."""
    facts: dict[str, Any] = {"reason": reason, "path": case.path}
    try:
        found = run_path(case, VllmOps.of(source, case.machine, device))
    except (AttnLabError, RuntimeError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return {**facts, "status": "error", "error": text}
    return {**facts, "status": found.status, "worst": round(found.worst, 3), "cause": found.cause}


if __name__ == "__main__":
    sys.exit(main())
