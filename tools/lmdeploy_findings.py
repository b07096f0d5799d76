"""Compare LMDeploy's ops with attention in float64 that is written out here: the faults of docs/lmdeploy.md.

    python tools/lmdeploy_findings.py lmdeploy-0.18.0-….whl

attnlab makes the tensors and runs the ops; the right result is six lines of torch.
"""

import argparse
import math
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.kernels.binding import Values, evaluate
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall

DECODE, PREFILL = "lmdeploy_paged_attention", "lmdeploy_flash_attention"
_FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0}
_ALIBI = {"num_heads": 8, "num_queries_per_kv": 2, "alibi": True, "ctx_lens": (200,)}
_SINKS = {"num_heads": 6, "num_queries_per_kv": 2, "sinks": True, "ctx_lens": (20,)}
_MANY = {"num_heads": 40, "num_queries_per_kv": 20, "ctx_lens": (40,)}
# Each with and without what the fault needs.
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("prefill, ALiBi, scale 1", PREFILL, {**_ALIBI, "sm_scale": 1.0}),
    ("prefill, ALiBi, scale 0.125", PREFILL, {**_ALIBI, "sm_scale": 0.125}),
    ("prefill, no ALiBi, scale 1", PREFILL, {**_ALIBI, "alibi": False, "sm_scale": 1.0}),
    ("decode, ALiBi, scale 1", DECODE, {**_ALIBI, "sm_scale": 1.0}),
    ("decode, sinks and ALiBi", DECODE, {**_SINKS, "alibi": True}),
    ("decode, sinks", DECODE, _SINKS),
    ("prefill, sinks and ALiBi", PREFILL, {**_SINKS, "alibi": True}),
    ("decode, FP8, 20 heads per KV head, block 16", DECODE, {**_MANY, **_FP8}),
    ("decode, FP8, 20 heads per KV head, block 64", DECODE, {**_MANY, **_FP8, "block_size": 64}),
    ("decode, float16, 20 heads per KV head, block 16", DECODE, _MANY),
)


def reference(call: KernelCall, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the attention of the one sequence of a call, [query_len, num_heads, head_size] float64.

    ``key``, ``value``: the cache as numbers, [num_blocks, block_size, num_kv_heads, head_size].
    """
    rows, length = call.block_table[0].long(), int(call.seq_lens[0])
    group = call.query.shape[1] // key.shape[2]
    key, value = (
        one[rows].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        for one in (key, value)
    )
    scores = torch.einsum("qhd,khd->hqk", call.query.double(), key) * call.sm_scale
    at, keys = torch.arange(length - len(call.query), length)[:, None], torch.arange(length)
    if call.alibi_slopes is not None:
        scores -= call.alibi_slopes.double()[:, None, None] * (at - keys).abs()
    scores = scores.masked_fill(keys > at, -math.inf)
    if call.sinks is not None:
        sink = call.sinks.double()[:, None, None].expand(-1, len(call.query), 1)
        scores = torch.cat([scores, sink], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], value)


def main() -> None:
    """Print the largest error of each run, and the heads that are off by more than a hundredth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source")
    lab = Lab(source=parser.parse_args().source)
    for title, op, fields in RUNS:
        query_lens = (3,) if op == PREFILL else (1,)
        usual = {"head_size": 32, "block_size": 16, "sm_scale": 0.125, "distribution": "normal"}
        case = Case(
            op=op,
            backend="library:lmdeploy",
            platform="sm_90",
            stage="sound",
            empty_slots="zeros",
            query_lens=query_lens,
            **{**usual, **fields},
        )
        call = lab.call(case)
        key, value = evaluate("(flash_key_cache, flash_value_cache)", Values(call, Target.of(case)))
        if case.is_fp8:
            key, value = key.float() * case.k_scale, value.float() * case.v_scale
        errors = (lab.output(case).double() - reference(call, key, value)).abs().amax((0, 2))
        heads = (errors > 0.01).nonzero().flatten().tolist()
        print(f"{title:48} error {float(errors.max()):.2g}  heads {heads}")


if __name__ == "__main__":
    main()
