"""Atlas: every fault that attnlab knows, at one small call each, in the releases of several libraries.

A row is a fault, known by what was found: a defect of the catalogue, or a finding of a check. Its call runs
in every op of every release that takes it. A defect that no check has found has a call, too: of each op, the
plainest hostile Case whose output the defect changes by more than rounding.
"""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.masks import MASK_DATA
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import OPS
from attnlab.case.shown import json_value
from attnlab.checker.case_check import COST_S, has_horizons, is_callers_fault, ops_with_files
from attnlab.checker.check import usual_platform
from attnlab.checker.finding import HORIZON, KINDS, Finding, case_of
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.plan import (
    Outcomes,
    cost_key,
    cost_s,
    costs_of_store,
    digest_of,
    estimated_bytes,
    findings_of,
    has_run,
    packaged_costs,
)
from attnlab.checker.releases import (
    ABSENT,
    FINDING,
    NAMELESS,
    NOT_RUN,
    OTHER,
    SOUND,
    Fault,
    OpRun,
    Release,
    ReleasePlan,
    ReleaseTable,
    merged_releases,
    name_of,
    op_digest,
    op_files,
    why_no_verdict,
)
from attnlab.checker.report import OnProgress, ignore_progress, not_run_of, watching
from attnlab.defects import DEFECTS
from attnlab.diagnosis.decision import NEVER_WRITTEN
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab
from attnlab.linear.state_case import RECORDS, STATE_OPS
from attnlab.mutation.power import ChangedTest
from attnlab.tasks.run import kept_run
from attnlab.tasks.store import ALL, Header, Shard
from attnlab.tasks.task import Engine, Stop, Task, never

