"""Launch kernels under Triton's interpreter, with its known bugs fixed and checks that it lacks.

Other users of Triton are not affected: op modules get a ``triton`` module whose ``jit`` returns the
functions defined here. The launch differs from Triton's own in these points:

- Arguments that a kernel annotates as ``tl.int64`` are int64. The stock interpreter keeps them int32, so
  strides overflow that do not overflow on a GPU.
- Storages are not copied onto themselves after a launch. On a CPU the stock copy has no other effect.
- A full slice of a rank-0 tensor, as in ``bn[None, :]``, adds no dimension. Triton's compiler accepted that
  when prefix_prefill was written (vLLM 0.8.5 to 0.13.0); the interpreter of Triton 3.9 rejects it.
- FP8 is converted by torch; the interpreter's own conversion loses NaN and rounding carries.
- bfloat16 is computed (:mod:`attnlab.kernels.triton.patches`); the interpreter multiplies its raw bits.
- ``and``, ``or`` and chained comparisons of blocks combine them (:mod:`attnlab.kernels.triton.patches`).
- Every supported Triton computes the same (:mod:`attnlab.kernels.triton.patches`).
- A scalar is a loop bound or an index with every supported NumPy (:mod:`attnlab.kernels.triton.interpreter`).
- The language is patched once per launch, not at every call of a device function.
- Accesses outside the launch's tensors are masked and recorded. The stock interpreter crashes or reads
  unrelated memory. An error of the lab, or what the interpreter cannot run, is raised as Unavailable, so that
  it is not taken for a fault of the kernel. Kernels get addresses far apart, so that one tensor is never
  read in place of another. Overflows of int32 products are recorded, too.
- Programs whose output is not requested are skipped, and the rest can be split over processes. The tests
  compare the result bit by bit with the whole grid in one process.
- All programs of a launch run together (:mod:`attnlab.kernels.triton.lockstep.launch`), unless a probe
  records what each does, or the launch does what lockstep refuses.
"""

import functools
import importlib.metadata
import inspect
import itertools
import mmap
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from attnlab.case.errors import AttnLabError, KernelFailed, Unavailable
from attnlab.kernels.child_process import fork
from attnlab.kernels.replaced import replacing
from attnlab.kernels.triton.coverage import is_measuring, marked_kernel
from attnlab.kernels.triton.launch_plan import (
    LaunchPlan,
    Program,
    current_plan,
    is_recorded,
    launching,
    one_at_a_time,
)
from attnlab.kernels.triton.lockstep.launch import Form, Together, is_lockstep, using_lockstep
from attnlab.kernels.triton.lockstep.notes import ProgramAccesses, Reads
from attnlab.kernels.triton.patches import bind_libdevice, is_bfloat16, language, with_bool_ops
from attnlab.kernels.triton.probe import LaunchLog, current_probe
from attnlab.kernels.triton.run_log import (
    Accesses,
    Launch,
    Memory,
    RunLog,
    TooLong,
    Trace,
    limited,
    rerun_budget,
)

# The versions of Triton and NumPy with which the lab's interpreter layer is tested.
#
# ``tools/triton_versions.py --pairs`` checks a vLLM with each pair in a process of its own and writes
# ``docs/interpreter-pairs.json``; a test compares the ranges below with that file.
#
# The layer patches private functions of Triton's interpreter. With another Triton they may be missing, or
# do something else without an error. So another Triton is rejected before anything runs. Of NumPy only
# public functions are used; a later NumPy 2 is accepted, and a case that it breaks is reported as not run.

TRITON = ((3, 6), (3, 9))  # the oldest and the newest minor release
NUMPY = ((2, 0), (2, 4))  # measured; any NumPy 2 is accepted


def check_installed_pair() -> None:
    """Check the versions of the installed packages, without an import of Triton.

    Raises Unavailable for a pair that is not tested. Does nothing if one is not installed under its own
    name.
    """
    versions = _installed()
    if versions is not None:
        check_pair(*versions)


