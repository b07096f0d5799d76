"""Failures of vLLM's ops: refused by the op itself, failed to compile or run, or not possible here."""

import re
from pathlib import Path

import torch

from attnlab.case.errors import (
    AttnLabError,
    KernelFailed,
    KernelRejected,
    OutOfMemory,
    Unavailable,
)
from attnlab.kernels.vllm.source import Source

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
    if isinstance(error, _STATED) and _raised_in(error).is_relative_to(source.root):
        return KernelRejected(one_line(error))
    if isinstance(
        error, (*_STATED, ArithmeticError)
    ):  # raised by Triton, or by the op's arithmetic
        return KernelFailed(one_line(error))
    return Unavailable(f"{op} of {source.text()} cannot run here: {one_line(error)}")


def is_compile_failure(error: BaseException) -> bool:
    """Answer whether Triton's compiler rejects a kernel for a GPU."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if any(f"triton.{name}" in names for name in _COMPILE_ERRORS):
        return True
    return isinstance(error, RuntimeError) and bool(
        _COMPILER_FILES.search(_raised_in(error).as_posix())
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


def _raised_in(error: BaseException) -> Path:
    """Return the file that raised the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return Path(trace.tb_frame.f_code.co_filename if trace is not None else "")
