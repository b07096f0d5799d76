"""Check random Cases with masks and op arguments natively on this machine's GPU.

python tools/native_arguments.py --source vllm-0.33.0.whl --out arguments.json

The parts, in this order; ``--part`` chooses some:

- formats: random Cases of unified_attention with each format of the cache.
- encoders: random Cases of triton_prefill_attention.
- arguments: random Cases of each other op argument, of its ops in turn.
- masks: random Cases of unified_attention with each mask.

The Cases are those of the tests under the interpreter, with few sizes, so that few kernels are compiled. Each
is checked as `attnlab check` does it, which has Cases with masks and op arguments of its own. --device cpu
runs the same Cases under the interpreter. With --store FOLDER, the same command continues if it was stopped.
"""

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.argument_cases import (  # noqa: E402
    DRAWN,
    FORMATS,
    random_argument_case,
    random_format_case,
)
from helpers.encoder_cases import random_encoder_case  # noqa: E402
from helpers.masked_cases import random_case  # noqa: E402

from attnlab.case.case import Case  # noqa: E402
from attnlab.case.masks import CAUSAL, MASKS  # noqa: E402
from attnlab.checker.case_check import CheckJob  # noqa: E402
from attnlab.checker.finding import KINDS  # noqa: E402
from attnlab.checker.plan import estimated_bytes  # noqa: E402
from attnlab.kernels import find_backend  # noqa: E402
from attnlab.tasks.run import TaskRun, deadline, find_engine  # noqa: E402
from attnlab.tasks.store import Store  # noqa: E402
from attnlab.tasks.task import DONE, Outcome, Task  # noqa: E402

_FLOAT16 = {"dtype": "float16", "block_size": 16}
_SIZES = {**_FLOAT16, "head_size": 32}
Named = Iterator[tuple[str, Case]]  # Cases, each with a name that begins with its group


def main() -> int:
    """Check every Case, write the document and print its counts; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel, sdist or checkout")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument(
        "--random", type=int, default=200, help="random Cases of each mask or argument"
    )
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep outcomes, to continue")
    parser.add_argument("--engine", default="local")
    parser.add_argument("--seconds", type=float, help="no Case begins after these")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("native_arguments.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    backend = find_backend("vllm", args.source, args.device)
    job = CheckJob(libraries={"": backend}, device=args.device)
    tasks = [
        Task(
            key=f"{part} {name}",
            payload={"library": "", "case": case.changes()},
            memory_bytes=estimated_bytes(case, backend),
            limit_s=300.0,
        )
        for part in args.part or PARTS
        for name, case in PARTS[part](args.random)
    ]
    with contextlib.ExitStack() as stack:
        header = {"random": args.random, **job.identity()}
        store = None if args.store is None else stack.enter_context(Store(args.store, header))
        engine = stack.enter_context(find_engine(args.engine, args.device))
        run = TaskRun(engine=engine, job=job, store=store, is_late=deadline(args.seconds))
        run.run(tasks, lambda one: print(one.key, status_of(one), file=sys.stderr, flush=True))
    document = document_of(tasks, run.outcomes, {"device": args.device, **header})
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["counts"], indent=1))
    return 0


def _formats(count: int) -> Named:
    for name in FORMATS:
        for number in range(count):
            case = random_format_case(name, number, **_FLOAT16)
            if name.startswith("int4"):  # 16 do not compile; vLLM's backend takes 32 and more
                case = case.replace(head_size=max(32, case.head_size))
            yield f"{name} {number}", case


def _encoders(count: int) -> Named:
    for number in range(count):
        case = random_encoder_case(number, backend="vllm", dtype="float16")
        yield f"{case.op} {number}", case


def _arguments(count: int) -> Named:
    for name in DRAWN:
        sizes = _FLOAT16 if name == "latent_cache" else _SIZES
        for number in range(count):
            yield f"{name} {number}", random_argument_case(name, number, **sizes)


def _masks(count: int) -> Named:
    for mask in MASKS:
        for number in range(count if mask != CAUSAL else 0):
            yield (
                f"{mask} {number}",
                random_case(mask, number, backend="vllm", softcap=None, **_SIZES),
            )


PARTS = {"formats": _formats, "encoders": _encoders, "arguments": _arguments, "masks": _masks}


def status_of(outcome: Outcome | None) -> str:
    """Return "match", the faults, or why a Case has no verdict."""
    if outcome is None or outcome.status != DONE or outcome.verdict is None:
        return "not started" if outcome is None else f"{outcome.status}: {outcome.text}"
    verdict = outcome.verdict
    faults = [one for one in verdict["findings"] if one["kind"] in KINDS]
    texts = dict.fromkeys(f"{one['kind']}: {one['diagnosis']}" for one in faults)
    return "; ".join(texts) or verdict["not_run"] or verdict["unsupported"] or "match"


def document_of(
    tasks: list[Task], outcomes: dict[str, Outcome], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the counts of each group by status, and the Cases that do not match."""
    found = [(task, status_of(outcomes.get(task.key))) for task in tasks]
    counts: dict[str, Counter[str]] = {}
    for task, status in found:
        counts.setdefault(task.key.rpartition(" ")[0], Counter())[status] += 1
    others = [
        {"name": task.key, "status": status, "case": task.payload["case"]}
        for task, status in found
        if status != "match"
    ]
    return {**facts, "counts": counts, "not_matching": others}


if __name__ == "__main__":
    sys.exit(main())
