"""Measure the lab on vLLM's test matrix on this machine's GPU: cold, warm, and where the time goes.

python tools/matrix_speed.py --source vllm-0.33.0.whl --out speed.json
python tools/matrix_speed.py --source vllm-0.33.0.whl --out speed.json --old FOLDER

The ids are those of docs/h200-matrix.json. The lab's check is stricter than vLLM's: every slot that no token
was written to holds NaN, the cache holds what production writes, and FP8 is encoded.

- compile: all kernels, none of them compiled before, each once, in parallel, without running them.
- first pass: all ids in a new process, which loads the compiled kernels; second pass: the same again, with a
  new Lab, so that batches, caches and references are made anew. Both without waiting for the GPU between
  the steps of a run.
- split: a third pass that waits for the GPU after every step, which gives the time of each.
- workers: the second pass with the ids divided among processes that use the GPU together, for each number
  of --workers. They are divided by the seconds of each id in one process; ids that share a
  batch stay together.

--old: a folder with another version of the package attnlab, such as "git archive OLD attnlab" unpacked. Its
passes alternate with those of this version, in processes of their own, on the same compiled kernels.
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
from collections.abc import Iterable
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IDS = ROOT / "docs" / "h200-matrix.json"
KEEP = 8  # products of each kind that the Lab keeps
LIMIT_S = 60.0  # for the first pass of all workers
CHILDREN = ("compile", "passes", "shared")


def main() -> int:
    """Measure, write the figures and print them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel, sdist or checkout")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--old", type=Path, help="a folder with another version of attnlab")
    parser.add_argument("--rounds", type=int, default=3, help="processes per version")
    parser.add_argument("--processes", type=int, help="that compile; default: one per core")
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="processes that run")
    parser.add_argument("--cache", type=Path, help="a folder that keeps the compiled kernels")
    parser.add_argument("--costs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child = {"compile": compile_all, "passes": passes, "shared": shared_passes}[args.child]
        args.out.write_text(json.dumps(child(args)))
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
        "ids": len(test_ids()),
        **measure(args),
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the compilation, and of every round of each version."""
    trees = {"new": ROOT} | ({"old": args.old.resolve()} if args.old else {})
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        cache = args.cache or Path(folder) / "triton"
        compiled = run_child("compile", args, ROOT, cache)
        for _ in range(args.rounds):
            for name, tree in trees.items():
                rounds[name].append(run_child("passes", args, tree, cache))
                costs = rounds[name][-1].pop("costs")
                print(name, json.dumps(rounds[name][-1]), file=sys.stderr, flush=True)
        args.costs = Path(folder) / "costs.json"
        args.costs.write_text(json.dumps(costs))
        workers = {
            count: [run_child("shared", args, ROOT, cache, count) for _ in range(args.rounds)]
            for count in args.workers
        }
    return {
        "compile": compiled,
        **{name: summary(found) for name, found in rounds.items()},
        "workers": workers,
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median seconds of each pass, the split of the round with the median, and the outcomes."""
    middle = sorted(rounds, key=lambda found: found["second_pass"]["seconds"])[len(rounds) // 2]
    medians = {
        name: statistics.median(found[name]["seconds"] for found in rounds)
        for name in ("first_pass", "second_pass")
    }
    return {**medians, "rounds": rounds, "split": middle["split"]}


def run_child(
    what: str, args: argparse.Namespace, tree: Path, cache: Path, workers: int = 0
) -> dict[str, Any]:
    """Run this file in a new process, with the package of ``tree``; return its figures and its seconds."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, __file__, "--child", what, "--source", str(args.source)]
        command += ["--out", out.name]
        command += ["--processes", str(args.processes)] if args.processes else []
        command += ["--workers", str(workers), "--costs", str(args.costs)] if workers else []
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
            "PYTHONSAFEPATH": "1",
            "TRITON_CACHE_DIR": str(cache),
        }
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True)
        seconds = time.perf_counter() - start
        found: dict[str, Any] = json.loads(Path(out.name).read_text())
    print(f"{what} {workers or ''}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return {**found, "process_seconds": seconds}


def test_ids() -> list[str]:
    """Return the test ids of the matrix; those that share a batch are neighbours, the smallest first."""
    names = json.loads(IDS.read_text())["cases"]
    return sorted(names, key=lambda name: name.split("-")[::-1], reverse=True)


def cases() -> list[Any]:
    """Return the Cases of the matrix, with NaN in every slot that holds no token."""
    from attnlab.case.case import Case

    fields: dict[str, Any] = {"backend": "vllm", "platform": "sm_90", "stage": "sound"}
    found = [Case.from_test_id(name, **fields, empty_slots="nan") for name in test_ids()]
    return [case.replace(cache_write="scaled") if case.is_fp8 else case for case in found]


def compile_all(args: argparse.Namespace) -> dict[str, Any]:
    """Compile every kernel of the matrix; the child "compile"."""
    from attnlab.kernels.vllm.precompile import precompile
    from attnlab.kernels.vllm.source import find_source

    made = precompile(cases(), find_source(args.source), args.processes)
    return {
        "kernels": made.kernels,
        "processes": made.processes,
        "seconds": made.seconds,
        "failures": list(made.failures),
    }


def passes(args: argparse.Namespace) -> dict[str, Any]:
    """Run the matrix three times; the child "passes"."""
    import torch

    from attnlab.tensors.batch import make_batch

    matrix = cases()
    drawn = [make_batch(matrix[0], device).query.cpu() for device in ("cpu", "cuda")]
    found: dict[str, Any] = {
        "same_draws_on_the_gpu": torch.equal(*drawn),
        "first_pass": one_pass(args.source, matrix),
        "second_pass": one_pass(args.source, matrix),
        "split": one_pass(args.source, matrix, wait=True),
    }
    found["costs"] = found["split"]["each"]
    for one in ("first_pass", "second_pass", "split"):
        del found[one]["each"]
    return found


def shared_passes(args: argparse.Namespace) -> dict[str, Any]:
    """Run the matrix in several processes at once; the child "shared". The second pass is measured."""
    count = args.workers[0]
    context = get_context("spawn")
    barrier, answers = context.Barrier(count + 1), context.SimpleQueue()
    divided = shares(cases(), json.loads(args.costs.read_text()), count)
    started = [
        context.Process(target=work, args=(args.source, share, barrier, answers))
        for share in divided
    ]
    for process in started:
        process.start()
    barrier.wait(LIMIT_S)
    start = time.perf_counter()
    found = [answers.get() for _ in started]
    seconds = time.perf_counter() - start
    for process in started:
        process.join()
    statuses = {status for one in found for status in one["outcomes"]}
    outcomes = {status: sum(one["outcomes"].get(status, 0) for one in found) for status in statuses}
    each = [[one["ids"], one["seconds"]] for one in found]
    return {"seconds": seconds, "outcomes": outcomes, "ids_and_seconds": each}


def shares(matrix: list[Any], costs: list[dict[str, float]], count: int) -> list[list[Any]]:
    """Divide Cases by the seconds of their steps, ``costs``; those that share a batch stay together.

    Each share begins with the Cases that take least, while the next batches are drawn. Drawing a batch in
    one share counts ``count`` times, because the shares have the cores together.
    """
    from attnlab.lab.products import batch_key

    groups: dict[Any, list[int]] = {}
    for i, case in enumerate(matrix):
        groups.setdefault(batch_key(case), []).append(i)
    seconds = [sum(cost.values()) + cost["batch"] * (count - 1) for cost in costs]
    totals = {key: sum(seconds[i] for i in group) for key, group in groups.items()}
    sums, found = [0.0] * count, [list[Any]() for _ in range(count)]
    for key in sorted(groups, key=totals.__getitem__, reverse=True):
        least = sums.index(min(sums))
        sums[least] += totals[key]
        found[least] = [matrix[i] for i in groups[key]] + found[least]
    return found


def work(source: Path, matrix: list[Any], barrier: Any, answers: Any) -> None:
    """Run some Cases twice, the second time together with the other processes."""
    import torch

    torch.set_num_threads(1)  # waiting threads of several processes would take each other's cores
    one_pass(source, matrix)
    barrier.wait(LIMIT_S)
    found = one_pass(source, matrix)
    answers.put({"ids": len(matrix), **{name: found[name] for name in ("seconds", "outcomes")}})


def one_pass(source: Path, matrix: list[Any], wait: bool = False) -> dict[str, Any]:
    """Run the matrix in one Lab; return seconds, seconds by step, outcomes and the largest error.

    The steps are the Lab's own. With ``wait`` the GPU is idle when a step begins, and the search for
    violations is a step, too; "other" is what belongs to no step.
    """
    import torch

    from attnlab.lab import lab as module

    clock = Clock(wait)
    lab = module.Lab(source=source, device="cuda", keep=KEEP, on_step=clock.begin if wait else None)
    search = module.find_violations

    def find_violations(*given: Any, **named: Any) -> Any:
        clock.begin("violations")
        found = search(*given, **named)
        clock.begin("other")
        return found

    module.find_violations = find_violations
    outcomes, steps, greatest = dict[str, int](), dict[str, float](), 0.0
    each = dict[Any, dict[str, float]]()
    torch.cuda.synchronize()
    start = time.perf_counter()
    clock.begin("other")
    try:
        for result in results(lab, matrix, wait):
            torch.cuda.synchronize()
            outcomes[result.status] = outcomes.get(result.status, 0) + 1
            greatest = max(greatest, result.errors.greatest_abs.value if result.errors else 0.0)
            each[result.case] = {"batch": 0.0, **result.seconds}
            for step, seconds in result.seconds.items():
                steps[step] = steps.get(step, 0.0) + seconds
            clock.begin("other")
    finally:
        module.find_violations = search
    seconds = time.perf_counter() - start
    clock.begin("")
    steps = clock.seconds if wait else {**steps, "other": seconds - sum(steps.values())}
    return {
        "seconds": seconds,
        "by_step": steps,
        "outcomes": outcomes,
        "greatest_error": greatest,
        "each": [each[case] for case in matrix],
    }


def results(lab: Any, matrix: list[Any], wait: bool) -> Iterable[Any]:
    """Return the Results of the Cases as ``attnlab.run_many`` does, or one by one if every step waits, or if
    this is an old version without it."""
    if wait or find_spec("attnlab.checker.matrix") is None:
        return (lab.run(case) for case in matrix)
    from attnlab.checker.matrix import run_many

    return run_many(matrix, lab=lab)


class Clock:
    """Adds up the seconds of each step; with ``wait``, a step ends when the GPU is idle."""

    def __init__(self, wait: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._wait, self._step, self._since = wait, "", time.perf_counter()

    def begin(self, step: str, *progress: int) -> None:
        """End the current step and begin another."""
        import torch

        if self._wait:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._step:
            self.seconds[self._step] = self.seconds.get(self._step, 0.0) + now - self._since
        self._step, self._since = step, now


if __name__ == "__main__":
    sys.exit(main())
