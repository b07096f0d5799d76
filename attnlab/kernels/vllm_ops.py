"""Origin ``vllm``: vLLM's own attention ops, natively on a GPU, on a CPU under Triton's interpreter.

The platform is simulated as far as the ops ask for it: ``current_platform`` gives the Case's FP8 format
and capability, and the lab's dispatch answers ``use_rocm_custom_paged_attention``. Where that chooses
ROCm's own kernel, its source on the emulated device stands for ``ops.paged_attention_rocm``; the lab's
model of it where the vLLM comes without csrc/rocm, as a wheel does.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attnlab.call import KernelCall
from attnlab.dispatch import PREFILL, ROCM_DECODE, Setting
from attnlab.errors import AttnLabError, KernelRejected, Unavailable
from attnlab.hip.adapt import has_source
from attnlab.kernels import interpreter, rocm_source
from attnlab.kernels.loader import Loader
from attnlab.kernels.needed import needed
from attnlab.kernels.paged import format_of
from attnlab.kernels.rocm_decode import paged_attention_rocm
from attnlab.kernels.source import Source
from attnlab.kernels.stand_ins import Dispatch, stand_ins
from attnlab.platforms import Platform

_MODULES = {
    "chunked_prefill_paged_decode": "chunked_prefill_paged_decode",
    PREFILL: "prefix_prefill",
}
# Arguments of context_attention_fwd, by the names of a KernelCall's.
_PREFILL_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "b_loc": "block_table",
    "b_start_loc": "query_start_loc",
    "b_seq_len": "seq_lens",
    "max_input_len": "max_query_len",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The ops of one source on one platform."""

    loader: Loader
    dispatch: Dispatch

    def function(self, op: str) -> Callable[..., None]:
        """Return the op; raise Unavailable where the release has none."""
        module = self.loader.load(_MODULES[op])
        found: Callable[..., None] | None = getattr(module, op, None)
        if found is None:
            raise Unavailable(f"{_MODULES[op]} of this vLLM has no function {op}")
        return found


def device() -> torch.device:
    """Return where vLLM's kernels run here: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def origin_text(source: Source, kernels: Sequence[str]) -> str:
    """Return what ran, in words: the source, how, and what stood in for a kernel."""
    how = torch.cuda.get_device_name() if device().type == "cuda" else "Triton interpreter"
    if ROCM_DECODE not in kernels:
        return f"{source.text()}, {how}"
    decode = "csrc/rocm, emulated device" if has_source(source.root) else "model"
    return f"{source.text()}, {how}; ROCm decode: {decode}"


def run(
    call: KernelCall,
    setting: Setting,
    kernels: Sequence[str],
    source: Source,
    kv_heads: range | None = None,
    on_programs: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run the real op into ``call.output``; ``kv_heads`` are the KV heads that run, None is all.

    Raises KernelRejected with what the op raises, Unavailable where it cannot run here.
    """
    where = device()
    check_runs(call, setting, where, kv_heads)
    loaded = load(source, setting.platform, where.type)
    is_cpu = where.type == "cpu"
    output = interpreter.shared_copy(call.output) if is_cpu else call.output.to(where)
    tensors: dict[str, Any] = {**_on_device(call, setting, where), "output": output}
    moved = dataclasses.replace(call, **tensors)
    arguments = bind(loaded.function(call.op), moved, setting)
    loaded.dispatch.use_custom = ROCM_DECODE in kernels
    loaded.dispatch.rocm_decode = lambda *args, **kwargs: _rocm_decode(
        moved, setting, source, args, kwargs
    )
    plan = interpreter.Plan(
        needed=lambda kernel, args, program: needed(kernel, args, program, kv_heads),
        processes=interpreter.cores(),
        on_programs=on_programs,
    )
    try:
        with interpreter.launching(plan):
            loaded.function(call.op)(**arguments)
    except AttnLabError:
        raise
    except Exception as error:
        raise _explained(error, call, source) from error
    finally:
        loaded.dispatch.use_custom = False
        call.output.copy_(output)


