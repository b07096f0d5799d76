"""Plan: the tasks of a check, and the tasks that shrink its findings."""

import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import InvalidCase
from attnlab.checker.case_check import COST_S, MAX_TRIES, CheckJob, has_horizons, ops_with_files
from attnlab.checker.case_run import source_digest, versions, weights_of
from attnlab.checker.coverage import functions_of
from attnlab.checker.finding import UNNAMED, Finding, case_of, op_locations
from attnlab.checker.hostile import DEFAULTS, combinations_of, hostile_cases
from attnlab.kernels.backend import Backend
from attnlab.kernels.vllm.features import unchanged_sources
from attnlab.lab.products import needed_bytes
from attnlab.tasks.store import ALL, Header, Shard, read_store
from attnlab.tasks.task import CRASH, DEVICE_LOST, DONE, OUT_OF_MEMORY, TIMEOUT, Outcome, Task

# Recorded times of the hostile cases, by op and by what is special about a case.
#
# They order the cases, divide them into shards of equal length, and estimate the remaining time. Only
# ratios matter. ``costs.json`` was measured under Triton's interpreter; ``python tools/costs.py STORE``
# writes it anew from the store of a check.

Costs = Mapping[str, float]  # seconds by op and features, as "unified_attention/alibi=True"
_UNKNOWN_S = 1.0
# Fields in which all cases differ, or that do not change the time.
_COMMON = {
    *("op", "backend", "release", "platform", "seed", "atol"),
    *("query_lens", "ctx_lens", "num_blocks"),
}


def cost_key(case: Case) -> str:
    """Return the op of a hostile case and the fields that its variant sets."""
    special = {
        name: value
        for name, value in case.changes().items()
        if name not in _COMMON and DEFAULTS.get(name) != value
    }
    plain = {name: getattr(case, name) for name in DEFAULTS if name not in case.changes()}
    special |= {n: v for n, v in plain.items() if n not in _COMMON and DEFAULTS[n] != v}
    words = (f"{name}={value}" for name, value in sorted(special.items()))
    return f"{case.op}/{','.join(words) or 'plain'}"


@cache
def packaged_costs() -> Costs:
    """Return the times that the package was built with."""
    found: dict[str, float] = json.loads((files(__package__) / "costs.json").read_text())
    return found


def costs_of_store(folder: Path) -> Costs:
    """Return the mean times of the cases of a store. Raises InvalidCase if it has none.

    On a CPU it is the processor time, which does not depend on what else the machine does.
    """
    times: dict[str, list[float]] = {}
    header, outcomes = read_store(folder)
    is_cpu = header.get("library", {}).get("device") == "cpu"
    for key, outcome in outcomes.items():
        parts = key.split("/")
        if outcome.status == DONE and len(parts) >= 3 and parts[0] != "shrink":
            times.setdefault("/".join(parts[-3:-1]), []).append(
                outcome.cpu_s if is_cpu else outcome.seconds
            )
    if not times:
        raise InvalidCase(f"times must be the store of a check, got {folder}", field="times")
    return {key: round(statistics.fmean(seconds), 3) for key, seconds in sorted(times.items())}


def cost_s(costs: Costs, key: str) -> float:
    """Return the time of a key; if it was not recorded, the median of its op."""
    if key in costs:
        return costs[key]
    same_op = [s for name, s in costs.items() if name.partition("/")[0] == key.partition("/")[0]]
    return statistics.median(same_op) if same_op else _UNKNOWN_S


# How much memory the check of a case takes, estimated before anything is allocated.

# The check runs a case with up to three contents of the empty slots, and a Lab keeps three caches.
_CONTENTS = 3
# Of the cache during a run: the lab's layout, the op's layout, a strided copy and a comparison's.
_COPIES = 4
_FIXED_BYTES = 64 << 20  # what torch and the allocator of a device keep for small tensors
_MOST_SCORES = {"cpu": 3 << 17, "cuda": 1 << 28}  # of a tile of the reference


def estimated_bytes(case: Case, backend: Backend) -> int:
    """Return about how many bytes the check of a Case allocates on the backend's device.

    On a CPU, blocks before ``first_block`` are addresses without memory. On a GPU they take memory, in two
    layouts of the cache.
    """
    total = _FIXED_BYTES + _CONTENTS * needed_bytes(case, _COPIES) + _score_bytes(case, backend)
    if backend.device == "cuda" and case.first_block:
        total += 2 * far_bytes(case)
    return total


def far_bytes(case: Case) -> int:
    """Return the size of the blocks before ``first_block`` in key and value, which share them."""
    block = case.block_size * case.num_kv_heads * case.head_size
    return case.first_block * block * (1 if case.is_fp8 else DTYPE_BYTES[case.dtype])


def _score_bytes(case: Case, backend: Backend) -> int:
    """Return the size of the reference's scores and weights, and of a sequence's keys and values."""
    longest = max(case.lengths.seq_lens)
    rows = max(case.lengths.query_lens)
    scores = min(case.num_heads * rows * longest, _MOST_SCORES[backend.device])
    return 8 * (3 * scores + 2 * case.num_heads * longest * case.head_size)


