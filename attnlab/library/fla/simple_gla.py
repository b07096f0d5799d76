"""Gated linear attention with one gate for each head; lightning attention is that with constant gates."""

from attnlab.library.fla import ARGUMENTS, FINAL, LEFT_OUT, RESULT
from attnlab.library.op import StateOp

_GATED = {**ARGUMENTS, "g": "gate[None]"}
RECURRENT = StateOp(
    name="fla_fused_recurrent_simple_gla",
    summary="gated linear attention, one token after the other",
    library="fla",
    module="simple_gla/fused_recurrent",
    python_name="fused_recurrent_simple_gla",
    arguments=_GATED,
    result=RESULT,
    final=FINAL,
    delta=False,
    norms=False,
    groups=False,
    left_out={**LEFT_OUT, "reverse": "from the last token to the first"},
)
CHUNK = StateOp(
    name="fla_chunk_simple_gla",
    summary="gated linear attention, in chunks of 64 tokens",
    library="fla",
    module="simple_gla/chunk",
    python_name="chunk_simple_gla",
    arguments=_GATED,
    result=RESULT,
    final=FINAL,
    delta=False,
    norms=False,
    groups=False,
    chunk=64,
    left_out=LEFT_OUT,
)