COMMAND = "atlas"
Fields = dict[str, Any]  # of a Case, without those that choose the op and the library
ANY_OP = "*"  # a call that any op may get
# In place of a call: asks at which sizes int32 addresses overflow.
HORIZONS: Fields = {"horizon": True}
FOUND = "found by checks"
_RAISED_AT = re.compile(r"^\S+\.py:(#|\d+): \w+: ")  # where which exception was raised
_BEGIN = 30
_TILE = 16  # query heads; kernels have faults with more per KV head
_KIND_OF_ITS_OWN = ("freed_leaked", "tail_leaked")  # a check calls them reads of slots
_OF_MERGES = ("partitions", "softmax")  # families of defects that an op which merges parts can have
# Fields of a Case that a fault may need; without them its output tells of less.
_FEATURES = {
    *(*MASK_DATA, "mask", "sliding_window", "freed", "alibi", "sinks", "softcap", "pad_batch"),
    *("kv_cache_dtype", "kv_layout", "num_splits", "interleave_v", "distribution"),
}
_PLACE = ("op", "backend", "release", "platform")
_STATE_S, _STATE_BYTES = 1.0, 256 << 20  # of a small case of linear attention
_ORDER = (FINDING, NOT_RUN, OTHER, SOUND, ABSENT)  # which state of several ops a cell has


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault with the calls that show it.

    - ``kind``, ``diagnosis``: as of a Finding. ``title``: in words. ``family``: what it is listed under.
    - ``calls``: by op the fields of Cases; those of ANY_OP are for the other ops of the same sort.
    - ``found_in``: the ops in which a check has found it. ``lines``: by op, an expression of the line at
      fault.
    """

    kind: str
    diagnosis: str
    title: str
    family: str
    calls: dict[str, list[Fields]] = field(default_factory=dict)
    found_in: tuple[str, ...] = ()
    lines: dict[str, str] = field(default_factory=dict)

    def calls_at(self, op: str) -> list[Fields]:
        """Return the calls for an op."""
        if op in self.calls:
            return self.calls[op]
        return self.calls.get(ANY_OP, []) if _sort(op) in map(_sort, self.found_in) else []

    def is_shown(self, finding: Finding, is_own_call: bool) -> bool:
        """Answer whether a finding is this fault.

        A name states it whatever the call is. A status, such as "unexplained", says so only of the call for
        which a check has found the fault.
        """
        if finding.kind != self.kind:
            return False
        label = label_of(finding)
        if label == self.diagnosis and label not in NAMELESS:
            return True
        labels = {label, self.diagnosis}
        return is_own_call and finding.op in self.found_in and bool(labels & NAMELESS)


def _sort(op: str) -> tuple[bool, bool] | bool:
    """Return what kind of op it is: one that writes the cache, one that merges, attention, or linear."""
    return op in STATE_OPS or (OPS[op].writes_cache, OPS[op].merges)


def label_of(finding: Finding) -> str:
    """Return what is known of a finding; of an exception how it begins, without its place."""
    label = finding.diagnosis
    return _RAISED_AT.sub("", label)[:_BEGIN] if finding.kind == "fails" else label


def _decided(finding: Finding) -> Finding:
    """Return a finding with the name of the only defect that explains it, also if none was confirmed."""
    has_one = len(finding.names) == 1
    return dataclasses.replace(finding, diagnosis=finding.names[0]) if has_one else finding


# The faults that are known: the catalogue's defects, and the findings of checks, which documents have.


def packaged_faults() -> dict[Finding, str]:
    """Return the findings that come with attnlab, each at its smallest Case, with its line or ""."""
    return dict(_findings(json.loads((files(__package__) / "faults.json").read_text())))


def read_faults(path: Path) -> dict[Finding, str]:
    """Return the faults of a document, as :func:`packaged_faults`.

    Raises InvalidCase if it is not one of ``attnlab check``, ``releases`` or ``atlas``.
    """
    try:
        return dict(_findings(json.loads(path.read_text())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"faults must be a JSON document of check, releases or atlas, got {path}: {error}"
        raise InvalidCase(" ".join(text.split()), field="faults") from error


def _findings(document: Mapping[str, Any]) -> Iterator[tuple[Finding, str]]:
    """Yield the faults of a document that have a Case, and an expression of the line at fault, or ""."""
    names = ("op", "kind", "evidence", "diagnosis", "names", "description", "case")
    for one in document["faults"] if "faults" in document else document["findings"]:
        has_case = one["kind"] in KINDS and one["kind"] != HORIZON and one.get("last", True)
        if has_case and one["op"] in RECORDS:
            fields = {name: one[name] for name in names if name in one}
            if "diagnosis" not in one:  # a check of linear attention
                is_raised = one["kind"] == "fails"
                fields |= {"diagnosis": one["evidence"] if is_raised else "described"}
                fields |= {"description": one["title"]}
            yield Finding.from_verdict({"evidence": "", **fields}), one.get("line", "")


def known_faults(
    found: Mapping[Finding, str], libraries: Mapping[str, Release], platforms: Mapping[str, str]
) -> list[KnownFault]:
    """Return the catalogue's defects, then the faults that checks have found and that are none of these.

    ``found``: findings, each with an expression of the line at fault, or "".
    ``libraries``: by op, the release whose hostile Cases the calls of defects are chosen from, the newest;
    ``platforms``: by op.
    """
    catalogue = _catalogue(libraries, platforms)
    others: dict[tuple[str, ...], KnownFault] = {}
    for one, line in ((_decided(one), line) for one, line in found.items()):
        fields = _fields(one.case)
        label = label_of(one)
        key: tuple[str, ...] = (one.kind, label)
        if label in NAMELESS:
            key = (one.kind, one.op, str(fields))
        fault = catalogue.get(label) if one.kind == "wrong_output" else None
        if fault is None:
            if label in NAMELESS and line:  # another op, or call, that runs the same line
                same = (
                    k for k, of in others.items() if k[0] == one.kind and line in of.lines.values()
                )
                key = next(same, key)
            fault = others.setdefault(key, _found_fault(one))
        calls = {**fault.calls}
        calls.setdefault(ANY_OP, [fields])
        calls[one.op] = [*(calls.get(one.op, ()) if one.op in fault.found_in else ()), fields]
        fault = dataclasses.replace(
            fault,
            calls=calls,
            found_in=tuple(dict.fromkeys((*fault.found_in, one.op))),
            lines={**fault.lines, **({one.op: line} if line else {})},
        )
        if label in catalogue and one.kind == "wrong_output":
            catalogue[label] = fault
        else:
            others[key] = fault
    return [*catalogue.values(), *others.values()]


def _found_fault(finding: Finding) -> KnownFault:
    """Return the fault of a finding, without calls."""
    label = label_of(finding)
    return KnownFault(kind=finding.kind, diagnosis=label, title=finding.title, family=FOUND)


def _catalogue(
    libraries: Mapping[str, Release], platforms: Mapping[str, str]
) -> dict[str, KnownFault]:
    """Return the defects by name, with the plainest Case of each op whose output they change."""
    found = {
        name: KnownFault(
            kind="rows_not_written" if name == NEVER_WRITTEN else "wrong_output",
            diagnosis=name,
            title=f"{name}: {one.text}",
            family=one.family,
        )
        for name, one in DEFECTS.items()
        if not one.harmless and name not in _KIND_OF_ITS_OWN
    }
    for op, release in libraries.items():
        for name, fields in _telling_calls(release, op, platforms[op]):
            if name in found:
                found[name].calls[op] = [fields]
    return found


def _telling_calls(release: Release, op: str, platform: str) -> Iterator[tuple[str, Fields]]:
    """Yield each defect whose effect a hostile Case of an op shows, with the plainest such Case."""
    if op in STATE_OPS or OPS[op].writes_cache:
        return
    cases = [
        one
        for one in hostile_cases(release.backend, op, platform, None, 0)
        if not one.first_block and one.op_argument == NONE
    ]
    cases += [one.replace(empty_slots="zeros") for one in cases]  # without what else NaN would show
    lab, left = Lab(keep=1, device="cpu"), {**DEFECTS}
    for case in sorted(cases, key=_plainness):
        if is_callers_fault(lab, case):
            continue
        test = ChangedTest.of(case, {}, lab)
        for name, defect in [*left.items()]:
            if defect.harmless or (OPS[op].merges and defect.family not in _OF_MERGES):
                continue
            if defect.applies(test.problem) and test.score(defect).is_killed:
                yield name, _fields(case)
                del left[name]


def _plainness(case: Case) -> tuple[int, int]:
    """Return what sorts Cases: the number of features, then the size."""
    features = [one for one in case.changes() if one in _FEATURES]
    rare = (case.empty_slots != "zeros", case.sliding_window == 1, case.num_queries_per_kv > _TILE)
    size = sum(case.lengths.seq_lens) * case.num_heads * case.head_size
    return len(features) + sum(rare), size


def _fields(case: Case) -> Fields:
    """Return the fields of a Case that do not choose the op and the library, as JSON has them."""
    fields: Fields = json_value(case.changes())
    return {name: value for name, value in fields.items() if name not in _PLACE}


# The plan.


@dataclass(frozen=True, kw_only=True)
class AtlasPlan(ReleasePlan):
    """What an atlas runs: the calls of ``faults`` in every op of the releases.

    ``releases``: of several libraries, each with a version that has its library; ``platforms``: by op.
    """

    faults: Sequence[KnownFault]
    platforms: Mapping[str, str]

    def tasks(self) -> list[Task]:
        """Return a task for each call, op and release whose op differs from earlier ones."""
        calls, found = Calls(self._facts()), dict[str, Task]()
        for op in self.ops:
            for owner in calls.owners(op):
                backend = next(one.backend for one in self.releases if one.version == owner)
                own: dict[str, Task] = {}
                for fields in (call for fault in self.faults for call in fault.calls_at(op)):
                    with contextlib.suppress(InvalidCase):
                        task = self._task(owner, backend, calls.case(op, owner, fields))
                        own.setdefault(task.key, task)
                if own and has_horizons(backend):
                    task = self._horizon_task(op, next(iter(own.values())))
                    own[task.key] = task
                found |= own
        return [*found.values()]

    def _task(self, owner: str, backend: Backend, case: Case) -> Task:
        """Return the task of a Case, or StateCase, in a release."""
        is_state = case.op in STATE_OPS
        return Task(
            key=key_of(case.op, owner, case),
            payload={"library": owner, "case": {"op": case.op, **case.changes()}},
            cost_s=_STATE_S if is_state else cost_s(self.costs, cost_key(case)),
            memory_bytes=_STATE_BYTES if is_state else estimated_bytes(case, backend),
            limit_s=self.case_limit_s,
        )

    def _horizon_task(self, op: str, first: Task) -> Task:
        """Return the task that asks for the int32 horizons of an op; ``first``: a call of it."""
        asked = {"horizon": ops_with_files(op, self.ops), "addresses": True}
        payload = {**first.payload, **asked}
        key = horizon_key(op, payload["library"])
        return dataclasses.replace(first, key=key, payload=payload, cost_s=COST_S)

    def _facts(self) -> Header:
        """Return what decides the Case of a call."""
        return {
            "runs": self.runs,
            "rules": self.rules,
            "backends": {one.version: one.backend.name for one in self.releases},
            "platforms": dict(self.platforms),
        }

    def _lines(self) -> dict[str, dict[str, str]]:
        """Return where the lines of faults are, as "file:line text": by release, by expression."""
        found: dict[str, dict[str, str]] = {}
        for release in self.releases:
            for op, owner in self.runs[release.version].items():
                if owner != release.version:
                    continue
                texts = {fault.lines[op] for fault in self.faults if op in fault.lines}
                for text in texts:
                    if place := source_line(release, op, text):
                        found.setdefault(owner, {})[f"{op} {text}"] = place
        return found

    def header(self, tasks: Sequence[Task], shard: Shard = ALL) -> Header:
        """Return the header of a store: that of releases, and the faults."""
        faults = [dataclasses.asdict(one) for one in self.faults]
        more = {"command": COMMAND, "faults": faults, "lines": self._lines(), **self._facts()}
        return {**super().header(tasks, shard), **more}


def horizon_key(op: str, owner: str) -> str:
    """Return the key of the task that asks for the int32 horizons of an op of a release."""
    return f"{owner}/{op}/horizon"


def source_line(release: Release, op: str, text: str) -> str:
    """Return the first line of an op's files with a text, as "file:line text"; "" if there is none.

    A second line of ``text`` is in the line after it.
    """
    first_text, _, next_text = text.partition("\n")
    for file in op_files(release.source, op):
        lines = file.read_text().splitlines()
        for number, (line, after) in enumerate(pairwise([*lines, ""]), 1):
            if first_text in line and next_text in after:
                return f"{file.name}:{number} {line.strip()}"
    return ""


def atlas_plan(
    releases: Sequence[Release],
    *,
    faults: Mapping[Finding, str] = MappingProxyType({}),
    case_seconds: float | None = None,
    times: Path | str | None = None,
) -> AtlasPlan:
    """Return the plan of the known faults, and of those of ``faults``, in releases of several libraries."""
    ops: dict[str, Release] = {}  # by op, the newest release
    for release in releases:
        for op in release.backend.ops:
            if op_digest(release.source, op) is not None:
                ops[op] = release
    platforms = {op: _platform_of(op, one.backend) for op, one in ops.items()}
    return AtlasPlan(
        releases=tuple(releases),
        ops=tuple(op for op in RECORDS if op in ops),
        platforms=platforms,
        faults=known_faults({**packaged_faults(), **faults}, ops, platforms),
        case_limit_s=case_seconds or AtlasPlan.case_limit_s,
        costs=packaged_costs() if times is None else costs_of_store(Path(times)),
    )


def _platform_of(op: str, backend: Backend) -> str:
    """Return the platform that is modelled for an op of a backend."""
    if op in STATE_OPS:
        return AtlasPlan.platform
    return OPS[op].platform_of(usual_platform(backend.ops))


def key_of(op: str, owner: str, case: Case) -> str:
    """Return the key of the task that runs a Case in an op of a release."""
    return f"{owner}/{op}/{digest_of(case)}"


@dataclass(frozen=True, slots=True)
class Calls:
    """The Cases of calls: what the header of an atlas says about ops and releases."""

    header: Header

    def owners(self, op: str) -> list[str]:
        """Return the releases in which an op runs, each for those that have the same op."""
        runs = self.header["runs"].values()
        return list(dict.fromkeys(of[op] for of in runs if op in of))

    def case(self, op: str, owner: str, fields: Fields) -> Case:
        """Return the Case of a call in an op of a release. Raises InvalidCase if its rules refuse it."""
        if op in STATE_OPS:
            return case_of(op, {**fields, "platform": self.header["platforms"][op]})
        place = {
            "op": op,
            "backend": self.header["backends"][owner],
            "release": self.header["rules"][owner],
            "platform": self.header["platforms"][op],
        }
        if fields.get("empty_slots") == "nan":  # for which some callers are at fault
            place["empty_slots"] = OPS[op].poison
        return Case.from_dict({**fields, **place})

    def key(self, op: str, owner: str, fields: Fields) -> str:
        """Return the key of the task of a call. Raises InvalidCase as :meth:`case`."""
        if fields == HORIZONS:
            return horizon_key(op, owner)
        return key_of(op, owner, self.case(op, owner, fields))


# The table: which op of which release shows which fault.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What a call did in an op of a release: the faults that it shows, or why it has no verdict."""

    state: str
    text: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(kw_only=True)
