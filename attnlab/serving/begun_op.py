"""OpCheck: the checks of one call of an op, before and after it runs: intent, batch, and values."""

import abc
import bisect
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.platforms import platform_of
from attnlab.diagnosis.captured import problem_of
from attnlab.recorder.arguments import Reading, RecordedOp, call_of_reading, release_of
from attnlab.recorder.snapshot import copied
from attnlab.replay.parts import whole, with_kv_heads, with_sequences
from attnlab.serving.batch import Integers, LayerCall, ReadArguments, Step
from attnlab.serving.capture_state import CaptureState, KeptCalls, Observation
from attnlab.serving.slots import FollowedSlots
from attnlab.tensors.cache import find_layout
from attnlab.tensors.call import KernelCall, Origin
from attnlab.tensors.quantised import has_scaled_output, in_numbers
from attnlab.weights.plan import numbers

_BY_ROW = ("query", "key", "value", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongRow:
    """A row of an output that is wrong.

    - ``row``: of the output. ``seq``, ``token``: the same in its sequence. ``heads``: the query heads.
    - ``error``, ``bound``: of the element whose error is the largest multiple of its bound. The error is
      NaN or infinite if the output is not finite.
    - ``finite_inputs``: whether query, keys and values of the row are finite.
    """

    row: int
    seq: int
    token: int
    heads: tuple[int, ...]
    error: float
    bound: float
    finite_inputs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """What a check found.

    ``rows``, ``heads``: how many were compared. ``worst``: the largest error as a multiple of its bound.
    """

    rows: int
    heads: int
    worst: float
    wrong: tuple[WrongRow, ...]


def sampled_rows(query_lens: list[int], count: int | None, seed: int) -> list[int]:
    """Return some rows of a batch, rising: of different sequences first, often a sequence's last row."""
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    if count is None or count >= starts[-1]:
        return list(range(starts[-1]))
    draw = random.Random(seed)
    seqs = [seq for seq, length in enumerate(query_lens) if length]
    draw.shuffle(seqs)
    chosen: set[int] = set()
    for seq in seqs[:count]:
        token = query_lens[seq] - 1 if draw.random() < 0.5 else draw.randrange(query_lens[seq])
        chosen.add(starts[seq] + token)
    left = [row for row in range(starts[-1]) if row not in chosen] if len(chosen) < count else []
    return sorted({*chosen, *draw.sample(left, count - len(chosen))})


def sampled_heads(num_heads: int, group: int, count: int | None, seed: int) -> list[int]:
    """Return some query heads, rising, of as few neighbouring KV heads as possible."""
    if count is None or count >= num_heads:
        return list(range(num_heads))
    draw = random.Random(~seed)
    kv_heads = -(-count // group)
    first = draw.randrange(num_heads // group - kv_heads + 1) * group
    return sorted(draw.sample(range(first, first + kv_heads * group), count))


def check_values(call: KernelCall, *, rows: int | None, heads: int | None, seed: int) -> ValueCheck:
    """Compare some rows and heads of a call's output with the reference.

    Only these rows' sequences and KV heads are copied to the CPU. Raises InvalidCall for a call that has no
    reference.
    """
    starts = call.query_start_loc.tolist()
    chosen = sampled_rows(call.query_lens.tolist(), rows, seed)
    if not chosen:
        return ValueCheck(rows=0, heads=0, worst=0.0, wrong=())
    group = call.num_queries_per_kv
    some = sampled_heads(call.query.shape[1], group, heads, seed)
    seq_of = [bisect.bisect_right(starts, row) - 1 for row in chosen]
    seqs = sorted(set(seq_of))
    part = _part(call, seqs, some)
    part_starts = dict(zip(seqs, part.query_start_loc.tolist(), strict=False))
    part_rows = [part_starts[s] + row - starts[s] for row, s in zip(chosen, seq_of, strict=True)]
    part_heads = [head - some[0] // group * group for head in some]
    found = _compare(part, torch.tensor(part_rows), torch.tensor(part_heads))
    wrong = tuple(
        _wrong_row(found, i, row, seq_of[i], row - starts[seq_of[i]], some)
        for i, row in enumerate(chosen)
        if found.is_wrong[i].any()
    )
    ratio = found.ratio[~found.ratio.isnan()]
    worst = float(ratio.max()) if ratio.numel() else 0.0
    return ValueCheck(rows=len(chosen), heads=len(some), worst=worst, wrong=wrong)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Compared:
    """Errors of some rows and heads, [rows, heads, head_size]; ``finite``: [rows]."""

    error: torch.Tensor
    bound: torch.Tensor
    ratio: torch.Tensor
    is_wrong: torch.Tensor
    finite: torch.Tensor


def _wrong_row(
    found: _Compared, i: int, row: int, seq: int, token: int, heads: list[int]
) -> WrongRow:
    """Return what is wrong in row ``i`` of a comparison, with its worst element."""
    at = int(found.ratio[i].nan_to_num(torch.inf, torch.inf).argmax())
    bad = torch.nonzero(found.is_wrong[i].any(1)).flatten().tolist()
    return WrongRow(
        row=row,
        seq=seq,
        token=token,
        heads=tuple(heads[head] for head in bad),
        error=float(found.error[i].flatten()[at]),
        bound=float(found.bound[i].flatten()[at]),
        finite_inputs=bool(found.finite[i]),
    )


def _compare(part: KernelCall, rows: torch.Tensor, heads: torch.Tensor) -> _Compared:
    problem = problem_of(part)
    right = problem.correct_rows(rows, heads)
    output = problem.call.buffer[rows][:, heads].double()
    finite = right.output.isfinite().flatten(1).all(1)
    finite &= problem.call.query[rows].double().isfinite().flatten(1).all(1)
    error = (output - right.output).abs()
    # Where the inputs are not finite, neither need the output be; clamping makes NaN any number.
    excused = ~right.output.isfinite() & (~output.isfinite() | has_scaled_output(part))
    error = error.masked_fill(excused, 0.0)
    ratio = error / right.bound.clamp(min=torch.finfo(torch.float64).tiny)
    ratio = ratio.masked_fill(error == 0, 0.0)
    is_wrong = ~(error <= right.bound) & ~excused
    return _Compared(error=error, bound=right.bound, ratio=ratio, is_wrong=is_wrong, finite=finite)


def _part(call: KernelCall, seqs: list[int], heads: list[int]) -> KernelCall:
    """Return the call of some sequences and the KV heads of some query heads, on the CPU."""
    group, large = call.num_queries_per_kv, (*_BY_ROW, "key_cache", "value_cache")
    changes: dict[str, Any] = {
        name: one.cpu() for name, one in call.tensors().items() if name not in large
    }
    here = dataclasses.replace(
        call, **{**changes, "before": None, "lse": None, "slot_mapping": None}
    )
    part = with_sequences(here, [one for one in whole(here) if one.seq in seqs])
    own = range(heads[0] // group, heads[-1] // group + 1)
    return with_kv_heads(part, own, views=True).with_named_blocks().cpu()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows(abc.ABC):
    """The rows of an op's output.

    ``layer``: that made them, or the op without layers; ``step_number``: of the step, or of the call.
    """

    layer: str
    rank: int
    step_number: int

    @abc.abstractmethod
    def place_of(self, row: int) -> tuple[int, str | None, int]:
        """Return the sequence, the request if it is known, and the position of an output row."""

    def observe(self, kind: str, row: int, text: str, facts: dict[str, Any]) -> Observation:
        """Return an observation of a row; ``text`` continues "the output of request R at position P"."""
        seq, request, position = self.place_of(row)
        whose = f"sequence {seq}" if request is None else f"request {request}"
        return Observation(
            kind=kind,
            text=f"the output of {whose} at position {position}{text}",
            layer=self.layer,
            step=self.step_number,
            rank=self.rank,
            request=request,
            seq=seq,
            position=position,
            facts=facts,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowsOfOp(Rows):
    """The rows of an op's output in a step. A sequence is a row in the batch.

    ``first_token``: the row of the step's new tokens that is row 0 of the op.
    """

    step: Step
    first_token: int = 0

    def place_of(self, row: int) -> tuple[int, str | None, int]:
        token = row + self.first_token
        seq, request = self.step.request_of_row(token)
        position = int(self.step.seq_lens[seq]) - int(self.step.starts[seq + 1]) + token
        return seq, request.name, position


def wrong_values(place: Rows, found: ValueCheck) -> list[Observation]:
    """Return an observation for the worst wrong row of each sequence."""
    worst: dict[int, WrongRow] = {}
    for row in found.wrong:
        seq = place.place_of(row.row)[0]
        worst[seq] = max(worst.get(seq, row), row, key=_ratio)
    return [_wrong_value(place, row) for row in worst.values()]


def _ratio(row: WrongRow) -> float:
    """Return the error as a multiple of its bound; infinite if the output is not finite."""
    return row.error / max(row.bound, 1e-300) if _is_number(row) else torch.inf


def _is_number(row: WrongRow) -> bool:
    return abs(row.error) < torch.inf


def _wrong_value(place: Rows, row: WrongRow) -> Observation:
    word = "head" if len(row.heads) == 1 else "heads"
    heads = f", {word} {numbers(row.heads, len(row.heads))},"
    if _is_number(row):
        text = f"{heads} is off by {row.error:.3g}; rounding explains {row.bound:.3g}"
        return place.observe("value", row.row, text, asdict(row))
    inputs = "finite" if row.finite_inputs else "not finite"
    text = f"{heads} is not finite; its inputs are {inputs}"
    return place.observe("not_finite", row.row, text, asdict(row))


def not_finite(place: Rows, call: KernelCall, known: AbstractSet[int | None]) -> list[Observation]:
    """Return an observation for the first row with NaN or Inf of each sequence that is not in ``known``."""
    call = in_numbers(call)
    bad = ~call.buffer[: int(call.query_start_loc[-1])].isfinite().flatten(1).all(1)
    if not bool(bad.any()):
        return []
    rows: dict[int, int] = {}
    for row in torch.nonzero(bad).flatten().tolist():
        rows.setdefault(place.place_of(row)[0], row)
    found = []
    for seq, row in rows.items():
        if seq not in known:
            is_finite = bool(call.query[row].isfinite().all())
            of_query = "finite" if is_finite else "not finite either"
            text = f" is not finite; its query is {of_query}"
            found.append(
                place.observe("not_finite", row, text, {"row": row, "finite_query": is_finite})
            )
    return found


def check_output(
    state: CaptureState, place: Rows, call: KernelCall, *, is_sampled: bool, seed: int
) -> list[Observation]:
    """Return what is wrong with a call's output: NaN and Inf, and if ``is_sampled`` some rows' values."""
    wrong: list[Observation] = []
    if is_sampled:
        tally, settings = state.tally, state.settings
        found = check_values(call, rows=settings.rows, heads=settings.heads, seed=seed)
        tally.counts["checked"] += 1
        tally.counts["rows"] += found.rows
        tally.worst = max(tally.worst, found.worst)
        wrong = wrong_values(place, found)
    return wrong + not_finite(place, call, {one.seq for one in wrong})


_EQUAL = 1e-5  # relative; the numbers are stored in float32 on the way


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a layer's attention is meant to be. Each field may be None: unknown.

    - ``sm_scale``, ``softcap`` (0 for none), ``sliding_window`` (keys that a row sees, 0 for all).
    - ``causal``; ``sinks``, ``alibi_slopes``: a list of numbers, empty for none.
    - ``kv_cache_dtype``: vLLM's name. ``element_bytes``: of the cache. ``k_scale``, ``v_scale``.
    - ``block_size``: tokens per block, as the metadata counts.
    """

    sm_scale: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    causal: bool | None = None
    sinks: Sequence[float] | None = None
    alibi_slopes: Sequence[float] | None = None
    kv_cache_dtype: str | None = None
    element_bytes: int | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """An argument that is not what the layer asked for."""

    argument: str
    intended: Any
    given: Any


def contradictions(
    intent: Intent,
    arguments: Mapping[str, Any],
    fields: Mapping[str, Any],
    *,
    block_size: int,
    reads_tensors: bool = True,
) -> list[Contradiction]:
    """Compare a layer's intent with the arguments of its op.

    - ``arguments``: as the op got them, by its parameters' names. ``fields``: the same by the names of
      KernelCall (:class:`attnlab.recorder.arguments.Reading`).
    - ``block_size``: of the cache that the op got.
    - ``reads_tensors``: compare tensors, too, which waits for a GPU.

    What either side does not state is not compared.
    """
    found = [
        *_numbers(intent, fields, reads_tensors),
        *_window(intent, arguments, fields),
        *(_vectors(intent, arguments, fields) if reads_tensors else ()),
        *_cache(intent, arguments, fields, block_size),
    ]
    causal = fields.get("causal")
    return found + _differ("causal", intent.causal, causal if isinstance(causal, bool) else None)


def _differ(argument: str, intended: Any, given: Any, same: bool = False) -> list[Contradiction]:
    """Return a contradiction unless one side is unknown (None) or both are the same, but for rounding."""
    if intended is None or given is None or same or intended == given:
        return []
    if isinstance(given, float) and _is_close(intended, given):
        return []
    return [Contradiction(argument=argument, intended=intended, given=given)]


def _numbers(
    intent: Intent, fields: Mapping[str, Any], reads_tensors: bool
) -> Iterator[Contradiction]:
    for name in ("sm_scale", "k_scale", "v_scale"):
        if isinstance(fields.get(name), torch.Tensor) and not reads_tensors:
            continue
        yield from _differ(name, getattr(intent, name), _number(fields.get(name)))
    if "softcap" in fields:
        yield from _differ("softcap", intent.softcap, _number(fields["softcap"]) or 0.0)


_WINDOWS = ("sliding_window", "window_size", "window_left")


def _window(
    intent: Intent, arguments: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[Contradiction]:
    """Compare the windows; a window that is as long as the longest sequence is none."""
    if intent.sliding_window is None or not any(name in arguments for name in _WINDOWS):
        return
    given = int(fields.get("sliding_window") or 0)
    lens = fields.get("seq_lens")
    longest = int(lens.max()) if isinstance(lens, torch.Tensor) and lens.numel() else 0
    effects = {
        0 if w == 0 or (longest and w >= longest) else w for w in (given, intent.sliding_window)
    }
    yield from _differ("sliding_window", intent.sliding_window, given, len(effects) == 1)


def _vectors(
    intent: Intent, arguments: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[Contradiction]:
    """Compare sinks and ALiBi slopes, where the op has a parameter for them."""
    for name, parameters in (("sinks", ("sinks", "s_aux")), ("alibi_slopes", ("alibi_slopes",))):
        intended: Sequence[float] | None = getattr(intent, name)
        if intended is None or not any(one in arguments for one in parameters):
            continue
        tensor = fields.get(name)
        given = tensor.detach().float().cpu().tolist() if isinstance(tensor, torch.Tensor) else []
        same = len(given) == len(intended) and all(map(_is_close, intended, given))
        yield from _differ(name, list(intended), given, same)


def _cache(
    intent: Intent, arguments: Mapping[str, Any], fields: Mapping[str, Any], block_size: int
) -> Iterator[Contradiction]:
    given, wanted = arguments.get("kv_cache_dtype"), intent.kv_cache_dtype
    if isinstance(given, str) and wanted is not None:
        yield from _differ("kv_cache_dtype", wanted, given, _format(given) == _format(wanted))
    if intent.element_bytes is not None:
        wanted, given = (
            f"{size} bytes per element"
            for size in (intent.element_bytes, fields["key_cache"].element_size())
        )
        yield from _differ("key_cache", wanted, given)
    yield from _differ("block_size", intent.block_size, block_size)


def _format(kv_cache_dtype: str) -> str:
    """Return one name for each format of the cache."""
    names = {"fp8": "fp8_e4m3", **dict.fromkeys(("float16", "bfloat16", "float32", "half"), "auto")}
    return names.get(kv_cache_dtype, kv_cache_dtype)


def _number(value: Any) -> float | None:
    """Return a number, also of a tensor with one element, or whose elements are all equal."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel():
        first = float(value.flatten()[0])
        return first if bool((value == first).all()) else None
    return None


def _is_close(intended: float, given: float) -> bool:
    return abs(intended - given) <= _EQUAL * max(abs(intended), abs(given))


def intent_of_layer(
    layer: Any, asked: Mapping[str, Any] | None, *, causal: bool | None, block_size: int | None
) -> Intent:
    """Return the intent of a vLLM ``Attention`` or ``MLAAttention`` layer.

    ``asked``: the arguments of its constructor, None if unknown. ``causal``: as the batch's metadata says.
    ``block_size``: of the layer's KV-cache group.
    """
    asked = asked or {}
    window = getattr(layer, "sliding_window", None)
    dtype = getattr(layer, "kv_cache_torch_dtype", None)
    has_arguments = bool(asked)
    is_mla = hasattr(layer, "kv_lora_rank")  # its values are a part of its keys
    is_decoder = str(getattr(layer, "attn_type", "decoder")).endswith("decoder")
    return Intent(
        sm_scale=asked.get("scale"),
        softcap=float(asked.get("logits_soft_cap") or 0.0) if has_arguments else None,
        sliding_window=int(window or 0) if hasattr(layer, "sliding_window") else None,
        causal=causal if is_decoder else None,
        sinks=_list(asked.get("sinks")) if has_arguments else None,
        alibi_slopes=_list(asked.get("alibi_slopes")) if has_arguments else None,
        kv_cache_dtype=getattr(layer, "kv_cache_dtype", None),
        element_bytes=dtype.itemsize if isinstance(dtype, torch.dtype) else None,
        k_scale=_number(getattr(layer, "_k_scale_float", None)),
        v_scale=None if is_mla else _number(getattr(layer, "_v_scale_float", None)),
        block_size=block_size,
    )


def _list(values: Any) -> list[float]:
    """Return numbers as a list; none for None."""
    if values is None:
        return []
    if isinstance(values, torch.Tensor):
        return [float(one) for one in values.detach().float().cpu().flatten()]
    return [float(one) for one in values]


Host = Callable[[torch.Tensor], Integers]


def block_size_of(fields: Mapping[str, Any], layout: str | None) -> int:
    """Return the tokens per block of the cache that an op got. Raises InvalidCall if it is not clear."""
    cache = fields["key_cache"]
    layout = fields.get("layout") or layout or find_layout(fields["query"], cache)
    axis = {"x-split": 3, "flash": 1, "HND": 2}[layout]
    if cache.dim() <= axis:
        raise InvalidCall(f"key_cache must have more than {axis} dimensions, got {cache.dim()}")
    return int(cache.shape[axis])


def read_arguments_of(
    fields: Mapping[str, Any], layout: str | None, host: Host, first: int
) -> ReadArguments:
    """Return what an op reads from the cache. ``first``: the row of the batch that is its row 0."""
    starts = fields.get("query_start_loc")
    seq_lens = host(fields["seq_lens"])
    return ReadArguments(
        block_table=host(fields["block_table"]),
        seq_lens=seq_lens,
        query_lens=np.diff(host(starts)) if isinstance(starts, torch.Tensor) else None,
        block_size=block_size_of(fields, layout),
        sliding_window=int(fields.get("sliding_window") or 0),
        first=first,
    )


def first_row(seq_lens: torch.Tensor, of_batch: torch.Tensor | None, num_reqs: int) -> int | None:
    """Return the row of the batch that is row 0 of an op's ``seq_lens``; None if unknown.

    ``of_batch``: those of the batch's metadata. A backend that splits its batch passes a slice of them.
    """
    if of_batch is not None and seq_lens.dtype == of_batch.dtype:
        distance = seq_lens.data_ptr() - of_batch.data_ptr()
        if 0 <= distance < of_batch.numel() * of_batch.element_size():
            return distance // of_batch.element_size()
    return 0 if len(seq_lens) >= num_reqs else None


def wrong_lengths(step: Step, reads: ReadArguments) -> Iterator[tuple[int, Contradiction]]:
    """Yield, for each row, the lengths that differ from those of the scheduler's batch."""
    rows = min(len(reads.seq_lens), len(step.requests) - reads.first)
    for row in range(rows):
        seq = reads.first + row
        pairs = [("seq_lens", int(step.seq_lens[seq]), int(reads.seq_lens[row]))]
        if reads.query_lens is not None:
            query_len = int(reads.query_lens[row])
            pairs.append(("query_start_loc", int(step.query_lens[seq]), query_len))
        yield from ((seq, one) for pair in pairs for one in _differ(*pair))


def wrong_maxima(fields: Mapping[str, Any], reads: ReadArguments) -> Iterator[Contradiction]:
    """Yield max_query_len and max_seq_len if a sequence is longer."""
    lens = {"max_seq_len": reads.seq_lens, "max_query_len": reads.query_lens}
    for argument, values in lens.items():
        given = fields.get(argument)
        if type(given) is int and values is not None and len(values) and given < int(values.max()):
            yield Contradiction(argument=argument, intended=int(values.max()), given=given)


_MOST_NAMES = 4  # requests in a text


@dataclass(slots=True, kw_only=True, eq=False)
class BegunOp:
    """A call of an op that runs: what was read from its arguments, and whether its values are checked.

    ``first_token``: the row of the batch's new tokens that is row 0 of the op's query.
    """

    op: RecordedOp
    arguments: Mapping[str, Any]
    reading: Reading
    is_sampled: bool
    is_requested: bool
    first_token: int = 0


class OpCheck:
    """Checks calls of ops."""

    def __init__(self, state: CaptureState, slots: FollowedSlots, kept: KeptCalls) -> None:
        self._state, self._slots, self._kept = state, slots, kept
        self._intents: dict[tuple[str, bool | None, int | None], Intent] = {}

    def begin(
        self, call: LayerCall, op: RecordedOp, arguments: Mapping[str, Any]
    ) -> BegunOp | None:
        """Read the arguments of an op before it runs; None for a call that is no paged attention."""
        reading = op.read(arguments if isinstance(arguments, dict) else dict(arguments))
        step = self._state.step
        if reading is None or step is None:
            return None
        settings, known = self._state.settings, call.known
        draw = random.Random((step.number << 20) + known.index)
        begun = BegunOp(
            op=op,
            arguments=arguments,
            reading=reading,
            is_sampled=draw.random() < settings.sample,
            is_requested=settings.is_requested(known.number, step.number),
        )
        output = reading.fields.get("output")
        if isinstance(output, torch.Tensor) and (begun.is_sampled or begun.is_requested):
            reading.fields["before"] = copied(output)
        return begun

    def end(self, call: LayerCall, begun: BegunOp, result: Any, step: Step) -> None:
        """Check a call after it ran: lengths, slots, the layer's intent, and values if it is sampled."""
        state, fields = self._state, begun.reading.fields
        state.tally.counts["ops"] += 1
        if call.known.is_decoder:
            self._check_batch(call, begun, step)
        self._check_intent(call, begun, step)
        if not (begun.is_sampled or begun.is_requested):
            return
        if begun.reading.result is not None:
            both = zip(("output", "lse"), begun.reading.result(result), strict=True)
            fields |= {name: tensor for name, tensor in both if tensor is not None}
        self._check_values(call, begun, step)

    def _check_batch(self, call: LayerCall, begun: BegunOp, step: Step) -> None:
        state, fields, known = self._state, begun.reading.fields, call.known
        if not self._slots.follows(known):
            return
        common = state.metadata.get(known.name)
        of_batch = None if common is None else common[0].seq_lens
        first = first_row(fields["seq_lens"], of_batch, len(step.requests))
        if first is None:
            state.tally.unchecked[f"slots and lengths of {begun.op.function}: unknown rows"] += 1
            return
        if _has_row_per_token(fields, step, first):
            what = f"lengths of {begun.op.function} with several new tokens of a request"
            state.tally.unchecked[what] += 1
            with self._slots.guarded():
                self._slots.read_by_metadata(known, step)
            return
        begun.first_token = int(step.starts[first])
        reads = read_arguments_of(fields, begun.op.layout, self._slots.host, first)
        found = [
            self._observation("arguments", call, step, one, seq=seq)
            for seq, one in wrong_lengths(step, reads)
        ]
        found += [
            self._observation("arguments", call, step, one) for one in wrong_maxima(fields, reads)
        ]
        state.tally.observe(found)
        with self._slots.guarded():
            self._slots.read(known, step, reads)

    def _check_intent(self, call: LayerCall, begun: BegunOp, step: Step) -> None:
        state, known, fields = self._state, call.known, begun.reading.fields
        common = state.metadata.get(known.name)
        causal = None if common is None else common[0].causal
        size = None if common is None else common[1]
        key = (known.name, causal if isinstance(causal, bool) else None, size)
        intent = self._intents.get(key)
        if intent is None:
            asked = state.constructed.get(known.name)
            intent = intent_of_layer(known.layer, asked, causal=key[1], block_size=size)
            self._intents[key] = intent
        found = contradictions(
            intent,
            begun.arguments,
            fields,
            block_size=block_size_of(fields, begun.op.layout),
            reads_tensors=begun.is_sampled or fields["query"].device.type == "cpu",
        )
        state.tally.observe([self._observation("intent", call, step, one) for one in found])

    def _observation(
        self, kind: str, call: LayerCall, step: Step, one: Contradiction, *, seq: int | None = None
    ) -> Observation:
        if seq is None:
            least = 0
            if one.argument == "sliding_window":
                least = min(window for window in (one.intended, one.given) if window)
            lens = zip(step.requests, step.seq_lens.tolist(), strict=True)
            names = [request.name for request, seq_len in lens if seq_len > least]
            shown = ", ".join(names[:_MOST_NAMES])
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            noun = "request" if len(names) == 1 else "requests"
            who = f" for {noun} {shown}{more}"
        else:
            names, who = [step.requests[seq].name], f" for request {step.requests[seq].name}"
        source = "layer" if kind == "intent" else "batch"
        return Observation(
            kind=kind,
            text=f"the op got {one.argument} {one.given}{who}; the {source} has {one.intended}",
            layer=call.known.name,
            step=step.number,
            rank=self._state.rank,
            request=names[0] if seq is not None or len(names) == 1 else None,
            seq=seq,
            argument=one.argument,
            facts={"intended": one.intended, "given": one.given, "requests": names},
        )

    def _check_values(self, call: LayerCall, begun: BegunOp, step: Step) -> None:
        state = self._state
        try:
            made = self._call(call, begun, step)
        except InvalidCall as error:
            contradiction = Observation(
                kind="arguments",
                text=str(error),
                layer=call.known.name,
                step=step.number,
                rank=state.rank,
                argument=error.field,
            )
            state.tally.observe([contradiction])
            return
        uncertain = [*begun.reading.unmodelled, *made.unknown_arguments]
        if made.output is None:
            uncertain.append("an output that was not returned")
        is_checked = begun.is_sampled and not (uncertain or made.spec.writes_cache)
        if begun.is_sampled and not is_checked:
            what = ", ".join(uncertain)
            state.tally.unchecked[f"values of {begun.op.function} with {what}"] += 1
        known = call.known
        place = RowsOfOp(
            layer=known.name,
            step_number=step.number,
            step=step,
            rank=state.rank,
            first_token=begun.first_token,
        )
        wrong: list[Observation] = []
        if made.output is not None:
            seed = (step.number << 20) + known.index
            wrong = check_output(state, place, made, is_sampled=is_checked, seed=seed)
        if wrong or begun.is_requested:
            number = known.number if known.number is not None else known.index
            name = f"step{step.number:06d}-layer{number}-rank{state.rank}-{call.ops}"
            self._kept.keep_checked(made, wrong, name=name, layer=known.name, step=step.number)
        state.tally.observe(wrong)

    def _call(self, call: LayerCall, begun: BegunOp, step: Step) -> KernelCall:
        """Return the call, with the tensors that the op got and not copies of them."""
        state, reading = self._state, begun.reading
        origin = Origin(
            op=begun.op.name,
            program="vllm",
            release=release_of("vllm"),
            platform=platform_of(reading.fields["query"].device),
            backend=type(call.known.impl).__name__,
            layer=call.known.name,
            step=step.number,
            rank=state.rank,
        )
        return call_of_reading(reading, origin, op=begun.op.op, layout=begun.op.layout)


def _has_row_per_token(fields: Mapping[str, Any], step: Step, first: int) -> bool:
    """Answer whether an op without query_start_loc has a row of lengths for each token, as in MLA."""
    own = step.query_lens[first : first + len(fields["seq_lens"])]
    return "query_start_loc" not in fields and len(own) > 0 and int(own.max()) > 1
