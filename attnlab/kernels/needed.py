"""Which programs of a launch write anything: the rest need not run under the interpreter."""

from collections.abc import Sequence
from typing import Any

from attnlab.call import KernelCall
from attnlab.dispatch import PREFILL, TRITON_DECODE

# Seconds that one step of a kernel's loop over keys takes on a slow core.
_DECODE_STEP_S = 0.0025
_PREFILL_STEP_S = 0.009
_PREFILLS = ("_fwd_kernel", "_fwd_kernel_alibi")


def needed(
    kernel: str, args: dict[str, Any], program: tuple[int, int, int], kv_heads: range | None
) -> bool:
    """Answer whether a program writes a row, and is of a KV head that is asked for.

    - The decode kernel (grid: sequence, KV head) returns at once where query_len > 1.
    - The prefill kernels (grid: sequence, query head, tile of BLOCK_M rows) return at once where they
      skip a decode; of a tile behind the last row every store is masked off.

    A kernel that is not known here runs whole. ``args`` are the kernel's arguments by name.
    """
    seq, head, tile = program
    if kernel == TRITON_DECODE:
        if kv_heads is not None and head not in kv_heads:
            return False
        return not args["filter_by_query_len"] or _query_len(args["query_start_len_ptr"], seq) <= 1
    if kernel not in _PREFILLS:
        return True
    if kv_heads is not None and head // args["num_queries_per_kv"] not in kv_heads:
        return False
    query_len = _query_len(args["B_Start_Loc"], seq)
    skipped = args["SKIP_DECODE"] and query_len == 1
    return not skipped and bool(tile * args["BLOCK_M"] < query_len)


def estimated_s(call: KernelCall, kernels: Sequence[str], kv_heads: range | None) -> float:
    """Return roughly how long the Triton kernels of a call take under the interpreter on one core."""
    share = len(kv_heads) if kv_heads is not None else call.key.shape[1]
    group, seconds = call.num_queries_per_kv, 0.0
    for query_len, seq_len in zip(call.query_lens.tolist(), call.seq_lens.tolist(), strict=True):
        if PREFILL in kernels and (query_len != 1 or call.op == PREFILL):
            tiles = -(-query_len // 128)
            steps = tiles * ((seq_len - query_len) / 32 + tiles + 1)
            seconds += steps * share * group * _PREFILL_STEP_S
        elif TRITON_DECODE in kernels and query_len == 1:
            seconds += -(-seq_len // call.block_size) * share * _DECODE_STEP_S
    return seconds


def _query_len(starts: Any, seq: int) -> int:
    return int(starts[seq + 1]) - int(starts[seq])
