"""Model of ROCm's custom paged attention, paged_attention_rocm.

Its source is csrc/rocm/attention.cu in vLLM 0.11.2 and csrc/rocm/attention_kernels.cuh in 0.33.0.

The op has two kernels. The first splits a sequence into partitions of 256 tokens and writes the largest
score, the sum of weights and the output of each partition to scratch memory. The second merges them. The
size of the scratch follows from max_seq_len, which the op does not check.
"""

from dataclasses import dataclass

import torch

from attnlab.case.errors import KernelRejected
from attnlab.contracts.contract import PARTITION_SIZE, Contract
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.rows import as_read, served
from attnlab.contracts.target import ROCM_DECODE, Target
from attnlab.kernels.model import cache_reads as paged
from attnlab.tensors.cache import garbage
from attnlab.tensors.call import KernelCall

_WARP = 64
_EPSILON = 1e-6  # both kernels add it to a sum before the division


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scratch:
    """The results of the partitions, as flat memory.

    - ``partitions``: per sequence and head.
    - ``largest``, ``sums``: [num_seqs × num_heads × partitions] float32.
    - ``outputs``: [num_seqs × num_heads × partitions, head_size] in the query's dtype.

    vLLM allocates them with ``torch.empty``, so unwritten elements are garbage. Here more garbage follows
    the end, for a merge that reads out of bounds.
    """

    partitions: int
    largest: torch.Tensor
    sums: torch.Tensor
    outputs: torch.Tensor


def paged_attention_rocm(call: KernelCall, target: Target) -> None:
    """Write the row of every sequence whose query_len reads as 1 to ``call.output``.

    Raises KernelRejected with the message of the real op if its host code rejects the call.
    """
    terms = contract(ROCM_DECODE, target, call.op)
    check_host(terms, call)
    starts = as_read(terms, call, "query_start_loc").tolist()
    seq_lens = as_read(terms, call, "seq_lens").tolist()
    seqs = torch.nonzero(served(terms, call)).flatten().tolist()
    scratch = allocate(call, max((seq_lens[seq] for seq in seqs), default=0))
    for seq in seqs:
        _write_partitions(call, target, terms, scratch, seq, starts[seq], seq_lens[seq])
    for seq in seqs:
        call.buffer[starts[seq]] = _merge(call, scratch, seq, seq_lens[seq])


def check_host(terms: Contract, call: KernelCall) -> None:
    """Raise KernelRejected as the op's host code does, in its order and with its messages."""
    dtype = str(call.query.dtype).removeprefix("torch.")
    if call.kv_cache_dtype not in terms.kv_cache_dtypes:
        raise KernelRejected(f"Unsupported KV cache dtype: {call.kv_cache_dtype}")
    if dtype not in terms.dtypes:
        raise KernelRejected(f"Unsupported data type: {'float' if dtype == 'float32' else dtype}")
    if call.query.shape[2] not in terms.head_sizes:
        raise KernelRejected(f"Unsupported head size: {call.query.shape[2]}")
    if call.block_size not in terms.block_sizes:
        raise KernelRejected(f"Unsupported block size: {call.block_size}")
    for name in ("block_table", "seq_lens"):
        if getattr(call, name).dtype == torch.int64 and terms.on_int64[name] == "reject":
            raise KernelRejected("expected scalar type Int but found Long")
    if not 1 <= call.num_queries_per_kv <= 16:
        raise KernelRejected(f"Unsupported gqa ratio: {call.num_queries_per_kv}")


