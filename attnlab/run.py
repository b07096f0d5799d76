"""Running a Case: from its knobs to a Result, with everything shared that cases have in common."""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnlab.batch import Batch, make_batch
from attnlab.breaches import Breach, check
from attnlab.cache import PagedCache, make_cache
from attnlab.call import KernelCall, make_call, make_output
from attnlab.case import KNOBS, Case
from attnlab.compare import ErrorMap, Place, compare
from attnlab.contracts import contract, written_rows
from attnlab.dispatch import PREFILL, Decision, Setting, decide
from attnlab.errors import KernelRejected
from attnlab.kernels import model
from attnlab.kernels.source import Source, find_source
from attnlab.knobs import refuse
from attnlab.reference import reference

T = TypeVar("T")
_NOTICE_S = 60.0  # a run that takes longer says so before it starts
_NUMBERS = (
    "mismatched",
    "total",
    "max_abs_error",
    "max_index",
    "first_index",
    "nan_elements",
    "heads_run",
    "atol",
    "rtol",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What came of a Case.

    - ``status``: "match", "mismatch", or "rejected" where the kernel raised ``error``.
    - ``errors``: the ErrorMap; None where the call was rejected.
    - ``breaches``: what the contracts say of the call, found without running it.
    - ``seconds``: the time of each step that this run did itself; what it shared is not in it.
    - ``shared``: the steps whose product an earlier run of the same Lab had left.
    - ``call``, ``cache``: what was run, for a closer look.
    """

    case: Case
    decision: Decision
    origin: str
    status: str
    error: str | None
    errors: ErrorMap | None
    breaches: list[Breach]
    seconds: dict[str, float]
    shared: tuple[str, ...]
    call: KernelCall
    cache: PagedCache

    def places(self) -> list[Place]:
        """Return the rows with mismatches; none where the call was rejected."""
        return [] if self.errors is None else self.errors.places()

    def unwritten_rows(self) -> torch.Tensor:
        """Return which output rows no kernel writes by its contract, [num_tokens] bool."""
        setting, written = (
            Setting.of(self.case),
            torch.zeros(len(self.call.query), dtype=torch.bool),
        )
        for name in self.decision.kernels:
            written |= written_rows(contract(name, setting, self.call.op), self.call)
        return ~written

    @property
    def verdict(self) -> str:
        """Return one line that says what came of it."""
        if self.errors is None:
            return f"rejected: {self.error}"
        line = f"{self.errors.mismatched} of {self.errors.total}"
        if self.errors.heads is not None:
            ran = self.errors.heads
            line += f" (query heads {ran.start} to {ran.stop - 1} of {self.case.num_heads} run)"
        if self.errors.first_index is not None:
            line += f", first {self.errors.first_index}"
        return line

    def to_dict(self, most_places: int) -> dict[str, Any]:
        """Return the result as JSON-able values, with the first ``most_places`` places."""
        places = self.places()
        numbers = self.errors.to_dict() if self.errors is not None else dict.fromkeys(_NUMBERS)
        return {
            "case": dataclasses.asdict(self.case),
            "kernel": self.decision.decode or PREFILL,
            "kernels": list(self.decision.kernels),
            "origin": self.origin,
            "reasons": self.decision.reasons,
            "status": self.status,
            "error": self.error,
            **numbers,
            "places": [self._place(place) for place in places[:most_places]],
            "places_left_out": max(0, len(places) - most_places),
            "breaches": [dataclasses.asdict(breach) for breach in self.breaches],
            "seconds": sum(self.seconds.values()),
            "seconds_by_step": self.seconds,
        }

    def _place(self, place: Place) -> dict[str, Any]:
        """Return a place with the slot of the newest token, where the row takes it from the cache."""
        fields = dataclasses.asdict(place)
        if place.query_len == 1 and self.decision.decode is not None:
            position = self.case.lengths.seq_lens[place.seq] - 1
            block, offset = self.cache.provenance.slot(place.seq, position)
            written = int(self.cache.provenance.pos[block, offset]) == position
            newest = {"position": position, "block": block, "offset": offset, "written": written}
            fields["newest_slot"] = newest
        return fields


@dataclass(slots=True)
class Lab:
    """Runs Cases and keeps what they share, the last few of each kind.

    A stage of the test, a platform or a buffer's contents changes neither the batch nor the reference,
    so a table of stages builds these once. The rows of the prefill kernel are shared too where no knob
    that reaches them differs; the tests run it both ways and compare the bits.

    ``source`` is where vLLM's kernels come from, for Cases of origin "vllm"; None is the installed one.
    ``on_step`` is called with the name of each step of a run before it begins, ``on_notice`` with what
    a person should know before a long one.
    """

    keep: int = 2
    source: Path | None = None
    on_step: Callable[[str], None] | None = None
    on_notice: Callable[[str], None] = lambda text: None
    _stores: dict[str, "OrderedDict[Case, Any]"] = field(default_factory=dict)

    def batch(self, case: Case) -> Batch:
        """Return the Case's batch; not to be changed."""
        return self._shared("batch", _batch_key(case), lambda: make_batch(case))[0]

    def cache(self, case: Case) -> PagedCache:
        """Return the Case's cache; not to be changed."""
        batch = self.batch(case)
        return self._shared("cache", _cache_key(case), lambda: make_cache(case, batch))[0]

    def reference(self, case: Case) -> torch.Tensor:
        """Return the Case's reference; not to be changed."""
        batch = self.batch(case)
        return self._shared("reference", _reference_key(case), lambda: reference(case, batch))[0]

    def call(self, case: Case) -> KernelCall:
        """Return the Case's call, its output buffer fresh."""
        buffer = _reset(case, keep=(*_BATCH_KNOBS, "output"))
        output = self._shared("output", buffer, lambda: make_output(case))[0].clone()
        return make_call(case, self.batch(case), self.cache(case), output)

    def run(self, case: Case) -> Result:
        """Run the Case's op and compare its output with the reference."""
        if case.origin == "vllm":
            self.vllm(case)  # a source that is wrong is told before anything is made
        seconds: dict[str, float] = {}
        shared = tuple(
            kind
            for kind, key in (
                ("batch", _batch_key(case)),
                ("cache", _cache_key(case)),
                ("reference", _reference_key(case)),
                ("prefill", _prefill_key(case)),
            )
            if key in self._stores.get(kind, {}) and (kind != "prefill" or case.origin == "model")
        )
        with self._step(seconds, "batch"):
            self.batch(case)
        with self._step(seconds, "cache"):
            cache = self.cache(case)
        call = self.call(case)
        decision, setting = decide(case), Setting.of(case)
        breaches = check(call, setting, decision.kernels, cache.provenance)
        error = None
        with self._step(seconds, "kernels"):
            try:
                self._run_kernels(case, call, setting, decision)
            except KernelRejected as rejection:
                error = str(rejection)
        errors = None
        if error is None:
            with self._step(seconds, "reference"):
                expected = self.reference(case)
            with self._step(seconds, "compare"):
                errors = compare(
                    call.output,
                    expected,
                    case.lengths,
                    case.tolerance,
                    case.rtol,
                    case.query_heads,
                )
        wrong = errors is not None and errors.mismatched > 0
        return Result(
            case=case,
            decision=decision,
            origin=self.origin(case, decision),
            status="rejected" if error is not None else "mismatch" if wrong else "match",
            error=error,
            errors=errors,
            breaches=breaches,
            seconds={step: s for step, s in seconds.items() if step not in shared},
            shared=shared,
            call=call,
            cache=cache,
        )

    def _run_kernels(
        self, case: Case, call: KernelCall, setting: Setting, decision: Decision
    ) -> None:
        """Run the kernels into ``call.output``, or take over the prefill rows that are there."""
        if case.origin == "vllm":
            self._run_vllm(case, call, setting, decision)
            return
        if PREFILL not in decision.kernels:
            model.run(call, setting, decision.kernels)
            return

        def prefill() -> torch.Tensor:
            model.run(call, setting, (PREFILL,))
            return call.output[rows].clone()

        rows = written_rows(contract(PREFILL, setting, call.op), call)
        done, was_there = self._shared("prefill", _prefill_key(case), prefill)
        if was_there:
            call.output[rows] = done
        model.run(call, setting, tuple(name for name in decision.kernels if name != PREFILL))

    def vllm(self, case: Case) -> Source:
        """Return the vLLM that the Case's kernels come from; raise InvalidCase where the Case goes by
        the rules of another release."""
        source = self._shared("source", Case(), lambda: find_source(self.source))[0]
        if source.rules not in (None, case.release):
            refuse("release", f"{source.rules} with the kernels of {source.text()}", case.release)
        return source

    def origin(self, case: Case, decision: Decision) -> str:
        """Return where the kernels of a run come from, and what stood in for which, in words."""
        if case.origin == "model":
            return case.origin
        from attnlab.kernels.vllm_ops import origin_text

        return origin_text(self.vllm(case), decision.kernels)

    def _run_vllm(self, case: Case, call: KernelCall, setting: Setting, decision: Decision) -> None:
        """Run vLLM's own op; say so before where it will take minutes."""
        from attnlab.kernels import needed, vllm_ops

        kv_heads = None if case.heads is None else range(*case.heads)
        if vllm_ops.device().type == "cpu":
            seconds = needed.estimated_s(call, decision.kernels, kv_heads)
            if seconds > _NOTICE_S:
                self.on_notice(
                    f"about {seconds / 60:.0f} min under Triton's interpreter; "
                    "--heads 0:1 runs one KV head"
                )

        def progress(done: int, total: int) -> None:
            if self.on_step is not None:
                self.on_step(f"kernels, program {done} of {total}")

        vllm_ops.run(call, setting, decision.kernels, self.vllm(case), kv_heads, progress)

    @contextmanager
    def _step(self, seconds: dict[str, float], step: str) -> Iterator[None]:
        """Announce a step and record its time, also where it raises."""
        if self.on_step is not None:
            self.on_step(step)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds[step] = time.perf_counter() - start

    def _shared(self, kind: str, key: Case, make: Callable[[], T]) -> tuple[T, bool]:
        """Return what ``make`` makes, kept under ``key``, and whether it was there already."""
        store = self._stores.setdefault(kind, OrderedDict())
        if key in store:
            store.move_to_end(key)
            return store[key], True
        while len(store) >= self.keep:
            store.popitem(last=False)
        store[key] = make()
        return store[key], False


# Which knobs reach which product. What is not named is reset to its default, so that two Cases that
# differ only there have the same key.
_LENGTH_KNOBS = (
    "query_lens",
    "ctx_lens",
    "seed",
    "num_seqs",
    "draw_max_query_len",
    "draw_max_ctx_len",
    "force_decode",
)
_BATCH_KNOBS = (
    *_LENGTH_KNOBS,
    "num_heads",
    "num_queries_per_kv",
    "head_size",
    "dtype",
    "data",
    "alibi",
)
_STORED_KNOBS = (*_BATCH_KNOBS, "kv_cache_dtype", "k_scale", "v_scale", "cache_write")
_TABLE_KNOBS = ("block_size", "num_blocks", "max_blocks_per_seq", "block_table", "x")


def _reset(case: Case, keep: tuple[str, ...], **changes: Any) -> Case:
    """Return the Case with every knob at its default that is not in ``keep`` or ``changes``."""
    kept = {name: getattr(case, name) for name in keep}
    x = {"x": 1} if "x" not in keep else {}  # fits every head size
    return Case.from_dict({**{n: f.default for n, f in KNOBS.items()}, **x, **kept, **changes})


def _batch_key(case: Case) -> Case:
    return _reset(case, _BATCH_KNOBS)


def _stored_format(case: Case) -> dict[str, Any]:
    """Return the platform's FP8 format as a knob, and a platform that stands for all of its kind."""
    if not case.is_fp8 or case.kv_cache_dtype == "fp8_e5m2":
        return {"cache_format": case.cache_format}
    return {"cache_format": case.cache_format or case.machine.fp8_e4m3}


def _cache_key(case: Case) -> Case:
    keep = (*_STORED_KNOBS, *_TABLE_KNOBS, "empty")
    return _reset(case, keep, fill=case.staging.fill, **_stored_format(case))


def _reference_key(case: Case) -> Case:
    keep = (*_STORED_KNOBS, "op", "sliding_window", "sm_scale", "oracle")
    return _reset(case, keep, **_stored_format(case))


def _prefill_key(case: Case) -> Case:
    """Return the key of the prefill kernel's rows: neither stage, fill nor buffers reach them."""
    keep = (*_STORED_KNOBS, *_TABLE_KNOBS, "op", "sliding_window", "sm_scale", "max_query_len")
    by_heads = case.sm_scale is None and case.release == "0.11.2"
    reads = case.platform if case.is_fp8 else "cpu"
    return _reset(
        case,
        keep,
        platform=reads,
        release=case.release if by_heads else "0.33.0",
        **_stored_format(case),
    )
