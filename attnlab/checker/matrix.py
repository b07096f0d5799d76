"""The matrix of a test: many Cases in the order that makes least anew, and a table of their outcomes."""

import hashlib
import json
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.shown import Shown, json_number, json_value
from attnlab.checker.case_run import versions
from attnlab.kernels.vllm.backend import VllmBackend, precompile
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.lab import Lab, drawing_ahead
from attnlab.lab.products import batch_key, cache_key, needed_bytes
from attnlab.lab.result import Result
from attnlab.tasks.store import ALL, Header, Shard
from attnlab.tasks.task import Job, Outcome, Task

_MOST_COLUMNS = 6  # of a grid of outcomes
KEEP = 8  # products of each kind: as many as there are batches in vLLM's matrix
NOT_RUN = "not run"
STATUSES = ("match", "mismatch", "rejected", NOT_RUN)


def in_order(cases: Sequence[Case]) -> list[Case]:
    """Return Cases so that those that share a batch, a cache or a reference are neighbours.

    Small batches come first, so that others can be drawn while these run.
    """
    sizes: Counter[Any] = Counter()
    for case in cases:
        sizes[batch_key(case)] = max(sizes[batch_key(case)], needed_bytes(case))
    return sorted(
        cases,
        key=lambda case: (
            sizes[batch_key(case)],
            repr(batch_key(case)),
            repr(cache_key(case)),
            case.sliding_window,
            case.op,
        ),
    )


