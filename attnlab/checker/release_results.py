"""Build the table of releases from the outcomes of the tasks."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.checker.plan import FAULTS, Outcomes, findings_of
from attnlab.checker.release_rows import (
    VIOLATES,
    Row,
    Rows,
    fault_rows,
    run_task,
    shows,
    why_no_verdict,
)
from attnlab.checker.release_table import (
    ABSENT,
    FINDING,
    NOT_RUN,
    OTHER,
    SOUND,
    Fault,
    NativeRun,
    ReleaseTable,
)
from attnlab.checker.report import NotRun
from attnlab.tasks.store import Header
from attnlab.tasks.task import DONE, Task

_NATIVE = "native"  # prefix of the keys of tasks on a GPU
_NATIVE_LIMIT_S = 180.0  # compiling a kernel takes long
_UNDECIDED = "the smallest case of the fault did not run in this release"


def build_table(
    header: Header, tasks: Sequence[Task], outcomes: Outcomes, *, seconds: float, stopped: str
) -> ReleaseTable:
    """Return the table of the outcomes of some tasks; ``stopped`` is the reason for a missing one."""
    results = _Results(
        header=header,
        tasks=tasks,
        outcomes=outcomes,
        stopped=stopped,
    )
    return ReleaseTable(
        releases=[*header["runs"]],
        device=header["device"],
        platform=header["options"]["platform"],
        ops=header["runs"],
        cases=len(tasks),
        cases_run=sum(results.ran(task) for task in tasks),
        seconds=seconds,
        versions=header["versions"],
        faults=results.faults(header["options"]["ops"]),
        not_run=results.not_run(),
        left_out=results.left_out(),
    )


def merged_releases(header: Header, outcomes: Outcomes) -> ReleaseTable:
    """Return the table of merged stores; ``seconds`` is the sum of the cases' times."""
    return build_table(
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
    wrong = [version for version in row.runs if row.is_shown(version, outcomes)]
    found = {}
    for version in dict.fromkeys([*wrong[:1], *wrong[-1:]]):
        like = row.runs[version]
        if like is not None:
            task = run_task(row.finding, version, rules[version], like, _NATIVE)
            found[version] = dataclasses.replace(task or like, limit_s=_NATIVE_LIMIT_S)
    return found


@dataclass(frozen=True, kw_only=True)
class _Results:
    """The tasks of a check of releases, the header of their plan, and their outcomes."""

    header: Header
    tasks: Sequence[Task]
    outcomes: Outcomes
    stopped: str

    @property
    def runs(self) -> Mapping[str, Mapping[str, str]]:
        """Return, by release and op, the release whose identical op ran."""
        found: Mapping[str, Mapping[str, str]] = self.header["runs"]
        return found

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
        owners = {version: of.get(row.finding.op) for version, of in self.runs.items()}
        return {
            version: ABSENT if owner is None else self._state(row, owner)
            for version, owner in owners.items()
        }

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
            for version, owners in self.runs.items()
        }

    def _native(self, row: Row) -> dict[str, NativeRun]:
        """Return what the Case of a row did on a GPU, by release; empty if it was not tried."""
        found = {}
        for version, task in _native_runs(row, self.header["rules"], self.outcomes).items():
            outcome = self.outcomes.get(task.key)
            if outcome is None:
                continue
            is_shown = shows(task, outcome, row.is_kind)
            why = why_no_verdict(outcome) if is_shown is None else ""
            found[version] = NativeRun(is_confirmed=is_shown, why=why)
        return found

    def ran(self, task: Task) -> bool:
        """Answer whether a case ran: it has a verdict, or it ended its process."""
        outcome = self.outcomes.get(task.key)
        if outcome is None:
            return False
        return outcome.status in FAULTS or bool(outcome.verdict and outcome.verdict["ran"])

    def _reason(self, task: Task) -> str:
        """Return why a case did not run although the kernel may support it, or ""."""
        outcome = self.outcomes.get(task.key)
        if outcome is None:
            return self.stopped
        if outcome.verdict is not None:
            return str(outcome.verdict["not_run"])
        return "" if outcome.status in (DONE, *FAULTS) else outcome.text

    def not_run(self) -> list[NotRun]:
        """Return the cases that did not run, one entry for each release, op and reason."""
        confirming = [
            task
            for row in self.rows.rows
            for version, task in row.runs.items()
            if task is not None and version != row.first
        ]
        reasons = [(task, self._reason(task)) for task in (*self.tasks, *confirming)]
        found = _counted((task, reason) for task, reason in reasons if reason)
        for of in self.waiting.values():
            for version, finding in list(of.items())[1:]:
                name, run = f"{version} {finding.op}", finding.case.to_cli()
                found.append(NotRun(op=name, reason=_UNDECIDED, cases=1, run=run))
        return found

    def left_out(self) -> list[NotRun]:
        """Return the cases that an op does not support, by its own error, or that violate its contract."""
        return _counted(
            (task, str(self.outcomes[task.key].verdict["unsupported"]) or VIOLATES)  # type: ignore[index]
            for task in self.tasks
            if not self.ran(task) and not self._reason(task)
        )


def _counted(tasks: Any) -> list[NotRun]:
    """Return an entry for each release, op and reason of some (task, reason)."""
    found: dict[tuple[str, str], list[Task]] = {}
    for task, reason in tasks:
        name = f"{task.payload['library']} {_op(task)}"
        found.setdefault((name, reason), []).append(task)
    return [
        NotRun(op=name, reason=reason, cases=len(of), run=_command(of[0].payload))
        for (name, reason), of in found.items()
    ]


def _command(payload: Mapping[str, Any]) -> str:
    return Case.from_dict(payload["case"]).to_cli()


def _op(task: Task) -> str:
    return str(task.payload["case"].get("op") or Case().op)
