"""Result: the outcome of running a Case."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from attnlab.case.case import Case, Lengths
from attnlab.case.errors import Unsupported
from attnlab.case.op_arguments import NONE
from attnlab.case.shown import Shown, json_fields, json_value
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import Decision, decide
from attnlab.contracts.slot_states import (
    NOT_READ,
    STATES,
    SlotMap,
    SlotState,
    positions_of,
    slot_map,
    slot_states,
    unwritten_rows,
)
from attnlab.contracts.violations import Violations
from attnlab.kernels.rocm.findings import Findings, Unwritten
from attnlab.lab.reference import Rounding, stored_tokens
from attnlab.tensors.cache import NOBODY, Batch, PagedCache, Provenance
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_output
from attnlab.tensors.visibility import Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class Greatest:
    """A largest value and the first index (row, head, element) that has it."""

    value: float
    index: tuple[int, int, int]


_NO_ERROR = Greatest(value=-1.0, index=(0, 0, 0))


def greater(
    best: list[Greatest],
    wrong: torch.Tensor,
    right: torch.Tensor,
    row: int,
    largest: torch.Tensor | None = None,
) -> list[Greatest]:
    """Return the greater of ``best`` and of ``wrong``, absolute and relative to ``right``.

    ``wrong``, ``right``: [rows, heads, head_size]. The greatest of each head is found first: a search of
    all elements at once is slow on a GPU. On a CPU ``vector_norm`` takes 20 times as long as ``amax`` and
    ``amin``. ``largest``: that of ``wrong``, [rows, heads], if it is known.
    """
    relative = wrong / right
    found = []
    for values, known in ((wrong, largest), (relative, None)):
        per_head = _largest(values) if known is None else known
        head = per_head.flatten().argmax()
        elements = values.flatten(0, 1)[head].abs()
        found += [head, elements.argmax(), elements.max()]
    numbers = torch.stack([number.double() for number in found]).tolist()  # one copy from the GPU
    kept = []
    for before, (head, element, value) in zip(best, (numbers[:3], numbers[3:]), strict=True):
        is_greater = value > before.value or (value != value and before.value == before.value)
        index = index_of(int(head) * wrong.shape[2] + int(element), wrong.shape, row)
        kept.append(Greatest(value=value, index=index) if is_greater else before)
    return kept


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each head; NaN if one is NaN. ``aminmax`` is slow on a CPU."""
    if values.device.type == "cpu":
        return torch.maximum(values.amax(2), -values.amin(2))
    low, high = values.aminmax(dim=2)
    return torch.maximum(high, -low)


def index_of(flat: int, shape: torch.Size, row: int) -> tuple[int, int, int]:
    """Return (row, head, element) of a flat index into rows that begin at ``row``."""
    _, heads, head_size = shape
    return row + flat // (heads * head_size), flat // head_size % heads, flat % head_size