def run_many(cases: Sequence[Case], *, lab: Lab | None = None) -> Iterator[Result]:
    """Run Cases, those that share tensors one after the other, and yield the Result of each.

    The order is that of :func:`in_order`; ``Result.case`` says which it is. On a GPU, the next batches are
    drawn while one is used. Raises what a run raises; Cases that a kernel rejects are Results.
    """
    ordered, lab = in_order(cases), lab or Lab(keep=KEEP)
    is_ahead = bool(ordered) and lab.where(ordered[0]) == "cuda"
    with drawing_ahead(lab, ordered) if is_ahead else nullcontext(iter(ordered)) as coming:
        for case in coming:
            yield lab.run(case)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """The outcome of one test id.

    - ``status``: one of STATUSES. ``error``: why the kernel rejected the call, or why it did not run.
    - ``mismatched``, ``total``: elements; ``greatest_abs``: the largest absolute error, as in strict JSON;
      ``first``: (row, head, element) of the first mismatch.
    - ``kernels``: those that ran. ``seconds``: without what other ids share.
    """

    id: str
    status: str
    error: str = ""
    mismatched: int = 0
    total: int = 0
    greatest_abs: float | str | None = None
    first: tuple[int, int, int] | None = None
    kernels: tuple[str, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, test_id: str, result: Result) -> "MatrixRow":
        """Return the row of a Result."""
        errors = result.errors
        row = cls(
            id=test_id,
            status=result.status,
            error=result.error or "",
            kernels=tuple(result.decision.kernels),
            seconds=round(sum(result.seconds.values()), 4),
        )
        if errors is None:
            return row
        return replace(
            row,
            mismatched=errors.mismatched,
            total=errors.total,
            greatest_abs=json_number(float(errors.greatest_abs.value)),
            first=errors.first_index,
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatrixTable(Shown):
    """The outcomes of a matrix.

    - ``rows``: in the order in which the ids were given. ``seconds``: of all workers together.
    - ``changes``: the fields of a Case that were set for every id; ``backend``: whose kernels ran.
    """

    rows: tuple[MatrixRow, ...]
    seconds: float
    changes: Mapping[str, Any]
    backend: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Return how many ids have each status, of those that occur."""
        found = Counter(row.status for row in self.rows)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def exit_code(self) -> int:
        """Return 1 if an id does not match, 3 if all that ran match and others did not run, else 0."""
        if {"mismatch", "rejected"} & self.counts.keys():
            return 1
        return 3 if NOT_RUN in self.counts else 0

    def grids(self) -> "Iterator[tuple[str, list[str], dict[str, dict[str, MatrixRow]]]]":
        """Yield each test, the names of its columns, and its outcomes by row and column.

        The parameters that differ name rows and columns: the last ones the columns.
        """
        for test in dict.fromkeys(row.id.partition("[")[0] for row in self.rows):
            rows = [row for row in self.rows if row.id.startswith(f"{test}[")]
            words = [row.id.partition("[")[2].rstrip("]").split("-") for row in rows]
            count = min(map(len, words))
            last = [at for at in range(count) if len({one[at] for one in words}) > 1]
            first: list[int] = []
            while len({_named(one, last) for one in words}) > _MOST_COLUMNS:
                first.append(last.pop(0))
            cells: dict[str, dict[str, MatrixRow]] = {}
            for row, one in zip(rows, words, strict=True):
                cells.setdefault(_named(one, first), {})[_named(one, last)] = row
            yield test, list(dict.fromkeys(_named(one, last) for one in words)), cells

    def to_dict(self) -> dict[str, Any]:
        """Return the table as strict JSON."""
        return {
            "counts": self.counts,
            "seconds": round(self.seconds, 2),
            "backend": self.backend,
            "case": {name: getattr(value, "value", value) for name, value in self.changes.items()},
            "ids": [asdict(row) for row in self.rows],
        }

    def junit(self) -> str:
        """Return the table as a document of JUnit XML: a test suite per test, a test case per id."""
        root = ET.Element("testsuites", name="attnlab matrix")
        for test in dict.fromkeys(row.id.partition("[")[0] for row in self.rows):
            cases = []
            for row in (row for row in self.rows if row.id.partition("[")[0] == test):
                seconds = f"{row.seconds:.3f}"
                case = ET.Element("testcase", classname=test, name=row.id, time=seconds)
                if row.status != "match":
                    tag = "skipped" if row.status == NOT_RUN else "failure"
                    ET.SubElement(case, tag, message=outcome_text(row))
                cases.append(case)
            root.append(suite_of(test, cases))
        return junit_text(root)


def suite_of(name: str, cases: Sequence[ET.Element]) -> ET.Element:
    """Return a test suite of JUnit XML, with the numbers of its cases that failed and that were skipped."""
    suite = ET.Element("testsuite", name=name, tests=str(len(cases)), errors="0")
    for count, tag in (("failures", "failure"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(tag) is not None for case in cases)))
    suite.extend(cases)
    return suite


def junit_text(root: ET.Element) -> str:
    """Return the document of some test suites; changes their indentation."""
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _named(words: Sequence[str], places: Sequence[int]) -> str:
    """Return the parameters of an id at some places."""
    return " ".join(words[at] for at in places) or "all"


def outcome_text(row: MatrixRow) -> str:
    """Return the outcome of an id in one line."""
    if row.status == "match":
        return "match"
    if row.total:
        place = f", first {row.first}" if row.first else ""
        largest = f"{float(row.greatest_abs or 0):.4g}"
        return f"{row.mismatched} of {row.total} elements mismatch{place}, up to {largest}"
    return f"{row.status}: {row.error}"


@dataclass(slots=True)
class _State:
    """The Lab that a worker keeps, and the Cases whose batches it draws ahead."""

    lab: Lab
    coming: Iterator[Case] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixJob(Job):
    """Runs test ids in a Lab that its worker keeps.

    In one process on a GPU, all kernels are first compiled in parallel, and batches are drawn ahead.
    """

    changes: Mapping[str, Any]
    source: Path | None = None
    device: str = "cpu"
    lab_device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> _State:
        return _State(Lab(keep=KEEP, source=self.source, device=self.lab_device))

    @contextmanager
    def preparing(self, state: _State, payloads: Sequence[dict[str, Any]]) -> Iterator[None]:
        if self.device != "cuda":
            yield
            return
        cases = []
        for test_id in (one for payload in payloads for one in payload["ids"]):
            with suppress(InvalidCase):  # its row says why
                cases.append(Case.from_test_id(test_id, **self.changes))
        if cases and isinstance(backend := state.lab.backend(cases[0]), VllmBackend):
            precompile(cases, backend.source)
        with drawing_ahead(state.lab, cases) as state.coming:
            yield

    def run(self, state: _State, payload: dict[str, Any]) -> dict[str, Any]:
        return {"rows": json_value([self._row(state, test_id) for test_id in payload["ids"]])}

    def _row(self, state: _State, test_id: str) -> MatrixRow:
        try:
            case = Case.from_test_id(test_id, **self.changes)
            if state.coming is not None:
                next(state.coming)
            return MatrixRow.of(test_id, state.lab.run(case))
        except AttnLabError as error:
            return MatrixRow(id=test_id, status=NOT_RUN, error=" ".join(str(error).split()))

    def identity(self) -> dict[str, str]:
        return dict(self.versions)


def matrix_job(changes: Mapping[str, Any], source: Path | None, device: str | None) -> MatrixJob:
    """Return the job of a matrix; its versions have the name of the backend and its vLLM.

    Raises InvalidCase or Unavailable if the backend cannot be loaded.
    """
    lab = Lab(source=source, device=device)
    backend = lab.backend(Case(**{n: changes[n] for n in ("backend", "platform") if n in changes}))
    name = backend.name
    if source is not None:
        name = f"{name}, vLLM {find_source(source).version}"
    found = {**versions(), "backend": name}
    return MatrixJob(
        changes=changes, source=source, device=backend.device, lab_device=device, versions=found
    )


def matrix_tasks(ids: Sequence[str], changes: Mapping[str, Any]) -> list[Task]:
    """Return one task for the ids that share a cache, in the order of :func:`in_order`.

    Ids that are no Case come last, together: their rows say why. Raises InvalidCase if no id is a Case.
    """
    cases: dict[Case, list[str]] = {}
    invalid: dict[str, InvalidCase] = {}
    for test_id in ids:
        try:
            cases.setdefault(Case.from_test_id(test_id, **changes), []).append(test_id)
        except InvalidCase as error:
            invalid[test_id] = error
    if invalid and not cases:
        raise next(iter(invalid.values()))
    groups: dict[Any, list[str]] = {}
    for case in in_order(list(cases)):
        groups.setdefault((batch_key(case), cache_key(case)), []).extend(cases[case])
    found = [*groups.values(), *([[*invalid]] if invalid else [])]
    return [
        Task(key=hashlib.sha256("\n".join(group).encode()).hexdigest()[:16], payload={"ids": group})
        for group in found
    ]


def matrix_header(
    ids: Sequence[str], changes: Mapping[str, Any], versions: Mapping[str, str], shard: Shard = ALL
) -> Header:
    """Return the header of a store of the tasks; ``versions``: of all that decides the outcomes."""
    given = json.dumps([list(ids), {name: str(one) for name, one in changes.items()}])
    return {
        "command": "matrix",
        "digest": hashlib.sha256(given.encode()).hexdigest()[:16],
        "ids": list(ids),
        "changes": json_value(dict(changes)),
        "versions": dict(versions),
        "shard": str(shard),
    }


def matrix_table(
    ids: Sequence[str],
    outcomes: Sequence[tuple[Task, Outcome | None]],
    changes: Mapping[str, Any],
    backend: str = "",
) -> MatrixTable:
    """Return the table of some outcomes; an id whose task has none, or failed, did not run."""
    rows: dict[str, MatrixRow] = {}
    for task, outcome in outcomes:
        text = "it was not started" if outcome is None else outcome.text
        for test_id in task.payload["ids"]:
            rows[test_id] = MatrixRow(id=test_id, status=NOT_RUN, error=text)
        verdict = None if outcome is None else outcome.verdict
        for one in (verdict or {"rows": []})["rows"]:
            first = None if one["first"] is None else tuple(one["first"])
            rows[one["id"]] = MatrixRow(**{**one, "first": first, "kernels": tuple(one["kernels"])})
    seconds = sum(one.seconds for _, one in outcomes if one is not None)
    return MatrixTable(
        rows=tuple(rows[test_id] for test_id in ids if test_id in rows),
        seconds=seconds,
        changes=changes,
        backend=backend,
    )


def merged_matrix(header: Header, outcomes: Mapping[str, Outcome]) -> MatrixTable:
    """Return the table of the stores of all shards."""
    changes = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in header["changes"].items()
    }
    tasks = matrix_tasks(header["ids"], changes)
    found = [(task, outcomes.get(task.key)) for task in tasks]
    return matrix_table(header["ids"], found, changes, header["versions"]["backend"])