@functools.cache
def _installed() -> tuple[str, str] | None:
    """Return the versions of Triton and NumPy; None if one is not installed under its own name."""
    try:
        return importlib.metadata.version("triton"), importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_pair(triton: str, numpy: str) -> None:
    """Raise Unavailable if the lab's interpreter is not tested with this Triton and this NumPy."""
    match, major = re.match(r"(\d+)\.(\d+)", triton), NUMPY[0][0]
    is_tested = match is not None and TRITON[0] <= (int(match[1]), int(match[2])) <= TRITON[1]
    if is_tested and numpy.partition(".")[0] == str(major):
        return
    oldest, newest = (".".join(map(str, release)) for release in TRITON)
    raise Unavailable(
        f"Triton's interpreter needs Triton {oldest} to {newest} and NumPy {major}, got Triton {triton} and "
        f"NumPy {numpy}: pip install triton=={newest}.0 'numpy>={major},<{major + 1}'"
    )


VARIABLE = "TRITON_INTERPRET"
NO_DRIVER = re.compile(r"\b0 active drivers")  # Triton's compiler found no GPU
_ALONE_S = 0.3  # a longer launch is split over processes

_MOST_PROCESSES: list[int] = []
_REWRITTEN: dict[Any, Any] = {}  # the interpreted forms of functions
_LAUNCHED: dict[Any, Any] = {}  # functions that :func:`launch` runs, by their originals


def limit_processes(most: int) -> None:
    """Let a launch of this process use at most ``most`` processes, because others use the other cores."""
    _MOST_PROCESSES[:] = [most]


def cores() -> int:
    """Return how many processes a launch may use on this machine; 1 if it cannot fork."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return 1
    return min([len(os.sched_getaffinity(0)), *_MOST_PROCESSES])


def shared_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in anonymous memory that child processes share. /dev/shm is not used: it may be small.

    With an active probe it is not shared: such launches use one process, and copies of this process may run
    them again at the same time.
    """
    if current_probe() is not None:
        return tensor.clone(memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, tensor.nbytes)
    shared = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return shared.copy_(tensor)


def interpreted_triton() -> ModuleType:
    """Return a ``triton`` module whose ``jit`` interprets; everything else is Triton's own.

    Raises Unavailable if Triton is not installed, or was imported in compile mode.
    """
    triton = load_triton(interpret=True)
    launched = _launched_type()

    def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        return launched(fn) if fn is not None else lambda fn: launched(fn)

    module = ModuleType("triton")
    module.__getattr__ = lambda name: getattr(triton, name)  # type: ignore[method-assign]
    module.jit = jit  # type: ignore[attr-defined]
    return module


@functools.cache
def _launched_type() -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    class Launched(InterpretedFunction):  # type: ignore[misc]
        """An interpreted function that :func:`launch` runs."""

        def __init__(self, fn: Any) -> None:
            super().__init__(fn)
            with_bool_ops(self.rewriter)

        @classmethod
        def of(cls, function: Any) -> Any:
            """Return an interpreted function as one of this class; Triton's own functions as they are."""
            is_triton = function.fn.__module__.partition(".")[0] == "triton"
            if is_triton or isinstance(function, cls):
                return function
            if function.fn not in _LAUNCHED:
                _LAUNCHED[function.fn] = cls(function.fn)
            return _LAUNCHED[function.fn]

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if not warmup:
                launch(self, args, kwargs, grid)

        def rewrite(self) -> Any:
            probe = current_probe()
            if probe is None and is_measuring():
                return marked_kernel(self)
            if self.fn not in _REWRITTEN:  # Triton's own table may have another form
                _REWRITTEN[self.fn] = self.rewriter.rewrite_ast()
            found = _REWRITTEN[self.fn]
            return found if probe is None else probe.rewritten(self, found)

    return Launched


@contextmanager
def interpreting() -> Iterator[None]:
    """Let :func:`launch` run every interpreted kernel inside the block, whoever imported its Triton.

    Of the configurations of ``@triton.autotune``, the first runs: none is timed.
    """
    if not is_interpreting():
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not warmup:
            launch(_launched_type().of(self), args, kwargs, grid)

    def first(self: Any, arguments: Any, pruned: Any = Autotuner.prune_configs) -> Any:
        return pruned(self, arguments)[:1]

    with replacing(InterpretedFunction, run=run), replacing(Autotuner, prune_configs=first):
        yield


@contextmanager
def interpret(*, lockstep: bool = True) -> Iterator[RunLog]:
    """Run every launch of a ``@triton.jit`` function inside the block on the CPU, with attnlab's checks.

    With ``lockstep``, all programs of a launch run together, in batches; what that does not support runs one
    program after another, with the same result. The tensors must be on the CPU, and the environment variable
    TRITON_INTERPRET must be 1 before Triton is imported.

    Yields a log, filled during the block: ``launches``; ``alone``, by kernel, why its programs ran one after
    another; ``wraps``, int32 products that overflowed; ``outside``, accesses outside of all tensors.
    Raises Unavailable if Triton cannot interpret here.
    """
    load_triton(interpret=True)
    plan = LaunchPlan()
    with launching(plan), interpreting(), using_lockstep(lockstep):
        yield plan.observed


