"""Backend ``cuda``: the cache write of vLLM's csrc/cache_kernels.cu, compiled from its own source.

The op runs on the emulated device; no GPU is needed, and none is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.case.fields import refuse
from attnlab.case.ops import RELEASES, WRITE
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.target import Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput, check_release
from attnlab.kernels.cuda.cache_ops import cache_ops
from attnlab.kernels.cuda.source_text import has_source
from attnlab.kernels.vllm.op_calls import OP_CALLS
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.tensors.call import KernelCall


@dataclass(frozen=True, kw_only=True)
class CudaBackend(Backend):
    """reshape_and_cache_flash of CUDA; ``path``: an sdist or a checkout, None for the installed vLLM."""

    path: Path | str | None = None

    name = "cuda"
    ops = (WRITE,)
    blind_spots = ("the timing, registers and vector instructions of real hardware",)

    @cached_property
    def source(self) -> Source:
        """Return the vLLM whose csrc/cache_kernels.cu runs; raise Unavailable for one without it."""
        source = find_source(self.path)
        if not has_source(source.root):
            raise Unavailable(
                f"{source.text()} ({source.kind}) does not contain csrc/cache_kernels.cu: pass an sdist or "
                "a checkout as --source; attnlab fetch --sdist 0.33.0 downloads one"
            )
        return source

    @property
    def version(self) -> str:
        return self.source.text()

    @property
    def is_deterministic(self) -> bool:
        return True

    @property
    def release(self) -> str:
        return self.source.rules or RELEASES[-1]

    def check(self, case: Case) -> None:
        super().check(case)
        check_release(self.source, case)
        if case.machine.family != "cuda":
            allowed = [one.name for one in PLATFORMS.values() if one.family == "cuda"]
            refuse("platform", f"one of {', '.join(allowed)} with backend cuda", case.platform)

    def text(self, kernels: Sequence[str], target: Target) -> str:
        return f"{self.source.text()} csrc/cache_kernels.cu, emulated device"

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        options.on_step(f"kernels, {WRITE} of CUDA")
        how = OP_CALLS[WRITE]
        given = how.arguments(call, target)
        kv_cache_dtype = given.pop("kv_cache_dtype")
        cache_ops(self.source.root)(WRITE, given, kv_cache_dtype)
        how.finish(call, given)
        return RunOutput()
