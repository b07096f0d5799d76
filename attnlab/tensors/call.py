"""KernelCall: the exact arguments that an attention op receives."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import OPS, Op
from attnlab.case.shown import Shown
from attnlab.tensors import call_file
from attnlab.tensors.call_checks import check_call, is_fp8
from attnlab.tensors.from_tensors import PlainCall
from attnlab.tensors.named_blocks import copy_blocks, named_by
from attnlab.tensors.origin import Origin
from attnlab.tensors.visibility import Visibility

_LARGE_CACHE = (
    1 << 24
)  # bytes; of a larger cache, a file holds only the blocks that the table names


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
      of a cache in another layout; ``layout`` names it (:mod:`attnlab.tensors.cache_layout`).
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
    - ``strides``, ``padding``: the memory layout that the op gets (:mod:`attnlab.tensors.layout`) where the
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
            raise InvalidCall(text, field="output")
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
        places = {
            place
            for op in OPS.values()
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
            raise InvalidCall(f"{text}, got a tensor {tuple(scale.shape)}", field=name)
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
        moved: dict[str, Any] = {
            name: one.cpu() for name, one in self.tensors().items() if one.device.type != "cpu"
        }
        return dataclasses.replace(self, **moved) if moved else self

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