@contextmanager
def noting_bfloat16() -> Iterator[list[str]]:
    """Yield a list that gets the operations on bfloat16 that Triton's own interpreter computes in the block.

    It takes the bits of such numbers for integers, so the results say nothing about the kernel. Loads, stores
    and conversions to float32 are right, and are not noted.
    """
    found: list[str] = []
    if not is_interpreting():
        yield found
        return
    from triton.runtime import interpreter

    def noting(name: str, compute: Any) -> Any:
        def computed(self: Any, first: Any, *rest: Any, **named: Any) -> Any:
            dtype = (first[0] if isinstance(first, tuple) else first).dtype
            if is_bfloat16(dtype.scalar):
                found.append(name)
            return compute(self, first, *rest, **named)

        return computed

    scope = interpreter._LangPatchScope()
    for name in ("binary_op", "unary_op", "create_dot"):
        builder = interpreter.InterpreterBuilder
        scope.set_attr(builder, name, noting(name, getattr(builder, name)))
    reduction = interpreter.ReduceScanOpInterface
    scope.set_attr(reduction, "apply", noting("apply", reduction.apply))
    try:
        yield found
    finally:
        scope.restore()


def interpret_if_possible() -> None:
    """Let Triton interpret on a machine without GPU, unless it was imported before."""
    if "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ[VARIABLE] = "1"


def is_interpreting() -> bool:
    """Answer whether Triton was imported, to interpret."""
    language = sys.modules.get("triton.language.standard")
    runtime = sys.modules.get("triton.runtime.interpreter")
    return runtime is not None and isinstance(
        getattr(language, "cdiv", None), runtime.InterpretedFunction
    )


def load_triton(interpret: bool) -> Any:
    """Return Triton, imported in interpret or compile mode.

    Raises Unavailable if that is impossible, or if the interpreter is not tested with these versions.
    """
    if "triton" not in sys.modules:  # the variable may be that of a parent process that interprets
        os.environ[VARIABLE] = "1" if interpret else "0"
    try:
        import triton
        import triton.runtime.interpreter
    except ImportError as error:
        raise Unavailable(
            f"vLLM's kernels need Triton: pip install 'attnlab[triton]' ({error})"
        ) from error
    if interpret:
        check_pair(triton.__version__, np.__version__)
    if interpret != is_interpreting():
        done, wanted = ("compile", "1") if interpret else ("interpret", "0")
        raise Unavailable(
            f"Triton was imported to {done} in this process: set {VARIABLE}={wanted} before it is "
            "imported, or start a new process"
        )
    if interpret:
        os.environ[VARIABLE] = "1"  # parts of Triton that are imported later read it
        bind_libdevice(triton.runtime.interpreter)
    return triton


def launch(function: Any, args: Sequence[Any], kwargs: dict[str, Any], grid: Any) -> None:
    """Run a kernel's programs, in one or several processes, according to the current LaunchPlan."""
    kernel = function.fn if current_probe() is None else function.rewrite()
    names = _annotations(kernel)
    arguments = inspect.getcallargs(
        kernel, *args, **{k: v for k, v in kwargs.items() if k in names}
    )
    if is_recorded(kernel.__name__, arguments):
        return
    memory = Memory(arguments)
    has_types = any(hasattr(value, "block_shape") for value in arguments.values())
    with (
        prepared(kernel, arguments, (1, 1, 1), RunLog()) if has_types else nullcontext(),
        own_failures(),
    ):
        converted = {n: _converted(kernel, n, value, memory) for n, value in arguments.items()}
    sizes = tuple(grid(arguments) if callable(grid) else grid)
    sizes += (1,) * (3 - len(sizes))
    plan = current_plan() or LaunchPlan()
    plan.observed.launches.append(Launch(kernel=(name := kernel.__name__), grid=sizes))
    programs = [
        (x, y, z)
        for x, y, z in itertools.product(*map(range, sizes))
        if plan.needed(name, arguments, (x, y, z))
    ]

    probe = current_probe()
    if probe is not None:
        plan = replace(plan, processes=1)
        plan.observed.budget = probe.budget
    with _rerun_limited(plan.observed, name):
        _launch(function, arguments, converted, programs, sizes, plan)


