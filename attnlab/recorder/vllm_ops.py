"""vLLM's attention ops in Python (releases 0.11.2 and 0.33.0), and what their names alone do not say."""

from typing import Any

import torch

from attnlab.case.ops import CPU_ATTENTION, DECODE_FWD, OPS, PREFILL, UNIFIED, WRAPPER
from attnlab.recorder.argument_names import Reading
from attnlab.recorder.cache_writes import write_ops
from attnlab.recorder.recorded_op import RecordedOp, no_change

FOLDERS = ("vllm.attention.ops", "vllm.v1.attention.ops")  # of 0.11.2, and of later releases
_CUSTOM = "vllm._custom_ops"


def _wrapper(arguments: dict[str, Any], reading: Reading) -> None:
    """Read every token from the cache if there are no new ones (0.33.0); a block table of pointers is no
    table of block numbers."""
    if "key" not in reading.fields and "value" not in reading.fields:
        reading.fields["op"] = UNIFIED
    if arguments.get("is_block_table_ptr"):
        reading.unmodelled.append("is_block_table_ptr")


def _unified(arguments: dict[str, Any], reading: Reading) -> None:
    """Limit a window to the right as the op does: as far as to the left, in sequences that are not causal."""
    window, both = reading.fields.get("sliding_window"), arguments.get("window_size")
    if isinstance(both, (tuple, list)) and both[0] == both[1]:
        reading.unknown.pop("window_size", None)
    if window and reading.fields.get("causal", True) is not True:
        reading.fields["window_right"] = window - 1


def _decode(arguments: dict[str, Any], reading: Reading) -> None:
    """Give each block a dimension of its own. With ``is_mla``, values are the first part of the keys."""
    page_size = arguments.get("page_size", 1)
    for name in ("key_cache", "value_cache", "key", "value"):
        tensor = reading.fields.pop(name, None)
        if isinstance(tensor, torch.Tensor):
            paged = tensor.unflatten(0, (-1, page_size)) if tensor.dim() == 3 else tensor
            reading.fields[name.removesuffix("_cache") + "_cache"] = paged
    table = reading.fields.get("block_table")
    if isinstance(table, torch.Tensor) and table.dim() == 3 and table.shape[2] == 1:
        reading.fields["block_table"] = table[:, :, 0]  # as vLLM's own test passes it
    query = reading.fields.get("query")
    lens = reading.fields.get("seq_lens")
    if isinstance(query, torch.Tensor) and isinstance(lens, torch.Tensor):
        reading.fields["seq_lens"] = lens[: len(query)]
    if arguments.get("is_mla") and "k_scale" in reading.fields:
        reading.fields["v_scale"] = reading.fields["k_scale"]


def _paged_v1(arguments: dict[str, Any], reading: Reading) -> None:
    """One new token per sequence, read from the cache."""
    reading.fields.pop("query_start_loc", None)


def _rocm(arguments: dict[str, Any], reading: Reading) -> None:
    """Sequences with several new tokens are left to another kernel: their rows are not this op's."""
    if arguments.get("query_start_loc") is not None:
        reading.unmodelled.append("query_start_loc")


def _cpu(arguments: dict[str, Any], reading: Reading) -> None:
    """View the cache as x-split: its keys have the tokens of a block innermost (0.32.0, "vec")."""
    key, value = reading.fields.get("key_cache"), reading.fields.get("value_cache")
    if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        return
    blocks, heads, block_size, head_size = key.shape
    strides = (key.stride(0), key.stride(1), block_size, 1)
    by_token = key.as_strided((blocks, heads, head_size, block_size), strides)
    reading.fields["key_cache"] = by_token.unsqueeze(-1)
    reading.fields["value_cache"] = value.transpose(2, 3)
    if key.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        reading.unmodelled.append("key_cache, packed for AMX")


_READS = {
    **dict.fromkeys((WRAPPER, PREFILL), ("is_block_table_ptr",)),
    DECODE_FWD: ("page_size", "is_mla"),
}
# Of the compiled ops; the sizes of block-sparse attention matter only with blocksparse_vert_stride.
_OF_CUSTOM = (
    "tp_rank", "blocksparse_local_blocks", "blocksparse_block_size", "blocksparse_head_sliding_step",
    "block_size", "num_kv_heads",
)  # fmt: skip


def vllm_ops() -> tuple[RecordedOp, ...]:
    """Return the attention ops and the cache writes of vLLM that are recorded."""
    adjusts = {WRAPPER: _wrapper, PREFILL: _wrapper, UNIFIED: _unified, DECODE_FWD: _decode}
    found = [
        RecordedOp(
            module=f"{folder}.{OPS[name].module}",
            function=OPS[name].function,
            op=name,
            layout=OPS[name].cache_layout,
            adjust=adjusts.get(name, no_change),
            reads=_READS.get(name, ()),
        )
        for folder in FOLDERS
        for name in (WRAPPER, PREFILL, UNIFIED, DECODE_FWD)
    ]
    customs = {
        "paged_attention_v1": (WRAPPER, "x-split", _paged_v1),
        "paged_attention_v2": (WRAPPER, "x-split", _paged_v1),
        "paged_attention_rocm": (WRAPPER, "x-split", _rocm),
        CPU_ATTENTION: (CPU_ATTENTION, "x-split", _cpu),
    }
    for function, (op, layout, adjust) in customs.items():
        found.append(
            RecordedOp(
                module=_CUSTOM,
                function=function,
                op=op,
                layout=layout,
                adjust=adjust,
                reads=_OF_CUSTOM,
            )
        )
    return (*found, *write_ops(FOLDERS, _CUSTOM))
