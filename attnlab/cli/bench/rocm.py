"""Benchmark of the emulated device: a decode of 930 tokens with 64 heads, plain and checked."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.cli.bench.lab import shortest_time
from attnlab.contracts.contract import Target
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.rocm.device import PLAIN, DeviceOptions
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.reference import reference
from attnlab.tensors.batch import make_batch
from attnlab.tensors.cache import make_cache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output

DECODE = Case(query_lens=(1,), ctx_lens=(929,), distribution="normal", sm_scale=128**-0.5)


def bench_rocm(
    path: Path | None, case: Case = DECODE, on_step: Callable[[str], None] = lambda step: None
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
        group: _measure(case.replace(num_queries_per_kv=group), source, on_step) for group in (1, 8)
    }
    return figures


def _measure(case: Case, source: Source, on_step: Callable[[str], None]) -> dict[str, float]:
    batch = make_batch(case)
    call = make_call(case, batch, make_cache(case, batch), make_output(case))
    threads = torch.get_num_threads()
    group = f"gqa {case.num_queries_per_kv}"
    on_step(f"{group}, first call")
    first = time.perf_counter()
    _run(call, case, source, PLAIN)
    figures = {"first_s": time.perf_counter() - first}
    on_step(group)
    figures["all_cores_s"] = shortest_time(lambda: _run(call, case, source, PLAIN))
    try:
        torch.set_num_threads(1)
        figures["seconds"] = shortest_time(lambda: _run(call, case, source, PLAIN))
        on_step(f"{group}, checked")
        _run(call, case, source, DeviceOptions(checked=True))
        figures["checked_s"] = shortest_time(
            lambda: _run(call, case, source, DeviceOptions(checked=True))
        )
    finally:
        torch.set_num_threads(threads)
    figures["times_slower"] = figures["checked_s"] / figures["seconds"]
    off = call.buffer.float() - reference(case, batch).float()
    return {**figures, "greatest_error": float(off.abs().max())}


def _run(call: KernelCall, case: Case, source: Source, how: DeviceOptions) -> None:
    rocm_source.run(dataclasses.replace(call), Target.of(case), source, how)
