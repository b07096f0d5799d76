"""Contracts: what each kernel requires and does, as data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from attnlab.case.lengths import Lengths
from attnlab.case.ops import (
    CPU_ATTENTION,
    DECODE_FWD,
    MERGE,
    OPS,
    PREFILL,
    UNIFIED,
    WRAPPER,
    WRITE,
    fill_read,
)
from attnlab.case.shown import Shown
from attnlab.contracts.dispatch import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.tensors.call import KernelCall

PARTITION_SIZE = 256  # tokens of a partition of the ROCm kernel
PREFILL_TILE = 128  # query rows of a program of the prefill kernel, BLOCK_M


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Contract(Shown):
    """The terms on which a kernel takes a call.

    - ``on_int64``: what the kernel does with an int64 tensor where it means int32, by tensor:
      "accept" (reads the dtype it is given), "convert", "reject" or "reinterpret" (reads the bytes as
      int32). A tensor that is not named is accepted.
    - ``serves``: rows of which sequences it writes: "all", "prefill" (query_len ≠ 1) or "decode"
      (query_len = 1).
    - ``new_tokens_from``: where the keys and values of new tokens come from, "arguments" or "cache", or
      "by query_len": the cache where it is 1, else the arguments.
    - ``reads_tail``: what the slots behind seq_len in the last block do: "nothing", or "value" where a
      NaN there reaches the output through 0 × NaN, or "key and value".
    - ``default_scale``: what the op takes sm_scale from where none is passed, 1 / sqrt of "head_size" or
      of "num_heads"; None for a kernel that is always given one.
    - ``key_x_bytes``: bytes that the kernel takes for the innermost size of the key cache, whatever
      the tensor's shape says; None where it reads the shape.
    - ``block_size_multiple``: what the block size must be a multiple of.
    - ``alibi_from``: what ALiBi counts distances from, each row's "query" or a sequence's "first new
      token": the same to softmax, but not beside a sink.
    - ``sinks``: whether it takes attention sinks: "none", "without alibi" or "any".
    - ``softcap``: whether it takes a soft cap of the scores: "none", "any", or "overflows" where a score
      88 times the cap becomes NaN.
    - the five tuples: what it takes; empty is anything.
    """

    name: str
    source: str
    serves: str
    new_tokens_from: str
    on_int64: dict[str, str] = field(default_factory=dict)
    reads_tail: str = "nothing"
    default_scale: str | None = None
    key_x_bytes: int | None = None
    block_size_multiple: int = 1
    alibi_from: str = "query"
    sinks: str = "none"
    sink_dtypes: tuple[str, ...] = ()
    softcap: str = "none"
    kv_cache_dtypes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    head_sizes: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()


def contract(name: str, target: Target, op: str) -> Contract:
    """Return the contract of a kernel as ``op`` calls it, or of an op, under a release's rules."""
    return {
        WRAPPER: _wrapper,
        PREFILL: _prefill,
        TRITON_DECODE: _triton_decode,
        ROCM_DECODE: _rocm_decode,
        CPU_ATTENTION: _cpu_attention,
        UNIFIED: _unified,
        DECODE_FWD: _decode_fwd,
        MERGE: _merge,
        WRITE: _write,
    }[name](target, op)


def _triton_formats(target: Target) -> tuple[str, ...]:
    """Return what Triton's kernels read: e4m3 needs compute capability 8.9 on CUDA."""
    e4m3 = ("fp8", "fp8_e4m3") if target.platform.triton_e4m3 else ()
    return ("auto", *e4m3, "fp8_e5m2")


def _wrapper(target: Target, op: str) -> Contract:
    """Return the contract of chunked_prefill_paged_decode, the op around prefill and decode kernel.

    Every row is served, by the one or the other. Up to 0.11.2 its default scale comes from
    ``query.shape[1]``, the number of heads; since then from ``query.shape[2]``.
    """
    return Contract(
        name=WRAPPER,
        source=OPS[WRAPPER].source(target.release),
        serves="all",
        new_tokens_from=OPS[WRAPPER].new_tokens_from,
        default_scale="num_heads" if target.release == "0.11.2" else "head_size",
        sinks="any",
    )


