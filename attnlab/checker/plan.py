"""Plan: the tasks of a check, and the tasks that shrink its findings."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.checker.case_job import CheckJob
from attnlab.checker.combinations import combinations_of
from attnlab.checker.costs import Costs, cost_key, cost_s, packaged_costs
from attnlab.checker.coverage import functions_of
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.locations import op_locations
from attnlab.checker.memory import estimated_bytes
from attnlab.checker.shrinking import MAX_TRIES
from attnlab.checker.sources import source_digest, versions
from attnlab.kernels.backend import Backend
from attnlab.tasks.shard import ALL, Shard
from attnlab.tasks.store import Header
from attnlab.tasks.task import CRASH, DEVICE_LOST, DONE, OUT_OF_MEMORY, TIMEOUT, Outcome, Task

Outcomes = Mapping[str, Outcome]
# Outcomes that are faults of the kernel, and their diagnosis.
FAULTS = {
    CRASH: "crash",
    DEVICE_LOST: "crash",
    TIMEOUT: "does not end",
    OUT_OF_MEMORY: "out of memory",
}
_SHRINK_COST = 8.0  # of a finding, in times of its case


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a check runs: hostile cases of the ops of one library.

    - ``library``: a name that distinguishes it from others in the same run; "" for a single one.
    - ``cases``: for each op, None for all.
    - ``case_limit_s``: how long a case may take in a process of its own.
    - ``coverage``: record which points of the kernels the cases reach.
    - ``costs``: recorded times, which decide the shards; all shards need the same.
    """

    backend: Backend
    ops: tuple[str, ...]
    platform: str = "sm_90"
    cases: int | None = None
    seed: int = 0
    case_limit_s: float = 60.0
    library: str = ""
    coverage: bool = False
    costs: Costs = field(default_factory=packaged_costs, repr=False)

    def tasks(self) -> list[Task]:
        """Return a task for each case, op by op, the most informative case of an op first."""
        return [self._task(case) for op in self.ops for case in self._hostile_cases(op)]

    def _hostile_cases(self, op: str) -> Iterable[Case]:
        return hostile_cases(self.backend, op, self.platform, self.cases, self.seed)

    def _task(self, case: Case) -> Task:
        key = cost_key(case)
        return Task(
            key=f"{self._prefix}{key}/{digest_of(case)}",
            payload={"library": self.library, "case": case.changes()},
            cost_s=cost_s(self.costs, key),
            memory_bytes=estimated_bytes(case, self.backend),
            limit_s=self.case_limit_s,
        )

    @property
    def _prefix(self) -> str:
        return f"{self.library}/" if self.library else ""

    def shrink_tasks(self, tasks: Sequence[Task], outcomes: Outcomes) -> list[Task]:
        """Return a task for each group of equal findings: shrink that of the group's first case.

        ``tasks``: those of :meth:`tasks` that this process is to run. A case that ended its process is
        not shrunk, because each step could end the process again.
        """
        found = []
        for first in groups(tasks, outcomes).values():
            if first.is_stopped:
                continue
            found.append(shrink_task(first.task, first.finding))
        return found

    def job(self) -> CheckJob:
        """Return the job that runs the tasks of this plan alone."""
        return CheckJob(
            libraries={self.library: self.backend},
            device=self.backend.device,
            coverage=self.coverage,
        )

    def header(self, tasks: Sequence[Task], shard: Shard = ALL) -> Header:
        """Return the header of a store of this plan: everything that its verdicts depend on.

        ``tasks``: all of the plan, as :meth:`tasks` returns them.
        """
        keys = "\n".join(f"{task.key} {task.cost_s}" for task in tasks)
        return {
            "command": "check",
            "library": {
                "source": str(self.backend.path or self.backend.name),
                "version": self.backend.version,
                "digest": source_digest(self.backend),
                "device": self.backend.device,
                "flags": [*self.backend.flags],
                "blind_spots": [*self.backend.blind_spots],
                "not_applicable": [
                    line for op in self.ops for line in self.backend.not_applicable(op)
                ],
                "locations": {
                    op: place.to_dict() for op, place in op_locations(self.backend).items()
                },
            },
            "options": {
                "ops": [*self.ops],
                "platform": self.platform,
                "cases": self.cases,
                "seed": self.seed,
                "case_seconds": self.case_limit_s,
            },
            "versions": versions(),
            "shard": str(shard),
            "digest of cases and costs": hashlib.sha256(keys.encode()).hexdigest()[:16],
            "cases": [{"key": task.key, "payload": task.payload} for task in tasks],
            "functions": self._functions(),
            "combinations": self._combinations(),
        }

    def _functions(self) -> dict[str, list[dict[str, Any]]]:
        """Return the functions of each op whose coverage is measured; empty without ``coverage``."""
        ops = self.ops if self.coverage else ()
        return {op: functions_of(self.backend, op) for op in ops}

    def _combinations(self) -> dict[str, dict[str, Any]]:
        """Return the combinations of each op whose coverage is measured; empty without ``coverage``."""
        return {
            op: combinations_of(
                self.backend, op, self.platform, self.seed, list(self._hostile_cases(op))
            )
            for op in (self.ops if self.coverage else ())
            if self.backend.has_op(op)
        }


