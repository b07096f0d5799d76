"""Run an MlaCase: by ops and exactly, compare each step, and name the fault that explains a wrong output."""

import time

import torch

from attnlab.case.fields import refuse
from attnlab.mla.arithmetic import Exact, Observed
from attnlab.mla.fault import SOUND, Fault
from attnlab.mla.faults import MLA_FAULTS, faults_of
from attnlab.mla.inputs import Inputs, make_inputs
from attnlab.mla.mla_case import DECODE, MlaCase
from attnlab.mla.mla_result import MlaResult, StepResult, compared
from attnlab.mla.ops import MlaOps, ModelOps
from attnlab.mla.partial import Partial
from attnlab.mla.paths import walk


def run_path(
    case: MlaCase, ops: MlaOps | None = None, fault: str | None = None, *, explain: bool = True
) -> MlaResult:
    """Run a case by ``ops``, models by default, with a fault planted if one is named.

    ``explain``: search the fault that explains a wrong output. Raises InvalidCase for a fault that cannot
    change the case's output, and Unavailable or KernelRejected if an op cannot run.
    """
    planted = planted_fault(case, fault)
    began = time.perf_counter()
    inputs = make_inputs(case)
    backend = ops or ModelOps()
    observed = walk(case, inputs, Observed(case, backend), planted)
    exact = walk(case, inputs, Exact(case))
    is_alone = case.path == DECODE  # its LSE is a result
    by_name = {one.name: one.result for one in exact}
    steps = tuple(
        StepResult(
            name=one.name,
            kind=one.kind,
            result=one.result,
            exact=by_name[one.name],
            ratio=compared(
                one.result, by_name[one.name], with_lse=one is not observed[-1] or is_alone
            ),
        )
        for one in observed
    )
    found: tuple[str, ...] = ()
    if explain and not steps[-1].is_right:
        found = explanations(case, inputs, steps[-1].result)
    return MlaResult(
        case=case,
        ops=backend.name,
        planted=fault,
        steps=steps,
        candidates=found,
        seconds=time.perf_counter() - began,
    )


def planted_fault(case: MlaCase, name: str | None) -> Fault:
    """Return the fault with a name, SOUND for None; raise InvalidCase if it cannot change the case's
    output."""
    if name is None:
        return SOUND
    if name not in MLA_FAULTS:
        refuse("fault", f"one of {', '.join(MLA_FAULTS)}", name)
    if MLA_FAULTS[name] not in faults_of(case):
        refuse(
            "fault", f"one of {', '.join(one.name for one in faults_of(case))} for this case", name
        )
    return MLA_FAULTS[name]


def explanations(case: MlaCase, inputs: Inputs, output: Partial) -> tuple[str, ...]:
    """Return the names of the faults that predict an output and its LSE, the narrowest prediction first.

    A fault predicts them if each element is within the bound of the path with that fault. Faults that are a
    blur come last, unless the case runs with it.
    """
    found = []
    for fault in faults_of(case):
        predicted = walk(case, inputs, Exact(case, lse_as_run=True), fault)[-1].result
        if float(compared(output, predicted, with_lse=case.path == DECODE).amax()) <= 1.0:
            width = torch.nan_to_num(predicted.errors[0]).sum()
            found.append((fault.is_blur == (case.lse_dtype == "float32"), float(width), fault.name))
    return tuple(name for *_, name in sorted(found))