@contextmanager
def _rerun_limited(observed: RunLog, kernel: str) -> Iterator[None]:
    """Raise KernelFailed in the block when a rerun takes longer than it may."""
    if observed.budget is not None or (budget := rerun_budget()) is None:
        yield
        return
    observed.budget = budget
    try:
        yield
    except TooLong:
        raise KernelFailed(f"{kernel} does not end in {budget.seconds:.3g} s") from None
    finally:
        observed.budget = None


def _launch(
    function: Any,
    arguments: dict[str, Any],
    converted: dict[str, Any],
    programs: list[Program],
    sizes: Program,
    plan: LaunchPlan,
) -> None:
    """Run programs together if possible, else one after another, in one or several processes."""
    from triton.runtime import interpreter

    probe = current_probe()
    log = None if probe is None else probe.begin(function, arguments, converted, sizes)
    if (
        (probe is None or not probe.records)
        and is_lockstep()
        and _run_together(function, arguments, converted, programs, sizes, plan, log)
    ):
        return
    trace: Trace | LaunchLog | None = log
    if log is None and plan.watched is not None:
        trace = Trace.of(plan.watched, arguments, plan.observed.reads)

    kernel = function.rewrite()

    def run(program: Program) -> None:
        interpreter.interpreter_builder.set_grid_idx(*program)
        recording: Any = nullcontext()
        if log is not None and probe is not None:
            recording = log.running(program, probe.codes, plan.observed)
        with recording, limited(plan.observed.budget):
            kernel(**converted)
        if trace is not None:
            trace.end()

    with prepared(kernel, arguments, sizes, plan.observed, trace=trace), own_failures():
        _run_all(run, programs, plan)


def _run_together(
    function: Any,
    arguments: dict[str, Any],
    converted: dict[str, Any],
    programs: list[Program],
    sizes: Program,
    plan: LaunchPlan,
    log: LaunchLog | None,
) -> bool:
    """Run the programs of a launch together; return False, and note why, if they must run one by one."""
    reads: Reads | ProgramAccesses | None = None if log is None else ProgramAccesses()
    if log is None and plan.watched is not None:
        trace = Trace.of(plan.watched, arguments, plan.observed.reads)
        reads = Reads(regions=trace.regions)
    kernel = function.fn
    together = Together(
        function=function,
        arguments=arguments,
        converted=converted,
        programs=programs,
        reads=reads,
        prepare=functools.partial(prepared, kernel, arguments, sizes),
        on_programs=plan.on_programs,
        observed=plan.observed,
        processes=plan.processes,
        alone_s=_ALONE_S,
    )
    why = together.run() if programs else ""
    if why:
        plan.observed.alone.setdefault(kernel.__name__, why)
    elif isinstance(reads, Reads):
        reads.add_to(plan.observed.reads)
    elif reads is not None and log is not None:
        for number, (loads, stores) in reads.in_order():
            log.add(programs[number], loads, stores)
    return not why