class _Atlas:
    """The rows of some outcomes. ``stopped``: the reason for a missing one."""

    header: Header
    tasks: Mapping[str, Task]
    outcomes: Outcomes
    stopped: str
    _seen: dict[tuple[str, str, str], _Seen] = field(default_factory=dict)

    @cached_property
    def calls(self) -> Calls:
        """Return the Cases of calls."""
        return Calls(self.header)

    @cached_property
    def known(self) -> list[KnownFault]:
        """Return the faults that were known before."""
        return [KnownFault(**one) for one in self.header["faults"]]

    @cached_property
    def _at(self) -> dict[str, list[Fields]]:
        """Return all calls of each op."""
        found: dict[str, list[Fields]] = {}
        for op in self.header["options"]["ops"]:
            calls = [one for fault in self.known for one in fault.calls_at(op)]
            found[op] = list({str(one): one for one in calls}.values())
            if any(horizon_key(op, owner) in self.tasks for owner in self.calls.owners(op)):
                found[op].append(HORIZONS)
        return found

    def seen(self, op: str, owner: str, fields: Fields) -> _Seen:
        """Return what a call did in an op of a release."""
        key = (op, owner, str(fields))
        if key not in self._seen:
            self._seen[key] = self._run(op, owner, fields)
        return self._seen[key]

    def _run(self, op: str, owner: str, fields: Fields) -> _Seen:
        try:
            task = self.tasks[self.calls.key(op, owner, fields)]
        except InvalidCase as error:
            return _Seen(state=ABSENT, text=str(error))
        except KeyError:
            return _Seen(state=ABSENT, text="no call of the op runs there")
        outcome = self.outcomes.get(task.key)
        if outcome is None:
            return _Seen(state=NOT_RUN, text=self.stopped)
        found = tuple(_decided(one) for one in findings_of(task, outcome) if one.is_fault)
        if found:
            text = "" if outcome.verdict is None else str(outcome.verdict["unsupported"])
            return _Seen(state=FINDING, text=text, findings=found)
        if outcome.verdict is not None and outcome.verdict["ran"]:
            return _Seen(state=SOUND, text=str(outcome.verdict["unsupported"]))
        has_limit = outcome.verdict is not None and not outcome.verdict["not_run"]
        return _Seen(state=ABSENT if has_limit else NOT_RUN, text=why_no_verdict(outcome))

    @cached_property
    def faults(self) -> list[KnownFault]:
        """Return the known faults, and those that a call of another one shows."""
        new: dict[tuple[str, ...], KnownFault] = {}
        for op, fields, finding in self._shown():
            if not any(one.is_shown(finding, fields in one.calls_at(op)) for one in self.known):
                self._add(new, finding, fields)
        return [*self.known, *new.values()]

    def _shown(self) -> Iterator[tuple[str, Fields, Finding]]:
        """Yield the findings of all calls in all releases, each with its op and the call."""
        for op, calls in self._at.items():
            for fields in calls:
                for owner in self.calls.owners(op):
                    for finding in self.seen(op, owner, fields).findings:
                        yield op, fields, finding

    def _add(
        self, new: dict[tuple[str, ...], KnownFault], finding: Finding, fields: Fields
    ) -> None:
        """Add the fault of a finding, at the call that shows it; only the first of a group of findings."""
        label = label_of(finding)
        key = (finding.kind, label) if label not in NAMELESS else finding.group
        if key not in new:
            calls = {op: [fields] for op, calls in self._at.items() if fields in calls}
            new[key] = dataclasses.replace(
                _found_fault(finding),
                calls={} if fields == HORIZONS else calls,
                found_in=(finding.op,),
            )
        if fields == HORIZONS:
            new[key].calls[finding.op] = [fields]

    @cached_property
    def _named(self) -> dict[tuple[str, str, str], list[Fields]]:
        """Return, by op and by kind and name of a fault, the calls that show it in some release."""
        found: dict[tuple[str, str, str], list[Fields]] = {}
        for op, fields, one in self._shown():
            of = found.setdefault((op, one.kind, label_of(one)), [])
            if fields not in of:
                of.append(fields)
        return found

    def run(self, fault: KnownFault, op: str, owner: str) -> tuple[_Seen, Case | None]:
        """Return what the calls of a fault did in an op of a release, and the Case that decided it."""
        own = fault.calls_at(op)
        is_named = fault.diagnosis not in NAMELESS
        more = self._named.get((op, fault.kind, fault.diagnosis), []) if is_named else []
        states: list[tuple[_Seen, Fields]] = []
        for fields in [*own, *(one for one in more if one not in own)]:
            seen = self.seen(op, owner, fields)
            if fields == HORIZONS:
                seen = _of_horizon(fault, seen)
            elif seen.state == FINDING:
                shown = [one for one in seen.findings if fault.is_shown(one, fields in own)]
                state, of = (FINDING, shown) if shown else (OTHER, [*seen.findings])
                if shown and not shown[0].description:
                    of = [dataclasses.replace(one, description=fault.title) for one in shown]
                seen = _Seen(state=state, findings=tuple(of), text=_numbers(of))
            if seen.state != OTHER or fields in own:
                states.append((seen, fields))
        if not states:
            return _Seen(state=ABSENT, text="no call of it shows the fault"), None
        best, fields = min(states, key=lambda one: _ORDER.index(one[0].state))
        has_case = best.state != ABSENT and fields != HORIZONS
        return best, self.calls.case(op, owner, fields) if has_case else None

    def fault(self, known: KnownFault) -> Fault:
        """Return a row of the table."""
        runs: dict[tuple[str, ...], OpRun] = {}
        cells: dict[str, list[str]] = {version: [] for version in self.header["runs"]}
        findings: list[Finding] = []
        some: Case | None = None
        for op in self.header["options"]["ops"]:
            ran = {owner: self.run(known, op, owner) for owner in self.calls.owners(op)}
            for version, of in self.header["runs"].items():
                if op not in of:
                    continue
                seen, case = ran[of[op]]
                cells[version].append(seen.state)
                some = some or case
                if seen.state == FINDING:
                    findings += seen.findings[:1]
                self._note(runs, (known, op, version), seen, case)
        return Fault(
            finding=findings[0] if findings else self._sound(known, some),
            cells={
                version: min(states, key=_ORDER.index, default=ABSENT)
                for version, states in cells.items()
            },
            family=known.family,
            runs=tuple(runs.values()),
        )

    def _note(
        self,
        runs: dict[tuple[str, ...], OpRun],
        place_of: tuple[KnownFault, str, str],
        seen: _Seen,
        case: Case | None,
    ) -> None:
        """Add what a call did in a release to the runs with the same result."""
        known, op, version = place_of
        owner = self.header["runs"][version][op]
        text = seen.text if seen.state != FINDING else f"{seen.findings[0].title}. {seen.text}"
        key = (op, seen.state, text)
        if key not in runs:
            finding = seen.findings[0] if seen.state == FINDING else None
            runs[key] = OpRun(op=op, state=seen.state, releases=(), text=text, finding=finding)
        one = runs[key]
        command = one.command
        is_first_sound = not any(one.state == SOUND and one.command for one in runs.values())
        has_command = seen.state in (FINDING, OTHER) or (seen.state == SOUND and is_first_sound)
        if seen.findings and seen.findings[0].horizon and not command:
            command = seen.findings[0].run(version.rpartition(" ")[2])
        elif case is not None and not command and has_command:
            command = (seen.findings[0].case if seen.findings else case).to_cli()
        runs[key] = dataclasses.replace(one, releases=(*one.releases, version), command=command)
        place = self.header["lines"].get(owner, {}).get(f"{op} {known.lines.get(op)}")
        if seen.state == FINDING and place:
            runs[key] = dataclasses.replace(runs[key], lines=(place,))

    def _sound(self, known: KnownFault, case: Case | None) -> Finding:
        """Return what stands for a fault that no release shows."""
        op = next(iter(self.header["options"]["ops"])) if case is None else case.op
        return Finding(
            op=op,
            kind=known.kind,
            case=case or Case(),
            evidence="",
            diagnosis=known.diagnosis,
            description=known.title,
        )


