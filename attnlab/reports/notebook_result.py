"""The result of a run of notebooks, written as JSON and JUnit XML."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.output_file import write_text
from attnlab.case.shown import Shown
from attnlab.show.notebook import Json, Verdict, as_text, plain, versions
from attnlab.show.sheets.sheet import Grid, Lines, Part, Row, Sheet, Tone, Words

POST_MORTEM_MIME = "application/vnd.attnlab.post-mortem+json"
OWNERS = ("kernel", "test", "upstream")
SUMMARY = ("failed", "where", "since", "cause", "fix", "status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Hold one entry of a timeline: a name such as "PR #28905", what happened, and a link or "".

    ``date``: when, such as "2025-11-18", or "" if it is not known.
    """

    name: str
    text: str
    url: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """Summarize an incident for the people who own the kernel, the test and the upstream project.

    - ``failed``: what failed; ``where``: platforms and releases; ``since``: from when on.
    - ``cause``: one sentence; ``fix``: what removes the cause; ``status``: what is merged and what is open.
    - ``impact``: one text for each consequence; ``timeline``: events in their order.
    - ``follow_up``: action items by owner; the owners are OWNERS.
    - ``incident``, ``url``: name and address of the incident.

    Raises InvalidCase if a text of the summary is empty or an owner is unknown.
    """

    failed: str
    where: str
    since: str
    cause: str
    fix: str
    status: str
    impact: tuple[str, ...] = ()
    timeline: tuple[Event, ...] = ()
    follow_up: Mapping[str, str] = field(default_factory=dict)
    incident: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        for name in SUMMARY:
            if not getattr(self, name).strip():
                raise InvalidCase(f"{name} must be a text, got an empty one")
        for owner in self.follow_up:
            if owner not in OWNERS:
                allowed = ", ".join(OWNERS)
                raise InvalidCase(f"follow_up must name owners of {allowed}, got {owner!r}")

    @property
    def summary(self) -> dict[str, str]:
        """Return the rows of the summary box, by their labels."""
        return {_LABELS[name]: getattr(self, name) for name in SUMMARY}

    def to_json(self) -> dict[str, Any]:
        """Return the post-mortem as plain JSON values; from_json reads them back."""
        return {**asdict(self), "impact": [*self.impact], "timeline": [*map(asdict, self.timeline)]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PostMortem":
        """Return the post-mortem that to_json wrote. Raises AttnLabError if it has another form."""
        try:
            events = tuple(Event(**event) for event in data["timeline"])
            return cls(**{**data, "impact": tuple(data["impact"]), "timeline": events})
        except (KeyError, TypeError) as error:
            raise AttnLabError(f"post-mortem must have the fields of one, got {error}") from error

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": "\n".join(f"{label}: {text}" for label, text in self.rows()),
            "text/html": _table(self.rows()),
            POST_MORTEM_MIME: self.to_json(),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the whole post-mortem as (label, text), in the order of reading."""
        rows = [*self.summary.items()]
        rows += [("Impact", text) for text in self.impact]
        rows += [(f"Follow-up: {owner}", text) for owner, text in self.follow_up.items()]
        return rows


_LABELS = {
    "failed": "What failed",
    "where": "Where",
    "since": "Since",
    "cause": "Cause",
    "fix": "Fix",
    "status": "Status",
}


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th style="text-align:left;vertical-align:top">{escape(label)}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for label, text in rows
    )
    return f'<table class="attnlab-post-mortem"><tbody>{cells}</tbody></table>'


ChangeKind = Literal["gone", "broken", "changed", "fixed", "new", "figures", "parameters"]
_LOSSES = ("gone", "broken", "changed")
_WRONG = "baseline must be a verdicts.json of attnlab investigate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Hold one difference from the baseline.

    ``kind`` is "gone" (the verdict no longer exists), "broken" (it was as expected before), "changed" (it
    found another value and is as right or wrong as before), "fixed" (it is as expected now), "new",
    "figures" (the same value with other evidence) or "parameters" (the notebook ran with other ones).
    ``before`` and ``after`` are the values found, or the evidence that differs.
    """

    notebook: str
    verdict: str
    kind: ChangeKind
    before: Json = None
    after: Json = None

    @property
    def is_loss(self) -> bool:
        """Answer whether the change fails a regression run."""
        return self.kind in _LOSSES

    def to_json(self) -> dict[str, Json]:
        """Return the change as plain JSON values."""
        return {
            "notebook": self.notebook,
            "verdict": self.verdict,
            "kind": self.kind,
            "is_loss": self.is_loss,
            "before": self.before,
            "after": self.after,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Hold the verdicts and parameters of one notebook in a baseline."""

    verdicts: tuple[Verdict, ...]
    parameters: Mapping[str, Json]


def read_baseline(path: Path) -> dict[str, Kept]:
    """Return the content of a verdicts.json, by notebook."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCase(f"{_WRONG}, got {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCase(f"{_WRONG}, got {path}: {' '.join(str(error).split())}") from error
    try:
        return {notebook["name"]: _kept(notebook) for notebook in document["notebooks"]}
    except (AttnLabError, KeyError, TypeError, ValueError) as error:
        raise InvalidCase(f"{_WRONG}, got {path}, which has another form") from error


def compare(name: str, now: Kept, before: Kept | None) -> list[Change]:
    """Return the differences between a notebook's verdicts now and in the baseline, losses first."""
    was = {verdict.name: verdict for verdict in before.verdicts} if before else {}
    found = {verdict.name: verdict for verdict in now.verdicts}
    changes = [
        Change(notebook=name, verdict=gone, kind="gone", before=verdict.found)
        for gone, verdict in was.items()
        if gone not in found
    ]
    for verdict in found.values():
        if change := _change(name, was.get(verdict.name), verdict):
            changes.append(change)
    if before and dict(before.parameters) != dict(now.parameters):
        old = _difference(before.parameters, now.parameters)
        new = _difference(now.parameters, before.parameters)
        changes.append(Change(notebook=name, verdict="", kind="parameters", before=old, after=new))
    return sorted(changes, key=lambda change: not change.is_loss)


def _change(name: str, was: Verdict | None, now: Verdict) -> Change | None:
    if was is None:
        return Change(notebook=name, verdict=now.name, kind="new", after=now.found)
    before, after = was.found, now.found
    if was.ok != now.ok:
        kind: ChangeKind = "fixed" if now.ok else "broken"
    elif before != after:
        kind = "changed"
    elif was.evidence != now.evidence:
        kind = "figures"
        before = _difference(was.evidence, now.evidence)
        after = _difference(now.evidence, was.evidence)
    else:
        return None
    return Change(notebook=name, verdict=now.name, kind=kind, before=before, after=after)


def _difference(mapping: Mapping[str, Json], other: Mapping[str, Json]) -> Json:
    """Return the entries of a mapping that the other does not have."""
    return {key: value for key, value in mapping.items() if key not in other or other[key] != value}


def _kept(notebook: Mapping[str, Any]) -> Kept:
    verdicts: Sequence[Mapping[str, Any]] = notebook["verdicts"]
    return Kept(
        verdicts=tuple(Verdict.from_json(verdict) for verdict in verdicts),
        parameters=dict(notebook.get("parameters", {})),
    )


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

    def sheet(self) -> Sheet:
        """Return a row for each notebook and each of its verdicts, and the changes since the baseline."""
        verdicts = [verdict for outcome in self for verdict in outcome.verdicts]
        right = sum(verdict.ok for verdict in verdicts)
        passed = sum(outcome.status == "passed" for outcome in self)
        unavailable = sum(outcome.status == "unavailable" for outcome in self)
        cannot = f", {unavailable} cannot run here" if unavailable else ""
        summary = (
            f"{passed} of {self.total} notebooks passed{cannot}, "
            f"{right} of {len(verdicts)} verdicts as expected"
        )
        rows = [line for outcome in self for line in _outcome_rows(outcome)]
        columns = ["notebook", "verdict", "expected", "found"]
        parts: list[Part] = [Grid(columns, rows, most=len(rows))] if rows else []
        return Sheet.of(
            "Notebooks",
            summary,
            *parts,
            *_changes(self.changes, self.baseline),
            tone="good" if self.ok else "bad",
            name="Results",
        )


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
    """Write JUnit XML: one test case for each verdict, and one for a notebook without verdicts."""
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


_STATUS: dict[str, Tone] = {"passed": "good", "unavailable": "warn", "interrupted": "warn"}


def _outcome_rows(outcome: Outcome) -> list[Row]:
    tone = _STATUS.get(outcome.status, "bad")
    status = f"{outcome.status} in {outcome.seconds:.0f} s"
    rows: list[Row] = [[Words(outcome.name), Words(status, tone), "", ""]]
    rows += [["", *verdict.row()] for verdict in outcome.verdicts]
    if outcome.message:
        rows.append(["", Words(outcome.message, tone), "", ""])
    return rows


def _changes(changes: Sequence[Change] | None, baseline: str) -> list[Part]:
    """Return the changes since a baseline; nothing if there is no baseline."""
    if changes is None:
        return []
    if not changes:
        return [Lines([f"no change since {baseline}"])]
    rows: list[Row] = [
        [
            change.notebook,
            change.verdict,
            Words(change.kind, "bad" if change.is_loss else ""),
            as_text(change.before),
            as_text(change.after),
        ]
        for change in changes
    ]
    columns = ["notebook", "verdict", "change", "before", "now"]
    return [Grid(columns, rows, f"changes since {baseline}", most=len(rows))]
