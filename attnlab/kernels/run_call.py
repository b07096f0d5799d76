"""Run a recorded call on a backend, and find the backend that its origin names."""

import dataclasses
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.masks import MASKS
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import kernels_of
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend, OnStep, RunOptions, ignore_step
from attnlab.kernels.by_name import NATIVE
from attnlab.kernels.control import run_backend
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.runner import ORIGIN
from attnlab.tensors.call import KernelCall
from attnlab.tensors.call_file import moved
from attnlab.tensors.quantised import has_fp8_query, has_scaled_output


def for_call(call: KernelCall, runner: Backend) -> Backend:
    """Return a backend as what runs a call: a user's function that declares no op stands for the call's."""
    if isinstance(runner, PluginBackend) and not runner.declares_op:
        return dataclasses.replace(runner, stands_for=call.op)
    return runner


def backend_of_origin(call: KernelCall, device: str | None = None) -> Backend:
    """Return the installed op that a call's origin names: a library's, or a function that Python can import.

    A file that states an origin so chooses which module is imported. Raises InvalidCase or Unavailable if
    there is none.
    """
    name = call.origin.op
    if name is None and call.origin.backend is None:
        text = "a kernel's name for a call whose origin names no op"
        raise InvalidCase(f"kernel must be {text}, got {ORIGIN}")
    if name is None or not call.is_foreign:
        if call.spec.library != "vllm":
            return find_backend(f"library:{call.spec.library}")
        return find_backend("vllm" if call.spec.is_triton else "vllm-cpu", None, device)
    return for_call(call, find_backend(spec_of(name)))


def spec_of(op: str) -> str:
    """Return the name of a backend for an op "module.function", or for the class of "module.Class.run"."""
    module, _, function = op.rpartition(".")
    package, _, class_ = module.rpartition(".")
    return f"{package}:{class_}" if class_ in NATIVE else f"{module}:{function}"


_UNREAD = ("lse", "block_ids")  # tensors that no op reads


def run_call(
    call: KernelCall, backend: Backend, ran: Case, on_step: OnStep = ignore_step
) -> torch.Tensor:
    """Run a call and return its output, on the CPU. The call itself is not changed.

    The output buffer starts as the call's ``before``, or as NaN if that is unknown. ``ran`` has the platform
    and the release. Raises KernelRejected, KernelFailed, Unavailable, or InvalidCase for an op or format
    that the backend does not have.
    """
    backend = for_call(call, backend)
    _check_runs(call, backend)
    call = call.with_buffer()
    fresh = call.buffer.new_full(call.buffer.shape, float("nan"))
    output = fresh if call.before is None else call.before.clone()
    slots = call.slot_mapping if call.spec.writes_cache else None
    given = dataclasses.replace(call, output=output, before=None, lse=None, slot_mapping=slots)
    there = on_device(given, backend.device)
    options = RunOptions(on_step=on_step)
    run_backend(backend, there, Target.of(ran), kernels_of(ran, call), options)
    return there.buffer.cpu()


def _check_runs(call: KernelCall, backend: Backend) -> None:
    """Raise InvalidCase or Unsupported for a call that the backend would compute as another one."""
    for field in ("op", "kv_cache_dtype"):
        backend.check_field(field, getattr(call, field))
    if isinstance(backend, PluginBackend):
        return
    for name in call.visibility.masks:
        if name not in backend.masks or not MASKS[name].is_in(call.op, backend.release):
            where = f"{call.op} and backend {backend.name} of vLLM {backend.release}"
            raise Unsupported(f"mask must be causal with {where}, got {name}")
    if backend.name != "vllm" and (has_fp8_query(call) or has_scaled_output(call)):
        raise Unsupported(f"query and output must not be FP8 or scaled with backend {backend.name}")
    for name in ("k_scale", "v_scale"):
        call.number(name)


def on_device(call: KernelCall, device: str) -> KernelCall:
    """Return the call with its tensors on a device, "cpu" or "cuda".

    Storages are moved as a whole, so that strides are kept, and so that keys and values which share memory
    still do. The output is a tensor of its own.
    """
    read = {name: one for name, one in call.tensors().items() if name not in _UNREAD}
    changes: dict[str, Any] = {**moved(read, device)}
    return dataclasses.replace(call, **changes)
