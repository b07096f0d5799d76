"""The part of ``import attnlab`` that finds violations and diagnoses."""

from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case, as_case
from attnlab.case.fields import refuse
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import Violations, find_violations
from attnlab.diagnosis import diagnose as diagnosing
from attnlab.diagnosis.captured import diagnose_captured, violations_of_captured
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.location.trials import FULL
from attnlab.kernels.runner import one_backend
from attnlab.lab.lab import Lab
from attnlab.lab.run import default_lab
from attnlab.tensors.call import KernelCall


def diagnose(
    case: Case | KernelCall | str,
    output: torch.Tensor | None = None,
    *,
    lab: Lab | None = None,
    source: Path | str | None = None,
    device: str | None = None,
    locate: bool = True,
    **changes: Any,
) -> Diagnosis:
    """Return which defect explains the output of a Case, of a pytest id's Case, or of a KernelCall.

    - ``output``: [num_tokens, num_heads, head_size]. Default: a Case is run; of a KernelCall it is the
      content of its output buffer.
    - ``source``, ``device``: of a KernelCall, the vLLM that computed it and where it runs, as for
      :func:`attnlab.shrink_call`; ``backend``, one of the changes, is another kernel, such as "mine.py:fn".
      Without them nothing is run, and the report states what is left out. A Case runs in its ``lab``.
    - ``locate``: of a KernelCall with a kernel, look for the source lines, which may take half a minute.
    - ``changes``: fields of the Case. For a KernelCall they name where it ran, for example
      ``platform="sm_90"`` or ``release="0.11.2"``. Default: the call's origin.

    Raises InvalidCall for an output of another shape or dtype.
    """
    if isinstance(case, KernelCall):
        runner = one_backend(source, changes.pop("backend", None), device)
        limit = FULL if locate else None
        return diagnose_captured(
            case, Case(**changes), given=changes, output=output, runner=runner, limit=limit
        )
    for name, value in (("source", source), ("device", device)):
        if value is not None:
            refuse(name, "none for a Case, which runs in its lab", value)
    return diagnosing.diagnose(as_case(case, **changes), output, lab=lab or default_lab())


def violations(
    case: Case | KernelCall | str, *, lab: Lab | None = None, **changes: Any
) -> Violations:
    """Return where a call violates the contracts of its kernels, without running them.

    ``changes`` are as for :func:`diagnose`. Of a KernelCall it is not known which slots are written, so
    violations that concern them are not found.
    """
    if isinstance(case, KernelCall):
        return violations_of_captured(case, Case(**changes), given=changes)
    case, lab = as_case(case, **changes), lab or default_lab()
    provenance = lab.cache(case).provenance
    return find_violations(lab.call(case), Target.of(case), decide(case).kernels, provenance)
