"""The report of a check as JUnit XML, for CI systems.

A test suite per op, and in it a test case per kind of fault. So their names are the same in every run. A
fault is a failure; a known one is skipped with its link; what did not run is skipped with the reason.
"""

import hashlib
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from attnlab import __version__
from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import KINDS, OBSERVATIONS, Finding
from attnlab.checker.report import NotRun, Report

_NOT_RUN, _MISSING = "cases that did not run", "known findings that no longer appear"
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """Return the report as a document of JUnit XML."""
    root = ET.Element("testsuites", name=_clean(f"attnlab check of {report.version}"))
    for op in report.ops:
        root.append(_suite(report, op))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{report.seconds:.3f}")
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suite(report: Report, op: str) -> ET.Element:
    """Return the test suite of an op."""
    findings = [finding for finding in report.findings if finding.op == op]
    cases = [
        _kind(report, op, kind, [finding for finding in findings if finding.kind == kind])
        for kind in KINDS
    ]
    cases += [_skipped(op, entry, i) for i, entry in enumerate(_of_op(report.not_run, op), 1)]
    for entry in report.missing:
        if entry.op == op:
            case = _case(op, f"{_MISSING}: {entry.kind}, {entry.diagnosis}")
            ET.SubElement(case, "failure", type="missing", message=_clean(entry.link))
            cases.append(case)
    suite = ET.Element("testsuite", name=op, tests=str(len(cases)), errors="0")
    for name, tag in (("failures", "failure"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
    suite.extend(cases)
    return suite


def _kind(report: Report, op: str, kind: str, findings: list[Finding]) -> ET.Element:
    """Return the test case of a kind of fault."""
    case = _case(op, kind)
    location = report.location(findings[0]) if findings else report.locations.get(op)
    if location is not None:
        case.set("file", location.file)
        case.set("line", str(location.line))
    unexpected = [finding for finding in findings if finding in report.unexpected]
    if unexpected:
        first = unexpected[0]
        message = _clean(f"{first.title}: {first.evidence}")
        failure = ET.SubElement(case, "failure", type=kind, message=message)
        failure.text = _clean("\n\n".join(_details(report, finding) for finding in unexpected))
    elif findings:
        links = [entry.link for entry in report.known if entry.finding in findings]
        ET.SubElement(case, "skipped", message=_clean(f"known: {', '.join(links)}"))
    elif not report.ops[op]:
        reasons = [entry.reason for entry in _of_op(report.not_run, op)]
        text = "; ".join(reasons) or "the library does not support any case of the op"
        ET.SubElement(case, "skipped", message=_clean(f"no case ran: {text}"))
    return case


def _skipped(op: str, entry: NotRun, number: int) -> ET.Element:
    """Return the test case of cases that did not run."""
    case = _case(op, f"{_NOT_RUN} ({number})")
    ET.SubElement(case, "skipped", message=_clean(f"{entry.cases}: {entry.reason}"))
    ET.SubElement(case, "system-out").text = _clean(f"the first of them: {entry.run}")
    return case


def _details(report: Report, finding: Finding) -> str:
    """Return a finding in lines: what is wrong, where, and the command that shows it."""
    location = report.location(finding)
    lines = [
        f"{finding.title}, in {finding.seen_in(report.ops[finding.op])}",
        finding.evidence,
        *([] if location is None else [str(location)]),
        finding.run(report.source),
    ]
    return "\n".join(lines)


def _case(op: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=f"attnlab.{op}", name=_clean(name), time="0")


def _of_op(entries: list[NotRun], op: str) -> list[NotRun]:
    return [entry for entry in entries if entry.op == op]


def _clean(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return _NO_XML.sub("\ufffd", text)


# The report of a check as SARIF 2.1.0, for code scanning: a rule per kind of finding, and its line.

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
            "command": finding.run(report.source),
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


# The report of a check as a short Markdown table, for the summary of a CI job.

VARIABLE = "GITHUB_STEP_SUMMARY"
_HEAD = "| op | finding | diagnosis | cases | line |\n|---|---|---|---|---|"


def summary(report: Report) -> str:
    """Return the report in Markdown: a verdict, a table of the findings, and what did not run."""
    parts = [
        f"## attnlab check: {_text(report.version)}",
        f"**{_verdict(report)}**: {report.cases_run} of {report.cases} cases ran, "
        f"{len(report.findings)} findings, {len(report.known)} of them known, "
        f"{len(report.observations)} observations",
    ]
    if report.findings:
        rows = [_row(report, finding) for finding in report.findings]
        parts += ["\n".join([_HEAD, *rows]), _commands(report)]
    lists = {
        "Known findings that no longer appear": [
            f"{entry.op}, {entry.kind}, {entry.diagnosis}: {entry.link}" for entry in report.missing
        ],
        "Not run": report.warnings(),
    }
    for title, lines in lists.items():
        if lines:
            parts.append("\n".join([f"{title}:", "", *(f"- {_text(line)}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def _verdict(report: Report) -> str:
    """Return what the exit code means."""
    if report.unexpected:
        return "findings"
    if report.missing:
        return "known findings no longer appear"
    return "no new findings, but not all cases ran" if report.not_run else "no new findings"


def _row(report: Report, finding: Finding) -> str:
    """Return the row of a finding."""
    place = report.location(finding)
    cases = finding.seen_in(report.ops[finding.op]).removesuffix(" cases")
    words = (
        finding.op,
        finding.kind,
        finding.title,
        cases,
        "" if place is None else str(place),
    )
    cells = [*map(_text, words)]
    known = next((entry.link for entry in report.known if entry.finding == finding), "")
    if known:
        cells[1] += f" ([known]({known}))"
    return f"| {' | '.join(cells)} |"


def _commands(report: Report) -> str:
    """Return the commands that show the findings, folded."""
    commands = "\n".join(finding.run(report.source) for finding in report.findings)
    return f"<details><summary>Smallest cases</summary>\n\n```sh\n{commands}\n```\n\n</details>"


def _text(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line of a table."""
    for character in "\\`*_<>|[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def append_summary(report: Report) -> None:
    """Append the summary to the file that GITHUB_STEP_SUMMARY names, if it is set.

    Raises InvalidCase if the file cannot be written.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(summary(report))
    except OSError as error:
        raise InvalidCase(
            f"{VARIABLE} must be a file that can be written, got {path}: {error.strerror}"
        ) from error
