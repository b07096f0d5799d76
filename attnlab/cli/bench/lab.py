"""Benchmark of the lab: each time is compared with a basic operation that is timed in the same run.

Shared machines are noisy, so the ratios are more reliable than the times.
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.lab.lab import Lab
from attnlab.lab.reference import reference, visible_flops
from attnlab.lab.run import stage_table
from attnlab.tensors.batch import Batch, make_batch
from attnlab.tensors.cache import addresses, make_cache, write_tokens

SEED_CASE = Case(stage="cast_after_cumsum", x=8, atol=1e-4)  # as vLLM's test draws it at seed 0


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
