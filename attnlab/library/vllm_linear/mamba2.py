"""vLLM's kernels of Mamba 2: prefills in chunks, decodes token by token, with slots."""

from attnlab.library.op import StateOp

CHUNK = StateOp(
    name="vllm_mamba_chunk_scan",
    summary="Mamba 2 of prefills, in chunks of 64 tokens",
    library="vllm_linear",
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
    delta=False,
    steps=True,
    skip=True,
    scales=False,
    norms=False,
    chunk=64,
    empty=False,
    left_out={
        "z": "a gate of the output",
        "chunks of vLLM's scheduler": "every chunk of a sequence but its last has 64 tokens",
        "return_intermediate_states, final_states_out": "the states of all chunks, and in slots",
    },
)
UPDATE = StateOp(
    name="vllm_selective_state_update",
    summary="Mamba 2, one token after the other, with the states in slots",
    library="vllm_linear",
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
    states="states",
    delta=False,
    steps=True,
    skip=True,
    scales=False,
    norms=False,
    state_dtypes=("float32", "bfloat16"),
    slots=True,
    num_accepted=True,
    skips="rows",
    left_out={
        "z": "a gate of the output",
        "Mamba 1": "an A, a step and a bias for each element",
        "dst_state_batch_indices": "other slots for the states after the call",
        "enable_stochastic_rounding": "states that are rounded at random",
    },
)
