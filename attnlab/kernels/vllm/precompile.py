"""Compile the Triton kernels of many Cases at once, in parallel, without running them and without a GPU.

Which specialisations the Cases need is found by calling the ops while Triton compiles and launches nothing;
that takes about 10 ms per Case. Each specialisation is then compiled once, by one of several processes,
into Triton's cache, where later runs on a GPU find it.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.contracts.contract import Target
from attnlab.kernels.binding import bind
from attnlab.kernels.child_process import end_with_parent
from attnlab.kernels.triton import interpreter
from attnlab.kernels.vllm.backend import load
from attnlab.kernels.vllm.source import Source
from attnlab.tensors.case_call import hollow_call, presented

_WORK: list[tuple[Any, str]] = []  # of a forked process


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a precompilation did: kernels by name, seconds, and one line for each that failed."""

    kernels: dict[str, int]
    processes: int
    seconds: float
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Device:
    """A driver of Triton that knows its target and can do nothing else."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def precompile(
    cases: Iterable[Case],
    source: Source,
    processes: int | None = None,
    on_kernel: Callable[[int, int], None] = lambda done, total: None,
) -> Compiled:
    """Compile every kernel that the Cases launch, each specialisation once; return what was compiled.

    The Cases have the backend "vllm" and a platform sm_XX, whose code is generated. ``processes``: default
    one per core. ``on_kernel``: called with the kernels done and their number. A Case whose op raises
    before it launches anything adds nothing. Raises Unavailable if Triton is not installed, or was imported
    to interpret, or cannot fork here.
    """
    began = time.perf_counter()
    count = processes or interpreter.cores()
    if not hasattr(os, "fork"):
        raise Unavailable("kernels cannot be compiled in parallel here: this system cannot fork")
    cases = tuple(cases)
    platforms = {case.platform for case in cases}
    work: list[tuple[Any, str]] = []
    failures: list[str] = []
    for platform in sorted(platforms):
        with _compiling_for(platform):
            chosen = [case for case in cases if case.platform == platform]
            part = specialisations(chosen, source)
            work += part
            failures += _compile(part, count, on_kernel)
    names = [function.__name__ for function, _ in work]
    return Compiled(
        kernels={name: names.count(name) for name in dict.fromkeys(names)},
        processes=count,
        seconds=time.perf_counter() - began,
        failures=tuple(failures),
    )


def specialisations(cases: Iterable[Case], source: Source) -> list[tuple[Any, str]]:
    """Return the kernels that the Cases launch: each JITFunction with a specialisation, as Triton's JSON.

    Nothing is compiled. Call it inside a block that compiles for the Cases' platform.
    """
    from triton import knobs

    found: dict[tuple[str, str], Any] = {}

    def keep(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        found.setdefault((fn.name, compile["specialization_data"]), fn.jit_function)
        return True  # do not compile

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, keep
    try:
        for case in cases:
            _call_op(case, source)
    finally:
        knobs.runtime.jit_cache_hook = before
    return [(function, data) for (_, data), function in found.items()]


def _call_op(case: Case, source: Source) -> None:
    """Call the Case's op on memory without numbers; what it raises is for the real run to report."""
    target = Target.of(case)
    function = load(source, target.platform, "cuda").function(case.op)
    with suppress(Exception):
        function(**bind(function, presented(hollow_call(case)), target))


@contextmanager
def _compiling_for(platform: str) -> Iterator[None]:
    """Give Triton the driver of a GPU that need not be there; raise Unavailable if it is not NVIDIA's."""
    interpreter.load_triton(interpret=False)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if not platform.startswith("sm_"):
        raise Unavailable(f"platform must be an NVIDIA GPU to compile for, got {platform}")
    before = driver._active  # reading driver.active would look for a GPU
    driver.set_active(_Device(GPUTarget("cuda", int(platform.removeprefix("sm_")), 32)))
    try:
        yield
    finally:
        driver.set_active(before)


def _compile(
    work: list[tuple[Any, str]], processes: int, on_kernel: Callable[[int, int], None]
) -> list[str]:
    """Compile in forked processes, kernels with the most constants first; return the failures."""
    if not work:
        return []
    order = sorted(range(len(work)), key=lambda i: -len(work[i][1]))
    failures = []
    with ProcessPoolExecutor(
        min(processes, len(work)), get_context("fork"), _start, (os.getpid(), work)
    ) as pool:
        try:
            for done, failure in enumerate(pool.map(_compile_one, order), 1):
                failures += [failure] if failure else []
                on_kernel(done, len(work))
        except BrokenProcessPool:
            failures.append("a process that compiled ended; the rest is compiled when it runs")
    return failures


def _start(parent: int, work: list[tuple[Any, str]]) -> None:
    """Prepare a forked process: it ends with its parent and knows the work."""
    end_with_parent(parent)
    _WORK[:] = work


def _compile_one(i: int) -> str:
    """Compile one kernel into Triton's cache; return its failure in one line, or ""."""
    function, data = _WORK[i]
    try:
        function.preload(data)
    except Exception as error:
        return f"{function.__name__}: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""
