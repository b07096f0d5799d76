"""Kimi delta attention: the gated delta rule with a gate for each element of the key."""

from attnlab.library.fla import FINAL, GATED, LEFT_OUT, RESULT
from attnlab.library.op import StateOp

RECURRENT = StateOp(
    name="fla_fused_recurrent_kda",
    summary="Kimi delta attention, one token after the other",
    library="fla",
    module="kda/fused_recurrent",
    python_name="fused_recurrent_kda",
    arguments=GATED,
    result=RESULT,
    final=FINAL,
    gate="key",
    left_out=LEFT_OUT,
)
CHUNK = StateOp(
    name="fla_chunk_kda",
    summary="Kimi delta attention, in chunks of 64 tokens",
    library="fla",
    module="kda/chunk",
    python_name="chunk_kda",
    arguments=GATED,
    result=RESULT,
    final=FINAL,
    gate="key",
    chunk=64,
    left_out={**LEFT_OUT, "cp_context": "sequences that several GPUs share"},
)
