"""Check many releases of vLLM, or of another library, in one run."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.ops import OPS
from attnlab.case.shown import Shown, json_fields, json_value
from attnlab.checker.case_check import CheckJob
from attnlab.checker.case_run import with_imports
from attnlab.checker.finding import KINDS, Finding
from attnlab.checker.plan import (
    Conditions,
    Group,
    Outcomes,
    Plan,
    digest_of,
    findings_of,
    groups,
    has_run,
    is_case,
    op_of,
    shrink_key,
    shrink_task,
    why_not_run,
)
from attnlab.checker.report import (
    NotRun,
    OnProgress,
    counted,
    ignore_progress,
    name_outputs,
    not_run_of,
    watching,
)
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend
from attnlab.kernels.vllm.source import Source
from attnlab.library.op import package_of, state_ops_of
from attnlab.linear.run import StateBackend
from attnlab.linear.state_case import RECORDS
from attnlab.tasks.run import TaskRun, kept_run
from attnlab.tasks.store import ALL, Header, Shard
from attnlab.tasks.task import Engine, Outcome, Stop, Task, never

# The plan of a check of many releases: what runs, and which releases share a result.
#
# The verdict of a case depends on the op's files, on those that they import, and on the rules that the lab
# applies to the release. An op that is the same in several releases runs in the first of them.

COMMAND = "releases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release: its ``version`` and the backend that runs its ops."""

    version: str
    backend: Backend

    @property
    def source(self) -> Source:
        """Return the source of the release."""
        assert self.backend.op_source is not None
        return self.backend.op_source

    def on(self, device: str) -> Backend:
        """Return the backend with the ops of the release on a device."""
        return find_backend(self.backend.name, self.source.path, device)


def releases_of(paths: Mapping[str, Path], device: str, library: str = "vllm") -> list[Release]:
    """Return the releases at some paths, which are given by version, with their ops on a device."""
    name = library if library == "vllm" else f"library:{library}"

    def backend(path: Path) -> Backend:
        if state_ops_of(library):
            return StateBackend(library=library, path=path)
        return find_backend(name, path, device)

    return [Release(version=version, backend=backend(path)) for version, path in paths.items()]


@dataclass(frozen=True, kw_only=True)
class ReleasePlan(Conditions):
    """What a check of releases runs. ``releases``: the oldest first."""

    releases: tuple[Release, ...]

    @cached_property
    def runs(self) -> dict[str, dict[str, str]]:
        """Return, by release and op, the release in which the op runs; an op that is absent is left out."""
        first: dict[tuple[str, str], str] = {}
        found: dict[str, dict[str, str]] = {}
        for release in self.releases:
            found[release.version] = {}
            for op in self.ops:
                digest = op_digest(release.source, op)
                if digest is not None:
                    owner = first.setdefault((op, digest), release.version)
                    found[release.version][op] = owner
        return found

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Return the plan of each release that has an op to run."""
        same = {one.name: getattr(self, one.name) for one in dataclasses.fields(Conditions)}
        found = {}
        for release in self.releases:
            own = self.runs[release.version].items()
            ops = tuple(op for op, owner in own if owner == release.version)
            if ops:
                given = {**same, "ops": ops, "all_ops": self.ops, "library": release.version}
                found[release.version] = Plan(backend=release.backend, **given)
        return found

    def tasks(self) -> list[Task]:
        """Return the cases of all releases, release by release."""
        return [task for plan in self.plans.values() for task in plan.tasks()]

    @property
    def rules(self) -> dict[str, str]:
        """Return, by release, the release whose rules the lab applies to it."""
        return {release.version: release.backend.release for release in self.releases}

    def job(self, device: str | None = None) -> CheckJob:
        """Return the job that runs all of the plan's tasks; ``device``: another one than that of the plan."""
        libraries = {
            one.version: one.backend if device is None else one.on(device)
            for one in self.releases
            if one.version in self.plans
        }
        return CheckJob(libraries=dict(libraries), device=device or self.releases[0].backend.device)

    def header(self, tasks: Sequence[Task], shard: Shard = ALL) -> Header:
        """Return the header of a store: everything that the verdicts depend on, without paths."""
        digests = {
            release.version: {op: op_digest(release.source, op) for op in self.ops}
            for release in self.releases
        }
        releases = [release.version for release in self.releases]
        return {
            "command": COMMAND,
            "device": self.releases[0].backend.device,
            "options": {"releases": releases, **self.options()},
            "digests": digests,
            "runs": self.runs,
            "rules": self.rules,
            **self.part(tasks, shard),
            "cases": [
                {"key": task.key, "payload": task.payload, "cost_s": task.cost_s} for task in tasks
            ],
        }


