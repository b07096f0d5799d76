"""Origin ``vllm``: vLLM's own attention ops, natively on a GPU, on a CPU under Triton's interpreter.

The platform is simulated as far as the ops ask for it: ``current_platform`` gives the Case's FP8 format
and capability, and the lab's dispatch answers ``use_rocm_custom_paged_attention``. Where that chooses
ROCm's own kernel, its source on the emulated device stands for ``ops.paged_attention_rocm``; the lab's
model of it where the vLLM comes without csrc/rocm, as a wheel does, or the device is not emulated.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import AttnLabError, KernelFailed, KernelRejected, Unavailable
from attnlab.case.ops import OPS, PREFILL, WRAPPER
from attnlab.case.platforms import Platform
from attnlab.contracts.dispatch import ROCM_DECODE, Target
from attnlab.kernels.model.rocm_decode import paged_attention_rocm
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.program_filter import Subset, needed
from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.triton.trace import Watched
from attnlab.kernels.vllm.loader import Loader
from attnlab.kernels.vllm.op_calls import OP_CALLS, bind
from attnlab.kernels.vllm.source import Source
from attnlab.kernels.vllm.stubs import Dispatch, make_stubs
from attnlab.tensors.call import KernelCall
from attnlab.tensors.layout import presented

ALL = Subset()
_ONE_OUTPUT = (WRAPPER, PREFILL)  # ops whose kernels write call.output alone, which processes share


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The ops of one source on one platform."""

    loader: Loader
    dispatch: Dispatch

    def function(self, op: str) -> Callable[..., None]:
        """Return the op; raise Unavailable where the release has none."""
        named = OPS[op]
        module = self.loader.load(named.module)
        found: Callable[..., None] | None = getattr(module, named.function, None)
        if found is None:
            raise Unavailable(f"{named.module} of this vLLM has no function {named.function}")
        return found


def backend_text(source: Source, kernels: Sequence[str], where: str, platform: Platform) -> str:
    """Return what ran, in words: the source, how, and what stood in for a kernel."""
    how = torch.cuda.get_device_name() if where == "cuda" else "Triton interpreter"
    if ROCM_DECODE not in kernels:
        return f"{source.text()}, {how}"
    real = rocm_source.emulates(source, platform)
    decode = "csrc/rocm, emulated device" if real else "model"
    return f"{source.text()}, {how}; ROCm decode: {decode}"


def run(
    call: KernelCall,
    target: Target,
    kernels: Sequence[str],
    source: Source,
    share: Subset = ALL,
    on_programs: Callable[[int, int], None] = lambda done, total: None,
    where: str = "cpu",
    watch: bool = False,
) -> RunLog:
    """Run the real op, or a share of it, into ``call.output``; return what was seen of it, on a CPU.

    ``where`` is "cuda" for a GPU, "cpu" for Triton's interpreter; ``watch`` notes there which slots of
    the cache programs load.

    Raises KernelRejected with what the op raises, Unavailable where it cannot run here.
    """
    if watch and where == "cuda":
        raise Unavailable("trace_reads must be false on a GPU: nobody sees there what is read")
    check_runs(call, where, share)
    loaded = load(source, target.platform, where)
    is_cpu = where == "cpu"
    output = interpreter.shared_copy(call.output) if is_cpu else call.output.to(where)
    tensors: dict[str, Any] = {**_on_device(call, target, where), "output": output}
    moved = presented(dataclasses.replace(call, **tensors))
    if is_cpu and moved.output is not output:
        moved = dataclasses.replace(moved, output=interpreter.shared_copy(moved.output))
    arguments = bind(loaded.function(call.op), moved, target)
    loaded.dispatch.use_custom = ROCM_DECODE in kernels
    loaded.dispatch.rocm_decode = lambda *args, **kwargs: _rocm_decode(
        moved, target, source, args, kwargs
    )
    plan = interpreter.LaunchPlan(
        needed=lambda kernel, args, program: needed(kernel, args, program, share),
        processes=interpreter.cores() if call.op in _ONE_OUTPUT else 1,
        on_programs=on_programs,
        watched=Watched.of(moved) if watch else None,
    )
    try:
        with interpreter.launching(plan):
            loaded.function(call.op)(**arguments)
        OP_CALLS[call.op].finish(moved, arguments)
        lse = OP_CALLS[call.op].lse(arguments)
        plan.observed.lse = None if lse is None else lse.cpu()
    except AttnLabError:
        raise
    except Exception as error:
        raise _explained(error, call, source) from error
    finally:
        loaded.dispatch.use_custom = False
        call.output.copy_(moved.output[: len(call.output)])
    plan.observed.padded = moved.output[len(call.output) :].cpu() if call.padding else None
    return plan.observed


