"""The close-up of a page: of a token and a head, its values, slots and weights, and the steps of its reads.

It is one JSON document of bounded size, which the browser draws (templates/close_up.js). Wrong tokens and
heads come first; what is left out is stated.
"""

import linecache
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.contracts.slot_states import FOREIGN, SlotState, slot_states
from attnlab.diagnosis.refinement import can_xray
from attnlab.kernels.control import uncontrolled
from attnlab.kernels.triton.probe import LaunchLog, Line, Probe, ProgramLog, probing
from attnlab.kernels.triton.run_log import Budget, Region, TooLong, Watched, tensors_of
from attnlab.lab.lab import Lab
from attnlab.lab.result import ErrorMap, Result
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import mask_of
from attnlab.weights.conclude import xray as measure
from attnlab.weights.xray import KeyColumns, XRay, key_columns

_MOST_TOKENS, _MOST_HEADS = 48, 8
_MOST_VALUES = 24_000  # numbers of the outputs
_MOST_WEIGHTS = 30_000  # numbers of the X-ray
_MOST_COLUMNS, _MOST_ROWS = 256, 64  # of a map of weights
_MOST_SLOTS = 16_000  # of the sequences
_MOST_STEPS = 3_000
_TRACE_S = 3.0  # processor time to record the reads of each program
_XRAY_S = 0.5  # to describe the weights, which only measures them in most cases
_SMALL_S = 0.5  # a run of the kernels up to which all sequences are recorded
_DIGITS = 4
# A slot in one of these states holds no token that any row of its reader needs.
_NEVER_NEEDED = (*FOREIGN, SlotState.UNWRITTEN, SlotState.FREED, SlotState.NEVER_MAPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step in which a program reads the cache: the lines that load, the slots and the KV heads, in order.

    A slot is block × block_size + slot. A step ends before a line that loads again.
    """

    lines: tuple[Line, ...]
    slots: tuple[int, ...]
    kv_heads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReads:
    """The steps of a program; ``cells``: the (row, head) of the queries that it loads or outputs that it
    stores."""

    cells: frozenset[tuple[int, int]]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedRun:
    """A run for a page: its result, the right output, and the steps of its programs.

    ``output``: [num_tokens, num_heads, head_size], None if the call was rejected. ``is_complete``: whether
    all programs were recorded that read for the sequences in ``seqs``. ``xray``: of the kernels, or None.
    """

    result: Result
    output: torch.Tensor | None = None
    programs: tuple[ProgramReads, ...] = ()
    seqs: range = range(0)
    is_complete: bool = False
    xray: XRay | None = None


def trace_run(lab: Lab, case: Case, xray: XRay | None = None) -> TracedRun:
    """Run a Case for its page; the reads are recorded where Triton's interpreter runs the kernels.

    ``xray``: of the kernels if there is one; else the weights are measured if that takes seconds at most.
    """
    result = lab.run(case.replace(trace_reads=lab.backend(case).traces_reads))
    if result.errors is None or case.spec.writes_cache:
        return TracedRun(result=result)
    output = lab.reference(case)
    if xray is None and result.errors.mismatched and can_xray(case, sum(result.seconds.values())):
        with suppress(AttnLabError):
            xray = measure(case, lab=lab, confirm=False, limit_s=_XRAY_S)
    found = TracedRun(result=result, output=output, xray=xray)
    return replace(found, **_recorded(lab, case, result)) if result.launches else found


def _recorded(lab: Lab, case: Case, result: Result) -> dict[str, Any]:
    """Return the programs of a run, recorded again, as fields of a TracedRun."""
    case, seqs = _part(case, result)
    probe = Probe(records=True, budget=Budget(operations=sys.maxsize, seconds=_TRACE_S))
    is_complete = False
    with suppress(TooLong, AttnLabError), uncontrolled(), probing(probe):
        lab.run(case)
        is_complete = True
    programs = tuple(one for launch in probe.launches for one in _programs(launch, result.call))
    return {"programs": programs, "seqs": seqs, "is_complete": is_complete}


def _part(case: Case, result: Result) -> tuple[Case, range]:
    """Return the Case, or of a long run the part with its worst sequence, and the sequences that run."""
    case, everything = case.replace(trace_reads=False), range(len(case.lengths.query_lens))
    if result.errors is None or result.seconds.get("kernels", 0.0) < _SMALL_S:
        return case, everything
    errors = [-math.inf if e != e else e for e in result.errors.seq_error()]
    worst = max(everything, key=lambda seq: errors[seq])
    with suppress(InvalidCase):
        return case.replace(seq_range=(worst, worst + 1)), range(worst, worst + 1)
    return case, everything


def _programs(launch: LaunchLog, call: KernelCall) -> Iterator[ProgramReads]:
    """Yield the programs of a launch that read the cache."""
    watched, heads = Watched.of(call), call.query.shape[1]
    caches, queries = list[tuple[Region, Region]](), list[tuple[Region, bool]]()
    for name, tensor in tensors_of(launch.arguments):
        dims = watched.dims(tensor)
        if dims is not None and len(dims) == 2:
            kv_head = 2 if dims[1] == 1 else 1
            caches.append((Region.of(name, tensor, dims), Region.of(name, tensor, (kv_head,))))
        elif dims is not None and not _is_new(tensor, call):
            has_heads = tensor.dim() == 3 and tensor.shape[1] == heads
            queries.append((Region.of(name, tensor, (0, 1) if has_heads else (0,)), has_heads))
    for log in launch.programs:
        if steps := [*_steps(log, caches)]:
            cells = frozenset(
                cell
                for region, has_heads in queries
                for parts in (*log.loads.values(), *log.stores.values())
                for part in parts
                for index in region.indices(part)
                for cell in _cells(index, has_heads, heads)
            )
            yield ProgramReads(cells=cells, steps=tuple(steps))


def _cells(index: int, has_heads: bool, heads: int) -> Iterable[tuple[int, int]]:
    return [divmod(index, heads)] if has_heads else [(index, head) for head in range(heads)]


def _is_new(tensor: torch.Tensor, call: KernelCall) -> bool:
    """Answer whether a tensor of the shape of a query is the new keys or values, or a copy of them."""
    return any(
        one.shape == tensor.shape and torch.equal(one.to(tensor), tensor)
        for one in (call.key.cpu(), call.value.cpu())
    )


def _steps(log: ProgramLog, caches: Sequence[tuple[Region, Region]]) -> Iterator[Step]:
    """Yield the steps of a program; ``caches``: how to compute slots and KV heads from addresses."""
    parts = {line: iter(arrays) for line, arrays in log.loads.items()}
    lines, slots, kv_heads = list[Line](), set[int](), set[int]()

    def step() -> Step:
        found = (tuple(sorted(some)) for some in (slots, kv_heads))
        return Step(lines=tuple(lines), slots=next(found), kv_heads=next(found))

    for line in log.order:
        part = next(parts[line])
        found = {slot for cache, _ in caches for slot in cache.indices(part)}
        if found and line in lines:
            yield step()
            lines, slots, kv_heads = [], set(), set()
        if found:
            lines.append(line)
            slots |= found
            kv_heads.update(head for _, cache in caches for head in cache.indices(part))
    if slots:
        yield step()


def close_up(run: TracedRun) -> dict[str, Any] | None:
    """Return the document of a run, or None if it has no output rows."""
    result = run.result
    if result.errors is None or run.output is None:
        return None
    errors = result.errors if result.errors.is_derived else result.compare_with_rounding()
    return _Document(run=run, output=run.output, errors=errors).to_dict()


def weights_only(xray: XRay) -> dict[str, Any]:
    """Return the document of an X-ray without a run."""
    setup = xray.setup
    wrong = xray.wrong
    rows = wrong_first(wrong.any(1).tolist(), _MOST_TOKENS)
    heads = [int(setup.heads[i]) for i in wrong_first(wrong.any(0).tolist(), _MOST_HEADS)]
    tokens = []
    for i in rows:
        seq, position = int(setup.seq[i]), int(setup.position[i])
        token = position - int(setup.ctx_len[i])
        of = {"row": int(setup.rows[i]), "seq": seq, "token": token, "pos": position}
        tokens.append({**of, "wrong": setup.heads[wrong[i]].tolist()})
    weights = _maps(xray, setup.seq[rows].tolist(), heads)
    return {"tokens": tokens, "heads": heads, "weights": weights}


class _Document:
    """What is chosen of a run, and its JSON."""

    def __init__(self, *, run: TracedRun, output: torch.Tensor, errors: ErrorMap) -> None:
        self.run, self.errors, self.xray = run, errors, run.xray
        self.call, self.lengths = run.result.call, errors.lengths
        self.right, self.got = output.cpu().double(), run.result.output.cpu().double()
        self.provenance = run.result.provenance
        self.group = self.call.query.shape[1] // self.call.value_cache.shape[1]
        self.wrong = errors.mismatches.cpu() > 0
        ran = (errors.error != -math.inf).cpu()
        by_head = [
            i for i in wrong_first(self.wrong.any(0).tolist(), _MOST_HEADS) if ran[:, i].any()
        ]
        each = 2 * self.got.shape[2] * max(1, len(by_head))
        most = max(1, min(_MOST_TOKENS, _MOST_VALUES // each))
        self.heads = by_head
        self.rows = [i for i in wrong_first(self.wrong.any(1).tolist(), most) if ran[i].any()]
        self.seqs = sorted({self.lengths.locate(row)[0] for row in self.rows})

    def to_dict(self) -> dict[str, Any]:
        """Return the document."""
        tokens, heads = self.wrong.shape
        cells = {(row, head) for row in self.rows for head in self.heads}
        found = [
            (number, step)
            for number, program in enumerate(self.run.programs)
            if cells & program.cells
            for step in program.steps
        ]
        steps = found[:_MOST_STEPS]
        return {
            "tokens": [self._token(row) for row in self.rows],
            "heads": self.heads,
            "of": [len(self.rows), tokens, len(self.heads), heads],
            "group": self.group,
            "block_size": self.call.block_size,
            "cells": {f"{r},{h}": self._cell(r, h, steps) for r in self.rows for h in self.heads},
            "steps": [_step(step, number) for number, step in steps],
            "lines": _lines([step for _, step in steps]),
            "seqs": {str(seq): self._sequence(seq, steps) for seq in self.seqs},
            "weights": {} if self.xray is None else _maps(self.xray, self.seqs, self.heads),
        }

    def _token(self, row: int) -> dict[str, Any]:
        seq, token = self.lengths.locate(row)
        position = self.lengths.ctx_lens[seq] + token
        seen = mask_of(self.call, seq).visible(torch.tensor([position]))[0]
        return {
            **{"row": row, "seq": seq, "token": token, "pos": position},
            "sees": runs_of(torch.nonzero(seen).flatten().tolist()),
            "wrong": torch.nonzero(self.wrong[row]).flatten().tolist(),
        }

    def _cell(self, row: int, head: int, steps: list[tuple[int, Step]]) -> dict[str, Any]:
        """Return the numbers of a row and head, and its steps: (number, why it is marked, weights)."""
        seq, _ = self.lengths.locate(row)
        chosen = {id(step): i for i, (_, step) in enumerate(steps)}
        own = [s for p in self.run.programs if (row, head) in p.cells for s in p.steps]
        judged = zip(own, _Judge.of(self, row, head).judge(own), strict=True)
        found = [(chosen[id(s)], *judgement) for s, judgement in judged if id(s) in chosen]
        return {
            "right": rounded(self.right[row, head].tolist()),
            "output": rounded(self.got[row, head].tolist()),
            "error": rounded([float(self.errors.error[row, head])])[0],
            "wrong": int(self.errors.mismatches[row, head]),
            "steps": found,
            "unread": self._unread(seq, row, own) if len(found) == len(own) else [],
        }

    def _unread(self, seq: int, row: int, own: Sequence[Step]) -> list[list[int]]:
        """Return the runs of context positions that a row sees and that no recorded step reads."""
        if not own or not self.run.is_complete or seq not in self.run.seqs:
            return []
        position = self.lengths.ctx_lens[seq] + self.lengths.locate(row)[1]
        seen = mask_of(self.call, seq).visible(torch.tensor([position]))[0]
        seen = torch.nonzero(seen[: self.lengths.ctx_lens[seq]]).flatten()
        size = self.call.block_size
        slots = self.call.block_table.cpu().long()[seq, seen // size] * size + seen % size
        read = torch.tensor(sorted({slot for step in own for slot in step.slots}))
        return runs_of(seen[~torch.isin(slots, read)].tolist())

    def _sequence(self, seq: int, steps: Sequence[tuple[int, Step]]) -> dict[str, Any]:
        """Return the blocks of a sequence, and further ones that are read: (block, label, positions)."""
        size, own = self.call.block_size, self.provenance.block_table[seq].tolist()
        used = -(-self.lengths.seq_lens[seq] // size)
        blocks = list(dict.fromkeys(own[:used]))
        rows = {row for row in self.rows if self.lengths.locate(row)[0] == seq}
        programs = {
            number
            for number, program in enumerate(self.run.programs)
            if any(row in rows for row, _ in program.cells)
        }
        read = {slot // size for number, step in steps if number in programs for slot in step.slots}
        more = sorted(read - set(blocks))
        most = max(1, _MOST_SLOTS // size // len(self.seqs))
        left = max(0, len(blocks) + len(more) - most)
        shown = [*blocks, *more][:most]
        return {
            **{"len": self.lengths.seq_lens[seq], "ctx": self.lengths.ctx_lens[seq]},
            "blocks": [self._block(block, seq) for block in shown],
            "left_out": left,
        }

    def _block(self, block: int, seq: int) -> list[Any]:
        owner, position = self.provenance.seq[block], self.provenance.pos[block]
        others = sorted({int(one) for one in owner if one >= 0 and one != seq})
        label = f"of sequence {', '.join(map(str, others))}" if others else ""
        held = [
            int(pos) if one == seq else -1 if one < 0 else -2
            for one, pos in zip(owner.tolist(), position.tolist(), strict=True)
        ]
        return [block, label, held]

    @cached_property
    def same_xray(self) -> XRay | None:
        """Return the X-ray if it is of calls with the lengths and blocks of the run."""
        one = self.xray
        if one is None:
            return None
        given = ((getattr(c, n) for n in ("seq_lens", "query_start_loc", "block_table"))
                 for c in (one.setup.call, self.call))  # fmt: skip
        pairs = zip(*given, strict=True)
        return one if all(torch.equal(a.cpu().long(), b.cpu().long()) for a, b in pairs) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Judge:
    """Says which steps of a row and head are wrong: by the weights of its slots, else by what is read.

    ``states``: of each slot for the sequence, flat; None if the output is right, so that nothing is.
    ``kv_head``: that of the head.
    ``weights``: measured, expected and bound by slot of the cache; None without an X-ray of the row.
    ``floor``: from which on a weight is not 0.
    """

    states: torch.Tensor | None
    kv_head: int = 0
    weights: dict[int, tuple[float, float, float]] | None = None
    floor: float = 0.0

    @classmethod
    def of(cls, document: _Document, row: int, head: int) -> "_Judge":
        seq, token = document.lengths.locate(row)
        if not document.wrong[row, head]:
            return cls(states=None)
        position = document.lengths.ctx_lens[seq] + token
        span = mask_of(document.call, seq).span(position, position)
        length = document.lengths.seq_lens[seq]
        states = slot_states(document.provenance, seq, length, span).flatten()
        only_states = cls(states=states, kv_head=head // document.group)
        one = document.same_xray
        if one is None:
            return only_states
        setup = one.setup
        at, of = (setup.rows == row).nonzero(), (setup.heads == head).nonzero()
        if not len(at) or not len(of):
            return only_states
        measured, expected = (w[int(at[0]), int(of[0])] for w in (one.weights, one.expected))
        if not bool(measured.isfinite().all()):
            return only_states
        count, row = setup.cache_slots, int(at[0])
        bound = expected * setup.relative[row] + setup.fixed[row]
        slots = torch.arange(count) if setup.kept is None else setup.kept[:count]
        columns = (w[:count].tolist() for w in (measured, expected, bound))
        by_slot = dict(zip(slots.tolist(), zip(*columns, strict=True), strict=True))
        return replace(only_states, weights=by_slot, floor=8 * float(setup.fixed[row]))

    def judge(self, steps: Sequence[Step]) -> list[tuple[str, list[float]]]:
        """Return of each step why it is wrong, or "", and the sums of its measured and expected weights.

        Keys that count but must not, or do not but must, change the weights of all others of the row. So
        other wrong weights mark a step only if there are no such keys.
        """
        if self.states is None:
            return [("", [])] * len(steps)
        if any(self.kv_head not in step.kv_heads for step in steps) or self.weights is None:
            return [(self._by_address(step), []) for step in steps]
        none = (0.0, 0.0, math.inf)
        parts = [[self.weights.get(slot, none) for slot in step.slots] for step in steps]
        counting = [self._by_counting(part) for part in parts]
        whys = counting if any(counting) else [_by_size(part) for part in parts]
        sums = [rounded([sum(m for m, *_ in part), sum(e for _, e, _ in part)]) for part in parts]
        return [*zip(whys, sums, strict=True)]

    def _by_address(self, step: Step) -> str:
        if self.kv_head not in step.kv_heads:
            read = ", ".join(map(str, step.kv_heads))
            return f"it reads KV head {read}, not {self.kv_head}"
        assert self.states is not None
        found = self.states[torch.tensor(step.slots)]
        counts = [(state, int((found == state.code).sum())) for state in _NEVER_NEEDED]
        texts = [f"{count} in state “{state}”" for state, count in counts if count]
        return (
            f"slots that it reads hold no token of the reader: {', '.join(texts)}" if texts else ""
        )

    def _by_counting(self, part: Sequence[tuple[float, float, float]]) -> str:
        extra = sum(e == 0 and abs(m) > self.floor for m, e, _ in part)
        missing = sum(e > 16 * self.floor and abs(m) <= self.floor for m, e, _ in part)
        if extra:
            return f"{_keys(extra)} that must have no weight {'has' if extra == 1 else 'have'} one"
        if missing:
            return (
                f"{_keys(missing)} that must have a weight {'has' if missing == 1 else 'have'} none"
            )
        return ""


def _by_size(part: Sequence[tuple[float, float, float]]) -> str:
    off = [m / e for m, e, bound in part if e > 0 and abs(m - e) > bound]
    if not off:
        return ""
    least, most = f"{min(off):.3g}", f"{max(off):.3g}"
    times = least if least == most else f"{least} to {most}"
    return (
        f"{_keys(len(off))} of it weigh{'s' if len(off) == 1 else ''} {times} times what is right"
    )


def _keys(count: int) -> str:
    return "a key" if count == 1 else f"{count} keys"


def _step(step: Step, program: int) -> dict[str, Any]:
    return {
        "program": program,
        "lines": [f"{Path(file).name}:{line}" for file, line in step.lines],
        "slots": runs_of(step.slots),
    }


def _lines(steps: Iterable[Step]) -> dict[str, str]:
    """Return the source of each line of the steps."""
    places = {place for step in steps for place in step.lines}
    return {
        f"{Path(file).name}:{line}": linecache.getline(file, line).strip()
        for file, line in sorted(places)
    }


def _maps(xray: XRay, seqs: Sequence[int], heads: Sequence[int]) -> dict[str, Any]:
    """Return the maps of keys against rows, "sequence,head", the largest difference first, up to a limit."""
    off = (xray.weights - xray.expected).abs().nan_to_num(torch.inf).amax(-1)
    found: dict[str, Any] = {}
    pairs = {
        (int(xray.setup.seq[i]), int(xray.setup.heads[j])): float(off[i, j])
        for i, j in sorted(
            ((i, j) for i in range(off.shape[0]) for j in range(off.shape[1])),
            key=lambda at: float(off[at]),
        )
    }
    left = _MOST_WEIGHTS
    for seq, head in sorted(pairs, key=lambda pair: -pairs[pair]):
        if seq not in seqs or head not in heads:
            continue
        one = _map(key_columns(xray, seq, head))
        left -= 2 * len(one["rows"]) * one["columns"]
        if left < 0 and found:
            break
        found[f"{seq},{head}"] = one
    return found


def _map(columns: KeyColumns) -> dict[str, Any]:
    """Return a map with at most 64 rows, wrong ones first, and 256 columns around the first wrong one."""
    rows = wrong_first(columns.wrong.any(1).tolist(), _MOST_ROWS)
    wrong = columns.wrong[rows]
    total, first = columns.measured.shape[1], 0
    if total > _MOST_COLUMNS:
        at = torch.nonzero(wrong.any(0)).flatten()
        begin = int(at[0]) if len(at) else 0
        first = max(0, min(begin - columns.block_size, total - _MOST_COLUMNS))
    here = slice(first, first + _MOST_COLUMNS)
    measured, expected = (one[rows][:, here] for one in (columns.measured, columns.expected))
    return {
        "rows": columns.rows[rows].tolist(),
        **{"first": first, "columns": measured.shape[1], "of": total},
        **{"positions": columns.positions, "own": columns.own, "context": columns.context},
        **{"tiles": list(columns.tiles), "foreign": list(columns.foreign)},
        "measured": [rounded(row) for row in measured.tolist()],
        "expected": [rounded(row) for row in expected.tolist()],
        "wrong": [torch.nonzero(row).flatten().tolist() for row in wrong[:, here]],
    }


def runs_of(numbers: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as runs of neighbours: (first, count)."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    return [[run[0][1], len(run)] for run in ([*group] for _, group in groups)]


def rounded(numbers: Iterable[float]) -> list[Any]:
    """Return numbers with few digits; one that is not finite as its name, which JSON has no number for."""
    return [float(f"{n:.{_DIGITS}g}") if math.isfinite(n) else str(n) for n in numbers]


def wrong_first(is_wrong: Sequence[bool], most: int) -> list[int]:
    """Return which entries are shown, in order: wrong ones first, then the others, up to ``most``."""
    ranked = sorted(range(len(is_wrong)), key=lambda i: not is_wrong[i])
    return sorted(ranked[:most])
