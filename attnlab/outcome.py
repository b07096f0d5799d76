"""Hold how a notebook ended, and write that for machines: JSON and JUnit XML."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnlab.errors import AttnLabError
from attnlab.notebook import Verdict, versions

Status = Literal["passed", "failed", "error", "died", "timeout", "unavailable"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold how one notebook ended.

    `status` is "passed", "failed" (a verdict differs), "error" (any other exception), "died" (its
    kernel), "timeout" (a cell took too long) or "unavailable" (it raised Unavailable: what it needs is
    not here, so nothing was found out). `message` is one line, empty where it passed.
    """

    name: str
    title: str
    status: Status
    message: str
    verdicts: list[Verdict]
    seconds: float
    executed: Path
    html: Path


def all_ok(outcomes: Sequence[Outcome]) -> bool:
    """Answer whether nothing is wrong: each notebook passed or is unavailable here, and one passed."""
    found = {one.status for one in outcomes}
    return "passed" in found and found <= {"passed", "unavailable"}


def write_verdicts(outcomes: Sequence[Outcome], path: Path, *, total: int) -> None:
    """Write all verdicts as JSON; `ok` stays false until all `total` notebooks have ended well."""
    document = {
        "notebooks": [
            {
                "name": one.name,
                "title": one.title,
                "status": one.status,
                "message": one.message,
                "seconds": round(one.seconds, 3),
                "html": one.html.relative_to(path.parent).as_posix(),
                "verdicts": [verdict.to_json() for verdict in one.verdicts],
            }
            for one in outcomes
        ],
        "versions": versions(),
        "unavailable": [one.name for one in outcomes if one.status == "unavailable"],
        "ok": len(outcomes) == total and all_ok(outcomes),
    }
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_junit(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write JUnit XML: a test case for each verdict, and one for a notebook that has no other."""
    root = ET.Element("testsuites", name="attnlab")
    for outcome in outcomes:
        cases = _junit_cases(outcome)
        suite = ET.SubElement(
            root,
            "testsuite",
            name=outcome.name,
            tests=str(len(cases)),
            failures=str(sum(case.find("failure") is not None for case in cases)),
            errors=str(sum(case.find("error") is not None for case in cases)),
            skipped=str(sum(case.find("skipped") is not None for case in cases)),
            time=f"{outcome.seconds:.3f}",
        )
        suite.extend(cases)
    ET.indent(root)
    write_text(path, ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n")


def one_line(text: str) -> str:
    """Return the first line that says something, without terminal colours."""
    lines = (line.strip() for line in _ANSI.sub("", text).splitlines())
    return next((line for line in lines if line), "")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that an interruption leaves the old one or the new one."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise AttnLabError(f"{path} cannot be written: {error.strerror}") from error


def _junit_cases(outcome: Outcome) -> list[ET.Element]:
    cases = []
    for verdict in outcome.verdicts:
        problem = None if verdict.ok else ("failure", str(verdict))
        cases.append(_junit_case(outcome.name, verdict.name, 0.0, problem))
    explained = outcome.status == "passed" or any(not one.ok for one in outcome.verdicts)
    if not cases or not (explained and outcome.status in ("passed", "failed")):
        kinds = {"passed": "", "failed": "failure", "unavailable": "skipped"}
        kind = kinds.get(outcome.status, "error")
        problem = (kind, outcome.message) if kind else None
        cases.append(_junit_case(outcome.name, "notebook", outcome.seconds, problem))
    return cases


def _junit_case(
    notebook: str, name: str, seconds: float, problem: tuple[str, str] | None
) -> ET.Element:
    """Return one test case; what XML cannot hold is taken out of its texts."""
    case = ET.Element(
        "testcase", classname=notebook, name=_NOT_XML.sub("", name), time=f"{seconds:.3f}"
    )
    if problem:
        kind, message = problem
        ET.SubElement(case, kind, message=_NOT_XML.sub("", message))
    return case
