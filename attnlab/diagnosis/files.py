"""Diagnose what files hold: an output of a Case, or a saved call."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.diagnosis.diagnose import diagnose, diagnose_call
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall


def diagnose_files(case: Case, lab: Lab, output: Path | None, call: Path | None) -> Diagnosis:
    """Diagnose the saved call, or else the output in a file, or else the Case's own run.

    Raises InvalidCall if a file does not hold what it should.
    """
    if call is not None:
        saved_call = KernelCall.load(call)
        return diagnose_call(saved_call, Target.of(case), kernels_of(case, saved_call))
    if output is not None:
        return diagnose(case, load_output(output), lab=lab)
    return diagnose(case, lab=lab)


def load_output(path: Path) -> torch.Tensor:
    """Load the tensor "output" from a safetensors file; a saved call has one, too."""
    try:
        with safe_open(path, framework="pt") as file:
            output: torch.Tensor = file.get_tensor("output")
    except (OSError, SafetensorError) as error:
        raise InvalidCall(
            f"{path} must be a safetensors file with a tensor output: {error}"
        ) from error
    return output
