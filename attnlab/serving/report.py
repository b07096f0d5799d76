"""CaptureReport: what a capture found, read from the records of its processes."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.shown import Document, Shown, json_fields
from attnlab.library.op import package_of
from attnlab.serving.capture_state import KINDS, Observation, read_records
from attnlab.serving.settings import SETTINGS, CaptureSettings
from attnlab.show.sheets.sheet import Facts, Grid, Lines, Row, Sheet, Tone, Value, Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The same observation in one or more layers.

    - ``first``: of the first layer. ``layers``: the names of all. ``times``: how often it was seen in all
      of them; ``last_step``: where last.
    - ``diagnosis``: of its saved call, or "".
    """

    first: Observation
    layers: tuple[str, ...]
    times: int
    last_step: int
    diagnosis: str = ""

    @property
    def call(self) -> str:
        """Return the path of the saved call in the folder, or ""."""
        return str(self.first.facts.get("call", ""))

    def to_dict(self) -> dict[str, Any]:
        """Return the observation as JSON-able values."""
        return {**json_fields(self.first), **json_fields(self, without=("first",))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """What one process did: ``started`` and ``counts`` as in its record."""

    name: str
    started: Mapping[str, Any]
    counts: Mapping[str, int]
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CaptureReport(Document, Shown):
    """What a capture found.

    - ``folder``: of the records. ``found``: in the order of :data:`KINDS`, then of steps.
    - ``processes``: those that ran the model. ``saved``: the files of calls, with why each was kept.
    - ``unchecked``: what was not checked, and how often. ``notes``, ``errors``: texts.
    - ``exit_code``: of the command, None if unknown. ``library``: whose ops were checked, None for vLLM with
      its engine; a step is then a call of one of its ops.
    """

    _more = ("is_wrong", "has_checked")

    folder: str
    found: tuple[Found, ...]
    processes: tuple[ProcessRecord, ...]
    saved: tuple[Mapping[str, Any], ...] = ()
    unchecked: Mapping[str, int]
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    exit_code: int | None = None
    library: str | None = None

    @property
    def unit(self) -> str:
        """Return what is counted: steps of a model, or calls of a library's ops."""
        return "step" if self.library is None else "call"

    @property
    def is_wrong(self) -> bool:
        """Answer whether something wrong was found."""
        return bool(self.found)

    @property
    def has_checked(self) -> bool:
        """Answer whether any step of a model was seen."""
        return any(one.counts.get("steps") for one in self.processes)

    @property
    def total_units(self) -> str:
        """Return how many steps, or calls, were seen, with the word."""
        count = self.total("steps")
        return f"{count} {self.unit}" + "s" * (count != 1)

    def total(self, name: str) -> int:
        """Return a count, summed over the processes."""
        return sum(one.counts.get(name, 0) for one in self.processes)

    def conclusion(self) -> str:
        """Return how many faults there are, and the first, in one sentence."""
        head = _summary(self)[0]
        return f"{head}; the first: {self.found[0].first.text}" if self.found else head

    @property
    def worst(self) -> float:
        """Return the largest error as a multiple of its bound."""
        return max((one.worst for one in self.processes), default=0.0)


NO_PROCESS = (
    "no process of the command ran a model with the plug-in: vLLM was not started, attnlab is not "
    "installed in its environment, or VLLM_PLUGINS leaves out attnlab"
)
NO_CALL = (
    "no process of the command called an attention op of {title} that attnlab knows: it uses another backend "
    "of attention, attnlab is not installed in its environment, or its processes do not get PYTHONPATH"
)


def read_report(folder: Path, *, exit_code: int | None = None) -> CaptureReport:
    """Return the report of the records in a folder."""
    records = read_records(folder)
    lines = [line for one in records.values() for line in one]
    processes = tuple(
        _process(name, one) for name, one in records.items() if _of_event(one, "started")
    )
    unchecked: Counter[str] = Counter()
    for one in records.values():
        unchecked.update(_counts(one).get("unchecked", {}))
    notes = [line["text"] for line in _of_event(lines, "note")]
    library = _library(folder)
    if not processes:
        called = "" if library is None else NO_CALL.format(title=package_of(library).title)
        notes.append(called or NO_PROCESS)
    if any(one.counts.get("graph_steps", 0) for one in processes):
        notes.append(_graph_note(processes, library))
    return CaptureReport(
        folder=str(folder),
        found=_merged(records.values()),
        processes=processes,
        saved=tuple(_of_event(lines, "saved")),
        unchecked=unchecked,
        notes=tuple(dict.fromkeys(notes)),
        errors=tuple(dict.fromkeys(line["text"] for line in _of_event(lines, "error"))),
        exit_code=exit_code,
        library=library,
    )


def _library(folder: Path) -> str | None:
    """Return the library of the settings in a folder; None for vLLM, and without settings."""
    try:
        return CaptureSettings.of_text(str(folder / SETTINGS)).library
    except InvalidCase:
        return None


def _process(name: str, lines: Sequence[Mapping[str, Any]]) -> ProcessRecord:
    counts = _counts(lines)
    return ProcessRecord(
        name=name,
        started=_of_event(lines, "started")[0],
        counts=counts.get("counts", {}),
        worst=float(counts.get("worst", 0.0)),
    )


def _graph_note(processes: Sequence[ProcessRecord], library: str | None) -> str:
    """Return a sentence about steps or calls inside a full CUDA graph, with the way to avoid it."""
    graphs, steps = (
        sum(one.counts.get(name, 0) for one in processes) for name in ("graph_steps", "steps")
    )
    if library is not None:
        return (
            f"{graphs} calls were captured in CUDA graphs, whose replays do not call the ops from Python: "
            "their values were not checked. To check them, start the server without CUDA graphs"
        )
    modes = ", ".join(sorted({str(one.started.get("cudagraph_mode")) for one in processes}))
    return (
        f"{graphs} of {steps} steps called no attention layer from Python (cudagraph_mode {modes}): a full "
        "CUDA graph replays its kernels. Of these steps only block tables, lengths and slots were checked, "
        "no values and no arguments. To check them, run vLLM with --enforce-eager, or with "
        '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
    )


def _of_event(lines: Sequence[Mapping[str, Any]], event: str) -> list[dict[str, Any]]:
    """Return the facts of the lines of an event."""
    return [
        {k: v for k, v in line.items() if k != "event"} for line in lines if line["event"] == event
    ]


def _counts(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the facts of the last line of counts."""
    return [{}, *_of_event(lines, "counts")][-1]


def _merged(records: Any) -> tuple[Found, ...]:
    """Join the observations of different layers that are otherwise equal."""
    groups: dict[tuple[Any, ...], list[tuple[Observation, int, int]]] = {}
    for lines in records:
        repeated = {tuple(one["key"]): one for one in _counts(lines).get("repeated", ())}
        for line in _of_event(lines, "observation"):
            one = Observation(**line)
            more = repeated.get(one.key, {"times": 1, "last_step": one.step})
            key = (one.kind, one.rank, one.request, one.block, one.argument, one.step, one.position)
            groups.setdefault(key, []).append((one, more["times"], more["last_step"]))
    found = [
        Found(
            first=group[0][0],
            layers=tuple(dict.fromkeys(one.layer for one, _, _ in group)),
            times=sum(times for _, times, _ in group),
            last_step=max(last for _, _, last in group),
        )
        for group in groups.values()
    ]
    order = list(KINDS)
    return tuple(sorted(found, key=lambda one: (order.index(one.first.kind), one.first.step)))


_MOST = 3  # calls


def with_diagnoses(
    report: CaptureReport, on_step: Callable[[str], None] = lambda step: None
) -> CaptureReport:
    """Return the report with a diagnosis of its first three wrong calls."""
    known: dict[str, str] = {}
    found = []
    for one in report.found:
        if one.call and (one.call in known or len(known) < _MOST):
            if one.call not in known:
                on_step(f"diagnosing {one.call}")
                known[one.call] = _diagnosis(Path(report.folder) / one.call)
            one = dataclasses.replace(one, diagnosis=known[one.call])
        found.append(one)
    return dataclasses.replace(report, found=tuple[Found, ...](found))


def _diagnosis(path: Path) -> str:
    """Return the status of a saved call's diagnosis, and its cause, as text."""
    from attnlab.diagnosis.captured import diagnose_captured
    from attnlab.tensors.call import KernelCall

    try:
        diagnosis = diagnose_captured(KernelCall.load(path), Case())
    except AttnLabError as error:
        return f"not possible: {error}"
    return diagnosis.conclusion


def capture_report(one: CaptureReport) -> Sheet:
    """Return what was found, what was checked, and what was not."""
    summary, tone = _summary(one)
    rows = [_row(found, one.unit) for found in one.found]
    unchecked = [f"{what}: {times} times" for what, times in one.unchecked.items()]
    return Sheet.of(
        "Capture",
        summary,
        Grid(["what", "where", "evidence"], rows, most=len(rows)),
        Facts([("folder", one.folder), *_checked(one)]),
        *(Facts([("process", _sheet_process(process))]) for process in one.processes[:8]),
        Lines([Words("not checked", "warn"), *unchecked]) if unchecked else None,
        Lines([*one.notes, *(Words(text, "odd") for text in one.errors)]),
        tone=tone,
        name="CaptureReport",
    )


def _summary(one: CaptureReport) -> tuple[str, Tone]:
    if one.found:
        count = "1 fault" if len(one.found) == 1 else f"{len(one.found)} faults"
        return f"{count} in {one.total_units}", "bad"
    if not one.has_checked:
        return "nothing was checked", "odd"
    return f"nothing wrong in {one.total_units}", "good"


def _row(found: Found, unit: str) -> Row:
    one = found.first
    layers = ", ".join(found.layers[:4])
    if len(found.layers) > 4:
        layers += f" and {len(found.layers) - 4} more"
    where: list[Value] = [f"{unit} {one.step}", layers]
    if one.request is not None:
        where.append(f"request {one.request}")
    evidence: list[Value] = [one.text]
    if found.times > len(found.layers):
        evidence.append(f"seen {found.times} times, last in {unit} {found.last_step}")
    if found.call:
        evidence.append(f"attnlab diagnose --call {found.call}")
    if found.diagnosis:
        evidence.append(f"diagnosis: {found.diagnosis}")
    what = [Words(one.kind, "bad"), KINDS[one.kind]]
    return [what, where, evidence]  # type: ignore[list-item]


def _checked(one: CaptureReport) -> list[tuple[str, Value]]:
    counts: list[tuple[str, Value]] = [
        ("steps", f"{one.total('steps')}, with {one.total('tokens')} new tokens"),
        ("calls", f"{one.total('ops')}: lengths, slots and arguments of each"),
    ]
    if one.library is not None:
        counts = [("calls", f"{one.total('steps')}; {one.total('ops')} of them were read")]
    rows: list[tuple[str, Value]] = [
        *counts,
        (
            "values",
            f"{one.total('checked')} calls, {one.total('rows')} rows; largest error "
            f"{one.worst:.2g} of what rounding explains",
        ),
    ]
    if one.saved:
        wrong = sum(line.get("why") == "wrong" for line in one.saved)
        rows.append(("saved", f"{len(one.saved)} calls, {wrong} of them wrong"))
    if one.exit_code is not None:
        rows.append(("command", f"exit code {one.exit_code}"))
    return rows


def _sheet_process(one: ProcessRecord) -> str:
    started = one.started
    if "library" in started:
        title = package_of(str(started["library"])).title
        return f"{one.name}: rank {started.get('rank')}, {title} {started.get('release') or ''}".rstrip()
    return (
        f"{one.name}: rank {started.get('rank')}, vLLM {started.get('release')}, "
        f"{started.get('layers')} layers, {', '.join(started.get('implementations', ()))}, "
        f"CUDA graphs {started.get('cudagraph_mode')}"
    )
