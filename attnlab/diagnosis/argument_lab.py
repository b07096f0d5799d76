"""ArgumentLab: a Lab whose kernels get an op argument that changes no number, so that all else is plain."""

import dataclasses

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.kernels.backend import RunOutput
from attnlab.lab.argument_reference import reference_with_argument
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall

_SAME = 1e-6  # of two references in float64
_ROUNDED = ("fp8_output",)  # the reference is that of the plain Case, before it is rounded


@dataclasses.dataclass(slots=True)
class ArgumentLab(Lab):
    """A lab that runs Cases without an op argument with ``op_argument``."""

    op_argument: str = NONE

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        return Lab._run_kernels(self, case.replace(op_argument=self.op_argument), call)


def argument_lab(lab: Lab, case: Case) -> ArgumentLab | None:
    """Return the lab in which the Case without its op argument runs with it.

    None if the argument changes the right output or its rounding, as formats and masks do.
    """
    if case.op_argument in _ROUNDED:
        return None
    expected = reference_with_argument(case, lab.batch(case)).output
    plain = lab.reference(case.replace(op_argument=NONE))
    if not torch.allclose(expected, plain, rtol=_SAME, atol=_SAME, equal_nan=True):
        return None
    given = {one.name: getattr(lab, one.name) for one in dataclasses.fields(Lab) if one.init}
    return ArgumentLab(**given, op_argument=case.op_argument)
