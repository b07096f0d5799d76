"""Backend ``rocm``: the decode kernel of vLLM's csrc/rocm, compiled from its own source.

On a machine with an AMD GPU and a vLLM built for it the real op runs; elsewhere its source runs on the
lab's emulated device. The lab's models compute the prefill rows in both cases, and all rows of calls
that do not reach a kernel of csrc/rocm.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable
from attnlab.case.ops import PREFILL, TRITON_OPS
from attnlab.case.platforms import Platform
from attnlab.contracts.contract import ROCM_DECODE, Target, contract
from attnlab.contracts.slot_states import as_read, served
from attnlab.kernels import model
from attnlab.kernels.backend import Backend, RunOptions, RunOutput, check_release
from attnlab.kernels.model import allocate, scale_of
from attnlab.kernels.rocm.device import EMULATED, PLAIN, DeviceOptions, OnStep, Op, has_source
from attnlab.kernels.rocm.findings import Findings
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.tensors.call import KernelCall

_INDICES = ("block_tables", "seq_lens", "query_start_loc")


@dataclass(frozen=True, kw_only=True)
class RocmBackend(Backend):
    """The ROCm decode kernel; ``path`` is an sdist or a checkout of vLLM, None for the installed one."""

    path: Path | str | None = None

    name = "rocm"
    ops = TRITON_OPS
    models_prefill = True
    traces_reads = True
    is_deterministic = True
    states_limits = True
    blind_spots = (
        "prefill rows: the models compute them",
        "the timing and registers of real hardware",
    )

    @cached_property
    def source(self) -> Source | None:
        """Return the vLLM whose csrc/rocm runs, or None if the real op runs."""
        if self.path is None and native() is not None:
            return None
        source = find_source(self.path)
        check_source(source)
        return source

    @property
    def version(self) -> str:
        return native_text() if self.source is None else self.source.text()

    @property
    def release(self) -> str:
        known = None if self.source is None else self.source.rules
        return known or super().release

    def check(self, case: Case) -> None:
        super().check(case)
        if self.source is not None:
            check_release(self.source, case)

    def text(self, kernels: Sequence[str], target: Target) -> str:
        if ROCM_DECODE not in kernels:
            return "model (the call reaches no kernel of csrc/rocm)"
        source = self.source
        where = f"{source.text()} csrc/rocm, emulated device" if source else native_text()
        return f"{where}; prefill: model" if PREFILL in kernels else where

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        model.run(call, target, tuple(name for name in kernels if name != ROCM_DECODE))
        if ROCM_DECODE not in kernels:
            return RunOutput()
        findings = run(
            call,
            target,
            self.source,
            DeviceOptions(checked=options.trace_reads),
            lambda step: options.on_step(f"kernels, {step}"),
        )
        return RunOutput(findings=findings if options.trace_reads else None)


def native() -> Any | None:
    """Return the real op if this machine has an AMD GPU and a vLLM built for it, else None."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    try:
        importlib.import_module("vllm._rocm_C")
    except ImportError:
        return None
    return torch.ops._rocm_C.paged_attention.default


def native_text() -> str:
    """Describe the real op and its GPU."""
    return f"torch.ops._rocm_C, {torch.cuda.get_device_name()}"


def run(
    call: KernelCall,
    target: Target,
    source: Source | None,
    how: DeviceOptions = PLAIN,
    on_step: OnStep = lambda text: None,
) -> Findings:
    """Write the row of every sequence that the kernel serves to ``call.output``.

    ``source`` None runs the real op of :func:`native`. Returns what a checked run recorded. Raises
    KernelRejected with the message of the op's host code, KernelFailed if the kernel breaks, Unavailable
    if the source or a compiler is missing.
    """
    arguments = op_arguments(call, target)
    if source is None:
        _run_native(arguments, call.buffer)
        return Findings()
    if not how.checked:
        _check_writes(call, target)
    try:
        return op_of(source, target.platform)(arguments, how, on_step)
    finally:
        if arguments["out"] is not call.output:
            call.buffer.copy_(arguments["out"])