def check_runs(
    call: KernelCall, setting: Setting, where: torch.device, kv_heads: range | None
) -> None:
    """Raise Unavailable for what would run and be wrong, or what cannot run, on this machine."""
    if where.type == "cuda":
        if kv_heads is not None:
            raise Unavailable("heads can be chosen under Triton's interpreter only; a GPU runs all")
        return
    if call.query.dtype == torch.bfloat16:
        raise Unavailable(
            "dtype must not be bfloat16 under Triton's interpreter: its dot product multiplies the "
            "raw bits; float16 and float32 are right"
        )
    format = format_of(call, setting)
    if format.is_fp8 and any(
        _holds_nan(c, format.name) for c in (call.key_cache, call.value_cache)
    ):
        raise Unavailable(
            f"a {format.name} cache must hold no NaN under Triton's interpreter, which decodes NaN "
            "as a finite number (0x7F as 480); choose empty=zeros or garbage"
        )


def _holds_nan(cache: torch.Tensor, name: str) -> bool:
    """Answer whether FP8 bytes hold a NaN or an infinity of their format."""
    if name == "fp8_e4m3fnuz":
        return bool((cache == 0x80).any())
    least = 0x7F if name == "fp8_e4m3fn" else 0x7C
    return bool(((cache & 0x7F) >= least).any())


@lru_cache(maxsize=16)
def load(source: Source, platform: Platform, device_type: str) -> Loaded:
    """Return the ops of a source as they load on a platform; they read its facts when they load."""
    interpret = device_type == "cpu"
    triton = interpreter.interpreted_triton() if interpret else interpreter.load_triton(False)
    dispatch = Dispatch()
    return Loaded(loader=Loader(source, stand_ins(platform, triton, dispatch)), dispatch=dispatch)


def load_stock(source: Source, platform: Platform) -> Loaded:
    """Return the ops with Triton's own interpreter, to measure and compare with."""
    dispatch = Dispatch()
    stubs = stand_ins(platform, interpreter.load_triton(interpret=True), dispatch)
    return Loaded(loader=Loader(source, stubs), dispatch=dispatch)


def _on_device(call: KernelCall, setting: Setting, where: torch.device) -> dict[str, torch.Tensor]:
    """Return the call's tensors on the device; the wrapper_cast stage converts its indices first."""
    moved = {}
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if isinstance(value, torch.Tensor) and field.name != "output":
            moved[field.name] = value.to(where)
    if setting.wrapper_cast:
        for name in ("block_table", "seq_lens", "query_start_loc"):
            moved[name] = moved[name].to(torch.int32)
    return moved


def bind(function: Callable[..., None], call: KernelCall, setting: Setting) -> dict[str, Any]:
    """Return the arguments of an op, by the names that the function has in its release.

    Scales are tensors of one float32. Raises Unavailable for a required parameter that a KernelCall has
    no value for.
    """
    names = _PREFILL_NAMES if call.op == PREFILL else {}
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        field = names.get(name, name)
        if hasattr(call, field):
            given[name] = getattr(call, field)
        elif parameter.default is inspect.Parameter.empty:
            raise Unavailable(f"{call.op} asks for {name}, which the lab does not know")
    for name in ("k_scale", "v_scale"):
        given[name] = torch.tensor([given[name]], device=call.query.device)
    return given


def _rocm_decode(
    call: KernelCall,
    setting: Setting,
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
    if has_source(source.root):
        rocm_source.run(translated, setting, source)
    else:
        paged_attention_rocm(translated, setting)
    given["out"].copy_(translated.output)


def _explained(error: Exception, call: KernelCall, source: Source) -> AttnLabError:
    """Return what an op raised as the lab's error: a refusal of the op's own, or a failure to run."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ValueError | AssertionError | NotImplementedError):
        return KernelRejected(text)
    return Unavailable(f"{call.op} of {source.text()} cannot run here: {text}")
