"""Result: the outcome of running a Case."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths
from attnlab.case.shown import Shown, json_value
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
from attnlab.lab.error_map import ErrorMap, Place, as_slice
from attnlab.lab.reference import stored_tokens
from attnlab.lab.rounding import Rounding
from attnlab.tensors.batch import Batch
from attnlab.tensors.cache import NOBODY, PagedCache, Provenance
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_output
from attnlab.tensors.visibility import Visibility

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

    def total(self, state: SlotState, seq: int | None = None) -> int:
        """Return how many slots of a state were read, for one sequence or for all."""
        return sum(entry.counts[state] for entry in self._of(seq))

    def slot_map(self, provenance: Provenance, seq: int | None = None) -> SlotMap:
        """Return the slots of key or value that were read, for one sequence or for all.

        A slot that several sequences read has the reader to which its state is least permissive.
        """
        states = torch.full(provenance.seq.shape, NOT_READ)
        reader_seq, reader_pos = torch.full_like(states, NOBODY), torch.full_like(states, NOBODY)
        for entry in self._of(seq):
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

    def _of(self, seq: int | None) -> Iterator[SlotsRead]:
        return (entry for entry in self.slots if seq in (None, entry.seq))


def report(findings: Findings, provenance: Provenance, seq_lens: torch.Tensor) -> MemoryReport:
    """Return what the attention kernel on the emulated device read from the caches for each sequence.

    ``seq_lens``: [num_seqs], any integer dtype.
    """
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


def to_dict(memory: MemoryReport | None) -> dict[str, Any] | None:
    """Return a report as JSON-able values."""
    if memory is None:
        return None
    return {
        "slots": [{"tensor": s.tensor, "seq": s.seq, "counts": s.counts} for s in memory.slots],
        "unwritten": [str(entry) for entry in memory.unwritten],
    }


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
    - ``rows``: the number of wrong rows.
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


_NUMBERS = (
    "mismatched",
    "total",
    "max_abs_error",
    "max_index",
    "first_index",
    "nan_elements",
    "heads_run",
    "rows_run",
    "atol",
    "atol_is_derived",
    "rtol",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Result(Shown):
    """The outcome of running a Case.

    - ``backend``: where the kernels came from, with their version.
    - ``status``: "match", "mismatch", or "rejected" if the kernel raised ``error``. A match includes what
      the op returned in addition to the output.
    - ``errors``: the ErrorMap; None if the call was rejected.
    - ``violations``: where the call violates the contracts, found without running it.
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
        """Return the call as a recording has it: with its output, what that held before, and a rejection."""
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
            "case": dataclasses.asdict(self.case),
            "kernel": self.decision.kernels[-1],
            "kernels": list(self.decision.kernels),
            "backend": self.backend,
            "reasons": self.decision.reasons,
            "status": self.status,
            "error": self.error,
            **numbers,
            "side_outputs": list(self.side_outputs),
            "side_errors": self.side_errors,
            "beyond_rounding": self.beyond_rounding,
            "places": [self._place(place) for place in places[:most_places]],
            "places_left_out": max(0, len(places) - most_places),
            "memory": to_dict(self.memory),
            "violations": [violation.to_dict() for violation in self.violations],
            "launches": list(self.launches),
            "wraps": list(self.wraps),
            "outside": list(self.outside),
            "alone": list(self.alone),
            "seconds": sum(self.seconds.values()),
            "seconds_by_step": self.seconds,
        }
        converted: dict[str, Any] = json_value(document)
        return converted

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
