"""The part of ``import attnlab`` that reads weights out of a kernel."""

import dataclasses
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCall, InvalidCase
from attnlab.case.ops import check_weighs_values
from attnlab.case.public import as_case
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.kernels import find_backend
from attnlab.kernels.backend import Backend, RunOptions
from attnlab.lab.lab import Lab
from attnlab.lab.memory_check import check_memory
from attnlab.lab.public import default_lab
from attnlab.tensors.cache import NOBODY
from attnlab.tensors.call import KernelCall
from attnlab.weights.argument_setup import check_readable, with_value_scales
from attnlab.weights.codes import num_slots
from attnlab.weights.conclude import xray_of
from attnlab.weights.device import device_for
from attnlab.weights.examine import Subject
from attnlab.weights.other_case import other_case
from attnlab.weights.size import check_numbers
from attnlab.weights.xray import XRay

NO_RUNNER = (
    "backend must be given to X-ray a saved call, which holds no kernel: --kernel mine.py:my_attention, "
    "--source VLLM, or --backend (model measures attnlab's own model)"
)


def xray(
    case: Case | KernelCall | str,
    *,
    backend: str | Backend | None = None,
    confirm: bool = True,
    limit_s: float = 10.0,
    lab: Lab | None = None,
    **changes: Any,
) -> XRay:
    """Measure the effective attention weights of a kernel, and describe how they differ from the right ones.

    The unmodified kernel runs with coded values; keys of empty slots are replaced by finite ones.

    - ``case``: a Case, a pytest id, or a KernelCall such as a captured one.
    - ``backend``: whose kernel runs: a name as in ``Case.backend``, such as "mine.py:fn", or a Backend.
      Default: the Case's. A KernelCall holds no kernel, so it needs a backend.
    - ``confirm``: a description must also predict another Case, which is measured if one is found. A
      KernelCall has no other Case.
    - ``limit_s``: time for the search for a description, in seconds.
    - ``changes``: fields of the Case; of a KernelCall, where it ran, for example ``platform="sm_90"``.

    Raises InvalidCase for an op without values (a cache write) and for a KernelCall without a backend, and
    InvalidCall for a call that is too large, and NotDeterministic if equal runs of the kernel differ.
    """
    lab = lab or default_lab()
    if isinstance(case, KernelCall):
        if call_platform := case.origin.platform:
            changes.setdefault("platform", call_platform)
        chosen = backend if backend is not None else changes.pop("backend", None)
        if chosen is None:
            raise InvalidCase(NO_RUNNER, field="backend")
        if isinstance(chosen, str):
            return xray_of_call(case, Case(**changes), chosen, lab=lab, limit_s=limit_s)
        subject = _of_call(case, Case(**changes), chosen)
        return xray_of(_on_fastest(subject, lab.device), limit_s=limit_s)
    if isinstance(backend, str):
        changes["backend"] = backend
    case = as_case(case, **changes)
    found = backend if isinstance(backend, Backend) else lab.backend(case)

    def other(heads: tuple[int, ...] | None, every_head: bool) -> Subject | None:
        second = other_case(case)
        if second is None:
            return None
        part = second if every_head else _of_one_head(second, found, heads)
        return _of_case(part, lab, found)

    subject = _on_fastest(_of_case(case, lab, found), lab.device)
    return xray_of(subject, other if confirm else None, limit_s)


def _of_one_head(case: Case, backend: Backend, heads: tuple[int, ...] | None) -> Case:
    """Return the Case with the KV head of one of the query heads to run, if the backend can run a part."""
    kv_head = (case.num_heads - 1 if heads is None else heads[-1]) // case.num_queries_per_kv
    try:
        part = case.replace(kv_head_range=(kv_head, kv_head + 1))
        backend.check(part)
    except AttnLabError:
        return case
    return part


def xray_of_call(
    call: KernelCall, ran: Case, backend: str | None = None, *, lab: Lab, limit_s: float
) -> XRay:
    """Return the X-ray of a call; ``ran`` has the platform, the release and, by default, the backend."""
    found = find_backend(backend or ran.backend, lab.source, lab.device)
    return xray_of(_on_fastest(_of_call(call, ran, found), lab.device), limit_s=limit_s)


def _on_fastest(subject: Subject, requested: str | None) -> Subject:
    """Return the subject with the device that computes its weights fastest."""
    weights = len(subject.rows) * len(subject.heads) * num_slots(subject.call)
    return dataclasses.replace(subject, device=device_for(weights, requested))


def _of_case(case: Case, lab: Lab, backend: Backend) -> Subject:
    """Return what is measured of a Case: the rows and heads that it runs."""
    check_weighs_values(case.spec)
    check_readable(case)
    check_memory(case, backend.cache_copies)
    backend.check(case)
    rows = case.query_rows or range(case.lengths.num_tokens)
    heads = case.query_heads or range(case.num_heads)
    slots = case.total_blocks * case.block_size
    check_numbers(len(rows), len(heads), slots)
    call, provenance = lab.call(case), lab.cache(case).provenance
    options = with_value_scales(RunOptions.of(case), case, call)
    if lab.on_step is not None:
        options = dataclasses.replace(options, on_step=lab.on_step)
    return Subject(
        call=call,
        target=Target.of(case),
        kernels=decide(case).kernels,
        backend=backend,
        options=options,
        rows=torch.arange(rows.start, rows.stop),
        heads=torch.arange(heads.start, heads.stop),
        written=(provenance.seq != NOBODY).flatten(),
        case=case,
    )


def _of_call(call: KernelCall, ran: Case, backend: Backend) -> Subject:
    """Return what is measured of a call: every row of its sequences, and every head."""
    if call.op not in backend.ops:
        allowed = " or ".join(backend.ops)
        raise InvalidCall(
            f"op must be {allowed} with backend {backend.name}, got {call.op}", field="op"
        )
    return Subject(
        call=call,
        target=Target.of(ran),
        kernels=kernels_of(ran, call),
        backend=backend,
        options=RunOptions(),
        rows=torch.arange(int(call.query_start_loc[0]), int(call.query_start_loc[-1])),
        heads=torch.arange(call.query.shape[1]),
    )
