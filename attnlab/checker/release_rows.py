"""The faults of many releases: which fault of one release is that of another, decided by runs.

A row is one fault with its smallest Case, which is found in the first release that has the fault and then
runs in every release that has the op. So a cell states what this Case did there, and a fault of another
release belongs to the row only if the Case shows it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import KINDS, Finding
from attnlab.checker.plan import (
    FAULTS,
    Group,
    Outcomes,
    findings_of,
    groups,
    shrink_key,
    shrink_task,
)
from attnlab.tasks.store import Header
from attnlab.tasks.task import Outcome, Task

_STATUSES = {"ambiguous", "described", "unexplained"}  # of a diagnosis without a name
VIOLATES = "the case violates a contract of the op"


@dataclass(slots=True, kw_only=True)
class Row:
    """A fault at its smallest Case, the release in which that was found, and its runs in the others.

    ``runs``: by release in which the op runs, the task that runs the Case there; None if the release refuses
    the Case. A task without an outcome has not run. In ``first`` the Case ran when it was found.
    """

    finding: Finding
    first: str
    runs: dict[str, Task | None] = field(default_factory=dict)

    def is_shown(self, version: str, outcomes: Outcomes) -> bool | None:
        """Answer whether the op of a release shows the fault at the Case; None if there is no verdict."""
        task = self.runs[version]
        if version == self.first:
            return True
        return None if task is None else shows(task, outcomes.get(task.key), self.is_fault)

    def is_kind(self, other: Finding) -> bool:
        """Answer whether a fault that the Case shows on a GPU is of this kind; its diagnosis may differ."""
        return self.finding.kind == other.kind

    def is_fault(self, other: Finding) -> bool:
        """Answer whether the fault that the Case shows in another release is this one.

        A specific diagnosis differs from another one; a status, such as "unexplained", contradicts none.
        """
        if (self.finding.op, self.finding.kind) != (other.op, other.kind):
            return False
        labels = {self.finding.diagnosis, other.diagnosis}
        return self.finding.is_same(other) or bool(labels & _STATUSES)


@dataclass(slots=True, kw_only=True)
class Rows:
    """The rows that some outcomes decide.

    - ``pending``: tasks that must run before all rows are decided, by key.
    - ``waiting``: the faults that these will decide, with the release in which they ran.
    """

    rows: list[Row] = field(default_factory=list)
    pending: dict[str, Task] = field(default_factory=dict)
    waiting: list[tuple[str, Group]] = field(default_factory=list)


def fault_rows(header: Header, tasks: Sequence[Task], outcomes: Outcomes) -> Rows:
    """Return the rows of the faults that some cases show, as far as the outcomes decide them.

    ``header``: that of a :class:`attnlab.checker.release_plan.ReleasePlan`; ``tasks``: the cases;
    ``outcomes``: all so far, also those of shrinking and of the rows' own Cases.
    """
    found = Rows()
    of_release: dict[str, list[Task]] = {}
    for task in tasks:
        of_release.setdefault(task.payload["library"], []).append(task)
    for version in header["runs"]:
        for group in groups(of_release.get(version, []), outcomes).values():
            if group.finding.kind in KINDS:
                _add(found, header, version, group, outcomes)
    return found


def _add(found: Rows, header: Header, version: str, group: Group, outcomes: Outcomes) -> None:
    """Add the fault of a release to the rows, or what must run before it is known which row has it."""
    states = [_covers(row, version, group.finding, outcomes) for row in found.rows]
    if True in states:
        return
    is_like_one = any(one.finding.is_same(group.finding) for _, one in found.waiting)
    if None in states or is_like_one:
        found.waiting.append((version, group))
        return
    row, shrinking = _new_row(version, group, outcomes)
    if shrinking is not None:
        found.pending[shrinking.key] = shrinking
        found.waiting.append((version, group))
        return
    if any(_has_same_case(one, row) for one in found.rows):
        return
    runs, rules = header["runs"].values(), header["rules"]
    owners = dict.fromkeys(of[row.finding.op] for of in runs if row.finding.op in of)
    row.runs = {owner: run_task(row.finding, owner, rules[owner], group.task) for owner in owners}
    for owner, task in row.runs.items():
        if task is not None and owner != version and task.key not in outcomes:
            found.pending[task.key] = task
    found.rows.append(row)


def _has_same_case(one: Row, other: Row) -> bool:
    """Answer whether two rows are one: a Case has one output, whatever explains it."""
    cases = [{**row.finding.case.changes(), "release": None} for row in (one, other)]
    kinds = {(row.finding.op, row.finding.kind) for row in (one, other)}
    return len(kinds) == 1 and one.first == other.first and cases[0] == cases[1]


def _new_row(version: str, group: Group, outcomes: Outcomes) -> tuple[Row, Task | None]:
    """Return a row of a group at its smallest Case, or the task that shrinks it if that has not run."""
    finding = dataclasses.replace(group.finding, seen=group.seen)
    row = Row(finding=finding, first=version)
    if group.is_stopped:
        return row, None
    shrunk = outcomes.get(shrink_key(group.task, finding))
    if shrunk is None:
        return row, shrink_task(group.task, finding)
    if shrunk.verdict is not None:
        small = Finding.from_verdict(shrunk.verdict["finding"])
        row.finding = dataclasses.replace(small, seen=group.seen)
    return row, None


def _covers(row: Row, version: str, finding: Finding, outcomes: Outcomes) -> bool | None:
    """Answer whether a release shows a fault of its own at the Case of a row; None if that did not run."""
    if (row.finding.op, row.finding.kind) != (finding.op, finding.kind):
        return False
    if row.first == version:
        return row.finding.is_same(finding)
    task = row.runs.get(version)
    if task is None:
        return False
    outcome = outcomes.get(task.key)
    if outcome is None:
        return None
    return any(row.is_fault(one) and one.is_same(finding) for one in findings_of(task, outcome))


def run_task(
    finding: Finding, version: str, rules: str, like: Task, prefix: str = "confirm"
) -> Task | None:
    """Return the task that runs the smallest Case of a finding in a release; None if its rules refuse it."""
    try:
        case = finding.case.replace(release=rules)
    except InvalidCase:
        return None
    digest = hashlib.sha256(case.to_json().encode()).hexdigest()[:12]
    payload: dict[str, Any] = {"library": version, "case": case.changes()}
    return dataclasses.replace(like, key=f"{prefix}/{version}/{digest}", payload=payload)


def shows(task: Task, outcome: Outcome | None, is_fault: Callable[[Finding], bool]) -> bool | None:
    """Answer whether a run shows a fault; None if there is no verdict."""
    if outcome is None:
        return None
    if any(is_fault(one) for one in findings_of(task, outcome)):
        return True
    ran = outcome.status in FAULTS or (outcome.verdict is not None and outcome.verdict["ran"])
    return False if ran else None


def why_no_verdict(outcome: Outcome) -> str:
    """Return why a run has no verdict about a fault."""
    if outcome.verdict is None:
        return outcome.text or outcome.status
    return str(outcome.verdict["not_run"] or outcome.verdict["unsupported"] or VIOLATES)
