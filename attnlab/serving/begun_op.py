"""OpCheck: the checks of one call of an op, before and after it runs."""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.platforms import platform_of
from attnlab.recorder.argument_names import Reading
from attnlab.recorder.reading import call_of_reading
from attnlab.recorder.recorded_op import RecordedOp
from attnlab.recorder.snapshot import copied
from attnlab.serving.arguments import (
    block_size_of,
    first_row,
    read_arguments_of,
    wrong_lengths,
    wrong_maxima,
)
from attnlab.serving.batch import Step
from attnlab.serving.followed_slots import FollowedSlots
from attnlab.serving.intent import Contradiction, Intent, contradictions, intent_of_layer
from attnlab.serving.kept_calls import KeptCalls
from attnlab.serving.layer_call import LayerCall
from attnlab.serving.observation import Observation
from attnlab.serving.state import CaptureState
from attnlab.serving.value_check import check_values
from attnlab.serving.value_observations import RowsOfOp, not_finite, wrong_values
from attnlab.tensors.call import KernelCall
from attnlab.tensors.origin import Origin

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

    @property
    def release(self) -> str | None:
        """Return vLLM's release, None if it is unknown."""
        found = getattr(sys.modules.get("vllm"), "__version__", None)
        return found if isinstance(found, str) else None

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
            names = _affected(step, one)
            shown = ", ".join(names[:_MOST_NAMES])
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            who = f" for {_requests(len(names))} {shown}{more}"
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
        state, settings = self._state, self._state.settings
        try:
            made = self._call(call, begun, step)
        except InvalidCall as error:
            self._reject(call, step, error)
            return
        found = None
        uncertain = [*begun.reading.unmodelled, *made.unknown_arguments]
        if made.output is None:
            uncertain.append("an output that was not returned")
        if begun.is_sampled and (uncertain or made.spec.writes_cache):
            what = ", ".join(uncertain)
            state.tally.unchecked[f"values of {begun.op.function} with {what}"] += 1
        elif begun.is_sampled:
            found = check_values(
                made,
                rows=settings.rows,
                heads=settings.heads,
                seed=(step.number << 20) + call.known.index,
            )
            state.tally.counts["checked"] += 1
            state.tally.counts["rows"] += found.rows
            state.tally.worst = max(state.tally.worst, found.worst)
        place = RowsOfOp(
            layer=call.known.name, step=step, rank=state.rank, first_token=begun.first_token
        )
        wrong = [] if found is None else wrong_values(place, found)
        if made.output is not None:
            wrong += not_finite(place, made, {one.request for one in wrong})
        if wrong or begun.is_requested:
            self._keep(call, made, step, "wrong" if wrong else "requested", wrong)
        state.tally.observe(wrong)

    def _call(self, call: LayerCall, begun: BegunOp, step: Step) -> KernelCall:
        """Return the call, with the tensors that the op got and not copies of them."""
        state, reading = self._state, begun.reading
        origin = Origin(
            op=begun.op.name,
            program="vllm",
            release=self.release,
            platform=platform_of(reading.fields["query"].device),
            backend=type(call.known.impl).__name__,
            layer=call.known.name,
            step=step.number,
            rank=state.rank,
        )
        return call_of_reading(reading, origin, op=begun.op.op, layout=begun.op.layout)

    def _reject(self, call: LayerCall, step: Step, error: InvalidCall) -> None:
        """Record arguments that contradict each other."""
        one = Observation(
            kind="arguments",
            text=str(error),
            layer=call.known.name,
            step=step.number,
            rank=self._state.rank,
            argument=error.field,
        )
        self._state.tally.observe([one])

    def _keep(
        self, call: LayerCall, made: KernelCall, step: Step, why: str, wrong: list[Observation]
    ) -> None:
        known = call.known
        place = known.number if known.number is not None else known.index
        name = f"step{step.number:06d}-layer{place}-rank{self._state.rank}-{call.ops}"
        file = self._kept.keep(made, why=why, name=name, layer=known.name, step=step.number)
        for one in wrong:
            one.facts["call"] = file


def _has_row_per_token(fields: Mapping[str, Any], step: Step, first: int) -> bool:
    """Answer whether an op without query_start_loc has a row of lengths for each token, as in MLA."""
    own = step.query_lens[first : first + len(fields["seq_lens"])]
    return "query_start_loc" not in fields and len(own) > 0 and int(own.max()) > 1


def _affected(step: Step, one: Contradiction) -> list[str]:
    """Return the requests whose result an argument of the whole batch changes."""
    least = 0
    if one.argument == "sliding_window":
        least = min(window for window in (one.intended, one.given) if window)
    lens = zip(step.requests, step.seq_lens.tolist(), strict=True)
    return [request.name for request, seq_len in lens if seq_len > least]


def _requests(count: int) -> str:
    return "request" if count == 1 else "requests"
