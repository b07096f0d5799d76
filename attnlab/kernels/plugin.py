"""Backends of users: a function in a file or in a module, or an entry point of the group ``attnlab.kernels``.

The function takes a KernelCall and writes every row of ``call.output``. Its attributes describe it:

- ``op``: the op that it stands for, whose contract its callers keep (chunked_prefill_paged_decode).
- ``kv_cache_dtypes``: the cache dtypes that it supports (all).
- ``masks``: the values of ``Case.mask`` that it supports (causal); ``call.visibility`` has the rules.
- ``large_caches``: whether it runs without copying the cache, so that a check can use large ones (False).

A function with several parameters gets the call's tensors by the names of its arguments, those of vLLM,
FlashAttention and FlashInfer (:mod:`attnlab.kernels.by_name`), and returns the output or writes its argument
``output``. Unless it declares an op, it stands for unified_attention; without an argument for the starts of
the queries, a window, ALiBi or sinks, for decode_attention_fwd.

What is named may also be an op's record (:class:`attnlab.library.op.Op`), which states how the op is called,
what it requires and what it can. "library:NAME" names all records of a library of attnlab's. A name followed
by "(their_name=expression, …)" is an op without a record: its arguments are bound by their names, as the
records bind them, or by these expressions (:func:`attnlab.kernels.by_name.record_of`).

A function raises NotImplementedError for a call that it does not support. What it returns is ignored:

    def my_kernel(call):
        call.output.copy_(attention(call.query, ...))   # right: writes its result
        call.output[rows] = attention(...)              # right
        return attention(call.query, ...)               # wrong: writes nothing, and is reported

An exception of the function, sys.exit and os._exit are failures of the kernel.
"""

import builtins
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch

from attnlab.case.case import Case
from attnlab.case.errors import (
    AttnLabError,
    DeviceLost,
    InvalidCase,
    KernelFailed,
    KernelRejected,
    Unavailable,
    Unsupported,
)
from attnlab.case.fields import (
    ENTRY_POINT,
    MODULE_FUNCTION,
    check_plugin_file,
    library_of,
    package_of_backend,
    split_mapping,
)
from attnlab.case.masks import CAUSAL
from attnlab.case.ops import DEFAULT_OP, KV_CACHE_DTYPES, OPS, TRITON_OPS
from attnlab.case.platforms import PLATFORMS, Platform
from attnlab.contracts.contract import Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput
from attnlab.kernels.binding import bind, finish, lse_of, new_empty_is_scratch
from attnlab.kernels.by_name import ByName, kernel_of, record_of
from attnlab.kernels.replaced import replacing
from attnlab.kernels.triton.coverage import is_measuring, note_arguments
from attnlab.kernels.triton.interpreter import (
    NO_DRIVER,
    VARIABLE,
    interpret_if_possible,
    interpreted_triton,
    interpreting,
)
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching
from attnlab.kernels.triton.run_log import Watched
from attnlab.kernels.vllm.backend import is_stated, one_line
from attnlab.kernels.vllm.features import check_case, has_op, not_applicable
from attnlab.kernels.vllm.loader import Loader, OnCpu, package_stubs
from attnlab.kernels.vllm.op_arguments import argument_facts, parameters_of, pass_argument
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.library.op import Op, ops_of
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import strided

# Contain a user's code: it cannot end attnlab, and its exceptions name the line of the user's file.
#
# ``sys.exit``, ``os._exit`` and a KeyboardInterrupt that the code raises itself become UserCodeFailed.
# Ctrl-C still interrupts.


class UserCodeFailed(Exception):
    """A user's code tried to end the process; the text says how."""


class _Exit(BaseException):
    """Replaces the end of the process by os._exit."""


@contextmanager
def contained() -> Iterator[None]:
    """Run a user's code; raise UserCodeFailed if it tries to end the process."""
    with _noted_interrupt() as interrupted, _no_exit():
        try:
            yield
        except SystemExit as error:
            raise UserCodeFailed(f"SystemExit: {error.code}") from error
        except _Exit as error:
            raise UserCodeFailed(str(error)) from error
        except KeyboardInterrupt as error:
            if interrupted.is_set():
                raise
            raise UserCodeFailed("KeyboardInterrupt") from error


