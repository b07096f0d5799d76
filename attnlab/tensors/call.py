"""KernelCall: the exact arguments that an attention op receives."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import KV_CACHE_DTYPES, OPS, UNIFIED, VLLM_OPS, WRAPPER, Op
from attnlab.case.shown import Shown
from attnlab.tensors import call_file
from attnlab.tensors.cache import LAYOUTS, find_layout, on_device, to_x_split
from attnlab.tensors.call_file import copy_blocks, named_by
from attnlab.tensors.visibility import Visibility

STOCK_BFLOAT16 = "bfloat16 under Triton's interpreter"  # which takes their bits for integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a call comes from. Each field may be unknown: None.

    - ``op``: the function that was called, "module.function". The arguments of a function that attnlab has
      no record of (:data:`attnlab.case.ops.OPS`) are described by the record of a similar op.
    - ``program``, ``release``: the program that called, for example "vllm", and its release.
    - ``platform``: the GPU architecture, a name of :data:`attnlab.case.platforms.PLATFORMS`, or "cpu".
    - ``backend``: the program's attention backend; STOCK_BFLOAT16 for kernels in which Triton's own
      interpreter computed with bfloat16. ``layer``, ``step``, ``rank``: as the program counts.
    - ``test_id``: the pytest node id.
    """

    op: str | None = None
    program: str | None = None
    release: str | None = None
    platform: str | None = None
    backend: str | None = None
    layer: str | None = None
    step: int | None = None
    rank: int | None = None
    test_id: str | None = None

    @classmethod
    def of_dict(cls, values: object) -> "Origin":
        """Return the origin of a dict of its fields. Raises InvalidCall for another name or type."""
        if not isinstance(values, Mapping):
            raise InvalidCall(f"origin must be an object, got {values!r:.60}")
        for name, value in values.items():
            expected = _TYPES.get(name)
            if expected is None:
                raise InvalidCall(f"origin must have the fields {', '.join(_TYPES)}, got {name!r}")
            if value is not None and type(value) is not expected:
                text = f"origin.{name} must be {expected.__name__}, got {value!r:.60}"
                raise InvalidCall(text, field="origin")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are known."""
        values = {name: getattr(self, name) for name in _TYPES}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """Return the known fields as text."""
        known = ", ".join(f"{name} {value}" for name, value in self.to_dict().items())
        return known or "unknown"


_TYPES: dict[str, type] = {
    field.name: int if field.name in ("step", "rank") else str for field in fields(Origin)
}


# Checks of tensors: each raises InvalidCall with one line that names the tensor.

INDEX_DTYPES = {"int32": torch.int32, "int64": torch.int64}


def check_dims(name: str, tensor: torch.Tensor, dims: int) -> tuple[int, ...]:
    """Return the shape of ``tensor``; raise InvalidCall unless it has ``dims`` dimensions."""
    if tensor.dim() != dims:
        raise InvalidCall(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    return tuple(tensor.shape)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise InvalidCall unless ``tensor`` has the shape ``shape``."""
    if tuple(tensor.shape) != shape:
        raise InvalidCall(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_index(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidCall unless ``tensor`` is int32 or int64."""
    if tensor.dtype not in INDEX_DTYPES.values():
        raise InvalidCall(f"{name} must be int32 or int64, got {tensor.dtype}")


def check_tensor(name: str, value: object, device: torch.device | None = None) -> None:
    """Raise InvalidCall unless ``value`` is a tensor, on ``device`` if that is given."""
    if not isinstance(value, torch.Tensor):
        raise InvalidCall(f"{name} must be a tensor, got {type(value).__name__}")
    if device is not None and value.device != device:
        raise InvalidCall(f"{name} must be on {device} like query, got {value.device}")


# Checks of the fields of a KernelCall that say which keys a row sees; each raises InvalidCall.


def check_visibility(given: Mapping[str, Any], num_seqs: int) -> None:
    """Raise InvalidCall unless the fields fit the call. ``given``: each field of a call by its name."""
    causal, ranges = given["causal"], given["mm_prefix_range"]
    if isinstance(causal, torch.Tensor):
        check_shape("causal", causal, (num_seqs,))
    elif not isinstance(causal, bool):
        raise InvalidCall(f"causal must be true, false or a tensor, got {causal!r:.40}")
    if ranges is not None:
        check_shape(
            "mm_prefix_range", ranges, (num_seqs, check_dims("mm_prefix_range", ranges, 3)[1], 2)
        )
    if given["rswa_prefix_lens"] is not None:
        check_shape("rswa_prefix_lens", given["rswa_prefix_lens"], (num_seqs,))
    if given["qq_bias"] is not None:
        _check_bias(given["qq_bias"], given["query_start_loc"], given["seq_lens"])


def _check_bias(bias: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Check that a bias has a row for each new token of the longest sequence, and the keys that it is for."""
    if bias.dim() == 3:
        shape = (len(seq_lens), int(query_start_loc.diff().max()), int(seq_lens.max()))
        return check_shape("qq_bias", bias, shape)
    rows, keys = check_dims("qq_bias", bias, 2)
    longest = int(query_start_loc.long().diff().max()) if len(query_start_loc) > 1 else 0
    if rows != keys or rows < longest:
        text = f"qq_bias must be [n, n] with n at least {longest}, the longest query"
        raise InvalidCall(f"{text}, got {tuple(bias.shape)}")


# Arguments of a KernelCall from plain tensors: checks, defaults and conversion of the cache.
#
# :meth:`attnlab.tensors.call.KernelCall.from_tensors` is the public entry.

_FP8 = {torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8", torch.float8_e5m2: "fp8_e5m2"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainCall:
    """The tensors that a caller gave, and what else is needed to interpret them.

    See :meth:`attnlab.tensors.call.KernelCall.from_tensors` for shapes.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    output: torch.Tensor | None
    op: str | None
    layout: str | None
    kv_cache_dtype: str | None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a KernelCall; raise InvalidCall for what does not fit."""
        self._check_tensors()
        starts = self._starts()
        query_lens = starts.long().diff()
        self._check_lens(starts, query_lens)
        layout = self._layout()
        op = OPS[self.op or (WRAPPER if layout == "x-split" else UNIFIED)]
        key_cache, value_cache = to_x_split(self.key_cache, self.value_cache, layout)
        _check_paged(self.query, key_cache, value_cache)
        self._check_blocks(key_cache.shape[0], value_cache.shape[3])
        kv_cache_dtype = self._kv_cache_dtype()
        if kv_cache_dtype != "auto":
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        key, value = self._new_tokens(op, value_cache, query_lens)
        return {
            **{
                name: getattr(self, name) for name in ("query", "output", "block_table", "seq_lens")
            },
            "op": op.name,
            "key": key,
            "value": value,
            "kv_cache_dtype": kv_cache_dtype,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "query_start_loc": starts,
            "layout": layout,
            "new_tokens": "in the cache" if self.key is None else "given",
        }

    def _check_tensors(self) -> None:
        """Check types, devices and the shapes that do not depend on the layout."""
        for name in ("query", "key_cache", "value_cache", "block_table", "seq_lens"):
            check_tensor(name, getattr(self, name))
        for name in ("key_cache", "value_cache", "key", "value", "output"):
            if getattr(self, name) is not None:
                check_tensor(name, getattr(self, name), self.query.device)
        check_dims("query", self.query, 3)
        num_seqs, _ = check_dims("block_table", self.block_table, 2)
        check_shape("seq_lens", self.seq_lens, (num_seqs,))
        for name in ("block_table", "seq_lens"):
            check_index(name, getattr(self, name))
        if self.op is not None and self.op not in OPS:
            raise InvalidCall(f"op must be one of {', '.join(OPS)}, got {self.op!r}")
        if (self.key is None) != (self.value is None):
            missing, other = ("key", "value") if self.key is None else ("value", "key")
            raise InvalidCall(f"{missing} must be given with {other}, got None")
        if self.key is not None:
            check_dims("key", self.key, 3)

    def _starts(self) -> torch.Tensor:
        """Return query_start_loc: given, or that of one new token per sequence."""
        tokens, num_seqs = self.query.shape[0], self.seq_lens.shape[0]
        if self.query_start_loc is not None:
            check_tensor("query_start_loc", self.query_start_loc)
            check_shape("query_start_loc", self.query_start_loc, (num_seqs + 1,))
            check_index("query_start_loc", self.query_start_loc)
            return self.query_start_loc
        if tokens != num_seqs:
            text = f"query_start_loc must be given for {tokens} new tokens of {num_seqs} sequences"
            raise InvalidCall(f"{text}, got None")
        return torch.arange(num_seqs + 1, dtype=torch.int32, device=self.seq_lens.device)

    def _check_lens(self, starts: torch.Tensor, query_lens: torch.Tensor) -> None:
        tokens = self.query.shape[0]
        ends = int(starts[-1])
        if int(starts[0]) != 0 or bool((query_lens < 0).any()) or ends > tokens:
            text = f"query_start_loc must rise from 0 to at most {tokens}, the rows of query"
            raise InvalidCall(f"{text}, got {starts.tolist()}")
        short = torch.nonzero(self.seq_lens.long() < query_lens.to(self.seq_lens.device)).flatten()
        if len(short):
            seq = int(short[0])
            text = f"seq_lens[{seq}] must be at least its query_len {int(query_lens[seq])}"
            raise InvalidCall(f"{text}, got {int(self.seq_lens[seq])}")

    def _layout(self) -> str:
        if self.layout is not None:
            if self.layout not in LAYOUTS:
                text = f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}"
                raise InvalidCall(text)
            return self.layout
        columns = self.block_table.shape[1]
        longest = int(self.seq_lens.max()) if self.seq_lens.numel() else 0
        return find_layout(
            self.query,
            self.key_cache,
            num_kv_heads=None if self.key is None else self.key.shape[1],
            min_block_size=-(-longest // max(1, columns)),
        )

    def _check_blocks(self, num_blocks: int, block_size: int) -> None:
        """Check that every sequence has blocks for its tokens, and that these blocks exist."""
        columns = self.block_table.shape[1]
        for seq, seq_len in enumerate(self.seq_lens.tolist()):
            needed = -(-seq_len // block_size)
            if needed > columns:
                text = f"block_table must have at least {needed} columns, for sequence {seq}"
                raise InvalidCall(f"{text}, got {columns}")
            for column, block in enumerate(self.block_table[seq, :needed].tolist()):
                if not 0 <= block < num_blocks:
                    text = f"block_table[{seq}][{column}] must be from 0 to {num_blocks - 1}"
                    raise InvalidCall(f"{text}, got {block}")

    def _kv_cache_dtype(self) -> str:
        """Return kv_cache_dtype, given or by the dtype of the cache."""
        cache, model = self.key_cache.dtype, self.query.dtype
        if self.value_cache.dtype != cache:
            text = f"value_cache must be {cache} like key_cache, got {self.value_cache.dtype}"
            raise InvalidCall(text)
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in KV_CACHE_DTYPES:
            text = f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}"
            raise InvalidCall(f"{text}, got {self.kv_cache_dtype!r}")
        found = _FP8.get(cache, "auto" if cache == model else None)
        if cache == torch.uint8 and self.kv_cache_dtype in (None, "auto"):
            text = (
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES[1:])} for a uint8 cache"
            )
            raise InvalidCall(f"{text}, got {self.kv_cache_dtype}")
        if cache != torch.uint8 and found is None:
            raise InvalidCall(f"key_cache must be {model} like query, uint8 or FP8, got {cache}")
        given = self.kv_cache_dtype or found
        assert given is not None  # of a uint8 cache it is given
        if found is not None and (given == "auto") != (found == "auto"):
            raise InvalidCall(f"kv_cache_dtype must be {found} for a cache of {cache}, got {given}")
        return given

    def _new_tokens(
        self, op: Op, value_cache: torch.Tensor, query_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value: given, or placeholders for an op that reads all new tokens from the cache."""
        if self.key is not None and self.value is not None:
            return self.key, self.value
        from_cache = op.new_tokens_from == "cache"
        if op.new_tokens_from == "by query_len":
            from_cache = bool((query_lens <= 1).all())
        if not from_cache:
            text = f"key and value must be given with {op.name}, which reads new tokens from them"
            raise InvalidCall(f"{text}, got None", field="key")
        tokens, _, head_size = self.query.shape
        _, kv_heads, value_size, _ = value_cache.shape
        zero = self.query.new_zeros(())
        return zero.expand(tokens, kv_heads, head_size), zero.expand(tokens, kv_heads, value_size)


def _check_paged(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Check a cache in the layout x-split against the query."""
    head_size = query.shape[2]
    blocks, kv_heads, chunks, block_size, x = check_dims("key_cache", key_cache, 5)
    if chunks * x != head_size:
        text = f"key_cache must hold heads of {head_size} elements like query, got {chunks} × {x}"
        raise InvalidCall(text)
    values = check_dims("value_cache", value_cache, 4)
    fits = (values[0], values[1], values[3]) == (blocks, kv_heads, block_size)
    shape = (blocks, kv_heads, values[2] if fits else head_size, block_size)
    check_shape("value_cache", value_cache, shape)
    if kv_heads == 0 or query.shape[1] % kv_heads:
        text = f"query must have a multiple of {kv_heads} heads, as key_cache has {kv_heads}"
        raise InvalidCall(f"{text}, got {query.shape[1]}")


# Checks of a KernelCall's fields: each raises InvalidCall with one line that names the field.

NEW_TOKENS = ("given", "in the cache")
_INDEX = ("block_table", "seq_lens", "query_start_loc")


def check_call(given: Mapping[str, Any]) -> None:
    """Raise InvalidCall unless the fields of a call fit together. ``given``: each field by its name."""
    if given["op"] not in OPS:
        raise InvalidCall(f"op must be one of {', '.join(OPS)}, got {given['op']!r}")
    _check_attention(given)
    num_seqs, _ = check_dims("block_table", given["block_table"], 2)
    check_shape("seq_lens", given["seq_lens"], (num_seqs,))
    check_shape("query_start_loc", given["query_start_loc"], (num_seqs + 1,))
    for name in _INDEX:
        check_index(name, given[name])
    _check_optional(given, num_seqs)
    check_visibility(given, num_seqs)
    if given["new_tokens"] not in NEW_TOKENS:
        text = f"new_tokens must be one of {', '.join(NEW_TOKENS)}, got {given['new_tokens']!r}"
        raise InvalidCall(text)


def _check_attention(given: Mapping[str, Any]) -> None:
    """Check query, key, value, both caches and the output."""
    tokens, heads, head_size = check_dims("query", given["query"], 3)
    _, kv_heads, _ = check_dims("key", given["key"], 3)
    check_shape("key", given["key"], (tokens, kv_heads, head_size))
    blocks, _, chunks, block_size, x = check_dims("key_cache", given["key_cache"], 5)
    check_shape("key_cache", given["key_cache"], (blocks, kv_heads, chunks, block_size, x))
    if chunks * x != head_size:
        raise InvalidCall(f"key_cache must hold heads of {head_size}, got {chunks} × {x}")
    _, _, value_size, _ = check_dims("value_cache", given["value_cache"], 4)
    check_shape("value_cache", given["value_cache"], (blocks, kv_heads, value_size, block_size))
    check_shape("value", given["value"], (tokens, kv_heads, value_size))
    output = (tokens, heads, value_size)
    if OPS[given["op"]].writes_cache:
        output = (blocks * block_size, kv_heads, head_size + value_size)
    for name in ("output", "before"):
        if given[name] is not None:
            check_shape(name, given[name], output)
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidCall(f"query must have a multiple of {kv_heads} heads, got {heads}")


def _check_optional(given: Mapping[str, Any], num_seqs: int) -> None:
    """Check sinks, log-sum-exp, slot mapping, block numbers and scales."""
    tokens, heads, _ = given["query"].shape
    blocks, kv_heads, _, block_size = given["value_cache"].shape
    shapes = {"sinks": (heads,), "lse": (tokens, heads), "block_ids": (blocks,)}
    for name, shape in shapes.items():
        if given[name] is not None:
            check_shape(name, given[name], shape)
    if given["sinks"] is not None and not given["sinks"].is_floating_point():
        raise InvalidCall(f"sinks must be of a floating dtype, got {given['sinks'].dtype}")
    if given["slot_mapping"] is not None:
        check_dims("slot_mapping", given["slot_mapping"], 1)
        check_index("slot_mapping", given["slot_mapping"])
    _check_formats(given, num_seqs)
    for name in ("k_scale", "v_scale"):
        scale = given[name]
        allowed = [(num_seqs, kv_heads), (blocks, block_size, kv_heads)]
        if isinstance(scale, torch.Tensor) and tuple(scale.shape) not in allowed:
            shown = " or ".join(map(str, allowed))
            text = f"{name} must be a number or have shape {shown}, got {tuple(scale.shape)}"
            raise InvalidCall(text)


def is_fp8(value: object) -> bool:
    """Answer whether ``value`` is a tensor in an FP8 format."""
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() == 1
    )


def _check_formats(given: Mapping[str, Any], num_seqs: int) -> None:
    """Check the formats of query and output: an FP8 query needs an FP8 cache, and scales must fit."""
    kv_heads = given["value_cache"].shape[1]
    if is_fp8(given["query"]) and given["kv_cache_dtype"] == "auto":
        raise InvalidCall("kv_cache_dtype must be FP8 for a query in FP8, got auto")
    if isinstance(given["q_scale"], torch.Tensor):
        check_shape("q_scale", given["q_scale"], (num_seqs, kv_heads))
    scale = given["output_scale"]
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise InvalidCall(f"output_scale must be a positive number, got {scale!r:.60}")


# Bytes; of a larger cache, a file holds only the blocks that the table names.
_LARGE_CACHE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class KernelCall(Shown):
    """Arguments of an attention op, with the names that chunked_prefill_paged_decode has for them.

    - ``query``: [num_tokens, num_heads, head_size]. ``output``: [num_tokens, num_heads, value_size]; the op
      writes it. None if no output was recorded. value_size is head_size, except where keys and values differ
      in width (MLA). For an op that writes the cache, the output is the cache: [num_blocks × block_size,
      num_kv_heads, head_size + value_size], for each slot its key, then its value. ``before``: the output's
      contents before the call, or None if unknown.
    - ``key``, ``value``: [num_tokens, num_kv_heads, head_size or value_size], the new tokens. If
      ``new_tokens`` is "in the cache", the op did not get them and these two are placeholders.
    - ``key_cache``: [num_blocks, num_kv_heads, head_size / x, block_size, x]; ``value_cache``:
      [num_blocks, num_kv_heads, value_size, block_size]; uint8 if kv_cache_dtype is FP8. They may be views
      of a cache in another layout; ``layout`` names it (:mod:`attnlab.tensors.cache`).
      ``block_ids``: [num_blocks] int64, the number that each block had in a larger cache, or None.
    - ``block_table`` [num_seqs, max_blocks_per_seq], ``query_start_loc`` [num_seqs + 1], ``seq_lens``
      [num_seqs]: int32 or int64, as the caller chose; kernels expect int32. ``slot_mapping``: the slot of
      each new token, or None if unknown.
    - ``k_scale``, ``v_scale``: a number, [num_seqs, num_kv_heads], or [num_blocks, block_size,
      num_kv_heads]. ``q_scale``: the scale of an FP8 query, a number, [num_seqs, num_kv_heads], or
      None for 1. ``output_scale``: what the op divides its output by before it stores it, or None.
    - ``alibi_slopes``: [num_heads] float32, or None. ``sinks``: [num_heads] of any floating dtype, one
      logit per head that adds to the softmax sum of each row and has no value; or None.
    - ``lse``: [num_tokens, num_heads], the log-sum-exp of the scores that the op returned, or None.
    - ``softcap``: c of c · tanh(score / c), or None. ``sm_scale``: None leaves the scale to the op.
      ``num_splits``: None leaves the number of parts of a sequence to the op. ``interleave_v``: the
      values of a block are in packs (:func:`attnlab.tensors.cache.interleaved`).
    - ``causal`` and the fields around it, and ``sliding_window``: which keys a row sees, see
      :class:`attnlab.tensors.visibility.Visibility`.
    - ``strides``, ``padding``: the memory layout that the op gets (:mod:`attnlab.tensors.case_call`) where
      the
      lab runs it.
    - ``origin``: which program made the call, and where. ``unmodelled``: the arguments that change the
      result and that attnlab has no reference for; such a call is kept, but not diagnosed.
      ``unknown_arguments``: "name=value" of those that attnlab does not know and that are not at their
      default; whatever may depend on them is not decided. ``read_as``: how arguments of another form were
      read, in words. ``rejection``: the error that the op raised, or "".

    Raises InvalidCall if shapes contradict each other. A wrong dtype is allowed on purpose.
    """

    op: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache_dtype: str
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    max_query_len: int
    output: torch.Tensor | None = None
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    q_scale: float | torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    sliding_window: int = 0
    sm_scale: float | None = None
    softcap: float | None = None
    num_splits: int | None = None
    interleave_v: bool = False
    strides: str = "contiguous"
    padding: int = 0
    causal: bool | torch.Tensor = True
    window_right: int | None = None
    mm_prefix_range: torch.Tensor | None = None
    mm_prefix_clamp_sliding_window: bool = False
    rswa_prefix_lens: torch.Tensor | None = None
    chunk_lookback: int = -1
    qq_bias: torch.Tensor | None = None
    layout: str = "x-split"
    new_tokens: str = "given"
    before: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    output_scale: float | None = None
    block_ids: torch.Tensor | None = None
    unmodelled: tuple[str, ...] = ()
    unknown_arguments: tuple[str, ...] = ()
    read_as: tuple[str, ...] = ()
    rejection: str = ""
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        """Check that the shapes fit together."""
        check_call({one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def from_tensors(
        cls,
        *,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        op: str | None = None,
        layout: str | None = None,
        kv_cache_dtype: str | None = None,
        **options: Any,
    ) -> "KernelCall":
        """Return the call of tensors in one of vLLM's cache layouts.

        - ``query``: [num_tokens, num_heads, head_size], the new tokens of all sequences.
        - ``key_cache``, ``value_cache``: x-split, [num_blocks, num_kv_heads, head_size / x, block_size, x]
          and [num_blocks, num_kv_heads, head_size, block_size]; or flash, both [num_blocks, block_size,
          num_kv_heads, head_size]; or HND, both [num_blocks, num_kv_heads, block_size, head_size]. Of the
          query's dtype, FP8, or FP8 as uint8. The call has views of them. Values may have another width
          than keys.
        - ``block_table``: [num_seqs, max_blocks_per_seq], ``seq_lens``: [num_seqs], int32 or int64.
        - ``query_start_loc``: [num_seqs + 1], int32 or int64. Default: one new token per sequence.
        - ``key``, ``value``: [num_tokens, num_kv_heads, head_size]. Required if the op reads new tokens
          from them. Without them, new tokens are what the cache holds.
        - ``output``: what the op wrote. Default None: it is unknown. The call can be run, not diagnosed.
        - ``op``: default chunked_prefill_paged_decode for x-split, otherwise unified_attention.
        - ``layout``: "x-split", "flash" or "HND". Default: the layout that the shapes allow.
        - ``kv_cache_dtype``: default by the dtype of the cache; required for uint8.
        - ``options``: further fields of KernelCall, for example ``sm_scale``, ``k_scale``, ``sinks`` or
          ``sliding_window``; ``max_query_len`` and ``max_seq_len`` default to the true maxima.

        Raises InvalidCall with one line that names the first argument that does not fit.
        """
        plain = PlainCall(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            key=key,
            value=value,
            output=output,
            op=op,
            layout=layout,
            kv_cache_dtype=kv_cache_dtype,
        )
        arguments = plain.arguments()
        _check_options(options, arguments)
        lens = {"max_query_len": arguments["query_start_loc"].diff(), "max_seq_len": seq_lens}
        maxima = {name: int(found.max()) if len(found) else 0 for name, found in lens.items()}
        return cls(**{**maxima, **arguments, **options})

    @property
    def spec(self) -> Op:
        """Return the record of the op."""
        return OPS[self.op]

    @property
    def buffer(self) -> torch.Tensor:
        """Return the output, which an op writes; raise InvalidCall if there is none."""
        if self.output is None:
            text = (
                "output must be the tensor that the op wrote, got a call without a recorded output"
            )
            raise InvalidCall(text)
        return self.output

    @property
    def visibility(self) -> Visibility:
        """Return which keys the rows see."""
        return Visibility(**{one.name: getattr(self, one.name) for one in fields(Visibility)})

    @property
    def is_foreign(self) -> bool:
        """Answer whether attnlab has no record of the call's op, and so no contract.

        An op is known by its function and its module in vLLM: other libraries use the same names.
        """
        if self.origin.op is None:
            return False
        module, _, function = self.origin.op.rpartition(".")
        if self.spec.library != "vllm":
            own = (self.spec.library, self.spec.function)
            return (module.partition(".")[0], function) != own
        places = {
            place
            for op in (OPS[name] for name in VLLM_OPS)
            if function in (op.name, op.function)
            for place in (op.module, "_custom_ops")
        }
        is_vllm = not module or module.split(".")[0] == "vllm"
        return not (is_vllm and places and (not module or module.rpartition(".")[2] in places))

    @property
    def num_queries_per_kv(self) -> int:
        """Return the number of query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def block_size(self) -> int:
        """Return the number of tokens per cache block."""
        return self.value_cache.shape[3]

    @property
    def query_lens(self) -> torch.Tensor:
        """Return the number of new tokens of each sequence, [num_seqs] int64, as the caller intended."""
        return self.query_start_loc.long().diff()

    def number(self, name: str) -> float:
        """Return k_scale, v_scale or q_scale where only one number will do; raise InvalidCall."""
        scale: float | torch.Tensor | None = getattr(self, name)
        if isinstance(scale, torch.Tensor):
            first = scale.flatten()[:1]
            if len(first) and bool((scale == first).all()):
                return float(first)
            text = f"{name} must be a number where the lab runs {self.op}"
            raise InvalidCall(f"{text}, got a tensor {tuple(scale.shape)}")
        return 1.0 if scale is None else scale

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the call by its field's name."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}

    def with_buffer(self) -> "KernelCall":
        """Return the call with a tensor for an op to write: its output, or NaN of the query's dtype, so that
        rows which are not written are visible."""
        if self.output is not None:
            return self
        blocks, kv_heads, value_size, block_size = self.value_cache.shape
        tokens, heads, head_size = self.query.shape
        shape = (tokens, heads, value_size)
        if self.spec.writes_cache:
            shape = (blocks * block_size, kv_heads, head_size + value_size)
        return dataclasses.replace(self, output=self.query.new_full(shape, float("nan")))

    def cpu(self) -> "KernelCall":
        """Return the call with its tensors on the CPU; itself if they are there."""
        return on_device(self, "cpu")

    def with_named_blocks(self) -> "KernelCall":
        """Return the call with copies of only the blocks that its block table names, renumbered.

        The strides of the cache are kept, and ``block_ids`` has the original numbers.
        """
        ids = named_by(self.block_table, self.key_cache.shape[0])
        named = copy_blocks((self.key_cache, self.value_cache), ids)
        scales: dict[str, Any] = {
            name: scale[ids.to(scale.device)]
            for name in ("k_scale", "v_scale")
            if isinstance(scale := getattr(self, name), torch.Tensor) and scale.dim() == 3
        }
        original = ids if self.block_ids is None else self.block_ids.to(ids.device)[ids]
        return dataclasses.replace(
            self,
            key_cache=named.caches[0],
            value_cache=named.caches[1],
            block_table=named.renumbered(self.block_table),
            block_ids=original,
            **scales,
        )

    def save(self, path: Path) -> None:
        """Write the call to a safetensors file (docs/call-file.md), with shapes, strides and offsets.

        Of a cache above 16 MiB, only the blocks that the block table names are written. The file is
        replaced at once. Raises InvalidCall if it cannot be written.
        """
        caches = (self.key_cache, self.value_cache)
        large = sum(cache.numel() * cache.element_size() for cache in caches) > _LARGE_CACHE
        call = self.with_named_blocks() if large and self.spec.attends_to_cache else self
        tensors = call.tensors()
        scalars = {
            one.name: getattr(call, one.name)
            for one in fields(call)
            if one.name not in (*tensors, "origin") and getattr(call, one.name) is not None
        }
        missing = [] if call.output is not None else ["output"]
        call_file.write(path, scalars, tensors, self.origin.to_dict(), missing=missing)

    @classmethod
    def load(cls, path: Path) -> "KernelCall":
        """Return the call in a file that :meth:`save` wrote, in any release; raise InvalidCall."""
        held = call_file.read(path)
        given: dict[str, Any] = {
            **held.scalars,
            **held.tensors,
            "origin": Origin.of_dict(held.origin),
        }
        for name in ("unmodelled", "unknown_arguments", "read_as"):
            if name in given:
                given[name] = tuple(given[name])
        if is_fp8(given.get("query")):
            given["kv_cache_dtype"] = _fp8_name(given)  # "auto" in files without q_scale
        if not held.names_missing and _may_be_missing(given):
            given["output"] = None
        try:
            return cls(**given)
        except (TypeError, AttributeError) as error:
            raise InvalidCall(f"{path} must hold the arguments of a KernelCall: {error}") from error


def _fp8_name(given: Mapping[str, Any]) -> Any:
    """Return the name of an FP8 cache that a file calls "auto", else the name in the file."""
    name = given.get("kv_cache_dtype")
    if name != "auto" or not is_fp8(given.get("key_cache")):
        return name
    return "fp8_e5m2" if given["key_cache"].dtype == torch.float8_e5m2 else "fp8"


def _may_be_missing(given: Mapping[str, Any]) -> bool:
    """Answer whether an output may stand for none: in older files, NaN alone could mean either."""
    output = given.get("output")
    if not isinstance(output, torch.Tensor) or "before" in given:
        return False
    return output.numel() > 0 and bool(output.double().isnan().all())


def _check_options(options: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise InvalidCall for an option that is not a further field of KernelCall."""
    known = [field.name for field in fields(KernelCall) if field.name not in arguments]
    for name in options:
        if name not in known:
            raise InvalidCall(f"option must be one of {', '.join(known)}, got {name}", field=name)