def allocate(call: KernelCall, longest: int) -> Scratch:
    """Return scratch for ceil(max_seq_len / 256) partitions per sequence and head.

    ``longest`` is the longest sequence; garbage for its partitions follows the end.
    """
    partitions = -(-call.max_seq_len // PARTITION_SIZE)
    extra = -(-longest // PARTITION_SIZE)
    head_size = call.query.shape[2]
    count = call.block_table.shape[0] * call.query.shape[1] * partitions + extra
    return Scratch(
        partitions=partitions,
        largest=garbage((count,), seed=5).float(),
        sums=garbage((count,), seed=6).float(),
        outputs=garbage((count, head_size), seed=7).to(call.query.dtype),
    )


def _write_partitions(
    call: KernelCall,
    target: Target,
    terms: Contract,
    scratch: Scratch,
    seq: int,
    row: int,
    seq_len: int,
) -> None:
    """Compute the partitions of one sequence that the grid covers, and write them to the scratch."""
    format, dtype = paged.format_of(call, target), call.query.dtype
    blocks = call.block_table[seq, : -(-seq_len // call.block_size)].long()
    every = slice(None)
    key = format.decode(paged.keys(_as_taken(terms, call.key_cache), blocks, every))
    value = format.decode(paged.values(call, blocks, every))
    partitions = min(-(-seq_len // PARTITION_SIZE), scratch.partitions)
    positions = torch.arange(partitions * PARTITION_SIZE)
    key, value = (_fitted(tensor, len(positions)) for tensor in (key, value))
    if terms.reads_tail == "nothing":
        value = value.masked_fill((positions >= seq_len)[:, None], 0.0)
    scores = _scores(call, target, key, row, seq_len)
    scores = scores.masked_fill(positions >= seq_len, -torch.inf)
    scores = scores.unflatten(2, (partitions, PARTITION_SIZE))
    largest = scores.amax(-1)
    weights = (scores - largest[..., None]).exp()
    sums = weights.sum(-1)
    weights = paged.rounded(weights / (sums[..., None] + _EPSILON), dtype)
    value = value.unflatten(1, (partitions, PARTITION_SIZE))
    by_warp = target.platform.family == "cdna" and call.num_queries_per_kv <= 4
    outputs = _weighted(
        weights, value, by_warp, _scale_of_cache(call, call.number("v_scale")), dtype
    )
    here = _places(call, scratch, seq, partitions)
    scratch.largest[here] = largest.flatten(0, 1)
    scratch.sums[here] = sums.flatten(0, 1)
    scratch.outputs[here] = outputs.flatten(0, 1)


def _as_taken(terms: Contract, key_cache: torch.Tensor) -> torch.Tensor:
    """Return the key cache in the layout that the kernel assumes: x of 16 bytes."""
    blocks, heads, chunks, block_size, x = key_cache.shape
    taken = (terms.key_x_bytes or 0) // key_cache.element_size()
    return key_cache.reshape(blocks, heads, chunks * x // taken, block_size, taken)


def _fitted(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return [heads, n, head_size] cut or padded with zeros to ``length`` positions.

    The real kernel reads its last block again for positions after it, with weight 0. That adds nothing
    that the tail of the block does not add already.
    """
    short = max(0, length - tensor.shape[1])
    return torch.nn.functional.pad(tensor[:, :length], (0, 0, 0, short))


def _scores(
    call: KernelCall, target: Target, key: torch.Tensor, row: int, seq_len: int
) -> torch.Tensor:
    """Return the scores of one row, [num_kv_heads, group, positions] float32."""
    query = call.query[row].float().unflatten(0, (-1, call.num_queries_per_kv))
    scale = paged.scale_of(call, target) * _scale_of_cache(call, call.number("k_scale"))
    scores: torch.Tensor = query @ key.transpose(1, 2) * scale
    if call.alibi_slopes is not None:
        away = torch.arange(key.shape[1]) - (seq_len - 1)
        scores += call.alibi_slopes.view(*scores.shape[:2], 1) * away.float()
    return scores


def _scale_of_cache(call: KernelCall, scale: float) -> float:
    """Return k_scale or v_scale, or 1 unless the cache is FP8."""
    return 1.0 if call.kv_cache_dtype == "auto" else scale


def _weighted(
    weights: torch.Tensor, value: torch.Tensor, by_warp: bool, v_scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the output of each partition in ``dtype``, [num_kv_heads, group, partitions, head_size].

    With up to 4 query heads per KV head, gfx9's kernel rounds the sum of each warp's 64 tokens and adds the
    warps in ``dtype``, truncating in bfloat16 (``addx4``). Otherwise it sums the partition in float32.
    """
    if not by_warp:
        return (weights.transpose(1, 2) @ value * v_scale).to(dtype).transpose(1, 2)
    parts = weights.unflatten(3, (-1, _WARP)).permute(0, 2, 3, 1, 4)
    warps = (parts @ value.unflatten(2, (-1, _WARP)) * v_scale).to(dtype)
    total = torch.zeros_like(warps[:, :, 0])
    for warp in range(warps.shape[2]):
        total = _sum(total, warps[:, :, warp])
    return total.transpose(1, 2)


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two tensors in their dtype: float16 rounded, bfloat16 truncated."""
    if one.dtype != torch.bfloat16:
        return one + other
    bits = (one.float() + other.float()).view(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def _places(call: KernelCall, scratch: Scratch, seq: int, partitions: int) -> torch.Tensor:
    """Return the indices of a sequence's partitions in the flat scratch, [num_heads, partitions].

    With more partitions than the scratch was allocated for, the indices of a head run into the next head,
    and those of the last head of the last sequence past the end: the op does not check it.
    """
    num_heads = call.query.shape[1]
    heads = (seq * num_heads + torch.arange(num_heads)) * scratch.partitions
    return heads[:, None] + torch.arange(partitions)


def _merge(call: KernelCall, scratch: Scratch, seq: int, seq_len: int) -> torch.Tensor:
    """Return one row, [num_heads, head_size] in the output's dtype, merged from its partitions."""
    here = _places(call, scratch, seq, -(-seq_len // PARTITION_SIZE))
    largest = scratch.largest[here]
    shares = scratch.sums[here] * (largest - largest.amax(-1, keepdim=True)).exp()
    mixed = (shares[..., None] * scratch.outputs[here].float()).sum(1)
    return (mixed / (shares.sum(-1, keepdim=True) + _EPSILON)).to(call.buffer.dtype)
