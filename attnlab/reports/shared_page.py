"""The page that gets sent: one self-contained HTML file, or a comment of at most 25 lines in Markdown.

Every command that has something to share makes a :class:`SharedPage`. Pictures are inline SVG, so a page
needs no package beyond those of attnlab.
"""

import base64
import json
import linecache
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attnlab.case.case import Case, Lengths
from attnlab.case.output_file import write_text
from attnlab.case.platforms import STAGES
from attnlab.case.shown import Shown
from attnlab.contracts.slot_states import EMPTY, FOREIGN, STATES, SlotMap
from attnlab.diagnosis.candidates import locate
from attnlab.diagnosis.captured import problem_of
from attnlab.horizon.deployment import GPUS, Deployment
from attnlab.horizon.survey import Row, Survey
from attnlab.lab.decode_error import DecodedError
from attnlab.reports.close_up import TracedRun, close_up, weights_only, wrong_first
from attnlab.reports.pages import png_of, render_page
from attnlab.show.notebook import versions
from attnlab.show.sheets import html, sheet_of
from attnlab.show.sheets.sheet import Bar, Facts, Grid, Hidden, Lines, Link, Part, Value, Words
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import in_numbers
from attnlab.weights.xray import XRay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlab.checker.matrix import MatrixTable
    from attnlab.checker.report import Report
    from attnlab.diagnosis.diagnosis import Diagnosis
    from attnlab.lab.decode_error import ErrorAnswer
    from attnlab.lab.result import Result

_CONTEXT = 4  # lines of the source before and after the faulty one
_MOST_LINES = 25  # of a comment
_MOST_EVIDENCE = 8  # sentences of a comment
_MOST_CASES = 3  # commands of a comment
_EXCLUDED = {
    "excluded by value": "{} would give other numbers at the wrong places",
    "excluded by place": "{} would make other rows wrong",
    "excluded by inputs": "{}: the tensors at hand, or the run, contradict it",
    "excluded by run": "{}: the run contradicts it",
    "excluded by rerun": "{}: further runs contradict it",
}
_KINDS = {"XRay": "X-ray", "Shrunk": "Smallest call", "Replays": "Replay", "Report": "Check"}
_CELL, _GAP = 16, 2  # pixels of a picture
_MOST_ROWS, _MOST_COLUMNS = 48, 64  # of a picture; rows without a finding are left out first


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Lines of a source around one: ``first`` is the number of the first of ``lines``."""

    file: str
    line: int
    first: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture as HTML, with its title, and a legend of (CSS class, text)."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def themed_picture(title: str, alt: str, light: str, dark: str) -> Picture:
    """Return a picture of two PNGs in base64: for light and for dark colours of the page."""
    picture = (
        '<picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="data:image/png;base64,{dark}">'
        f'<img alt="{escape(alt)}" src="data:image/png;base64,{light}"></picture>'
    )
    return Picture(title=title, svg=picture)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPage:
    """What a page says.

    - ``kind``: the noun, such as "Diagnosis"; ``cause``: the conclusion in one sentence; ``evidence``:
      further sentences; ``rows``: those of tables, for a comment; ``excluded``: what is not the cause, and
      how that is known.
    - ``source``: the faulty line; ``pictures``: the first is the most important.
    - ``sheet``: the noun as HTML; ``script``: the smallest reproduction, and why there is none, or "".
    - ``command``: runs it again; ``cases``: (a finding, the command of its smallest Case) of a check.
    - ``notes``: what people add: since, fix, owner, status.
    - ``close_up``: what the page shows of a token and a head that is picked, or None.
    """

    kind: str
    cause: str
    command: str
    cases: tuple[tuple[str, str], ...] = ()
    evidence: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    source: Excerpt | None = None
    pictures: tuple[Picture, ...] = ()
    sheet: str = ""
    script: tuple[str, str] = ("", "")
    notes: dict[str, str] = field(default_factory=dict)
    close_up: dict[str, Any] | None = None

    def with_notes(self, notes: Mapping[str, str], old: Path | None) -> "SharedPage":
        """Return the page with notes, and with those of the file ``old``; an empty text removes one."""
        notes = {**({} if old is None else _notes_of(old)), **notes}
        return replace(self, notes={name: text for name, text in notes.items() if text})

    def write(self, path: Path) -> None:
        """Write the page. Raises InvalidCase if the file cannot be written."""
        write_text(
            path, render_page("shared.html.j2", title=f"{self.kind}: {self.cause}", page=self)
        )

    def markdown(self) -> str:
        """Return a comment for an issue or a pull request, of at most 25 lines."""
        head = [f"**{_cut(self.cause)}**", ""]
        source = self.source
        if source is not None:
            code = source.lines[source.line - source.first].strip()
            head += [f"`{Path(source.file).name}`, line {source.line}: `{code}`", ""]
        known = ", ".join(f"{name} {value}" for name, value in versions().items())
        cases = [command for _, command in self.cases[:_MOST_CASES]]
        tail = ["", "```sh", *cases, self.command, "```", "", f"{known}"]
        if self.notes:
            head += [_cut("; ".join(f"{name}: {text}" for name, text in self.notes.items())), ""]
        room = min(_MOST_EVIDENCE, _MOST_LINES - len(head) - len(tail))
        body = [f"- {_cut(text)}" for text in (*self.evidence, *self.rows, *self.excluded)[:room]]
        return "\n".join([*head, *body, *tail]) + "\n"


_NOTES = re.compile(r'<script type="application/json" id="notes">(.*?)</script>', re.DOTALL)


def _notes_of(path: Path) -> dict[str, str]:
    """Return the notes of a page that was written before; none of another file."""
    try:
        found = _NOTES.search(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}
    return {} if found is None else dict(json.loads(found[1]))


def _cut(text: str) -> str:
    """Return a text on one line, without what is beyond 300 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:299] + "…"


