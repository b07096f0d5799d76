"""PagedCache: keys and values in blocks, and which token each slot holds."""

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from attnlab.case.case import Case, Lengths
from attnlab.case.errors import InvalidCall, Unavailable
from attnlab.case.shown import Shown
from attnlab.tensors.formats import FORMATS, ElementFormat, coarse, spanning, store, written_format

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Values of query, key and value that random numbers do not have, by the names of a Case's ``distribution``.
#
# Each is a change of numbers with a normal distribution, so that the rest of them stays random.

LARGE = 384.0  # exact in FP8; the product of two is 147456
_TAGGED = 16  # tokens that share a tag: a block of the cache in most cases
_NEAR = (0.7, 0.95)  # magnitudes of values, as parts of 65504, the largest float16
_DOMINANT = (16.0, 64.0)  # in the query and in the key; their product is 1024

Change = Callable[[Lengths, torch.Tensor, torch.Tensor, torch.Tensor], None]


def change_values(
    distribution: str, lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Change normal numbers to those of a distribution; modifies the tensors.

    ``query``: [num_tokens, num_heads, head_size]; ``key``, ``value``: [sum(seq_lens), num_kv_heads,
    head_size], all tokens sequence by sequence.
    """
    if distribution in CHANGES:
        CHANGES[distribution](lengths, query, key, value)


def _large_scores(
    lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Let all scores of a row be near 147456 times sm_scale, or near its negative in every second row."""
    key[..., 0] = LARGE
    query[..., 0] = LARGE
    query[1::2, ..., 0] = -LARGE


def _ties(lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Let all tokens have one key, so that all scores of a row are equal, and let values be tags.

    A tag is a vector of signs for each head and 16 tokens of a sequence.
    """
    key.copy_(key[:1].clone())
    for first, last in _sequences(lengths):
        begins = torch.arange(last - first, device=value.device) // _TAGGED * _TAGGED
        value[first:last] = torch.where(value[first:last][begins] < 0, -1.0, 1.0).to(value.dtype)


def _dominant_key(
    lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Let one key of each sequence and head have a score that is larger by 1024 times sm_scale.

    Its position depends on the head.
    """
    heads = key.shape[1]
    query[..., 0] = _DOMINANT[0]
    for first, last in _sequences(lengths):
        for head in range(heads):
            key[first + (last - first) * (head + 1) // (heads + 1), head, 0] = _DOMINANT[1]


def _near_limit(
    lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Let values be near the limit of float16, with one sign per head and element, so that sums are, too."""
    low, high = (part * torch.finfo(torch.float16).max for part in _NEAR)
    sign = torch.where(value[:1] < 0, -1.0, 1.0).to(value.dtype)
    size = low + (high - low) * value.float().abs().clamp(max=1.0)
    value.copy_(size.to(value.dtype) * sign)


def _sequences(lengths: Lengths) -> list[tuple[int, int]]:
    """Return the first row of each sequence among all tokens, and the row after its last."""
    return [*pairwise(lengths.kv_start_loc)]


CHANGES: Mapping[str, Change] = {
    "large_scores": _large_scores,
    "ties": _ties,
    "dominant_key": _dominant_key,
    "near_limit": _near_limit,
}


def distribution_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """Return the distribution of a Case that is most like given numbers; shapes as :func:`change_values`."""
    if not query.numel() or not key.numel():
        return "normal"
    if max(float(one.abs().max()) for one in (query, key)) <= 1e-3:
        return "uniform_1e-3"
    first = query[..., 0].abs()
    if bool((first == LARGE).all() and (key[..., 0] == LARGE).all()):
        return "large_scores"
    if len(key) > 1 and bool((key == key[:1]).all()):
        return "ties"
    if bool((first == _DOMINANT[0]).all()):
        return "dominant_key"
    smallest = _NEAR[0] * torch.finfo(torch.float16).max * (1 - 2**-7)  # as bfloat16 rounds it
    return "near_limit" if bool((value.abs().float() >= smallest).all()) else "normal"


Noun = TypeVar("Noun", bound="DataclassInstance")


def on_device(noun: Noun, device: str) -> Noun:
    """Return a dataclass with its tensors on a device, "cpu" or "cuda"; itself if they are there."""
    given = {one.name: getattr(noun, one.name) for one in dataclasses.fields(noun)}
    tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
    moved = {name: one.to(device) for name, one in tensors.items() if one.device.type != device}
    return dataclasses.replace(noun, **moved) if moved else noun


SINK_RANGE = (1.0, 6.0)
_CHUNK = 1 << 22  # elements that one generator draws
_FEW = 1 << 18  # elements that are drawn before threads would start
_PART = 1 << 18  # elements drawn at a time in float32: 1 MiB


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False, repr=False)
class Batch(Shown):
    """New tokens and context of several sequences.

    - ``query``: [num_tokens, num_heads, head_size], the new tokens, sequence by sequence.
    - ``key``, ``value``: [sum(seq_lens), num_kv_heads, head_size], all tokens (context, then new),
      sequence by sequence.
    - ``alibi_slopes``: [num_heads] float32, or None.
    - ``sinks``: [num_heads] float32, the logit of each query head's sink, or None.
    """

    lengths: Lengths
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None = None

    @property
    def kv_start_loc(self) -> list[int]:
        """Return the first row of each sequence in ``key``, and the number of rows; length num_seqs + 1."""
        return self.lengths.kv_start_loc

    @property
    def token_start_loc(self) -> list[int]:
        """Return the first row of each sequence in ``query``, and the number of rows; length num_seqs + 1."""
        return self.lengths.token_start_loc

    def cpu(self) -> "Batch":
        """Return the batch with its tensors on the CPU; itself if they are there."""
        return on_device(self, "cpu")

    def new_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of key and value of the new tokens, in the order of ``query``.

        Each [num_tokens, num_kv_heads, head_size].
        """
        ends = self.kv_start_loc[1:]
        runs = [slice(end - n, end) for end, n in zip(ends, self.lengths.query_lens, strict=True)]
        key, value = (torch.cat([t[run] for run in runs]) for t in (self.key, self.value))
        return key, value


def make_batch(case: Case, device: str = "cpu") -> Batch:
    """Return the Case's batch on ``device``.

    The same Case gives the same bits with the same version of torch. The lengths equal those of vLLM's
    test. The data have the test's distribution but other values, because the test draws on a GPU.
    """
    lengths = case.lengths
    query_shape = (lengths.num_tokens, case.num_heads, case.head_size)
    kv_shape = (sum(lengths.seq_lens), case.num_kv_heads, case.head_size)
    query, key, value = _draw((query_shape, kv_shape, kv_shape), case, device)
    change_values(case.distribution, lengths, query, key, value)
    if case.spec.coarse:
        nearest = spanning if case.spec.writes_cache else coarse
        key, value = nearest(key), nearest(value)
    if "to_cache" in case.spec.rounding and case.kv_cache_dtype != "auto":
        query = coarse(query)  # which FP8 holds exactly
    return Batch(
        lengths=lengths,
        query=query,
        key=key,
        value=value,
        alibi_slopes=alibi_slopes(case.num_heads).to(device) if case.alibi else None,
        sinks=sink_logits(case.num_heads, case.seed).to(device) if case.sinks else None,
    )


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return the ALiBi slope of each head, [num_heads] float32 (Press et al. 2022, appendix).

    For a power of two, the slope of head h is 2^(-8 (h + 1) / num_heads). Otherwise the first slopes are
    those of the next lower power of two, the rest every second slope of the next higher one.
    """
    below = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    rest = [2.0 ** (-4 * (2 * h + 1) / below) for h in range(num_heads - below)]
    return torch.tensor(first + rest, dtype=torch.float32)


def sink_logits(num_heads: int, seed: int) -> torch.Tensor:
    """Return the logit of each query head's attention sink, [num_heads] float32.

    They are evenly spaced between 1 and 6, in an order drawn from ``seed``. So some are below and some
    above the largest score of N(0, 1) data at the usual scale, and neighbouring heads differ. Each is a
    bfloat16 number, the dtype that gpt-oss uses, so that a kernel may take bfloat16 or float32.
    """
    generator = torch.Generator().manual_seed((seed << 24) + (3 << 20))
    order = torch.randperm(num_heads, generator=generator)
    offset = torch.rand(1, generator=generator)
    low, high = SINK_RANGE
    logits = low + (high - low) * (order + offset) / num_heads
    return logits.to(torch.bfloat16).float()


def _draw(
    shapes: Sequence[tuple[int, int, int]], case: Case, device: str
) -> tuple[torch.Tensor, ...]:
    """Return a tensor of each shape on ``device``, drawn in float32 on the CPU and rounded to the dtype.

    Each chunk of a tensor has its own generator, so that the bits do not depend on the number of threads.
    All chunks of all tensors are drawn side by side, the longest first.
    """
    dtype = FORMATS[case.dtype].dtype
    drawn = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    chunks = [
        (chunk, (case.seed << 24) + (salt << 20) + i)
        for salt, tensor in enumerate(drawn)
        for i, chunk in enumerate(tensor.view(-1).split(_CHUNK))
    ]
    chunks.sort(key=lambda one: -len(one[0]))
    draw = partial(_draw_chunk, case.distribution)
    if sum(tensor.numel() for tensor in drawn) <= _FEW:
        list(starmap(draw, chunks))
        return drawn
    workers = min(len(chunks), os.cpu_count() or 1)
    with _one_thread_per_operation(), ThreadPoolExecutor(workers) as pool:
        list(pool.map(draw, *zip(*chunks, strict=True)))
    return drawn


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """Let torch's operations run in the thread that calls them: the cores have a worker each already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _draw_chunk(distribution: str, chunk: torch.Tensor, seed: int) -> None:
    """Draw a chunk, modifying it; in parts, so that the numbers stay in a core's cache.

    The parts do not change the numbers: torch draws them in order, normal ones 16 at a time, and the last
    part has at least 16 unless the chunk has fewer.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(min(len(chunk), 2 * _PART), dtype=torch.float32)
    on_cpu = chunk.device.type == "cpu"
    # Pinned memory is copied to a GPU faster, and torch keeps it for the next chunk.
    target = chunk if on_cpu else torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True)
    whole = max(0, len(chunk) // _PART - 1) * _PART
    for part in (*target[:whole].split(_PART), target[whole:]):
        drawn = numbers[: len(part)]
        if distribution == "uniform_1e-3":
            drawn.uniform_(-1e-3, 1e-3, generator=generator)
        else:
            drawn.normal_(generator=generator)
        part.copy_(drawn)
    if not on_cpu:
        chunk.copy_(target)


# Write tokens into a paged cache.
#
# Both cache tensors are transposes of the tokens. An element-wise transposed copy takes ten times as long
# as a plain copy. So whole blocks are copied in elements of up to 16 bytes, and only the values of a block
# are transposed element by element, while they are in the processor's cache. Tokens that do not fill a
# block are written by indexed assignment.

_CARRIERS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
MOST_COPIED = 1 << 24  # elements of a cache of which a diagnosis makes copies
_BLOCKS_AT_A_TIME = 16  # 8 MiB of float16 for 64 heads of 128: fits the last-level cache


def write_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write token ``rows[i]`` of ``new_key`` and ``new_value`` to slot ``slots[i]`` of the cache.

    - ``key``: [num_blocks, num_kv_heads, head_size / x, block_size, x], ``value``: [num_blocks,
      num_kv_heads, head_size, block_size]; both contiguous, both modified.
    - ``new_key``, ``new_value``: [tokens, num_kv_heads, head_size], of the dtypes of the cache.
    - ``rows``, ``slots``: [n] int64; a slot is block × block_size + offset; slots are unique.
    """
    block_size = value.shape[3]
    if key.device.type != "cpu":  # on a GPU, a transposed copy is as fast as a plain one
        _write_slots(key, value, new_key[rows], new_value[rows], slots)
        return
    begins = torch.nonzero(slots % block_size == 0).flatten()
    ends = begins + block_size - 1
    begins, ends = begins[ends < len(slots)], ends[ends < len(slots)]
    follows = (slots.diff() == 1) & (rows.diff() == 1)
    followed = torch.cat([torch.zeros(1, dtype=torch.int64), follows.cumsum(0)])
    whole = begins[followed[ends] - followed[begins] == block_size - 1]
    for first_row, blocks in _runs(rows[whole], slots[whole] // block_size, block_size):
        end = first_row + len(blocks) * block_size
        _write_key_blocks(key, blocks, new_key[first_row:end].unflatten(0, (-1, block_size)))
        _write_value_blocks(value, blocks, new_value[first_row:end].unflatten(0, (-1, block_size)))
    rest = torch.ones(len(slots), dtype=torch.bool)
    rest[(whole[:, None] + torch.arange(block_size)).flatten()] = False
    _write_slots(key, value, new_key[rows[rest]], new_value[rows[rest]], slots[rest])


def _write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write token i to ``slots[i]`` by indexed assignment; modifies ``key`` and ``value``."""
    blocks, offsets = slots // value.shape[3], slots % value.shape[3]
    chunked = new_key.unflatten(2, (key.shape[2], key.shape[4]))
    key.permute(0, 3, 1, 2, 4)[blocks, offsets] = chunked
    value.permute(0, 3, 1, 2)[blocks, offsets] = new_value


def _runs(
    first_rows: torch.Tensor, blocks: torch.Tensor, block_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, blocks) for at most _BLOCKS_AT_A_TIME blocks with consecutive rows."""
    breaks = torch.nonzero(first_rows.diff() != block_size).flatten() + 1
    for run_rows, run_blocks in zip(
        first_rows.tensor_split(breaks), blocks.tensor_split(breaks), strict=True
    ):
        for some_rows, some in zip(
            run_rows.split(_BLOCKS_AT_A_TIME), run_blocks.split(_BLOCKS_AT_A_TIME), strict=True
        ):
            if len(some):
                yield int(some_rows[0]), some


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with wider elements, each of several elements of ``tensor``'s last dimension."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    return tensor.view(next(dtype for size, dtype in _CARRIERS.items() if row_bytes % size == 0))


def _write_key_blocks(key: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write ``tokens`` [n, block_size, num_kv_heads, head_size] to ``blocks`` of ``key``, modifying it."""
    chunk = key.shape[4]
    # [n, block_size, heads, chunks, chunk / wide].
    wide = _widened(tokens.unflatten(3, (-1, chunk)))
    _widened(key)[blocks] = wide.permute(0, 2, 3, 1, 4)


def _write_value_blocks(value: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write ``tokens`` [n, block_size, num_kv_heads, head_size] to ``blocks`` of ``value``, modifying it."""
    block_size = tokens.shape[1]
    # [n, heads, wide elements, block_size]; contiguous() would not change the stride of a size-1 dimension
    wide = _widened(tokens).permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
    narrow = wide.view(tokens.dtype).unflatten(3, (block_size, -1))
    # [n, heads, wide elements, elements per wide element, block_size]
    transposed = narrow.transpose(3, 4).contiguous()
    _widened(value.flatten(1))[blocks] = _widened(transposed.flatten(1))


# Layouts of a paged cache outside the lab: which one two tensors have, and conversion to the lab's.
#
# =========  ====================================================================================
# x-split    key [num_blocks, num_kv_heads, head_size / x, block_size, x],
#            value [num_blocks, num_kv_heads, head_size, block_size]: vLLM's paged decode kernels
# flash      key and value [num_blocks, block_size, num_kv_heads, head_size]: FlashAttention,
#            unified attention, and vLLM's cache write
# HND        key and value [num_blocks, num_kv_heads, block_size, head_size]: FlashInfer
# =========  ====================================================================================
#
# A KernelCall has views of its cache in the layout x-split, whatever the layout in memory.

LAYOUTS = ("x-split", "flash", "HND")
_SHAPES = (
    "[num_blocks, num_kv_heads, head_size / x, block_size, x] or "
    "[num_blocks, block_size, num_kv_heads, head_size]"
)


def find_layout(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    num_kv_heads: int | None = None,
    min_block_size: int = 1,
) -> str:
    """Return the one layout of LAYOUTS that the shapes allow; raise InvalidCall if it is not one.

    - ``query``: [num_tokens, num_heads, head_size].
    - ``num_kv_heads``: the number of KV heads, if it is known.
    - ``min_block_size``: the smallest block size that gives the longest sequence enough slots.
    """
    _, num_heads, head_size = query.shape
    if key_cache.dim() == 5:
        return "x-split"
    if key_cache.dim() != 4 or key_cache.shape[3] != head_size:
        raise InvalidCall(
            f"key_cache must be {_SHAPES} with head_size {head_size}, got {tuple(key_cache.shape)}"
        )
    sizes = {"flash": key_cache.shape[1], "HND": key_cache.shape[2]}  # block size by layout
    heads = {"flash": key_cache.shape[2], "HND": key_cache.shape[1]}
    allowed = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    allowed = allowed if num_kv_heads is None else [num_kv_heads]
    found = [layout for layout, kv_heads in heads.items() if kv_heads in allowed]
    if len(found) > 1:
        found = [layout for layout in found if sizes[layout] >= min_block_size] or found
    shape = tuple(key_cache.shape)
    if not found:
        count = num_kv_heads or f"a divisor of {num_heads}"
        raise InvalidCall(f"key_cache must be {_SHAPES} with num_kv_heads {count}, got {shape}")
    if len(found) > 1:
        raise InvalidCall(
            f"layout must be given, {' or '.join(found)}: a key_cache of shape {shape} may be either"
        )
    return found[0]


def to_x_split(
    key_cache: torch.Tensor, value_cache: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a cache in the layout x-split.

    x is 16 bytes of elements, or the largest smaller power of two that divides head_size. Values may have
    another width than keys. Raises InvalidCall if the two shapes do not fit ``layout``.
    """
    if layout == "x-split":
        return key_cache, value_cache
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[:3] != key_cache.shape[:3]:
            expected = tuple(key_cache.shape) if key_cache.dim() == 4 else "of 4 dimensions"
            text = f"{name} must be {expected} in layout {layout}, got {tuple(cache.shape)}"
            raise InvalidCall(text)
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    x = math.gcd(16 // key_cache.element_size(), key_cache.shape[3]) or 1
    key = key_cache.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4)
    return key, value_cache.permute(0, 2, 3, 1)


def in_layout(
    key_cache: torch.Tensor, value_cache: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an x-split cache in another layout: views of the same shape and strides as before
    :func:`to_x_split`; copies if the cache was not made by it."""
    if layout == "x-split":
        return key_cache, value_cache
    key, value = key_cache.permute(0, 3, 1, 2, 4).flatten(3), value_cache.permute(0, 3, 1, 2)
    return (key, value) if layout == "flash" else (key.transpose(1, 2), value.transpose(1, 2))


NOBODY = -1
_PATTERN = (1 << 20) + 7  # period of garbage in elements; no multiple of a block or head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Provenance(Shown):
    """Which token each slot of a cache holds, and which blocks each sequence owns.

    - ``seq``, ``pos``: [num_blocks, block_size] int32, the sequence and position whose token a slot
      holds, or NOBODY if it was never written.
    - ``block_table``: [num_seqs, max_blocks_per_seq] int64, the intended block table.
    """

    seq: torch.Tensor
    pos: torch.Tensor
    block_table: torch.Tensor

    def slot(self, seq: int, pos: int) -> tuple[int, int]:
        """Return (block, offset) of a sequence's position."""
        block_size = self.seq.shape[1]
        return int(self.block_table[seq, pos // block_size]), pos % block_size


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False, repr=False)
class PagedCache(Shown):
    """A paged KV cache in the layout of vLLM's paged decode kernels.

    - ``key``: [num_blocks, num_kv_heads, head_size / x, block_size, x]
    - ``value``: [num_blocks, num_kv_heads, head_size, block_size]; if the Case has ``interleave_v``, in
      the order of :func:`interleaved`.

    Both have the dtype ``format.storage``. :meth:`to_flash` returns vLLM's other layout.
    """

    key: torch.Tensor
    value: torch.Tensor
    format: ElementFormat
    k_scale: float
    v_scale: float
    provenance: Provenance

    def to_flash(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of key and value as :func:`to_flash` does; values must not be interleaved."""
        return to_flash(self.key, self.value)


def interleaved(value: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Return a value cache of the same shape with the slots of a block in packs of 16 bytes.

    ``value``: [..., head_size, block_size]. The memory of an interleaved block is [block_size / x,
    head_size, x], AITER's layout on ROCm (vllm/v1/attention/ops/prefix_prefill.py, vLLM 0.33.0). With
    ``back`` the packs are undone.
    """
    *blocks, head_size, block_size = value.shape
    x = 16 // value.element_size()
    shape = (block_size // x, head_size, x) if back else (head_size, block_size // x, x)
    return value.view(*blocks, *shape).transpose(-3, -2).reshape(value.shape)


def untouched(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return zeros that take no memory on a CPU until they are written.

    NumPy gets zeroed pages from the operating system, torch would write the zeros. On a GPU the tensor
    takes all its memory. Raises Unavailable if the address space is not available.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        zeros = np.zeros(size, dtype=np.uint8)
    except MemoryError as error:
        text = f"{size / 2**30:.1f} GiB of address space, although little of it would be used"
        raise Unavailable(f"this machine cannot provide {text}") from error
    return torch.from_numpy(zeros).view(dtype).view(shape)


def after_untouched(
    key: torch.Tensor, value: torch.Tensor, first_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of key and value with ``first_block`` more blocks before theirs.

    On a CPU these are :func:`untouched` zeros. On a GPU they would take memory, so key and value share
    them (:func:`in_one_buffer`).
    """
    if key.device.type != "cpu":
        return in_one_buffer(key, value, first_block)
    blocks = first_block + len(key)
    longer = [untouched((blocks, *part.shape[1:]), part.dtype) for part in (key, value)]
    longer[0][first_block:], longer[1][first_block:] = key, value
    return longer[0], longer[1]


def in_one_buffer(
    key: torch.Tensor, value: torch.Tensor, first_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of key and value after ``first_block`` blocks that both share.

    In one buffer the value's blocks follow the key's, and the value begins as much later. With offsets
    beyond 2^31 elements of float16 the two take 4 GiB, not 8. The shared blocks hold zeros or keys.
    """
    blocks, size, before = first_block + len(key), key.numel(), first_block * key[0].numel()
    buffer = torch.zeros(before + 2 * size, dtype=key.dtype, device=key.device)
    longer_key = buffer[: before + size].view(blocks, *key.shape[1:])
    longer_value = buffer[size:].view(blocks, *value.shape[1:])
    longer_key[first_block:], longer_value[first_block:] = key, value
    return longer_key, longer_value


def to_flash(
    key: torch.Tensor, value: torch.Tensor, first_block: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of key and value, both [num_blocks, block_size, num_kv_heads, head_size].

    This is the layout of FlashAttention, unified attention and the cache write. Blocks before
    ``first_block`` are not copied; they are :func:`untouched` zeros.
    """
    if first_block:
        used = to_flash(key[first_block:], value[first_block:])
        return after_untouched(*used, first_block)
    flash_key, flash_value = as_flash(key, value)
    return flash_key.contiguous(), flash_value.contiguous()


def as_flash(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value as :func:`to_flash` does, but as views where the strides allow it."""
    return key.permute(0, 3, 1, 2, 4).flatten(3, 4), value.permute(0, 3, 1, 2)


def freed_blocks(case: Case) -> list[int]:
    """Return how many blocks of each sequence are entirely before the window of its first new token.

    vLLM frees them because no row attends to them, but leaves them in the worker's block table
    (get_num_skipped_tokens, vllm/v1/core/single_type_kv_cache_manager.py, vLLM 0.33.0).
    """
    if case.freed == "kept":
        return [0] * len(case.lengths.ctx_lens)
    window, size = case.sliding_window, case.block_size
    return [max(0, ctx_len - window + 1) // size for ctx_len in case.lengths.ctx_lens]


def make_block_table(case: Case) -> torch.Tensor:
    """Return the Case's block table, int64: given, or with blocks in random order.

    If freed blocks are recycled, their entries are the last block of the next sequence.
    """
    table = _dealt_blocks(case)
    if case.freed == "recycled":
        last = [(seq_len - 1) // case.block_size for seq_len in case.lengths.seq_lens]
        for seq, count in enumerate(freed_blocks(case)):
            after = (seq + 1) % len(last)
            table[seq, :count] = table[after, last[after]].clone()
    return table


def _dealt_blocks(case: Case) -> torch.Tensor:
    """Return the block table before blocks are freed."""
    if case.block_table is not None:
        return torch.tensor(case.block_table)
    num_seqs = len(case.lengths.query_lens)
    generator = torch.Generator().manual_seed(case.seed + 1)
    blocks = torch.randperm(case.total_blocks - case.first_block, generator=generator)
    blocks += case.first_block
    return blocks[: num_seqs * case.blocks_per_seq].view(num_seqs, case.blocks_per_seq)


def make_cache(case: Case, batch: Batch) -> PagedCache:
    """Return the Case's cache on the batch's device; its provenance is on the CPU.

    It holds the tokens of the Case's fill policy. All other slots hold ``case.empty_slots``.
    """
    format = written_format(case)
    block_table = make_block_table(case)
    chunks = case.head_size // case.key_x
    head = (case.total_blocks - case.first_block, case.num_kv_heads)
    device = batch.key.device
    key = _empty((*head, chunks, case.block_size, case.key_x), format, case, 2, device)
    value = _empty((*head, case.head_size, case.block_size), format, case, 3, device)
    if case.first_block:
        key, value = after_untouched(key, value, case.first_block)
    lens = batch.lengths.cached_lens(case.staging.fill)
    begins = [count * case.block_size for count in freed_blocks(case)]
    rows, slots, provenance = _kept_addresses(
        tuple(batch.kv_start_loc),
        lens,
        block_table.numpy().tobytes(),
        tuple(block_table.shape),
        key.shape[0],
        case.block_size,
        tuple(begins),
        str(device),
    )
    new_key = store(case, batch.key, case.k_scale)
    new_value = store(case, batch.value, case.v_scale)
    write_tokens(key, value, new_key, new_value, rows, slots)
    value = interleaved(value) if case.interleave_v else value
    return PagedCache(
        key=key,
        value=value,
        format=format,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        provenance=copy.deepcopy(provenance),
    )


def with_empty_slots(cache: PagedCache, case: Case) -> PagedCache:
    """Return a copy of a cache whose slots without a token hold ``case.empty_slots``."""
    owned = (cache.provenance.seq != NOBODY).to(cache.key.device)
    plain = interleaved(cache.value, back=True) if case.interleave_v else cache.value
    key = _empty(tuple(cache.key.shape), cache.format, case, 2, cache.key.device)
    value = _empty(tuple(plain.shape), cache.format, case, 3, plain.device)
    key = torch.where(owned[:, None, None, :, None], cache.key, key)
    value = torch.where(owned[:, None, None, :], plain, value)
    value = interleaved(value) if case.interleave_v else value
    return dataclasses.replace(cache, key=key, value=value)


@lru_cache(maxsize=2)
def _kept_addresses(
    kv_start_loc: tuple[int, ...],
    lens: tuple[int, ...],
    block_table: bytes,
    table_shape: tuple[int, ...],
    num_blocks: int,
    block_size: int,
    begins: tuple[int, ...],
    device: str,
) -> tuple[torch.Tensor, torch.Tensor, Provenance]:
    """Return what :func:`addresses` does, rows and slots on ``device``; caches share them.

    The element formats of a matrix of tests, for example, have the same addresses. ``block_table``: bytes.
    """
    table = torch.from_numpy(np.frombuffer(block_table, np.int64).reshape(table_shape).copy())
    rows, slots, provenance = addresses(kv_start_loc, lens, table, num_blocks, block_size, begins)
    return rows.to(device), slots.to(device), provenance


def addresses(
    kv_start_loc: Sequence[int],
    lens: tuple[int, ...],
    block_table: torch.Tensor,
    num_blocks: int,
    block_size: int,
    begins: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, Provenance]:
    """Return rows, slots and provenance of the tokens that are written to a cache.

    ``kv_start_loc``: the first row of each sequence in ``batch.key``. Rows are those of ``batch.key``; a
    slot is block × block_size + offset; both [n] int64. Of each sequence the positions from ``begins``
    (default 0) to ``lens`` are written.
    """
    counts = torch.tensor(lens)
    seq = torch.repeat_interleave(torch.arange(len(lens)), counts)
    pos = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[seq]
    if any(begins):
        kept = pos >= torch.tensor(begins)[seq]
        seq, pos = seq[kept], pos[kept]
    slots = block_table[seq, pos // block_size] * block_size + pos % block_size
    owner = torch.full((2, num_blocks * block_size), NOBODY, dtype=torch.int32)
    owner[0, slots], owner[1, slots] = seq.int(), pos.int()
    provenance = Provenance(
        seq=owner[0].view(num_blocks, block_size),
        pos=owner[1].view(num_blocks, block_size),
        block_table=block_table,
    )
    return torch.tensor(kv_start_loc)[seq] + pos, slots, provenance


def _empty(
    shape: tuple[int, ...], format: ElementFormat, case: Case, salt: int, device: torch.device
) -> torch.Tensor:
    """Return a cache tensor filled with zeros, NaN or finite garbage, as ``case.empty_slots`` says."""
    if case.empty_slots == "zeros":
        return untouched(shape, format.storage, device)
    if case.empty_slots == "nan":
        return torch.empty(shape, dtype=format.storage, device=device).fill_(format.nan)
    return format.encode(garbage(shape, seed=case.seed + salt, device=device))


def garbage(shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return numbers as recycled memory may hold them: float16 with 0.5 ≤ |number| < 2.

    They are finite, so that no NaN reveals them, and never small, so that no element is right by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape)
    bits = torch.empty(min(size, _PATTERN), dtype=torch.int16)
    bits.random_(-(2**15), 2**15, generator=generator)
    # IEEE binary16: keep the sign, the fraction and the exponent's last bit; set the rest to 0111x.
    numbers = (bits & -0x7801 | 0x3800).view(torch.float16)
    numbers = numbers.to(device)
    return numbers.repeat(-(-size // max(1, len(numbers))))[:size].view(shape)