def _of_horizon(fault: KnownFault, seen: _Seen) -> _Seen:
    """Return what the horizons of an op say about the address of a fault.

    An address without a finding is right up to the sizes that fit on a GPU, if its kernel ran.
    """
    shown = [one for one in seen.findings if fault.is_shown(one, True)]
    if shown:
        return _Seen(state=FINDING, findings=tuple(shown), text=_numbers(shown))
    kernel = fault.diagnosis.partition(":")[0]
    has_run = seen.state in (FINDING, SOUND) and f"horizon of {kernel}:" not in seen.text
    if has_run or seen.state == ABSENT:
        return _Seen(state=SOUND if has_run else ABSENT, text="" if has_run else seen.text)
    return _Seen(state=NOT_RUN, text=seen.text)


def _numbers(findings: Sequence[Finding]) -> str:
    """Return what the findings of a call consist of."""
    return "; ".join(dict.fromkeys(one.evidence or one.title for one in findings))


def check_atlas(
    plan: AtlasPlan,
    engine: Engine,
    *,
    shard: Shard = ALL,
    out: Path | None = None,
    on_progress: OnProgress = ignore_progress,
    seconds: float | None = None,
    stop: Stop = never,
) -> ReleaseTable:
    """Run the calls of a plan, or a shard of them, and return the table; the arguments are those of
    :func:`attnlab.checker.releases.check_releases`."""
    began = time.perf_counter()
    all_tasks = plan.tasks()
    header, tasks = plan.header(all_tasks, shard), shard.of(all_tasks)
    with kept_run(engine, plan.job(), header, out, stop, seconds) as run:
        run.run(tasks, watching("cases", tasks, on_progress))
    stopped = "the check was interrupted" if stop() else "the time was up"
    took = time.perf_counter() - began
    return build_atlas(header, all_tasks, run.outcomes, seconds=took, stopped=stopped)


