"""Backend ``vllm``: vLLM's own Triton attention ops, natively on a GPU or under Triton's interpreter.

The platform is simulated as far as the ops ask for it: ``current_platform`` reports the FP8 format and
the capability of the Case's platform, and the lab's dispatch answers ``use_rocm_custom_paged_attention``.
If the dispatch chooses the ROCm kernel, ``ops.paged_attention_rocm`` is replaced by its source on the
emulated device, or by the lab's model of it if this vLLM has no csrc/rocm (a wheel has none) or the
platform is not emulated.
"""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import (
    AttnLabError,
    KernelFailed,
    KernelRejected,
    OutOfMemory,
    Unavailable,
    Unsupported,
)
from attnlab.case.fields import refuse
from attnlab.case.masks import MASKS
from attnlab.case.ops import OPS, RELEASES, TRITON_OPS
from attnlab.case.platforms import PLATFORMS, Platform
from attnlab.contracts.contract import ROCM_DECODE, Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput, check_release
from attnlab.kernels.binding import bind, finish, lse_of
from attnlab.kernels.child_process import end_with_parent
from attnlab.kernels.model import paged_attention_rocm
from attnlab.kernels.replaced import replacing
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.coverage import is_measuring, note_arguments
from attnlab.kernels.triton.interpreter import check_installed_pair
from attnlab.kernels.triton.launch_plan import LaunchPlan, Subset, launching, needed
from attnlab.kernels.triton.run_log import RunLog, Watched, raised_in
from attnlab.kernels.vllm.features import (
    check_case,
    has_op,
    lacks,
    missing_scales,
    names_inside,
    not_applicable,
)
from attnlab.kernels.vllm.loader import Dispatch, Loader, make_stubs
from attnlab.kernels.vllm.op_arguments import (
    Passed,
    argument_facts,
    parameters_of,
    pass_argument,
    with_function,
)
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import hollow_call, presented
from attnlab.tensors.formats import FORMATS, read_format

# Failures of vLLM's ops: refused by the op itself, failed to compile or run, or not possible here.

# Triton's exceptions of a kernel that cannot be compiled for a GPU, or does not fit on it.
_COMPILE_ERRORS = {"CompilationError", "OutOfResources", "PTXASError"}
# Where Triton's compiler raises other exceptions, such as RuntimeError("PassManager::run failed").
_COMPILER_FILES = re.compile(r"/triton/(language|compiler|backends/\w+)/\w+\.py$")
_STATED = (ValueError, AssertionError, NotImplementedError)


def explained(error: Exception, op: str, source: Source) -> AttnLabError:
    """Translate an exception of the op with a name into an error of the lab.

    - KernelRejected: the op's own Python code refuses the call before a launch, a limit that it states.
    - KernelFailed: the kernel does not compile, or Python or Triton raises in its code.
    - OutOfMemory: the device has too little memory.
    - Unavailable: this machine cannot run it.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return OutOfMemory(f"{op} of {source.text()} runs out of memory: {one_line(error)}")
    if is_compile_failure(error):
        return KernelFailed(one_line(root_of(error)))
    if is_stated(error, source):
        return KernelRejected(one_line(error))
    # Raised by Triton, or by the op's arithmetic.
    if isinstance(error, (*_STATED, ArithmeticError)):
        return KernelFailed(one_line(error))
    return Unavailable(f"{op} of {source.text()} cannot run here: {one_line(error)}")


@contextmanager
def calling(op: str, source: Source, plan: LaunchPlan | None = None) -> Iterator[None]:
    """Call an op of a source in the block, with a plan of its launches; translate what it raises."""
    try:
        with launching(plan or LaunchPlan()):
            yield
    except AttnLabError:
        raise
    except Exception as error:
        raise explained(error, op, source) from error


def is_stated(error: Exception, source: Source) -> bool:
    """Answer whether an op's own Python code refuses a call before a launch, a limit that it states."""
    return isinstance(error, _STATED) and raised_in(error).is_relative_to(source.root)


def is_compile_failure(error: BaseException) -> bool:
    """Answer whether Triton's compiler rejects a kernel for a GPU."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if any(f"triton.{name}" in names for name in _COMPILE_ERRORS):
        return True
    return isinstance(error, RuntimeError) and bool(
        _COMPILER_FILES.search(raised_in(error).as_posix())
    )


def root_of(error: BaseException) -> BaseException:
    """Return the exception that Triton's CompilationErrors wrap, one for each called function."""
    while type(error).__name__ == "CompilationError":
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def one_line(error: BaseException) -> str:
    """Return the text of an exception in one line; of a CompilationError only its last line.

    The lines before it are an excerpt of the kernel.
    """
    text = str(error)
    if type(error).__name__ == "CompilationError":
        text = str(getattr(error, "error_message", None) or text.strip().rpartition("\n")[2])
    return " ".join(text.split()) or type(error).__name__


