"""How notebook 06 compares the engine's batch with the lab's Cases."""

from collections.abc import Mapping
from typing import Any

import torch

from attnlab.case.case import Case, Lengths
from attnlab.case.fields import Lens
from attnlab.lab.lab import Lab
from study.production import EngineRun
from study.timeline import Attention, Timeline

_NAMES = ("max_tokens", "max_num_batched_tokens", "block_size", "dtype", "seed")
FILLS = ("context_only", "decode_rows", "all_rows")


def engine_run(parameters: Mapping[str, Any]) -> EngineRun:
    """Return the EngineRun of a notebook's parameters; ``prompt_lens`` is a text such as "5, 32, 40"."""
    prompt_lens = tuple(Lens(1).parse("prompt_lens", str(parameters["prompt_lens"])))
    return EngineRun(prompt_lens=prompt_lens, **{name: parameters[name] for name in _NAMES})


def compare_fills(
    timeline: Timeline, batch: Attention
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Return how many tokens of each sequence the engine had written by a batch, and those of each fill."""
    lengths = Lengths(query_lens=batch.query_lens, ctx_lens=batch.ctx_lens)
    slots = {
        slot for write in timeline.writes if write.step <= batch.step for slot in write.slot_mapping
    }
    in_cache = tuple(
        sum(slot in slots for slot in batch.slots(i, 0, seq_len, timeline.block_size))
        for i, seq_len in enumerate(batch.seq_lens)
    )
    return in_cache, {fill: tuple(lengths.cached_lens(fill)) for fill in FILLS}


def engine_case(run: EngineRun, batch: Attention) -> Case:
    """Return the Case of an engine's batch for the compiled CPU op, with N(0, 1) data."""
    return Case(
        op="cpu_attention_with_kv_cache",
        backend="vllm-cpu",
        platform="cpu",
        query_lens=batch.query_lens,
        ctx_lens=batch.ctx_lens,
        num_heads=run.num_heads,
        num_queries_per_kv=run.num_heads // run.num_kv_heads,
        head_size=run.head_size,
        block_size=run.block_size,
        dtype=run.dtype,
        distribution="normal",
        reference_dtype="float64",
    )


def rounding_step(lab: Lab, case: Case) -> float:
    """Return the step of the dtype at the largest value: rounding moves a mean of values by no more."""
    step = torch.finfo(getattr(torch, case.dtype)).eps
    return step * float(lab.batch(case).value.abs().max())
