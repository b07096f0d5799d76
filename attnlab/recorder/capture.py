"""Capture: record the attention calls of a program while it runs, without changing it."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch

from attnlab.case.fields import refuse
from attnlab.case.ops import UNIFIED
from attnlab.case.platforms import platform_of
from attnlab.kernels.backend import Backend
from attnlab.kernels.by_name import kernel_of
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.run_call import backend_of_origin, spec_of
from attnlab.kernels.triton.interpreter import noting_bfloat16
from attnlab.recorder.arguments import (
    BoundArguments,
    Reading,
    RecordedOp,
    binder,
    call_of_reading,
    keep_plan,
    release_of,
    with_plan,
)
from attnlab.recorder.chains import follow, reading_of, readings_of
from attnlab.recorder.failing_side import CHAIN, Comparison
from attnlab.recorder.ops import (
    arguments_of_launch,
    copy_write,
    copy_written,
    op_of_launch,
    recorded_ops,
    signature_of,
    write_of_reading,
)
from attnlab.recorder.patches import Function, Patches, by_module
from attnlab.recorder.records import run_by_record
from attnlab.recorder.snapshot import copied, copies, copy_fields, each_block_once
from attnlab.tensors.call import STOCK_BFLOAT16, KernelCall, Origin
from attnlab.tensors.call_file import moved


@dataclass(slots=True, kw_only=True, eq=False)
class Recorded:
    """A recorded call.

    - ``reading``: its arguments, with copies of all tensors; ``op``, ``layout``: what describes them.
    - ``is_write``: whether it is a cache write. ``is_guess``: see :class:`RecordedOp`.
    - ``function``, ``forms``: what was called, and the form of each argument (:func:`forms_of`).
    - ``writes``: during the call, the caller's tensors that it writes.
    - ``number``: that of the call in this process; other readings of it have the same.
    """

    reading: Reading
    op: str | None
    layout: str | None
    origin: Origin
    writes: dict[str, Any] = field(default_factory=dict)
    rejection: str = ""
    is_write: bool = False
    is_guess: bool = False
    function: Function | None = None
    forms: dict[str, Any] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)
    _call: KernelCall | None = None

    def is_same(self, other: "Recorded") -> bool:
        """Answer whether another is this call, perhaps read in another way."""
        return self.number == other.number

    @property
    def is_chain(self) -> bool:
        """Answer whether it is attention that was written out in torch."""
        return (self.origin.op or "").startswith(CHAIN)

    @property
    def kernel(self) -> str:
        """Return the name by which the commands run the function, "MODULE:FUNCTION"."""
        return spec_of(self.origin.op or "")

    @property
    def spec(self) -> str:
        """Return the name by which a command in the current folder finds the function."""
        module, _, function = self.kernel.partition(":")
        file = getattr(sys.modules.get(module), "__file__", None)
        if not file or "." in module or "site-packages" in file:
            return self.kernel
        return f"{from_here(Path(file))}:{function}"

    @property
    def runner(self) -> Backend | None:
        """Return what runs the call again in this process: the installed vLLM, or the function.

        None of a cache write.
        """
        if self.is_write or self.function is None:
            return None
        if not self.call.is_foreign:
            return backend_of_origin(self.call)
        function = _with_modes(inspect.unwrap(self.function))
        kernel: Any = kernel_of(function, self.forms)
        if self.reading.stated is not None:
            kernel = functools.partial(run_by_record, function)
        return PluginBackend(spec=self.kernel, function=kernel, stands_for=self.call.op)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Return the copies of what the call wrote: its output, or both caches."""
        names = ("key_after", "value_after") if self.is_write else ("output",)
        found = [self.reading.fields.get(name) for name in names]
        return [one for one in found if one is not None]

    def shaped(self, comparison: Comparison) -> Iterator[Comparison]:
        """Yield a comparison as it is, and as one in the output's shape if the op returned another shape."""
        yield comparison
        result, sizes = self.reading.result, [one.numel() for one in self.outputs]
        if result is None or comparison.actual.numel() not in sizes:
            return
        actual, expected = (result(one)[0] for one in (comparison.actual, comparison.expected))
        if actual is not None and expected is not None:
            yield dataclasses.replace(comparison, actual=actual, expected=expected)

    @property
    def call(self) -> KernelCall:
        """Return the KernelCall; raise InvalidCall if the arguments contradict each other."""
        if self._call is None:
            self.reading.fields = each_block_once(self.reading.fields)
            if self.is_write:
                call = write_of_reading(self.reading, self.origin)
            else:
                call = call_of_reading(self.reading, self.origin, op=self.op, layout=self.layout)
            self._call = dataclasses.replace(call, rejection=self.rejection)
        return self._call

    def other_readings(self) -> Iterator["Recorded"]:
        """Yield the call as its arguments may be meant, too; nothing if they say how they are meant."""
        for reading in readings_of(self.reading):
            yield dataclasses.replace(self, reading=reading, _call=None)