@contextmanager
def _noted_interrupt() -> Iterator[threading.Event]:
    """Yield an event that is set if the user presses Ctrl-C while the block runs."""
    interrupted = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupted  # the signal does not raise KeyboardInterrupt in this thread
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _no_exit() -> Iterator[None]:
    """Let os._exit raise in this process; child processes still end."""
    real, process = os._exit, os.getpid()

    def refused(status: int) -> NoReturn:
        if os.getpid() != process:
            real(status)
        raise _Exit(f"os._exit({status})")

    with replacing(os, _exit=refused):
        yield


def text_of(error: BaseException, file: str | None) -> str:
    """Return an exception in one line, as "mine.py:12: ValueError: text".

    The line is the last one in ``file``, or in a file of the same folder, that was running.
    """
    own = isinstance(error, UserCodeFailed)
    text = " ".join(str(error).split())
    text = text if own else f"{type(error).__name__}: {text}".removesuffix(": ")
    traced = error.__cause__ if own and error.__cause__ is not None else error
    return f"{_line_of(traced, file)}{text}"


def _line_of(error: BaseException, file: str | None) -> str:
    """Return "mine.py:12: ", or "" if no frame of the exception is in the folder of ``file``."""
    if file is None:
        return ""
    folder, found = Path(file).resolve().parent, ""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{Path(error.filename).name}:{error.lineno}: "
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.resolve().parent == folder:
            found = f"{path.name}:{line}: "
    return found


GROUP = "attnlab.kernels"
Kernel = Callable[[KernelCall], Any]
NO_INTERPRETER = f"needs a GPU or Triton's interpreter: set {VARIABLE}=1 before Triton is imported"
_NO_LARGE_CACHES = (
    "block offsets beyond 2^31 elements: set large_caches = True on a kernel that copies no cache"
)
# By name, file, and time of its last change: a relative name may be of another file in another folder.
_LOADED: dict[tuple[str, str | None, int], Kernel] = {}


