"""Compare LightLLM's ops with attention in float64, without attnlab: the faults of docs/libraries.md.

    TRITON_INTERPRET=1 python tools/lightllm_findings.py CHECKOUT

Each fault is run twice: with a call that shows it, and with a similar call that is right. The slots beyond
2^31 elements reserve 9 GB of address space; few of its pages are used.
"""

import importlib
import math
import sys
import types

import torch

SIZE, STRIDE, FAR = 32, 256, 2**31
MODELS = "lightllm.models.{}.triton_kernel.{}"
FORWARD = "context_flashattention_nopad"


def function_of(checkout: str, model: str, module: str, name: str):
    """Return an op; the module that asks for the GPU's name is replaced."""
    for package in ("lightllm", "lightllm.models", f"lightllm.models.{model}"):
        made = sys.modules.setdefault(package, types.ModuleType(package))
        made.__path__ = [f"{checkout}/{package.replace('.', '/')}"]
    utils = types.ModuleType("lightllm.utils.device_utils")
    utils.is_tesla = lambda: False
    sys.modules["lightllm.utils"] = types.ModuleType("lightllm.utils")
    sys.modules["lightllm.utils.device_utils"] = utils
    return getattr(importlib.import_module(MODELS.format(model, module)), name)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int = 0):
    """Return causal attention of one sequence, [queries, heads, size] float64; keys: [keys, heads, size]."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, 1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) / math.sqrt(query.shape[2])
    away = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    seen = (away >= 0) & (away < (window or math.inf))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), value)


def windowed(checkout: str, length: int, window: int) -> str:
    """Return how far Mistral's prefill of one sequence is from attention, and its rows of NaN."""
    forward = function_of(checkout, "mistral", FORWARD, "context_attention_fwd")
    query, key, value = (torch.randn(length, heads, SIZE).half() for heads in (4, 2, 2))
    output = torch.zeros_like(query)
    starts, lens = torch.tensor([0], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    forward(query, key, value, output, starts, lens, length, window)
    error = (output.double() - attention(query, key, value, window)).abs()
    lost = output.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    rows = f"rows {lost[0]} to {lost[-1]} are NaN, the others" if lost else "all rows"
    return f"{rows} differ by at most {error[~error.isnan()].max():.4f}"


def far(checkout: str, name: str, first: int, length: int = 40) -> str:
    """Return how far one new token, whose keys are in the slots from ``first`` on, is from attention."""
    model, module, function = {
        "llama context": ("llama", FORWARD, "context_attention_fwd"),
        "phi3 context": ("phi3", FORWARD, "context_attention_fwd"),
        "llama decode": ("llama", "gqa_decode_flashattention_nopad", "gqa_decode_attention_fwd"),
    }[name]
    forward = function_of(checkout, model, module, function)
    heads, slots = STRIDE // SIZE, FAR // STRIDE + 64
    # A read before the cache, at -2^31, is inside this memory.
    key, value = (
        torch.empty(FAR + slots * STRIDE, dtype=torch.float16)[FAR:].view(slots, heads, SIZE)
        for _ in range(2)
    )
    where = slice(first, first + length)
    for cache in (key, value):
        cache[where] = torch.randn(length, heads, SIZE).half()
    query = torch.randn(1, 2 * heads, SIZE).half()
    output = torch.zeros_like(query)
    zero, lens = (torch.tensor([n], dtype=torch.int32) for n in (0, length))
    table = torch.arange(first, first + length, dtype=torch.int32)[None]
    if name == "llama decode":
        forward(query, key, value, output, table, zero, lens)
    else:
        forward(query, key, value, output, zero, zero, lens, lens - 1, 1, table)
    error = (output.double() - attention(query, key[where], value[where])).abs()
    return f"differs by at most {error.max():.4f}"


if __name__ == "__main__":
    torch.manual_seed(0)
    checkout = sys.argv[1]
    for length, window in ((129, 1), (128, 1), (531, 270), (531, 531), (397, 270)):
        print(f"prefill of {length} tokens, window {window}: {windowed(checkout, length, window)}")
    for name in ("llama context", "phi3 context", "llama decode"):
        for first in (0, FAR // STRIDE - 40, FAR // STRIDE):
            print(f"{name}, slots from {first}: {far(checkout, name, first)}")