def build_atlas(
    header: Header, tasks: Sequence[Task], outcomes: Outcomes, *, seconds: float, stopped: str
) -> ReleaseTable:
    """Return the table of the outcomes of some tasks; ``stopped`` is the reason for a missing one."""
    by_key = {task.key: task for task in tasks}
    atlas = _Atlas(header=header, tasks=by_key, outcomes=outcomes, stopped=stopped)
    ran = [one for one in map(outcomes.get, atlas.tasks) if has_run(one)]
    return ReleaseTable(
        releases=[*header["runs"]],
        device=header["device"],
        platform=", ".join(dict.fromkeys(header["platforms"].values())),
        ops=header["runs"],
        cases=len(tasks),
        cases_run=len(ran),
        seconds=seconds,
        versions=header["versions"],
        faults=[atlas.fault(one) for one in atlas.faults],
        not_run=not_run_of(tasks, outcomes, stopped, name_of),
    )


def newest_findings(table: ReleaseTable) -> dict[str, list[Finding]]:
    """Return the faults of the newest release of each library, by that release."""
    newest: dict[str, dict[Finding, None]] = {of[-1]: {} for of in table.libraries.values()}
    for run in (run for fault in table.faults for run in fault.runs):
        for version in newest.keys() & {*run.releases}:
            if run.finding is not None:
                newest[version][run.finding] = None
    return {version: [*found] for version, found in newest.items()}


def merged_atlas(header: Header, outcomes: Outcomes) -> ReleaseTable:
    """Return the table of merged stores; ``seconds`` is the sum of the calls' times."""
    return merged_releases(header, outcomes, build_atlas)
