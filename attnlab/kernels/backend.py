"""Backend: the interface of everything that runs a KernelCall.

A backend is named by ``Case.backend``: the models, vLLM's Triton ops, the ROCm kernel, vLLM's CPU op, or
a user's own function. :func:`attnlab.kernels.find_backend` returns the backend of a name.
"""

import functools
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.fields import refuse
from attnlab.case.masks import CAUSAL
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import KV_CACHE_DTYPES, OPS, RELEASES
from attnlab.case.shown import STEP_MIME
from attnlab.contracts.contract import Target
from attnlab.kernels.replaced import setting
from attnlab.kernels.rocm.findings import Findings
from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.vllm.features import lacks
from attnlab.kernels.vllm.source import Source
from attnlab.tensors.call import KernelCall

T = TypeVar("T")
STEPS = ("batch", "cache", "kernels", "reference", "compare")  # in the order of a run


class OnStep(Protocol):
    """A function that is called before each step of a run."""

    def __call__(self, step: str, done: int | None = None, total: int | None = None) -> None:
        """Display ``step``: one of STEPS, or a text about a part of one.

        ``done`` of ``total`` programs of the step have run, if the step counts them. The function may
        raise to end the run.
        """


def time_left(seconds: float, done: int | None, total: int | None) -> str:
    """Return the time that a step still needs as text, after ``seconds`` of it; "" if it is not known."""
    if not done or not total or seconds < 1:
        return ""
    return f", about {seconds * (total - done) / done:.0f} s left"


_LONG_S, _OFTEN_S = 2.0, 0.25  # until a line appears in a cell, and between two changes of it


