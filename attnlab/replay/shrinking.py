"""Shrink a call: the smallest call that still fails in the same way and breaks no further contract."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCall
from attnlab.case.shown import Document, Shown
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import kernels_of
from attnlab.diagnosis.captured import check_diagnosable, violations_of_captured, where_it_ran
from attnlab.diagnosis.diagnose import diagnose_call
from attnlab.kernels.backend import Backend
from attnlab.kernels.runner import one_backend
from attnlab.replay.parts import (
    can_drop_first_rows,
    whole,
    with_fewer_blocks,
    with_head_size,
    with_kv_heads,
    with_query_head,
    with_sequences,
    without_tokens,
)
from attnlab.replay.replay_call import MISMATCH, REJECTED, TONES, UNSTABLE, Ran, expected_of, run_on
from attnlab.show.sheets.sheet import Grid, Lines, Row, Sheet
from attnlab.tensors.call import KernelCall

Step = tuple[str, KernelCall]  # what it does, in words, and its call
_SINGLE = 8  # sequences, heads or rows that are tried alone, the worst first
_PLAIN: dict[str, Any] = {
    "alibi_slopes": None,
    "sinks": None,
    "softcap": None,
    "sliding_window": 0,
    "causal": True,
    "mm_prefix_range": None,
    "rswa_prefix_lens": None,
    "chunk_lookback": -1,
    "qq_bias": None,
    "num_splits": None,
    "padding": 0,
    "strides": "contiguous",
}


def smaller_calls(call: KernelCall, ratio: torch.Tensor, *, runs: bool) -> Iterator[Step]:
    """Yield the calls that are smaller by one step.

    - ``ratio``: [num_tokens, num_heads], how wrong each row and head is; the worst are tried first.
    - ``runs``: False if the output cannot be computed again. Then only steps that leave the numbers of the
      remaining output unchanged are made.
    """
    yield from _fewer_sequences(call, ratio)
    yield from _fewer_heads(call, ratio)
    if runs or call.visibility.is_plain:  # under another mask a row may see the rows after it
        yield from _fewer_rows(call, ratio)
    if runs:
        yield from _shorter_contexts(call)
        for field, plain in _PLAIN.items():
            given = getattr(call, field)
            if given is not None and (isinstance(given, torch.Tensor) or given != plain):
                yield f"{field} {plain}", dataclasses.replace(call, **{field: plain})
        yield from _fewer_ranges(call)
        if call.sliding_window > 1:
            half = call.sliding_window // 2
            right = None if call.window_right is None else min(call.window_right, half - 1)
            smaller = dataclasses.replace(call, sliding_window=half, window_right=right)
            yield f"sliding_window {half}", smaller
        yield from _smaller_heads(call)
    fewer = with_fewer_blocks(call)
    if fewer is not None:
        yield f"{fewer.key_cache.shape[0]} blocks", fewer


def _fewer_sequences(call: KernelCall, ratio: torch.Tensor) -> Iterator[Step]:
    """Yield one sequence, half of them, or all but one."""
    every = whole(call)
    if len(every) == 1:
        return
    starts = call.query_start_loc.tolist()
    worst = [_largest(ratio[starts[one.seq] : starts[one.seq + 1]]) for one in every]
    order = sorted(every, key=lambda one: -worst[one.seq])
    for one in order[:_SINGLE]:
        if one.last:
            yield f"sequence {one.seq} alone", with_sequences(call, [one])
    half = len(every) // 2
    for part in (every[:half], every[half:]) if half > 1 else ():
        yield f"{len(part)} sequences", with_sequences(call, part)
    if len(every) > 2:
        for one in order[::-1][:_SINGLE]:
            rest = [other for other in every if other.seq != one.seq]
            yield f"without sequence {one.seq}", with_sequences(call, rest)


def _fewer_heads(call: KernelCall, ratio: torch.Tensor) -> Iterator[Step]:
    """Yield one query head, one KV head, or half of the KV heads."""
    num_heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if num_heads == 1:
        return
    worst = ratio.nan_to_num(torch.inf).amax(0)
    order = worst.argsort(descending=True, stable=True).tolist()
    for head in order[:_SINGLE]:
        yield f"head {head} alone", with_query_head(call, head)
    if kv_heads == 1:
        return
    for kv_head in dict.fromkeys(head // call.num_queries_per_kv for head in order[:_SINGLE]):
        yield f"KV head {kv_head} alone", with_kv_heads(call, range(kv_head, kv_head + 1))
    half = kv_heads // 2
    if half > 1:
        for part in (range(half), range(half, kv_heads)):
            yield f"KV heads {part.start} to {part.stop - 1}", with_kv_heads(call, part)


def _fewer_rows(call: KernelCall, ratio: torch.Tensor) -> Iterator[Step]:
    """Yield one row of each sequence, or half of the rows.

    Rows before the kept ones become context, so this needs an op that reads new tokens from the cache.
    """
    kept, starts = whole(call), call.query_start_loc.tolist()
    for number, one in enumerate(kept):
        if one.last <= 1:
            continue
        own = ratio[starts[one.seq] : starts[one.seq + 1]].nan_to_num(torch.inf).amax(1)
        worst, half = int(own.argmax()), one.last // 2
        spans = [(0, worst + 1), (0, half), (0, one.last - 1)]
        if call.spec.new_tokens_from == "cache" and can_drop_first_rows(call):
            spans = [(worst, worst + 1), (half, one.last), (0, half), (1, one.last), *spans]
        for first, last in dict.fromkeys(spans):
            if (first, last) == (0, one.last):
                continue
            part = dataclasses.replace(one, first=first, last=last)
            text = f"rows {first} to {last - 1} of sequence {one.seq}"
            yield text, with_sequences(call, [*kept[:number], part, *kept[number + 1 :]])


def _shorter_contexts(call: KernelCall) -> Iterator[Step]:
    """Yield contexts without their first blocks; of a single sequence, also without some tokens."""
    kept, size = whole(call), call.block_size
    contexts = (call.seq_lens.long() - call.query_lens).tolist()
    most = [context // size for context in contexts]
    if max(most) > 0:
        for share in (1, 2, 4):
            parts = [dataclasses.replace(one, blocks=most[one.seq] // share) for one in kept]
            if any(one.blocks for one in parts):
                yield f"contexts without 1/{share} of their blocks", with_sequences(call, parts)
        for one in kept:
            if most[one.seq]:
                parts = [dataclasses.replace(other, blocks=int(other is one)) for other in kept]
                yield f"sequence {one.seq} without its first block", with_sequences(call, parts)
    if len(kept) == 1 and contexts[0]:
        for count in dict.fromkeys((contexts[0], -(-contexts[0] // 2), 1)):
            shorter = without_tokens(call, count)
            if shorter is not None:
                yield f"context of {contexts[0] - count}", shorter


def _fewer_ranges(call: KernelCall) -> Iterator[Step]:
    """Yield calls without one of several ranges, or with the used ones only."""
    ranges = call.mm_prefix_range
    if ranges is None or ranges.shape[1] < 2:
        return
    for i in range(ranges.shape[1]):
        rest = torch.cat([ranges[:, :i], ranges[:, i + 1 :]], 1)
        yield f"without range {i}", dataclasses.replace(call, mm_prefix_range=rest)


def _smaller_heads(call: KernelCall) -> Iterator[Step]:
    """Yield heads of half the size, down to 16."""
    half = call.query.shape[2] // 2
    if half < 16:
        return
    smaller = with_head_size(call, half)
    if smaller is not None:
        yield f"head_size {half}", smaller


def _largest(ratio: torch.Tensor) -> float:
    return float(ratio.nan_to_num(torch.inf).max()) if ratio.numel() else 0.0


OnTry = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Shrunk(Document, Shown):
    """The smallest call that was found.

    - ``call``: with the output of its last run; ``before``, ``after``: the sizes of both calls, by name.
    - ``status``: "mismatch" or "rejected", "match" if the call does not fail, or "not deterministic" if equal
      runs differ: then nothing was done.
    - ``reason``: what the kernel raises, or how equal runs differ; ``largest``: the largest error in units of
      the rounding bound.
    - ``causes``: the defects that explain both calls, the most likely first.
    - ``steps``: the steps that were kept; ``tries``: how many calls were run; ``is_complete``: no further
      step keeps the fault, and the time limit was not reached.
    - ``backend``: what ran the calls, "" if only the recorded output was cut.
    """

    _without = ("call",)

    call: KernelCall
    before: dict[str, int]
    after: dict[str, int]
    status: str
    reason: str = ""
    largest: float = 0.0
    causes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    tries: int = 0
    seconds: float = 0.0
    is_complete: bool = True
    backend: str = ""

    @property
    def is_failing(self) -> bool:
        """Answer whether the call fails."""
        return self.status in (MISMATCH, REJECTED)

    def sentences(self) -> list[str]:
        """Return the result in words, the fault first."""
        if self.status == UNSTABLE:
            return [self.reason, "no call was cut: a smaller one may fail or not by chance"]
        if not self.is_failing:
            return [
                "the call does not fail: rounding explains every difference from the correct output"
            ]
        fault = (
            f"the kernel rejects the call: {self.reason}"
            if self.status == REJECTED
            else f"the output is off by up to {self.largest:.3g} rounding bounds"
        )
        explain = "explains it" if len(self.causes) == 1 else "each explain it"
        cause = f"; {', '.join(self.causes)} {explain}" if self.causes else ""
        how = f"{len(self.steps)} steps, {self.tries} runs in {self.seconds:.1f} s"
        end = "no smaller call was found" if self.is_complete else "the time limit was reached"
        return [fault + cause, f"{how}; {end}"]


def sizes_of(call: KernelCall) -> dict[str, int]:
    """Return the sizes of a call by name."""
    contexts = call.seq_lens.long() - call.query_lens
    return {
        "sequences": len(call.seq_lens),
        "rows": int(call.query_lens.sum()),
        "heads": call.query.shape[1],
        "KV heads": call.key.shape[1],
        "head_size": call.query.shape[2],
        "longest context": int(contexts.max()) if len(contexts) else 0,
        "blocks": call.key_cache.shape[0],
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failure:
    """A call that fails. ``ran``: its run; ``kind``: what a smaller call must share with it."""

    call: KernelCall
    ran: Ran
    kind: tuple[Any, ...]

    @property
    def ratio(self) -> torch.Tensor:
        """Return how wrong each row and head is, [num_tokens, num_heads]."""
        if self.ran.output is None:
            return torch.zeros(self.call.query.shape[:2])
        return self.ran.expected.ratio(self.ran.output).amax(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Decides whether a call fails.

    ``backend``: what runs calls; None judges the output that a call has. ``case``, ``given``: as for
    :func:`attnlab.diagnosis.captured.where_it_ran`.
    """

    backend: Backend | None
    case: Case
    given: tuple[str, ...] = ()

    def failure(self, call: KernelCall, ran: Ran | None = None) -> Failure | None:
        """Return how a call fails, or None if it does not, cannot run, or fails in one of two equal runs."""
        ran = self.run(call) if ran is None else ran
        if ran.status == REJECTED:
            text = re.sub(r"\d+", "#", str(ran.failure))
            return Failure(call=call, ran=ran, kind=(REJECTED, text))
        if ran.status != MISMATCH or ran.output is None:
            return None
        ratio = ran.expected.ratio(ran.output)
        is_finite = bool(ran.output[ratio > 1].isfinite().all())
        return Failure(
            call=dataclasses.replace(call, output=ran.output, rejection=""),
            ran=ran,
            kind=(MISMATCH, is_finite),
        )

    def run(self, call: KernelCall) -> Ran:
        """Run a call, twice if equal runs may differ; without a backend, take the output that it has."""
        if self.backend is not None:
            return run_on(call, self.backend, self.case, self.given)
        ran = where_it_ran(call, self.case, self.given).case
        return Ran(case=ran, expected=expected_of(call, ran), output=call.buffer)

    def violations(self, call: KernelCall) -> set[tuple[str, str, str]]:
        """Return which contracts a call violates: kinds, subjects and effects."""
        found = violations_of_captured(call, self.case, given=self.given)
        return {(one.kind, one.subject, one.effect) for one in found if one.effect != "harmless"}

    def causes(self, failure: Failure) -> tuple[str, ...]:
        """Return the defects that explain a wrong output, the most likely first."""
        if failure.ran.output is None:
            return ()
        case, call = failure.ran.case, failure.call
        found = diagnose_call(call, Target.of(case), kernels_of(case, call))
        first = [] if found.cause is None else [found.cause.name]
        return tuple(dict.fromkeys([*first, *(one.name for one in found.explanations)]))


