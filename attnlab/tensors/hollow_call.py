"""A Case's call without its numbers, for questions that only shapes and index tensors answer."""

import torch

from attnlab.case.case import Case
from attnlab.tensors.batch import alibi_slopes, sink_logits
from attnlab.tensors.cache import make_block_table
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import call_of
from attnlab.tensors.formats import FORMATS, read_format, written_format


def hollow_call(case: Case) -> KernelCall:
    """Return a call with the shapes, dtypes and index tensors of the Case's call, without its numbers.

    The other tensors are memory that is never written, so the call takes no time and next to no memory.
    """
    tokens, heads, head_size = case.lengths.num_tokens, case.num_kv_heads, case.head_size
    dtype, stored = FORMATS[case.dtype].dtype, written_format(case).storage
    key_cache = (case.total_blocks, heads, head_size // case.key_x, case.block_size, case.key_x)
    output = torch.empty(tokens, case.num_heads, head_size, dtype=dtype)
    if case.spec.writes_cache:
        output = torch.empty(
            (case.total_blocks * case.block_size, heads, 2 * head_size),
            dtype=read_format(case.kv_cache_dtype, dtype, case.machine.fp8_e4m3).dtype,
        )
    return call_of(
        case,
        make_block_table(case),
        query=torch.empty(tokens, case.num_heads, head_size, dtype=dtype),
        key=torch.empty(tokens, heads, head_size, dtype=dtype),
        value=torch.empty(tokens, heads, head_size, dtype=dtype),
        output=output,
        key_cache=torch.empty(key_cache, dtype=stored),
        value_cache=torch.empty((*key_cache[:2], head_size, case.block_size), dtype=stored),
        alibi_slopes=alibi_slopes(case.num_heads) if case.alibi else None,
        sinks=sink_logits(case.num_heads, case.seed) if case.sinks else None,
    )