@dataclass(frozen=True, kw_only=True)
class PluginBackend(Backend):
    """A user's function.

    ``spec`` is "FILE.py:FUNCTION", "MODULE:FUNCTION", either with "(their_name=expression, …)", or
    "plugin:NAME" for an entry point, or "library:NAME"; ``function``: what it names, None to load it.
    ``stands_for``: the op, None for what the function declares. ``path``: the source of a library, None for
    the installed package. Raises InvalidCase if ``spec`` cannot be resolved or the function does not declare
    a known op.
    """

    spec: str
    function: Kernel | None = field(default=None, compare=False)
    stands_for: str | None = None
    path: Path | str | None = None

    traces_reads = True

    @property
    def name(self) -> str:
        return self.spec

    def __post_init__(self) -> None:
        """Load the function and check its attributes, or the records, which become ops."""
        for record in self.records:
            if record.result is None and not record.parameters("output"):
                text = f"{record.name} must state a result, or a parameter whose value is output"
                raise InvalidCase(f"{text}, got neither", field="op")
            known = OPS.get(record.name, record)
            if (known.library, known.module) != (record.library, record.module):
                raise InvalidCase(f"{self.name}: name must be new, got {record.name}", field="op")
            OPS[record.name] = record  # of a file that has changed, the new one
        if self.function is None and not self.records and isinstance(self.kernel, ByName):
            self.kernel.check(self.name)
        if not self.records and self.stands_for is None and self.op not in TRITON_OPS:
            raise InvalidCase(
                f"{self.name}: op must be one of {', '.join(TRITON_OPS)}, got {self.op!r}",
                field="op",
            )

    @cached_property
    def records(self) -> tuple[Op, ...]:
        """Return the records that the spec names; none for a function."""
        package = package_of_backend(self.spec)
        if library_of(self.spec) is not None and package is not None:
            return tuple(op for op in ops_of(package.name) if op.is_triton)
        name, mapping = split_mapping(self.spec)
        if mapping is not None:
            return (self._unknown(name, mapping),)
        found = load_kernel(self.spec) if self.function is None else self.function
        return (found,) if isinstance(found, Op) else ()

    def _unknown(self, name: str, mapping: Mapping[str, str]) -> Op:
        """Return a record of an op that has none."""
        where, _, function = name.rpartition(":")
        module = where if self.source is None else where.rpartition(".")[2]
        module = Path(where).stem if where.endswith(".py") else module
        package = module if self.source is None else self.source.package.name
        made = Op(
            name=f"{module.rpartition('.')[2]}.{function}",
            summary=f"{name}, whose arguments are bound by their names",
            library=package.partition(".")[0],
            module=module,
            python_name=function,
            new_tokens_from="cache",
            cache_layout="flash",
        )
        return record_of(self.function_of(made), made, mapping)

    @cached_property
    def kernel(self) -> Kernel:
        """Return the function of a KernelCall; of records, the function of the first."""
        if self.records:
            return self.function_of(self.records[0])
        # Of a KernelCall if it has one parameter.
        function = self.function or load_kernel(self.spec)
        try:
            count = len(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            return function
        is_kernel = isinstance(function, ByName)
        return function if count < 2 or is_kernel else kernel_of(function)

    @cached_property
    def source(self) -> Source | None:
        """Return the source of a library; None for records of modules that Python can import."""
        package = package_of_backend(self.spec)
        is_known = library_of(self.spec) is not None or self.path is not None
        return find_source(self.path, package) if package is not None and is_known else None

    @property
    def op_source(self) -> Source | None:
        return self.source

    def function_of(self, op: Op, platform: Platform | None = None) -> Callable[..., Any]:
        """Return the function of an op's record, as its package is on a platform, or on one that it has."""
        file = split_mapping(self.spec)[0].rpartition(":")[0]
        beside = Path(file).parent / f"{op.module}.py"  # of the file that has the record
        if self.source is None and beside.is_file():
            return load_kernel(f"{beside}:{op.function}")
        if self.source is None:
            return _of_module(op.module, op.function)
        place = (op.module, op.function, is_measuring())
        if platform is not None:
            return source_function(self.source, platform, *place)
        try:
            return source_function(self.source, PLATFORMS["sm_90"], *place)
        except Unavailable:  # of modules for AMD's GPUs alone
            return source_function(self.source, PLATFORMS["gfx942"], *place)

    @property
    def file(self) -> str | None:
        """Return the file that defines the function, or None if it has none, or is an op of a source."""
        if self.source is not None:
            return None
        kernel = self.kernel.function if isinstance(self.kernel, ByName) else self.kernel
        code = getattr(inspect.unwrap(kernel), "__code__", None)
        return None if code is None else str(code.co_filename)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process loads the function again.
        made = partial(PluginBackend, spec=self.spec, stands_for=self.stands_for, path=self.path)
        return made, ()

    @property
    def op(self) -> str:
        """Return the op that the function stands for."""
        if self.records:
            return self.records[0].name
        own: str = getattr(self.kernel, "op", DEFAULT_OP)
        return self.stands_for or own

    def fixed_fields(self, op: str) -> tuple[str, ...]:
        kernel = None if self.records else self.kernel
        return kernel.fixed_fields if isinstance(kernel, ByName) else super().fixed_fields(op)

    @property
    def declares_op(self) -> bool:
        """Return whether the function says which op it stands for."""
        if self.records or self.stands_for is not None:
            return True
        kernel = self.kernel.function if isinstance(self.kernel, ByName) else self.kernel
        return hasattr(kernel, "op")

    @property
    def device(self) -> str:
        kernel = None if self.records else self.kernel
        is_compiled = isinstance(kernel, ByName) and kernel.is_compiled
        is_native = is_compiled and self.source is None and torch.cuda.is_available()
        return "cuda" if is_native else "cpu"

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.records) or (self.op,)

    @property
    def version(self) -> str:
        return self.name if self.source is None else self.source.text()

    @property
    def flags(self) -> tuple[str, ...]:
        return () if self.path is None else ("--source", str(self.path))

    @property
    def states_limits(self) -> bool:
        return self.source is not None

    def check_features(self, case: Case) -> None:
        if self.source is not None:
            check_case(self.source, case)

    def has_op(self, op: str) -> bool:
        return super().has_op(op) and (self.source is None or has_op(self.source, op))

    def not_applicable(self, op: str) -> list[str]:
        return [] if self.source is None else not_applicable(self.source, op)

    @property
    def kv_cache_dtypes(self) -> tuple[str, ...]:
        return tuple(self._declared("kv_cache_dtypes", KV_CACHE_DTYPES))

    @property
    def masks(self) -> tuple[str, ...]:
        of_records = [mask for op in self.records for mask in op.masks]
        return tuple(dict.fromkeys([CAUSAL, *self._declared("masks", of_records)]))

    @property
    def large_caches(self) -> bool:
        return self.source is not None or bool(self._declared("large_caches", False))

    def _declared(self, name: str, default: Any) -> Any:
        """Return what the function declares; of records the default, for each states its own."""
        return default if self.records else getattr(self.kernel, name, default)

    @property
    def blind_spots(self) -> tuple[str, ...]:
        return () if self.large_caches else (_NO_LARGE_CACHES,)

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        """Run the function; its Triton kernels, on a CPU, under the lab's interpreter.

        That includes kernels of modules that it imports.
        Raises KernelFailed with what the function raises and its line, or if it returns its result instead
        of writing it; Unsupported for its NotImplementedError; DeviceLost if it broke the GPU's context.
        """
        call = strided(call)
        plan = LaunchPlan(watched=Watched.of(call) if options.trace_reads else None)
        before = None if call.spec.writes_cache else call.buffer.clone()
        on_cpu = contextlib.nullcontext() if self.source is None else OnCpu()
        try:
            with launching(plan), interpreting(), contained(), on_cpu:
                returned = self._call(call, target, plan, options.argument_of)
                if self.device == "cuda":
                    torch.cuda.synchronize()  # raises what the kernels raise
        except AttnLabError:
            raise
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error).splitlines()[0]) from error
        except NotImplementedError as error:
            raise Unsupported(f"{self.name} does not support this call: {error}") from error
        except Exception as error:
            if NO_DRIVER.search(str(error)) and not torch.cuda.is_available():
                raise Unavailable(
                    f"{self.name} launches a Triton kernel, which {NO_INTERPRETER}"
                ) from error
            source = self.source
            if source is not None and is_stated(error, source):
                raise KernelRejected(one_line(error)) from error
            file = self.file if source is None else str(source.op_file(call.spec.module))
            raise KernelFailed(text_of(error, file)) from error
        if before is not None and _is_result(returned, call) and same_bits(before, call.buffer):
            raise KernelFailed(
                f"{self.name} returned a tensor and wrote nothing; it must write its result to "
                "call.output, for example call.output.copy_(result)"
            )
        is_traced = options.trace_reads and bool(plan.observed.launches)
        return RunOutput(log=plan.observed, is_traced=is_traced)

    def _call(
        self, call: KernelCall, target: Target, plan: LaunchPlan, argument_of: Case | None
    ) -> Any:
        """Run the function, or the op of the call as its record states; return what a function returned."""
        if not self.records:
            return self.kernel(call)
        function = self.function_of(OPS[call.op], target.platform)
        arguments = bind(function, call, target)
        if argument_of is not None:
            arguments = pass_argument(argument_of, arguments, parameters_of(function)).arguments
        if is_measuring():
            note_arguments(argument_facts(function, arguments))
        with new_empty_is_scratch():
            returned = function(**arguments)
        finish(call, target, arguments, returned)
        plan.observed.lse = lse_of(call, target, arguments, returned)
        return None


