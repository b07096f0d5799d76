"""Contract: what one kernel requires of a call and what it does with it."""

from dataclasses import dataclass, field

from attnlab.case.shown import Shown

PARTITION_SIZE = 256  # tokens per partition of the ROCm kernel
PREFILL_TILE = 128  # query rows per program of the prefill kernel, BLOCK_M
ENCODER_TILE = 128  # of triton_prefill_attention; 32 in float32 and for heads from 512 on


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Contract(Shown):
    """What one kernel requires of a call and what it does with it.

    - ``name``, ``source``: the kernel, and the vLLM file and release that the facts come from.
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
    - ``block_size_multiple``: the block size must be a multiple of this.
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
