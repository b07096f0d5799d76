"""Measure `diagnose` on planted faults of vLLM's kernels, each in a new process, from start to end.

python tools/diagnosis_speed.py SOURCE --out FILE [--count N] [--base CHECKOUT]

SOURCE is a checkout of vLLM's sources, or what `attnlab fetch --ops 0.33.0` prints. The faults are those
that were written by hand for the held-out draws (docs/held-out-faults.json), one of each op in turn.
Each is diagnosed on the first hostile case with a wrong output. With --base, the attnlab of another checkout
diagnoses the same case, one after the other, and the statements that differ are printed.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hand_faults import HandFault, NoPlace

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.ops import OPS
from attnlab.checker.hostile import hostile_cases
from attnlab.kernels import find_backend
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.lab import Lab

_ROOT = Path(__file__).parents[1]
_FAULTS = _ROOT / "docs" / "held-out-faults.json"
_DIAGNOSE = """
import json, sys
from attnlab.case.case import Case
from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab
source, fields = sys.argv[1:]
found = diagnose(Case.from_dict(json.loads(fields)), lab=Lab(source=source, device="cpu"))
print(json.dumps([found.status, found.conclusion]))
"""


def faults() -> Iterator[HandFault]:
    """Yield the faults of the draws, each once: one of each op in turn."""
    of_ops: dict[str, dict[Any, HandFault]] = {}
    for draw in json.loads(_FAULTS.read_text())["draws"]:
        for one in map(HandFault.from_dict, draw["by_hand"]):
            if one.op in OPS:
                of_ops.setdefault(one.op, {}).setdefault(one.changes, one)
    for some in zip_longest(*(found.values() for found in of_ops.values())):
        yield from (one for one in some if one is not None)


def planted(fault: HandFault, source: Path, folder: Path) -> Path | None:
    """Copy a source with a fault into a folder; return its root, or None if it lacks the place."""
    own = find_source(source).op_file(OPS[fault.op].module)
    for file in (own, *own.parent.glob("triton_attention_helpers.py")):
        with suppress(NoPlace):
            text = fault.apply(file.read_text())
            copy = folder / "source"
            shutil.copytree(source, copy)
            (copy / file.relative_to(source)).write_text(text)
            return copy
    return None


def wrong_case(op: str, source: Path) -> Case | None:
    """Return the first hostile case of an op with a wrong output, or None."""
    lab = Lab(source=source, device="cpu")
    for case in hostile_cases(find_backend("vllm", source, "cpu"), op, "sm_90", None, 0):
        case = case.replace(backend="vllm")
        with suppress(AttnLabError):
            if lab.run(case).status == "mismatch":
                return case
    return None


def measured(checkout: Path, source: Path, case: Case) -> dict[str, Any]:
    """Return what a diagnosis by the attnlab of a checkout takes, in seconds, and what it says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-c", _DIAGNOSE, str(source), case.to_json()],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    status, conclusion = json.loads(ran.stdout)
    return {
        "seconds": round(seconds, 2),
        "processor_s": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2
        ),
        "status": status,
        "conclusion": conclusion,
    }


def main() -> None:
    """Measure faults, write a JSON line for each, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="gets a JSON object for each fault")
    parser.add_argument("--count", type=int, default=40, help="faults that are measured")
    parser.add_argument("--base", type=Path, help="another checkout of attnlab")
    args = parser.parse_args()
    found = list[dict[str, Any]]()
    for fault in faults():
        if len(found) == args.count:
            break
        with tempfile.TemporaryDirectory() as folder:
            source = planted(fault, args.source, Path(folder))
            case = None if source is None else wrong_case(fault.op, source)
            if source is None or case is None:
                continue
            one = {"op": fault.op, "name": fault.name, "now": measured(_ROOT, source, case)}
            if args.base is not None:
                one["base"] = measured(args.base, source, case)
        found.append(one)
        with args.out.open("a") as out:
            print(json.dumps(one), file=out)
        print(f"{len(found)}/{args.count}", fault.op, fault.name, one["now"]["seconds"], "s")
    for name in ("now", "base") if args.base is not None else ("now",):
        for unit in ("seconds", "processor_s"):
            numbers = [one[name][unit] for one in found]
            print(f"{name} {unit}: median {statistics.median(numbers):.1f}, sum {sum(numbers):.1f}")
    for one in found:
        if args.base is not None and one["now"]["conclusion"] != one["base"]["conclusion"]:
            print(
                f"{one['name']}\n  base: {one['base']['conclusion']}\n  now:  {one['now']['conclusion']}"
            )


if __name__ == "__main__":
    main()
