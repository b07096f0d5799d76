"""Which sequences a kernel serves, which output rows it writes, and how many positions it reads."""

import math
from collections.abc import Iterable

import torch

from attnlab.case.lengths import Lengths
from attnlab.case.ops import ENCODER, PREFILL, fill_read
from attnlab.contracts.contract import ENCODER_TILE, PREFILL_TILE, Contract
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.target import Target
from attnlab.tensors.call import KernelCall


def default_scale(call: KernelCall, target: Target) -> float:
    """Return the scale that the op uses if sm_scale is not passed."""
    _, num_heads, head_size = call.query.shape
    by_heads = contract(call.op, target, call.op).default_scale == "num_heads"
    return 1.0 / math.sqrt(num_heads if by_heads else head_size)


def as_read(contract: Contract, call: KernelCall, name: str) -> torch.Tensor:
    """Return an index tensor as the kernel reads it: int64, in the tensor's own shape.

    If the kernel reinterprets int64 as int32, each number becomes two, low half first: 0, 880, 1290 is
    read as 0, 0, 880, 0, 1290, 0. The kernel reads as many numbers as it expects: 0, 0, 880.
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

    The grids of the prefill kernels cover max_query_len rows per sequence, in whole tiles.
    """
    rows = torch.zeros(call.query.shape[0] + 1, dtype=torch.int64)
    starts = as_read(contract, call, "query_start_loc")
    lens = starts.diff()
    if contract.name in (PREFILL, ENCODER):
        lens = lens.clamp(max=grid_rows(contract, call))
    on = served(contract, call)
    begins = starts[:-1][on].clamp(0, call.query.shape[0])
    ends = (starts[:-1] + lens)[on].clamp(0, call.query.shape[0])
    rows.index_add_(0, begins, torch.ones_like(begins))
    rows.index_add_(0, ends, -torch.ones_like(ends))
    return rows.cumsum(0)[:-1] > 0


def grid_rows(contract: Contract, call: KernelCall) -> int:
    """Return the rows of a sequence that the grid of a prefill kernel covers: max_query_len, in tiles."""
    tile = PREFILL_TILE
    if contract.name == ENCODER:
        is_small = call.query.dtype == torch.float32 or call.query.shape[2] >= 512
        tile = 64 if call.origin.platform == "cpu" else ENCODER_TILE
        tile = 32 if is_small else tile
    return -(-call.max_query_len // tile) * tile


def runs_of(rows: torch.Tensor) -> list[slice]:
    """Return the runs of consecutive rows in a mask [n] bool, in order."""
    edges = torch.nonzero(torch.nn.functional.pad(rows.int(), (1, 1)).diff()).flatten().tolist()
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def unwritten_rows(contracts: Iterable[Contract], call: KernelCall) -> torch.Tensor:
    """Return which output rows no kernel writes, [num_tokens] bool."""
    written = torch.zeros(call.query.shape[0], dtype=torch.bool)
    for each in contracts:
        written |= written_rows(each, call)
    return ~written


def cached_lens(contract: Contract, call: KernelCall) -> torch.Tensor:
    """Return the number of positions per sequence whose keys and values come from the cache, [num_seqs].

    Positions before a sliding window count here; the kernel does not need them.
    """
    query_lens = as_read(contract, call, "query_start_loc").diff()
    ctx_lens = as_read(contract, call, "seq_lens") - query_lens
    lengths = Lengths(query_lens=tuple(query_lens.tolist()), ctx_lens=tuple(ctx_lens.tolist()))
    cached = torch.tensor(
        lengths.cached_lens(fill_read(contract.new_tokens_from)), device=query_lens.device
    )
    return torch.where(served(contract, call), cached, 0)
