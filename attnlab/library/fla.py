"""flash-linear-attention's ops, read from a wheel of fla-core or a checkout; run with 0.6.0."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from attnlab.library.op import Package, StateOp

# The arguments that all ops have. FLA's states are [sequences, heads, key_size, value_size] by default.
_ARGUMENTS = {
    **{"q": "query[None]", "k": "key[None]", "v": "value[None]", "scale": "scale"},
    **{"cu_seqlens": "query_start_loc.long()", "output_final_state": "True"},
    "initial_state": "initial_states if state_v_first else key_first(initial_states)",
    "state_v_first": "state_v_first",
}
# Those of the delta rule, in addition.
_GATED = {
    **_ARGUMENTS,
    "use_qk_l2norm_in_kernel": "use_norm",
    # Gates and beta, or what a layer projects: the kernels then compute both.
    "g": "(a if use_gate_in_kernel else gate)[None]",
    "beta": "(b if use_gate_in_kernel else beta)[None]",
    "use_gate_in_kernel": "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel": "use_gate_in_kernel",
    "A_log": "A_log if use_gate_in_kernel else None",
    "dt_bias": "dt_bias.flatten() if use_gate_in_kernel else None",
}
_LIMITED = {**_GATED, "lower_bound": "-gate_limit if gate_limit else None"}
_LEFT_OUT = {
    "batches of sequences of one length": "without cu_seqlens",
    "gradients": "the ops of the backward pass are not run",
}


def _dispatch(entry_point: Any) -> Callable[..., Any]:
    """Return the Triton function itself, in place of a choice among the backends that are installed."""
    return (lambda function: function) if isinstance(entry_point, str) else entry_point


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops take from modules that are not loaded."""
    return {
        "fla": {"__version__": "unknown"},  # its own imports all layers and models
        "fla.ops": {},  # its own imports all ops
        "fla.backends": {
            "dispatch": _dispatch,
            "register": lambda *names, **options: lambda function: function,
        },
    }


PACKAGE = Package(
    name="fla",
    title="FLA",
    distributions=("fla-core",),
    folders=("fla/ops",),
    is_whole=True,
    stubs=_stubs,
)

_op = partial(
    StateOp,
    library="fla",
    arguments=_GATED,
    gate_dtypes=("float32", "bfloat16", "float16"),
    result="returned[0][0]",
    final="returned[1] if state_v_first else key_first(returned[1])",
)
_LARGE_BETA = {"allow_neg_eigval": "a beta of up to 2"}
_SHARED_SEQUENCES = {"cp_context": "sequences that several GPUs share"}

# The gated delta rule of Qwen3-Next: one gate and one beta for each value head.
GATED_DELTA_RULE = _op(
    name="fla_fused_recurrent_gated_delta_rule",
    summary="the gated delta rule, one token after the other",
    module="gated_delta_rule/fused_recurrent",
    python_name="fused_recurrent_gated_delta_rule",
    left_out={**_LEFT_OUT, **_LARGE_BETA, "gk, gv": "gates for elements of keys and values"},
)
GATED_DELTA_RULE_CHUNK = _op(
    name="fla_chunk_gated_delta_rule",
    summary="the gated delta rule, in chunks of 64 tokens",
    module="gated_delta_rule/chunk",
    python_name="chunk_gated_delta_rule",
    chunk=64,
    left_out={**_LEFT_OUT, **_LARGE_BETA, **_SHARED_SEQUENCES},
)

# Kimi delta attention: the gated delta rule with a gate for each element of the key.
KDA = _op(
    name="fla_fused_recurrent_kda",
    summary="Kimi delta attention, one token after the other",
    module="kda/fused_recurrent",
    python_name="fused_recurrent_kda",
    arguments=_LIMITED,
    gate="key",
    left_out={**_LEFT_OUT, **_LARGE_BETA, "A_log None": "gates above a limit without A_log"},
)
KDA_CHUNK = replace(
    GATED_DELTA_RULE_CHUNK,
    name="fla_chunk_kda",
    summary="Kimi delta attention, in chunks of 64 tokens",
    module="kda/chunk",
    python_name="chunk_kda",
    arguments=_LIMITED,
    gate="key",
    left_out={**KDA.left_out, **_SHARED_SEQUENCES, "safe_gate": "products for gates above -5"},
)
# Gated linear attention with one gate for each head; lightning attention is that with constant gates.
# Its recurrent op can begin with the last token.
_ORDERED = {
    **_ARGUMENTS,
    **{name[0]: f"{name}[order][None]" for name in ("query", "key", "value")},
    "reverse": "reverse",
}
SIMPLE_GLA = _op(
    name="fla_fused_recurrent_simple_gla",
    summary="gated linear attention, one token after the other",
    module="simple_gla/fused_recurrent",
    python_name="fused_recurrent_simple_gla",
    arguments={**_ORDERED, "g": "gate[order][None]"},
    result="returned[0][0][order]",
    delta=False,
    norms=False,
    groups=False,
    left_out=_LEFT_OUT,
)
SIMPLE_GLA_CHUNK = replace(
    SIMPLE_GLA,
    name="fla_chunk_simple_gla",
    summary="gated linear attention, in chunks of 64 tokens",
    module="simple_gla/chunk",
    python_name="chunk_simple_gla",
    arguments={**_ARGUMENTS, "g": "gate[None]"},
    result=GATED_DELTA_RULE.result,
    chunk=64,
)
SIMPLE_GLA_CONSTANT, SIMPLE_GLA_CHUNK_CONSTANT = (
    replace(
        op,
        name=f"{op.name}_constant",
        summary=f"{op.summary}, with a constant gate for each head",
        arguments={**arguments, "g_gamma": "-A_log.exp()"},
        gate="constant",
        gate_dtypes=("float32",),
    )
    for op, arguments in ((SIMPLE_GLA, _ORDERED), (SIMPLE_GLA_CHUNK, _ARGUMENTS))
)