Outcomes = Mapping[str, Outcome]
# Outcomes that are faults of the kernel, and their diagnosis.
FAULTS = {
    CRASH: "crash",
    DEVICE_LOST: "crash",
    TIMEOUT: "does not end",
    OUT_OF_MEMORY: "out of memory",
}
_SHRINK_COST = 8.0  # of a finding, in times of its case
_NAMING_COST = 4.0  # at most, of a finding, in times of the limit of its case


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a check of one library, or of many releases, runs of ``ops``.

    - ``cases``: for each op, None for all.
    - ``case_limit_s``: how long a case may take in a process of its own.
    - ``costs``: recorded times, which decide the shards; all shards need the same.
    - ``horizon``: also ask for the int32 horizons of each op, if it has Triton kernels in a source.
    """

    ops: tuple[str, ...]
    platform: str = "sm_90"
    cases: int | None = None
    seed: int = 0
    case_limit_s: float = 60.0
    costs: Costs = field(default_factory=packaged_costs, repr=False)
    horizon: bool = True

    def options(self) -> dict[str, Any]:
        """Return the conditions as the header of a store has them."""
        return {
            "ops": [*self.ops],
            "platform": self.platform,
            "cases": self.cases,
            "seed": self.seed,
            "case_seconds": self.case_limit_s,
            "horizon": self.horizon,
        }

    def part(self, tasks: Sequence[Task], shard: Shard) -> dict[str, Any]:
        """Return fields of the header of a store: the versions, the shard, and a digest of the tasks."""
        keys = "\n".join(f"{task.key} {task.cost_s}" for task in tasks)
        return {
            "versions": versions(),
            "shard": str(shard),
            "digest of cases and costs": hashlib.sha256(keys.encode()).hexdigest()[:16],
        }


@dataclass(frozen=True, kw_only=True)
class Plan(Conditions):
    """What a check runs: hostile cases of the ops of one library.

    - ``library``: a name that distinguishes it from others in the same run; "" for a single one.
    - ``coverage``: record which points of the kernels the cases reach.
    - ``all_ops``: the ops of all libraries of a run with several; empty for one.
    - ``left_out``: what is not checked, and why, in lines.
    """

    backend: Backend
    library: str = ""
    coverage: bool = False
    all_ops: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def tasks(self) -> list[Task]:
        """Return a task for each case, op by op, the most informative case of an op first."""
        found = []
        for op in self.ops:
            with unchanged_sources():
                cases = [self._task(case) for case in self._hostile_cases(op)]
            found += cases
            if cases and self.horizon and has_horizons(self.backend):
                found.append(self._horizon_task(op, cases[0]))
        return found

    def _horizon_task(self, op: str, first: Task) -> Task:
        """Return the task that asks for the horizons of an op; its payload has the op's first case."""
        return replace(
            first,
            key=f"{self._prefix}{op}/horizon",
            payload={**first.payload, "horizon": ops_with_files(op, self.all_ops or self.ops)},
            cost_s=COST_S,
            memory_bytes=_FIXED_BYTES,
        )

    def _hostile_cases(self, op: str) -> Iterable[Case]:
        return hostile_cases(self.backend, op, self.platform, self.cases, self.seed)

    def _task(self, case: Case) -> Task:
        key = cost_key(case)
        return Task(
            key=f"{self._prefix}{key}/{digest_of(case)}",
            payload={"library": self.library, "case": case.changes(), UNNAMED: True},
            cost_s=cost_s(self.costs, key),
            memory_bytes=estimated_bytes(case, self.backend),
            limit_s=self.case_limit_s,
        )

    @property
    def _prefix(self) -> str:
        return f"{self.library}/" if self.library else ""

    def shrink_tasks(
        self, tasks: Sequence[Task], outcomes: Outcomes, shard: Shard = ALL
    ) -> list[Task]:
        """Return a task for each group of equal findings: shrink that of the case which stands for it.

        ``tasks``: those of :meth:`tasks` that this process is to run. In a ``shard``, the first case of each
        kind of finding is shrunk, since the groups, and what stands for them, depend on the other shards.
        A case that ended its process is not shrunk, because each step could end the process again.
        """
        whole = groups if shard == ALL else _kinds
        return [
            shrink_task(one.task, one.own)
            for one in whole(tasks, outcomes).values()
            if not one.is_stopped and not one.own.horizon
        ]

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
        measured = self.ops if self.coverage else ()
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
                    *(line for op in self.ops for line in self.backend.not_applicable(op)),
                    *self.left_out,
                ],
                "locations": {
                    op: asdict(place) for op, place in op_locations(self.backend).items()
                },
            },
            "options": self.options(),
            **self.part(tasks, shard),
            "cases": [{"key": task.key, "payload": task.payload} for task in tasks],
            "functions": {op: functions_of(self.backend, op) for op in measured},
            "combinations": {
                op: combinations_of(
                    self.backend, op, self.platform, self.seed, [*self._hostile_cases(op)]
                )
                for op in measured
                if self.backend.has_op(op)
            },
        }


