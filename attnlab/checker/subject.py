"""Subjects of the sanitizer: the lab's models, a vLLM, or somebody's own function."""

import builtins
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import (
    AttnLabError,
    DeviceLost,
    InvalidCase,
    KernelFailed,
    KernelRejected,
    Unavailable,
)
from attnlab.case.ops import DEFAULT_OP, KV_CACHE_DTYPES, RELEASES, TRITON_OPS
from attnlab.kernels.triton.interpreter import LaunchPlan, interpreted_triton, launching
from attnlab.kernels.triton.trace import Watched
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.lab import Lab
from attnlab.lab.reads import MemoryReport, traced
from attnlab.lab.result import Result
from attnlab.tensors.call import KernelCall
from attnlab.tensors.layout import strided

_BROKEN = re.compile(r"illegal|misaligned|launch failure|device-side assert")  # CUDA's words
_NO_LARGE_CACHES = (
    "block offsets beyond 2^31 elements: give the kernel large_caches = True if it copies no cache"
)
_MODELLED = (
    "blocks that a sliding window freed: the models do not say what is read before a window",
    "ALiBi beside sinks: the models do what vLLM's unified_attention does there, which is wrong",
)
_INTERPRETED = ("bfloat16 under Triton's interpreter; races, registers and compiler faults",)
_NATIVE = (
    "float32 on a GPU, whose dot products take TF32",
    "which slots are read, and accesses outside tensors, which only the interpreter sees",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunOutput:
    """What a run left: the output, what the interpreter saw of it, and what the op gave beside it.

    ``memory``: the slots that were read; None where nobody watched, or no kernel ran under the lab's
    interpreter.
    ``lse``, ``padded``: as :class:`attnlab.lab.result.Result` has them.
    """

    output: torch.Tensor
    outside: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    lse: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    memory: MemoryReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose kernels are looked at; it can be sent to another process.

    - ``backend``: "model", "vllm", or "plugin".
    - ``source``: the vLLM's path, or "FILE.py:FUNCTION" of a plugin; None is the installed vLLM.
    - ``release``: the rules that hold; ``version``: in words.
    - ``ops``, ``kv_cache_dtypes``: what it is run with; ``large_caches``: whether with caches of 8 GiB of
      addresses, which nobody must copy.
    - ``device``: where a vLLM's kernels run, "cpu" (Triton's interpreter) or "cuda".
    """

    backend: str
    source: str | None
    release: str
    version: str
    ops: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...] = KV_CACHE_DTYPES
    large_caches: bool = True
    device: str = "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the dtypes that it is run with: those that its device computes as they are meant."""
        if self.backend != "vllm":
            return tuple(DTYPE_BYTES)
        return ("float16", "bfloat16") if self.device == "cuda" else ("float16", "float32")

    def left_out(self) -> list[str]:
        """Return in words what it is not run with."""
        texts = [] if self.large_caches else [_NO_LARGE_CACHES]
        if self.backend == "vllm":
            texts += _NATIVE if self.device == "cuda" else _INTERPRETED
        return texts + list(_MODELLED if self.backend == "model" else ())

    def run(self, lab: Lab, case: Case, watch: bool = False) -> RunOutput:
        """Run a Case; ``watch`` notes which slots are read, where that can be seen.

        Raises KernelRejected or KernelFailed with what the kernel raised, Unavailable where it says
        NotImplementedError, DeviceLost where it broke the GPU's context.
        """
        if self.backend == "plugin":
            return self._run_function(lab, case, watch)
        if self.device == "cuda":
            result = _run_native(_on_gpu(self.source), case)
        else:
            watched = watch and self.backend == "vllm" and not case.first_block
            result = lab.run(case.replace(trace_reads=watched))
        if result.error is not None and self.backend == "vllm" and not result.failed:
            raise Unavailable(f"it refuses a case by itself: {result.error}")
        if result.error is not None:
            raise KernelRejected(result.error)
        return RunOutput(
            output=result.call.output.cpu(),
            outside=result.outside,
            wraps=result.wraps,
            lse=None if result.lse is None else result.lse.cpu(),
            padded=None if result.padded is None else result.padded.cpu(),
            memory=result.memory,
        )

    def _run_function(self, lab: Lab, case: Case, watch: bool) -> RunOutput:
        """Run somebody's function; its Triton kernels, on a CPU, under the lab's interpreter."""
        call, function = strided(lab.call(case)), _function(str(self.source))
        plan = LaunchPlan(watched=Watched.of(call) if watch else None)
        try:
            with launching(plan):
                function(call)
        except AttnLabError:
            raise
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error).splitlines()[0]) from error
        except NotImplementedError as error:
            raise Unavailable(f"{self.version} does not know it: {error}") from error
        except Exception as error:
            raise KernelFailed(f"{type(error).__name__}: {error}") from error
        seen, memory = plan.observed, None
        if watch and seen.launches:
            provenance = lab.cache(case).provenance
            memory = traced(seen.reads, provenance, case.lengths, case.sliding_window)
        return RunOutput(
            output=call.output,
            outside=tuple(stray.text() for stray in seen.outside.values()),
            wraps=tuple(wrap.text() for wrap in seen.wraps.values()),
            memory=memory,
        )


