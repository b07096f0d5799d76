"""Batch: ragged sequences with their query, key and value."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths
from attnlab.case.shown import Shown
from attnlab.tensors.formats import FORMATS, coarse, spanning

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


SINK_RANGE = (1.0, 6.0)
_CHUNK = 1 << 22  # elements that one generator draws
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
        if self.query.device.type == "cpu":
            return self
        return Batch(
            lengths=self.lengths,
            query=self.query.cpu(),
            key=self.key.cpu(),
            value=self.value.cpu(),
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes.cpu(),
            sinks=None if self.sinks is None else self.sinks.cpu(),
        )

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
    workers = min(len(chunks), os.cpu_count() or 1)
    with _one_thread_per_operation(), ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda one: _draw_chunk(one[0], one[1], case.distribution), chunks))
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


def _draw_chunk(chunk: torch.Tensor, seed: int, distribution: str) -> None:
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
