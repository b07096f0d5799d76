"""The source lines of findings: where in a kernel the fault of a finding may be."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from attnlab.case.errors import AttnLabError
from attnlab.case.op_arguments import NONE
from attnlab.checker.case_run import lab_of
from attnlab.checker.finding import Finding
from attnlab.checker.report import Report
from attnlab.diagnosis.kernel_lines import locate_lines
from attnlab.diagnosis.kernel_location import KernelLine
from attnlab.diagnosis.kernel_trials import Limit
from attnlab.diagnosis.repair_check import with_confirmation
from attnlab.kernels.backend import Backend
from attnlab.kernels.steps import OnStep, ignore_step
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.lab.lab import Lab

LIMIT = Limit(edits=600, seconds=30.0)  # of one finding
_KINDS = (
    "wrong_output",
    "rows_not_written",
    "reads_unwritten_slots",
    "reads_freed_blocks",
)  # faults that show in the output


def with_source_lines(report: Report, backend: Backend, on_step: OnStep = ignore_step) -> Report:
    """Return the report with the source lines of its faults; the Cases run again.

    Files are relative to the root of the source, as in :class:`attnlab.checker.locations.Location`.
    """
    lab, found = lab_of(backend, "cpu"), []
    for i, finding in enumerate(report.findings):
        on_step("locating the faults", i, len(report.findings))
        found.append(_located(lab, backend, finding))
    return dataclasses.replace(report, findings=merged_by_line(found))


def merged_by_line(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; of those that one edit of the same lines repairs, only the first.

    One fault may have different names in different cases, but it has one place.
    """
    merged: dict[object, Finding] = {}
    for i, finding in enumerate(findings):
        places = tuple((one.file, one.line) for one in finding.lines if one.evidence == "edit")
        key = (finding.op, finding.kind, places) if places else i
        if (first := merged.get(key)) is not None:
            finding = dataclasses.replace(first, seen=first.seen + finding.seen)
        merged[key] = finding
    return list(merged.values())


def _located(lab: Lab, backend: Backend, finding: Finding) -> Finding:
    if finding.case.op_argument != NONE:
        return dataclasses.replace(finding, no_lines="an op argument is passed")
    if finding.kind not in _KINDS or finding.case.spec.writes_cache:
        return dataclasses.replace(
            finding, no_lines="the fault does not show in an output of attention"
        )
    case = finding.case.replace(backend=backend.name)
    try:
        place = with_confirmation(lab, case, locate_lines(lab, case, None, LIMIT))
    except AttnLabError as error:
        return dataclasses.replace(finding, no_lines=str(error))
    lines = tuple(_relative(line, backend) for line in place.confirmed_lines)
    why = "" if lines else place.why_none or "further cases confirm no trial edit"
    return dataclasses.replace(finding, lines=lines, no_lines=why)


def _relative(line: KernelLine, backend: Backend) -> KernelLine:
    """Return a line with its file relative to the root of a vLLM, or to the current folder."""
    path = Path(line.file)
    if isinstance(backend, VllmBackend) and path.is_relative_to(backend.source.root):
        return dataclasses.replace(line, file=path.relative_to(backend.source.root).as_posix())
    return dataclasses.replace(line, file=Path(os.path.relpath(path)).as_posix())
