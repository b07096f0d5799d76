"""Backends: the models, vLLM's Triton ops, the ROCm kernel, the CUDA cache write, vLLM's CPU op, and users'
own functions."""

from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.fields import package_of_backend

if TYPE_CHECKING:
    from attnlab.kernels.backend import Backend

__all__ = ["find_backend"]


def find_backend(
    name: str, source: Path | str | None = None, device: str | None = None
) -> "Backend":
    """Return the backend of a name, as in ``Case.backend``.

    ``source`` is the vLLM of the backends "vllm", "rocm" and "cuda", or the package of "library:NAME" or
    "MODULE:FUNCTION(…)", None for the installed one; ``device`` is where backend "vllm" runs, "cuda" or
    "cpu", None for the GPU if torch can use one. Other backends ignore both. Raises InvalidCase for a user's
    function that cannot be loaded.
    """
    if name == "model":
        from attnlab.kernels.model import ModelBackend

        return ModelBackend()
    if name == "vllm":
        from attnlab.kernels.vllm.backend import VllmBackend

        return VllmBackend(path=source, requested_device=device)
    if name == "rocm":
        from attnlab.kernels.rocm.backend import RocmBackend

        return RocmBackend(path=source)
    if name == "cuda":
        from attnlab.kernels.cuda.backend import CudaBackend

        return CudaBackend(path=source)
    if name == "vllm-cpu":
        from attnlab.kernels.cpu import CpuBackend

        return CpuBackend()
    from attnlab.kernels.plugin import PluginBackend

    return PluginBackend(spec=name, path=None if package_of_backend(name) is None else source)
