"""Build the table of releases from the outcomes of the tasks."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.checker.plan import FAULTS, Group, Outcomes, groups, shrink_key
from attnlab.checker.release_plan import tasks_of
from attnlab.checker.release_table import ABSENT, FINDING, NOT_RUN, SOUND, Fault, ReleaseTable
from attnlab.checker.report import NotRun
from attnlab.tasks.store import Header
from attnlab.tasks.task import DONE, Task

Key = tuple[str, str, str]  # op, kind, diagnosis


def build_table(
    header: Header, tasks: Sequence[Task], outcomes: Outcomes, *, seconds: float, stopped: str
) -> ReleaseTable:
    """Return the table of the outcomes of some tasks; ``stopped`` is the reason for a missing one."""
    results = _Results(runs=header["runs"], tasks=tasks, outcomes=outcomes, stopped=stopped)
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


@dataclass(frozen=True, kw_only=True)
class _Results:
    """The tasks of a check of releases and their outcomes; ``runs`` as in :class:`ReleasePlan`."""

    runs: Mapping[str, Mapping[str, str]]
    tasks: Sequence[Task]
    outcomes: Outcomes
    stopped: str

    @cached_property
    def groups(self) -> dict[str, dict[Key, Group]]:
        """Return the groups of equal findings, by the release in which they ran."""
        return {
            version: groups(tasks_of(self.tasks, version), self.outcomes) for version in self.runs
        }

    @cached_property
    def tasks_of_op(self) -> dict[tuple[str, str], list[Task]]:
        """Return the tasks by release and op."""
        found: dict[tuple[str, str], list[Task]] = {}
        for task in self.tasks:
            found.setdefault((task.payload["library"], _op(task)), []).append(task)
        return found

    def faults(self, ops: Sequence[str]) -> list[Fault]:
        """Return the faults, op by op, and for an op in the order of the first release that has them."""
        first: dict[Key, Group] = {}
        for of_release in self.groups.values():
            for key, group in of_release.items():
                if group.finding.is_fault:
                    first.setdefault(key, group)
        found = [
            Fault(finding=self._smallest(group), cells=self._cells(key))
            for key, group in first.items()
        ]
        return sorted(found, key=lambda fault: ops.index(fault.finding.op))

    def _cells(self, key: Key) -> dict[str, str]:
        """Return the state of each release for a fault."""
        showing = {
            _features(group.task)
            for of_release in self.groups.values()
            for found, group in of_release.items()
            if found == key
        }
        return {
            version: self._state(key, owners.get(key[0]), showing)
            for version, owners in self.runs.items()
        }

    def _state(self, key: Key, owner: str | None, showing: set[str]) -> str:
        """Return the state of a release whose op ran in the release ``owner``.

        ``showing``: the features of the cases that show the fault in other releases.
        """
        if owner is None:
            return ABSENT
        if key in self.groups[owner]:
            return FINDING
        tasks = self.tasks_of_op.get((owner, key[0]), [])
        tasks = [task for task in tasks if _features(task) in showing] or tasks
        if any(self._reason(task) for task in tasks):
            return NOT_RUN
        return SOUND if any(self.ran(task) for task in tasks) else ABSENT

    def _smallest(self, group: Group) -> Finding:
        """Return the finding of a group at the Case that shrinking found, if there is one."""
        finding = dataclasses.replace(group.finding, seen=group.seen)
        shrunk = self.outcomes.get(shrink_key(group.task, finding))
        if shrunk is None or shrunk.verdict is None:
            return finding
        small = Finding.from_verdict(shrunk.verdict["finding"])
        return dataclasses.replace(small, seen=group.seen)

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
        found: dict[tuple[str, str], list[Task]] = {}
        for task in self.tasks:
            reason = self._reason(task)
            if reason:
                name = f"{task.payload['library']} {_op(task)}"
                found.setdefault((name, reason), []).append(task)
        return [
            NotRun(op=name, reason=reason, cases=len(tasks), run=_command(tasks[0].payload))
            for (name, reason), tasks in found.items()
        ]


def _command(payload: Mapping[str, Any]) -> str:
    return Case.from_dict(payload["case"]).to_cli()


def _op(task: Task) -> str:
    return str(task.payload["case"].get("op") or Case().op)


def _features(task: Task) -> str:
    """Return what is special about a case: its key without the release and the digest of its fields."""
    return task.key.removeprefix(f"{task.payload['library']}/").rpartition("/")[0]