def page_of(
    noun: Shown,
    command: str,
    *,
    run: TracedRun | None = None,
    pictures: Sequence[Picture] = (),
    line: tuple[str, int] | None = None,
    script: tuple[str, str] = ("", ""),
    cause: str = "",
) -> SharedPage:
    """Return the page of a noun. ``cause``: the conclusion, if it is another one than that of the noun.

    ``run``: a run whose errors and reads are drawn; ``line``: the file and the number of the faulty line;
    ``script``: the text of a reproduction, and why there is none.
    """
    sheet = sheet_of(noun)
    head = sheet.head.text if isinstance(sheet.head, Words) else str(sheet.head)
    texts = [part for part in sheet.parts if isinstance(part, Lines)]
    lines = [_text_of(cell) for part in texts for cell in part.lines]
    drawn = (*pictures, *(() if run is None else pictures_of(run.result)))
    common: dict[str, Any] = {
        "kind": _KINDS.get(sheet.kind, sheet.kind),
        "command": command,
        "sheet": html(noun),
        "script": script,
        "rows": tuple(_of_tables(sheet.parts)) if not lines else (),
    }
    if isinstance(noun, XRay):
        common["close_up"] = weights_only(noun)
    elif run is not None:
        common["close_up"] = close_up(run)
    if sheet.kind == "Diagnosis":
        return _of_diagnosis(noun, drawn, common)  # type: ignore[arg-type]
    if cause:
        evidence = lines
    elif sheet.kind == "XRay" and lines:
        cause, evidence = lines[0], lines[1:]
    elif sheet.kind == "Decoded error" and lines[1:]:  # the first states the platform
        cause, evidence = lines[1], [lines[0], *lines[2:]]
    else:
        is_said = not lines or lines[0].startswith(head)
        cause, evidence = (lines or [head])[0] if is_said else f"{head}: {lines[0]}", lines[1:]
    if sheet.kind == "Report":
        cause, evidence = _of_report(noun, head, lines)  # type: ignore[arg-type]
        if found := noun.unexpected:  # type: ignore[attr-defined]
            common |= {"rows": (), "cases": tuple((one.title, one.command) for one in found)}
    source = None if line is None else excerpt(*line)
    return SharedPage(
        cause=cause, evidence=tuple(evidence), pictures=drawn, source=source, **common
    )


def _of_report(report: "Report", head: str, lines: list[str]) -> tuple[str, list[str]]:
    """Return the conclusion of a check, and its findings with what they rest on."""
    found = report.unexpected
    if not found:
        return head, lines
    evidence = [
        f"{one.op}: {one.title}{'' if one.evidence in one.title else f'. {one.evidence}'}; in "
        f"{one.seen_in(report.ops[one.op])}"
        for one in found
    ]
    if len(found) > 1:
        return head, [*evidence, *lines]
    place = (
        f" [{Path(found[0].lines[0].file).name}, line {found[0].lines[0].line}]"
        if found[0].lines
        else ""
    )
    return f"{report.version}: {found[0].title}{place}", [*evidence, head, *lines]


