"""Origin ``rocm``: the decode kernel of vLLM's csrc/rocm, its own source.

On a machine with an AMD GPU and a vLLM built for it the real op runs; elsewhere its source runs on the
lab's emulated device. The prefill rows come from the lab's model either way.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable
from attnlab.case.ops import PREFILL
from attnlab.case.platforms import Platform
from attnlab.contracts.contract import as_read, contract, served
from attnlab.contracts.dispatch import ROCM_DECODE, Target
from attnlab.kernels.model.cache_reads import scale_of
from attnlab.kernels.model.rocm_decode import allocate
from attnlab.kernels.rocm.adapt import has_source
from attnlab.kernels.rocm.findings import Findings
from attnlab.kernels.rocm.op import PLAIN, PLATFORM_MACROS, DeviceOptions, Op
from attnlab.kernels.vllm.source import Source
from attnlab.tensors.call import KernelCall

OnStep = Callable[[str], None]
_INDICES = ("block_tables", "seq_lens", "query_start_loc")


def backend_text(source: Source | None, kernels: Sequence[str]) -> str:
    """Return where a run's kernels come from, in words: the source, how it ran, and what is the model's."""
    if ROCM_DECODE not in kernels:
        return "model (the call reaches no kernel of csrc/rocm)"
    where = f"{source.text()} csrc/rocm, emulated device" if source else native_text()
    return f"{where}; prefill: model" if PREFILL in kernels else where


def native() -> Any | None:
    """Return the real op where this machine has an AMD GPU and a vLLM that was built for it, or None."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    try:
        importlib.import_module("vllm._rocm_C")
    except ImportError:
        return None
    return torch.ops._rocm_C.paged_attention.default


def native_text() -> str:
    """Return the real op in words: where it runs."""
    return f"torch.ops._rocm_C, {torch.cuda.get_device_name()}"


def run(
    call: KernelCall,
    target: Target,
    source: Source | None,
    how: DeviceOptions = PLAIN,
    on_step: OnStep = lambda text: None,
) -> Findings:
    """Write the row of every sequence that the kernel serves to ``call.output``.

    ``source`` None runs the real op of :func:`native`. Returns what a checked run found. Raises
    KernelRejected with the text of the op's own host code, KernelFailed where the kernel breaks,
    Unavailable where the source or a compiler is missing.
    """
    arguments = op_arguments(call, target)
    if source is None:
        _run_native(arguments, call.output)
        return Findings()
    if not how.checked:
        _check_writes(call, target)
    try:
        return op_of(source, target.platform)(arguments, how, on_step)
    finally:
        if arguments["out"] is not call.output:
            call.output.copy_(arguments["out"])


def op_arguments(call: KernelCall, target: Target) -> dict[str, Any]:
    """Return the arguments of torch.ops._rocm_C.paged_attention that vLLM's wrapper makes of a call.

    The scratch is what ``torch.empty`` would give: garbage, some of it behind the end, the same that
    the model has.
    """
    shape = (call.block_table.shape[0], call.query.shape[1], -(-call.max_seq_len // 256))
    longest = int(call.seq_lens.max()) if call.seq_lens.numel() else 0
    scratch = allocate(call, longest)
    count = shape[0] * shape[1] * shape[2]
    indices = [call.block_table, call.seq_lens, call.query_start_loc]
    if target.wrapper_cast:
        indices = [tensor.to(torch.int32) for tensor in indices]
    return {
        "out": call.output if call.output.is_contiguous() else call.output.contiguous(),
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
        "k_scale": torch.tensor([call.k_scale]),
        "v_scale": torch.tensor([call.v_scale]),
        "fp8_out_scale": None,
        "mfma_type": "f16",
    }


@lru_cache(maxsize=8)
def op_of(source: Source, platform: Platform) -> Op:
    """Return the op of a source on a platform, with what was built for it."""
    return Op(root=source.root, platform=platform)


def emulates(source: Source, platform: Platform) -> bool:
    """Answer whether a vLLM comes with the kernel, and the platform is one that is emulated."""
    return has_source(source.root) and platform.name in PLATFORM_MACROS


def check_source(source: Source) -> None:
    """Raise Unavailable where a vLLM comes without csrc/rocm's attention."""
    if not has_source(source.root):
        raise Unavailable(
            f"{source.text()} ({source.kind}) comes without csrc/rocm's attention: take an sdist or a "
            "checkout as --source; attnlab fetch --sdist 0.33.0 gets one"
        )


def _check_writes(call: KernelCall, target: Target) -> None:
    """Raise KernelFailed where the op would write a row outside the output, which would hurt this
    process; the checked device needs no such help."""
    terms = contract(ROCM_DECODE, target, call.op)
    starts = as_read(terms, call, "query_start_loc")
    for seq in torch.nonzero(served(terms, call)).flatten().tolist():
        if not 0 <= starts[seq] < call.output.shape[0]:
            raise KernelFailed(
                f"query_start_loc[{seq}] reads as {int(starts[seq])}: the kernel would write there, and "
                f"the output has {call.output.shape[0]} rows"
            )


def _run_native(arguments: dict[str, Any], output: torch.Tensor) -> None:
    """Call the real op on the GPU, with the arguments that its schema names."""
    op = native()
    if op is None:
        raise Unavailable("there is no AMD GPU with a vLLM that was built for it")
    arguments = {**arguments, "exp_sum": arguments["exp_sums"]}
    given = {
        one.name: _on_gpu(arguments[one.name])
        for one in op._schema.arguments
        if one.name in arguments or not one.has_default_value()
    }
    try:
        op(**given)
    except RuntimeError as error:
        raise KernelRejected(str(error).splitlines()[0]) from error
    output.copy_(given["out"])


def _on_gpu(value: Any) -> Any:
    return value.to("cuda") if isinstance(value, torch.Tensor) else value
