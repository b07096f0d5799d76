"""The report of a check as JUnit XML, for CI systems.

A test suite per op, and in it a test case per kind of fault. So their names are the same in every run. A
fault is a failure; a known one is skipped with its link; what did not run is skipped with the reason.
"""

import re
import xml.etree.ElementTree as ET

from attnlab.checker.finding import KINDS, Finding
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
        f"{finding.title}, in {finding.seen} of {report.ops[finding.op]} cases",
        finding.evidence,
        *([] if location is None else [str(location)]),
        finding.case.to_cli(),
    ]
    return "\n".join(lines)


def _case(op: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=f"attnlab.{op}", name=_clean(name), time="0")


def _of_op(entries: list[NotRun], op: str) -> list[NotRun]:
    return [entry for entry in entries if entry.op == op]


def _clean(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return _NO_XML.sub("\ufffd", text)
