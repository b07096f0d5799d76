"""Run one Case on the backend that is checked."""

import dataclasses
import re
from functools import lru_cache

import torch

from attnlab.case.case import Case
from attnlab.case.errors import DeviceLost, KernelFailed, KernelRejected, Unavailable
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result

_BROKEN_CONTEXT = re.compile(r"illegal|misaligned|launch failure|device-side assert")  # by CUDA


def run_case(lab: Lab, backend: Backend, case: Case, *, trace_reads: bool = False) -> Result:
    """Run a Case on the backend, whatever backend it names, and return its Result, tensors on the CPU.

    ``lab`` runs on the CPU; a backend on a GPU has a Lab of its own. ``trace_reads`` records which slots are
    read, if the backend can.

    Raises KernelRejected or KernelFailed with what the kernel raises, Unavailable for a limit that the
    kernel states itself, DeviceLost if the kernel broke the GPU's context.
    """
    case = case if case.backend == backend.name else case.replace(backend=backend.name)
    if backend.device == "cuda":
        result = _on_cpu(_run_native(_gpu_lab(backend), case))
    else:
        trace = trace_reads and backend.traces_reads and not case.first_block
        result = lab.run(case.replace(trace_reads=trace))
    if result.error is None:
        return result
    if result.failed:
        raise KernelFailed(result.error)
    if backend.states_limits:
        raise Unavailable(f"the kernel rejects a case: {result.error}")
    raise KernelRejected(result.error)


def _run_native(lab: Lab, case: Case) -> Result:
    """Run a Case on the GPU.

    Raises DeviceLost if its kernel broke the GPU's context. The error may surface in the op, in later work
    of the lab, or at Triton's next launch.
    """
    try:
        result = lab.run(case)
        result.output.cpu()  # waits for the kernels
    except (torch.AcceleratorError, Unavailable) as error:
        if isinstance(error, Unavailable) and not _BROKEN_CONTEXT.search(str(error)):
            raise
        raise DeviceLost(str(error).splitlines()[0]) from error
    if _BROKEN_CONTEXT.search(str(result.error)):
        raise DeviceLost(str(result.error).splitlines()[0])
    return result


def _on_cpu(result: Result) -> Result:
    """Return a Result with its output, LSE and padded rows on the CPU."""
    return dataclasses.replace(
        result,
        call=dataclasses.replace(result.call, output=result.output.cpu()),
        lse=None if result.lse is None else result.lse.cpu(),
        padded=None if result.padded is None else result.padded.cpu(),
    )


@lru_cache(maxsize=2)
def _gpu_lab(backend: Backend) -> Lab:
    """Return the Lab that runs the backend on the GPU; a Lab on the CPU compares its outputs."""
    return Lab(source=backend.path, device="cuda", keep=3)