def models(release: str) -> Subject:
    """Return the lab's own models under a release's rules."""
    return Subject(
        backend="model",
        source=None,
        release=release,
        version=f"models of {release}",
        ops=TRITON_OPS,
    )


def vllm(path: Path | None, device: str = "cpu") -> Subject:
    """Return the vLLM at ``path``, or the installed one; its ops are those that it has.

    Raises Unavailable for ``device`` cuda where torch sees no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("device must be cpu here, got cuda: torch sees no GPU")
    found = find_source(path)
    return Subject(
        backend="vllm",
        source=None if path is None else str(path),
        release=found.rules or "0.33.0",
        version=found.text()
        if device == "cpu"
        else f"{found.text()} on {torch.cuda.get_device_name()}",
        ops=TRITON_OPS,
        device=device,
    )


def plugin(name: str) -> Subject:
    """Return somebody's function, "FILE.py:FUNCTION".

    It takes a KernelCall and writes ``call.output``. Its attribute ``op`` names the op that it is held to,
    chunked_prefill_paged_decode where it has none; ``kv_cache_dtypes`` those that it knows, all where it
    has none; ``large_caches`` that it copies no cache and can be run with a large one. Raises InvalidCase
    for what is no such name.
    """
    function = _function(name)
    op = getattr(function, "op", DEFAULT_OP)
    if op not in TRITON_OPS:
        raise InvalidCase(f"{name}: its op must be one of {', '.join(TRITON_OPS)}, got {op!r}")
    known = tuple(getattr(function, "kv_cache_dtypes", KV_CACHE_DTYPES))
    return Subject(
        backend="plugin",
        source=name,
        release=RELEASES[-1],
        version=name,
        ops=(op,),
        kv_cache_dtypes=known,
        large_caches=bool(getattr(function, "large_caches", False)),
    )


def _run_native(lab: Lab, case: Case) -> Result:
    """Run a Case on the GPU; raise DeviceLost where its kernel broke the GPU's context, whoever ran into
    that: the op, the lab's own work behind it, or Triton, which launched the next kernel."""
    try:
        result = lab.run(case)
        result.call.output.cpu()  # waits for the kernels
    except (torch.AcceleratorError, Unavailable) as error:
        if isinstance(error, Unavailable) and not _BROKEN.search(str(error)):
            raise
        raise DeviceLost(str(error).splitlines()[0]) from error
    if _BROKEN.search(str(result.error)):
        raise DeviceLost(str(result.error).splitlines()[0])
    return result


@cache
def _on_gpu(source: str | None) -> Lab:
    """Return the Lab that runs a vLLM on the GPU; what comes of it is judged by one on the CPU."""
    return Lab(source=None if source is None else Path(source), device="cuda", keep=3)


_LOADED: dict[str, Callable[[KernelCall], Any]] = {}


def _importer(name: str, *rest: Any, **named: Any) -> Any:
    """Stand for ``__import__`` in somebody's file on a CPU: its ``triton`` is the lab's interpreter, so
    that what its kernels touch is seen. What the file imports beside it gets Triton's own."""
    if name.partition(".")[0] != "triton":
        return builtins.__import__(name, *rest, **named)
    lab_triton = interpreted_triton()
    found = builtins.__import__(name, *rest, **named)
    return lab_triton if found.__name__ == "triton" else found


def _function(name: str) -> Callable[[KernelCall], Any]:
    """Return the function of "FILE.py:FUNCTION", its file run once."""
    if name in _LOADED:
        return _LOADED[name]
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise InvalidCase(f"kernel must be FILE.py:FUNCTION of a file that exists, got {name!r}")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if not torch.cuda.is_available():
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importer}
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidCase(f"{file} cannot run: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise InvalidCase(f"{file} must have a function {attribute!r}")
    _LOADED[name] = found
    return _LOADED[name]