def from_here(path: Path) -> str:
    """Return a path as it is from the current folder, if that is above it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def forms_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without the numbers of its tensors, but for those with one element."""
    return {
        name: value
        if not isinstance(value, torch.Tensor)
        else value.detach().clone()
        if value.numel() == 1
        else torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in arguments.items()
    }


_log = logging.getLogger("attnlab.recorder")
_KEPT = 16  # calls by default
_inside = threading.local()


class Calls(Sequence[KernelCall]):
    """The last calls that were recorded, as KernelCalls, the oldest first.

    - ``recorded``: the calls before they were converted and checked.

    Raises InvalidCall, when a call is read, if its arguments contradict each other.
    """

    def __init__(self, keep: int = _KEPT) -> None:
        self.keep = keep
        self.seen = 0
        self.recorded: deque[Recorded] = deque(maxlen=keep)

    def add(self, one: Recorded) -> None:
        """Add a call; the oldest is dropped if there are ``keep``."""
        self.recorded.append(one)
        self.seen += 1

    def clear(self) -> None:
        """Drop every call."""
        self.recorded.clear()
        self.seen = 0

    def __len__(self) -> int:
        return len(self.recorded)

    @overload
    def __getitem__(self, index: int) -> KernelCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[KernelCall]: ...
    def __getitem__(self, index: int | slice) -> KernelCall | list[KernelCall]:
        if isinstance(index, slice):
            return [one.call for one in list(self.recorded)[index]]
        return self.recorded[index].call

    def __repr__(self) -> str:
        names = ", ".join(one.origin.op or "?" for one in self.recorded)
        return f"<{len(self)} of {self.seen} calls: {names}>"


