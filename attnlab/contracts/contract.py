"""Contract: what one kernel requires of a call and what it does with it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from attnlab.case.case import Case
from attnlab.case.ops import OPS, PREFILL, WRAPPER
from attnlab.case.platforms import PLATFORMS, Platform
from attnlab.case.shown import Shown

TRITON_DECODE = "kernel_paged_attention_2d"
ROCM_DECODE = "paged_attention_rocm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Everything that decides how a call runs and that is not an argument of the op.

    - ``wrapper_cast``: the op's Python wrapper converts int64 index tensors to int32.
    - ``rocm_custom_paged_attn``, ``aiter_paged_attn``: vLLM's settings VLLM_ROCM_CUSTOM_PAGED_ATTN and
      AITER paged attention.
    """

    platform: Platform = PLATFORMS["gfx942"]
    release: str = "0.33.0"
    wrapper_cast: bool = False
    rocm_custom_paged_attn: bool = True
    aiter_paged_attn: bool = False

    @classmethod
    def of(cls, case: Case) -> "Target":
        """Return the Case's target."""
        return cls(
            platform=case.machine,
            release=case.release,
            wrapper_cast=case.staging.wrapper_cast,
            rocm_custom_paged_attn=case.rocm_custom_paged_attn,
            aiter_paged_attn=case.aiter_paged_attn,
        )


PARTITION_SIZE = 256  # tokens per partition of the ROCm kernel
PREFILL_TILE = 128  # query rows per program of the prefill kernel, BLOCK_M
ENCODER_TILE = 128  # of triton_prefill_attention; 32 in float32 and for heads from 512 on


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Contract(Shown):
    """What one kernel requires of a call and what it does with it.

    - ``serves``: sequences whose rows it writes: "all", "prefill" (query_len ≠ 1) or "decode"
      (query_len = 1).
    - ``new_tokens_from``: where it takes keys and values of new tokens from: "arguments", "cache", or
      "by query_len" (the cache where query_len is 1, else the arguments).
    - ``on_int64``: what it does with an int64 tensor where it expects int32, by tensor name: "accept"
      (reads the dtype that it is given), "convert", "reject" or "reinterpret" (reads the bytes as
      int32). A tensor that is not listed is accepted.
    - ``reads_tail``: effect of the slots after seq_len in the last block: "nothing", or "value" where NaN
      in a value there reaches the output through 0 × NaN, or "key and value".
    - ``default_scale``: the size in 1 / sqrt(size) that the op uses if sm_scale is not passed:
      "head_size" or "num_heads"; None for a kernel that always receives a scale.
    - ``key_x_bytes``: bytes of the innermost dimension of the key cache that the kernel assumes,
      whatever the tensor's shape is; None if it reads the shape.
    - ``alibi_from``: where ALiBi counts distances from, each row's "query" or a sequence's "first new
      token". Both give the same softmax, except with a sink.
    - ``sinks``: attention sinks that it supports: "none", "without alibi" or "any".
    - ``softcap``: soft cap that it supports: "none", "any", or "overflows" where a score of 88 times the
      cap becomes NaN.
    - ``sink_dtypes``, ``kv_cache_dtypes``, ``dtypes``, ``head_sizes``, ``block_sizes``: supported values;
      empty means any.
    """

    name: str
    source: str
    serves: str
    new_tokens_from: str
    on_int64: dict[str, str] = field(default_factory=dict)
    reads_tail: str = "nothing"
    default_scale: str | None = None
    key_x_bytes: int | None = None
    block_size_multiple: int = 1
    alibi_from: str = "query"
    sinks: str = "none"
    sink_dtypes: tuple[str, ...] = ()
    softcap: str = "none"
    kv_cache_dtypes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    head_sizes: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()


# The contract of an op is in its record; those of the decode kernels that the wrapper calls are here.


def contract(name: str, target: Target, op: str) -> Contract:
    """Return the contract of a kernel, or of an op, as ``op`` calls it on ``target``."""
    if name == TRITON_DECODE:
        return _triton_decode(target)
    return _rocm_decode(target) if name == ROCM_DECODE else _of_record(name, target, op)


def contracts_of(kernels: Iterable[str], target: Target, op: str) -> tuple[Contract, ...]:
    """Return the contracts of the kernels that ``op`` runs on ``target``, in their order."""
    return tuple(contract(name, target, op) for name in kernels)


def _of_record(name: str, target: Target, op: str) -> Contract:
    """Return the contract of an op by its record. Called by another op, the prefill op serves prefill rows.

    A wrapper that casts converts the index tensors that the op would reject.
    """
    record = OPS[name]
    stated = record.contract_at(target.release)
    if target.wrapper_cast and "on_int64" in stated:
        stated["on_int64"] = dict.fromkeys(stated["on_int64"], "convert")
    formats = tuple(one for one in _triton_formats(target) if one in record.kv_cache_dtypes)
    usual = {
        "serves": "prefill" if name == PREFILL != op else "all",
        "kv_cache_dtypes": formats,
        "new_tokens_from": record.new_tokens_from,
    }
    return Contract(name=name, source=record.source(target.release), **{**usual, **stated})


def _triton_formats(target: Target) -> tuple[str, ...]:
    """Return the cache formats that Triton's kernels read: e4m3 needs compute capability 8.9 on CUDA."""
    e4m3 = ("fp8", "fp8_e4m3") if target.platform.triton_e4m3 else ()
    return ("auto", *e4m3, "fp8_e5m2")


def _triton_decode(target: Target) -> Contract:
    """Return the contract of Triton's paged decode.

    0.11.2 loads the whole last block and adds the mask to the scores (-inf + NaN is NaN), so NaN in
    its tail reaches the output through K and V. 0.33.0 masks the loads, and converts the block table to
    int32 before the launch.
    """
    old = target.release == "0.11.2"
    return Contract(
        name=TRITON_DECODE,
        source=OPS[WRAPPER].source(target.release),
        serves="decode",
        new_tokens_from="cache",
        on_int64={} if old else {"block_table": "convert"},
        reads_tail="key and value" if old else "nothing",
        kv_cache_dtypes=_triton_formats(target),
        sinks="any",
    )


def _rocm_decode(target: Target) -> Contract:
    """Return the contract of the ROCm custom kernel.

    ``block_tables`` and ``seq_lens`` are read through ``data_ptr<int>()``, which checks the dtype;
    ``query_start_loc`` through a ``reinterpret_cast``, which does not. With ``wrapper_cast`` the Python
    wrapper converts all three first. 0.33.0 masks value slots after seq_len (vLLM PR #53856); 0.11.2
    multiplies them by 0.
    """
    old = target.release == "0.11.2"
    names = ("block_table", "seq_lens", "query_start_loc")
    strict = {"block_table": "reject", "seq_lens": "reject", "query_start_loc": "reinterpret"}
    file = "attention.cu" if old else "attention_kernels.cuh"
    return Contract(
        name=ROCM_DECODE,
        source=f"csrc/rocm/{file}, vLLM {target.release}",
        serves="decode",
        new_tokens_from="cache",
        on_int64=dict.fromkeys(names, "convert") if target.wrapper_cast else strict,
        reads_tail="value" if old else "nothing",
        key_x_bytes=16,
        kv_cache_dtypes=("auto", "fp8", "fp8_e4m3"),
        dtypes=("float16", "bfloat16"),
        head_sizes=(64, 128),
        block_sizes=(16, 32),
    )
