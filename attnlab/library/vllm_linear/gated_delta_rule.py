"""vLLM's gated delta rule: prefills in chunks, decodes and speculative decodes token by token, with slots."""

from dataclasses import replace

from attnlab.library.op import StateOp
from attnlab.library.vllm_linear import ARGUMENTS, CHUNKS, GATES, SLOTS

CHUNK = StateOp(
    name="vllm_chunk_gated_delta_rule",
    summary="the gated delta rule of prefills, in chunks of 64 tokens",
    library="vllm_linear",
    module="chunk",
    python_name="chunk_gated_delta_rule",
    arguments={**ARGUMENTS, **CHUNKS, **GATES},
    result="returned[0][0]",
    final="returned[1]",
    chunk=64,
    dtypes=("bfloat16", "float16"),
    left_out={"core_attn_out": "the output in a buffer of the caller"},
)
RECURRENT = StateOp(
    name="vllm_fused_recurrent_gated_delta_rule",
    summary="the gated delta rule, one token after the other, with the states in slots",
    library="vllm_linear",
    module="fused_recurrent",
    python_name="fused_recurrent_gated_delta_rule",
    arguments={**ARGUMENTS, **SLOTS, **GATES, "num_accepted_tokens": "num_accepted_tokens"},
    result="returned[0][0]",
    states="states",
    state_dtypes=("float32", "bfloat16"),
    slots=True,
    num_accepted=True,
    skips="rows",
    left_out={"inplace_final_state False": "a state for each token, in the order of the tokens"},
)
_SIGMOID = {
    **ARGUMENTS,
    **{"A_log": "A_log", "a": "a", "b": "b", "dt_bias": "dt_bias"},
    **SLOTS,
    "num_accepted_tokens": "num_accepted_tokens",
}
SIGMOID = StateOp(
    name="vllm_fused_sigmoid_gating_delta_rule_update",
    summary="the gated delta rule, one token after the other, with gate and beta computed in the kernel",
    library="vllm_linear",
    module="fused_sigmoid_gating",
    python_name="fused_sigmoid_gating_delta_rule_update",
    arguments=_SIGMOID,
    result="returned[0][0]",
    states="states",
    raw_gate=True,
    state_dtypes=("float32", "bfloat16"),
    slots=True,
    num_accepted=True,
    skips="rows",
    left_out={"beta, threshold": "other constants of softplus"},
)
PACKED = StateOp(
    name="vllm_fused_recurrent_gated_delta_rule_packed_decode",
    summary="the gated delta rule of decodes, with queries, keys and values in one tensor",
    library="vllm_linear",
    module="fused_recurrent",
    python_name="fused_recurrent_gated_delta_rule_packed_decode",
    arguments={
        "mixed_qkv": "packed(query, key, value)",
        **{"a": "a", "b": "b", "A_log": "A_log", "dt_bias": "dt_bias", "scale": "scale"},
        **{"initial_state": "states", "out": "nan_like(value[:, None])"},
        **{"ssm_state_indices": "state_indices", "use_qk_l2norm_in_kernel": "use_norm"},
    },
    result="out[:, 0]",
    states="states",
    raw_gate=True,
    state_dtypes=("float32", "bfloat16"),
    slots=True,
    one_token=True,
    skips="zeros",
)
SIGMOID_KDA = replace(
    SIGMOID,
    name="vllm_fused_sigmoid_gating_delta_rule_update_kda",
    summary="the same with is_kda: a gate for each element of the key",
    arguments={**_SIGMOID, "is_kda": "True"},
    gate="key",
    left_out={},
)
