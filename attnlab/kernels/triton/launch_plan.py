"""The plan of a launch under Triton's interpreter: which programs run, where, and what is recorded."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.ops import DECODE_FWD, ENCODER, PREFILL, UNIFIED
from attnlab.contracts.contract import TRITON_DECODE
from attnlab.kernels.replaced import setting
from attnlab.kernels.triton.run_log import RunLog, Watched
from attnlab.tensors.call import KernelCall

Program = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """How to launch: which programs run, in how many processes, and what is recorded.

    - ``needed(kernel, arguments, program)``: whether a program runs.
    - ``processes``: number of processes per launch. More than 1 requires that every tensor that a kernel
      writes is a :func:`shared_copy`.
    - ``on_programs``: called with (done, total), both estimates, while a launch runs.
    - ``observed``: the log that records the launch; it is mutated.
    - ``watched``: the layout of a call whose cache reads are traced, or None for no trace.
    """

    needed: Callable[[str, dict[str, Any], Program], bool] = lambda kernel, arguments, program: True
    processes: int = 1
    on_programs: Callable[[int, int], None] = lambda done, total: None
    observed: RunLog = field(default_factory=RunLog)
    watched: Watched | None = None


@dataclass(frozen=True, slots=True)
class LaunchParameters:
    """A kernel's name and the parameters of its launch that are numbers, such as BLOCK_M, by name."""

    kernel: str
    values: dict[str, int | float | bool]

    @property
    def numbers(self) -> dict[str, int]:
        """Return the integers."""
        return {name: value for name, value in self.values.items() if type(value) is int}


_PLAN: ContextVar[LaunchPlan | None] = ContextVar("plan", default=None)
_RECORDED: ContextVar[list["LaunchParameters"] | None] = ContextVar("recorded", default=None)
_TURN = threading.RLock()


def one_at_a_time() -> AbstractContextManager[object]:
    """Let other threads wait, until the block ends, before they interpret anything."""
    return _TURN


@contextmanager
def launching(plan: LaunchPlan) -> Iterator[None]:
    """Use ``plan`` for all launches inside the block; other threads wait until it ends.

    Triton's interpreter keeps the program's index in one global object. Two launches at a time would
    read each other's index, and one would end the patches of the other.
    """
    with _TURN, setting(_PLAN, plan):
        yield


def current_plan() -> LaunchPlan | None:
    """Return the plan of the block that this thread is in, or None."""
    return _PLAN.get()


def recording_launches() -> AbstractContextManager[list[LaunchParameters]]:
    """Record the launches of this thread inside the block instead of running their programs."""
    return setting(_RECORDED, [])


def is_recorded(kernel: str, arguments: dict[str, Any]) -> bool:
    """Record a launch if this thread records launches; return whether it does."""
    found = _RECORDED.get()
    if found is None:
        return False
    plain = {name: getattr(value, "value", value) for name, value in arguments.items()}
    numbers = {n: value for n, value in plain.items() if isinstance(value, int | float | bool)}
    found.append(LaunchParameters(kernel, numbers))
    return True


# Skip programs of a launch whose output is not requested.

# Seconds per step of a kernel's loop over keys, on a slow core.
_DECODE_STEP_S = 0.0025
_PREFILL_STEP_S = 0.009


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """The part of a call to compute: a range of KV heads and of sequences; None means all.

    ``group`` is the number of query heads per KV head.
    """

    group: int = 1
    kv_heads: range | None = None
    seqs: range | None = None

    def has(self, seq: int, kv_head: int) -> bool:
        """Return whether the KV head of the sequence is in the subset."""
        in_heads = self.kv_heads is None or kv_head in self.kv_heads
        return in_heads and (self.seqs is None or seq in self.seqs)


def needed(kernel: str, args: dict[str, Any], program: Program, subset: Subset) -> bool:
    """Return whether a program writes a row of the subset.

    ``args`` are the kernel's arguments by name. All programs of an unknown kernel are needed.
    """
    is_needed = _KERNELS.get(kernel)
    return True if is_needed is None else is_needed(args, program, subset)


def _decode(args: dict[str, Any], program: Program, subset: Subset) -> bool:
    """Grid: sequence, KV head. A program returns at once if query_len > 1."""
    seq, head, _ = program
    if not subset.has(seq, head):
        return False
    return not args["filter_by_query_len"] or _query_len(args["query_start_len_ptr"], seq) <= 1


