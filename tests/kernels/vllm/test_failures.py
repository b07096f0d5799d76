"""Which exceptions of an op are its own limits, failures of its kernel, or limits of the machine."""

import ast
from pathlib import Path

import pytest
import torch
from helpers.sources import needs_triton

from attnlab.case.errors import KernelFailed, KernelRejected, OutOfMemory, Unavailable
from attnlab.kernels.vllm.backend import explained
from attnlab.kernels.vllm.source import Source

pytestmark = needs_triton

ROOT = Path("/releases/vllm")
SOURCE = Source(kind="checkout", path=ROOT, root=ROOT, version="0.33.0")
OP_FILE = ROOT / "vllm/v1/attention/ops/triton_unified_attention.py"
COMPILER = Path("/lib/python3/site-packages/triton/backends/nvidia/compiler.py")
SEMANTIC = Path("/lib/python3/site-packages/triton/language/semantic.py")
ELSEWHERE = Path("/lib/python3/site-packages/triton/runtime/build.py")
KERNEL = "@triton.jit\ndef kernel(x):\n    tl.arange(0, 48)\n"
K_16 = "Input shapes should have M >= 1, N >= 1 and K >= 16"


def raised(error: str, file: Path) -> Exception:
    """Return an exception that an expression raises in a file."""
    names = {"RuntimeError": RuntimeError, "torch": torch}
    try:
        exec(compile(f"raise {error}", str(file), "exec"), names)
    except Exception as raised_error:
        return raised_error
    raise AssertionError


def compilation_error(inner: Exception, calls: int = 1) -> Exception:
    """Return what Triton raises for an exception in a kernel that is reached through some calls."""
    from triton.compiler.errors import CompilationError

    node = ast.parse(KERNEL).body[0]
    error: Exception = inner
    for depth in range(calls):
        try:
            try:
                raise error
            except Exception as cause:
                message = repr(cause) if depth == 0 else None
                raise CompilationError(KERNEL, node, message) from (cause if depth else None)
        except CompilationError as wrapped:
            error = wrapped
    return error


def kind_of(error: Exception) -> tuple[type, str]:
    found = explained(error, "unified_attention", SOURCE)
    return type(found), str(found)


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize(
    "inner", [ValueError("arange's range must be a power of 2"), AssertionError(K_16)]
)
def test_a_kernel_that_does_not_compile_fails(inner, calls):
    """The text is that of the innermost exception, as under the interpreter, without an excerpt."""
    assert kind_of(compilation_error(inner, calls)) == (KernelFailed, str(inner))


def test_a_compilation_error_without_its_cause():
    from triton.compiler.errors import CompilationError

    error = CompilationError(KERNEL, ast.parse(KERNEL).body[0], f"AssertionError('{K_16}')")
    assert kind_of(error) == (KernelFailed, f"AssertionError('{K_16}')")


@pytest.mark.parametrize("file", [SEMANTIC, COMPILER, ELSEWHERE])
def test_an_assertion_of_triton_fails(file):
    assert kind_of(raised(f"AssertionError({K_16!r})", file)) == (KernelFailed, K_16)


def test_resources_and_assembler():
    from triton.runtime.errors import OutOfResources, PTXASError

    kind, text = kind_of(OutOfResources(300000, 232448, "shared memory"))
    assert (kind, "shared memory" in text) == (KernelFailed, True)
    assert kind_of(PTXASError("exit code 255"))[0] is KernelFailed


@pytest.mark.parametrize(
    ("error", "file", "expected"),
    [
        ("RuntimeError('PassManager::run failed')", COMPILER, KernelFailed),
        ("RuntimeError('Failed to find C compiler')", ELSEWHERE, Unavailable),
        ("ValueError('Unsupported data type')", OP_FILE, KernelRejected),
        ("AssertionError('only contiguous heads')", OP_FILE, KernelRejected),
        ("NotImplementedError('int4')", OP_FILE, KernelRejected),
        ("ZeroDivisionError('division by zero')", OP_FILE, KernelFailed),
        ("TypeError('only 0-dimensional arrays')", OP_FILE, Unavailable),
        ("torch.OutOfMemoryError('CUDA out of memory')", OP_FILE, OutOfMemory),
        ("MemoryError()", OP_FILE, OutOfMemory),
    ],
)
def test_other_exceptions(error, file, expected):
    assert kind_of(raised(error, file))[0] is expected
