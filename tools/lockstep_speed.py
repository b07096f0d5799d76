"""Measure kernels of vLLM in lockstep, one program after another, and with Triton's own interpreter.

python tools/lockstep_speed.py SOURCE            small hostile cases, as a Markdown table
python tools/lockstep_speed.py SOURCE --real     the real test id at its own size

SOURCE is a wheel, an sdist, a checkout, or what `attnlab fetch --ops 0.33.0` prints. All times are of one
run, and processor time of one process with one thread, which depends less on what else the machine does; the
shortest of some runs. Each comparison checks that the outputs have the same bits. With Triton's own
interpreter, and with one program after another, the real test id runs one of its 64 heads; the table says so.
"""

import argparse
import dataclasses
import datetime
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from attnlab.case.case import Case
from attnlab.checker.case_run import versions
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels.binding import bind, finish
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.launch_plan import Subset
from attnlab.kernels.triton.lockstep.launch import using_lockstep
from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.vllm import backend
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab

REAL = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"
SMALL: dict[str, Any] = {
    "backend": "vllm", "platform": "sm_90", "num_heads": 8, "num_queries_per_kv": 4, "head_size": 64,
    "block_size": 16, "query_lens": (1, 17, 40), "ctx_lens": (160, 33, 130), "dtype": "float16",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "wrapper, prefill and decode": {},
    "prefill": {"op": "context_attention_fwd"},
    "unified, 2d": {"op": "unified_attention", "num_splits": 0},
    "unified, 3d, window, sinks": {
        "op": "unified_attention", "num_splits": 4, "query_lens": (1, 3, 8), "sliding_window": 50,
        "sinks": True,
    },
    "decode": {"op": "decode_attention_fwd", "query_lens": (1, 1, 1)},
    "wrapper, FP8 cache, sinks": {"kv_cache_dtype": "fp8_e4m3", "sinks": True},
}  # fmt: skip
REPEAT = 5

Run = tuple[float, torch.Tensor, RunLog | None]


def lab_run(lab: Lab, source: Source, case: Case, subset: Subset, watch: bool) -> Run:
    """Run a Case's kernels as the lab does; return the seconds, the output and the log."""
    call = lab.call(case)
    call = dataclasses.replace(call, output=call.output.clone())
    target, kernels = Target.of(case), decide(case).kernels
    start = time.process_time()
    log = backend.run(call, target, kernels, source, subset, watch=watch)
    return time.process_time() - start, call.output, log


def stock_run(lab: Lab, source: Source, case: Case) -> Run:
    """Run a Case's kernels with Triton's own interpreter, as :func:`lab_run`."""
    call = lab.call(case)
    call = dataclasses.replace(call, output=call.output.clone())
    op = backend.load_stock(source, case.machine).function(case.op)
    arguments = bind(op, call, Target.of(case))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        op(**arguments)
        seconds = time.process_time() - start
    finish(call, Target.of(case), arguments)
    return seconds, call.output, None


@contextmanager
def one_head() -> Iterator[None]:
    """Let Triton's own interpreter run only the programs of head 0 in the block: axis 1 of each grid."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def limited(self: Any, *args: Any, **kwargs: Any) -> None:
        grid = self.grid

        def first_head(arguments: dict[str, Any]) -> tuple[int, ...]:
            sizes = tuple(grid(arguments) if callable(grid) else grid)
            return (sizes[0], 1, *sizes[2:])

        self.grid = first_head
        run(self, *args, **kwargs)

    GridExecutor.__call__ = limited
    try:
        yield
    finally:
        GridExecutor.__call__ = run


def shortest(run: Callable[[], Run], repeat: int = REPEAT) -> Run:
    """Return the shortest of some runs, after one that is not measured."""
    run()
    return min((run() for _ in range(repeat)), key=lambda one: one[0])


def check_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Raise an error if two outputs differ in any bit."""
    if not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
        raise SystemExit("the outputs differ")


def small_rows(lab: Lab, source: Source) -> Iterator[str]:
    """Yield a row of the table for each small Case."""
    for name, fields in CASES.items():
        case = Case(**{**SMALL, "release": source.rules, **fields})
        stock = shortest(lambda case=case: stock_run(lab, source, case), repeat=2)
        found = {}
        for watch in (False, True):
            for on in (False, True):
                with using_lockstep(on):
                    run = lambda case=case, watch=watch: lab_run(  # noqa: E731
                        lab, source, case, Subset(), watch
                    )
                    found[watch, on] = shortest(run)
        for watch, on in found:
            check_same(found[watch, on][1], found[False, False][1])
        alone = found[True, True][2]
        if alone is None or alone.alone or alone.reads != found[True, False][2].reads:  # type: ignore[union-attr]
            raise SystemExit(f"{name}: it does not run in lockstep, or reads something else")
        ms = [1e3 * one[0] for one in (stock, *found.values())]
        yield (
            f"| {name} | {ms[0]:.0f} ms | {ms[1]:.0f} ms | {ms[2]:.0f} ms | {ms[1] / ms[2]:.1f} "
            f"| {ms[3]:.0f} ms | {ms[4]:.0f} ms | {ms[3] / ms[4]:.1f} |"
        )


def real_rows(lab: Lab, source: Source) -> Iterator[str]:
    """Yield a row for each way to run the real test id."""
    case = Case.from_test_id(REAL, backend="vllm").replace(platform="sm_90")  # Triton decodes
    heads, head = Subset(), Subset(kv_heads=range(1))
    with one_head():
        seconds, output, _ = stock_run(lab, source, case)
    yield f"| Triton's interpreter, 1 of 64 heads | {seconds:.1f} s | {64 * seconds:.0f} s |"
    with using_lockstep(False):
        seconds, own, _ = lab_run(lab, source, case, head, watch=False)
    check_same(own[:, :1], output[:, :1])
    yield f"| one program after another, 1 of 64 heads | {seconds:.1f} s | {64 * seconds:.0f} s |"
    for processes in (1, 2):
        interpreter.limit_processes(processes)
        start = time.perf_counter()
        seconds, together, log = lab_run(lab, source, case, heads, watch=False)
        passed = time.perf_counter() - start
        check_same(together[:, :1], output[:, :1])
        if log is None or log.alone:
            raise SystemExit("it does not run in lockstep")
        if processes == 1:
            yield f"| lockstep, all heads | {seconds:.1f} s | {seconds:.0f} s |"
        many = "es" if processes > 1 else ""
        yield f"| the same in {processes} process{many}, time that passed | {passed:.1f} s | |"


def main() -> None:
    """Print the table, with the date, the versions and the load of the machine."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source")
    parser.add_argument("--real", action="store_true", help="the real test id at its own size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    interpreter.load_triton(interpret=True)
    interpreter.limit_processes(1)
    source = find_source(args.source)
    lab = Lab(source=args.source, device="cpu")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(
        f"{datetime.date.today()}, {source.text()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {load}; " + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    if args.real:
        print("| real test id | measured | all 64 heads |\n|---|---:|---:|")
    else:
        print(
            "| kernels | Triton | one by one | lockstep | times | one by one, reads traced | lockstep, reads "
            "traced | times |\n|---|---:|---:|---:|---:|---:|---:|---:|"
        )
    for row in (real_rows if args.real else small_rows)(lab, source):
        print(row, flush=True)


if __name__ == "__main__":
    main()
