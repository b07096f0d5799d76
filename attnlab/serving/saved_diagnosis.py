"""Diagnose the calls that a capture kept because they were wrong."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.captured import diagnose_captured
from attnlab.serving.report import CaptureReport, Found
from attnlab.tensors.call import KernelCall

_MOST = 3  # calls


def with_diagnoses(
    report: CaptureReport, on_step: Callable[[str], None] = lambda step: None
) -> CaptureReport:
    """Return the report with a diagnosis of its first three wrong calls."""
    known: dict[str, str] = {}
    found = []
    for one in report.found:
        if one.call and (one.call in known or len(known) < _MOST):
            if one.call not in known:
                on_step(f"diagnosing {one.call}")
                known[one.call] = _diagnosis(Path(report.folder) / one.call)
            one = dataclasses.replace(one, diagnosis=known[one.call])
        found.append(one)
    return dataclasses.replace(report, found=tuple[Found, ...](found))


def _diagnosis(path: Path) -> str:
    """Return the status of a saved call's diagnosis, and its cause, as text."""
    try:
        diagnosis = diagnose_captured(KernelCall.load(path), Case())
    except AttnLabError as error:
        return f"not possible: {error}"
    if diagnosis.cause is not None:
        return f"{diagnosis.status}: {diagnosis.cause.name}, {diagnosis.cause.text}"
    names = ", ".join(one.name for one in diagnosis.explanations)
    return f"{diagnosis.status}: {names}" if names else diagnosis.status
