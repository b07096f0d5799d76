"""Diagnose an output of a Case that a file holds."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.kernel_trials import FULL
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall
from attnlab.tensors.call_file import is_call_file


def diagnose_file(case: Case, lab: Lab, output: Path | None, *, locate: bool = True) -> Diagnosis:
    """Diagnose the output in a file, or else the Case's own run.

    ``locate``: look for the source lines of a fault of the run.
    Raises InvalidCall if the file does not hold what it should.
    """
    if output is not None:
        return diagnose(case, load_output(output), lab=lab)
    return diagnose(case, lab=lab, limit=FULL if locate else None)


def load_output(path: Path) -> torch.Tensor:
    """Load the tensor "output" from a safetensors file, or the output of a saved call."""
    if is_call_file(path):
        return KernelCall.load(path).buffer
    try:
        with safe_open(path, framework="pt") as file:
            output: torch.Tensor = file.get_tensor("output")
    except (OSError, SafetensorError) as error:
        raise InvalidCall(
            f"{path} must be a safetensors file with a tensor output: {error}"
        ) from error
    return output
