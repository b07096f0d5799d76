"""The result of a run of notebooks, written as JSON and JUnit XML."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attnlab.case.output_file import write_text
from attnlab.case.shown import Shown
from attnlab.reports.baseline import Change
from attnlab.reports.post_mortem import PostMortem
from attnlab.show.notebook import Json, Verdict, plain, versions

Status = Literal[
    "passed", "failed", "error", "refused", "died", "timeout", "interrupted", "unavailable"
]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold how one notebook ended.

    - ``status``: "passed", "failed" (a verdict differs), "refused" (InvalidCase: the parameters do not
      fit), "error" (any other exception), "died" (its kernel), "timeout", "interrupted" (by the user) or
      "unavailable" (it raised Unavailable: a dependency is missing).
    - ``message``: one line, empty if it passed.
    - ``cells``: cells run, including the one in which it stopped, and cells in total.
    - ``summary``: the verdict paragraph of the committed notebook; ``report``: its post-mortem, or None.
    """

    name: str
    title: str
    status: Status
    message: str
    verdicts: list[Verdict]
    seconds: float
    executed: Path
    html: Path
    summary: str = ""
    report: PostMortem | None = None
    cells: tuple[int, int] = (0, 0)
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Results(Shown):
    """Hold the results of a run of several notebooks so far.

    ``not_run`` names the notebooks that have not ended; ``changes`` is None without a baseline.
    """

    outcomes: Sequence[Outcome]
    not_run: Sequence[str] = ()
    baseline: str = ""
    changes: Sequence[Change] | None = None

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def total(self) -> int:
        """Return the number of notebooks that were requested."""
        return len(self.outcomes) + len(self.not_run)

    @property
    def ok(self) -> bool:
        """Answer whether every notebook passed or is unavailable, and no verdict of the baseline was lost."""
        lost = any(change.is_loss for change in self.changes or ())
        return not self.not_run and not lost and all_ok(self.outcomes)


def all_ok(outcomes: Sequence[Outcome]) -> bool:
    """Answer whether each notebook passed or is unavailable, and at least one passed."""
    found = {outcome.status for outcome in outcomes}
    return "passed" in found and found <= {"passed", "unavailable"}


def write_verdicts(results: Results, path: Path) -> None:
    """Write all verdicts as JSON; ``ok`` stays false until every notebook has passed or is unavailable."""
    document: dict[str, Any] = {
        "notebooks": [_to_json(outcome, path.parent) for outcome in results.outcomes],
        "not_run": list(results.not_run),
        "unavailable": [
            outcome.name for outcome in results.outcomes if outcome.status == "unavailable"
        ],
        "versions": versions(),
        "ok": results.ok,
    }
    if results.changes is not None:
        changes = [change.to_json() for change in results.changes]
        document["baseline"] = {"file": results.baseline, "changes": changes}
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _to_json(outcome: Outcome, folder: Path) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "title": outcome.title,
        "status": outcome.status,
        "message": outcome.message,
        "seconds": round(outcome.seconds, 3),
        "cells": list(outcome.cells),
        "parameters": plain_dict(outcome.parameters),
        "html": outcome.html.relative_to(folder).as_posix(),
        "verdicts": [verdict.to_json() for verdict in outcome.verdicts],
    }


def write_junit(results: Results, path: Path) -> None:
    """Write JUnit XML: one test case for each verdict, and one for a notebook without verdicts.

    A notebook that did not run is a skipped test case.
    """
    root = ET.Element("testsuites", name="attnlab")
    for outcome in results.outcomes:
        _add_suite(root, outcome.name, _junit_cases(outcome), outcome.seconds)
    for name in results.not_run:
        _add_suite(root, name, [_junit_case(name, "notebook", 0.0, ("skipped", "not run"))], 0.0)
    ET.indent(root)
    write_text(path, ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n")


def plain_dict(parameters: Mapping[str, Any]) -> dict[str, Json]:
    """Return a notebook's parameters as plain JSON values."""
    return {name: plain(value, name) for name, value in parameters.items()}


def _add_suite(root: ET.Element, name: str, cases: Sequence[ET.Element], seconds: float) -> None:
    counts = {
        plural: str(sum(case.find(kind) is not None for case in cases))
        for plural, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    facts = {"name": name, "tests": str(len(cases)), **counts, "time": f"{seconds:.3f}"}
    suite = ET.SubElement(root, "testsuite", facts)
    suite.extend(cases)


def one_line(text: str) -> str:
    """Return the first non-empty line, without terminal colours."""
    lines = (line.strip() for line in _ANSI.sub("", text).splitlines())
    return next((line for line in lines if line), "")


def _junit_cases(outcome: Outcome) -> list[ET.Element]:
    cases = []
    for verdict in outcome.verdicts:
        problem = None if verdict.ok else ("failure", str(verdict))
        cases.append(_junit_case(outcome.name, verdict.name, 0.0, problem))
    explained = outcome.status == "passed" or any(not verdict.ok for verdict in outcome.verdicts)
    if not cases or not (explained and outcome.status in ("passed", "failed")):
        kinds = {"passed": "", "failed": "failure", "unavailable": "skipped"}
        kind = kinds.get(outcome.status, "error")
        problem = (kind, outcome.message) if kind else None
        cases.append(_junit_case(outcome.name, "notebook", outcome.seconds, problem))
    return cases


def _junit_case(
    notebook: str, name: str, seconds: float, problem: tuple[str, str] | None
) -> ET.Element:
    """Return one test case; characters that XML does not allow are removed from its texts."""
    case = ET.Element(
        "testcase", classname=notebook, name=_NOT_XML.sub("", name), time=f"{seconds:.3f}"
    )
    if problem:
        kind, message = problem
        ET.SubElement(case, kind, message=_NOT_XML.sub("", message))
    return case
