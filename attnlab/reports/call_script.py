"""A script that reproduces a wrong call without the lab: it holds the tensors of the call."""

import base64
import textwrap
import zlib
from typing import Any

import torch

from attnlab.case.ops import OPS, TRITON_OPS
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.rows import cached_lens
from attnlab.contracts.target import Target
from attnlab.kernels.model import cache_reads as paged
from attnlab.kernels.vllm.op_calls import OP_CALLS
from attnlab.reports.mask_script import mask_facts
from attnlab.reports.upstream import expression, render
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import has_fp8_query, has_scaled_output
from attnlab.tensors.storage import stored_tensors

_MOST_BYTES = 4 << 20  # of the tensors of a call, compressed


def why_no_script(call: KernelCall) -> str:
    """Return why a script cannot reproduce a call, or "" if it can."""
    if call.op not in TRITON_OPS or not call.spec.attends_to_cache:
        return f"a script calls vLLM's Triton ops on a cache, and {call.op} is none"
    if call.interleave_v or call.padding or call.strides != "contiguous":
        return "a script has no interleaved values, padding or strides of the lab"
    if has_fp8_query(call) or has_scaled_output(call):
        return "the reference of a script has no FP8 query and no scaled output"
    if call.query.shape[2] != call.value_cache.shape[2]:
        return "the reference of a script has keys and values of one width"
    if not all(isinstance(scale, float | int) for scale in (call.k_scale, call.v_scale)):
        return "the reference of a script has one scale per cache"
    return ""


def call_script(
    call: KernelCall, target: Target, *, version: str, device: str, evidence: str
) -> str:
    """Return the text of a script that calls the op of the installed vLLM and compares with float64.

    - ``version``: a description of the vLLM that ran; ``device``: "cuda", or "cpu" for Triton's interpreter.
    - ``evidence``: what is wrong, in one sentence.

    The call must have a script (:func:`why_no_script`), and be on the CPU. Returns "" if its tensors are too
    large for one.
    """
    arguments = OP_CALLS[call.op].arguments(call, target)
    texts = {name: expression(name, value, call) for name, value in arguments.items()}
    caches = {
        text: arguments[name]
        for name, text in texts.items()
        if text in ("key_cache", "value_cache")
    }
    facts = {**_sizes(call), **_tensors(call, target, caches)}
    if sum(map(len, facts["storages"].values())) > _MOST_BYTES:
        return ""
    return render(
        "call_repro.py.j2",
        {
            **facts,
            "title": f"{call.op}: output is wrong",
            "evidence": evidence.rstrip("."),
            "version": version,
            "how": "natively" if device == "cuda" else "under Triton's interpreter on a CPU",
            "arguments": texts,
            "output": next(name for name, text in texts.items() if text == "output"),
        },
    )


def _sizes(call: KernelCall) -> dict[str, Any]:
    """Return the numbers of a call by the template's names."""
    sinks = call.sinks
    return {
        "op": call.op,
        "function": OPS[call.op].function,
        "module": OPS[call.op].module,
        "first_block": 0,
        "query_lens": call.query_lens.tolist(),
        "seq_lens": call.seq_lens.tolist(),
        "starts": call.query_start_loc.tolist(),
        "num_heads": call.query.shape[1],
        "num_kv_heads": call.key.shape[1],
        "head_size": call.query.shape[2],
        "block_size": call.block_size,
        "dtype": _name(call.query.dtype),
        "scale": repr(call.query.shape[2] ** -0.5 if call.sm_scale is None else call.sm_scale),
        "block_table": call.block_table.tolist(),
        "block_table_dtype": _name(call.block_table.dtype),
        "alibi_slopes": None if call.alibi_slopes is None else call.alibi_slopes.tolist(),
        "sinks": None if sinks is None else sinks.tolist(),
        "sinks_dtype": None if sinks is None else _name(sinks.dtype),
        "softcap": call.softcap,
        "sliding_window": call.sliding_window,
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
        "setting": _setting(call),
        **mask_facts(call),
        "op_argument": "",
    }


def _setting(call: KernelCall) -> str:
    """Return the features of a call as a phrase."""
    words = [
        f"{call.query.shape[1]} query heads on {call.key.shape[1]} KV heads of {call.query.shape[2]}",
        f"blocks of {call.block_size}",
        _name(call.query.dtype),
    ]
    words += [] if call.kv_cache_dtype == "auto" else [f"kv_cache_dtype {call.kv_cache_dtype}"]
    words += [f"a sliding window of {call.sliding_window}"] if call.sliding_window else []
    words += [f"mask {name}" for name in call.visibility.masks]
    words += [] if call.alibi_slopes is None else ["ALiBi"]
    words += [] if call.sinks is None else ["sinks"]
    words += [] if call.softcap is None else [f"a soft cap of {call.softcap:g}"]
    return ", ".join(words)


def _tensors(call: KernelCall, target: Target, caches: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors as text: storages, and the place of each tensor in them.

    ``caches``: key_cache and value_cache as the op gets them.
    """
    cached = cached_lens(contract(call.op, target, call.op), call).tolist()
    contexts = (call.seq_lens.long() - call.query_lens).tolist()
    held = contexts if call.new_tokens == "given" else cached
    read = paged.format_of(call, target)
    tensors = {"query": call.query, **caches}
    if call.new_tokens == "given":
        tensors |= {"new_keys": call.key, "new_values": call.value}
    if call.before is not None:
        tensors["output"] = call.before
    storages, stored = stored_tensors({name: _small(one) for name, one in tensors.items()})
    return {
        "tensors": stored,
        "storages": {name: _text(one.numpy().tobytes()) for name, one in storages.items()},
        "cached": cached,
        "held": held,
        "has_new": "new_keys" in tensors,
        "flash": call.spec.cache_layout == "flash",
        "fp8": _name(read.dtype) if read.is_fp8 else "",
    }


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the rest of its storage, if that is mostly of other tensors."""
    used = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() <= 4 * used else tensor.clone()


def _text(data: bytes) -> str:
    """Return bytes as lines of text."""
    return "\n".join(textwrap.wrap(base64.b64encode(zlib.compress(data, 9)).decode(), 110))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
