"""Intent against arguments: what a layer asked for, compared with what its op got."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_EQUAL = 1e-5  # relative; the numbers are stored in float32 on the way


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a layer's attention is meant to be. Each field may be None: unknown.

    - ``sm_scale``, ``softcap`` (0 for none), ``sliding_window`` (keys that a row sees, 0 for all).
    - ``causal``; ``sinks``, ``alibi_slopes``: a list of numbers, empty for none.
    - ``kv_cache_dtype``: vLLM's name. ``element_bytes``: of the cache. ``k_scale``, ``v_scale``.
    - ``block_size``: tokens per block, as the metadata counts.
    """

    sm_scale: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    causal: bool | None = None
    sinks: Sequence[float] | None = None
    alibi_slopes: Sequence[float] | None = None
    kv_cache_dtype: str | None = None
    element_bytes: int | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """An argument that is not what the layer asked for."""

    argument: str
    intended: Any
    given: Any


def contradictions(
    intent: Intent,
    arguments: Mapping[str, Any],
    fields: Mapping[str, Any],
    *,
    block_size: int,
    reads_tensors: bool = True,
) -> list[Contradiction]:
    """Compare a layer's intent with the arguments of its op.

    - ``arguments``: as the op got them, by its parameters' names. ``fields``: the same by the names of
      KernelCall (:class:`attnlab.recorder.argument_names.Reading`).
    - ``block_size``: of the cache that the op got.
    - ``reads_tensors``: compare tensors, too, which waits for a GPU.

    What either side does not state is not compared.
    """
    found = [
        *_numbers(intent, fields, reads_tensors),
        *_window(intent, arguments, fields),
        *(_vectors(intent, arguments, fields) if reads_tensors else ()),
        *_cache(intent, arguments, fields, block_size),
    ]
    causal = fields.get("causal")
    if intent.causal is not None and isinstance(causal, bool) and causal != intent.causal:
        found.append(Contradiction(argument="causal", intended=intent.causal, given=causal))
    return found


def _numbers(
    intent: Intent, fields: Mapping[str, Any], reads_tensors: bool
) -> Iterator[Contradiction]:
    for name in ("sm_scale", "k_scale", "v_scale"):
        if isinstance(fields.get(name), torch.Tensor) and not reads_tensors:
            continue
        intended, given = getattr(intent, name), _number(fields.get(name))
        if intended is not None and given is not None and not _is_close(intended, given):
            yield Contradiction(argument=name, intended=intended, given=given)
    if intent.softcap is not None and "softcap" in fields:
        given = _number(fields["softcap"]) or 0.0
        if not _is_close(intent.softcap, given):
            yield Contradiction(argument="softcap", intended=intent.softcap, given=given)


_WINDOWS = ("sliding_window", "window_size", "window_left")


def _window(
    intent: Intent, arguments: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[Contradiction]:
    """Compare the windows; a window that is as long as the longest sequence is none."""
    if intent.sliding_window is None or not any(name in arguments for name in _WINDOWS):
        return
    given = int(fields.get("sliding_window") or 0)
    if given == intent.sliding_window:
        return
    longest = _longest(fields)
    effects = {
        0 if w == 0 or (longest and w >= longest) else w for w in (given, intent.sliding_window)
    }
    if len(effects) > 1:
        yield Contradiction(argument="sliding_window", intended=intent.sliding_window, given=given)


def _longest(fields: Mapping[str, Any]) -> int:
    lens = fields.get("seq_lens")
    return int(lens.max()) if isinstance(lens, torch.Tensor) and lens.numel() else 0


def _vectors(
    intent: Intent, arguments: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[Contradiction]:
    """Compare sinks and ALiBi slopes, where the op has a parameter for them."""
    for name, parameters in (("sinks", ("sinks", "s_aux")), ("alibi_slopes", ("alibi_slopes",))):
        intended: Sequence[float] | None = getattr(intent, name)
        if intended is None or not any(one in arguments for one in parameters):
            continue
        tensor = fields.get(name)
        given = tensor.detach().float().cpu().tolist() if isinstance(tensor, torch.Tensor) else []
        same = len(given) == len(intended) and all(map(_is_close, intended, given))
        if not same:
            yield Contradiction(argument=name, intended=list(intended), given=given)


def _cache(
    intent: Intent, arguments: Mapping[str, Any], fields: Mapping[str, Any], block_size: int
) -> Iterator[Contradiction]:
    given = arguments.get("kv_cache_dtype")
    if (
        intent.kv_cache_dtype is not None
        and isinstance(given, str)
        and _format(given) != _format(intent.kv_cache_dtype)
    ):
        yield Contradiction(argument="kv_cache_dtype", intended=intent.kv_cache_dtype, given=given)
    size = fields["key_cache"].element_size()
    if intent.element_bytes is not None and size != intent.element_bytes:
        yield Contradiction(
            argument="key_cache",
            intended=f"{intent.element_bytes} bytes per element",
            given=f"{size} bytes per element",
        )
    if intent.block_size is not None and block_size != intent.block_size:
        yield Contradiction(argument="block_size", intended=intent.block_size, given=block_size)


def _format(kv_cache_dtype: str) -> str:
    """Return one name for each format of the cache."""
    names = {"fp8": "fp8_e4m3", **dict.fromkeys(("float16", "bfloat16", "float32", "half"), "auto")}
    return names.get(kv_cache_dtype, kv_cache_dtype)


def _number(value: Any) -> float | None:
    """Return a number, also of a tensor with one element, or whose elements are all equal."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel():
        first = float(value.flatten()[0])
        return first if bool((value == first).all()) else None
    return None


def _is_close(intended: float, given: float) -> bool:
    return abs(intended - given) <= _EQUAL * max(abs(intended), abs(given))


def intent_of_layer(
    layer: Any, asked: Mapping[str, Any] | None, *, causal: bool | None, block_size: int | None
) -> Intent:
    """Return the intent of a vLLM ``Attention`` or ``MLAAttention`` layer.

    ``asked``: the arguments of its constructor, None if unknown. ``causal``: as the batch's metadata says.
    ``block_size``: of the layer's KV-cache group.
    """
    asked = asked or {}
    window = getattr(layer, "sliding_window", None)
    dtype = getattr(layer, "kv_cache_torch_dtype", None)
    has_arguments = bool(asked)
    is_mla = hasattr(layer, "kv_lora_rank")  # its values are a part of its keys
    is_decoder = str(getattr(layer, "attn_type", "decoder")).endswith("decoder")
    return Intent(
        sm_scale=asked.get("scale"),
        softcap=float(asked.get("logits_soft_cap") or 0.0) if has_arguments else None,
        sliding_window=int(window or 0) if hasattr(layer, "sliding_window") else None,
        causal=causal if is_decoder else None,
        sinks=_list(asked.get("sinks")) if has_arguments else None,
        alibi_slopes=_list(asked.get("alibi_slopes")) if has_arguments else None,
        kv_cache_dtype=getattr(layer, "kv_cache_dtype", None),
        element_bytes=dtype.itemsize if isinstance(dtype, torch.dtype) else None,
        k_scale=_number(getattr(layer, "_k_scale_float", None)),
        v_scale=None if is_mla else _number(getattr(layer, "_v_scale_float", None)),
        block_size=block_size,
    )


def _list(values: Any) -> list[float]:
    """Return numbers as a list; none for None."""
    if values is None:
        return []
    if isinstance(values, torch.Tensor):
        return [float(one) for one in values.detach().float().cpu().flatten()]
    return [float(one) for one in values]
