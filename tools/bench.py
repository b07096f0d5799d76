"""Measure attnlab on this machine: `make bench`, or `python tools/bench.py [speed | diagnose] --help`.

- speed: the lab, each figure with a yardstick of the same run, because shared machines are noisy; with
  --source Triton's interpreter on the decode kernel of that vLLM; with --rocm the emulated AMD device.
- diagnose: the diagnosis of planted defects, of the same defects without them in the catalogue, and of
  correct runs.

The figures are printed as one JSON document. Exit codes: 0 measured, 2 bad input, 3 trials of diagnose
without a verdict.
"""

import argparse
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_diagnosis
import numpy as np
import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.fields import Int
from attnlab.cli.command import print_json, progress
from attnlab.cli.sharded import run_sharded
from attnlab.contracts.contract import TRITON_DECODE, Target
from attnlab.kernels.binding import bind
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.rocm.device import PLAIN, DeviceOptions
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.launch_plan import LaunchPlan, Subset, launching, needed
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab, stage_table
from attnlab.lab.reference import reference
from attnlab.lab.result import map_errors
from attnlab.tasks.store import ALL
from attnlab.tensors.cache import Batch, addresses, make_batch, make_cache, write_tokens
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output, visibility_of

# The lab.

SEED_CASE = Case(stage="cast_after_cumsum", x=8, atol=1e-4)  # as vLLM's test draws it at seed 0


def visible_flops(case: Case) -> int:
    """Return the floating-point operations of the two matrix products, counting visible keys only."""
    pairs, visibility = 0, visibility_of(case)
    lens = zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)
    for seq, (query_len, ctx_len) in enumerate(lens):
        seq_len = ctx_len + query_len
        if visibility.is_plain:
            window = case.sliding_window or seq_len
            pairs += sum(min(ctx_len + i + 1, window) for i in range(query_len))
        else:
            rows = torch.arange(ctx_len, seq_len)
            pairs += int(visibility.of_seq(seq, ctx_len, seq_len).visible(rows).sum())
    return pairs * case.num_heads * case.head_size * 2 * 2


