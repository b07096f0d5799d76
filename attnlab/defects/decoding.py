"""Defects in decoding the cache's FP8 bytes: their format and scales."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlab.defects.cache_read import CacheRead
from attnlab.defects.defect import ChangeCacheRead, Defect, changing_cache_read
from attnlab.defects.problem import Problem
from attnlab.tensors.formats import FORMATS


def _decoding(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    change: ChangeCacheRead,
    applies: Callable[[Problem], bool],
) -> Defect:
    return Defect(
        name=name,
        family="decoding",
        text=text,
        seen_in=seen_in,
        touches="cached",
        compute=changing_cache_read(change),
        applies=lambda problem: (
            any(problem.cached_len(seq) > 0 for seq in range(problem.num_seqs)) and applies(problem)
        ),
    )


def _same_scales(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Answer whether scales are equal, numbers or tensors."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def _scales(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    scales: Callable[[Any, Any], tuple[Any, Any]],
) -> Defect:
    """Return the defect of wrong scales; ``scales`` maps (k_scale, v_scale) to the wrong ones."""

    def change(problem: Problem, seq: int, cache_read: CacheRead) -> CacheRead:
        k_scale, v_scale = scales(cache_read.k_scale, cache_read.v_scale)
        return dataclasses.replace(cache_read, k_scale=k_scale, v_scale=v_scale)

    def applies(problem: Problem) -> bool:
        correct = (problem.call.k_scale, problem.call.v_scale)
        return problem.written.is_fp8 and not _same_scales(scales(*correct), correct)

    return _decoding(name, text, seen_in, change, applies)


def _format(name: str, seen_in: tuple[str, ...]) -> Defect:
    """Return the defect of bytes decoded as FP8 format ``name``."""
    return _decoding(
        f"read_as_{name}",
        f"the cache's bytes are decoded as {name}, but were written in another format",
        seen_in,
        lambda problem, seq, cache_read: dataclasses.replace(cache_read, format=FORMATS[name]),
        lambda problem: problem.written.is_fp8 and problem.written.name != name,
    )


DECODING = (
    _scales(
        "k_scale_ignored",
        "k_scale is not applied",
        ("flashinfer #1023", "sglang #20705"),
        lambda k, v: (1.0, v),
    ),
    _scales(
        "v_scale_ignored",
        "v_scale is not applied",
        ("flashinfer #1023", "flashinfer #4979"),
        lambda k, v: (k, 1.0),
    ),
    _scales(
        "scales_swapped",
        "k_scale and v_scale are exchanged",
        ("vllm #41343",),
        lambda k, v: (v, k),
    ),
    _scales(
        "k_scale_squared", "k_scale is applied twice", ("vllm #41343",), lambda k, v: (k * k, v)
    ),
    _scales(
        "v_scale_squared", "v_scale is applied twice", ("vllm #41343",), lambda k, v: (k, v * v)
    ),
    _scales(
        "k_scale_is_v_scale",
        "keys are multiplied by v_scale",
        ("sglang #26852",),
        lambda k, v: (v, v),
    ),
    _scales(
        "v_scale_is_k_scale",
        "values are multiplied by k_scale",
        ("sglang #26852",),
        lambda k, v: (k, k),
    ),
    _format("fp8_e4m3fn", ("vllm #45562", "vllm #45720")),
    _format("fp8_e4m3fnuz", ("vllm #45562",)),
    _format("fp8_e5m2", ("vllm #45720",)),
)
