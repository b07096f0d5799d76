"""vLLM's lightning attention: linear attention with a constant gate for each head."""

from attnlab.library.op import StateOp

_GATE = "A_log.exp()"
CHUNK = StateOp(
    name="vllm_lightning_attention",
    summary="lightning attention of one sequence, in blocks of 256 tokens",
    library="vllm_linear",
    module="lightning_attn",
    python_name="lightning_attention",
    arguments={
        **{name[0]: f"{name}.transpose(0, 1)[None].contiguous()" for name in ("query", "key")},
        **{"v": "value.transpose(0, 1)[None].contiguous()", "ed": _GATE},
        "kv_history": "key_first(initial_states)",
    },
    result="returned[0][0].transpose(0, 1)",
    final="key_first(returned[1][:, :, -1])",
    gate="constant",
    delta=False,
    scales=False,
    norms=False,
    groups=False,
    chunk=256,
    dtypes=("float32",),  # in 16 bits, tl.dot refuses a float32 operand with one of 16 bits
    square=64,
    one_sequence=True,
    empty=False,
)
DECODE = StateOp(
    name="vllm_linear_decode",
    summary="lightning attention of decodes, with the states in slots",
    library="vllm_linear",
    module="lightning_attn",
    python_name="linear_decode_forward_triton",
    arguments={
        **{name[0]: f"{name}[:, :, None].contiguous()" for name in ("query", "key", "value")},
        **{"kv_caches": "key_first(states)", "slope_rate": _GATE, "slot_idx": "state_indices"},
    },
    result="returned.view_as(value)",
    states="key_first(kv_caches)",
    gate="constant",
    delta=False,
    scales=False,
    norms=False,
    groups=False,
    slots=True,
    one_token=True,
    rounds=True,
    square=32,
    skips="rows",
)
