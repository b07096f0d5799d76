"""Attention in torch by tiles of keys and blocks of rows, with faults in its masks, scores and rescaling.

It visits the slots that vLLM's kernels visit: ``context_attention_fwd`` all tiles up to the end of a block of
rows, ``unified_attention`` tiles up to the last key that a row of the block sees.
"""

from collections.abc import Callable

import torch

from attnlab.tensors.cache import to_flash
from attnlab.tensors.call import KernelCall

NEW, CONTEXT = "new", "context"
_ROWS = 64  # of a block of context_attention_fwd
_PAIRS = 16  # of a row and a query head, of unified_attention
Rescale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Hides = Callable[["_Block", torch.Tensor], torch.Tensor]


def right_rescale(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (old - new).exp()


def right_hides(block: "_Block", at: torch.Tensor) -> torch.Tensor:
    """Return which slots of a tile the rows do not see, [rows, slots] bool."""
    is_hidden = at > block.position[:, None]
    if block.call.sliding_window:
        is_hidden |= at <= block.position[:, None] - block.call.sliding_window
    return is_hidden | (at >= block.end)


def tiled_attention(
    call: KernelCall,
    *,
    hidden: float | str = -torch.inf,
    loop: str | None = NEW,
    shift: float = 0.0,
    rescale: Rescale = right_rescale,
    rescale_sum: Rescale = right_rescale,
    tile: int = 32,
    whole_only: bool = False,
    as_first: bool = False,
    hides: Hides = right_hides,
    is_late: bool = False,
    as_zero: Hides | None = None,
    constant: float = 0.0,
) -> None:
    """Run it on a call.

    In ``loop``, hidden slots have the score ``hidden``, "own" for their own, ``shift`` is added to all
    scores, and ``rescale`` and ``rescale_sum`` give the factors of the accumulator and the sum before a tile.
    An op whose new tokens are in the cache has one loop, NEW; with ``whole_only`` it leaves out a last tile
    that is not full, with ``as_first`` all rows of a block see what its first row sees. ``hides``: what the
    mask hides. With ``is_late`` the accumulator is rescaled after a tile is added, except after the first.
    ``as_zero``: which slots have the score ``constant``. ``loop`` None: both loops.
    """
    faults = {"hidden": hidden, "shift": shift, "rescale": rescale, "rescale_sum": rescale_sum}
    faults |= {"hides": hides, "is_late": is_late, "as_zero": as_zero, "constant": constant}
    caches = [cache.flatten(0, 1).float() for cache in to_flash(call.key_cache, call.value_cache)]
    own = torch.arange(call.query.shape[1]) // call.num_queries_per_kv
    is_unified = call.spec.new_tokens_from == "cache"
    starts = call.query_start_loc.tolist()
    for seq, length in enumerate(call.seq_lens.tolist()):
        first, last = starts[seq : seq + 2]
        context = length - (last - first)
        cached = length if is_unified else context
        at = torch.arange(cached)
        slots = call.block_table[seq].long()[at // call.block_size] * call.block_size
        slots = slots + at % call.block_size
        keys, values = (
            torch.cat([cache[slots], (new[first:last] if not is_unified else new[:0]).float()])
            for cache, new in zip(caches, (call.key, call.value), strict=True)
        )
        keys, values = keys[:, own], values[:, own]
        rows = _PAIRS // call.num_queries_per_kv if is_unified else _ROWS
        for row in range(first, last, rows):
            block = _Block(call, torch.arange(row, min(row + rows, last)), context - first)
            if is_unified:
                reach = (_PAIRS - 1) // call.num_queries_per_kv + 1  # as the kernel rounds
                end = min(context + row - first + reach, length)
                stop = end // tile * tile if whole_only else -(-end // tile) * tile
                block.length = length
                if as_first:
                    block.position = block.position[:1].expand_as(block.position)
                block.loop(keys[:end], values[:end], 0, stop, tile, faults)
            else:
                wrong = {loop: faults} if loop else {NEW: faults, CONTEXT: faults}
                end = context + row - first + rows
                block.loop(keys[:cached], values[:cached], 0, cached, tile, wrong.get(CONTEXT, {}))
                block.loop(keys, values, cached, end, tile, wrong.get(NEW, {}))
            found = block.acc / block.sum.clamp(min=1e-30)
            call.output[block.rows] = found.transpose(0, 1).to(call.output.dtype)


class _Block:
    """A block of rows with its running maximum, sum and accumulator, [heads, rows, ...]."""

    def __init__(self, call: KernelCall, rows: torch.Tensor, shift: int) -> None:
        self.call, self.rows, self.position = call, rows, rows + shift
        self.end = self.length = 0  # of the keys that are loaded, and of all
        self.query = call.query[rows].transpose(0, 1).float()
        self.top = torch.full((*self.query.shape[:2], 1), -1e30)
        self.sum, self.acc = torch.zeros_like(self.top), torch.zeros_like(self.query)

    def loop(self, keys, values, start, stop, tile, faults) -> None:
        """Visit the slots from ``start`` to ``stop``, in whole tiles; those without a key hold zeros."""
        stop = start + -(-(stop - start) // tile) * tile
        pads = max(0, stop - len(keys))
        keys, values = (
            torch.cat([one, one.new_zeros(pads, *one.shape[1:])]) for one in (keys, values)
        )
        self.end = len(keys) - pads
        for begin in range(start, stop, tile):
            at = torch.arange(begin, begin + tile)
            scale = self.call.sm_scale or self.query.shape[2] ** -0.5
            own = self.query @ keys[at].permute(1, 2, 0) * scale + faults.get("shift", 0.0)
            is_hidden = faults.get("hides", right_hides)(self, at)
            hidden = faults.get("hidden", -torch.inf)
            scores = own if hidden == "own" else own.masked_fill(is_hidden, hidden)
            if as_zero := faults.get("as_zero"):
                scores = scores.masked_fill(as_zero(self, at), faults["constant"])
            top = torch.maximum(self.top, scores.amax(2, keepdim=True))
            weights = (scores - top).exp()
            rescale = faults.get("rescale", right_rescale)(self.top, top)
            self.sum = self.sum * faults.get("rescale_sum", right_rescale)(self.top, top)
            self.sum = self.sum + weights.sum(2, keepdim=True)
            added = weights @ values[at].transpose(0, 1)
            if faults.get("is_late") and begin > start:
                added = added * rescale
            self.acc = self.acc * rescale + added
            self.top = top