def shrink(
    call: KernelCall,
    judge: Judge,
    *,
    seconds: float | None = None,
    on_try: OnTry = lambda step, tries: None,
) -> Shrunk:
    """Return the smallest call that still fails in the same way.

    The search is greedy: it takes the first smaller call that fails, and starts again from there. A smaller
    call must fail with the same verdict, with numbers that are finite or not as before, and one defect must
    explain all of them if the first diagnosis has any. It must violate no contract that the first call
    keeps. ``on_try``: called before each run with the step and the number of runs so far. After ``seconds``
    no further call is run.

    Raises InvalidCall for a call without a reference.
    """
    check_diagnosable(call)
    began = time.monotonic()
    start = call = call.cpu()
    if judge.backend is None and (call.rejection or call.output is None):
        why = "that was rejected: it has no output" if call.rejection else "without an output"
        raise InvalidCall(f"source must be given for a call {why}")
    on_try("the call itself", 0)
    ran = judge.run(call)
    found = judge.failure(call, ran)
    if found is None:
        if ran.failure is not None and ran.status != UNSTABLE:
            raise InvalidCall(f"call must run to be shrunk: {ran.failure}")
        sizes = sizes_of(call)
        why = "" if ran.failure is None else str(ran.failure)
        return Shrunk(call=call, before=sizes, after=sizes, status=ran.status, reason=why, tries=1)
    search = _Search(judge=judge, found=found, seconds=seconds, on_try=on_try)
    while search.step():
        pass
    last = search.found
    return Shrunk(
        call=last.call,
        before=sizes_of(start),
        after=sizes_of(last.call),
        status=last.ran.status,
        reason="" if last.ran.failure is None else str(last.ran.failure),
        largest=float(last.ratio.max()),
        causes=search.causes,
        steps=tuple(search.steps),
        tries=search.tries,
        seconds=time.monotonic() - began,
        is_complete=search.is_complete,
        backend="" if judge.backend is None else judge.backend.version,
    )


