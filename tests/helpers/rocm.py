"""Run the ROCm kernel's source on the emulated device."""

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.rocm.device import PLAIN, DeviceOptions
from attnlab.kernels.vllm.source import Source
from attnlab.tensors.call import KernelCall
from helpers.cases import call_of


def real(case: Case, source: Source, how: DeviceOptions = PLAIN) -> KernelCall:
    """Return the call after csrc/rocm's kernel ran."""
    call, _ = call_of(case)
    rocm_source.run(call, Target.of(case), source, how)
    return call
