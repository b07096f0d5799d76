"""How to call each of vLLM's Triton ops: its module, its function, and its arguments from a KernelCall.

The arguments of all supported releases are listed, by vLLM's names. :func:`bind` passes those that the
function of the loaded release has.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.errors import Unavailable
from attnlab.case.ops import DECODE_FWD, ENCODER, MERGE, PREFILL, UNIFIED, WRAPPER, WRITE
from attnlab.contracts.contract import Target
from attnlab.kernels import model as paged
from attnlab.kernels.model import partials, slot_mapping, written_cache
from attnlab.kernels.vllm.features import check_call
from attnlab.tensors.cache import as_flash, to_flash
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import flash

# How the mask of a call is passed to vLLM's ops (:mod:`attnlab.tensors.visibility`).

Arguments = dict[str, Any]


def mask_arguments(call: KernelCall) -> Arguments:
    """Return the arguments of an op that state which keys its rows see; of unified_attention with its window.

    Source: unified_attention and context_attention_fwd, vLLM 0.33.0. The windows are those that its
    Triton backend passes (vllm/v1/attention/backends/triton_attn.py).
    """
    if call.op in (WRAPPER, PREFILL):
        return {"causal": call.causal}
    window = call.sliding_window - 1 if call.sliding_window else -1
    if call.op == ENCODER:
        windows = {"sliding_window_q": window, "sliding_window_k": _right(call)}
        if not call.causal and not call.sliding_window:  # as vit_attn_wrappers.py calls it
            windows = {}
        return {"is_causal": call.causal, **windows}
    given: Arguments = {"causal": call.causal, "window_size": (window, _right(call))}
    if call.mm_prefix_range is not None:
        given["mm_prefix_range"] = call.mm_prefix_range
        given["mm_prefix_clamp_sliding_window"] = call.mm_prefix_clamp_sliding_window
    if call.rswa_prefix_lens is not None:
        given["rswa_prefix_lens"] = call.rswa_prefix_lens
        given["rswa_window"] = call.sliding_window
        given["window_size"] = (-1, -1)
    if call.chunk_lookback > -1:
        given["chunk_lookback"] = call.chunk_lookback
    return given if call.qq_bias is None else {**given, "qq_bias": call.qq_bias}


def _right(call: KernelCall) -> int:
    """Return the window to the right, 0 for causal rows; unified_attention takes the left one for it."""
    if not call.sliding_window:
        return -1
    return 0 if call.causal is True or call.window_right is None else call.window_right


# Scratch memory that the caller of an op allocates: for the results of splits and segments.

_NUMBER: ContextVar[float] = ContextVar("scratch", default=float("nan"))


@contextmanager
def scratch_full_of(number: float) -> Iterator[None]:
    """Let scratch memory be full of ``number`` inside the block, in place of NaN.

    An output that changes depends on scratch memory that no kernel has written.
    """
    token = _NUMBER.set(number)
    try:
        yield
    finally:
        _NUMBER.reset(token)


def scratch(call: KernelCall, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 scratch memory full of NaN, so that a read before a write shows in the output."""
    return torch.full(shape, _NUMBER.get(), device=call.query.device)


# The arguments of triton_prefill_attention, the op of encoders.


def encoder_arguments(call: KernelCall, target: Target) -> dict[str, Any]:
    """Return the arguments by the names of context_attention_fwd in triton_prefill_attention.py (0.33.0)."""
    return {
        "q": call.query,
        "k": call.key,
        "v": call.value,
        "o": call.output,
        "b_start_loc": call.query_start_loc,
        "b_seq_len": call.seq_lens,
        "max_input_len": call.max_query_len,
        "softmax_scale": call.sm_scale,
        "sinks": call.sinks,
        **mask_arguments(call),
    }


