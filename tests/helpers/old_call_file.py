"""A saved call in format 1, that of attnlab 0.1.0, written byte by byte."""

import json
import struct
from pathlib import Path

OLD_CALL = {
    "op": "unified_attention",
    "kv_cache_dtype": "auto",
    "max_seq_len": 3,
    "max_query_len": 1,
    "k_scale": 1.0,
    "v_scale": 1.0,
    "sliding_window": 0,
    "sm_scale": 0.5,
    "interleave_v": False,
    "strides": "contiguous",
    "padding": 0,
}
# Of each tensor: shape, dtype in safetensors, format in struct, and the numbers.
_TENSORS = {
    "query": ([1, 1, 4], "F32", "f", [1.0, 0.5, 0.25, 2.0]),
    "key": ([1, 1, 4], "F32", "f", [0.0] * 4),
    "value": ([1, 1, 4], "F32", "f", [0.0] * 4),
    "output": ([1, 1, 4], "F32", "f", [0.0] * 4),
    "key_cache": ([2, 1, 1, 4, 4], "F32", "f", list(range(32))),
    "value_cache": ([2, 1, 4, 4], "F32", "f", list(range(32))),
    "block_table": ([1, 1], "I32", "i", [1]),
    "query_start_loc": ([2], "I32", "i", [0, 1]),
    "seq_lens": ([1], "I32", "i", [3]),
}


def write_old_call(path: Path) -> None:
    """Write the file: the length of the header, the header in JSON, and the numbers."""
    header: dict[str, object] = {"__metadata__": {"attnlab_call": json.dumps(OLD_CALL)}}
    data = b""
    for name, (shape, dtype, code, numbers) in _TENSORS.items():
        part = struct.pack(f"<{len(numbers)}{code}", *numbers)
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
