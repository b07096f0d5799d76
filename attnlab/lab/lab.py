"""Running a Case: from its knobs to a Result, with everything shared that cases have in common."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable
from attnlab.case.fields import refuse
from attnlab.case.ops import PREFILL
from attnlab.contracts.contract import contract, written_rows
from attnlab.contracts.dispatch import ROCM_DECODE, Decision, Target, decide
from attnlab.contracts.violations import find_violations
from attnlab.kernels.model import backend as model
from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.cache_write import as_numbers, expected_cache, slot_lengths, slot_order
from attnlab.lab.error_map import ErrorMap, compare
from attnlab.lab.keys import batch_key, cache_key, output_key, prefill_key, reference_key
from attnlab.lab.reads import MemoryReport, report, traced
from attnlab.lab.reference import reference
from attnlab.lab.result import Result
from attnlab.tensors.batch import Batch, make_batch
from attnlab.tensors.cache import PagedCache, make_cache
from attnlab.tensors.call import KernelCall, make_call, make_output

T = TypeVar("T")
_NOTICE_S = 60.0  # a run that takes longer says so before it starts


@dataclass(slots=True)
class Lab:
    """Runs Cases and keeps what they share, the last few of each kind.

    A stage of the test, a platform or a buffer's contents changes neither the batch nor the reference,
    so a table of stages builds these once. The rows of the prefill kernel are shared too where no knob
    that reaches them differs; the tests run it both ways and compare the bits.

    ``source`` is where vLLM's kernels come from, for Cases of backend "vllm" and "rocm"; None is the
    installed one.
    ``device`` is where these run, "cuda" or "cpu"; None is the GPU where torch can use one. What such a
    Case needs is made and compared there, too.
    ``on_step`` is called with the name of each step of a run before it begins, ``on_notice`` with what
    a person should know before a long one.
    """

    keep: int = 2
    source: Path | str | None = None
    device: str | None = None
    on_step: Callable[[str], None] | None = None
    on_notice: Callable[[str], None] = lambda text: None
    _stores: dict[str, "OrderedDict[tuple[Case, str], Any]"] = field(
        default_factory=dict, repr=False
    )
    # Panels share what a Lab holds, and ask from threads of their own.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def batch(self, case: Case) -> Batch:
        """Return the Case's batch; not to be changed."""
        where = self.where(case)
        return self._shared("batch", batch_key(case), lambda: make_batch(case, where), where)[0]

    def cache(self, case: Case) -> PagedCache:
        """Return the Case's cache; not to be changed."""
        batch = self.batch(case)
        where = self.where(case)
        return self._shared("cache", cache_key(case), lambda: make_cache(case, batch), where)[0]

    def reference(self, case: Case) -> torch.Tensor:
        """Return the Case's reference, of a cache write the cache with every token; not to be changed."""
        if case.spec.writes_cache:
            return expected_cache(self.cache(case.replace(fill="all_rows")))
        batch = self.batch(case)
        where = self.where(case)
        make = lambda: reference(case, batch)  # noqa: E731
        return self._shared("reference", reference_key(case), make, where)[0]

    def call(self, case: Case) -> KernelCall:
        """Return the Case's call, its output buffer fresh."""
        where = self.where(case)
        make = lambda: make_output(case).to(where)  # noqa: E731
        output = self._shared("output", output_key(case), make, where)[0].clone()
        return make_call(case, self.batch(case), self.cache(case), output)

    def run(self, case: Case) -> Result:
        """Run the Case's op and compare its output with the reference.

        Raises Unavailable for a Case that this machine has no memory for, before anything is made.
        """
        check_memory(case)
        if case.backend != "model":
            self._check_backend(case)  # what is wrong with it is told before anything is made
        seconds: dict[str, float] = {}
        shared = tuple(
            kind
            for kind, key in (
                ("batch", batch_key(case)),
                ("cache", cache_key(case)),
                ("reference", reference_key(case)),
                ("prefill", prefill_key(case)),
            )
            if (key, self.where(case)) in self._stores.get(kind, {})
            and (kind != "prefill" or case.backend != "vllm")
        )
        with self._step(seconds, "batch"):
            self.batch(case)
        with self._step(seconds, "cache"):
            cache = self.cache(case)
        call = self.call(case)
        decision, target = decide(case), Target.of(case)
        violations = find_violations(call, target, decision.kernels, cache.provenance)
        error, observed, memory, failed = None, RunLog(), None, False
        with self._step(seconds, "kernels"):
            try:
                observed, memory = self._run_kernels(case, call, target, decision)
            except KernelRejected as rejection:
                error, failed = str(rejection), isinstance(rejection, KernelFailed)
        errors = None
        if error is None:
            with self._step(seconds, "reference"):
                expected = self.reference(case)
            with self._step(seconds, "compare"):
                errors = self.errors(case, call, expected)
        wrong = errors is not None and errors.mismatched > 0
        return Result(
            case=case,
            decision=decision,
            backend=self.backend(case, decision),
            status="rejected" if error is not None else "mismatch" if wrong else "match",
            error=error,
            errors=errors,
            violations=violations,
            seconds={step: s for step, s in seconds.items() if step not in shared},
            shared=shared,
            call=call,
            cache=cache,
            memory=memory,
            launches=tuple(launch.text() for launch in observed.launches),
            wraps=tuple(wrap.text() for wrap in observed.wraps.values()),
            outside=tuple(stray.text() for stray in observed.outside.values()),
            lse=observed.lse,
            padded=observed.padded,
            failed=failed,
        )

    def output(self, case: Case) -> torch.Tensor:
        """Return what the Case's op writes, without comparing it; raises as :meth:`run` does."""
        check_memory(case)
        if case.backend != "model":
            self._check_backend(case)
        call = self.call(case)
        self._run_kernels(case, call, Target.of(case), decide(case))
        return call.output

    def errors(self, case: Case, call: KernelCall, expected: torch.Tensor) -> ErrorMap:
        """Return the errors of the call's output against the Case's reference; of a cache write, slot
        by slot."""
        if not case.spec.writes_cache:
            return compare(
                call.output,
                expected,
                case.lengths,
                case.tolerance,
                case.rtol,
                case.query_heads,
                case.query_rows,
            )
        order = slot_order(case, self.cache(case).provenance.block_table)
        slots = as_numbers(call.output[order], expected[order])
        return compare(*slots, slot_lengths(case), case.tolerance, case.rtol)

    def _run_kernels(
        self, case: Case, call: KernelCall, target: Target, decision: Decision
    ) -> tuple[RunLog, MemoryReport | None]:
        """Run the kernels into ``call.output``, or take over the prefill rows that are there.

        Returns what the interpreter saw, and what was read of the cache where the Case is checked.
        """
        if case.backend == "vllm-cpu":
            from attnlab.kernels import cpu as cpu_ops

            cpu_ops.run(call, target)
            return RunLog(), None
        if case.backend == "vllm":
            observed = self._run_vllm(case, call, target, decision)
            return observed, self._traced(case, observed) if case.trace_reads else None
        if PREFILL in decision.kernels:
            self._run_prefill(case, call, target)
        if case.backend == "rocm" and ROCM_DECODE in decision.kernels:
            return RunLog(), self._run_rocm(case, call, target)
        model.run(call, target, tuple(name for name in decision.kernels if name != PREFILL))
        return RunLog(), None

    def _run_prefill(self, case: Case, call: KernelCall, target: Target) -> None:
        """Run the model of the prefill kernel, or take over its rows."""

        def prefill() -> torch.Tensor:
            model.run(call, target, (PREFILL,))
            return call.output[rows].clone()

        rows = written_rows(contract(PREFILL, target, call.op), call)
        done, was_there = self._shared("prefill", prefill_key(case), prefill)
        if was_there:
            call.output[rows] = done

    def _run_rocm(self, case: Case, call: KernelCall, target: Target) -> MemoryReport | None:
        """Run the decode kernel of vLLM's csrc/rocm; return what it read, where the Case asks for it."""
        from attnlab.kernels.rocm import backend as rocm_source
        from attnlab.kernels.rocm.op import DeviceOptions

        def progress(step: str) -> None:
            if self.on_step is not None:
                self.on_step(f"kernels, {step}")

        how = DeviceOptions(checked=case.trace_reads)
        findings = rocm_source.run(call, target, self.rocm(case), how, progress)
        if not case.trace_reads:
            return None
        return report(findings, self.cache(case).provenance, call.seq_lens.long())

    def rocm(self, case: Case) -> Source | None:
        """Return the vLLM whose csrc/rocm runs, or None where the real op can run here.

        Raises Unavailable for one that comes without it.
        """
        from attnlab.kernels.rocm import backend as rocm_source

        if self.source is None and rocm_source.native() is not None:
            return None
        source = self.vllm(case)
        rocm_source.check_source(source)
        return source

    def _check_backend(self, case: Case) -> None:
        """Raise where the kernels of the Case's backend are not to be had."""
        if case.backend == "vllm-cpu":
            from attnlab.kernels import cpu as cpu_ops

            cpu_ops.load()
        elif case.backend == "rocm":
            self.rocm(case)
        else:
            self.vllm(case)

    def where(self, case: Case) -> str:
        """Return where the Case's tensors lie, "cuda" or "cpu"; raise Unavailable for a GPU that is not
        there."""
        if case.backend != "vllm":
            return "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise Unavailable("device must be cpu here, got cuda: torch sees no GPU")
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def vllm(self, case: Case) -> Source:
        """Return the vLLM that the Case's kernels come from; raise InvalidCase where the Case goes by
        the rules of another release."""
        source = self._shared("source", Case(), lambda: find_source(self.source))[0]
        if source.rules not in (None, case.release):
            refuse("release", f"{source.rules} with the kernels of {source.text()}", case.release)
        return source

    def backend(self, case: Case, decision: Decision) -> str:
        """Return where the kernels of a run come from, and what stood in for which, in words."""
        if case.backend == "model":
            return case.backend
        if case.backend == "vllm-cpu":
            from attnlab.kernels import cpu as cpu_ops

            return cpu_ops.backend_text()
        from attnlab.kernels.rocm import backend as rocm_source
        from attnlab.kernels.vllm import backend as vllm_ops

        if case.backend == "rocm":
            return rocm_source.backend_text(self.rocm(case), decision.kernels)
        return vllm_ops.backend_text(
            self.vllm(case), decision.kernels, self.where(case), case.machine
        )

    def _run_vllm(self, case: Case, call: KernelCall, target: Target, decision: Decision) -> RunLog:
        """Run vLLM's own op; say so before where it will take minutes."""
        from attnlab.kernels.triton import program_filter as needed
        from attnlab.kernels.vllm import backend as vllm_ops

        share = needed.Subset(
            group=case.num_queries_per_kv,
            kv_heads=None if case.kv_head_range is None else range(*case.kv_head_range),
            seqs=None if case.seq_range is None else range(*case.seq_range),
        )
        where = self.where(case)
        if where == "cpu":
            seconds = needed.estimated_s(call, decision.kernels, share)
            if seconds > _NOTICE_S:
                self.on_notice(
                    f"about {seconds / 60:.0f} min under Triton's interpreter; "
                    "--kv-head-range 0:1 runs one KV head, --seq-range 0:1 one sequence"
                )

        def progress(done: int, total: int) -> None:
            if self.on_step is not None:
                self.on_step(f"kernels, program {done} of {total}")

        return vllm_ops.run(
            call,
            target,
            decision.kernels,
            self.vllm(case),
            share,
            progress,
            where,
            case.trace_reads,
        )

    def _traced(self, case: Case, observed: RunLog) -> MemoryReport:
        """Return what the programs of a checked run read."""
        provenance = self.cache(case).provenance
        return traced(observed.reads, provenance, case.lengths, case.sliding_window)

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

    def _shared(
        self, kind: str, key: Case, make: Callable[[], T], where: str = "cpu"
    ) -> tuple[T, bool]:
        """Return what ``make`` makes, kept under ``key`` and where it lies, and whether it was there."""
        at = (key, where)
        with self._lock:
            store = self._stores.setdefault(kind, OrderedDict())
            if at in store:
                store.move_to_end(at)
                return store[at], True
            while len(store) >= self.keep:
                store.popitem(last=False)
            store[at] = make()
            return store[at], False


def check_memory(case: Case) -> None:
    """Raise Unavailable where the Case's tensors alone are larger than this machine's memory; blocks that
    nobody touches take none."""
    element = DTYPE_BYTES[case.dtype]
    head = case.num_kv_heads * case.head_size
    blocks = case.total_blocks - case.first_block
    cache = 2 * blocks * case.block_size * head * (1 if case.is_fp8 else element)
    batch = 2 * sum(case.lengths.seq_lens) * head * element
    row = case.num_heads * case.head_size
    outputs = (
        case.lengths.num_tokens * row * (2 * element + DTYPE_BYTES.get(case.reference_dtype, 8))
    )
    copies = 3 if case.backend == "vllm-cpu" else 1  # in the op's own layout, and on the way there
    needed, there = copies * cache + batch + outputs, _memory_bytes()
    if needed > there:
        raise Unavailable(
            f"the case needs about {needed / 2**30:.0f} GiB of memory and this machine has "
            f"{there / 2**30:.0f}: fewer or shorter sequences, fewer heads or blocks"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
