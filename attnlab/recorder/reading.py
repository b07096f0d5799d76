"""From a Reading to a KernelCall: numbers out of tensors, dtypes, and the checks of from_tensors."""

import dataclasses
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import KV_CACHE_DTYPES
from attnlab.recorder.argument_names import Reading, check_complete, take_tables
from attnlab.tensors.call import KernelCall
from attnlab.tensors.origin import Origin
from attnlab.tensors.quantised import FP8_DTYPES

_FP8_PLATFORM = {torch.float8_e4m3fn: "sm_90", torch.float8_e4m3fnuz: "gfx942"}


def call_of_reading(
    reading: Reading, origin: Origin, *, op: str | None = None, layout: str | None = None
) -> KernelCall:
    """Return the KernelCall of what was read. ``op``, ``layout``: as for ``from_tensors``.

    Raises InvalidCall with one line that names the first argument that is missing or does not fit.
    """
    take_tables(reading)
    check_complete(reading)
    fields = {name: value for name, value in reading.fields.items() if value is not None}
    read_as = [*reading.read_as, *_normalised(fields)]
    for name, value in fields.items():
        if name in _NUMBERS and name not in _SCALES and not _is_by_sequence(name, value):
            fields[name] = number_of(name, value)
    if getattr(fields["query"], "dtype", None) not in FP8_DTYPES:
        fields.pop("q_scale", None)  # ops read it with a query in FP8 only
    for name in _SCALES:
        if name in fields:
            fields[name] = _scale(name, fields[name], fields)
    if not fields.get("softcap"):
        fields.pop("softcap", None)
    for name in _BY_SEQUENCE:  # an engine's buffers may have room for more sequences
        if isinstance(fields.get(name), torch.Tensor) and fields[name].dim():
            fields[name] = fields[name][: len(fields["seq_lens"])]
    key_cache = fields["key_cache"]
    fields["kv_cache_dtype"] = _kv_cache_dtype(fields.get("kv_cache_dtype"), key_cache)
    if origin.platform is None and isinstance(key_cache, torch.Tensor):
        origin = dataclasses.replace(origin, platform=_FP8_PLATFORM.get(key_cache.dtype))
    fields.setdefault("op", op)
    fields.setdefault("layout", layout)
    _drop_new_tokens(fields)
    call = KernelCall.from_tensors(
        **fields, origin=origin, unmodelled=tuple(reading.unmodelled), read_as=tuple(read_as)
    )
    return dataclasses.replace(call, unknown_arguments=reading.unknown_texts(call))


def _normalised(fields: dict[str, Any]) -> list[str]:
    """Bring query and output into the shapes of a KernelCall; return what was done. Changes ``fields``.

    Leading dimensions of 1 go, and so does a dimension for the new tokens of each sequence.
    """
    done: list[str] = []
    query = fields["query"]
    if not isinstance(query, torch.Tensor):
        return done
    shape = query.shape
    seqs = len(fields["seq_lens"]) if isinstance(fields["seq_lens"], torch.Tensor) else -1
    if query.dim() == 4 and query.shape[0] == seqs and "query_start_loc" not in fields:
        starts = torch.arange(seqs + 1, dtype=torch.int32, device=query.device)
        fields["query_start_loc"] = starts * query.shape[1]
        query = query.flatten(0, 1)
    while query.dim() > 3 and query.shape[0] == 1:
        query = query[0]
    if query.dim() == 3 and query.shape != shape:
        fields["query"] = query
        done.append(f"query {tuple(shape)} as {tuple(query.shape)}")
    for name in ("output", "before"):
        given = fields.get(name)
        if isinstance(given, torch.Tensor) and _is_flat_output(given, shape, query):
            fields[name] = given.reshape(*query.shape[:2], -1)
            if name == "output":
                done.append(f"output {tuple(given.shape)} as {tuple(fields[name].shape)}")
    return done


def _is_flat_output(output: torch.Tensor, given: torch.Size, query: torch.Tensor) -> bool:
    """Answer whether an output has the elements of [num_tokens, num_heads, value_size] in this order.

    It may have leading dimensions of 1, those of the query as it was ``given``, and heads and elements in
    one.
    """
    if query.dim() != 3 or (output.dim() == 3 and output.shape[:2] == query.shape[:2]):
        return False
    tokens, heads, _ = query.shape
    sizes = list(output.shape)
    while len(sizes) > 2 and sizes[0] == 1:
        del sizes[0]
    if len(sizes) == len(given) and sizes[:-1] == list(given[:-1]):
        return True
    if len(sizes) == 2:
        return sizes[0] == tokens and sizes[1] % heads == 0
    return len(sizes) == 3 and sizes[:2] == [tokens, heads]


_SCALES = ("k_scale", "v_scale", "q_scale")
_NUMBERS = {
    **dict.fromkeys(("sm_scale", "softcap", "output_scale", *_SCALES), float),
    **dict.fromkeys(("max_query_len", "max_seq_len", "sliding_window"), int),
    **dict.fromkeys(("chunk_lookback", "window_right"), int),
    **dict.fromkeys(("causal", "mm_prefix_clamp_sliding_window"), bool),
}
_BY_SEQUENCE = ("causal", "mm_prefix_range", "rswa_prefix_lens")  # tensors with a row per sequence


def _is_by_sequence(name: str, value: Any) -> bool:
    """Answer whether a field that may be a number is a tensor with one number per sequence."""
    return name in _BY_SEQUENCE and isinstance(value, torch.Tensor) and value.dim() == 1


def number_of(name: str, value: Any) -> Any:
    """Return a field that is a number, of a tensor with one element, too; raise InvalidCall."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return _NUMBERS[name](value)
    except (TypeError, ValueError) as error:
        kind = _NUMBERS[name].__name__
        raise InvalidCall(f"{name} must be one {kind}, got {value!r:.60}", field=name) from error


def _scale(name: str, scale: Any, fields: dict[str, Any]) -> float | torch.Tensor:
    """Return a number for a tensor of one element; a scale per KV head as one per sequence and head."""
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return float(number_of(name, scale))
    if scale.dim() == 1:
        return scale.expand(len(fields["seq_lens"]), -1)
    return scale


def _kv_cache_dtype(given: Any, key_cache: Any) -> str | None:
    """Return the name that ``from_tensors`` accepts. vLLM also has the names of 16-bit dtypes."""
    dtype = getattr(key_cache, "dtype", None)
    if dtype == torch.uint8:
        return given if given in KV_CACHE_DTYPES else None
    return None


def _drop_new_tokens(fields: dict[str, Any]) -> None:
    """Drop key and value unless both are there: a part of them means nothing."""
    if ("key" in fields) != ("value" in fields):
        fields.pop("key", None)
        fields.pop("value", None)


def plain_kv_cache_dtype(given: Any, key_cache: torch.Tensor, model: torch.dtype) -> str:
    """Return the kv_cache_dtype of a cache; ``model``: the dtype of the tokens. Raises InvalidCall."""
    if key_cache.dtype in FP8_DTYPES:
        return "fp8_e5m2" if key_cache.dtype == torch.float8_e5m2 else "fp8"
    if key_cache.dtype == torch.uint8:
        if given in KV_CACHE_DTYPES[1:]:
            return str(given)
        text = f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES[1:])} for a uint8 cache"
        raise InvalidCall(f"{text}, got {given!r:.40}", field="kv_cache_dtype")
    if key_cache.dtype != model:
        text = f"key_cache must be {model} like key, uint8 or FP8, got {key_cache.dtype}"
        raise InvalidCall(text, field="key_cache")
    return "auto"