def _is_result(returned: Any, call: KernelCall) -> bool:
    """Answer whether a function returned a tensor, or several, of which one has the shape of the output."""
    tensors = returned if isinstance(returned, tuple | list) else (returned,)
    return any(isinstance(t, torch.Tensor) and t.shape == call.buffer.shape for t in tensors)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Answer whether two tensors have the same bytes; NaN equals NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@lru_cache(maxsize=16)
def source_function(
    source: Source, platform: Platform, module: str, function: str, is_marked: bool
) -> Callable[..., Any]:
    """Return a function of a package that is not imported, with the lab's Triton."""
    stubs = package_stubs(source.package, platform, interpreted_triton())
    found = getattr(Loader(source, stubs, is_marked).load(module), function, None)
    if not callable(found):
        raise Unsupported(f"{module} of {source.text()} has no function {function}")
    return found  # type: ignore[no-any-return]


def load_kernel(name: str) -> Kernel:
    """Return the function of "FILE.py:FUNCTION", "MODULE:FUNCTION" or "plugin:NAME"; a file runs once
    until it changes.
    """
    if ENTRY_POINT.fullmatch(name):
        spec, attribute = _entry_point(name.partition(":")[2])
    elif MODULE_FUNCTION.fullmatch(name):
        return _of_module(*name.split(":"))
    else:
        spec, attribute = _file(name)
    changed = Path(spec.origin).stat().st_mtime_ns if spec.origin and spec.has_location else 0
    key = (name, spec.origin, changed)
    if key not in _LOADED:
        _LOADED[key] = _function(spec, attribute)
    return _LOADED[key]