def _of_tables(parts: Sequence[Part]) -> list[str]:
    """Return the facts and the first rows of the tables of a sheet without sentences."""
    found = []
    for part in parts:
        if isinstance(part, Facts):
            found += [f"{name}: {_text_of(value)}" for name, value in part.rows]
        elif isinstance(part, Grid):
            for row in part.rows[:_MOST_EVIDENCE]:
                cells = zip(part.columns, map(_text_of, row), strict=True)
                found.append("; ".join(f"{name} {text}" for name, text in cells if text))
    return found


def _text_of(value: Value) -> str:
    """Return a cell, or several, as text; a bar has its label."""
    if isinstance(value, Words | Link):
        return value.text
    if isinstance(value, Bar):
        return value.label
    if isinstance(value, Hidden):
        return value.summary
    return str(value) if isinstance(value, str | int) else ", ".join(map(_text_of, value))


def _of_diagnosis(
    one: "Diagnosis", pictures: tuple[Picture, ...], common: dict[str, Any]
) -> SharedPage:
    """Return the page of a diagnosis: its cause, the evidence, and the candidates that are excluded."""
    cause, *evidence = one.sentences()
    counts = one.counts()
    excluded = [
        text.format(f"{counts[name]} known {'fault' if counts[name] == 1 else 'faults'}")
        for name, text in _EXCLUDED.items()
        if name in counts
    ]
    if one.repair is not None and one.location is not None:
        excluded.append(
            f"{one.location.tried} edits of the source were tried; the line that is named is the one "
            f"that {one.repair.cases} further cases confirm"
        )
    source = None if one.repair is None else excerpt(one.repair.file, one.repair.line)
    return SharedPage(
        cause=cause,
        evidence=tuple(evidence),
        excluded=tuple(excluded),
        source=source,
        pictures=pictures,
        **common,
    )


def excerpt(file: str, line: int) -> Excerpt | None:
    """Return the lines around one of a file, or None if they cannot be read."""
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return None
    first = max(1, line - _CONTEXT)
    shown = tuple(text.rstrip("\n") for text in lines[first - 1 : line + _CONTEXT])
    return Excerpt(file=file, line=line, first=first, lines=shown)


# Pictures: a grid of cells as inline SVG. A cell has a CSS class, which gives its colours in light and dark,
# and a title, which a browser shows as a tooltip. A wrong cell has a cross, so that colour is not needed.

# CSS class or "", title, "row,head" of a cell that can be picked.
Square: TypeAlias = tuple[str, str, str]
# A kernel may load slots that are none of its sequence's and mask them; it must not use them.
_STRANGE = {one: "wrong" for one in FOREIGN} | {one: "off" for one in EMPTY}


def pictures_of(result: "Result") -> tuple[Picture, ...]:
    """Return the pictures of a run: wrong rows and heads, and the slots that were read, if it was traced."""
    if result.errors is None:
        return ()
    errors = result.errors if result.errors.is_derived else result.compare_with_rounding()
    found = [error_picture(errors.lengths, errors.error, errors.mismatches > 0)]
    if result.memory is not None and result.memory.slots:
        found.append(slot_picture(result.memory.slot_map(result.provenance)))
    return tuple(found)


def call_pictures(call: KernelCall) -> tuple[Picture, ...]:
    """Return the picture of the wrong rows and heads of a call's output; none if nothing is wrong."""
    if call.spec.writes_cache:
        return ()
    call = call.cpu()
    found = locate(problem_of(call), in_numbers(call).buffer)
    if not bool(found.is_wrong.any()):
        return ()
    starts = call.query_start_loc.long()
    query_lens = starts[1:] - starts[:-1]
    ctx_lens = call.seq_lens.long() - query_lens
    lengths = Lengths(query_lens=tuple(query_lens.tolist()), ctx_lens=tuple(ctx_lens.tolist()))
    return (error_picture(lengths, found.error, found.is_wrong),)