# On a CPU few enough rows that no full-size copy is made; on a GPU there is room for one.
_ROWS_AT_A_TIME = {"cpu": 128, "cuda": 1 << 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One output row with mismatches.

    - ``row``: the row of the output; ``token``: the same row, counted from its sequence's first new token.
    """

    seq: int
    token: int
    row: int
    query_len: int
    heads: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ErrorMap(Shown):
    """Token × head error of an output, in the terms of ``torch.testing.assert_close``.

    - ``heads``, ``rows``: the query heads and the rows that ran, None if all did. The others are not
      compared.
    - ``error``: [num_tokens, num_heads] float32, the largest absolute difference over the head's
      elements; NaN if one is NaN, -inf if the row or head did not run.
    - ``mismatches``: [num_tokens, num_heads] int32, elements outside atol + rtol × |expected|; NaN is
      outside.
    - ``is_derived``: each element had its own atol, its rounding bound; ``atol`` is then the largest.
    - ``greatest_abs``, ``greatest_rel``: over the elements that mismatch, or over all if none does; NaN is
      greater than any number.
    - ``first_index``: (row, head, element) of the first mismatch, or None.
    """

    lengths: Lengths
    head_size: int
    atol: float
    rtol: float
    heads: range | None = None
    rows: range | None = None
    error: torch.Tensor
    mismatches: torch.Tensor
    greatest_abs: Greatest
    greatest_rel: Greatest
    first_index: tuple[int, int, int] | None
    nan_elements: int
    is_derived: bool = False

    @property
    def mismatched(self) -> int:
        """Return the number of elements outside the tolerance."""
        return 0 if self.first_index is None else int(self.mismatches.sum())

    @property
    def total(self) -> int:
        """Return the number of elements that were compared."""
        num_tokens, num_heads = self.mismatches.shape
        rows = len(self.rows if self.rows is not None else range(num_tokens))
        heads = len(self.heads if self.heads is not None else range(num_heads))
        return rows * heads * self.head_size

    @property
    def token_error(self) -> torch.Tensor:
        """Return the largest error of each row, [num_tokens] float32; NaN if one is NaN."""
        return self.error.amax(1)

    def seq_error(self) -> list[float]:
        """Return the largest error of each sequence; NaN if one is NaN."""
        return [float(rows.max()) for rows in self.token_error.split(list(self.lengths.query_lens))]

    def bands(self, per_row: torch.Tensor, height: int = 16) -> torch.Tensor:
        """Return ``per_row`` [num_tokens, …] with ``height`` rows per sequence, whatever its length.

        Each row of the result is the maximum over its part of the sequence's tokens; NaN if one is NaN. So
        a sequence of one token is as tall in a picture as one of a thousand.
        """
        bands = range(height * len(self.lengths.query_lens))
        rows = (self.band_rows(band, height) for band in bands)
        return torch.stack([per_row[part.start : part.stop].amax(0) for part in rows])

    def band_rows(self, band: int, height: int = 16) -> range:
        """Return the output rows of row ``band`` of :meth:`bands`."""
        seq, i = divmod(band, height)
        start, length = sum(self.lengths.query_lens[:seq]), self.lengths.query_lens[seq]
        first, last = length * i // height, length * (i + 1) // height
        return range(start + first, start + max(last, first + 1))

    def places(self) -> list[Place]:
        """Return every row with a mismatch, in order."""
        found = []
        for row in torch.nonzero(self.mismatches.sum(1)).flatten().tolist():
            seq, token = self.lengths.locate(row)
            heads = torch.nonzero(self.mismatches[row]).flatten().tolist()
            found.append(
                Place(
                    seq=seq,
                    token=token,
                    row=row,
                    query_len=self.lengths.query_lens[seq],
                    heads=tuple(heads),
                    elements=int(self.mismatches[row].sum()),
                )
            )
        return found

    def message(self) -> str:
        """Return the message of ``torch.testing.assert_close`` for these tensors; "" if they match.

        Rounding bounds take the place of one allowed difference.
        """
        if not self.mismatched:
            return ""
        exact = self.atol == self.rtol == 0
        share = self.mismatched / self.total
        lines = [
            f"Tensor-likes are not {'equal' if exact else 'close'}!",
            "",
            f"Mismatched elements: {self.mismatched} / {self.total} ({share:.1%})",
        ]
        for name, greatest, allowed in (
            ("absolute", self.greatest_abs, self.atol),
            ("relative", self.greatest_rel, self.rtol),
        ):
            line = f"Greatest {name} difference: {greatest.value} at index {greatest.index}"
            limit = "its rounding bound" if self.is_derived and name == "absolute" else allowed
            lines.append(line if exact else f"{line} (up to {limit} allowed)")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as values of strict JSON."""
        return {name: json_value(number(self)) for name, number in _NUMBERS.items()}


_NUMBERS: dict[str, Callable[[ErrorMap], Any]] = {
    "mismatched": attrgetter("mismatched"),
    "total": attrgetter("total"),
    "max_abs_error": attrgetter("greatest_abs.value"),
    "max_index": attrgetter("greatest_abs.index"),
    "first_index": attrgetter("first_index"),
    "nan_elements": attrgetter("nan_elements"),
    "heads_run": lambda errors: None if errors.heads is None else [*errors.heads],
    "rows_run": lambda errors: (
        None if errors.rows is None else [errors.rows.start, errors.rows.stop]
    ),
    "atol": attrgetter("atol"),
    "atol_is_derived": attrgetter("is_derived"),
    "rtol": attrgetter("rtol"),
}


def map_errors(
    output: torch.Tensor,
    expected: torch.Tensor,
    lengths: Lengths,
    atol: float | torch.Tensor,
    rtol: float,
    heads: range | None = None,
    rows: range | None = None,
) -> ErrorMap:
    """Return the ErrorMap of ``output`` against ``expected``, both [num_tokens, num_heads, head_size].

    The comparison uses ``expected``'s dtype and works on some rows at a time. ``atol`` is a number, or the
    rounding bound of each element in the shape of ``output``. ``heads`` and ``rows`` limit the comparison
    to these query heads and rows.
    """
    if heads is not None or rows is not None:
        part_of = (as_slice(rows), as_slice(heads))
        part_atol = atol[part_of] if isinstance(atol, torch.Tensor) else atol
        part = map_errors(output[part_of], expected[part_of], lengths, part_atol, rtol)
        return _embedded(part, heads, rows, output.shape[:2])
    tokens, num_heads, head_size = output.shape
    on_gpu = expected.device.type == "cuda"
    error = torch.empty(tokens, num_heads, pin_memory=on_gpu)
    mismatches = torch.zeros(tokens, num_heads, dtype=torch.int32, pin_memory=on_gpu)
    # Greatest absolute and relative difference, of all elements and of those that mismatch.
    overall, outside = [_NO_ERROR, _NO_ERROR], [_NO_ERROR, _NO_ERROR]
    first, nans = None, 0
    step = _ROWS_AT_A_TIME[expected.device.type]
    for row in range(0, tokens, step):
        here = slice(row, row + step)
        got, right = output[here], expected[here]
        wrong = _difference(got, right)
        allowed = atol[here] if isinstance(atol, torch.Tensor) else atol
        per_head = largest = wrong.amax(2)
        close = (
            None
            if _all_below(per_head, allowed, rtol)
            else _close(got, right, wrong, allowed, rtol)
        )
        if close is not None and not per_head.isfinite().all():
            per_head = wrong.masked_fill_(close & wrong.isnan(), 0).amax(2)
        error[here] = per_head
        overall = greater(overall, wrong, right, row, largest)
        if close is not None and not close.all():
            mismatches[here] = head_size - close.sum(2, dtype=torch.int32)
            first = first or index_of(int((~close).flatten().int().argmax()), close.shape, row)
            nans += int(got.isnan().sum())
            others = (wrong.masked_fill(close, 0), right.masked_fill(close, 1))
            outside = greater(outside, *others, row)
    greatest_abs, greatest_rel = outside if first else overall
    return ErrorMap(
        lengths=lengths,
        head_size=head_size,
        atol=float(atol.max()) if isinstance(atol, torch.Tensor) else atol,
        rtol=rtol,
        error=error,
        mismatches=mismatches,
        greatest_abs=greatest_abs,
        greatest_rel=greatest_rel,
        first_index=first,
        nan_elements=nans,
        is_derived=isinstance(atol, torch.Tensor),
    )


def _difference(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the magnitude of the difference, in ``right``'s dtype."""
    if got.dtype.itemsize > 1 and got.dtype.itemsize <= right.dtype.itemsize:
        return (got - right).abs_()  # converts as it subtracts, without a copy of ``got``
    return (got.to(right.dtype) - right).abs_()


def as_slice(span: range | None) -> slice:
    """Return the slice of a range; None is everything."""
    return slice(None) if span is None else slice(span.start, span.stop)


def _embedded(
    part: ErrorMap, heads: range | None, rows: range | None, shape: torch.Size
) -> ErrorMap:
    """Return the ErrorMap of some rows and heads as one of all; the others did not run."""
    here = (as_slice(rows), as_slice(heads))
    error = torch.full(shape, float("-inf"))
    mismatches = torch.zeros(shape, dtype=torch.int32)
    error[here], mismatches[here] = part.error, part.mismatches
    first_row, first_head = (0 if span is None else span.start for span in (rows, heads))

    def moved(index: tuple[int, int, int]) -> tuple[int, int, int]:
        return index[0] + first_row, index[1] + first_head, index[2]

    return dataclasses.replace(
        part,
        heads=heads,
        rows=rows,
        error=error,
        mismatches=mismatches,
        greatest_abs=dataclasses.replace(part.greatest_abs, index=moved(part.greatest_abs.index)),
        greatest_rel=dataclasses.replace(part.greatest_rel, index=moved(part.greatest_rel.index)),
        first_index=None if part.first_index is None else moved(part.first_index),
    )


def _all_below(per_head: torch.Tensor, allowed: float | torch.Tensor, rtol: float) -> bool:
    """Return whether one number bounds every error, which spares a comparison of the elements."""
    if isinstance(allowed, torch.Tensor) or rtol or not math.isfinite(allowed):
        return False
    return bool((per_head <= allowed).all())


def _close(
    got: torch.Tensor,
    right: torch.Tensor,
    wrong: torch.Tensor,
    allowed: float | torch.Tensor,
    rtol: float,
) -> torch.Tensor:
    """Return which elements are within the tolerance; equal infinities are, other infinities are not."""
    close = wrong <= (allowed + rtol * right.abs() if rtol else allowed)
    return (got.to(right.dtype) == right) | (wrong.isfinite() & close)


# What a kernel read from the cache, counted by the state of each slot, and reads of unwritten scratch.
#
# The reads are recorded by the emulated device (backend rocm) or by Triton's interpreter (backend vllm) if
# the Case sets ``trace_reads``. Runs on a GPU record nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRead:
    """The slots of a cache tensor that were read for one sequence.

    - ``seq``: the sequence, or NOBODY for programs that access no row of a query or an output.
    - ``counts``: how many slots of each state were read. Of the emulated device, OWN_FUTURE is a token at
      or after seq_len; of a traced launch, one that no row of the program sees.
    - ``slots``: these slots, each (block, slot), in order.
    """

    tensor: str
    seq: int
    counts: dict[SlotState, int]
    slots: dict[SlotState, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line with the states that occur."""
        parts = [f"{count} {state}" for state, count in self.counts.items() if count]
        reader = "a program without rows" if self.seq == NOBODY else f"sequence {self.seq}"
        return f"{reader} reads {self.tensor}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a run with ``trace_reads`` read.

    ``unwritten``: reads of scratch or shared memory that nothing wrote during the call.
    """

    slots: tuple[SlotsRead, ...]
    unwritten: tuple[Unwritten, ...]

    def lines(self) -> list[str]:
        """Return the report as sentences."""
        return [str(entry) for entry in (*self.slots, *self.unwritten)]

    def total(self, state: SlotState) -> int:
        """Return how many slots of a state were read."""
        return sum(entry.counts[state] for entry in self.slots)

    def slot_map(self, provenance: Provenance, seq: int | None = None) -> SlotMap:
        """Return the slots of key or value that were read, for one sequence or for all."""
        states = torch.full(provenance.seq.shape, NOT_READ)
        reader_seq, reader_pos = torch.full_like(states, NOBODY), torch.full_like(states, NOBODY)
        for entry in (one for one in self.slots if seq in (None, one.seq)):
            positions = torch.full_like(states, NOBODY)
            if entry.seq != NOBODY:
                positions = positions_of(provenance, entry.seq)
            for state, places in entry.slots.items():
                for place in places:
                    if state.code > states[place]:
                        states[place] = state.code
                        reader_seq[place], reader_pos[place] = entry.seq, positions[place]
        return SlotMap(
            provenance=provenance, states=states, reader_seq=reader_seq, reader_pos=reader_pos
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of strict JSON."""
        return {
            "slots": [json_fields(entry, without=("slots",)) for entry in self.slots],
            "unwritten": [str(entry) for entry in self.unwritten],
        }


def report(findings: Findings, provenance: Provenance, seq_lens: torch.Tensor) -> MemoryReport:
    """Return what the attention kernel on the emulated device read from the caches for each sequence."""
    entries = []
    for (kernel, tensor), by_seq in sorted(findings.reads.items()):
        if tensor not in ("key_cache", "value_cache") or "reduce" in kernel:
            continue
        for seq, elements in sorted(by_seq.items()):
            states = slot_states(provenance, seq, int(seq_lens[seq]))
            entries.append(_slots_read(tensor, seq, [(slots_of(elements), states)]))
    return MemoryReport(slots=tuple(entries), unwritten=findings.unwritten)


def traced(
    reads: Mapping[tuple[str, tuple[int, ...]], set[int]],
    provenance: Provenance,
    lengths: Lengths,
    visibility: Visibility,
) -> MemoryReport:
    """Return what the programs of a traced launch read (:mod:`attnlab.kernels.triton.run_log`).

    ``reads``: slots, each block × block_size + slot, by tensor and by the rows that a program accesses. A
    program reads for the sequences of these rows. If they belong to several sequences, each slot counts
    for the sequence to which its state is most permissive, by the order of SlotState.
    """
    found: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (tensor, rows), slots in reads.items():
        read = torch.zeros(provenance.seq.shape, dtype=torch.bool)
        read.view(-1)[torch.tensor(sorted(slots))] = True
        visible = _visible(rows, lengths, visibility)
        states = {
            seq: slot_states(provenance, seq, lengths.seq_lens[seq], positions)
            for seq, positions in visible.items()
        }
        if not states:
            unknown = slot_states(provenance, NOBODY, 0)
            found.setdefault((tensor, NOBODY), []).append((read, unknown))
            continue
        best = torch.stack(list(states.values())).amin(0)
        for seq, of_seq in states.items():
            found.setdefault((tensor, seq), []).append((read & (of_seq == best), of_seq))
            read = read & (of_seq != best)
    entries = [_slots_read(tensor, seq, parts) for (tensor, seq), parts in sorted(found.items())]
    return MemoryReport(slots=tuple(entries), unwritten=())


def _visible(rows: tuple[int, ...], lengths: Lengths, visibility: Visibility) -> dict[int, range]:
    """Return the sequences of some rows and, for each, the range of positions that its rows may see."""
    visible: dict[int, range] = {}
    for row in rows:
        seq, token = lengths.locate(row)
        if row >= lengths.num_tokens:
            continue  # a row of padding belongs to no sequence
        position = lengths.ctx_lens[seq] + token
        mask = visibility.of_seq(seq, lengths.ctx_lens[seq], lengths.seq_lens[seq])
        span = mask.span(position, position)
        before = visible.get(seq, span)
        visible[seq] = range(min(span.start, before.start), max(span.stop, before.stop))
    return visible


def _slots_read(tensor: str, seq: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> SlotsRead:
    """Return the slots of each state that any part reads.

    ``parts``: pairs of [num_blocks, block_size] tensors: which slots were read, and their states.
    """
    slots = {}
    for state in STATES:
        read = torch.stack([read & (states == state.code) for read, states in parts]).any(0)
        slots[state] = tuple((int(block), int(slot)) for block, slot in torch.nonzero(read))
    counts = {state: len(places) for state, places in slots.items()}
    return SlotsRead(tensor=tensor, seq=seq, counts=counts, slots=slots)


def slots_of(elements: torch.Tensor) -> torch.Tensor:
    """Return in which slots any element is set, [num_blocks, block_size] bool.

    ``elements``: of the shape of the key cache, [num_blocks, num_kv_heads, head_size / x, block_size, x],
    or of the value cache, [num_blocks, num_kv_heads, head_size, block_size].
    """
    return elements.any(4).any(2).any(1) if elements.dim() == 5 else elements.any(2).any(1)


# Compare what two ops return in addition to their output: the log-sum-exp, and the rows of padding.
#
# A later merge weights an output by its LSE. A wrong LSE, or NaN in it, makes a correct output useless.

LSE, PADDING = "lse", "padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideError:
    """What is wrong with a side output, and the first place.

    - ``subject``: "lse" for the log-sum-exp of the batch's rows, "padding" for the rows of padding.
    - ``row``, ``head``: the first wrong place; a row of padding counts from the first of them.
    - ``quantity``: "lse" or "output", which one is wrong there; ``value`` is what it is, ``expected`` what
      it must be.
    """

    subject: str
    row: int
    head: int
    quantity: str
    value: float
    expected: float
    rows: int

    def short(self) -> str:
        """Return which side output is wrong, in a few words."""
        name = "padding" if self.subject == PADDING else "log-sum-exp"
        return f"{name} wrong in {self.rows} {'row' if self.rows == 1 else 'rows'}"

    def text(self) -> str:
        """Return the first error as one sentence, with the number of wrong rows."""
        names = {"lse": "the log-sum-exp", "output": "the output"}
        where = f"row {self.row}, head {self.head}"
        if self.subject == PADDING:
            where = f"padding row {self.row}, whose parts are both empty, head {self.head},"
        return (
            f"{names[self.quantity]} of {where} is {self.value:.6g}, not {self.expected:.6g} "
            f"({self.rows} wrong {'row' if self.rows == 1 else 'rows'})"
        )


def side_errors(
    case: Case,
    lse: torch.Tensor | None,
    padded: torch.Tensor | None,
    expected_lse: Callable[[Case], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[SideError, ...]:
    """Return the errors of the side outputs that an op returned; None is one that it does not return.

    ``expected_lse`` returns the right LSE of a Case and its bound, each [num_tokens, num_heads].
    """
    errors: list[SideError | None] = []
    if lse is not None:
        expected, bound = (tensor.to(lse.device) for tensor in expected_lse(case))
        errors.append(lse_error(case, lse, expected, bound))
    if padded is not None:
        errors.append(padding_error(case, padded, lse))
    return tuple(error for error in errors if error is not None)


def lse_error(
    case: Case, lse: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> SideError | None:
    """Return how an LSE [rows, num_heads] is off by more than ``bound``, or None.

    ``expected``, ``bound``: [num_tokens, num_heads]. Rows of padding, and rows and heads that the Case does
    not run, are not compared.
    """
    error = (lse[: len(expected)].double() - expected).abs().nan_to_num(torch.inf, torch.inf)
    wrong = error > bound
    ran = torch.zeros_like(wrong)
    rows, heads = case.query_rows, case.query_heads
    ran[as_slice(rows), as_slice(heads)] = True
    return _error(LSE, "lse", wrong & ran, lse, expected)


def padding_error(case: Case, padded: torch.Tensor, lse: torch.Tensor | None) -> SideError | None:
    """Return what is wrong with the rows of padding of a merge, whose parts are both empty, or None.

    ``padded``: [n, num_heads, head_size]; the last n rows of ``lse`` belong to them. Such a row must be 0
    with an LSE of -inf, so that a further merge ignores it: vLLM's CUDA kernel does so since 0.11.1
    (csrc/attention/merge_attn_states.cu), its Triton kernel since 0.27.
    """
    if not case.spec.merges:
        return None
    zeros = padded.new_zeros(padded.shape[:2])
    at = (padded != 0).int().argmax(2, keepdim=True)  # the first element that is not 0
    values = padded.gather(2, at)[..., 0]
    error = _error(PADDING, "output", (padded != 0).any(2), values, zeros)
    if error is not None or lse is None:
        return error
    logs = lse[-len(padded) :]
    return _error(PADDING, "lse", logs != -torch.inf, logs, torch.full_like(logs, -torch.inf))


def lse_bound(case: Case, batch: Batch, call: KernelCall, expected: torch.Tensor) -> torch.Tensor:
    """Return by how much a kernel's LSE may be off, [num_tokens, num_heads] in the dtype of ``expected``.

    ``expected``: the right LSE, [num_tokens, num_heads]. Scores are off by at most s, so the LSE is off by
    s; n products and sums of float32 add (n + 8)·2⁻²³; rounding the result, and its two parts in a merge,
    adds 3·2⁻²⁴ of it.
    """
    rounding = Rounding.of(call, Target.of(case), decide(case).kernels)
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    slope = 0.0 if batch.alibi_slopes is None else float(batch.alibi_slopes.max())
    added = call.visibility.largest_bias
    rows, tokens = batch.token_start_loc, batch.kv_start_loc
    bound = torch.empty_like(expected)
    for i, cached in enumerate(batch.lengths.cached_lens(case.spec.fill_read)):
        here = slice(rows[i], rows[i + 1])
        key = stored_tokens(case, batch.key[tokens[i] : tokens[i + 1]], cached, case.k_scale)
        query_norm, key_norm = (
            float(t.double().norm(dim=2).max()) for t in (batch.query[here], key)
        )
        error = rounding.score_error(
            query_norm,
            key_norm,
            case.head_size,
            scale,
            slope * len(key) + added,
            case.softcap or 0.0,
        )
        bound[here] = error + (len(key) + 8) * 2.0**-23 + 3 * 2.0**-24 * expected[here].abs()
    return bound


def _error(
    subject: str, quantity: str, wrong: torch.Tensor, values: torch.Tensor, expected: torch.Tensor
) -> SideError | None:
    """Return the error of the places ``wrong`` [rows, num_heads], or None if there are none."""
    places = torch.nonzero(wrong)
    if not len(places):
        return None
    row, head = places[0].tolist()
    return SideError(
        subject=subject,
        row=row,
        head=head,
        quantity=quantity,
        value=float(values[row, head]),
        expected=float(expected[row, head]),
        rows=int(wrong.any(1).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Result(Shown):
    """The outcome of running a Case.

    - ``backend``: where the kernels came from, with their version.
    - ``status``: "match", "mismatch", or "rejected" if the kernel raised ``error``. A match includes what
      the op returned in addition to the output.
    - ``errors``: the ErrorMap; None if the call was rejected.
    - ``seconds``: the time of each step, without the steps in ``shared``.
    - ``shared``: the steps whose products an earlier run of the same Lab had made.
    - ``output``: [num_tokens, num_heads, head_size]; see :class:`KernelCall`. ``provenance``: of the cache.
    - ``make_call``, ``make_cache``: return what was run. A Lab has it, or makes it again with the same bits:
      a cache may have gigabytes, so a Result does not hold it.
    - ``memory``: what the kernels read from the cache; None unless the Case has ``trace_reads``.
    - ``launches``: the kernels that Triton's interpreter launched, with their grids; ``wraps``: source lines
      with int32 overflow; ``outside``: source lines with out-of-bounds access. One text each.
    - ``alone``: the kernels whose programs Triton's interpreter could not run together, and why.
    - ``lse``, ``padded``: what the op returned in addition to the output, or None
      (:class:`attnlab.kernels.triton.run_log.RunLog`). ``side_errors``: what is wrong with them.
    - ``compare_with_rounding``: returns the ErrorMap with the rounding bound of each element as tolerance.
    - ``failed``: whether a rejected call broke the kernel, instead of exceeding a limit that it states.
    """

    case: Case
    decision: Decision
    backend: str
    status: str
    error: str | None
    errors: ErrorMap | None
    violations: Violations
    seconds: dict[str, float]
    shared: tuple[str, ...]
    output: torch.Tensor
    provenance: Provenance
    make_call: Callable[[], KernelCall] = field(repr=False)
    make_cache: Callable[[], PagedCache] = field(repr=False)
    memory: MemoryReport | None = None
    launches: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    lse: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    side_errors: tuple[SideError, ...] = ()
    failed: bool = False
    compare_with_rounding: Callable[[], ErrorMap] = field(repr=False)

    @property
    def call(self) -> KernelCall:
        """Return the call that was run, with its output."""
        return self.make_call()

    @property
    def cache(self) -> PagedCache:
        """Return the cache of the call."""
        return self.make_cache()

    @property
    def recorded_call(self) -> KernelCall:
        """Return the call as a recording has it: with its output, what that held before, and a rejection.

        Raises Unsupported for a Case with an op argument, which a KernelCall does not hold.
        """
        if self.case.op_argument != NONE:
            raise Unsupported(f"a recorded call has no op argument {self.case.op_argument}")
        before = make_output(self.case, self.output.device)
        return dataclasses.replace(self.call, before=before, rejection=self.error or "")

    @property
    def beyond_rounding(self) -> int | None:
        """Return how many elements are off by more than rounding; None if the call was rejected.

        It is computed on first use if the Case has its own tolerance; otherwise it is the number of
        mismatches. Rounding explains no error of a cache write.
        """
        if self.errors is None:
            return None
        if self.case.has_own_tolerance:
            return self.compare_with_rounding().mismatched
        return self.errors.mismatched

    def places(self) -> list[Place]:
        """Return the rows with mismatches; none if the call was rejected."""
        return [] if self.errors is None else self.errors.places()

    def unwritten_rows(self) -> torch.Tensor:
        """Return which output rows no kernel writes by its contract, [num_tokens] bool."""
        contracts = self.decision.contracts(Target.of(self.case), self.call.op)
        return unwritten_rows(contracts, self.call)

    def slot_map(self) -> SlotMap:
        """Return who wrote each slot of the cache, and who reads it by the kernels' contracts."""
        contracts = self.decision.contracts(Target.of(self.case), self.call.op)
        return slot_map(self.call, contracts, self.provenance)

    @property
    def side_outputs(self) -> tuple[str, ...]:
        """Return which side outputs were compared: "lse", "padding", both or none."""
        has_padding = self.padded is not None and self.case.spec.merges
        given = ((LSE, self.lse is not None), (PADDING, has_padding))
        return tuple(name for name, is_given in given if is_given)

    @property
    def verdict(self) -> str:
        """Return the outcome in one line."""
        if self.errors is None:
            return f"rejected: {self.error}"
        line = f"{self.errors.mismatched} of {self.errors.total}"
        if self.errors.heads is not None:
            heads = self.errors.heads
            line += f" (query heads {heads.start} to {heads.stop - 1} of {self.case.num_heads} run)"
        if self.case.seq_range is not None:
            line += f" (sequences {self.case.seq_range[0]} to {self.case.seq_range[1] - 1} run)"
        if self.errors.first_index is not None:
            line += f", first {self.errors.first_index}"
        return "; ".join([line, *(error.short() for error in self.side_errors)])

    def to_dict(self, most_places: int) -> dict[str, Any]:
        """Return the result as values of strict JSON, with the first ``most_places`` places."""
        places = self.places()
        numbers = self.errors.to_dict() if self.errors is not None else dict.fromkeys(_NUMBERS)
        document = {
            "case": self.case,
            "kernel": self.decision.kernels[-1],
            "kernels": self.decision.kernels,
            "backend": self.backend,
            "reasons": self.decision.reasons,
            "status": self.status,
            "error": self.error,
            **numbers,
            **self._named("side_outputs", "side_errors", "beyond_rounding"),
            "places": [self._place(place) for place in places[:most_places]],
            "places_left_out": max(0, len(places) - most_places),
            **self._named("memory", "violations", "launches", "wraps", "outside", "alone"),
            "seconds": sum(self.seconds.values()),
            "seconds_by_step": self.seconds,
        }
        converted: dict[str, Any] = json_value(document)
        return converted

    def _named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _place(self, place: Place) -> dict[str, Any]:
        """Return a place with the slot of the newest token, if the row reads it from the cache."""
        fields = dataclasses.asdict(place)
        if place.query_len == 1 and self.decision.decode is not None:
            position = self.case.lengths.seq_lens[place.seq] - 1
            block, offset = self.provenance.slot(place.seq, position)
            written = int(self.provenance.pos[block, offset]) == position
            newest = {"position": position, "block": block, "offset": offset, "written": written}
            fields["newest_slot"] = newest
        return fields
