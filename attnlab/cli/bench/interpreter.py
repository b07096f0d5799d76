"""Benchmark of the interpreter: the Triton decode kernel with the lab's launch and with Triton's own."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.case.case import Case
from attnlab.cli.bench.lab import SEED_CASE, shortest_time
from attnlab.contracts.contract import TRITON_DECODE, Target
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.launch_plan import LaunchPlan, Subset, launching, needed
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.op_calls import bind
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.error_map import compare
from attnlab.lab.reference import reference
from attnlab.tensors.batch import make_batch
from attnlab.tensors.cache import make_cache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output

OP = "chunked_prefill_paged_decode"
DECODE = SEED_CASE.replace(  # with max_query_len 1 the wrapper launches only its decode kernel
    platform="sm_90", stage="sound", max_query_len=1, sm_scale=1 / math.sqrt(128)
)


def bench_interpreter(
    path: Path | None, case: Case = DECODE, on_step: Callable[[str], None] = lambda step: None
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
            figures[name] = shortest_time(lambda: _run(op, call, case), repeat=1)
    rows = call.query_lens.repeat_interleave(call.query_lens) == 1
    expected = reference(case, batch)
    errors = compare(call.buffer, expected, case.lengths, case.tolerance or 0.0, case.rtol)
    figures["greatest_error"] = float(errors.token_error[rows].max())
    on_step(f"{TRITON_DECODE}, Triton's own launch")
    stock = vllm_ops.load_stock(source, case.machine).function(OP)
    with np.errstate(all="ignore"):
        figures["stock_seconds"] = shortest_time(lambda: _run(stock, call, case), repeat=1)
    return figures


def _run(op: Callable[..., None], call: KernelCall, case: Case) -> None:
    op(**bind(op, call, Target.of(case)))
