"""Run Cases with masks and op arguments natively on this machine's GPU; compare with the reference.

python tools/native_arguments.py --source vllm-0.33.0.whl --out docs/h100-arguments.json

The parts, in this order; ``--part`` chooses some:

- hostile: the Cases of ``attnlab check`` with a mask or an op argument, of every op.
- formats: random Cases of unified_attention with each format of the cache.
- encoders: random Cases of triton_prefill_attention.
- arguments: random Cases of each other op argument, of its ops in turn.
- masks: random Cases of unified_attention with each mask.

The random Cases are those of the tests under the interpreter, with few sizes, so that few kernels are
compiled. All run through backend "vllm", as every command does. ``--device cpu`` runs them under the
interpreter, to compare. The document is written every few seconds, so that what ran is kept if the tool is
stopped. ``--resume`` keeps its outcomes, but runs Cases that it lacks, that did not run, or that ran out of
memory.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import platform
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
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
from attnlab.case.errors import (  # noqa: E402
    AttnLabError,
    DeviceLost,
    KernelFailed,
    OutOfMemory,
    Unsupported,
)
from attnlab.case.masks import CAUSAL, MASKS  # noqa: E402
from attnlab.case.op_arguments import NONE  # noqa: E402
from attnlab.case.ops import TRITON_OPS  # noqa: E402
from attnlab.checker.case_run import run_case  # noqa: E402
from attnlab.checker.hostile import hostile_cases  # noqa: E402
from attnlab.kernels.vllm.backend import VllmBackend  # noqa: E402
from attnlab.lab.lab import Lab  # noqa: E402

_VARIANTS = 31  # variants before the Cases with a mask or an op argument
_FLOAT16 = {"dtype": "float16", "block_size": 16}
_SIZES = {**_FLOAT16, "head_size": 32}
_SCALED = "per_token_head"  # op arguments that take about 9 GB
_MATCH, _NOT_RUN, _NO_MEMORY = "match", "not run", "out of memory"
_SPAWN = multiprocessing.get_context("spawn")
_SAVE_S = 5.0  # between two writes of the document


def main() -> int:
    """Run every Case, write the document and print its counts; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel, sdist or checkout")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument(
        "--random", type=int, default=200, help="random Cases of each mask or argument"
    )
    parser.add_argument("--only", default="", help="a regular expression of the Cases' names")
    parser.add_argument("--resume", action="store_true", help="continue the document --out")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument(
        "--large", type=int, default=5, help="processes for Cases of about 9 GB each"
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="no job begins after these")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("native_arguments.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    began = time.perf_counter()
    before_s = json.loads(args.out.read_text())["seconds"] if args.resume else 0.0
    jobs = [*_jobs(args)]
    found = _kept(args, jobs) if args.resume else [None] * len(jobs)
    running = threading.Thread(target=_run, args=(args, jobs, found, began + args.seconds))
    running.start()
    while running.is_alive():
        running.join(_SAVE_S)
        _save(args, found, before_s + time.perf_counter() - began)
    print(json.dumps(_counts(_done(found)), indent=1))
    return 0


def _save(args: argparse.Namespace, found: "Found", seconds: float) -> None:
    """Write the document of what is done, and print how much that is."""
    done = _done(found)
    args.out.write_text(json.dumps(_document(args, done, seconds), indent=1) + "\n")
    print(f"{len(done)} of {len(found)} Cases, {seconds:.0f} s", file=sys.stderr, flush=True)


def _kept(args: argparse.Namespace, jobs: list[tuple[str, str, str]]) -> "Found":
    """Return the outcomes of the document, in the order of the jobs; None for those to run."""
    before = json.loads(args.out.read_text())
    if before["random"] != args.random:
        sys.exit(f"--random must be that of the document, {before['random']}, got {args.random}")
    hostile = iter(before["hostile"])
    others = {one["name"]: one for one in before["random_not_matching"]}
    counted = {group.partition(" ")[0] for group in before["counts"]}
    found: Found = []
    for part, name, _ in jobs:
        one = (
            next(hostile, {"status": _NOT_RUN})
            if part == "hostile"
            else others.get(name, {"status": _MATCH})
        )
        is_kept = part in counted and one["status"] not in (_NOT_RUN, _NO_MEMORY)
        found.append({"part": part, "name": name, **one} if is_kept else None)
    return found


def _done(found: "Found") -> list[dict[str, Any]]:
    return [one for one in found if one is not None]


def _jobs(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield the Cases: the part they belong to, a name, and the Case as JSON."""
    for part in PARTS:
        if args.part is None or part in args.part:
            for name, case in PARTS[part](args):
                if re.search(args.only, name):
                    yield part, name, case.to_json()


Named = Iterator[tuple[str, Case]]  # Cases, each with a name that begins with its group
Found = list[dict[str, Any] | None]  # the outcome of each Case, None until it is there


def _hostile(args: argparse.Namespace) -> Named:
    backend = VllmBackend(path=args.source, requested_device=args.device)
    for op in TRITON_OPS:
        for case in hostile_cases(backend, op, "sm_90", _VARIANTS, 0):
            if (case.op_argument, case.mask) != (NONE, CAUSAL):
                name = case.mask if case.op_argument == NONE else case.op_argument
                yield f"{op} {name}", case


def _formats(args: argparse.Namespace) -> Named:
    for name in FORMATS:
        for number in range(args.random):
            case = random_format_case(name, number, **_FLOAT16)
            if name.startswith("int4"):  # 16 do not compile; vLLM's backend takes 32 and more
                case = case.replace(head_size=max(32, case.head_size))
            yield f"{name} {number}", case


def _encoders(args: argparse.Namespace) -> Named:
    for number in range(args.random):
        case = random_encoder_case(number, backend="vllm", dtype="float16")
        yield f"{case.op} {number}", case


def _arguments(args: argparse.Namespace) -> Named:
    for name in DRAWN:
        sizes = _FLOAT16 if name == "latent_cache" else _SIZES
        for number in range(args.random):
            yield f"{name} {number}", random_argument_case(name, number, **sizes)


def _masks(args: argparse.Namespace) -> Named:
    for mask in MASKS:
        for number in range(args.random if mask != CAUSAL else 0):
            case = random_case(mask, number, backend="vllm", softcap=None, **_SIZES)
            yield f"{mask} {number}", case


PARTS = {
    "hostile": _hostile,
    "formats": _formats,
    "encoders": _encoders,
    "arguments": _arguments,
    "masks": _masks,
}


def _run(
    args: argparse.Namespace, jobs: list[tuple[str, str, str]], found: Found, end: float
) -> None:
    """Fill in the outcomes of jobs that have none, from several workers.

    Cases with scales per token and head run a few at a time.
    """
    large, small = deque[int](), deque[int]()
    for i, (_, name, _) in enumerate(jobs):
        if found[i] is None:
            (large if _SCALED in name else small).append(i)

    def serve(todo: deque[int]) -> None:
        worker = Worker(args.source, args.device)
        while todo:
            with contextlib.suppress(IndexError):  # another thread took the last
                i = todo.popleft()
                found[i] = worker.answer((*jobs[i], end))
        worker.stop()

    light = _started(serve, small, args.processes)
    for thread in [*_started(serve, large, args.large), *light]:
        thread.join()


def _started(
    serve: Callable[[deque[int]], None], queue: deque[int], count: int
) -> list[threading.Thread]:
    """Return as many running threads that serve a queue, none for an empty one."""
    threads = [threading.Thread(target=serve, args=(queue,)) for _ in range(min(count, len(queue)))]
    for thread in threads:
        thread.start()
    return threads


class Worker:
    """A process that runs Cases; a new one after a Case that ended it or broke its CUDA context."""

    def __init__(self, source: Path, device: str) -> None:
        """Keep what the process needs; it begins with the first Case."""
        self.given = (source, device)
        self.process: multiprocessing.process.BaseProcess | None = None

    def answer(self, job: tuple[str, str, str, float]) -> dict[str, Any]:
        """Return the outcome of a Case."""
        if self.process is None:
            self.pipe, theirs = _SPAWN.Pipe()
            self.process = _SPAWN.Process(target=_serve, args=(*self.given, theirs), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send(job)
        try:
            found: dict[str, Any] = self.pipe.recv()
        except EOFError:
            found = {"part": job[0], "name": job[1], "status": "process ended"}
        if found["status"] in ("process ended", DeviceLost.__name__):
            self.stop()
        return found

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = None


def _serve(source: Path, device: str, pipe: Any) -> None:
    """Answer each Case that arrives."""
    while True:
        pipe.send(outcome(source, device, *pipe.recv()))
        if device == "cuda":
            with contextlib.suppress(RuntimeError):  # a broken context, whose process ends
                torch.cuda.empty_cache()


def outcome(
    source: Path, device: str, part: str, name: str, text: str, end: float
) -> dict[str, Any]:
    """Return what a Case passes, and how many elements are off by more than their rounding bound."""
    case = Case.from_json(text)
    names = ("op", "mask", "op_argument", "sliding_window", "num_splits", "platform")
    passed = {"part": part, "name": name, **{one: getattr(case, one) for one in names}}
    if time.perf_counter() > end:
        return {**passed, "status": _NOT_RUN}
    backend, lab = _backend_and_lab(source, device)
    try:
        output = run_case(lab, backend, case).output
    except Unsupported as error:
        return {**passed, "status": "refused", "error": _line(error)}
    except KernelFailed as error:
        return {**passed, "status": "fails", "error": _line(error)}
    except OutOfMemory as error:
        return {**passed, "status": _NO_MEMORY, "error": _line(error)}
    except (AttnLabError, RuntimeError) as error:
        return {**passed, "status": type(error).__name__, "error": _line(error)}
    call = lab.call(case)
    call.output.copy_(output)
    errors = lab.errors(case, call, lab.reference(case))
    return {
        **passed,
        "status": "mismatch" if errors.mismatched else _MATCH,
        "elements": output.numel(),
        "wrong": errors.mismatched,
        "nan": int(output.isnan().sum()),
        "largest_error": float(errors.error.nan_to_num(0.0).max()),
    }


@lru_cache(maxsize=1)
def _backend_and_lab(source: Path, device: str) -> tuple[VllmBackend, Lab]:
    """Return the backend on the device, and the Lab that compares on the CPU."""
    torch.set_num_threads(1)
    backend = VllmBackend(path=source, requested_device=device)
    return backend, Lab(source=source, device="cpu", is_native=device == "cuda")


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _document(
    args: argparse.Namespace, found: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    import triton

    where = torch.cuda.get_device_name() if args.device == "cuda" else "Triton interpreter"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "where": where,
        "source": VllmBackend(path=args.source, requested_device=args.device).source.text(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "random": args.random,
        "processes": args.processes,
        "seconds": round(seconds, 1),
        "counts": _counts(found),
        "hostile": [_without_part(one) for one in found if one["part"] == "hostile"],
        "random_not_matching": [
            _without_part(one)
            for one in found
            if one["part"] != "hostile" and one["status"] != _MATCH
        ],
    }


def _without_part(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "part"}


def _counts(found: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how many outcomes of each status there are, by part and op, mask or argument."""
    counts: dict[str, dict[str, int]] = {}
    for one in found:
        group = f"{one['part']} {one['name'].split()[0]}"
        each = counts.setdefault(group, {})
        each[one["status"]] = each.get(one["status"], 0) + 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
