"""OpArgument: arguments of vLLM's ops that no other field of a Case sets, each by a name.

A Case passes at most one of them, as its field ``op_argument``. Only backend "vllm" does. What an expression
cannot pass is in :mod:`attnlab.kernels.vllm.op_arguments`, the right result in
:mod:`attnlab.lab.argument_reference`.

``needs`` has only what the argument means: an ALiBi bias to take the root of, an FP8 cache for an FP8 query.
What an op refuses, it refuses itself. An op without an argument for the scales of its tensors gets them
without scales; it must refuse them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.ops import DECODE_FWD, ENCODER, MERGE, OPS, PREFILL, UNIFIED, WRAPPER, WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCache:
    """A cache whose keys and values have a scale per token and KV head.

    - ``numbers``: "int8", "fp8" (the platform's E4M3) or "int4". INT4 is rotated, has two numbers in a byte
      and the zero point in its scale. ``mode``: KVQuantMode of vLLM 0.33.0.
    """

    numbers: str
    mode: int


FunctionName = tuple[str, str]  # module and name


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The names that the source of an op must have for a feature.

    - ``own``: parameters of the function that is called.
    - ``inside``: parameters, or attributes that are read, of that function or of one that it runs.
    - ``function``: the function that is called, None for that of the op.
    """

    own: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    function: FunctionName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpArgument:
    """An argument, or several that belong together, with the values that a Case passes.

    - ``ops``: the ops that have it, in some release.
    - ``summary``: what it does. ``needs``: fields of the Case with the value that they must have.
    - ``requires``: what the source of an op must have, by op. ``passes``: arguments as expressions in those
      that the op gets without it; None if :mod:`attnlab.kernels.vllm.op_arguments` makes them.
    - ``cache``: the format of the cache if it has a scale per token and head. ``has_fp8``: whether it stores
      numbers in the platform's E4M3.
    - ``least_head_size``: the smallest head_size.
    - ``refused_masks``: masks with which the op refuses the argument; ``refusal``: by which line.
    - ``no_xray``: why values of 0 and 1 do not show the weights of the keys, or "".
    - ``strided``: the argument that passes the same numbers with other strides, or None.
    - ``includes``: by op, another op argument that it passes, too.
    """

    name: str
    ops: tuple[str, ...]
    summary: str
    needs: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Needs] = field(default_factory=dict)
    passes: Mapping[str, str] | None = None
    cache: ScaledCache | None = None
    has_fp8: bool = False
    least_head_size: int = 1
    refused_masks: tuple[str, ...] = ()
    refusal: str = ""
    no_xray: str = ""
    strided: str | None = None
    includes: Mapping[str, str] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Return the name of the argument that passes the same numbers with the usual strides."""
        return self.name if self.strided is None else self.strided

    @property
    def is_packed(self) -> bool:
        """Answer whether the cache has two numbers in a byte."""
        return self.cache is not None and self.cache.numbers == "int4"


NONE = "none"
NO_ARGUMENT = OpArgument(name=NONE, ops=(), summary="the op's own defaults")
_INT4_NAME = "INT4_PER_TOKEN_HEAD"
_SCALED = Needs(own=("kv_quant_mode", "k_scale_cache", "v_scale_cache"))
_SEGMENTS = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
# Functions that a release may have for an argument, in place of the op.
DIFFKV: FunctionName = ("triton_unified_attention_diffkv", "unified_attention_diffkv")
_WRITE = OPS[WRITE].module
WRITE_SCALED: FunctionName = (_WRITE, f"{_WRITE}_per_token_head_quant")
WRITE_DIFFKV: FunctionName = (_WRITE, f"{_WRITE}_diffkv")
_ALL = (
    OpArgument(
        name="alibi_sqrt",
        ops=(UNIFIED,),
        summary="the bias of ALiBi is the slope times the negative root of the distance",
        needs={"alibi": True},
        no_xray="its rules know the ALiBi bias by distance alone",
        requires={UNIFIED: Needs(own=("use_alibi_sqrt",))},
        passes={"use_alibi_sqrt": "True"},
    ),
    OpArgument(
        name="fp8_query",
        ops=(UNIFIED, WRAPPER, PREFILL, ENCODER, DECODE_FWD),
        summary="the query is FP8, with a scale; without a cache key and value are, too",
        needs={"kv_cache_dtype": "fp8"},
        has_fp8=True,
        requires={UNIFIED: Needs(own=("q_descale",))},
    ),
    OpArgument(
        name="fp8_output",
        ops=(WRAPPER, PREFILL, UNIFIED, MERGE),
        summary="the output is FP8, with a scale; in a merge the last tokens have no context",
        has_fp8=True,
        no_xray="an FP8 output holds a weight to 4 bits",
        requires={
            **dict.fromkeys((WRAPPER, UNIFIED, MERGE), Needs(own=("output_scale",))),
            PREFILL: Needs(own=("fp8_out_scale",)),
        },
        includes={MERGE: "suffix_only_tokens"},
    ),
    OpArgument(
        name="int8_per_token_head",
        ops=(UNIFIED, DECODE_FWD, WRITE),
        summary="the cache is int8, with a scale per token and KV head in caches with gaps",
        needs={"kv_cache_dtype": "auto"},
        cache=ScaledCache(numbers="int8", mode=2),
        requires={UNIFIED: _SCALED, WRITE: Needs(function=WRITE_SCALED)},
    ),
    OpArgument(
        name="fp8_per_token_head",
        ops=(UNIFIED, WRITE),
        summary="the cache is FP8, with a scale per token and KV head in caches with gaps",
        needs={"kv_cache_dtype": "auto"},
        cache=ScaledCache(numbers="fp8", mode=3),
        has_fp8=True,
        requires={UNIFIED: _SCALED, WRITE: Needs(function=WRITE_SCALED)},
    ),
    OpArgument(
        name="int4_per_token_head",
        ops=(UNIFIED, WRITE),
        summary="the cache is INT4, rotated, with a scale and a zero point per token and KV head",
        needs={"kv_cache_dtype": "auto"},
        cache=ScaledCache(numbers="int4", mode=4),
        least_head_size=2,
        refused_masks=("bidirectional", "causal_by_sequence"),
        refusal="unified_attention of vLLM 0.33.0 refuses others (triton_unified_attention.py, line 885)",
        requires={
            UNIFIED: Needs(own=_SCALED.own, inside=(_INT4_NAME,)),
            WRITE: Needs(own=("kv_quant_mode",), inside=(_INT4_NAME,), function=WRITE_SCALED),
        },
    ),
    OpArgument(
        name="diffkv",
        ops=(UNIFIED, WRITE),
        summary="values are narrower than keys, in one cache, by an op of its own",
        needs={"mask": "causal"},
        least_head_size=3,
        requires={UNIFIED: Needs(function=DIFFKV), WRITE: Needs(function=WRITE_DIFFKV)},
    ),
    OpArgument(
        name="tensor_descriptors",
        ops=(UNIFIED,),
        summary="the kernel reads and writes by tensor descriptors",
        requires={UNIFIED: Needs(own=("use_td",))},
        passes={"use_td": "True"},
    ),
    OpArgument(
        name="cached_new_tokens",
        ops=(WRAPPER, PREFILL),
        summary="key and value are None: new tokens come from the cache",
        no_xray="it passes coded values of new tokens as arguments, which the op does not get",
        requires=dict.fromkeys((WRAPPER, PREFILL), Needs(inside=("KV_FROM_CACHE",))),
        passes=dict.fromkeys(("k", "v", "key", "value"), "None"),
    ),
    OpArgument(
        name="block_pointers",
        ops=(WRAPPER, PREFILL),
        summary="the block table holds addresses",
        requires=dict.fromkeys((WRAPPER, PREFILL), Needs(own=("is_block_table_ptr",))),
    ),
    OpArgument(
        name="sinks_of_key_0",
        ops=(ENCODER,),
        summary="a sink is added to the score of key 0, and has no weight of its own",
        needs={"sinks": True},
        no_xray="its rules know no bias of a single key",
        requires={ENCODER: Needs(own=("sinks_bias_key0",))},
        passes={"sinks_bias_key0": "True"},
    ),
    OpArgument(
        name="skip_decode",
        ops=(PREFILL,),
        summary="sequences with one new token are not computed",
        needs={"output_init": "zeros"},
        no_xray="rows that the op skips have no weights",
        requires={PREFILL: Needs(own=("skip_decode",))},
        passes={"skip_decode": "True"},
    ),
    OpArgument(
        name="suffix_only_tokens",
        ops=(MERGE,),
        summary="the last tokens have no context: their prefix is not read",
        requires={MERGE: Needs(own=("prefill_tokens_with_context",))},
    ),
    OpArgument(
        name="no_lse",
        ops=(MERGE,),
        summary="the log-sum-exp is not returned; the last tokens have no context",
        requires={MERGE: Needs(own=("output_lse",))},
        passes={"output_lse": "None"},
        includes={MERGE: "suffix_only_tokens"},
    ),
    OpArgument(
        name="latent_cache",
        ops=(DECODE_FWD,),
        summary="the value is the first eight ninths, or all, of the key (MLA)",
        no_xray="the values are a part of the keys, so they cannot be coded alone",
    ),
    OpArgument(
        name="default_scales",
        ops=(DECODE_FWD,),
        summary="k_scale and v_scale are None",
        needs={"kv_cache_dtype": "auto"},
        requires={DECODE_FWD: Needs(own=("k_scale", "v_scale"))},
        passes=dict.fromkeys(("k_scale", "v_scale"), "None"),
    ),
    OpArgument(
        name="flat_buffers",
        ops=(DECODE_FWD,),
        summary="the caches have no dimension of blocks",
        passes={name: f"{name}.flatten(0, 1)" for name in ("k_buffer", "v_buffer")},
    ),
    OpArgument(
        name="gaps",
        ops=tuple(name for name, op in OPS.items() if op.strides),
        summary="every stride that the kernels use is larger than that of a contiguous tensor; that of "
        "values differs from that of keys",
        needs={"kv_layout": "contiguous", "pad_batch": 0, "interleave_v": False, "first_block": 0},
    ),
    OpArgument(
        name="padded_heads",
        ops=(MERGE,),
        summary="the heads of both parts and of the output are padded, as attention backends pad values",
        needs={"kv_layout": "contiguous", "pad_batch": 0, "interleave_v": False, "first_block": 0},
        passes={
            name: f"padded_heads({name})" for name in ("output", "prefix_output", "suffix_output")
        },
    ),
    OpArgument(
        name="short_scratch",
        ops=(UNIFIED,),
        summary="the scratch memory of the split path has fewer rows than there are tokens",
        requires={UNIFIED: Needs(own=_SEGMENTS)},
        passes={name: f"{name}[: q.shape[0] - 1]" for name in _SEGMENTS},
    ),
    OpArgument(
        name="no_max_seq_len",
        ops=(PREFILL,),
        summary="max_seq_len is None",
        requires={PREFILL: Needs(own=("max_seq_len",))},
        passes={"max_seq_len": "None"},
    ),
    OpArgument(
        name="fp8_tokens",
        ops=(WRITE,),
        summary="key and value are FP8 already",
        needs={"kv_cache_dtype": "fp8"},
        has_fp8=True,
    ),
    OpArgument(
        name="byte_cache",
        ops=(WRITE,),
        summary="the FP8 cache is passed as uint8",
        needs={"kv_cache_dtype": "fp8"},
        passes={name: f"{name}.view(uint8)" for name in ("key_cache", "value_cache")},
    ),
    OpArgument(
        name="named_cache_dtype",
        ops=(WRITE,),
        summary='kv_cache_dtype is "bfloat16", another name for an unscaled cache',
        needs={"kv_cache_dtype": "auto"},
        passes={"kv_cache_dtype": "'bfloat16'"},
    ),
    OpArgument(
        name="head_major",
        ops=(WRITE,),
        summary="the cache has the layout x-split, with heads before slots",
        requires={WRITE: Needs(inside=("USE_HEAD_MAJOR_LAYOUT",))},
    ),
    OpArgument(
        name="head_major_packed",
        ops=(WRITE,),
        summary="as head_major, with values in packs of 16 bytes",
        requires={WRITE: Needs(own=("interleaved_v_pack_factor",))},
    ),
)
# The formats of a cache write, each with the strides that its tensors can have.
_WRITTEN = (
    NO_ARGUMENT,
    *(one for one in _ALL if WRITE in one.ops and (one.cache or one.name == "diffkv")),
    *(one for one in _ALL if one.name.startswith("head_major")),
)
_STRIDED = (
    ("padded_tokens", "each head of key and value is padded", lambda one: True),
    (
        "spaced_values",
        "the blocks of the value cache are farther apart than those of the key cache",
        lambda one: one.cache is None and one.name != "diffkv",  # diffkv has one cache
    ),
)
OP_ARGUMENTS: dict[str, OpArgument] = {one.name: one for one in _ALL} | {
    name: dataclasses.replace(
        one,
        name=name,
        ops=(WRITE,),
        summary=summary if one is NO_ARGUMENT else f"as {one.name}; {summary}",
        requires={op: needs for op, needs in one.requires.items() if op == WRITE},
        strided=one.name,
    )
    for ending, summary, has in _STRIDED
    for one in _WRITTEN
    if has(one)
    for name in (ending if one is NO_ARGUMENT else f"{one.name}_{ending}",)
}