# What vLLM's ops cannot run natively on a GPU, stated before anything is allocated.

_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_fp8_format(case: Case) -> None:
    """Raise InvalidCase if the Case has numbers in AMD's FP8 format and the GPU is of another vendor.

    Triton compiles the format for AMD GPUs of the series gfx94 alone.
    """
    if torch.version.hip is not None:
        return
    e4m3 = case.machine.fp8_e4m3
    used = {read_format(case.kv_cache_dtype, FORMATS[case.dtype].dtype, e4m3).dtype}
    if case.argument.has_fp8:
        used.add(FORMATS[e4m3].dtype)
    if used & set(_FNUZ):
        others = [one.name for one in PLATFORMS.values() if one.fp8_e4m3 != e4m3]
        refuse("platform", f"one of {', '.join(others)} with FP8 on this GPU", case.platform)


def rocm_decode(
    call: KernelCall, target: Target, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Replace ``ops.paged_attention_rocm``: call its source, or the lab's model of it.

    The names of its first parameters are the same since vLLM 0.9: out, exp_sum, max_logits, tmp_out, query,
    key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, query_start_loc, block_size,
    max_seq_len, alibi_slopes, kv_cache_dtype, … (vllm/_custom_ops.py).
    """
    first = ("out", "exp_sum", "max_logits", "tmp_out", "query", "key_cache", "value_cache")
    rest = ("num_kv_heads", "scale", "block_tables", "seq_lens", "query_start_loc", "block_size")
    last = ("max_seq_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale")
    given = {**dict(zip(first + rest + last, args, strict=False)), **kwargs}
    tensors = {
        name: given[name].cpu()
        for name in ("query", "key_cache", "value_cache", "seq_lens", "query_start_loc")
    }
    if "fp8" in given["kv_cache_dtype"]:
        tensors |= {name: tensors[name].view(torch.uint8) for name in ("key_cache", "value_cache")}
    slopes = given["alibi_slopes"]
    translated = dataclasses.replace(
        call,
        **tensors,
        output=given["out"].cpu(),
        block_table=given["block_tables"].cpu(),
        alibi_slopes=None if slopes is None else slopes.cpu(),
        key=call.key.cpu(),
        value=call.value.cpu(),
        max_seq_len=given["max_seq_len"],
        kv_cache_dtype=given["kv_cache_dtype"],
        k_scale=float(given["k_scale"]),
        v_scale=float(given["v_scale"]),
        sm_scale=given["scale"],
    )
    if rocm_source.emulates(source, target.platform):
        rocm_source.run(translated, target, source)
    else:
        paged_attention_rocm(translated, target)
    given["out"].copy_(translated.output)


ALL = Subset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The ops of one source on one platform."""

    loader: Loader
    dispatch: Dispatch

    def function(self, op: str) -> Callable[..., None]:
        """Return the op; raise Unsupported if the release has none."""
        named = OPS[op]
        module = self.loader.load(named.module)
        found: Callable[..., None] | None = getattr(module, named.function, None)
        if found is None:
            raise Unsupported(f"{named.module} of this vLLM has no function {named.function}")
        return found


@dataclass(frozen=True, kw_only=True)
class VllmBackend(Backend):
    """vLLM's Triton ops.

    ``path`` is a wheel, an sdist or a checkout, None for the installed vLLM. ``requested_device`` is
    "cuda", "cpu", or None for the GPU if torch can use one.
    """

    path: Path | str | None = None
    requested_device: str | None = None

    name = "vllm"
    ops = TRITON_OPS
    traces_reads = True
    states_limits = True
    masks = tuple(MASKS)

    @cached_property
    def source(self) -> Source:
        """Return the vLLM, found on first use; raise InvalidCase or Unavailable if there is none."""
        return find_source(self.path)

    @property
    def op_source(self) -> Source:
        return self.source

    @property
    def device(self) -> str:
        """Return "cuda" or "cpu".

        Raises Unavailable for a requested GPU that torch does not see, and on a CPU for versions of Triton
        and NumPy that the interpreter is not tested with.
        """
        if self.requested_device == "cuda" and not torch.cuda.is_available():
            raise Unavailable("device must be cpu here, got cuda: torch sees no GPU")
        device = self.requested_device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cpu":
            check_installed_pair()
        return device

    @property
    def version(self) -> str:
        text = self.source.text()
        return f"{text} on {torch.cuda.get_device_name()}" if self.device == "cuda" else text

    @property
    def flags(self) -> tuple[str, ...]:
        source = () if self.path is None else ("--source", str(self.path))
        return (*source, "--device", self.device)

    @property
    def is_deterministic(self) -> bool:
        """Answer whether Triton's interpreter runs the kernels, one program after another."""
        return self.device == "cpu"

    @property
    def release(self) -> str:
        return self.source.rules or RELEASES[-1]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float16", "bfloat16") if self.device == "cuda" else tuple(DTYPE_BYTES)

    @property
    def blind_spots(self) -> tuple[str, ...]:
        if self.device == "cuda":
            return (
                "float32 on a GPU, whose dot products use TF32",
                "which slots are read, and out-of-bounds accesses: only the interpreter records them",
            )
        return ("races, registers and compiler faults: Triton's interpreter has none",)

    def check(self, case: Case) -> None:
        super().check(case)
        if self.device == "cuda":
            check_fp8_format(case)
        check_runs(self.device, _subset(RunOptions.of(case)), case.trace_reads)
        check_release(self.source, case)
        self.check_features(case)

    def check_features(self, case: Case) -> None:
        check_case(self.source, case)

    def has_op(self, op: str) -> bool:
        return op in self.ops and has_op(self.source, op)

    def has_splits(self, op: str) -> bool:
        return OPS[op].num_splits is not None and not lacks(self.source, op, "num_splits", "")

    def not_applicable(self, op: str) -> list[str]:
        return not_applicable(self.source, op)

    def missing_scales(self, case: Case) -> dict[str, tuple[str, ...]]:
        return missing_scales(self.source, case)

    def text(self, kernels: Sequence[str], target: Target) -> str:
        return backend_text(self.source, kernels, self.device, target.platform)

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        subset = _subset(options, call.num_queries_per_kv)
        log = run(
            call,
            target,
            kernels,
            self.source,
            subset,
            lambda done, total: options.on_step("kernels", done, total),
            self.device,
            options.trace_reads,
            options.argument_of,
            options.value_scale,
        )
        return RunOutput(log=log, is_traced=options.trace_reads)


def _subset(options: RunOptions, num_queries_per_kv: int = 1) -> Subset:
    """Return the part of a call that the options ask for."""
    return Subset(group=num_queries_per_kv, kv_heads=options.kv_head_range, seqs=options.seq_range)


def backend_text(source: Source, kernels: Sequence[str], where: str, platform: Platform) -> str:
    """Describe what ran: the source, on which device, and which kernel was replaced by a model."""
    how = torch.cuda.get_device_name() if where == "cuda" else "Triton interpreter"
    if ROCM_DECODE not in kernels:
        return f"{source.text()}, {how}"
    real = rocm_source.emulates(source, platform)
    decode = "csrc/rocm, emulated device" if real else "model"
    return f"{source.text()}, {how}; ROCm decode: {decode}"


def run(
    call: KernelCall,
    target: Target,
    kernels: Sequence[str],
    source: Source,
    share: Subset = ALL,
    on_programs: Callable[[int, int], None] = lambda done, total: None,
    where: str = "cpu",
    watch: bool = False,
    argument_of: Case | None = None,
    value_scale: torch.Tensor | None = None,
) -> RunLog:
    """Run the real op, or some heads or sequences of it, into ``call.output``.

    ``where`` is "cuda" for a GPU, "cpu" for Triton's interpreter. ``watch`` records which slots the programs
    load. ``argument_of``, ``value_scale``: as in RunOptions. Returns what was recorded, on a GPU only the LSE
    and padded rows. Raises KernelRejected with what the op raises, Unavailable if it cannot run here.
    """
    check_runs(where, share, watch)
    loaded = load(source, target.platform, where, is_measuring())
    is_cpu = where == "cpu"
    output = interpreter.shared_copy(call.buffer) if is_cpu else call.buffer.to(where)
    tensors: dict[str, Any] = {**_on_device(call, target, where), "output": output}
    moved = presented(dataclasses.replace(call, **tensors))
    if is_cpu and moved.output is not output:
        moved = dataclasses.replace(moved, output=interpreter.shared_copy(moved.buffer))
    function = loaded.function(call.op)
    passed = Passed(arguments=bind(function, moved, target, names_inside(source, call.op)))
    if argument_of is not None:
        names = parameters_of(function)
        passed = pass_argument(argument_of, passed.arguments, names, value_scale)
        function, passed = with_function(loaded.loader, function, passed)
    if is_measuring():
        note_arguments(argument_facts(function, passed.arguments))
    loaded.dispatch.use_custom = ROCM_DECODE in kernels
    loaded.dispatch.rocm_decode = lambda *args, **kwargs: rocm_decode(
        moved, target, source, args, kwargs
    )
    # Other processes write no scratch memory that an op allocates.
    is_shared = len(call.spec.writes) == 1 and not call.spec.own_splits and argument_of is None
    plan = LaunchPlan(
        needed=lambda kernel, args, program: is_measuring() or needed(kernel, args, program, share),
        processes=interpreter.cores() if is_shared else 1,
        on_programs=on_programs,
        watched=Watched.of(moved) if watch else None,
    )
    try:
        with calling(call.op, source, plan):
            returned = function(**passed.arguments)
            if passed.finish is None:
                finish(moved, target, passed.arguments, returned)
            else:
                passed.finish(moved.buffer)
            lse = lse_of(moved, target, passed.arguments, returned)
            plan.observed.lse = None if lse is None else lse.cpu()
    finally:
        loaded.dispatch.use_custom = False
        loaded.dispatch.rocm_decode = Dispatch().rocm_decode  # which holds no call
        call.buffer.copy_(moved.buffer[: len(call.buffer)])
    plan.observed.padded = moved.buffer[len(call.buffer) :].cpu() if call.padding else None
    return plan.observed


def check_runs(where: str, share: Subset, watch: bool) -> None:
    """Raise Unavailable for a run that is impossible on this device."""
    if where == "cuda":
        if watch:
            raise Unavailable("trace_reads must be false on a GPU: reads are not recorded there")
        if share.kv_heads is not None or share.seqs is not None:
            raise Unavailable(
                "kv_head_range and seq_range must be none on a GPU: only Triton's interpreter can run "
                "a part of a call"
            )


def load(source: Source, platform: Platform, device_type: str, is_marked: bool = False) -> Loaded:
    """Return the ops of a source, loaded for a platform; they read its facts when they load.

    The same arguments give the same modules. ``is_marked``: their functions record what runs.
    """
    return _load(source, platform, device_type, is_marked)


@lru_cache(maxsize=16)
def _load(source: Source, platform: Platform, device_type: str, is_marked: bool) -> Loaded:
    interpret = device_type == "cpu"
    triton = interpreter.interpreted_triton() if interpret else interpreter.load_triton(False)
    dispatch = Dispatch()
    stubs = make_stubs(platform, triton, dispatch, interpret)
    return Loaded(loader=Loader(source, stubs, is_marked), dispatch=dispatch)


def load_stock(source: Source, platform: Platform) -> Loaded:
    """Return the ops with Triton's own interpreter, for benchmarks and comparisons."""
    dispatch = Dispatch()
    stubs = make_stubs(platform, interpreter.load_triton(True), dispatch, interpret=True)
    return Loaded(loader=Loader(source, stubs), dispatch=dispatch)


def _on_device(call: KernelCall, target: Target, where: str) -> dict[str, torch.Tensor]:
    """Return the call's tensors on the device; stage wrapper_cast converts the index tensors."""
    moved = {}
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if isinstance(value, torch.Tensor) and field.name != "output":
            moved[field.name] = value.to(where)
    if target.wrapper_cast:
        for name in ("block_table", "seq_lens", "query_start_loc"):
            moved[name] = moved[name].to(torch.int32)
    return moved


# Compile the Triton kernels of many Cases at once, in parallel, without running them and without a GPU.
#
# Which specialisations the Cases need is found by calling the ops while Triton compiles and launches nothing;
# that takes about 10 ms per Case. Each specialisation is then compiled once, by one of several processes,
# into Triton's cache, where later runs on a GPU find it.

_WORK: list[tuple[Any, str]] = []  # of a forked process


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a precompilation did: kernels by name, seconds, and one line for each that failed."""

    kernels: dict[str, int]
    processes: int
    seconds: float
    failures: tuple[str, ...]


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

    with replacing(knobs.runtime, jit_cache_hook=keep):
        for case in cases:
            _call_op(case, source)
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
    target = GPUTarget("cuda", int(platform.removeprefix("sm_")), 32)
    device = SimpleNamespace(  # a driver that knows its target and can do nothing else
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
    )
    driver.set_active(device)
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
