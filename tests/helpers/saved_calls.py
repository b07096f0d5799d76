"""Saved calls of a correct kernel, and users' kernels to replay them on."""

from pathlib import Path

import torch

import attnlab
from attnlab.tensors.call import KernelCall
from helpers.plugins import RIGHT

WRONG = RIGHT.replace("hidden = away > 0", "hidden = away > 1")  # one key too many
PLAIN = {
    "op": "unified_attention",
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 32,
    "block_size": 16,
    "query_lens": (5, 1),
    "ctx_lens": (40, 33),
    "distribution": "normal",
    "stage": "sound",
    "cache_write": "scaled",
    "platform": "sm_90",
}


def kernel_file(folder: Path, text: str, name: str) -> str:
    """Write a user's kernel; return it as the name of a backend."""
    file = folder / f"{name}.py"
    file.write_text(text)
    return f"{file}:my_attention"


def call_of(**changes: object) -> KernelCall:
    """Return the call of a small Case with its correct output."""
    return attnlab.run(attnlab.Case(**{**PLAIN, **changes})).call


def flash_call(output: torch.Tensor | None = None) -> KernelCall:
    """Return a call whose keys and values are halves of the blocks of one tensor."""
    torch.manual_seed(0)
    both = torch.randn(12, 2, 16, 2, 32).half()
    return KernelCall.from_tensors(
        query=torch.randn(6, 4, 32).half(),
        key_cache=both[:, 0],
        value_cache=both[:, 1],
        block_table=torch.randperm(12)[:8].view(2, 4).int(),
        seq_lens=torch.tensor([45, 34]).int(),
        query_start_loc=torch.tensor([0, 5, 6]).int(),
        output=output,
    )
