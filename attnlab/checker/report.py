"""Report: the findings of a library, built from the outcomes of the tasks of a check."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.shown import Document, Shown
from attnlab.checker.case_run import forms_of
from attnlab.checker.coverage import OpCoverage, op_coverage
from attnlab.checker.finding import (
    Finding,
    KnownFinding,
    Location,
    location_of,
    merged_findings,
    split_known,
)
from attnlab.checker.plan import FAULTS, Group, Outcomes, groups, is_case, shrink_key
from attnlab.tasks.store import Header
from attnlab.tasks.task import DONE, Task

# What no case of a check has, by the field that is the usual one in all of them.
NOT_COVERED = {
    "op_argument": "output scales; scales per token and head",
    "mask": "bidirectional masks",
}
_STOPPED = "the check was stopped before"
_READS = "slot reads, which are traced only of Triton kernels under the lab's interpreter"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """Cases of an op that could not run, or were not reached.

    ``reason``: one line; ``cases``: their number; ``run``: the command line of the first.
    """

    op: str
    reason: str
    cases: int
    run: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Document, Shown):
    """The findings of a library.

    - ``source``, ``version``: the path of the vLLM or the plugin, and its version in words.
    - ``cases``, ``cases_run``: the number of cases of all ops, and of those that ran; a case that violates
      a contract or that the kernel states not to support counts in ``cases`` only.
    - ``ops``: the number of cases that ran, for each op that was to be checked.
    - ``locations``: where each op is defined, as {file, line}; ops without a file are left out.
    - ``seconds``: the time that the check took; in a merged report, the sum.
    - ``findings``, ``observations``: one per group, each at its smallest Case. ``findings`` are all faults,
      expected ones included.
    - ``known``: those of ``findings`` that a list of known findings names; ``missing``: the entries of the
      list that did not appear although all cases of their op ran.
    - ``reads``: per op, the number of slots that its kernels read, by kind
      (:mod:`attnlab.lab.result`); only ops whose reads were traced.
    - ``reads_allowed``: per op, the kinds that the contracts of its kernels allow.
    - ``forms``: per op, the number of cases by the kernels that they launched (Triton's interpreter).
    - ``reports``: the paths of the files written for the findings.
    - ``coverage``: per op, the lines and branches that the cases reached, if that was measured.
    - ``not_run``: the cases that did not run although the kernel may support them, and why.
    - ``left_out``: limits that kernels state, features that the ops lack ("not applicable"), and what a check
      does not cover.
    """

    source: str
    version: str
    cases_run: int
    seconds: float
    cases: int = 0
    ops: dict[str, int] = field(default_factory=dict)
    locations: dict[str, Location] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    observations: list[Finding] = field(default_factory=list)
    known: list[KnownFinding] = field(default_factory=list)
    missing: list[KnownFinding] = field(default_factory=list)
    reads: dict[str, dict[str, int]] = field(default_factory=dict)
    reads_allowed: dict[str, list[str]] = field(default_factory=dict)
    forms: dict[str, dict[str, int]] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)
    coverage: dict[str, OpCoverage] = field(default_factory=dict)
    not_run: list[NotRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def unexpected(self) -> list[Finding]:
        """Return the findings that are not known."""
        known = {entry.finding.group for entry in self.known if entry.finding is not None}
        return [finding for finding in self.findings if finding.group not in known]

    @property
    def cases_not_run(self) -> int:
        """Return the number of cases in ``not_run``."""
        return sum(entry.cases for entry in self.not_run)

    @property
    def exit_code(self) -> int:
        """Return 1 for an unexpected or a missing finding, 3 if cases did not run, else 0."""
        if self.unexpected or self.missing:
            return 1
        return 3 if self.not_run else 0

    def location(self, finding: Finding) -> Location | None:
        """Return the line of a finding, or the definition of its op; None if it has no file."""
        if finding.lines:
            return Location(file=finding.lines[0].file, line=finding.lines[0].line)
        return location_of(finding.op, finding.evidence, self.locations)

    def warnings(self) -> list[str]:
        """Return what did not run, one line for each op and reason; empty if all cases ran."""
        return [
            f"{entry.op}: {entry.cases} {'case' if entry.cases == 1 else 'cases'} did not run: "
            f"{entry.reason}"
            for entry in self.not_run
        ]


def build_report(
    header: Header,
    tasks: Sequence[Task],
    outcomes: Outcomes,
    *,
    seconds: float = 0.0,
    stopped: str = _STOPPED,
    known: Sequence[KnownFinding] = (),
) -> Report:
    """Return the report of some tasks of a plan.

    - ``header``: that of the plan; ``tasks``: those that were to run, in the plan's order.
    - ``outcomes``: by key, also those of shrinking; a group that was not shrunk keeps its first case.
    - ``stopped``: the reason for a task without an outcome; ``known``: the expected findings.
    """
    library = header["library"]
    found = [
        dataclasses.replace(finding, flags=(*library["flags"], *finding.flags))
        for op in header["options"]["ops"]
        for finding in sorted(_findings(tasks, outcomes, op), key=lambda finding: finding.order)
    ]
    faults = [finding for finding in found if finding.is_fault]
    not_run = _not_run(tasks, outcomes, stopped)
    reads = _reads(tasks, outcomes)
    incomplete = {entry.op for entry in not_run}
    complete = {_op(task) for task in tasks} - incomplete if header["shard"] == "1/1" else set()
    expected, missing = split_known(known, faults, complete)
    return Report(
        source=library["source"],
        version=library["version"],
        cases=sum(map(is_case, tasks)),
        cases_run=sum(is_case(task) and _ran(outcomes, task) for task in tasks),
        ops={op: _ran_of(tasks, outcomes, op) for op in header["options"]["ops"]},
        locations={op: Location(**place) for op, place in library["locations"].items()},
        seconds=seconds,
        findings=faults,
        observations=[finding for finding in found if not finding.is_fault],
        known=expected,
        missing=missing,
        reads={op: counts for op, (counts, _) in reads.items()},
        reads_allowed={op: sorted(allowed) for op, (_, allowed) in reads.items()},
        forms=forms_of(_verdicts(tasks, outcomes)),
        coverage=_coverage(header, tasks, outcomes),
        not_run=not_run,
        left_out=[
            *_limits(tasks, outcomes, header["options"]["ops"], reads),
            *library.get("not_applicable", ()),
            *library["blind_spots"],
            *(text for field, text in NOT_COVERED.items() if not _sets(tasks, field)),
        ],
    )


def _op(task: Task) -> str:
    return str(task.payload["case"].get("op") or Case().op)


def _ran(outcomes: Outcomes, task: Task) -> bool:
    """Answer whether a case ran: it has a verdict, or it ended its process."""
    outcome = outcomes.get(task.key)
    if outcome is None:
        return False
    return outcome.status in FAULTS or bool(outcome.verdict and outcome.verdict["ran"])


def _ran_of(tasks: Sequence[Task], outcomes: Outcomes, op: str) -> int:
    """Return the number of cases of an op that ran."""
    return sum(is_case(task) and _ran(outcomes, task) for task in tasks if _op(task) == op)


def _findings(tasks: Sequence[Task], outcomes: Outcomes, op: str) -> list[Finding]:
    """Return one finding for each group of an op, at its smallest Case."""
    of_op = [task for task in tasks if _op(task) == op]
    return merged_findings(
        [_smallest(group, outcomes) for group in groups(of_op, outcomes).values()]
    )


def _smallest(group: Group, outcomes: Outcomes) -> Finding:
    """Return the finding of a group at the Case that shrinking found, if there is one."""
    finding = dataclasses.replace(group.own.joined(group.finding), seen=group.seen)
    shrunk = outcomes.get(shrink_key(group.task, group.own))
    if shrunk is None or shrunk.verdict is None:
        return finding
    small = Finding.from_verdict(shrunk.verdict["finding"])
    if small.names and finding.names and not set(small.names) & set(finding.names):
        return finding  # the smaller Case has another name than the group
    first = None if small.case == finding.case else finding.case
    return dataclasses.replace(small.joined(finding), seen=group.seen, first=first)


def _reads(tasks: Sequence[Task], outcomes: Outcomes) -> dict[str, tuple[dict[str, int], set[str]]]:
    """Return the slots read and the states that are allowed, by op, of the cases that were traced."""
    found: dict[str, tuple[dict[str, int], set[str]]] = {}
    for verdict, op in _verdicts(tasks, outcomes):
        if verdict["reads"] is not None:
            counts, allowed = found.setdefault(op, ({}, set()))
            for state, count in verdict["reads"].items():
                counts[state] = counts.get(state, 0) + count
            allowed |= set(verdict["allowed"])
    return found


def _coverage(header: Header, tasks: Sequence[Task], outcomes: Outcomes) -> dict[str, OpCoverage]:
    """Return the coverage of each op that has functions to measure."""
    verdicts = [*_verdicts(tasks, outcomes)]
    found = {
        op: op_coverage(
            op,
            functions,
            [verdict["points"] for verdict, of in verdicts if of == op],
            [verdict["arguments"] for verdict, of in verdicts if of == op],
        )
        for op, functions in header.get("functions", {}).items()
        if functions
    }
    for op, one in found.items():
        one.combinations = header.get("combinations", {}).get(op, {})
    return found


def _sets(tasks: Sequence[Task], field: str) -> bool:
    """Answer whether a case sets a field to another value than the usual one, and than other strides."""
    return any(task.payload["case"].get(field, "gaps") != "gaps" for task in tasks)


def _verdicts(tasks: Sequence[Task], outcomes: Outcomes) -> Iterable[tuple[Mapping[str, Any], str]]:
    for task in tasks:
        outcome = outcomes.get(task.key)
        if outcome is not None and outcome.verdict is not None:
            yield outcome.verdict, _op(task)


def _limits(
    tasks: Sequence[Task], outcomes: Outcomes, ops: Sequence[str], reads: Mapping[str, Any]
) -> list[str]:
    """Return the limits that kernels state, each once, and the ops whose reads were not traced."""
    found = list[str]()
    for op in ops:
        texts = [v["unsupported"] for v, of in _verdicts(tasks, outcomes) if of == op]
        found += [f"{op}: {text}" for text in dict.fromkeys(texts) if text]
        has_tasks = any(_op(task) == op for task in tasks)
        found += [f"{op}: {_READS}"] if has_tasks and op not in reads else []
    return found


def _not_run(tasks: Sequence[Task], outcomes: Outcomes, stopped: str) -> list[NotRun]:
    """Return the cases that did not run, one entry for each op and reason."""
    found: dict[tuple[str, str], NotRun] = {}
    for task in tasks:
        outcome = outcomes.get(task.key)
        reason = stopped
        if outcome is not None:
            is_fault = outcome.status in FAULTS
            reason = outcome.text if outcome.status != DONE and not is_fault else ""
            reason = outcome.verdict["not_run"] if outcome.verdict is not None else reason
        if reason:
            run = Case.from_dict(task.payload["case"]).to_cli()
            key = (_op(task), reason)
            entry = found.get(key, NotRun(op=key[0], reason=reason, cases=0, run=run))
            found[key] = dataclasses.replace(entry, cases=entry.cases + 1)
    return [*found.values()]