def digest_of(case: Case) -> str:
    """Return a short digest of all fields of a Case."""
    return hashlib.sha256(case.to_json().encode()).hexdigest()[:12]


@dataclass(slots=True)
class Group:
    """Equal findings: the finding of the first case, its task, and the number of cases.

    ``is_stopped``: the case ended or exceeded something, so there is no verdict.
    """

    task: Task
    finding: Finding
    seen: int = 1
    is_stopped: bool = False


def groups(tasks: Sequence[Task], outcomes: Outcomes) -> dict[tuple[str, str, str], Group]:
    """Return the groups of findings of the same fault, in the order of the tasks that show them first.

    Cases that do not decide between the same defects belong to one fault, as :meth:`Finding.is_same` says.
    """
    found: dict[tuple[str, str, str], Group] = {}
    for task in tasks:
        outcome = outcomes.get(task.key)
        if outcome is None:
            continue
        counted = set[tuple[str, str, str]]()
        for finding in findings_of(task, outcome):
            same = (key for key, group in found.items() if group.finding.is_same(finding))
            key = next(same, finding.group)
            if key not in found:
                found[key] = Group(task, finding, 0, outcome.status != DONE)
            found[key].finding = found[key].finding.joined(finding)
            found[key].seen += key not in counted
            counted.add(key)
    return {group.finding.group: group for group in found.values()}


def findings_of(task: Task, outcome: Outcome) -> list[Finding]:
    """Return the findings of a case."""
    if outcome.verdict is not None:
        return [Finding.from_verdict(fields) for fields in outcome.verdict["findings"]]
    if outcome.status not in FAULTS:
        return []
    case = Case.from_dict(task.payload["case"])
    return [
        Finding(
            op=case.op,
            kind="fails",
            case=case,
            evidence=outcome.text,
            diagnosis=FAULTS[outcome.status],
            flags=() if task.limit_s is None else ("--seconds", f"{task.limit_s:g}"),
        )
    ]


def shrink_task(task: Task, finding: Finding) -> Task:
    """Return the task that shrinks a finding of a case."""
    return Task(
        key=shrink_key(task, finding),
        payload={"library": task.payload["library"], "finding": finding.to_verdict()},
        cost_s=_SHRINK_COST * task.cost_s,
        memory_bytes=task.memory_bytes,
        limit_s=None if task.limit_s is None else MAX_TRIES * task.limit_s,
    )


def shrink_key(task: Task, finding: Finding) -> str:
    """Return the key of the task that shrinks a finding of a case."""
    return f"shrink/{task.key}/{finding.kind}/{finding.group[2]}"
