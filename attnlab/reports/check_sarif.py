"""The report of a check as SARIF 2.1.0, for code scanning: a rule per kind of finding, and its line."""

import hashlib
from typing import Any

from attnlab import __version__
from attnlab.checker.finding import KINDS, OBSERVATIONS, Finding
from attnlab.checker.report import Report

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_RULES = {**KINDS, **OBSERVATIONS}
_ROOT = "%SRCROOT%"


def sarif(report: Report) -> dict[str, Any]:
    """Return the report as a SARIF log with one run.

    A fault has level "error", an observation "note". A known fault is suppressed, with its link. What did
    not run is a notification of the run.
    """
    findings = [*report.findings, *report.observations]
    run = {
        "tool": {"driver": {"name": "attnlab", "version": __version__, "rules": _rules()}},
        "automationDetails": {"id": f"attnlab check/{report.version}/"},
        "originalUriBaseIds": {
            _ROOT: {"description": {"text": f"the root of the source of {report.version}"}}
        },
        "invocations": [
            {
                "executionSuccessful": not report.not_run,
                "exitCode": report.exit_code,
                "toolExecutionNotifications": [
                    {"level": "warning", "message": {"text": text}} for text in _warnings(report)
                ],
            }
        ],
        "results": [_result(report, finding) for finding in findings],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rules() -> list[dict[str, Any]]:
    """Return a rule for each kind of fault and of observation."""
    return [
        {
            "id": kind,
            "shortDescription": {"text": text},
            "defaultConfiguration": {"level": _level(kind)},
        }
        for kind, text in _RULES.items()
    ]


def _level(kind: str) -> str:
    return "error" if kind in KINDS else "note"


def _warnings(report: Report) -> list[str]:
    """Return what did not run, and the known findings that no longer appear."""
    missing = [
        f"{entry.op}: the known finding {entry.kind} ({entry.diagnosis}) no longer appears: {entry.link}"
        for entry in report.missing
    ]
    return [*report.warnings(), *missing]


def _result(report: Report, finding: Finding) -> dict[str, Any]:
    """Return one finding."""
    text = f"{finding.op}: {_RULES[finding.kind]} ({finding.title}). {finding.evidence}"
    if finding.lines:
        text += f". {finding.lines[0].text}"
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": [*_RULES].index(finding.kind),
        "level": _level(finding.kind),
        "message": {"text": text},
        "partialFingerprints": {"finding/v1": _fingerprint(finding)},
        "properties": {
            "diagnosis": finding.diagnosis,
            "names": [*finding.names],
            "description": finding.description,
            "casesThatShowIt": finding.seen,
            "command": finding.case.to_cli(),
        },
    }
    location = report.location(finding)
    if location is not None:
        logical = {"name": finding.op, "kind": "function"}
        physical = _physical(location.file, location.line)
        result["locations"] = [{"physicalLocation": physical, "logicalLocations": [logical]}]
    if finding.lines[1:]:
        result["relatedLocations"] = [
            {"physicalLocation": _physical(line.file, line.line), "message": {"text": line.reason}}
            for line in finding.lines[1:]
        ]
    links = [entry.link for entry in report.known if entry.finding == finding]
    if links:
        result["suppressions"] = [{"kind": "external", "justification": links[0]}]
    return result


def _physical(file: str, line: int) -> dict[str, Any]:
    """Return a line of a file, relative to the root of the source unless it is outside."""
    artifact: dict[str, Any] = {"uri": file}
    if not file.startswith(("/", "../")):
        artifact["uriBaseId"] = _ROOT
    return {"artifactLocation": artifact, "region": {"startLine": line}}


def _fingerprint(finding: Finding) -> str:
    """Return what identifies a finding over commits: its op, kind and diagnosis, not its line."""
    return hashlib.sha256("\0".join(finding.group).encode()).hexdigest()[:32]
