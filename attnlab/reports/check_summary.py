"""The report of a check as a short Markdown table, for the summary of a CI job."""

import os
from pathlib import Path

from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import Finding
from attnlab.checker.report import Report

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
    cases = f"{finding.seen} of {report.ops[finding.op]}"
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
    commands = "\n".join(finding.case.to_cli() for finding in report.findings)
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