class _Search:
    """The greedy search. Its state: the smallest failure, the steps that led to it, and the runs so far."""

    def __init__(
        self, *, judge: Judge, found: Failure, seconds: float | None, on_try: OnTry
    ) -> None:
        self.judge, self.found, self.on_try = judge, found, on_try
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.steps: list[str] = []
        self.tries, self.is_complete = 1, True
        self.causes = judge.causes(found)
        self.violated = judge.violations(found.call)

    def step(self) -> bool:
        """Take the first step that keeps the fault; answer whether there is one in the time."""
        runs = self.judge.backend is not None
        for text, smaller in smaller_calls(self.found.call, self.found.ratio, runs=runs):
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.is_complete = False
                return False
            self.on_try(text, self.tries)
            self.tries += 1
            failure = self._same(smaller)
            if failure is not None:
                self.found = failure
                self.steps.append(text)
                return True
        return False

    def _same(self, call: KernelCall) -> Failure | None:
        """Return how a call fails if it is the same fault, otherwise None."""
        try:
            if not self.judge.violations(call) <= self.violated:
                return None
            failure = self.judge.failure(call)
            if failure is None or failure.kind != self.found.kind:
                return None
            if self.causes:
                found = self.judge.causes(failure)
                causes = tuple(one for one in self.causes if one in found)
                if not causes:
                    return None
                self.causes = causes
        except AttnLabError:
            return None
        return failure