class Capture:
    """Records the calls of known ops, from :meth:`start` to :meth:`stop`.

    - ``keep``: how many of the last calls are kept; ``ops``: further ops, see
      :func:`attnlab.recorder.ops.recorded_ops`.
    - ``chains``: attention that was written out in torch (:mod:`attnlab.recorder.chains`), if
      :meth:`follow` gets each call of a torch function.
    - ``left_out``: why a call of a known op was not recorded, the last reason by the op's name.
    - ``origin``: what the caller knows about the calls' origin; it may change between calls.
    - ``host``: copy to CPU memory. Each call then waits for the GPU, and its copies survive a kernel that
      breaks the GPU's context.

    An error while a call is recorded is logged once, and the program continues as without attnlab.
    """

    def __init__(
        self, *, keep: int = _KEPT, ops: Iterable[RecordedOp | str] = (), host: bool = False
    ) -> None:
        if type(keep) is not int or keep < 1:
            refuse("keep", "a whole number from 1", keep)
        self.calls = Calls(keep)
        self.chains: deque[Recorded] = deque(maxlen=keep)
        self.left_out: dict[str, str] = {}
        self.origin = Origin()
        self._host = host
        self._logged = self._is_active = False
        self._ops = {op.name: op for op in recorded_ops(ops, on_error=self._failed)}
        targets = by_module((op.module, op.function) for op in self._ops.values())
        self._patches = Patches(targets, self._wrapper)

    def start(self) -> None:
        """Wrap the ops."""
        self._is_active = True
        self._patches.install()

    def add(self, ops: Iterable[RecordedOp]) -> None:
        """Record the calls of further ops, which are not those that are recorded already."""
        new = {op.name: op for op in ops if op.name not in self._ops}
        self._ops |= new
        self._patches.add(by_module((op.module, op.function) for op in new.values()))

    def stop(self) -> None:
        """Put the original ops back."""
        self._is_active = False
        self._patches.remove()

    def follow(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record attention that a function of torch completes, unless a recorded op calls it."""
        if getattr(_inside, "is_known", False):
            return
        try:
            with torch.no_grad(), not_recording():
                chain = follow(name, args, result)
                reading = None if chain is None else reading_of(chain)
                if chain is None or reading is None or reading.result is None:
                    return
                output = reading.result(chain.output)[0]
                fields = {**reading.fields, "output": output, "weights": reading.weights}
                fields = self._kept(copies(fields))
                reading.weights = fields.pop("weights")
                reading.fields = fields
                origin = dataclasses.replace(self.origin, op=f"{CHAIN} in {chain.place}")
                self.chains.append(
                    Recorded(
                        reading=reading, op=UNIFIED, layout="HND", origin=origin, is_guess=True
                    )
                )
        except Exception as error:
            self._failed(CHAIN, error)

    def _failed(self, what: str, error: Exception) -> None:
        """Log the first error of this capture."""
        if not self._logged:
            self._logged = True
            text = " ".join(str(error).split())
            _log.warning("attnlab could not record %s: %s: %s", what, type(error).__name__, text)

    def _wrapper(self, module: str, function: str, original: Function) -> Function | None:
        """Return a function that records the call and then makes it; None if it cannot be wrapped."""
        op = self._ops[f"{module}.{function}"]
        try:
            bind = binder(signature_of(op, original))
        except (TypeError, ValueError) as error:
            self._failed(op.name, error)
            return None

        @functools.wraps(original)
        def recording(*args: Any, **kwargs: Any) -> Any:
            if not self._is_recording():
                return original(*args, **kwargs)
            before = self._before(op, lambda: bind(args, kwargs))
            if before is not None:
                is_method = "." in op.function
                before.function = None if op.is_dense else type(args[0]) if is_method else original
            is_in_torch = op.is_guess and op.is_dense
            return self._called(before, lambda: original(*args, **kwargs), is_in_torch)

        @functools.wraps(original)
        def launching(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            def launch() -> Any:
                return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)

            found = None if warmup or not self._is_recording() else op_of_launch(kernel.fn)
            if found is None:
                return launch()
            one, names = found
            before = self._before(one, lambda: arguments_of_launch(kernel, names, args, kwargs))
            return self._called(before, launch, written=True)

        return launching if op.is_launch else recording

    def _is_recording(self) -> bool:
        """Answer whether a call is recorded: one of another op, and compiled code, is not."""
        is_op = not self._is_active or getattr(_inside, "is_op", False)
        return not is_op and not torch.compiler.is_compiling()

    def _called(
        self,
        before: Recorded | None,
        original: Callable[[], Any],
        is_in_torch: bool = False,
        written: bool = False,
    ) -> Any:
        """Make a call, and record what it wrote. ``written``: it writes its output, whatever it returns."""
        with not_recording(but_chains=is_in_torch), noting_bfloat16() as undecided:
            try:
                result = original()
            except Exception as error:
                self._after(before, None, f"{type(error).__name__}: {error}")
                raise
        if before is not None and undecided:
            before.origin = dataclasses.replace(before.origin, backend=STOCK_BFLOAT16)
        self._after(before, None if written else result, "")
        return result

    def _before(self, op: RecordedOp, arguments: Callable[[], BoundArguments]) -> Recorded | None:
        """Return the call with copies of its inputs, or None if it is not recorded."""
        try:
            with torch.no_grad(), not_recording():
                if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("a CUDA graph is captured; run eagerly to record its calls")
                bound = arguments()
                if op.is_plan:
                    keep_plan(bound)
                    return None
                bound = with_plan(bound)
                reading = op.read(bound)
                if reading.why_not:
                    self.left_out[op.name] = reading.why_not
                    return None
                names = ("key_cache", "value_cache") if op.writes_cache else ("output", "lse")
                writes: dict[str, Any] = {
                    name: reading.fields[name] for name in names if name in reading.fields
                }
                reading.fields.pop("lse", None)  # what it holds before the call is not used
                copy = copy_write if op.writes_cache else copy_fields
                reading.fields = self._kept(copy(reading.fields))
                if "output" in writes:
                    reading.fields["before"] = reading.fields["output"]
                return Recorded(
                    reading=reading,
                    is_write=op.writes_cache,
                    is_guess=op.is_guess,
                    op=op.op,
                    layout=op.layout,
                    origin=_origin(self.origin, op, reading.fields["key_cache"].device),
                    writes=writes,
                    forms=forms_of(bound),
                )
        except Exception as error:
            self.left_out[op.name] = " ".join(f"{type(error).__name__}: {error}".split())
            self._failed(op.name, error)
            return None

    def _after(self, one: Recorded | None, result: Any, rejection: str) -> None:
        """Copy the outputs of a call, and keep it."""
        if one is None:
            return
        try:
            with torch.no_grad(), not_recording():
                if one.reading.result is not None and not rejection:
                    both = zip(("output", "lse"), one.reading.result(result), strict=True)
                    one.writes = {name: tensor for name, tensor in both if tensor is not None}
                try:
                    one.reading.fields |= self._kept(_written(one))
                except RuntimeError as error:
                    if "CUDA error" not in str(error) and "HIP error" not in str(error):
                        raise
                    # The op has returned, and one of its kernels has failed since.
                    first = next(iter(str(error).splitlines()))  # advice of torch follows
                    rejection = rejection or f"{type(error).__name__}: {first}"
                one.writes, one.rejection = {}, " ".join(rejection.split())
                self.calls.add(one)
        except Exception as error:
            self._failed(one.origin.op or "a call", error)

    def _kept(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return copied fields where they are kept: on their device, or in CPU memory."""
        if not self._host:
            return fields
        tensors = {name: one for name, one in fields.items() if isinstance(one, torch.Tensor)}
        return {**fields, **moved(tensors, "cpu")}


def _with_modes(function: Function) -> Function:
    """Return a test's function with torch's modes and subclasses, without which a report is made."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction(), torch.device("cpu"):
            return function(*args, **kwargs)

    return called


def _written(one: Recorded) -> dict[str, Any]:
    """Return copies of what a call wrote."""
    if one.is_write:
        return copy_written(one.reading.fields, one.writes)
    return {name: copied(tensor) for name, tensor in one.writes.items()}


@contextlib.contextmanager
def not_recording(*, but_chains: bool = False) -> Iterator[None]:
    """Record no ops that are called inside: an op's own, and those of attnlab.

    ``but_chains``: record attention that is written out in torch.
    """
    outer = getattr(_inside, "is_op", False), getattr(_inside, "is_known", False)
    _inside.is_op, _inside.is_known = True, outer[1] or not but_chains
    try:
        yield
    finally:
        _inside.is_op, _inside.is_known = outer


@functools.lru_cache(maxsize=64)
def _origin(known: Origin, op: RecordedOp, device: torch.device) -> Origin:
    """Return the origin of the calls of an op: what is known of it, the op, its release and the platform."""
    program = op.module.partition(".")[0]
    found = {**known.to_dict(), "op": op.name}
    found.setdefault("program", program)
    release = release_of(program)
    if release is not None:
        found.setdefault("release", release)
    platform = platform_of(device)
    if platform is not None:
        found.setdefault("platform", platform)
    return Origin(**found)


@contextlib.contextmanager
def capture(*, keep: int = _KEPT, ops: Iterable[RecordedOp | str] = ()) -> Iterator[Calls]:
    """Record the attention calls that a block of code makes: ``with attnlab.capture() as calls: …``.

    Recorded are vLLM's attention ops, flash_attn_varlen_func with a block table, FlashInfer's stateless paged
    calls, torch's scaled_dot_product_attention, the ops of the entry-point group ``attnlab.ops``, and
    ``ops``. Each call is a :class:`attnlab.KernelCall` with copies of its inputs and of its output before
    and after the call; an op that another op calls is not recorded. The program is not changed: an error
    while recording is logged once.

    - ``keep``: how many of the last calls are kept.
    - ``ops``: further ops, "module:function". Their arguments are found by their names, for example
      query or q, key_cache or k_cache, block_table, seq_lens.
    """
    one = Capture(keep=keep, ops=ops)
    one.start()
    try:
        yield one.calls
    finally:
        one.stop()
