"""Runs of notebooks 02 and 03 beyond a Lab's: FP8 values, a given output, vLLM's own Triton kernels."""

from dataclasses import dataclass, field

import torch

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.lab import Lab
from attnlab.lab.result import ErrorMap, Result
from attnlab.tensors.formats import FORMATS

FP8_FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")


def fp8_values(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the values of bytes, [n] uint8, in each FP8 format, [n] float."""
    return {name: FORMATS[name].decode(codes) for name in FP8_FORMATS}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealKernels:
    """What vLLM's own Triton kernels gave.

    ``errors`` by fill, of the decode sequence at least; ``whole`` is the ErrorMap of all rows with the fill
    of the test, None if nothing ran; ``reason`` states why.
    """

    errors: dict[str, ErrorMap] = field(default_factory=dict)
    whole: ErrorMap | None = None
    backend: str = ""
    reason: str = ""
    results: tuple[Result, ...] = ()


def real_kernels(lab: Lab, case: Case, source: str | None) -> RealKernels:
    """Run a Case on vLLM's Triton kernels, and its decode sequence with a complete fill of the cache.

    Without a vLLM nothing runs, and ``reason`` states why.
    """
    try:
        vllm = find_source(source)
    except Unavailable as error:
        return RealKernels(reason=str(error))
    real = case.replace(backend="vllm", platform="sm_90", release=vllm.rules or case.release)
    real = real.replace(sm_scale=case.head_size**-0.5)
    last = len(case.lengths.query_lens) - 1
    whole = lab.run(real)
    decode = lab.run(real.replace(fill="all_rows", seq_range=(last, last + 1)))
    errors = {
        fill: result.errors
        for fill, result in (("context_only", whole), ("all_rows", decode))
        if result.errors is not None
    }
    return RealKernels(
        errors=errors, whole=whole.errors, backend=whole.backend, results=(whole, decode)
    )