def error_picture(lengths: Lengths, errors: torch.Tensor, wrong: torch.Tensor) -> Picture:
    """Draw which heads of which rows are wrong.

    ``errors`` [num_tokens, num_heads]: the largest of each head, -inf if it did not run; ``wrong``: of the
    same shape, bool.
    """
    rows = wrong_first(wrong.any(1).tolist(), _MOST_ROWS)
    heads = range(min(wrong.shape[1], _MOST_COLUMNS))
    labels, cells = [], []
    for row in rows:
        seq, token = lengths.locate(row)
        labels.append(f"sequence {seq}, token {token}")
        line = []
        for head in heads:
            error, is_wrong = float(errors[row, head]), bool(wrong[row, head])
            ran = error != -math.inf
            name = "idle" if not ran else "wrong" if is_wrong else "right"
            title = f"sequence {seq}, token {token}, head {head}: error {error:.3g}"
            line.append((name, title, f"{row},{head}"))
        cells.append(line)
    of_rows, of_heads = int(wrong.any(1).sum()), int(wrong.any(0).sum())
    title = (
        f"{of_rows} of {wrong.shape[0]} rows and {of_heads} of {wrong.shape[1]} heads are wrong"
        f"{_left_out(len(rows), wrong.shape[0], 'rows')}"
    )
    names = {"wrong": "wrong beyond rounding", "right": "right", "idle": "did not run"}
    return _drawn(title, labels, cells, _numbered("head", len(heads)), names)