_WRAPPER_NAMES = (
    *(
        "query",
        "key",
        "value",
        "output",
        "kv_cache_dtype",
        "key_cache",
        "value_cache",
        "block_table",
    ),
    *("query_start_loc", "seq_lens", "max_seq_len", "max_query_len", "alibi_slopes"),
    *("sliding_window", "sm_scale", "sinks"),
)
_SPLITS = 16  # splits that vLLM's Triton backend uses (NUM_PAR_SOFTMAX_SEGMENTS, 0.33.0)
_PROGRAMS = 128  # it splits below this many programs (MIN_LAUNCH_GRID_SIZE_2D, 0.33.0)
_MOST_COPIED = 1 << 28  # elements before the lowest block of the block table
_MLA_SPLITS = 4  # num_kv_splits of the Triton MLA backend (0.11.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """How to call one op.

    - ``arguments``: returns the op's arguments by name.
    - ``finish``: copies the result into ``call.output`` if the op writes it elsewhere. Mutates the call.
    - ``lse``: returns the log-sum-exp that the op wrote, [rows, num_heads] float32, or None.
    """

    arguments: Callable[[KernelCall, Target], Arguments]
    finish: Callable[[KernelCall, Arguments], None] = lambda call, arguments: None
    lse: Callable[[Arguments], torch.Tensor | None] = lambda arguments: None


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs


def bind(
    function: Callable[..., None],
    call: KernelCall,
    target: Target,
    inside: Collection[str] | None = None,
) -> Arguments:
    """Return the arguments of an op by the parameter names of ``function``.

    ``inside``: the names that the op's source has (:func:`attnlab.kernels.vllm.features.names_inside`), None
    if unknown. Raises Unavailable for a required parameter that is not listed here, Unsupported for a feature
    that the call uses and this release does not have.
    """
    parameters = inspect.signature(function).parameters
    check_call(call, parameters, inside)
    known = OP_CALLS[call.op].arguments(call, target)
    given: Arguments = {}
    for name, parameter in parameters.items():
        if name in known:
            given[name] = known[name]
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in _OPEN:
            raise Unavailable(
                f"{call.op} requires the argument {name}, which the lab does not know"
            )
    return given


def _wrapper(call: KernelCall, target: Target) -> Arguments:
    named = {name: getattr(call, name) for name in _WRAPPER_NAMES}
    scales = {**_scales(call), "output_scale": _number(call, call.output_scale)}
    named |= {"use_interleaved_v_cache": call.interleave_v, **mask_arguments(call)}
    return {**named, **scales}


def _prefill(call: KernelCall, target: Target) -> Arguments:
    return {
        "q": call.query,
        "k": call.key,
        "v": call.value,
        "o": call.output,
        "kv_cache_dtype": call.kv_cache_dtype,
        "k_cache": call.key_cache,
        "v_cache": call.value_cache,
        "b_loc": call.block_table,
        "b_start_loc": call.query_start_loc,
        "b_seq_len": call.seq_lens,
        "b_ctx_len": call.seq_lens - call.query_start_loc.diff(),  # up to 0.7
        "max_seq_len": call.max_seq_len,
        "max_input_len": call.max_query_len,
        "alibi_slopes": call.alibi_slopes,
        "sliding_window": call.sliding_window,
        "sm_scale": call.sm_scale,
        "sinks": call.sinks,
        "fp8_out_scale": _number(call, call.output_scale),
        "interleaved_v_pack_factor": call.interleave_v * 16 // call.value_cache.element_size(),
        **mask_arguments(call),
        **_scales(call),
    }


def _scales(call: KernelCall) -> Arguments:
    """Return k_scale and v_scale, each [1] float32."""
    return {
        name: torch.tensor([call.number(name)], device=call.query.device)
        for name in ("k_scale", "v_scale")
    }


def _number(call: KernelCall, scale: float | None) -> torch.Tensor | None:
    """Return a scale as [1] float32, None for none."""
    return None if scale is None else torch.tensor([scale], device=call.query.device)


def _q_descale(call: KernelCall) -> torch.Tensor | None:
    """Return the scale of a query in FP8; None for another query."""
    if call.query.element_size() > 1:
        return None
    return _number(call, call.number("q_scale"))


def _unified(call: KernelCall, target: Target) -> Arguments:
    """Return the arguments as the Triton backend passes them.

    Source: vllm/v1/attention/backends/triton_attn.py, 0.33.0.
    """
    key, value = _flash(call, target)
    scales = _scales(call)
    return {
        "q": call.query,
        "k": key,
        "v": value,
        "out": call.output,
        "cu_seqlens_q": call.query_start_loc,
        "max_seqlen_q": call.max_query_len,
        "seqused_k": call.seq_lens,
        "max_seqlen_k": call.max_seq_len,
        "softmax_scale": paged.scale_of(call, target),
        **mask_arguments(call),
        "block_table": call.block_table,
        "softcap": call.softcap or 0,
        "q_descale": _q_descale(call),
        "output_scale": _number(call, call.output_scale),
        "k_descale": scales["k_scale"],
        "v_descale": scales["v_scale"],
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "kv_quant_mode": int(paged.format_of(call, target).is_fp8),
        **_segments(call),
    }


def _segments(call: KernelCall) -> Arguments:
    """Return the buffers of the 3D path and its threshold.

    The threshold is vLLM's if ``num_splits`` is None. Otherwise it enables the 3D path whenever the op can
    use it, or disables it (0).
    """
    tokens, heads, head_size = call.query.shape
    splits = _SPLITS if call.num_splits is None else call.num_splits
    most = _PROGRAMS // call.key.shape[1] if call.num_splits is None else tokens
    if not splits:
        most, splits = 0, 1
    padded = 1 << (head_size - 1).bit_length()
    return {
        "seq_threshold_3D": most,
        "num_par_softmax_segments": splits,
        "softmax_segm_output": scratch(call, (tokens, heads, splits, padded)),
        "softmax_segm_max": scratch(call, (tokens, heads, splits)),
        "softmax_segm_expsum": scratch(call, (tokens, heads, splits)),
    }


def _decode(call: KernelCall, target: Target) -> Arguments:
    """Return the arguments as the Triton MLA backend passes them, with separate keys and values."""
    key, value = _flash(call, target)
    seqs, heads, head_size = call.query.shape
    splits = _MLA_SPLITS if call.num_splits is None else call.num_splits
    return {
        "q": call.query,
        "k_buffer": key,
        "v_buffer": value,
        "o": call.output,
        "lse": scratch(call, (seqs, heads)),
        "req_to_token": call.block_table,
        "b_seq_len": call.seq_lens,
        "attn_logits": scratch(call, (seqs, heads, splits, head_size + 1)),
        "num_kv_splits": splits,
        "sm_scale": paged.scale_of(call, target),
        "page_size": call.block_size,
        "logit_cap": call.softcap or 0.0,
        **_scales(call),
    }


def _flash(call: KernelCall, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and value cache, each [num_blocks, block_size, num_kv_heads, head_size].

    If the blocks before the lowest one in the block table have more than 2^28 elements, they are not copied:
    they are untouched memory. The cache of a saved call that has this layout, or HND, is not copied: the op
    gets it with its own strides.
    """
    dtype = paged.format_of(call, target).dtype
    if call.layout != "x-split" and call.strides == "contiguous" and not call.spec.writes_cache:
        key, value = as_flash(call.key_cache, call.value_cache)
        return key.view(dtype), value.view(dtype)
    first = int(call.block_table.min()) if call.block_table.numel() else 0
    if first * call.key_cache[0].numel() <= _MOST_COPIED:
        first = 0
    key, value = flash(*to_flash(call.key_cache, call.value_cache, first), call.strides)
    return key.view(dtype), value.view(dtype)


