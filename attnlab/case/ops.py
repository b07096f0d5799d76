"""The ops that a Case can name: the records of all libraries (:mod:`attnlab.library`), by name."""

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.library.op import KV_CACHE_DTYPES, RELEASES, Op, fill_read, libraries, ops_of

__all__ = ["KV_CACHE_DTYPES", "OPS", "RELEASES", "Op", "fill_read"]
WRAPPER = "chunked_prefill_paged_decode"
PREFILL = "context_attention_fwd"
ENCODER = "triton_prefill_attention"
UNIFIED = "unified_attention"
DECODE_FWD = "decode_attention_fwd"
MERGE = "merge_attn_states"
WRITE = "reshape_and_cache_flash"
CPU_ATTENTION = "cpu_attention_with_kv_cache"

# vLLM's first, in the order in which its ops are checked and listed; then those of other libraries.
_FIRST = (WRAPPER, PREFILL, ENCODER, UNIFIED, DECODE_FWD, MERGE, WRITE, CPU_ATTENTION)
_RECORDS = {op.name: op for library in libraries() for op in ops_of(library)}
OPS: dict[str, Op] = {name: _RECORDS[name] for name in dict.fromkeys((*_FIRST, *_RECORDS))}
DEFAULT_OP = WRAPPER
VLLM_OPS = tuple(op.name for op in OPS.values() if op.library == "vllm")
TRITON_OPS = tuple(name for name in VLLM_OPS if OPS[name].is_triton)


def check_weighs_values(op: Op) -> None:
    """Raise InvalidCase for an op that writes the cache."""
    if op.writes_cache:
        raise InvalidCase(
            f"op must be an attention op, got {op.name}: it weighs no values, so there are no weights; "
            "attnlab run compares the cache that it writes"
        )


def check_scored(op: Op) -> None:
    """Raise InvalidCase for an op whose tests have no score: one that writes the cache."""
    if op.writes_cache:
        refuse("op", "an attention op to be scored", op.name)
