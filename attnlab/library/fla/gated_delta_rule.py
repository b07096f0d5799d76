"""The gated delta rule of Qwen3-Next: one gate and one beta for each value head."""

from attnlab.library.fla import FINAL, GATED, LEFT_OUT, RESULT
from attnlab.library.op import StateOp

RECURRENT = StateOp(
    name="fla_fused_recurrent_gated_delta_rule",
    summary="the gated delta rule, one token after the other",
    library="fla",
    module="gated_delta_rule/fused_recurrent",
    python_name="fused_recurrent_gated_delta_rule",
    arguments=GATED,
    result=RESULT,
    final=FINAL,
    left_out={**LEFT_OUT, "gk, gv": "gates for elements of keys and values"},
)
CHUNK = StateOp(
    name="fla_chunk_gated_delta_rule",
    summary="the gated delta rule, in chunks of 64 tokens",
    library="fla",
    module="gated_delta_rule/chunk",
    python_name="chunk_gated_delta_rule",
    arguments=GATED,
    result=RESULT,
    final=FINAL,
    chunk=64,
    left_out={**LEFT_OUT, "cp_context": "sequences that several GPUs share"},
)
