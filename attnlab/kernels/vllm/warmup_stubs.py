"""Stubs of vLLM's declared kernels (vllm/model_executor/warmup, 0.33.0): a class with a kernel.

vLLM's ``__call__`` returns the grid and some arguments by name; the others have the names of its own
parameters, with or without "_ptr". The stub launches the kernel with them, without vLLM's warm-up and caches.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

WARMUP = "vllm.model_executor.warmup"


def warmup_stubs() -> dict[str, dict[str, Any]]:
    """Return the contents of the stub modules, by dotted name."""
    return {
        f"{WARMUP}.jit_warmup": {
            "WarmupIntRange": lambda *args, **kwargs: None,
            "kernel_launcher": _launcher,
        },
        f"{WARMUP}.jit_warmup_triton_helper": {
            "LaunchSpec": tuple,
            "TritonWarmupTensor": lambda *args, **kwargs: None,
            "VllmTritonJitKernel": _DeclaredKernel,
            "triton_scalar_specialization_rep": lambda value: value,
        },
    }


class _DeclaredKernel:
    """Replace VllmTritonJitKernel."""

    def __class_getitem__(cls, key: Any) -> type:
        return cls


def _launcher(declare: Callable[..., Any]) -> Callable[..., None]:
    """Return a method that launches the kernel as ``declare`` states."""
    signature = inspect.signature(declare)

    @functools.wraps(declare)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        names = list(inspect.signature(self.kernel.fn).parameters)
        known = SimpleNamespace(arg_names=names, constexprs=())
        grid, stated = declare(SimpleNamespace(kernel=known, _warming=True), *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = {**bound.arguments, **stated}
        found = {}
        for name in names:
            key = name if name in given else name.removesuffix("_ptr")
            if key in given:
                found[name] = given[key]
        self.kernel[grid](**found)

    return call
