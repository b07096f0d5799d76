"""Run a KernelCall on a backend, in the memory layout in which it was saved."""

import dataclasses
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import Unsupported
from attnlab.case.fields import refuse
from attnlab.case.masks import MASKS
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.diagnosis.captured import check_diagnosable, where_it_ran
from attnlab.kernels.backend import Backend, RunOptions
from attnlab.kernels.control import run_backend
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.steps import OnStep, ignore_step
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import has_fp8_query, has_scaled_output
from attnlab.tensors.storage import moved

_UNREAD = ("lse", "block_ids")  # tensors that no op reads


def check_replayable(call: KernelCall) -> None:
    """Raise InvalidCall for a call without a reference."""
    check_diagnosable(call, writes=True)


def where_to_run(call: KernelCall, backend: Backend, case: Case, given: tuple[str, ...]) -> Case:
    """Return the Case with the platform of the call and the release whose rules the backend follows.

    ``case`` and ``given``: what the user stated, as for :func:`where_it_ran`.
    """
    ran = where_it_ran(call, case, given).case
    return ran if "release" in given else ran.replace(release=backend.release)


def run_call(
    call: KernelCall, backend: Backend, ran: Case, on_step: OnStep = ignore_step
) -> torch.Tensor:
    """Run a call and return its output, on the CPU. The call itself is not changed.

    The output buffer starts as the call's ``before``, or as NaN if that is unknown. ``ran`` has the platform
    and the release. Raises KernelRejected, KernelFailed, Unavailable, or InvalidCase for an op or format
    that the backend does not have.
    """
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
    if call.op not in backend.ops:
        refuse("op", f"{' or '.join(backend.ops)} with backend {backend.name}", call.op)
    if call.kv_cache_dtype not in backend.kv_cache_dtypes:
        allowed = " or ".join(backend.kv_cache_dtypes)
        refuse("kv_cache_dtype", f"{allowed} with backend {backend.name}", call.kv_cache_dtype)
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
