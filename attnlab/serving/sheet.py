"""Sheet of a CaptureReport."""

from attnlab.serving.observation import KINDS
from attnlab.serving.report import CaptureReport, Found, ProcessRecord
from attnlab.show.sheets.sheet import Facts, Grid, Lines, Part, Row, Sheet, Tone, Value, Words


def capture_report(one: CaptureReport) -> Sheet:
    """Return what was found, what was checked, and what was not."""
    summary, tone = _summary(one)
    parts: list[Part] = []
    if one.found:
        rows = [_row(found) for found in one.found]
        parts.append(Grid(["what", "where", "evidence"], rows, most=len(rows)))
    parts.append(Facts([("folder", one.folder), *_checked(one)]))
    parts += [Facts([("process", _process(process))]) for process in one.processes[:8]]
    not_checked = [f"{what}: {times} times" for what, times in one.unchecked.items()]
    if not_checked:
        parts.append(Lines([Words("not checked", "warn"), *not_checked]))
    if one.notes or one.errors:
        parts.append(Lines([*one.notes, *(Words(text, "odd") for text in one.errors)]))
    return Sheet(
        kind="Capture",
        line=f"<CaptureReport: {summary}>",
        head=Words(summary, tone),
        parts=parts,
    )


def _summary(one: CaptureReport) -> tuple[str, Tone]:
    if one.found:
        count = "1 fault" if len(one.found) == 1 else f"{len(one.found)} faults"
        return f"{count} in {one.total('steps')} steps", "bad"
    if not one.has_checked:
        return "nothing was checked", "odd"
    return f"nothing wrong in {one.total('steps')} steps", "good"


def _row(found: Found) -> Row:
    one = found.first
    layers = ", ".join(found.layers[:4])
    if len(found.layers) > 4:
        layers += f" and {len(found.layers) - 4} more"
    where: list[Value] = [f"step {one.step}", layers]
    if one.request is not None:
        where.append(f"request {one.request}")
    evidence: list[Value] = [one.text]
    if found.times > len(found.layers):
        evidence.append(f"seen {found.times} times, last in step {found.last_step}")
    if found.call:
        evidence.append(f"attnlab diagnose --call {found.call}")
    if found.diagnosis:
        evidence.append(f"diagnosis: {found.diagnosis}")
    what = [Words(one.kind, "bad"), KINDS[one.kind]]
    return [what, where, evidence]  # type: ignore[list-item]


def _checked(one: CaptureReport) -> list[tuple[str, Value]]:
    rows: list[tuple[str, Value]] = [
        ("steps", f"{one.total('steps')}, with {one.total('tokens')} new tokens"),
        ("calls", f"{one.total('ops')}: lengths, slots and arguments of each"),
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


def _process(one: ProcessRecord) -> str:
    started = one.started
    return (
        f"{one.name}: rank {started.get('rank')}, vLLM {started.get('release')}, "
        f"{started.get('layers')} layers, {', '.join(started.get('implementations', ()))}, "
        f"CUDA graphs {started.get('cudagraph_mode')}"
    )
