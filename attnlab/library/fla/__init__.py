"""flash-linear-attention's ops, read from a wheel of fla-core or a checkout; run with 0.6.0."""

from collections.abc import Callable
from typing import Any

from attnlab.library.op import Package

# The arguments that all ops have. FLA's states are [sequences, heads, key_size, value_size].
ARGUMENTS = {
    **{"q": "query[None]", "k": "key[None]", "v": "value[None]", "scale": "scale"},
    **{"cu_seqlens": "query_start_loc.long()", "output_final_state": "True"},
    "initial_state": "key_first(initial_states)",
}
# Those of the delta rule, in addition.
GATED = {
    **ARGUMENTS,
    **{"g": "gate[None]", "beta": "beta[None]", "use_qk_l2norm_in_kernel": "use_norm"},
}
RESULT, FINAL = "returned[0][0]", "key_first(returned[1])"
LEFT_OUT = {
    "batches of sequences of one length": "without cu_seqlens",
    "state_v_first": "states with the values first",
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