def op_digest(source: Source, op: str) -> str | None:
    """Return a digest of what decides the verdicts of an op in a release; None if it has no such op."""
    if RECORDS[op].library != source.package.library:
        return None
    try:
        found = op_files(source, op)
    except Unsupported:
        return None
    digest = hashlib.sha256(f"{source.rules}\0".encode())
    for file in sorted(found):
        digest.update(f"{file.name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def op_files(source: Source, op: str) -> list[Path]:
    """Return the file of an op, then those that it imports; of linear attention all of its package.

    Raises Unsupported if the release has none.
    """
    first = source.op_file(RECORDS[op].module)
    folders = {folder.replace("/", "."): source.root / folder for folder in source.ops_folders}
    if op in OPS:
        found = with_imports(first, folders)
    else:
        found = {file for folder in folders.values() for file in folder.rglob("*.py")}
    return [first, *sorted(found - {first})]


# The faults of many releases: which fault of one release is that of another, decided by runs.
#
# A row is one fault with its smallest Case, which is found in the first release that has the fault and then
# runs in every release that has the op. So a cell states what this Case did there, and a fault of another
# release belongs to the row only if the Case shows it.

NAMELESS = {"ambiguous", "described", "unexplained"}  # of a diagnosis without a name
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

    def is_fault(self, other: Finding) -> bool:
        """Answer whether the fault that the Case shows in another release is this one.

        A specific diagnosis differs from another one; a status, such as "unexplained", contradicts none.
        """
        if (self.finding.op, self.finding.kind) != (other.op, other.kind):
            return False
        labels = {self.finding.diagnosis, other.diagnosis}
        return self.finding.is_same(other) or bool(labels & NAMELESS)


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

    ``header``: that of a :class:`attnlab.checker.releases.ReleasePlan`; ``tasks``: the cases;
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
    if one.finding.horizon:
        return False
    cases = [{**row.finding.case.changes(), "release": None} for row in (one, other)]
    kinds = {(row.finding.op, row.finding.kind) for row in (one, other)}
    return len(kinds) == 1 and one.first == other.first and cases[0] == cases[1]


def _new_row(version: str, group: Group, outcomes: Outcomes) -> tuple[Row, Task | None]:
    """Return a row of a group at its smallest Case, or the task that shrinks it if that has not run."""
    row = Row(finding=dataclasses.replace(group.finding, seen=group.seen), first=version)
    if group.is_stopped or group.own.horizon:
        return row, None
    shrunk = outcomes.get(shrink_key(group.task, group.own))
    if shrunk is None:
        return row, shrink_task(group.task, group.own)
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
    if finding.horizon:  # what the plan asks of each release
        key = f"{version}/{finding.op}/horizon"
        return dataclasses.replace(like, key=key, payload={**like.payload, "library": version})
    try:
        case = finding.case.replace(release=rules)
    except InvalidCase:
        return None
    payload: dict[str, Any] = {"library": version, "case": case.changes()}
    return dataclasses.replace(like, key=f"{prefix}/{version}/{digest_of(case)}", payload=payload)


def shows(task: Task, outcome: Outcome | None, is_fault: Callable[[Finding], bool]) -> bool | None:
    """Answer whether a run shows a fault; None if there is no verdict."""
    if outcome is None:
        return None
    if any(is_fault(one) for one in findings_of(task, outcome)):
        return True
    return False if has_run(outcome) else None


def why_no_verdict(outcome: Outcome) -> str:
    """Return why a run has no verdict about a fault."""
    if outcome.verdict is None:
        return outcome.text or outcome.status
    return str(outcome.verdict["not_run"] or outcome.verdict["unsupported"] or VIOLATES)


# ReleaseTable: which release has which fault.

FINDING, SOUND, OTHER = "finding", "sound", "other fault"
ABSENT, NOT_RUN = "absent", "not run"
STATES = {
    FINDING: "the fault's smallest case is wrong in the release",
    SOUND: "this case is right there",
    OTHER: "this case shows another fault there",
    ABSENT: "the release does not have the op, or does not support the case",
    NOT_RUN: "the case did not run there",
}
YES, NO, UNCONFIRMED = "yes", "no", "not confirmed"
NOT_RUNNABLE, UNTRIED = "not runnable", "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRun:
    """A run of a fault's smallest Case on a GPU.

    ``is_confirmed``: whether it shows the fault, None if it cannot run there; ``why``: the reason, or the
    other faults that it shows, such as an illegal memory access; "" if it is confirmed or right.
    ``evidence``: what the faults that it shows consist of, such as the number of wrong elements.
    """

    is_confirmed: bool | None
    why: str = ""
    evidence: str = ""

    @classmethod
    def of(cls, task: Task, outcome: Outcome, finding: Finding) -> "NativeRun":
        """Return what a run of a fault's Case showed; the diagnosis of the same kind may differ there."""
        is_shown = shows(task, outcome, lambda other: other.kind == finding.kind)
        if is_shown is None:
            return cls(is_confirmed=None, why=why_no_verdict(outcome))
        found = [one for one in findings_of(task, outcome) if one.is_fault]
        others = [] if is_shown else [f"{one.kind}: {one.diagnosis}" for one in found]
        return cls(
            is_confirmed=is_shown,
            why="; ".join(dict.fromkeys(others)),
            evidence="; ".join(dict.fromkeys(one.evidence for one in found)),
        )

    def text(self) -> str:
        """Return what the run showed, in words."""
        if self.is_confirmed is None:
            return f"{NOT_RUNNABLE}, {self.why}"
        if self.is_confirmed:
            return "confirmed"
        seen = f" ({self.evidence})" if self.evidence else ""
        return f"{UNCONFIRMED}, {self.why}{seen}" if self.why else "right"


def ranges(releases: Iterable[str], chosen: Collection[str]) -> str:
    """Return some releases as ranges without gaps, such as "0.9.0 to 0.11.2, 0.30.0", each of one library."""
    parts = []
    by = groupby(releases, lambda one: (one in chosen, one.rpartition(" ")[0]))
    for (is_chosen, _), group in by:
        found = [*group]
        if is_chosen:
            last = found[-1].rpartition(" ")[2]
            parts.append(found[0] if len(found) == 1 else f"{found[0]} to {last}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRun:
    """What the call of a fault did in an op, in some releases with the same result.

    ``text``: what is wrong there, or why there is no verdict; ``command``: runs the call in the first of the
    ``releases``; ``lines``: of the source, that may hold the fault in the last of them; ``finding``: the
    fault, if it is one.
    """

    op: str
    state: str
    releases: tuple[str, ...]
    text: str = ""
    command: str = ""
    lines: tuple[str, ...] = ()
    finding: Finding | None = None

    def to_dict(self, releases: Iterable[str]) -> dict[str, Any]:
        """Return the run as JSON-able values, without empty ones; its releases as ranges of ``releases``."""
        fields = json_fields(self, without=("finding",))
        fields["releases"] = ranges(releases, self.releases)
        return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault in the releases.

    - ``cells``: a key of STATES by release; ``releases``: those that have the fault, the oldest first.
    - ``finding``: the fault at its smallest Case, in the first release that has it. This Case ran in every
      release that has the op.
    - ``native``: its runs on a GPU, by release; empty if it was not tried.
    - ``family``: what the page lists it under, "" for its op; ``runs``: what its calls did in ops of several
      libraries (:mod:`attnlab.checker.atlas`). There ``cells`` may have no fault at all.
    """

    finding: Finding
    cells: dict[str, str]
    native: dict[str, NativeRun] = field(default_factory=dict)
    family: str = ""
    runs: tuple[OpRun, ...] = ()

    @property
    def is_native(self) -> str:
        """Return whether a GPU confirms the fault: "yes", "no", "not confirmed", "not runnable" or
        "not tried".

        It is "no" if one of the releases that ran there is right, "not confirmed" if one shows another fault.
        """
        ran = [one for one in self.native.values() if one.is_confirmed is not None]
        unlike = [one for one in ran if not one.is_confirmed]
        if unlike:
            return UNCONFIRMED if all(one.why for one in unlike) else NO
        return YES if ran else NOT_RUNNABLE if self.native else UNTRIED

    @property
    def native_text(self) -> str:
        """Return what the runs on a GPU showed, release by release."""
        return "; ".join(f"{version}: {one.text()}" for version, one in self.native.items())

    @property
    def releases(self) -> list[str]:
        """Return the releases that have the fault."""
        return [version for version, state in self.cells.items() if state == FINDING]

    def to_dict(self) -> dict[str, Any]:
        """Return the fault as JSON-able values."""
        finding = self.finding
        names = ("op", "kind", "diagnosis", "names", "description")
        atlas = {"family": self.family, "runs": [one.to_dict(self.cells) for one in self.runs]}
        return {
            **{name: json_value(getattr(finding, name)) for name in names},
            "native": self.is_native,
            "native_runs": json_value(self.native),
            "first": next(iter(self.releases), None),
            "last": next(reversed(self.releases), None),
            "cells": self.cells,
            "evidence": finding.evidence,
            "case": finding.case.changes(),
            "run": finding.run(next(iter(self.releases), "SOURCE")),
            **(atlas if self.family else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReleaseTable(Shown):
    """The faults of many releases.

    - ``releases``: the versions, the oldest first; ``device``, ``platform``: where their ops ran.
    - ``ops``: by release and op, the release whose identical op ran; an absent op is left out.
    - ``cases``, ``cases_run``: of all releases; an op that several releases share counts once.
    - ``versions``: of attnlab and the packages that decide verdicts.
    - ``not_run``: what did not run, with the release before the op; ``left_out``: likewise, the cases that an
      op does not support, by its own error, or that violate its contract. ``cases`` is the sum of those that
      ran, those of the plan in ``not_run``, and these.
    """

    releases: list[str]
    device: str
    platform: str
    ops: dict[str, dict[str, str]]
    cases: int
    cases_run: int
    seconds: float
    versions: dict[str, str]
    faults: list[Fault] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    left_out: list[NotRun] = field(default_factory=list)

    @property
    def libraries(self) -> dict[str, list[str]]:
        """Return the releases of each library, by its title."""
        found: dict[str, list[str]] = {}
        for version in self.releases:
            op = next(iter(self.ops[version]), None)
            package = package_of("vllm" if op is None else RECORDS[op].library)
            is_only = package.library == package.name
            found.setdefault(package.title if is_only else package.library, []).append(version)
        return found

    @property
    def span(self) -> str:
        """Return the first and the last release, of each library."""
        return ", ".join(f"{of[0]} to {of[-1]}" for of in self.libraries.values())

    @property
    def found(self) -> list[Fault]:
        """Return the faults that a release has."""
        return [one for one in self.faults if one.releases]

    @property
    def exit_code(self) -> int:
        """Return 1 for a fault, 3 if cases did not run, else 0."""
        return 1 if self.found else 3 if self.not_run else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-able values."""
        return {**json_fields(self), "states": STATES}


# Build the table of releases from the outcomes of the tasks.

NATIVE = "native"  # prefix of the keys of tasks on a GPU
NATIVE_LIMIT_S = 180.0  # compiling a kernel takes long
_UNDECIDED = "the smallest case of the fault did not run in this release"


def build_table(
    header: Header, tasks: Sequence[Task], outcomes: Outcomes, *, seconds: float, stopped: str
) -> ReleaseTable:
    """Return the table of the outcomes of some tasks; ``stopped`` is the reason for a missing one."""
    results = _Results(header=header, tasks=tasks, outcomes=outcomes, stopped=stopped)
    return ReleaseTable(
        releases=[*header["runs"]],
        device=header["device"],
        platform=header["options"]["platform"],
        ops=header["runs"],
        cases=sum(map(is_case, tasks)),
        cases_run=sum(is_case(task) and results.ran(task) for task in tasks),
        seconds=seconds,
        versions=header["versions"],
        faults=results.faults(header["options"]["ops"]),
        not_run=results.not_run(),
        left_out=results.left_out(),
    )


def merged_releases(
    header: Header, outcomes: Outcomes, build: Callable[..., ReleaseTable] = build_table
) -> ReleaseTable:
    """Return the table of merged stores; ``seconds`` is the sum of the cases' times.

    ``build``: the function that makes it, another one for an atlas.
    """
    return build(
        header,
        [Task(**fields) for fields in header["cases"]],
        outcomes,
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        stopped="its shard was stopped before",
    )


def native_tasks(header: Header, tasks: Sequence[Task], outcomes: Outcomes) -> list[Task]:
    """Return the tasks that run each fault on a GPU: in the first and the last release that has it."""
    rows = fault_rows(header, tasks, outcomes).rows
    runs = [_native_runs(row, header["rules"], outcomes) for row in rows]
    return list({task.key: task for of in runs for task in of.values()}.values())


def _native_runs(row: Row, rules: Mapping[str, str], outcomes: Outcomes) -> dict[str, Task]:
    """Return the tasks that run a row's Case on a GPU, by release."""
    if row.finding.horizon:
        return {}
    wrong = [version for version in row.runs if row.is_shown(version, outcomes)]
    found = {}
    for version in dict.fromkeys([*wrong[:1], *wrong[-1:]]):
        like = row.runs[version]
        if like is not None:
            task = run_task(row.finding, version, rules[version], like, NATIVE)
            found[version] = dataclasses.replace(task or like, limit_s=NATIVE_LIMIT_S)
    return found


@dataclass(frozen=True, kw_only=True)
class _Results:
    """The tasks of a check of releases, the header of their plan, and their outcomes."""

    header: Header
    tasks: Sequence[Task]
    outcomes: Outcomes
    stopped: str

    @cached_property
    def rows(self) -> Rows:
        """Return the rows that the outcomes decide."""
        return fault_rows(self.header, self.tasks, self.outcomes)

    @cached_property
    def waiting(self) -> dict[tuple[str, str, str], dict[str, Finding]]:
        """Return the other faults, by what is known of them, and by the release in which they ran."""
        found: dict[tuple[str, str, str], dict[str, Finding]] = {}
        for version, group in self.rows.waiting:
            finding = dataclasses.replace(group.finding, seen=group.seen)
            found.setdefault(finding.group, {})[version] = finding
        return found

    def faults(self, ops: Sequence[str]) -> list[Fault]:
        """Return the faults, op by op, and for an op in the order of the first release that has them."""
        found = [
            Fault(finding=row.finding, cells=self._cells(row), native=self._native(row))
            for row in self.rows.rows
        ]
        found += [
            Fault(finding=next(iter(of.values())), cells=self._waiting_cells(of))
            for of in self.waiting.values()
        ]
        return sorted(found, key=lambda fault: ops.index(fault.finding.op))

    def _cells(self, row: Row) -> dict[str, str]:
        """Return what the Case of a row did in each release."""
        op, runs = row.finding.op, self.header["runs"].items()
        return {version: self._state(row, of[op]) if op in of else ABSENT for version, of in runs}

    def _state(self, row: Row, owner: str) -> str:
        is_shown, task = row.is_shown(owner, self.outcomes), row.runs[owner]
        if is_shown:
            return FINDING
        if task is None:
            return ABSENT
        outcome = self.outcomes.get(task.key)
        if outcome is None or is_shown is None:
            return NOT_RUN if self._reason(task) else ABSENT
        return OTHER if any(one.is_fault for one in findings_of(task, outcome)) else SOUND

    def _waiting_cells(self, of: Mapping[str, Finding]) -> dict[str, str]:
        """Return the states of a fault without a smallest Case: only the first release has it for sure."""
        first, finding = next(iter(of.items()))
        return {
            version: ABSENT
            if finding.op not in owners
            else FINDING
            if owners[finding.op] == first
            else NOT_RUN
            for version, owners in self.header["runs"].items()
        }

    def _native(self, row: Row) -> dict[str, NativeRun]:
        """Return what the Case of a row did on a GPU, by release; empty if it was not tried."""
        found = {}
        for version, task in _native_runs(row, self.header["rules"], self.outcomes).items():
            outcome = self.outcomes.get(task.key)
            if outcome is not None:
                found[version] = NativeRun.of(task, outcome, row.finding)
        return found

    def ran(self, task: Task) -> bool:
        """Answer whether a case ran."""
        return has_run(self.outcomes.get(task.key))

    def _reason(self, task: Task) -> str:
        return why_not_run(self.outcomes.get(task.key), self.stopped)

    def not_run(self) -> list[NotRun]:
        """Return the cases that did not run, one entry for each release, op and reason."""
        confirming = [
            task
            for row in self.rows.rows
            for version, task in row.runs.items()
            if task is not None and version != row.first
        ]
        found = not_run_of([*self.tasks, *confirming], self.outcomes, self.stopped, name_of)
        for of in self.waiting.values():
            for version, finding in list(of.items())[1:]:
                name, run = f"{version} {finding.op}", finding.case.to_cli()
                found.append(NotRun(op=name, reason=_UNDECIDED, cases=1, run=run))
        return found

    def left_out(self) -> list[NotRun]:
        """Return the cases that an op does not support, by its own error, or that violate its contract."""
        return counted(
            (name_of(task), str(self.outcomes[task.key].verdict["unsupported"]) or VIOLATES, task)  # type: ignore[index]
            for task in self.tasks
            if not self.ran(task) and not self._reason(task)
        )


def name_of(task: Task) -> str:
    """Return the release and the op of a case."""
    return f"{task.payload['library']} {op_of(task)}"


def check_releases(
    plan: ReleasePlan,
    engine: Engine,
    *,
    native: Engine | None = None,
    shard: Shard = ALL,
    out: Path | None = None,
    on_progress: OnProgress = ignore_progress,
    seconds: float | None = None,
    stop: Stop = never,
) -> ReleaseTable:
    """Run the cases of a plan, or a shard of them, and return the table.

    ``native``: an engine of a GPU, which then runs the smallest Case of each fault, too. The other arguments
    are those of :func:`attnlab.checker.report.check_library`.
    """
    began = time.perf_counter()
    all_tasks = plan.tasks()
    header, tasks = plan.header(all_tasks, shard), shard.of(all_tasks)
    with kept_run(engine, plan.job(), header, out, stop, seconds) as run:
        run.run(_by_release(tasks), watching("cases", tasks, on_progress))
        name_outputs(run, tasks, on_progress)
        _run_rows(run, header, tasks, on_progress)
        if native is not None:
            run.engine, run.job = native, plan.job("cuda")
            on_gpu = native_tasks(header, tasks, run.outcomes)
            run.run(on_gpu, watching("native", on_gpu, on_progress))
    stopped = "the check was interrupted" if stop() else "the time was up"
    return build_table(
        header, tasks, run.outcomes, seconds=time.perf_counter() - began, stopped=stopped
    )


def _run_rows(run: TaskRun, header: Header, tasks: Sequence[Task], on_progress: OnProgress) -> None:
    """Shrink each fault and run its smallest Case in every release, until all rows are decided."""
    while True:
        pending = list(fault_rows(header, tasks, run.outcomes).pending.values())
        if not pending:
            return
        run.run(pending, watching("shrinking", pending, on_progress))
        if any(task.key not in run.outcomes for task in pending):
            return  # interrupted, or the time is up


def _by_release(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks release by release, the longest first: a worker keeps what a release's cases share."""
    order = {version: i for i, version in enumerate(task.payload["library"] for task in tasks)}
    return sorted(tasks, key=lambda task: (order[task.payload["library"]], -task.cost_s))
