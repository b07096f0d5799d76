"""Shrink a call: the smallest call that still fails in the same way and breaks no further contract."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCall
from attnlab.case.json import json_number
from attnlab.case.shown import Shown
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.diagnosis.captured import check_diagnosable, violations_of_captured, where_it_ran
from attnlab.diagnosis.diagnose import diagnose_call
from attnlab.kernels.backend import Backend
from attnlab.replay.replay_call import Ran, expected_of, run_on
from attnlab.replay.replays import MISMATCH, REJECTED, UNSTABLE
from attnlab.replay.steps import smaller_calls
from attnlab.tensors.call import KernelCall

OnTry = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Shrunk(Shown):
    """The smallest call that was found.

    - ``call``: with the output of its last run; ``before``, ``after``: the sizes of both calls, by name.
    - ``status``: "mismatch" or "rejected", "match" if the call does not fail, or "not deterministic" if equal
      runs differ: then nothing was done.
    - ``reason``: what the kernel raises, or how equal runs differ; ``largest``: the largest error in units of
      the rounding bound.
    - ``cause``: the defect that explains both calls, or "".
    - ``steps``: the steps that were kept; ``tries``: how many calls were run; ``is_complete``: no further
      step keeps the fault, and the time limit was not reached.
    - ``backend``: what ran the calls, "" if only the recorded output was cut.
    """

    call: KernelCall
    before: dict[str, int]
    after: dict[str, int]
    status: str
    reason: str = ""
    largest: float = 0.0
    cause: str = ""
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
        cause = f"; {self.cause} explains it" if self.cause else ""
        how = f"{len(self.steps)} steps, {self.tries} runs in {self.seconds:.1f} s"
        end = "no smaller call was found" if self.is_complete else "the time limit was reached"
        return [fault + cause, f"{how}; {end}"]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as values of strict JSON, without the call."""
        names = [name for name in self.__slots__ if name not in ("call", "steps", "largest")]
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "steps": list(self.steps), "largest": json_number(self.largest)}


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
        """Return how a call fails, or None if it does not, cannot run, or fails in one of two equal runs.

        ``ran``: its run, None to run it.
        """
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

    def causes(self, failure: Failure) -> list[str]:
        """Return the defects that explain a wrong output, the most likely first."""
        if failure.ran.output is None:
            return []
        case, call = failure.ran.case, failure.call
        found = diagnose_call(call, Target.of(case), kernels_of(case, call))
        first = [] if found.cause is None else [found.cause.name]
        return [*first, *(one.name for one in found.explanations)]


def shrink(
    call: KernelCall,
    judge: Judge,
    *,
    seconds: float | None = None,
    on_try: OnTry = lambda step, tries: None,
) -> Shrunk:
    """Return the smallest call that still fails in the same way.

    The search is greedy: it takes the first smaller call that fails, and starts again from there. A smaller
    call must fail with the same verdict, with numbers that are finite or not as before, and with a cause
    among its explanations if the first diagnosis names one. It must violate no contract that the first call
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
    search.run()
    last = search.found
    return Shrunk(
        call=last.call,
        before=sizes_of(start),
        after=sizes_of(last.call),
        status=last.ran.status,
        reason="" if last.ran.failure is None else str(last.ran.failure),
        largest=float(last.ratio.max()),
        cause=search.cause,
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
        self.cause = next(iter(judge.causes(found)), "")
        self.violated = judge.violations(found.call)

    def run(self) -> None:
        """Take steps until none succeeds or the time is over."""
        while self._step():
            pass

    def _step(self) -> bool:
        """Take the first step that keeps the fault; answer whether there is one."""
        for text, smaller in self._smaller():
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

    def _smaller(self) -> Iterator[tuple[str, KernelCall]]:
        runs = self.judge.backend is not None
        return smaller_calls(self.found.call, self.found.ratio, runs=runs)

    def _same(self, call: KernelCall) -> Failure | None:
        """Return how a call fails if it is the same fault, otherwise None."""
        try:
            if not self.judge.violations(call) <= self.violated:
                return None
            failure = self.judge.failure(call)
            if failure is None or failure.kind != self.found.kind:
                return None
            if self.cause and self.cause not in self.judge.causes(failure):
                return None
        except AttnLabError:
            return None
        return failure