def check_runs(call: KernelCall, where: str, share: Subset) -> None:
    """Raise Unavailable for what would run and be wrong, or what cannot run, on this machine."""
    if where == "cuda":
        if share.kv_heads is not None or share.seqs is not None:
            raise Unavailable(
                "heads and seqs can be chosen under Triton's interpreter only; a GPU runs all"
            )
        return
    if call.query.dtype == torch.bfloat16:
        raise Unavailable(
            "dtype must not be bfloat16 under Triton's interpreter: its dot product multiplies the "
            "raw bits; float16 and float32 are right"
        )


@lru_cache(maxsize=16)
def load(source: Source, platform: Platform, device_type: str) -> Loaded:
    """Return the ops of a source as they load on a platform; they read its facts when they load."""
    interpret = device_type == "cpu"
    triton = interpreter.interpreted_triton() if interpret else interpreter.load_triton(False)
    dispatch = Dispatch()
    return Loaded(
        loader=Loader(source, make_stubs(platform, triton, dispatch, interpret)), dispatch=dispatch
    )


def load_stock(source: Source, platform: Platform) -> Loaded:
    """Return the ops with Triton's own interpreter, to measure and compare with."""
    dispatch = Dispatch()
    stubs = make_stubs(platform, interpreter.load_triton(True), dispatch, interpret=True)
    return Loaded(loader=Loader(source, stubs), dispatch=dispatch)


def _on_device(call: KernelCall, target: Target, where: str) -> dict[str, torch.Tensor]:
    """Return the call's tensors on the device; the wrapper_cast stage converts its indices first."""
    moved = {}
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if isinstance(value, torch.Tensor) and field.name != "output":
            moved[field.name] = value.to(where)
    if target.wrapper_cast:
        for name in ("block_table", "seq_lens", "query_start_loc"):
            moved[name] = moved[name].to(torch.int32)
    return moved


def _rocm_decode(
    call: KernelCall,
    target: Target,
    source: Source,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Stand for ``ops.paged_attention_rocm``: call its source, or the lab's model of it.

    Its parameters have had the same first names since 0.9: out, exp_sum, max_logits, tmp_out, query,
    key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, query_start_loc, block_size,
    max_seq_len, alibi_slopes, kv_cache_dtype, … (vllm/_custom_ops.py).
    """
    first = ("out", "exp_sum", "max_logits", "tmp_out", "query", "key_cache", "value_cache")
    rest = ("num_kv_heads", "scale", "block_tables", "seq_lens", "query_start_loc", "block_size")
    last = ("max_seq_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale")
    given = {**dict(zip(first + rest + last, args, strict=False)), **kwargs}
    own = {
        name: given[name].cpu()
        for name in ("query", "key_cache", "value_cache", "seq_lens", "query_start_loc")
    }
    if "fp8" in given["kv_cache_dtype"]:
        own |= {name: own[name].view(torch.uint8) for name in ("key_cache", "value_cache")}
    slopes = given["alibi_slopes"]
    translated = dataclasses.replace(
        call,
        **own,
        output=given["out"].cpu(),
        block_table=given["block_tables"].cpu(),
        alibi_slopes=None if slopes is None else slopes.cpu(),
        key=call.key.cpu(),
        value=call.value.cpu(),
        max_seq_len=given["max_seq_len"],
        kv_cache_dtype=given["kv_cache_dtype"],
        k_scale=float(given["k_scale"]),
        v_scale=float(given["v_scale"]),
        sm_scale=given["scale"],
    )
    if rocm_source.emulates(source, target.platform):
        rocm_source.run(translated, target, source)
    else:
        paged_attention_rocm(translated, target)
    given["out"].copy_(translated.output)


def _explained(error: Exception, call: KernelCall, source: Source) -> AttnLabError:
    """Return what an op raised as the lab's error: a refusal of the op's own, what Triton or Python
    makes of its code, or a failure of this machine to run it."""
    text = " ".join(str(error).split()) or type(error).__name__
    stated = isinstance(error, ValueError | AssertionError | NotImplementedError)
    if stated and _raised_in(error).is_relative_to(source.root):
        return KernelRejected(text)
    if stated or isinstance(error, ArithmeticError):  # Triton's, or of the op's own arithmetic
        return KernelFailed(text)
    return Unavailable(f"{call.op} of {source.text()} cannot run here: {text}")


def _raised_in(error: Exception) -> Path:
    """Return the file that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return Path(trace.tb_frame.f_code.co_filename if trace is not None else "")
