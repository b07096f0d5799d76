"""Lab: run a Case, from its fields to a Result; runs share what their Cases have in common."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case, as_case
from attnlab.case.errors import InvalidCall, KernelFailed, KernelRejected
from attnlab.case.fields import is_plugin
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import PREFILL
from attnlab.case.platforms import STAGES
from attnlab.case.shown import Shown, json_value
from attnlab.contracts.contract import Target, contract
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import runs_of, written_rows
from attnlab.contracts.violations import Violations, find_violations
from attnlab.kernels import find_backend, model
from attnlab.kernels.backend import (
    Backend,
    OnStep,
    RunOptions,
    RunOutput,
    announced,
    cell_steps,
    in_parts,
)
from attnlab.kernels.control import run_backend
from attnlab.lab.cache_write import (
    as_numbers,
    expected_cache,
    slot_lengths,
    slot_order,
    write_bound,
)
from attnlab.lab.cache_write import expected_argument_write as expected_write
from attnlab.lab.decode_error import DecodedError, ErrorAnswer, ErrorText, decode
from attnlab.lab.problem import Predicted, Problem
from attnlab.lab.products import (
    SharedProducts,
    batch_key,
    cache_key,
    check_memory,
    output_key,
    prefill_key,
    reference_key,
)
from attnlab.lab.reference import Reference, exact_attention, rounding_bound
from attnlab.lab.result import (
    ErrorMap,
    MemoryReport,
    Result,
    SideError,
    lse_bound,
    map_errors,
    report,
    side_errors,
    traced,
)
from attnlab.tensors.cache import Batch, PagedCache, make_batch, make_cache
from attnlab.tensors.call import KernelCall, check_shape
from attnlab.tensors.case_call import make_call, make_output, visibility_of


@dataclass(slots=True)
class Lab:
    """Runs Cases and keeps what they share.

    A stage of the test, a platform or the contents of a buffer change neither the batch nor the
    reference, so a table of stages makes these once. Runs also share the rows of the modelled prefill
    kernel, as far as no field that reaches them differs. A shared product has the same bits as a new one.

    - ``source``: the vLLM of the backends "vllm", "rocm" and "cuda": a wheel, an sdist or a checkout; None
      is the installed one.
    - ``device``: where backend "vllm" runs, "cuda" or "cpu"; None is the GPU if torch can use one. The
      batch, the cache and the comparison of such a Case are there, too.
    - ``runner``: what runs every Case, whatever backend it names; None for the Case's backend.
    - ``is_native``: whether rounding bounds allow for what a GPU rounds; default whether ``device`` is one.
    - ``on_step``: called with the name of each step of a run before it begins. None for a line in the cell
      of a notebook, if the cell runs long, and nothing elsewhere.
    """

    keep: int = 2
    source: Path | str | None = None
    device: str | None = None
    runner: Backend | None = None
    is_native: bool | None = None
    on_step: OnStep | None = None
    shared: SharedProducts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Create the empty store."""
        self.shared = SharedProducts(keep=self.keep)

    def backend(self, case: Case) -> Backend:
        """Return the Case's backend; raise InvalidCase for a user's function that cannot be loaded."""
        if self.runner is not None:
            return self.runner
        given = (case.backend, self.source, self.device)
        return self.shared.get("backend", given, lambda: find_backend(*given))[0]

    def use(self, backend: Backend) -> None:
        """Run the Cases that name a backend on this one."""
        given = (backend.name, self.source, self.device)
        self.shared.get("backend", given, lambda: backend)

    def where(self, case: Case) -> str:
        """Return the device of the Case's tensors; raise Unavailable for a GPU that torch does not see."""
        return self.backend(case).device

    def batch(self, case: Case) -> Batch:
        """Return the Case's batch, shared: do not change it."""
        key = (batch_key(case), where := self.where(case))
        make = partial(make_batch, case, where)
        return self.shared.get("batch", key, make, in_file=where == "cpu")[0]

    def cache(self, case: Case) -> PagedCache:
        """Return the Case's cache, shared: do not change it."""
        batch, where = self.batch(case), self.where(case)
        make = partial(make_cache, case, batch)
        return self.shared.get("cache", (cache_key(case), where), make)[0]

    def reference(self, case: Case) -> torch.Tensor:
        """Return the Case's right output, shared: do not change it.

        [num_tokens, num_heads, head_size] in the dtype ``case.reference_dtype``. Of a cache write, the cache
        with every token, [num_blocks × block_size, num_kv_heads, 2 × head_size].
        """
        if case.spec.writes_cache:
            return expected_write(case, expected_cache(self.cache(case.replace(fill="all_rows"))))
        return self._reference(case, with_lse=False).output

    def lse(self, case: Case) -> torch.Tensor:
        """Return the LSE of each row without sinks, [num_tokens, num_heads] in the reference's dtype."""
        lse = self._reference(case, with_lse=True).lse
        assert lse is not None
        return lse

    def expected_lse(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the right LSE and its rounding bound, each [num_tokens, num_heads] float64."""
        lse = self.lse(case.replace(reference_dtype="float64"))
        return lse, lse_bound(case, self.batch(case), self.call(case), lse)

    def side_errors(
        self, case: Case, lse: torch.Tensor | None, padded: torch.Tensor | None
    ) -> tuple[SideError, ...]:
        """Return the errors of an op's side outputs, see :mod:`attnlab.lab.result`."""
        return side_errors(case, lse, padded, self.expected_lse)

    def _reference(self, case: Case, with_lse: bool) -> Reference:
        batch, where = self.batch(case), self.where(case)
        make = partial(exact_attention, case, batch, with_lse=with_lse)
        if case.op_argument != NONE and not with_lse:
            make = partial(self._with_argument, case)
        kind = "lse" if with_lse else "reference"
        return self.shared.get(kind, (reference_key(case), where), make, in_file=where == "cpu")[0]

    def call(
        self, case: Case, cache: PagedCache | None = None, output: torch.Tensor | None = None
    ) -> KernelCall:
        """Return the Case's call; ``cache`` replaces the Case's, and ``output`` a new output buffer."""
        where = self.where(case)
        if output is None:
            make = partial(make_output, case, where)
            output = self.shared.get("output", (output_key(case), where), make)[0].clone()
        batch = self.batch(case)
        new = self.shared.get("new tokens", (batch_key(case), where), batch.new_tokens)[0]
        return make_call(case, batch, cache or self.cache(case), output, new)

    def violations(self, case: Case, call: KernelCall) -> Violations:
        """Return where the Case's call violates a contract. What kernels write into it changes nothing."""

        def make() -> Violations:
            kernels, provenance = decide(case).kernels, self.cache(case).provenance
            return find_violations(call, Target.of(case), kernels, provenance)

        key = (case.replace(trace_reads=False), self.where(case))
        return Violations(self.shared.get("violations", key, make)[0])

    def run(self, case: Case) -> Result:
        """Run the Case's op and compare its output with the reference.

        Raises InvalidCase or Unavailable, before anything is allocated, for a Case that its backend or
        this machine cannot run.
        """
        backend = self._checked_backend(case)
        seconds: dict[str, float] = {}
        shared = self._shared_steps(case, backend)
        with self._step(seconds, "batch"):
            self.batch(case)
        with self._step(seconds, "cache"):
            cache = self.cache(case)
        call = self.call(case)
        decision, target = decide(case), Target.of(case)
        rejection, ran = None, RunOutput()
        with self._step(seconds, "kernels"):
            try:
                ran = self._run_kernels(case, call)
            except KernelRejected as error:
                rejection = error
        violations = self.violations(case, call)  # a GPU computes meanwhile
        errors, wrong_sides = None, tuple[SideError, ...]()
        if rejection is None:
            with self._step(seconds, "reference"):
                expected = self.reference(case)
            with self._step(seconds, "compare"):
                errors = self.errors(case, call, expected)
                wrong_sides = self.side_errors(case, ran.log.lse, ran.log.padded)
        output = call.buffer

        def make_call() -> KernelCall:
            return self.call(case, output=output)

        is_wrong = errors is not None and (errors.mismatched > 0 or len(wrong_sides) > 0)
        return Result(
            case=case,
            decision=decision,
            backend=backend.text(decision.kernels, target),
            status="rejected" if rejection is not None else "mismatch" if is_wrong else "match",
            error=None if rejection is None else str(rejection),
            errors=errors,
            violations=violations,
            seconds={step: s for step, s in seconds.items() if step not in shared},
            shared=shared,
            output=output,
            provenance=cache.provenance,
            make_call=make_call,
            make_cache=lambda: self.cache(case),
            memory=self._memory(case, ran),
            launches=tuple(launch.text() for launch in ran.log.launches),
            wraps=tuple(wrap.text() for wrap in ran.log.wraps.values()),
            outside=tuple(access.text() for access in ran.log.outside.values()),
            alone=tuple(f"{kernel}: {why}" for kernel, why in ran.log.alone.items()),
            lse=ran.log.lse,
            padded=ran.log.padded,
            side_errors=wrong_sides,
            failed=isinstance(rejection, KernelFailed),
            compare_with_rounding=functools.cache(
                lambda: self.errors(
                    case.replace(atol=None, rtol=0.0), make_call(), self.reference(case)
                )
            ),
        )

    def output(self, case: Case, cache: PagedCache | None = None) -> torch.Tensor:
        """Return the output of the Case's op without comparing it; raise as :meth:`run` does.

        ``cache`` replaces the Case's. Raises KernelRejected, too.
        """
        self._checked_backend(case)
        call = self.call(case, cache)
        self._run_kernels(case, call)
        return call.buffer

    def errors(self, case: Case, call: KernelCall, expected: torch.Tensor) -> ErrorMap:
        """Return the errors of the call's output against ``expected``; of a cache write, by slot."""
        tolerance = case.tolerance
        if not case.spec.writes_cache:
            return map_errors(
                call.buffer,
                expected,
                case.lengths,
                self.bound(case, call) if tolerance is None else tolerance,
                case.rtol,
                case.query_heads,
                case.query_rows,
            )
        order = slot_order(case, self.cache(case).provenance.block_table)
        slots = as_numbers(call.buffer[order], expected[order])
        plain = lambda: self.reference(case.replace(op_argument=NONE))[order]  # noqa: E731
        bound = write_bound(case, plain, is_native=self.is_native_run(case))
        return map_errors(*slots, slot_lengths(case), tolerance or bound, case.rtol)

    def bound(self, case: Case, call: KernelCall) -> torch.Tensor:
        """Return the rounding bound of each element of the Case's output, shared."""
        kernels = decide(case).kernels
        where = self.where(case)
        make = lambda: rounding_bound(case, self.batch(case), call, kernels)  # noqa: E731
        if case.op_argument != NONE:
            make = lambda: self._predicted(case).bound.float().to(where)  # noqa: E731
        key = (reference_key(case), where, kernels, case.platform)
        return self.shared.get("bound", key, make, in_file=key[1] == "cpu")[0]

    def _with_argument(self, case: Case) -> Reference:
        """Return the right output of a Case with an op argument, without the log-sum-exp."""
        output, dtype = self._predicted(case).output, torch.float32
        if case.reference_dtype == "float64":
            dtype = torch.float64
        return Reference(output=output.to(self.where(case), dtype), lse=None)

    def _predicted(self, case: Case) -> Predicted:
        """Return the right output of a Case with an op argument, and its rounding bound, on the CPU."""
        native = self.is_native_run(case)
        problem = Problem.of_case(case, self.batch(case), self.call(case), is_native=native)
        return problem.correct_output()

    def is_native_run(self, case: Case) -> bool:
        """Answer whether rounding bounds allow for what a GPU rounds."""
        return self.where(case) == "cuda" if self.is_native is None else self.is_native

    def _checked_backend(self, case: Case) -> Backend:
        """Return the Case's backend; raise InvalidCase or Unavailable if it cannot run the Case here."""
        backend = self.backend(case)
        check_memory(case, backend.cache_copies)
        backend.check(case)
        return backend

    def _shared_steps(self, case: Case, backend: Backend) -> tuple[str, ...]:
        """Return the steps of a run whose products earlier runs have left."""
        where = self.where(case)
        keys = {
            "batch": (batch_key(case), where),
            "cache": (cache_key(case), where),
            "reference": (reference_key(case), where),
        }
        if backend.models_prefill:
            keys["prefill"] = (prefill_key(case), where)
        return tuple(kind for kind, key in keys.items() if self.shared.has(kind, key))

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        """Run the Case's kernels into ``call.output``; take shared prefill rows if there are any."""
        backend, target, kernels = self.backend(case), Target.of(case), decide(case).kernels
        if backend.models_prefill and PREFILL in kernels:
            self._run_prefill(case, call, target)
            kernels = tuple(name for name in kernels if name != PREFILL)
        on_step = self.on_step or cell_steps()
        options = dataclasses.replace(RunOptions.of(case), on_step=on_step)
        return run_backend(backend, call, target, kernels, options)

    def _run_prefill(self, case: Case, call: KernelCall, target: Target) -> None:
        """Write the rows of the prefill kernel to ``call.output``, by its model or as shared."""

        def prefill() -> torch.Tensor:
            model.run(call, target, (PREFILL,))
            return torch.cat([call.buffer[run] for run in runs] or [call.buffer[:0]])

        runs = runs_of(written_rows(contract(PREFILL, target, call.op), call))
        key = (prefill_key(case), self.where(case))
        done, was_there = self.shared.get("prefill", key, prefill, in_file=key[1] == "cpu")
        if was_there:
            parts = done.split([run.stop - run.start for run in runs])
            for run, part in zip(runs, parts, strict=True):
                call.buffer[run] = part

    def _memory(self, case: Case, ran: RunOutput) -> MemoryReport | None:
        """Return what a traced run read from the cache, or None."""
        provenance = self.cache(case).provenance
        if ran.findings is not None:
            return report(ran.findings, provenance, torch.tensor(case.lengths.seq_lens))
        rules = visibility_of(case)
        return traced(ran.log.reads, provenance, case.lengths, rules) if ran.is_traced else None

    @contextmanager
    def _step(self, seconds: dict[str, float], step: str) -> Iterator[None]:
        """Announce a step and record its time, even if it raises."""
        with announced(self.on_step or cell_steps(), step):
            start = time.perf_counter()
            try:
                yield
            finally:
                seconds[step] = time.perf_counter() - start


_AHEAD = 2  # batches that wait for their Cases; a Lab must keep one more


@contextmanager
def drawing_ahead(lab: Lab, cases: Sequence[Case]) -> Iterator[Iterator[Case]]:
    """Yield an iterator over ``cases`` that draws batches of the next ones while the block uses one.

    It helps where another device computes, such as a GPU: batches are drawn by this machine's cores. So
    torch's operations on the CPU use one thread inside the block. Cases that share a batch should be
    neighbours, with the smallest batch first. An error is raised by the run of its Case.
    """
    firsts = [
        i for i, case in enumerate(cases) if i == 0 or batch_key(case) != batch_key(cases[i - 1])
    ]
    room, stop = threading.Semaphore(_AHEAD), threading.Event()

    def draw() -> None:
        for i in firsts:
            room.acquire()
            if stop.is_set():
                return
            try:
                lab.batch(cases[i])
            except Exception:  # the run of this Case raises it, too
                return

    def each() -> Iterator[Case]:
        begun = set(firsts[1:])
        for i, case in enumerate(cases):
            if i in begun:
                room.release()
            yield case

    thread = threading.Thread(target=draw, name="attnlab-drawing", daemon=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for cores that draw
    if lab.keep > _AHEAD:
        thread.start()
    try:
        yield each()
    finally:
        torch.set_num_threads(threads)
        stop.set()
        room.release()
        if thread.ident is not None:
            thread.join()


PLATFORMS_SHOWN = ("gfx942", "sm_90")


def platforms_shown(case: Case) -> tuple[str, ...]:
    """Return the default columns of a Case's table.

    vLLM's CPU op and a user's kernel do not depend on the platform: their table has one column.
    """
    is_one = case.backend == "vllm-cpu" or is_plugin(case.backend)
    return (case.platform,) if is_one else PLATFORMS_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The outcome of one Case of the table, without tensors.

    ``decode_error`` and ``prefill_error`` are the largest absolute errors over the rows of sequences with
    one new token and with more; None if there is no such row or the call was rejected.
    """

    stage: str
    platform: str
    status: str
    verdict: str
    mismatched: int | None
    total: int | None
    first_index: tuple[int, int, int] | None
    decode_kernel: str | None
    decode_error: float | None
    prefill_error: float | None


class StageTable(Shown, list[Cell]):
    """The cells of a table of stages, stage by stage; ``case``: the Case that they were made from."""

    __slots__ = ("case",)

    def __init__(self, cells: Iterable[Cell] = (), *, case: Case | None = None) -> None:
        super().__init__(cells)
        self.case = case


def stage_table(
    lab: Lab,
    case: Case,
    platforms: Sequence[str] = PLATFORMS_SHOWN,
    on_cell: Callable[[int, int], None] | None = None,
) -> StageTable:
    """Run the Case in each stage on each platform; return the cells stage by stage.

    ``on_cell`` is called before each cell with the number of finished cells and of all cells. The cells
    share batch, cache and reference as far as their stages allow.
    """
    plan = [
        case.replace(stage=stage, platform=platform) for stage in STAGES for platform in platforms
    ]
    cells: dict[int, Cell] = {}
    order = sorted(range(len(plan)), key=lambda i: plan[i].staging.fill)  # equal ones share a cache
    for i in in_parts(order):
        if on_cell is not None:
            on_cell(len(cells), len(plan))
        cells[i] = _cell(lab, plan[i])
    return StageTable([cells[i] for i in range(len(plan))], case=case)


def _cell(lab: Lab, case: Case) -> Cell:
    result = lab.run(case)
    errors = result.errors
    return Cell(
        stage=case.stage,
        platform=case.platform,
        status=result.status,
        verdict=result.verdict,
        mismatched=None if errors is None else errors.mismatched,
        total=None if errors is None else errors.total,
        first_index=None if errors is None else errors.first_index,
        decode_kernel=result.decision.decode,
        decode_error=None if errors is None else _largest(errors.seq_error(), case, decode=True),
        prefill_error=None if errors is None else _largest(errors.seq_error(), case, decode=False),
    )


def _largest(seq_error: list[float], case: Case, decode: bool) -> float | None:
    """Return the largest error of the decode sequences, or of the others; NaN is the largest."""
    errors = [
        error
        for error, query_len in zip(seq_error, case.lengths.query_lens, strict=True)
        if (query_len == 1) == decode
    ]
    return max(errors, key=lambda error: (error != error, error), default=None)


def to_json(case: Case, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the table as values of strict JSON."""
    rows = [json_value(dataclasses.asdict(cell)) for cell in cells]
    return {"case": json_value(case.changes()), "backend": case.backend, "cells": rows}


# The part of ``import attnlab`` that runs Cases and compares outputs.
#
# Every function accepts a Case or a pytest id, and changes of its fields as keywords. Without ``lab`` it
# uses a default Lab, which keeps the last batches, caches and references.


@functools.cache
def default_lab() -> Lab:
    """Return the Lab that the public functions share."""
    return Lab()


def run(case: Case | str, *, lab: Lab | None = None, **changes: Any) -> Result:
    """Run a Case and compare its output with the reference.

    Raises InvalidCase for a wrong field, and Unavailable if the backend or the memory is missing. A call
    that the kernel rejects is a Result of status "rejected".
    """
    return (lab or default_lab()).run(as_case(case, **changes))


def stages(
    case: Case | str,
    *,
    platforms: Sequence[str] | None = None,
    lab: Lab | None = None,
    **changes: Any,
) -> StageTable:
    """Run a Case in every stage of the test, on several platforms (default: gfx942 and sm_90)."""
    case = as_case(case, **changes)
    return stage_table(lab or default_lab(), case, platforms or platforms_shown(case))


def reference(case: Case | str, *, lab: Lab | None = None, **changes: Any) -> torch.Tensor:
    """Return the correct output of a Case, [num_tokens, num_heads, head_size], computed plainly.

    The dtype is the Case's ``reference_dtype``. The op reshape_and_cache_flash has the cache as its output.
    """
    return (lab or default_lab()).reference(as_case(case, **changes)).clone()


def compare(
    case: Case | str, output: torch.Tensor, *, lab: Lab | None = None, **changes: Any
) -> ErrorMap:
    """Return the errors of an output of a Case, of any backend, against the reference.

    ``output``: shape and dtype of the Case's own output. Raises InvalidCall for another.
    """
    case, lab = as_case(case, **changes), lab or default_lab()
    call = lab.call(case)
    check_shape("output", output, tuple(call.buffer.shape))
    if output.dtype != call.buffer.dtype:
        raise InvalidCall(f"output must have dtype {call.buffer.dtype}, got {output.dtype}")
    call.buffer.copy_(output)
    return lab.errors(case, call, lab.reference(case))


def decode_error(
    text: str, case: Case | str | None = None, **changes: Any
) -> DecodedError | ErrorAnswer:
    """Return which sequence, token and kernel the text of a failed test is about.

    ``text``: the message of ``torch.testing.assert_close``, an index, or the output of pytest. ``case`` is
    the Case or the pytest id of the test (default: the id in the text, else ``Case()``). A dtype error, a
    failed ``torch.allclose`` and an index of a cache give an ErrorAnswer. Raises InvalidCase if the text
    has nothing to decode or does not match the Case.
    """
    found = ErrorText.read(text)
    if case is not None:
        found = dataclasses.replace(
            found, test_id=case if isinstance(case, str) else None, refusal=""
        )
    start = Case() if case is None and found.test_id is None else case or found.test_id
    assert start is not None
    return decode(found, as_case(start, **changes))