def op_arguments(call: KernelCall, target: Target) -> dict[str, Any]:
    """Return the arguments that vLLM's wrapper passes to torch.ops._rocm_C.paged_attention.

    The scratch tensors hold garbage, as from ``torch.empty``, with more of it after their end; the model
    uses the same.
    """
    shape = (call.block_table.shape[0], call.query.shape[1], -(-call.max_seq_len // 256))
    longest = int(call.seq_lens.max()) if call.seq_lens.numel() else 0
    scratch = allocate(call, longest)
    count = shape[0] * shape[1] * shape[2]
    indices = [call.block_table, call.seq_lens, call.query_start_loc]
    if target.wrapper_cast:
        indices = [tensor.to(torch.int32) for tensor in indices]
    return {
        "out": call.buffer if call.buffer.is_contiguous() else call.buffer.contiguous(),
        "exp_sums": scratch.sums[:count].view(shape),
        "max_logits": scratch.largest[:count].view(shape),
        "tmp_out": scratch.outputs[:count].view(*shape, -1),
        "query": call.query,
        "key_cache": call.key_cache,
        "value_cache": call.value_cache,
        "num_kv_heads": call.key.shape[1],
        "scale": scale_of(call, target),
        **dict(zip(_INDICES, indices, strict=True)),
        "block_size": call.block_size,
        "max_seq_len": call.max_seq_len,
        "alibi_slopes": call.alibi_slopes,
        "kv_cache_dtype": call.kv_cache_dtype,
        "k_scale": torch.tensor([call.number("k_scale")]),
        "v_scale": torch.tensor([call.number("v_scale")]),
        "fp8_out_scale": None,
        "mfma_type": "f16",
    }


@lru_cache(maxsize=8)
def op_of(source: Source, platform: Platform) -> Op:
    """Return the op of a source on a platform; it keeps what it builds."""
    return Op(root=source.root, platform=platform)


def emulates(source: Source, platform: Platform) -> bool:
    """Return whether this vLLM contains the kernel and the platform is emulated."""
    return has_source(source.root) and platform.name in EMULATED


def check_source(source: Source) -> None:
    """Raise Unavailable if a vLLM does not contain csrc/rocm's attention."""
    if not has_source(source.root):
        raise Unavailable(
            f"{source.text()} ({source.kind}) does not contain csrc/rocm's attention: pass an sdist or "
            "a checkout as --source; attnlab fetch --sdist 0.33.0 downloads one"
        )


def _check_writes(call: KernelCall, target: Target) -> None:
    """Raise KernelFailed if the op would write outside the output and corrupt this process."""
    terms = contract(ROCM_DECODE, target, call.op)
    starts = as_read(terms, call, "query_start_loc")
    for seq in torch.nonzero(served(terms, call)).flatten().tolist():
        if not 0 <= starts[seq] < call.buffer.shape[0]:
            raise KernelFailed(
                f"query_start_loc[{seq}] reads as {int(starts[seq])}: the kernel would write this row, but "
                f"the output has {call.buffer.shape[0]} rows"
            )


def _run_native(arguments: dict[str, Any], output: torch.Tensor) -> None:
    """Call the real op on the GPU with the arguments of its schema."""
    op = native()
    if op is None:
        raise Unavailable("there is no AMD GPU with a vLLM that was built for it")
    arguments = {**arguments, "exp_sum": arguments["exp_sums"]}
    given = {
        argument.name: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for argument in op._schema.arguments
        if argument.name in arguments or not argument.has_default_value()
        for value in (arguments[argument.name],)
    }
    try:
        op(**given)
    except RuntimeError as error:
        raise KernelRejected(str(error).splitlines()[0]) from error
    output.copy_(given["out"])