def bench(
    case: Case = SEED_CASE, on_step: Callable[[str], None] = lambda step: None
) -> dict[str, Any]:
    """Measure the reference, the cache fill and the table of stages, and return the figures.

    - ``reference``: seconds; ``matmul_gflops``, the float32 rate of multiplying two 2048 × 2048 matrices;
      ``share``, the reference's rate divided by it, counting causal operations only.
    - ``fill``: seconds to make the whole cache and to clone it; ``share`` is the ratio clone / make.
      ``tokens_*``: the same for writing the tokens into existing memory. ``token_loop_seconds``: a loop
      over tokens and blocks, as in vLLM's test; ``times_faster``: loop / make.
    - ``stage_table``: seconds for all stages on two platforms, with an empty Lab.
    - ``peak_memory_gib``: the peak memory of this process.
    """
    on_step("reference")
    batch = make_batch(case)
    figures: dict[str, Any] = {"reference": _reference(case, batch)}
    on_step("fill")
    figures["fill"] = _fill(case, batch)
    del batch
    on_step("table of stages")
    figures["stage_table"] = {"seconds": shortest_time(lambda: stage_table(Lab(), case), repeat=1)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures["peak_memory_gib"] = peak / (2**30 if sys.platform == "darwin" else 2**20)
    figures["machine"] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    return figures


def shortest_time(work: Callable[[], object], repeat: int = 3) -> float:
    """Run ``work`` ``repeat`` times and return the shortest time, in seconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _reference(case: Case, batch: Batch) -> dict[str, float]:
    matrix = torch.randn(2048, 2048)
    rate = 2 * 2048**3 / shortest_time(lambda: matrix @ matrix, repeat=10)
    seconds = shortest_time(lambda: reference(case, batch))
    return {
        "seconds": seconds,
        "matmul_gflops": rate / 1e9,
        "causal_gflop": visible_flops(case) / 1e9,
        "share": visible_flops(case) / seconds / rate,
    }


def _fill(case: Case, batch: Batch) -> dict[str, float]:
    cache = make_cache(case, batch)
    whole = shortest_time(lambda: make_cache(case, batch))
    clone = shortest_time(lambda: (cache.key.clone(), cache.value.clone()))
    lens = batch.lengths.cached_lens(case.staging.fill)
    table = cache.provenance.block_table
    rows, slots, _ = addresses(batch.kv_start_loc, lens, table, case.total_blocks, case.block_size)
    tokens = shortest_time(
        lambda: write_tokens(cache.key, cache.value, batch.key, batch.value, rows, slots)
    )
    room = torch.empty_like(batch.key[: len(slots)])
    copied = batch.key[: len(slots)], batch.value[: len(slots)]
    copy = shortest_time(lambda: [room.copy_(source) for source in copied])
    loop = shortest_time(lambda: _token_loop(case, batch, table), repeat=1)
    return {
        "seconds": whole,
        "clone_seconds": clone,
        "share": clone / whole,
        "tokens_seconds": tokens,
        "tokens_copy_seconds": copy,
        "tokens_share": copy / tokens,
        "token_loop_seconds": loop,
        "times_faster": loop / whole,
    }


def _token_loop(case: Case, batch: Batch, table: torch.Tensor) -> None:
    """Fill a cache as vLLM's test does: copy token by token and block by block, then convert the layout."""
    lengths = batch.lengths
    shape = (case.total_blocks * case.block_size, case.num_kv_heads, case.head_size)
    caches = [torch.zeros(shape, dtype=batch.key.dtype) for _ in range(2)]
    news = [torch.zeros(lengths.num_tokens, *shape[1:], dtype=batch.key.dtype) for _ in range(2)]
    for i, (query_len, ctx_len) in enumerate(
        zip(lengths.query_lens, lengths.ctx_lens, strict=True)
    ):
        first, row = batch.kv_start_loc[i], batch.token_start_loc[i]
        for source, new, cache in zip((batch.key, batch.value), news, caches, strict=True):
            for j in range(query_len):
                new[row + j].copy_(source[first + ctx_len + j])
            for block, start in enumerate(range(0, ctx_len, case.block_size)):
                end = min(start + case.block_size, ctx_len)
                slot = int(table[i, block]) * case.block_size
                cache[slot : slot + end - start].copy_(source[first + start : first + end])
    split = (-1, case.block_size, case.num_kv_heads, case.head_size // case.key_x, case.key_x)
    caches[0].view(split).permute(0, 2, 3, 1, 4).contiguous()
    caches[1].view(-1, case.block_size, *shape[1:]).permute(0, 2, 3, 1).contiguous()


# Triton's interpreter, with the lab's launch and with Triton's own.

OP = "chunked_prefill_paged_decode"
TRITON_CASE = SEED_CASE.replace(  # with max_query_len 1 the wrapper launches only its decode kernel
    platform="sm_90", stage="sound", max_query_len=1, sm_scale=1 / math.sqrt(128)
)


def bench_interpreter(
    path: Path | None, case: Case = TRITON_CASE, on_step: Callable[[str], None] = lambda step: None
) -> dict[str, Any]:
    """Run the decode kernel of the vLLM at ``path`` in three ways and return the figures.

    - ``seconds``: as the lab launches it; ``one_process_seconds``: the same in one process.
    - ``stock_seconds``: with Triton's own launch, in the same run, on the same call.
    - ``greatest_error``: the largest error of the decode rows against the reference.
    """
    source = find_source(path)
    case = case.replace(release=source.rules or case.release)
    batch = make_batch(case)
    output = interpreter.shared_copy(make_output(case))
    call = make_call(case, batch, make_cache(case, batch), output)
    figures: dict[str, Any] = {"source": source.text(), "processes": interpreter.cores()}
    op = vllm_ops.load(source, case.machine, "cpu").function(OP)
    for name, processes in (("seconds", interpreter.cores()), ("one_process_seconds", 1)):
        on_step(f"decode kernel, {processes} processes")
        plan = LaunchPlan(
            needed=lambda kernel, args, at: needed(kernel, args, at, Subset()), processes=processes
        )
        with launching(plan):
            figures[name] = shortest_time(lambda: _run_triton(op, call, case), repeat=1)
    rows = call.query_lens.repeat_interleave(call.query_lens) == 1
    expected = reference(case, batch)
    errors = map_errors(call.buffer, expected, case.lengths, case.tolerance or 0.0, case.rtol)
    figures["greatest_error"] = float(errors.token_error[rows].max())
    on_step(f"{TRITON_DECODE}, Triton's own launch")
    stock = vllm_ops.load_stock(source, case.machine).function(OP)
    with np.errstate(all="ignore"):
        figures["stock_seconds"] = shortest_time(lambda: _run_triton(stock, call, case), repeat=1)
    return figures


def _run_triton(op: Callable[..., None], call: KernelCall, case: Case) -> None:
    op(**bind(op, call, Target.of(case)))


# The emulated AMD device: a decode of 930 tokens with 64 heads, plain and checked.

ROCM_CASE = Case(query_lens=(1,), ctx_lens=(929,), distribution="normal", sm_scale=128**-0.5)


def bench_rocm(
    path: Path | None, case: Case = ROCM_CASE, on_step: Callable[[str], None] = lambda step: None
) -> dict[str, Any]:
    """Run the decode kernel of the vLLM at ``path`` and return the figures, by GQA ratio.

    - ``first_s``: the first call, including the build unless it is cached.
    - ``seconds``: on one core, the shortest of three; ``all_cores_s``: with torch's threads.
    - ``checked_s``: on the checked device; ``times_slower``: ``checked_s`` / ``seconds``.
    - ``greatest_error``: the largest error against the reference.
    """
    source = find_source(path)
    rocm_source.check_source(source)
    case = case.replace(release=source.rules or case.release)
    figures: dict[str, Any] = {"source": source.text(), "threads": torch.get_num_threads()}
    figures["by_gqa"] = {
        group: _measure_rocm(case.replace(num_queries_per_kv=group), source, on_step)
        for group in (1, 8)
    }
    return figures


def _measure_rocm(case: Case, source: Source, on_step: Callable[[str], None]) -> dict[str, float]:
    batch = make_batch(case)
    call = make_call(case, batch, make_cache(case, batch), make_output(case))
    threads = torch.get_num_threads()
    group = f"gqa {case.num_queries_per_kv}"
    on_step(f"{group}, first call")
    first = time.perf_counter()
    _run_rocm(call, case, source, PLAIN)
    figures = {"first_s": time.perf_counter() - first}
    on_step(group)
    figures["all_cores_s"] = shortest_time(lambda: _run_rocm(call, case, source, PLAIN))
    try:
        torch.set_num_threads(1)
        figures["seconds"] = shortest_time(lambda: _run_rocm(call, case, source, PLAIN))
        on_step(f"{group}, checked")
        _run_rocm(call, case, source, DeviceOptions(checked=True))
        figures["checked_s"] = shortest_time(
            lambda: _run_rocm(call, case, source, DeviceOptions(checked=True))
        )
    finally:
        torch.set_num_threads(threads)
    figures["times_slower"] = figures["checked_s"] / figures["seconds"]
    off = call.buffer.float() - reference(case, batch).float()
    return {**figures, "greatest_error": float(off.abs().max())}


def _run_rocm(call: KernelCall, case: Case, source: Source, how: DeviceOptions) -> None:
    rocm_source.run(dataclasses.replace(call), Target.of(case), source, how)


# The command.


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("speed", "diagnose"), default="speed")
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--source", type=Path, metavar="PATH", help="the vLLM whose kernel is measured"
    )
    speed.add_argument("--rocm", action="store_true", help="measure csrc/rocm of --source")
    diagnose = parser.add_argument_group("diagnose")
    diagnose.add_argument(
        "--trials",
        type=int,
        default=500,
        metavar="N",
        help="planted defects, and as many sound runs",
    )
    diagnose.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the cases")
    diagnose.add_argument(
        "--engine", metavar="ENGINE", help="as for attnlab check; default: this process"
    )
    diagnose.add_argument(
        "--out", type=Path, metavar="DIR", help="keep each verdict here; the same command continues"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, and print the figures as one JSON document; return the exit code."""
    is_speed = args.what == "speed"
    of_other = ("engine", "out") if is_speed else ("source", "rocm")
    for name in of_other:
        if getattr(args, name):
            raise InvalidCase(f"{name} must not be given with {args.what}", field=name)
    figures = (_speed if is_speed else _diagnose)(args)
    print_json(figures)
    return 3 if figures.get("failed") else 0


def _speed(args: argparse.Namespace) -> dict[str, Any]:
    with progress("measuring") as on_step:
        if args.rocm:
            return bench_rocm(args.source, on_step=on_step)
        if args.source is not None:
            return bench_interpreter(args.source, on_step=on_step)
        return bench(on_step=on_step)


def _diagnose(args: argparse.Namespace) -> dict[str, Any]:
    trials, seed = Int(1).check("trials", args.trials), Int(0).check("seed", args.seed)
    tasks = bench_diagnosis.diagnose_tasks(trials, trials)
    job = bench_diagnosis.DiagnoseJob(seed=seed)
    header = bench_diagnosis.diagnose_header(trials, seed)
    outcomes, code = run_sharded("trials", job, tasks, header, ALL, args.out, args.engine)
    if code:
        sys.exit(code)
    return bench_diagnosis.figures_of(tasks, outcomes, seed)


def main(argv: list[str] | None = None) -> int:
    """Run the command; report bad input in one line."""
    try:
        return run(make_parser().parse_args(argv))
    except AttnLabError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