def _merge(call: KernelCall, target: Target) -> Arguments:
    """Return the partial outputs and their log-sum-exp.

    The log-sum-exp of an empty part is -inf, as in FlashAttention 3. In a padded call it is +inf in every
    second row, as in FlashAttention 2.
    """
    parts = partials(call, target)
    logs = [parts.prefix_lse, parts.suffix_lse]
    if call.padding:
        for log in logs:
            log[:, ::2] = log[:, ::2].masked_fill(log[:, ::2] == -torch.inf, torch.inf)
    return {
        "output": call.output,
        "prefix_output": parts.prefix_output,
        "prefix_lse": logs[0],
        "suffix_output": parts.suffix_output,
        "suffix_lse": logs[1],
        "output_lse": torch.full_like(parts.prefix_lse, float("nan")),
    }


def _merged_lse(given: Arguments) -> torch.Tensor | None:
    lse: torch.Tensor | None = given["output_lse"]
    return None if lse is None else lse.T


def _write(call: KernelCall, target: Target) -> Arguments:
    key, value = _flash(call, target)
    return {
        "key": call.key,
        "value": call.value,
        "key_cache": key,
        "value_cache": value,
        "slot_mapping": _with_padding(slot_mapping(call), call.padding),
        "kv_cache_dtype": call.kv_cache_dtype,
        **_scales(call),
    }


def _with_padding(slots: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the slots with -1 for half of the padded tokens; the other half has no entry, as in vLLM."""
    return torch.cat([slots, slots.new_full((padding // 2,), -1)])


def _finish_write(call: KernelCall, arguments: Arguments) -> None:
    call.buffer.copy_(written_cache(arguments["key_cache"], arguments["value_cache"]))


OP_CALLS = {
    WRAPPER: OpCall(arguments=_wrapper),
    PREFILL: OpCall(arguments=_prefill),
    ENCODER: OpCall(arguments=encoder_arguments),
    UNIFIED: OpCall(arguments=_unified),
    DECODE_FWD: OpCall(arguments=_decode, lse=lambda given: given.get("lse")),
    MERGE: OpCall(arguments=_merge, lse=_merged_lse),
    WRITE: OpCall(arguments=_write, finish=_finish_write),
}
