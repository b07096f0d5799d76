"""vLLM's Kimi delta attention: prefills in chunks, decodes token by token, with slots."""

from attnlab.library.op import StateOp
from attnlab.library.vllm_linear import ARGUMENTS, CHUNKS, GATES, SLOTS

CHUNK = StateOp(
    name="vllm_chunk_kda",
    summary="Kimi delta attention of prefills, in chunks of 64 tokens",
    library="vllm_linear",
    module="kda",
    python_name="chunk_kda",
    arguments={**ARGUMENTS, **CHUNKS, **GATES},
    result="returned[0][0]",
    final="returned[1]",
    gate="key",
    chunk=64,
    dtypes=("bfloat16", "float16"),
    groups=False,
)
RECURRENT = StateOp(
    name="vllm_fused_recurrent_kda",
    summary="Kimi delta attention, one token after the other, with the states in slots",
    library="vllm_linear",
    module="kda",
    python_name="fused_recurrent_kda",
    arguments={**ARGUMENTS, **SLOTS, **GATES},
    result="returned[0][0]",
    states="states",
    gate="key",
    state_dtypes=("float32", "bfloat16"),
    groups=False,
    slots=True,
    skips="rows",
)
