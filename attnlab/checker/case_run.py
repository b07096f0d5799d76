"""Run one Case on the backend that is checked."""

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlab.case.case import Case
from attnlab.case.errors import (
    DeviceLost,
    KernelFailed,
    KernelRejected,
    OutOfMemory,
    Unavailable,
    Unsupported,
)
from attnlab.case.op_arguments import NONE
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab
from attnlab.lab.reads import MemoryReport
from attnlab.lab.result import Result

# Texts of CUDA and cuBLAS after which nothing runs any more in the process.
_BROKEN_CONTEXT = re.compile(
    r"illegal|misaligned|launch failure|device-side assert|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL)"
)
_NO_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseRun:
    """What a run of a Case gave, with all tensors on the CPU. The fields are those of a Result.

    It does not keep the cache, which may be large on a GPU.
    """

    output: torch.Tensor
    lse: torch.Tensor | None
    padded: torch.Tensor | None
    memory: MemoryReport | None
    wraps: tuple[str, ...]
    outside: tuple[str, ...]
    launches: tuple[str, ...] = ()


def run_case(lab: Lab, backend: Backend, case: Case, *, trace_reads: bool = False) -> CaseRun:
    """Run a Case on the backend, whatever backend it names.

    ``lab`` runs on the CPU; a backend on a GPU has a Lab of its own. ``trace_reads`` records which slots are
    read, if the backend can.

    Raises KernelRejected or KernelFailed with what the kernel raises, Unsupported for a limit that the
    kernel states itself, DeviceLost if the kernel broke the GPU's context.
    """
    case = case if case.backend == backend.name else case.replace(backend=backend.name)
    if backend.device == "cuda":
        result = _run_native((_far_lab if case.first_block else _gpu_lab)(backend), case)
    else:
        is_plain = not case.first_block and case.op_argument == NONE
        trace = trace_reads and backend.traces_reads and is_plain
        result = lab.run(case.replace(trace_reads=trace))
    if result.error is not None and result.failed:
        raise KernelFailed(result.error)
    if result.error is not None and backend.states_limits:
        raise Unsupported(f"the kernel rejects a case: {result.error}")
    if result.error is not None:
        raise KernelRejected(result.error)
    return CaseRun(
        output=result.output.cpu(),
        lse=None if result.lse is None else result.lse.cpu(),
        padded=None if result.padded is None else result.padded.cpu(),
        memory=result.memory,
        launches=result.launches,
        wraps=result.wraps,
        outside=result.outside,
    )


def release_memory() -> None:
    """Free the large caches that a run on a GPU has left for the next run of the same case."""
    _far_lab.cache_clear()


def _run_native(lab: Lab, case: Case) -> Result:
    """Run a Case on the GPU.

    Raises DeviceLost if its kernel broke the GPU's context. The error may surface in the op, in later work
    of the lab, or at Triton's next launch.
    """
    try:
        result = lab.run(case)
        result.output.cpu()  # waits for the kernels
    except (RuntimeError, Unavailable) as error:
        if _NO_MEMORY.search(str(error)):
            raise OutOfMemory(str(error).splitlines()[0]) from error
        if isinstance(error, torch.AcceleratorError) or _BROKEN_CONTEXT.search(str(error)):
            raise DeviceLost(str(error).splitlines()[0]) from error
        raise
    if _BROKEN_CONTEXT.search(str(result.error)):
        raise DeviceLost(str(result.error).splitlines()[0])
    return result


@lru_cache(maxsize=2)
def _gpu_lab(backend: Backend) -> Lab:
    """Return the Lab that runs the backend on the GPU; a Lab on the CPU compares its outputs."""
    return lab_of(backend, "cuda")


@lru_cache(maxsize=1)
def _far_lab(backend: Backend) -> Lab:
    """Return the Lab for blocks beyond 2^31 elements, which keeps only the last of such caches."""
    return lab_of(backend, "cuda", keep=1)


def lab_of(backend: Backend, device: str, keep: int = 3) -> Lab:
    """Return a Lab whose tensors are on a device, with the given backend if that runs there."""
    is_native = backend.device == "cuda"
    lab = Lab(source=backend.path, device=device, keep=keep, is_native=is_native)
    if backend.device == device:
        lab.shared.get("backend", backend.name, lambda: backend)
    return lab