def _prefill(args: dict[str, Any], program: Program, subset: Subset) -> bool:
    """Grid: sequence, query head, tile of BLOCK_M rows.

    A program returns at once if it skips a decode; a tile after the last row stores nothing.
    """
    seq, head, tile = program
    group = args.get("num_queries_per_kv") or args["kv_group_num"]  # triton_prefill_attention
    if not subset.has(seq, head // group):
        return False
    query_len = _query_len(args["B_Start_Loc"], seq)
    skipped = args.get("SKIP_DECODE", False) and query_len == 1
    return not skipped and bool(tile * args["BLOCK_M"] < query_len)


def _unified(args: dict[str, Any], program: Program, subset: Subset) -> bool:
    """Grid: block of BLOCK_Q rows, KV head, split.

    Sequence i starts at block query_start_loc[i] // BLOCK_Q + i. Its last block may be empty; then the
    program returns at once.
    """
    block, head, _ = program
    starts, block_q = args["query_start_len_ptr"].tolist(), args["BLOCK_Q"]
    firsts = [start // block_q + i for i, start in enumerate(starts[:-1])]
    seq = bisect_right(firsts, block) - 1
    empty = (block - firsts[seq]) * block_q >= starts[seq + 1] - starts[seq]
    return subset.has(seq, head) and not empty


def _reduce(args: dict[str, Any], program: Program, subset: Subset) -> bool:
    """Grid: token, query head."""
    token, head, _ = program
    seq = bisect_right(args["query_start_len_ptr"].tolist(), token) - 1
    return subset.has(seq, head // subset.group)


def _by_query_head(args: dict[str, Any], program: Program, subset: Subset) -> bool:
    """Grid: sequence, query head, split."""
    return subset.has(program[0], program[1] // subset.group)


def _by_head_block(args: dict[str, Any], program: Program, subset: Subset) -> bool:
    """Grid: sequence, block of BLOCK_H query heads of one KV head, split."""
    blocks = -(-subset.group // args["BLOCK_H"])
    return subset.has(program[0], program[1] // blocks)


_KERNELS: dict[str, Callable[[dict[str, Any], Program, Subset], bool]] = {
    TRITON_DECODE: _decode,
    "_fwd_kernel": _prefill,
    "_fwd_kernel_alibi": _prefill,
    "kernel_unified_attention": _unified,
    "kernel_unified_attention_2d": _unified,
    "kernel_unified_attention_3d": _unified,
    "reduce_segments": _reduce,
    "_fwd_kernel_stage1": _by_query_head,
    "_fwd_kernel_stage2": _by_query_head,
    "_fwd_grouped_kernel_stage1": _by_head_block,
}


def estimated_s(call: KernelCall, kernels: tuple[str, ...], subset: Subset) -> float:
    """Estimate the seconds that a call's kernels take, one program after another on one core."""
    kv_heads = len(subset.kv_heads) if subset.kv_heads is not None else call.key.shape[1]
    query_lens, seq_lens = call.query_lens.tolist(), call.seq_lens.tolist()
    seqs, seconds = subset.seqs or range(len(seq_lens)), 0.0
    for query_len, seq_len in ((query_lens[seq], seq_lens[seq]) for seq in seqs):
        if PREFILL in kernels and (query_len != 1 or call.op == PREFILL):
            tiles = -(-query_len // 128)
            steps = tiles * ((seq_len - query_len) / 32 + tiles + 1)
            seconds += steps * kv_heads * call.num_queries_per_kv * _PREFILL_STEP_S
        elif ENCODER in kernels:
            tiles = -(-query_len // 128)
            seconds += tiles * tiles * kv_heads * call.num_queries_per_kv * _PREFILL_STEP_S
        elif UNIFIED in kernels:
            blocks = -(-query_len * call.num_queries_per_kv // 16)
            seconds += blocks * (seq_len / 32) * kv_heads * _DECODE_STEP_S
        elif TRITON_DECODE in kernels and query_len == 1:
            seconds += -(-seq_len // call.block_size) * kv_heads * _DECODE_STEP_S
        elif DECODE_FWD in kernels:
            seconds += -(-seq_len // 32) * kv_heads * _DECODE_STEP_S
    return seconds


def _query_len(starts: Any, seq: int) -> int:
    return int(starts[seq + 1]) - int(starts[seq])
