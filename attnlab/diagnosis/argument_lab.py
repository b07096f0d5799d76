"""ArgumentLab: a Lab whose kernels get an op argument that changes no number, so that all else is plain.

An argument may change how the output is rounded.
"""

import dataclasses

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.kernels.backend import RunOutput
from attnlab.lab.argument_reference import reference_with_argument
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import PagedCache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.op_argument_data import OUTPUT_SCALE

_SAME = 1e-6  # of two references in float64
FP8_OUTPUT = "fp8_output"  # its reference is that of the plain Case, before it is rounded


@dataclasses.dataclass(slots=True)
class ArgumentLab(Lab):
    """A lab that runs Cases without an op argument with ``op_argument``.

    With an FP8 output, its calls have the output scale, from which the rounding follows.
    """

    op_argument: str = NONE

    def call(self, case: Case, cache: PagedCache | None = None) -> KernelCall:
        """Return the Case's call with a new output buffer; ``cache`` replaces the Case's."""
        call = Lab.call(self, case, cache)
        if self.op_argument != FP8_OUTPUT:
            return call
        return dataclasses.replace(call, output_scale=OUTPUT_SCALE)

    def _bound(self, case: Case, call: KernelCall) -> torch.Tensor:
        """Return the rounding bound of each element, with that of an FP8 output."""
        if self.op_argument != FP8_OUTPUT or case.backend == "model":  # which takes no argument
            return Lab._bound(self, case, call)
        plain = dataclasses.replace(call, output_scale=None)
        return Lab._bound(self, case.replace(op_argument=FP8_OUTPUT), plain)

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        plain = dataclasses.replace(call, output_scale=None)  # the op argument passes the scale
        return Lab._run_kernels(self, case.replace(op_argument=self.op_argument), plain)


def argument_lab(lab: Lab, case: Case) -> ArgumentLab | None:
    """Return the lab in which the Case without its op argument runs with it.

    None if the argument changes the right output or its rounding, as formats and masks do.
    """
    if case.op_argument == FP8_OUTPUT:
        return None
    expected = reference_with_argument(case, lab.batch(case)).output
    plain = lab.reference(case.replace(op_argument=NONE))
    if not torch.allclose(expected, plain, rtol=_SAME, atol=_SAME, equal_nan=True):
        return None
    return _lab_with(lab, case.op_argument)


def coarse_lab(lab: Lab, case: Case) -> ArgumentLab | None:
    """Return the lab in which the Case without its op argument runs with it, if that is an FP8 output."""
    return _lab_with(lab, FP8_OUTPUT) if case.op_argument == FP8_OUTPUT else None


def _lab_with(lab: Lab, op_argument: str) -> ArgumentLab:
    given = {one.name: getattr(lab, one.name) for one in dataclasses.fields(Lab) if one.init}
    return ArgumentLab(**given, op_argument=op_argument)