@contextmanager
def prepared(
    kernel: Any,
    arguments: Mapping[str, Any],
    sizes: Program,
    observed: RunLog,
    extension: Any = None,
    trace: Accesses | None = None,
) -> Iterator[None]:
    """Patch Triton's language for programs of a kernel in a grid of ``sizes``, inside the block."""
    from triton.runtime import interpreter

    form = _launched_type().of if extension is None else _together_form
    with (
        one_at_a_time(),
        language(interpreter, kernel, observed, form, Memory(arguments, trace), extension),
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns for an all-NaN slice
        warnings.filterwarnings("ignore", "tl.where with a non-boolean condition", UserWarning)
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        interpreter.interpreter_builder.set_grid_dim(*sizes)
        yield


def _together_form(function: Any) -> Any:
    """Return a function as a batch of programs runs it; Triton's own functions as they are."""
    found = _launched_type().of(function)
    return Form(found) if isinstance(found, _launched_type()) else found


def _converted(kernel: Any, name: str, value: Any, memory: Memory) -> Any:
    """Return an argument as the kernel receives it; its annotation may be constexpr or tl.int64.

    A tensor becomes its address in ``memory``.
    """
    from triton.runtime import interpreter

    asked = _annotations(kernel)[name]
    if asked == "constexpr":
        return value
    if asked == "i64" and isinstance(value, int):
        int64 = interpreter.tl.int64
        handle = interpreter.TensorHandle(np.array([value], dtype=np.int64), int64)
        return interpreter.tl.tensor(handle, int64)
    return _placed(interpreter, value, memory)


@functools.lru_cache(maxsize=256)
def _annotations(kernel: Any) -> dict[str, str]:
    """Return the parameters of a kernel, each with its type or "", as Triton names types."""
    from triton.runtime.jit import _normalize_ty

    found = inspect.get_annotations(kernel)
    return {
        name: _normalize_ty(found[name]) if found.get(name) is not None else ""
        for name in inspect.signature(kernel).parameters
    }


@functools.lru_cache(maxsize=4096)
def _scalar(interpreter: Any, value: int) -> Any:
    return interpreter._implicit_cvt(value)


def _placed(interpreter: Any, value: Any, memory: Memory) -> Any:
    """Return a value of a kernel with the addresses of its tensors in ``memory``, also in a tuple."""
    if type(value) is int:
        return _scalar(interpreter, value)
    if isinstance(value, tuple):
        return interpreter._tuple_create(
            value, [_placed(interpreter, one, memory) for one in value]
        )
    if isinstance(value, bool):  # Triton 3.6 and 3.7 make an integer of it
        handle = interpreter.TensorHandle(np.array([value]), interpreter.tl.int1)
        return interpreter.tl.tensor(handle, interpreter.tl.int1)
    converted = interpreter._implicit_cvt(value)
    base = value if isinstance(value, torch.Tensor) else getattr(value, "base", None)
    if isinstance(base, torch.Tensor):  # of a tensor descriptor, or of a tensor as another dtype
        handle = getattr(converted.handle, "base", converted.handle)
        handle.data = np.array([memory.address(base)], dtype=np.uint64)
    return converted


def _run_all(run: Callable[[Program], None], programs: list[Program], plan: LaunchPlan) -> None:
    """Run programs in this process for a short time, then split the rest over processes."""
    start, done = time.perf_counter(), 0
    while programs[done:] and (plan.processes == 1 or time.perf_counter() - start < _ALONE_S):
        run(programs[done])
        done += 1
        plan.on_programs(done, len(programs))
    rest = programs[done:]
    if not rest:
        return

    def part(first: int) -> RunLog:
        for program in rest[first :: plan.processes]:
            run(program)
        return plan.observed

    children = [fork(functools.partial(part, i)) for i in range(1, plan.processes)]
    mine = rest[:: plan.processes]
    try:
        for i, program in enumerate(mine, 1):
            run(program)
            plan.on_programs(done + i * len(rest) // len(mine), len(programs))
    except BaseException:  # on_programs may cancel the launch
        for child in children:
            child.kill()
        raise
    finally:
        ended = [child.result() for child in children]
    for observed, error in ended:
        if error is not None:
            raise error
        plan.observed.take(observed)


@contextmanager
def own_failures() -> Iterator[None]:
    """Raise Unavailable for an error of the lab's interpreter, or for what Triton's interpreter cannot run.

    It is no fault of the kernel: Triton's compiler has none of this code.
    """
    try:
        yield
    except AttnLabError:
        raise
    except Exception as error:
        why = _own_failure(error)
        if why:
            raise Unavailable(f"{why}: {type(error).__name__}: {error}") from error
        raise


def _own_failure(error: Exception) -> str:
    """Return what failed instead of the kernel, or "".

    The place of an error is its innermost frame outside NumPy and torch. Triton may lack what a kernel uses:
    an operation of the interpreter, or a function that was removed, such as ``tl.make_block_ptr``.
    """
    from triton.runtime import interpreter

    place, libraries = "", tuple(str(Path(str(one.__file__)).parent) for one in (np, torch))
    line = 0
    for frame, at in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(libraries):
            place, line = frame.f_code.co_filename, at
    triton = sys.modules["triton"]
    is_removed = isinstance(error, NotImplementedError) and Path(place).is_relative_to(
        Path(str(triton.__file__)).parent
    )
    lacking = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    is_missing = isinstance(lacking, interpreter.InterpreterBuilder) or (
        isinstance(lacking, ModuleType) and lacking.__name__.partition(".")[0] == "triton"
    )
    if is_removed or is_missing:
        return f"the interpreter of Triton {triton.__version__} cannot run this kernel"
    is_own = Path(place).parent == Path(__file__).parent
    return f"attnlab's own interpreter failed at {Path(place).name}:{line}" if is_own else ""
