"""Tile edges: where a kernel begins a new step of keys, for pictures of weights."""

from collections.abc import Iterator

from attnlab.case.ops import DECODE_FWD, PREFILL
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.contracts.target import ROCM_DECODE, TRITON_DECODE
from attnlab.weights.key_rules import KeyTimes, ZeroKeys
from attnlab.weights.rule import Rule
from attnlab.weights.score_rules import LoopBase, MaskCapped, NotRescaled
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.tile_rules import TileTimes
from attnlab.weights.xray import XRay

_PREFILL_TILE, _UNIFIED_TILE, _DECODE_TILE = 64, 32, 32  # of vLLM 0.11.2 and 0.33.0
_LARGEST_BLOCK = (
    128  # of kernel_paged_attention_2d, which takes 32 for other sizes than powers of two
)


def tile_size(one: XRay, kernel: str) -> int:
    """Return the keys per tile: those of the rule that describes the weights, else those of vLLM's kernel."""
    for description in one.descriptions[:1]:
        for rule in description.rules:
            if tile := _of_rule(rule):
                return tile
    return _of_kernel(kernel, one.setup)


def tile_edges(one: XRay, kernel: str, context: int, cached: int, length: int) -> tuple[int, ...]:
    """Return the positions at which tiles begin, without the first.

    A kernel that reads new tokens from its arguments begins anew at the end of the context.
    """
    size = tile_size(one, kernel)
    if 0 < cached < length:
        return (*range(size, context, size), *range(context + size, length, size))
    return tuple(range(size, length, size))


def _of_rule(rule: Rule) -> int:
    """Return the tile that a rule is about, 0 if it is about none."""
    if isinstance(rule, NotRescaled | LoopBase):
        return rule.rescale.steps.tile if not rule.rescale.steps.parts else 0
    if isinstance(rule, TileTimes):
        return rule.steps.tile if not rule.steps.parts else 0
    if isinstance(rule, MaskCapped):
        return rule.tile
    if isinstance(rule, KeyTimes | ZeroKeys):
        return next(_of_edges(rule), 0)
    return 0


def _of_edges(rule: KeyTimes | ZeroKeys) -> Iterator[int]:
    for edge in (rule.begin, rule.end):
        yield from (size for size in (edge.within, edge.up, edge.down) if size)


def _of_kernel(kernel: str, setup: AttentionSetup) -> int:
    """Return the keys per tile of a kernel of vLLM."""
    size = setup.call.block_size
    if kernel == ROCM_DECODE:
        return PARTITION_SIZE
    if kernel == TRITON_DECODE:
        return min(size, _LARGEST_BLOCK) if size & (size - 1) == 0 else 32
    if kernel == PREFILL:
        return _PREFILL_TILE
    if kernel == DECODE_FWD:
        return _DECODE_TILE
    is_decode = bool((setup.query_len == 1).all()) and setup.call.key_cache.element_size() > 1
    return _UNIFIED_TILE // 2 if is_decode else _UNIFIED_TILE