def entry_points() -> dict[str, str]:
    """Return the installed kernels: the name of each entry point and its "MODULE:FUNCTION"."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}


class _SourceLoader(SourceFileLoader):
    """Runs the text of a file: its bytecode may be of another text that was written in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _file(name: str) -> tuple[ModuleSpec, str]:
    """Return the module of "FILE.py:FUNCTION" and the function's name."""
    path = check_plugin_file(name)
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # the file may import its neighbours, also when it is called
        sys.path.append(folder)
    loader = _SourceLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    return spec, name.rpartition(":")[2]


def _of_module(name: str, attribute: str) -> Kernel:
    """Return a function of a module that Python can import, as it is without a recorder's wrapper."""
    interpret_if_possible()
    try:
        with contained(), _importing_from(os.getcwd()):
            module = importlib.import_module(name)
    except Exception as error:
        text = text_of(error, None)
        raise InvalidCase(
            f"module {name} of backend cannot be imported: {text}", field="backend"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise InvalidCase(f"{name} must have a function {attribute!r}", field="backend")
    kernel: Kernel = inspect.unwrap(found)
    return kernel


@contextmanager
def _importing_from(folder: str) -> Iterator[None]:
    """Let the block import modules of a folder, after those that Python finds elsewhere."""
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _entry_point(name: str) -> tuple[ModuleSpec, str]:
    """Return the module of an entry point and the function's name."""
    known = entry_points()
    if name not in known:
        found = ", ".join(sorted(known)) or "none is installed"
        raise InvalidCase(
            f"backend must be an entry point of group {GROUP} ({found}), got {name!r}"
        )
    module, _, attribute = known[name].partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        raise InvalidCase(f"backend {name} cannot be imported: {error}", field="backend") from error
    if spec is None:
        raise InvalidCase(
            f"backend {name} must be in a module that exists, got {module}", field="backend"
        )
    return spec, attribute.partition("[")[0].strip()


def _function(spec: ModuleSpec, attribute: str) -> Kernel:
    """Run the module of a spec and return its function."""
    module = importlib.util.module_from_spec(spec)
    interpret_if_possible()
    if not torch.cuda.is_available():
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    try:
        assert spec.loader is not None
        with contained():
            spec.loader.exec_module(module)
    except AttnLabError:
        raise
    except Exception as error:
        text = text_of(error, spec.origin)
        raise InvalidCase(f"{spec.origin} cannot run: {text}", field="backend") from error
    found = getattr(module, attribute, None)
    if not callable(found) and not isinstance(found, Op):
        raise InvalidCase(f"{spec.origin} must have a function {attribute!r}", field="backend")
    kernel: Kernel = found
    return kernel


def _import(name: str, *rest: Any, **named: Any) -> Any:
    """Replace ``__import__`` in a user's file on a CPU: its ``triton`` is the lab's interpreter.

    So its kernels need no TRITON_INTERPRET. Modules that the file imports get Triton's own.
    """
    if name.partition(".")[0] != "triton":
        return builtins.__import__(name, *rest, **named)
    lab_triton = interpreted_triton()
    found = builtins.__import__(name, *rest, **named)
    return lab_triton if found.__name__ == "triton" else found