def _prefill(target: Target, op: str) -> Contract:
    """Return the contract of context_attention_fwd: it never reads the cache behind ctx_len."""
    return Contract(
        default_scale="head_size",
        name=PREFILL,
        source=OPS[PREFILL].source(target.release),
        serves="all" if op == PREFILL else "prefill",
        new_tokens_from=OPS[PREFILL].new_tokens_from,
        kv_cache_dtypes=_triton_formats(target),
        sinks="without alibi",  # an assertion of the op
    )


def _triton_decode(target: Target, op: str) -> Contract:
    """Return the contract of Triton's paged decode.

    0.11.2 loads the last block whole and adds the mask to the scores (-inf + NaN is NaN), so NaN in
    its tail reaches the output through K and V; 0.33.0 masks the loads. 0.33.0 also converts the block
    table to int32 before the launch.
    """
    old = target.release == "0.11.2"
    return Contract(
        name=TRITON_DECODE,
        source=OPS[WRAPPER].source(target.release),
        serves="decode",
        new_tokens_from="cache",
        on_int64={} if old else {"block_table": "convert"},
        reads_tail="key and value" if old else "nothing",
        kv_cache_dtypes=_triton_formats(target),
        sinks="any",
    )


def _rocm_decode(target: Target, op: str) -> Contract:
    """Return the contract of the ROCm custom kernel.

    ``block_tables`` and ``seq_lens`` go through ``data_ptr<int>()``, which checks; query_start_loc
    through a ``reinterpret_cast``, which does not. With ``wrapper_cast`` the Python wrapper converts
    all three first. 0.33.0 masks unwritten value slots (vLLM PR #53856); 0.11.2 multiplies them by 0.
    """
    old = target.release == "0.11.2"
    names = ("block_table", "seq_lens", "query_start_loc")
    strict = {"block_table": "reject", "seq_lens": "reject", "query_start_loc": "reinterpret"}
    file = "attention.cu" if old else "attention_kernels.cuh"
    return Contract(
        name=ROCM_DECODE,
        source=f"csrc/rocm/{file}, vLLM {target.release}",
        serves="decode",
        new_tokens_from="cache",
        on_int64=dict.fromkeys(names, "convert") if target.wrapper_cast else strict,
        reads_tail="value" if old else "nothing",
        key_x_bytes=16,
        kv_cache_dtypes=("auto", "fp8", "fp8_e4m3"),
        dtypes=("float16", "bfloat16"),
        head_sizes=(64, 128),
        block_sizes=(16, 32),
    )