class CellSteps:
    """An OnStep for the cells of a notebook: a line with the step and the time left, empty at the end.

    It appears in a cell that runs longer than 2 s. Steps of other threads, which have panels, are ignored.
    """

    def __init__(self, shell: Any) -> None:
        self._handle: Any = None
        self._began = self._changed = self._step_began = time.perf_counter()
        self._step = ""
        self._part: tuple[int, int, float] | None = None  # of the work: done, total, when it began
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def __call__(self, step: str, done: int | None = None, total: int | None = None) -> None:
        """Show the step; see :class:`OnStep`."""
        now = time.perf_counter()
        if step != self._step:
            self._step, self._step_began = step, now
        is_soon = now - self._began < _LONG_S or now - self._changed < _OFTEN_S
        if is_soon or threading.current_thread() is not threading.main_thread():
            return
        self._changed = now
        count = "" if done is None or total is None else f": {done} of {total}"
        text = f"{step}{count}{time_left(now - self._step_began, done, total)}"
        if self._part is not None:
            done, total, began = self._part
            text = f"{done} of {total}{time_left(now - began, done, total)}; {text}"
        self._show(text)

    def parts(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the parts of a work; its steps are shown with how many are done, and the time left."""
        began = time.perf_counter()
        try:
            for i, one in enumerate(items):
                self._part = (i, len(items), began)
                yield one
        finally:
            self._part = None

    def _show(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text, STEP_MIME: {}}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def _begin(self, *_: Any) -> None:
        self._began, self._step, self._handle = time.perf_counter(), "", None

    def _end(self, *_: Any) -> None:
        if self._handle is not None:
            self._show("")
            self._handle = None


@functools.cache
def cell_steps() -> OnStep:
    """Return what shows steps if the caller does not say: a line in a cell of a notebook, else nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return CellSteps(shell) if hasattr(shell, "kernel") else ignore_step


def in_parts(items: Sequence[T]) -> Iterator[T]:
    """Yield the parts of a work; a cell of a notebook shows how many are done, and the time left."""
    steps = cell_steps()
    return steps.parts(items) if isinstance(steps, CellSteps) else iter(items)


def ignore_step(step: str, done: int | None = None, total: int | None = None) -> None:
    """Display nothing."""


_RUNNING: ContextVar[tuple[OnStep, str]] = ContextVar("running", default=(ignore_step, ""))


@contextmanager
def announced(on_step: OnStep, step: str) -> Iterator[None]:
    """Announce a step; within, :func:`counted` says how far it is."""
    on_step(step)
    with setting(_RUNNING, (on_step, step)):
        yield


def counted(items: Sequence[T]) -> Iterator[T]:
    """Yield the parts of the step that runs, and report how many are done."""
    on_step, step = _RUNNING.get()
    for i, one in enumerate(items):
        if i:
            on_step(step, i, len(items))
        yield one


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a call.

    - ``trace_reads``: record which elements of the cache the kernels read.
    - ``kv_head_range``, ``seq_range``: the KV heads and the sequences to run, None for all.
    - ``argument_of``: the Case whose op argument is passed, or None (:mod:`attnlab.case.op_arguments`).
    - ``value_scale``: with which values are stored in a cache with a scale per token and head, in place of
      that of their numbers, [num_blocks, block_size, num_kv_heads] float32.
    """

    trace_reads: bool = False
    kv_head_range: range | None = None
    seq_range: range | None = None
    argument_of: Case | None = None
    value_scale: torch.Tensor | None = field(default=None, compare=False)
    on_step: OnStep = ignore_step

    @classmethod
    def of(cls, case: Case) -> "RunOptions":
        """Return the options of a Case."""
        return cls(
            trace_reads=case.trace_reads,
            kv_head_range=None if case.kv_head_range is None else range(*case.kv_head_range),
            seq_range=None if case.seq_range is None else range(*case.seq_range),
            argument_of=None if case.op_argument == NONE else case,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunOutput:
    """What a run produced in addition to ``call.output``.

    - ``log``: launches, int32 overflows, out-of-bounds accesses, LSE and padded rows. Its ``reads`` are
      valid if ``is_traced``.
    - ``is_traced``: whether Triton's interpreter recorded which slots were read.
    """

    log: RunLog = field(default_factory=RunLog)
    is_traced: bool = False
    findings: Findings | None = None


class Backend(ABC):
    """A source of kernels.

    Creating a backend loads and checks as little as possible, so that a Case can be built and described
    on a machine that cannot run it. :meth:`check` does the rest. Backends can be pickled.

    - ``cache_copies``: how many times the cache is in memory during a run.
    - ``models_prefill``: whether the model computes the rows of the prefill kernel, so that runs can share
      them.
    - ``traces_reads``: whether a run can record what it reads from the cache.
    """

    cache_copies: ClassVar[int] = 1
    models_prefill: ClassVar[bool] = False
    traces_reads: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name, as in ``Case.backend``."""

    @property
    @abstractmethod
    def ops(self) -> tuple[str, ...]:
        """Return the ops that the backend can run."""

    @property
    def path(self) -> Path | str | None:
        """Return where the kernels were found: the user's path, or None."""
        return None

    @property
    def version(self) -> str:
        """Return a description of the kernels with their version, for reports."""
        return self.name

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags of a command that choose these kernels, besides --backend."""
        return ()

    @property
    def op_source(self) -> Source | None:
        """Return the source whose Triton ops run, None for others; raise InvalidCase or Unavailable."""
        return None

    @property
    def is_interpreted(self) -> bool:
        """Return whether Triton's interpreter runs the ops of a source, so that it shows their launches."""
        return self.op_source is not None and self.device == "cpu"

    @property
    def release(self) -> str:
        """Return the vLLM release whose rules the kernels follow."""
        return RELEASES[-1]

    @property
    def device(self) -> str:
        """Return the device of the call's tensors: "cpu" or "cuda"."""
        return "cpu"

    @property
    def kv_cache_dtypes(self) -> tuple[str, ...]:
        """Return the values of ``Case.kv_cache_dtype`` that the kernels support."""
        return KV_CACHE_DTYPES

    @property
    def masks(self) -> tuple[str, ...]:
        """Return the values of ``Case.mask`` that the kernels support, as far as the op does."""
        return (CAUSAL,)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the dtypes that this machine computes as the kernels intend."""
        return tuple(DTYPE_BYTES)

    @property
    def large_caches(self) -> bool:
        """Return whether the kernels run on a cache of 8 GiB of untouched memory without copying it."""
        return True

    def fixed_fields(self, op: str) -> tuple[str, ...]:
        """Return the scales of a Case, by the names of its fields, for which an op has no argument."""
        return () if self.has_scale(op) else ("sm_scale",)

    @property
    def is_deterministic(self) -> bool:
        """Return whether the lab runs the kernels so that equal calls give equal bits: models and emulation.

        Other kernels are run twice wherever a statement rests on runs (:mod:`attnlab.kernels.control`).
        """
        return False

    @property
    def states_limits(self) -> bool:
        """Return whether a KernelRejected is a limit that the kernel states itself, not a fault."""
        return False

    @property
    def blind_spots(self) -> tuple[str, ...]:
        """Return what a check with this backend does not cover, one phrase each."""
        return ()

    def check(self, case: Case) -> None:
        """Check that the Case can run here, before anything is allocated.

        Raises InvalidCase if a field of the Case is at fault, Unavailable if this machine is.
        """
        for name in ("op", "kv_cache_dtype", "mask"):
            self.check_field(name, getattr(case, name))

    def check_field(self, name: str, value: str) -> None:
        """Raise InvalidCase unless the kernels support a value of "op", "kv_cache_dtype" or "mask"."""
        allowed: tuple[str, ...] = getattr(self, f"{name}s")
        if value not in allowed:
            refuse(name, f"{' or '.join(allowed)} with backend {self.name}", value)

    def check_features(self, case: Case) -> None:  # noqa: B027
        """Raise InvalidCase for a feature of the Case that the op of these kernels lacks."""

    def has_op(self, op: str) -> bool:
        """Answer whether these kernels have an op, of those that the backend knows."""
        return op in self.ops and self.release in OPS[op].releases

    def has_splits(self, op: str) -> bool:
        """Answer whether an op of these kernels has an argument for the number of parts."""
        return bool(OPS[op].num_splits) and self.release in OPS[op].split_releases

    def has_scale(self, op: str) -> bool:
        """Answer whether an op of these kernels has an argument for the scale of the scores, if it scores."""
        return self.op_source is None or not lacks(self.op_source, op, "sm_scale", "")

    def not_applicable(self, op: str) -> list[str]:
        """Return what an op of these kernels lacks, one line for each missing name."""
        return []

    def missing_scales(self, case: Case) -> dict[str, tuple[str, ...]]:
        """Return what the op gets without its scales, with the arguments for them that it lacks."""
        return {}

    def text(self, kernels: Sequence[str], target: Target) -> str:
        """Describe where the kernels of a run come from, and which of them are models."""
        return self.name

    @abstractmethod
    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        """Run the kernels in order; each writes its rows of ``call.output``.

        Raises KernelRejected if a kernel refuses the call, KernelFailed if it breaks, Unavailable if it
        cannot run here, DeviceLost if it broke the GPU's context.
        """


def check_release(source: Source, case: Case) -> None:
    """Raise InvalidCase if the Case follows the rules of another release than the kernels of a vLLM."""
    if source.rules not in (None, case.release):
        refuse("release", f"{source.rules} with the kernels of {source.text()}", case.release)