def text_pictures(found: "DecodedError | ErrorAnswer", case: Case) -> tuple[Picture, ...]:
    """Draw what the text of a failed test names; none for a failed ``torch.allclose``."""
    if isinstance(found, DecodedError):
        tokens = wrong_first([one == found.token for one in range(found.query_len)], _MOST_ROWS)
        first = max(0, min(found.head - _MOST_COLUMNS // 2, case.num_heads - _MOST_COLUMNS))
        heads = range(first, min(first + _MOST_COLUMNS, case.num_heads))
        place = (found.token, found.head)
        cells = [
            [_square((token, head) == place, f"token {token}, head {head}") for head in heads]
            for token in tokens
        ]
        title = f"row {found.row} is token {found.token} of sequence {found.seq}; head {found.head}"
        title += _left_out(len(tokens), found.query_len, "rows of the sequence")
        labels = [f"sequence {found.seq}, token {token}" for token in tokens]
        return (_drawn(title, labels, cells, _numbered("head", len(heads), first), _OF_TEXT),)
    if found.offset is not None:
        return (_cache_picture(found),)
    return (_dtype_picture(found),) if found.rejected else ()


_OF_TEXT = {"wrong": "what the text names", "idle": "the text says nothing of it"}


def _cache_picture(found: "ErrorAnswer") -> Picture:
    """Draw a slot among those of its block."""
    size = found.case.block_size
    label = f"block {found.block}"
    if found.position is not None:
        label = f"block_table[{found.seq}][{found.position // size}]"
    cells = [[_square(i == found.offset, f"{label}, offset {i}") for i in range(size)]]
    title = f"offset {found.offset} of {label}, head {found.head}"
    return _drawn(title, [label], cells, _numbered("slot", size), _OF_TEXT)


def _dtype_picture(found: "ErrorAnswer") -> Picture:
    """Draw in which stages of the test a kernel rejects which tensor."""
    columns = list(dict.fromkeys((kernel, tensor) for _, kernel, tensor in found.rejected))
    cells = []
    for stage in STAGES:
        words = [f"{stage}: {' of '.join(reversed(one))}" for one in columns]
        bad = [(stage, *one) in found.rejected for one in columns]
        cells.append([_square(*one, other="right") for one in zip(bad, words, strict=True)])
    names = {"wrong": "the kernel raises this error", "right": "it does not"}
    heads = ", ".join(f"{tensor} of {kernel}" for kernel, tensor in columns)
    title = "The stages of the test in which a kernel raises this error"
    return _drawn(title, list(STAGES), cells, heads, names)


def _square(is_marked: bool, title: str, other: str = "idle") -> Square:
    return ("wrong" if is_marked else other, title, "")


def matrix_pictures(table: "MatrixTable") -> tuple[Picture, ...]:
    """Draw which ids of each test do not match, by their parameters."""
    classes = {"match": "right", "not run": "idle"}
    names = {"wrong": "mismatches, or is rejected", "right": "matches", "idle": "did not run"}
    found = []
    for test, columns, rows in table.grids():
        cells = [
            [
                (classes.get(one.status, "wrong"), f"{one.id}: {one.status}", "")
                if (one := of_row.get(column)) is not None
                else ("", "", "")
                for column in columns
            ]
            for of_row in rows.values()
        ]
        bad = sum(cell[0] == "wrong" for line in cells for cell in line)
        total = sum(map(len, rows.values()))
        title = f"{bad} of {total} ids of {test} do not match"
        found.append(_drawn(title, list(rows), cells, f"columns: {', '.join(columns)}", names))
    return tuple(found)


def comparison_pictures(
    names: Sequence[str], cases: Sequence[Sequence[tuple[bool, str]]]
) -> tuple[Picture, ...]:
    """Draw in which cases each kernel is wrong; ``cases``: (is wrong, text) of each kernel, by case."""
    if not cases:
        return ()
    shown = cases[:_MOST_COLUMNS]
    cells = [
        [_square(is_wrong, text, "right") for is_wrong, text in line]
        for line in zip(*shown, strict=True)
    ]
    title = f"In which cases each kernel is wrong{_left_out(len(shown), len(cases), 'cases')}"
    texts = {"wrong": "wrong beyond rounding, or rejected", "right": "right"}
    return (_drawn(title, names, cells, _numbered("case", len(shown), 1), texts),)


def slot_picture(found: SlotMap) -> Picture:
    """Draw which slots of the cache were read, and which of them hold no token of their reader."""
    owners = found.provenance.seq
    strange = torch.zeros_like(found.is_read)
    for state in _STRANGE:
        strange |= found.states == state.code
    used = [int(block) for block in found.order() if _is_used(found, int(block))]
    kept = wrong_first([bool(strange[block].any()) for block in used], _MOST_ROWS)
    labels, cells = [], []
    for block in (used[i] for i in kept):
        seqs = ", ".join(map(str, sorted({int(seq) for seq in owners[block] if seq >= 0})))
        labels.append(f"block {block} of sequence {seqs}" if seqs else f"block {block}, empty")
        cells.append([_slot_cell(found, block, i) for i in range(strange.shape[1])])
    count = int(strange.sum())
    what = (
        f"{count} slots were read that hold no token of the sequence they were read for; a mask must hide "
        "them"
        if count
        else "every slot that was read holds a token of the sequence it was read for"
    )
    names = {
        "wrong": "read, another token than the reader's",
        "off": "read, and empty",
        "read": "read",
        "right": "not read",
        "idle": "empty",
    }
    title = f"{what}{_left_out(len(kept), len(used), 'blocks')}"
    return _drawn(title, labels, cells, _numbered("slot", found.is_read.shape[1]), names)


def _is_used(found: SlotMap, block: int) -> bool:
    """Answer whether a block holds a token or was read."""
    return bool(found.is_read[block].any() or (found.provenance.seq[block] >= 0).any())


def _slot_cell(found: SlotMap, block: int, slot: int) -> Square:
    """Return the square of a slot."""
    seq, pos = (int(one[block, slot]) for one in (found.provenance.seq, found.provenance.pos))
    owner = f"token {pos} of sequence {seq}" if seq >= 0 else "empty"
    place = f"block {block}, slot {slot}: {owner}"
    if not bool(found.is_read[block, slot]):
        return ("right" if seq >= 0 else "idle"), f"{place}, not read", ""
    state = STATES[int(found.states[block, slot])]
    text = f"{place}, read for sequence {int(found.reader_seq[block, slot])}: {state}"
    return _STRANGE.get(state, "read"), text, ""


def _drawn(
    title: str,
    labels: Sequence[str],
    cells: Sequence[Sequence[Square]],
    columns: str,
    names: dict[str, str],
) -> Picture:
    """Return the picture of a grid; ``names``: the texts of the classes, for those that occur."""
    found = {name for line in cells for name, *_ in line}
    legend = tuple((name, text) for name, text in names.items() if name in found)
    return Picture(title=title, svg=_grid(labels, cells, columns), legend=legend)


def _left_out(shown: int, count: int, what: str) -> str:
    return "" if shown == count else f" ({shown} of {count} {what} are shown)"


def _numbered(what: str, count: int, first: int = 0) -> str:
    """Return the head of columns that have consecutive numbers."""
    return f"{what} {first} to {first + count - 1}" if count > 1 else f"{what} {first}"


def _grid(labels: Sequence[str], cells: Sequence[Sequence[Square]], columns: str) -> str:
    """Return a table of small SVG squares: a label for each row, and what the columns are."""
    width = (len(cells[0]) if cells else 0) * (_CELL + _GAP)
    size = f'width="{width}" height="{_CELL}" viewBox="0 0 {width} {_CELL}"'
    rows = "".join(
        f'<tr><th scope="row">{escape(label).replace("_", "_<wbr>")}</th><td><svg {size} role="img">'
        f"<title>{escape(label)}</title>{''.join(_squares(line))}</svg></td></tr>"
        for label, line in zip(labels, cells, strict=True)
    )
    head = f"<tr><th></th><th>{escape(columns)}</th></tr>"
    return f'<table class="cells"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def _squares(line: Sequence[Square]) -> Iterator[str]:
    for i, (name, title, place) in enumerate(line):
        if not name:  # nothing is there
            continue
        x, far = i * (_CELL + _GAP), _CELL - 4
        cross = (
            f'<path d="M{x + 4} 4L{x + far} {far}M{x + far} 4L{x + 4} {far}"/>'
            if name == "wrong"
            else ""
        )
        at = f' data-at="{place}"' if place else ""
        yield (
            f'<g class="{name}"{at}><title>{escape(title)}</title>'
            f'<rect x="{x}" width="{_CELL}" height="{_CELL}" rx="2"/>{cross}</g>'
        )


# The pictures of a survey: for each kernel, a plot of the margin against the context length.

_CONTEXTS = [2**i for i in range(10, 31)]
_MOST_MARGINS = 8


def margins(rows: list[Row], deployment: Deployment) -> dict[str, list[tuple[int, float]]]:
    """Return (context length, margin) by expression: the horizon over the size that the context needs."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        one = row.statement
        points = []
        for context in _CONTEXTS:
            needed = deployment.needed(one.size, context) or row.limits.get(one.size)
            if one.wrong_at and needed:
                points.append((context, one.wrong_at / needed))
        if points:
            text = textwrap.shorten(one.site.text, 90, placeholder=" …")
            found.setdefault(f"{one.size}: line {one.site.line}: {text}", points)
    return dict(list(found.items())[:_MOST_MARGINS])


def plot_margins(
    lines: Mapping[str, list[tuple[int, float]]],
    memory: Mapping[str, int],
    *,
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw margins by expression against the context length; below 1 an access is wrong.

    ``memory``: the context length that fills the memory of each GPU.
    """
    import matplotlib.pyplot as plt

    ax = ax or plt.subplots(figsize=(9, 4.2), layout="constrained")[1]
    for name, points in lines.items():
        ax.plot(*zip(*points, strict=True), label=name, linewidth=1.6)
    ax.axhline(1, color="#c8553d", linewidth=1, label="horizon")
    for style, (name, context) in zip((":", "--", "-."), memory.items(), strict=False):
        ax.axvline(
            context, color="#808080", linestyle=style, linewidth=1, label=f"cache fills {name}"
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="tokens of one sequence", ylabel="horizon / needed size", title=title)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.18), fontsize="small", frameon=False)
    return ax