def _cpu_attention(target: Target, op: str) -> Contract:
    """Return the contract of vLLM's compiled CPU attention.

    It has no arguments for new tokens: every key and value comes from the cache. ``data_ptr<int32_t>``
    checks all three index tensors (csrc/cpu/cpu_attn.cpp). Slots behind seq_len get the weight 0 and are
    multiplied, up to the next multiple of 16 or 32 tokens: NaN in a value there reaches the output.
    """
    names = ("block_table", "seq_lens", "query_start_loc")
    return Contract(
        name=CPU_ATTENTION,
        source=OPS[CPU_ATTENTION].source(target.release),
        serves="all",
        new_tokens_from=OPS[CPU_ATTENTION].new_tokens_from,
        on_int64=dict.fromkeys(names, "convert" if target.wrapper_cast else "reject"),
        reads_tail="value",
        block_size_multiple=16,
        sinks="any",
        sink_dtypes=("bfloat16", "float32"),
        softcap="overflows",
        kv_cache_dtypes=OPS[CPU_ATTENTION].kv_cache_dtypes,
        dtypes=("float16", "bfloat16", "float32"),
        head_sizes=(32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    )


def _unified(target: Target, op: str) -> Contract:
    """Return the contract of unified_attention: new tokens, too, must be in the cache before it.

    Its soft cap came from two exponentials, which overflow, until vLLM PR #56579.
    """
    return Contract(
        name=UNIFIED,
        alibi_from="first new token",
        sinks="any",
        softcap="overflows" if target.release == "0.11.2" else "any",
        source=OPS[UNIFIED].source(target.release),
        serves="all",
        new_tokens_from=OPS[UNIFIED].new_tokens_from,
        kv_cache_dtypes=_formats(target, UNIFIED),
    )


def _decode_fwd(target: Target, op: str) -> Contract:
    """Return the contract of decode_attention_fwd: one row a sequence."""
    return Contract(
        name=DECODE_FWD,
        softcap="any",
        source=OPS[DECODE_FWD].source(target.release),
        serves="decode",
        new_tokens_from=OPS[DECODE_FWD].new_tokens_from,
        kv_cache_dtypes=_formats(target, DECODE_FWD),
    )


def _merge(target: Target, op: str) -> Contract:
    """Return the contract of merge_attn_states; of its two parts the lab computes the one over the
    context from the cache."""
    return Contract(
        name=MERGE,
        source=OPS[MERGE].source(target.release),
        serves="all",
        new_tokens_from=OPS[MERGE].new_tokens_from,
    )


def _write(target: Target, op: str) -> Contract:
    """Return the contract of reshape_and_cache_flash, whose output is the cache."""
    return Contract(
        name=WRITE,
        source=OPS[WRITE].source(target.release),
        serves="all",
        new_tokens_from=OPS[WRITE].new_tokens_from,
        kv_cache_dtypes=_formats(target, WRITE),
    )


def _formats(target: Target, op: str) -> tuple[str, ...]:
    """Return the values of kv_cache_dtype that an op accepts on the target's platform."""
    return tuple(name for name in _triton_formats(target) if name in OPS[op].kv_cache_dtypes)


def default_scale(call: KernelCall, target: Target) -> float:
    """Return the scale that the op takes where none is passed."""
    _, num_heads, head_size = call.query.shape
    size = (
        num_heads if contract(call.op, target, call.op).default_scale == "num_heads" else head_size
    )
    return 1.0 / math.sqrt(size)


def as_read(contract: Contract, call: KernelCall, name: str) -> torch.Tensor:
    """Return an index tensor as the kernel reads it, int64, in the shape that it takes it for.

    An int64 tensor that is reinterpreted gives its bytes as int32, low half first: 0, 880, 1290 become
    0, 0, 880, 0, 1290, 0, of which the kernel takes as many as it expects numbers.
    """
    tensor: torch.Tensor = getattr(call, name)
    if tensor.dtype == torch.int64 and contract.on_int64.get(name) == "reinterpret":
        return tensor.contiguous().view(torch.int32).flatten()[: tensor.numel()].long()
    return tensor.long()


def served(contract: Contract, call: KernelCall) -> torch.Tensor:
    """Return which sequences the kernel works on, [num_seqs] bool, by the lengths that it reads."""
    query_lens = as_read(contract, call, "query_start_loc").diff()
    if contract.serves == "all":
        return query_lens > 0
    return query_lens == 1 if contract.serves == "decode" else query_lens > 1


def written_rows(contract: Contract, call: KernelCall) -> torch.Tensor:
    """Return which output rows the kernel writes, [num_tokens] bool.

    The prefill kernel's grid covers max_query_len rows of a sequence, in tiles of PREFILL_TILE.
    """
    rows = torch.zeros(call.query.shape[0] + 1, dtype=torch.int64)
    starts = as_read(contract, call, "query_start_loc")
    reach = starts.diff()
    if contract.name == PREFILL:
        reach = reach.clamp(max=-(-call.max_query_len // PREFILL_TILE) * PREFILL_TILE)
    on = served(contract, call)
    begins = starts[:-1][on].clamp(0, call.query.shape[0])
    ends = (starts[:-1] + reach)[on].clamp(0, call.query.shape[0])
    rows.index_add_(0, begins, torch.ones_like(begins))
    rows.index_add_(0, ends, -torch.ones_like(ends))
    return rows.cumsum(0)[:-1] > 0


def unwritten_rows(contracts: Sequence[Contract], call: KernelCall) -> torch.Tensor:
    """Return which output rows none of the kernels writes, [num_tokens] bool."""
    written = torch.zeros(call.query.shape[0], dtype=torch.bool)
    for terms in contracts:
        written |= written_rows(terms, call)
    return ~written


def cached_lens(contract: Contract, call: KernelCall) -> torch.Tensor:
    """Return how many positions of each sequence the kernel reads from the cache, [num_seqs]."""
    query_lens = as_read(contract, call, "query_start_loc").diff()
    ctx_lens = as_read(contract, call, "seq_lens") - query_lens
    lengths = Lengths(query_lens=tuple(query_lens.tolist()), ctx_lens=tuple(ctx_lens.tolist()))
    cached = torch.tensor(
        lengths.cached_lens(fill_read(contract.new_tokens_from)), device=query_lens.device
    )
    return torch.where(served(contract, call), cached, 0)