def shrink_call(
    call: KernelCall,
    *,
    source: Path | str | None = None,
    backend: str | None = None,
    device: str | None = None,
    seconds: float | None = None,
    **changes: Any,
) -> Shrunk:
    """Return the smallest call that still fails in the same way, with fewer and shorter sequences and heads.

    - ``source``, ``backend``, ``device``: what runs the calls, as for :func:`attnlab.replay_call`. Without
      them nothing is run: only sequences, rows, heads and blocks of the recorded output are removed.
    - ``seconds``: after this time, no further call is run.
    - ``changes``: where the call ran, for example ``platform="sm_90"``. Default: the call's origin.

    Raises InvalidCall for a call that is no attention or has arguments without a reference.
    """
    judge = Judge(
        backend=one_backend(source, backend, device), case=Case(**changes), given=tuple(changes)
    )
    return shrink(call, judge, seconds=seconds)


def shrunk(one: Shrunk) -> Sheet:
    """Return the sizes of a call before and after shrinking, and the steps."""
    rows: list[Row] = [[name, size, one.after[name]] for name, size in one.before.items()]
    return Sheet.of(
        "Shrunk",
        one.status,
        Lines(one.sentences()),
        Grid(("size", "before", "after"), rows, most=len(rows)) if one.is_failing else None,
        Grid(("steps",), [[step] for step in one.steps], most=4),
        tone=TONES[one.status],
        line=f"{one.status}, {one.after['rows']} rows of {one.before['rows']}",
    )
