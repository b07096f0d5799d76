"""Dispatch of a call that has no Case, such as a captured one."""

from attnlab.case.case import Case
from attnlab.case.ops import WRAPPER
from attnlab.contracts.dispatch import decide
from attnlab.tensors.call import KernelCall


def kernels_of(case: Case, call: KernelCall) -> tuple[str, ...]:
    """Return the kernels that would serve a call on the Case's platform and release.

    Everything else that dispatch depends on comes from the call.
    """
    if call.op != WRAPPER:
        return (call.op,)
    _, num_heads, head_size = call.query.shape
    call_case = case.replace(
        op=call.op,
        num_heads=num_heads,
        num_queries_per_kv=call.num_queries_per_kv,
        head_size=head_size,
        block_size=call.block_size,
        dtype=str(call.query.dtype).removeprefix("torch."),
        kv_cache_dtype=call.kv_cache_dtype,
        sliding_window=call.sliding_window,
        alibi=call.alibi_slopes is not None,
        sinks=call.sinks is not None,
        softcap=call.softcap,
        x=call.key_cache.shape[4],
        query_lens=(1,),
        ctx_lens=(0,),
        kv_head_range=None,
        seq_range=None,
        max_seq_len=call.max_seq_len,
        max_query_len=call.max_query_len,
        block_table=None,
        num_blocks=None,
        max_blocks_per_seq=None,
    )
    return decide(call_case).kernels