def _picture(rows: list[Row], deployment: Deployment, *, is_dark: bool) -> str:
    """Return a PNG in base64, "" without lines."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    lines = margins(rows, deployment)
    if not lines:
        return ""
    memory = {f"{name} ({gb} GB)": deployment.cache_tokens(gb) for name, gb in GPUS.items()}
    with plt.style.context("dark_background" if is_dark else "default"):
        figure = Figure(figsize=(9, 4.2 + 0.22 * len(lines)), layout="constrained")
        plot_margins(lines, memory, ax=figure.add_subplot())
        data = png_of(figure, 110, is_transparent=True)
    return base64.b64encode(data).decode()


def margin_pictures(one: Survey) -> list[Picture]:
    """Return a plot for each kernel with a described launch."""
    deployment = one.deployment or Deployment()
    by_kernel: dict[str, list[Row]] = {}
    for row in one.rows:
        if row.kernel.launch is not None and not row.kernel.launch.is_assumed:
            title = f"{row.kernel.kernel} ({Path(row.kernel.file).name})"
            by_kernel.setdefault(title, []).append(row)
    found = []
    for title, rows in by_kernel.items():
        light, dark = (_picture(rows, deployment, is_dark=is_dark) for is_dark in (False, True))
        alt = f"Margin to the horizon of {title} against the tokens of one sequence"
        found += [themed_picture(f"Margin of {title}", alt, light, dark)] if light else []
    return found