def has_run(outcome: Outcome | None) -> bool:
    """Answer whether a case ran: it has a verdict, or it ended its process."""
    if outcome is None:
        return False
    return outcome.status in FAULTS or bool(outcome.verdict and outcome.verdict["ran"])


def why_not_run(outcome: Outcome | None, stopped: str) -> str:
    """Return why a case did not run although the kernel may support it, or ""; ``stopped``: without one."""
    if outcome is None:
        return stopped
    if outcome.verdict is not None:
        return str(outcome.verdict["not_run"])
    return "" if outcome.status in (DONE, *FAULTS) else outcome.text


def is_case(task: Task) -> bool:
    """Answer whether a task runs a case; the others ask for the int32 horizons of an op."""
    return "horizon" not in task.payload


def op_of(task: Task) -> str:
    """Return the op of a case."""
    return str(task.payload["case"].get("op") or Case().op)


def digest_of(case: Case) -> str:
    """Return a short digest of all fields of a Case."""
    return hashlib.sha256(case.to_json().encode()).hexdigest()[:12]


@dataclass(slots=True)
class Group:
    """Equal findings: the case that stands for them, and what all of them tell.

    - ``task``: the first case that decides between the names of ``finding``, else the first; ``own``: its
      finding. What shrinks it depends on nothing else.
    - ``finding``: that of the first case, with what the others add; ``seen``: the number of cases.
    - ``is_stopped``: the case ended or exceeded something, so there is no verdict.
    """

    task: Task
    own: Finding
    finding: Finding
    seen: int = 0
    is_stopped: bool = False

    def add(self, task: Task, finding: Finding, is_stopped: bool) -> None:
        """Add the finding of another case."""
        self.finding = self.finding.joined(finding)
        if not self.own.is_named and finding.is_named:
            self.task, self.own, self.is_stopped = task, finding, is_stopped


def _kinds(tasks: Sequence[Task], outcomes: Outcomes) -> dict[object, Group]:
    """Return the first finding of each kind: of those that tell the same of a fault."""
    found: dict[object, Group] = {}
    for task in tasks:
        if (outcome := outcomes.get(task.key)) is not None:
            for one in findings_of(task, outcome):
                kind = (one.group, one.names, one.wrong_in)
                found.setdefault(kind, Group(task, one, one, is_stopped=outcome.status != DONE))
    return found


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
            is_stopped = outcome.status != DONE
            group = found.setdefault(key, Group(task, finding, finding, is_stopped=is_stopped))
            group.add(task, finding, is_stopped)
            group.seen += key not in counted
            counted.add(key)
    return {group.finding.group: group for group in found.values()}


def findings_of(task: Task, outcome: Outcome) -> list[Finding]:
    """Return the findings of a case."""
    if outcome.verdict is not None:
        return [Finding.from_verdict(fields) for fields in outcome.verdict["findings"]]
    if outcome.status not in FAULTS:
        return []
    case = case_of(op_of(task), task.payload["case"])
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


_MOST_NAMED = 40  # findings that one task names


def naming_tasks(tasks: Sequence[Task], outcomes: Outcomes) -> list[Task]:
    """Return the tasks that name the wrong outputs of cases, those together that the same faults may explain.

    The smallest cases come first where a rule is looked for, because that takes less time there.
    """
    sets: dict[tuple[str, str, tuple[str, ...]], list[tuple[Task, Finding]]] = {}
    for task in tasks:
        outcome = outcomes.get(task.key)
        for one in () if outcome is None else findings_of(task, outcome):
            if one.diagnosis == UNNAMED:
                key = (task.payload["library"], one.op, one.names)
                sets.setdefault(key, []).append((task, one))
    found = []
    for (_, _, names), whole in sets.items():
        if not names:
            whole.sort(key=lambda one: weights_of(one[1].case))
        for i in range(0, len(whole), _MOST_NAMED):
            found.append(_naming_task(whole[i : i + _MOST_NAMED]))
    return found


def _naming_task(of: Sequence[tuple[Task, Finding]]) -> Task:
    first, limits = of[0][0], [task.limit_s for task, _ in of if task.limit_s is not None]
    return Task(
        key=f"name/{first.key}",
        payload={
            "library": first.payload["library"],
            "keys": [task.key for task, _ in of],
            "findings": [one.to_verdict() for _, one in of],
        },
        cost_s=sum(task.cost_s for task, _ in of),
        memory_bytes=max(task.memory_bytes for task, _ in of),
        limit_s=_NAMING_COST * sum(limits) if limits else None,
    )


def named_outcomes(task: Task, outcome: Outcome, outcomes: Outcomes) -> Iterator[Outcome]:
    """Yield the outcomes of the cases of a naming task with the findings that it returned."""
    if outcome.verdict is None:
        return
    for key, fields in zip(task.payload["keys"], outcome.verdict["findings"], strict=True):
        old = outcomes[key]
        assert old.verdict is not None
        found = [fields if f["diagnosis"] == UNNAMED else f for f in old.verdict["findings"]]
        yield replace(old, verdict={**old.verdict, "findings": found})


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
