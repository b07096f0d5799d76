"""KernelCall: the exact arguments that an attention op receives."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.case.ops import OPS, Op
from attnlab.case.output_file import replacing
from attnlab.case.shown import Shown
from attnlab.tensors.batch import Batch
from attnlab.tensors.cache import PagedCache, garbage
from attnlab.tensors.formats import FORMATS, read_format
from attnlab.tensors.from_tensors import PlainCall
from attnlab.tensors.shapes import INDEX_DTYPES, check_dims, check_index, check_shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class KernelCall(Shown):
    """Arguments of an attention op, with the names that chunked_prefill_paged_decode has for them.

    - ``query``, ``output``: [num_tokens, num_heads, head_size]; the op writes ``output``. For an op that
      writes the cache, the output is the cache: [num_blocks × block_size, num_kv_heads, 2 × head_size],
      for each slot its key, then its value.
    - ``key``, ``value``: [num_tokens, num_kv_heads, head_size], the new tokens.
    - ``key_cache``: [num_blocks, num_kv_heads, head_size / x, block_size, x]; ``value_cache``:
      [num_blocks, num_kv_heads, head_size, block_size]; uint8 if kv_cache_dtype is FP8.
    - ``block_table`` [num_seqs, max_blocks_per_seq], ``query_start_loc`` [num_seqs + 1], ``seq_lens``
      [num_seqs]: int32 or int64, as the caller chose; kernels expect int32.
    - ``alibi_slopes``: [num_heads] float32, or None. ``sinks``: [num_heads] of any floating dtype, one
      logit per head that adds to the softmax sum of each row and has no value; or None.
    - ``softcap``: c of c · tanh(score / c), or None. ``sm_scale``: None leaves the scale to the op.
      ``num_splits``: None leaves the number of parts of a sequence to the op. ``interleave_v``: the
      values of a block are in packs (:func:`attnlab.tensors.cache.interleaved`).
    - ``strides``, ``padding``: the memory layout that the op gets (:mod:`attnlab.tensors.layout`); the
      tensors here are contiguous and not padded.

    Raises InvalidCall if shapes contradict each other. A wrong dtype is allowed on purpose.
    """

    op: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    kv_cache_dtype: str
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    max_query_len: int
    k_scale: float = 1.0
    v_scale: float = 1.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    sliding_window: int = 0
    sm_scale: float | None = None
    softcap: float | None = None
    num_splits: int | None = None
    interleave_v: bool = False
    strides: str = "contiguous"
    padding: int = 0

    def __post_init__(self) -> None:
        """Check that the shapes fit together."""
        if self.op not in OPS:
            raise InvalidCall(f"op must be one of {', '.join(OPS)}, got {self.op!r}", field="op")
        tokens, heads, head_size = check_dims("query", self.query, 3)
        _, kv_heads, _ = check_dims("key", self.key, 3)
        check_shape("key", self.key, (tokens, kv_heads, head_size))
        check_shape("value", self.value, (tokens, kv_heads, head_size))
        blocks, _, chunks, block_size, x = check_dims("key_cache", self.key_cache, 5)
        check_shape("key_cache", self.key_cache, (blocks, kv_heads, chunks, block_size, x))
        if chunks * x != head_size:
            text = f"key_cache must hold heads of {head_size}, got {chunks} × {x}"
            raise InvalidCall(text, field="key_cache")
        check_shape("value_cache", self.value_cache, (blocks, kv_heads, head_size, block_size))
        outputs = (tokens, heads, head_size)
        if self.spec.writes_cache:
            outputs = (blocks * block_size, kv_heads, 2 * head_size)
        check_shape("output", self.output, outputs)
        num_seqs, _ = check_dims("block_table", self.block_table, 2)
        check_shape("seq_lens", self.seq_lens, (num_seqs,))
        check_shape("query_start_loc", self.query_start_loc, (num_seqs + 1,))
        for name in ("block_table", "seq_lens", "query_start_loc"):
            check_index(name, getattr(self, name))
        if self.sinks is not None:
            check_shape("sinks", self.sinks, (heads,))
            if not self.sinks.is_floating_point():
                text = f"sinks must be of a floating dtype, got {self.sinks.dtype}"
                raise InvalidCall(text, field="sinks")
        if kv_heads == 0 or heads % kv_heads:
            text = f"query must have a multiple of {kv_heads} heads, got {heads}"
            raise InvalidCall(text, field="query")

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
          query's dtype, FP8, or FP8 as uint8. A cache that is not x-split is copied.
        - ``block_table``: [num_seqs, max_blocks_per_seq], ``seq_lens``: [num_seqs], int32 or int64.
        - ``query_start_loc``: [num_seqs + 1], int32 or int64. Default: one new token per sequence.
        - ``key``, ``value``: [num_tokens, num_kv_heads, head_size]. Required if the op reads new tokens
          from them; default: zeros.
        - ``output``: what the op writes. Default: NaN, so that rows which are not written are visible.
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

    def save(self, path: Path) -> None:
        """Write the call to a safetensors file, with scalars as metadata.

        The file is replaced at once. Raises InvalidCall if it cannot be written.
        """
        tensors, scalars = {}, {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                tensors[field.name] = value.contiguous()
            elif value is not None:
                scalars[field.name] = value
        try:
            with replacing(Path(path)) as part:
                save_file(tensors, part, metadata={"attnlab_call": json.dumps(scalars)})
        except (InvalidCase, SafetensorError) as error:
            raise InvalidCall(f"{path} must be a file to write to: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "KernelCall":
        """Return the call in a file that :meth:`save` or a capture wrote; raise InvalidCall."""
        try:
            with safe_open(path, framework="pt") as file:
                scalars = json.loads((file.metadata() or {})["attnlab_call"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InvalidCall(f"{path} must be a saved KernelCall: {error}") from error
        try:
            return cls(**scalars, **tensors)
        except TypeError as error:
            raise InvalidCall(f"{path} must hold the arguments of a KernelCall: {error}") from error


def make_query_start_loc(query_lens: Sequence[int], how: str) -> torch.Tensor:
    """Return the prefix sums of ``query_lens``, [num_seqs + 1], computed as a stage of the test did.

    ``torch.cumsum`` of int32 returns int64. So "int32_before_cumsum", the test's first fix, gives int64;
    this function computes it in the same way.
    """
    lens = [0, *query_lens]
    if how == "int64":
        return torch.cumsum(torch.tensor(lens, dtype=torch.long), dim=0)
    if how == "int32_before_cumsum":
        return torch.cumsum(torch.tensor(lens, dtype=torch.int), dim=0)
    return torch.cumsum(torch.tensor(lens), dim=0).to(torch.int32)


def make_output(case: Case, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the output buffer before the call, on ``device``: recycled memory, NaN or zeros.

    vLLM's test allocates it with ``torch.empty``. Recycled memory is modelled by
    :func:`attnlab.tensors.cache.garbage`, so that an unwritten row never passes by chance.
    """
    shape = (case.lengths.num_tokens, case.num_heads, case.head_size)
    dtype = FORMATS[case.dtype].dtype
    if case.spec.writes_cache:
        shape = (case.total_blocks * case.block_size, case.num_kv_heads, 2 * case.head_size)
        dtype = read_format(case.kv_cache_dtype, dtype, case.machine.fp8_e4m3).dtype
    if case.output_init == "recycled":
        return garbage(shape, seed=case.seed + 4, device=device).to(dtype)
    fill = float("nan") if case.output_init == "nan" else 0.0
    return torch.full(shape, fill, dtype=dtype, device=device)


def make_call(case: Case, batch: Batch, cache: PagedCache, output: torch.Tensor) -> KernelCall:
    """Return the Case's call on its batch and cache; the op will write ``output``."""
    staging = case.staging
    new = batch.new_rows()
    return KernelCall(
        op=case.op,
        query=batch.query,
        key=batch.key[new],
        value=batch.value[new],
        output=output,
        kv_cache_dtype=case.kv_cache_dtype,
        key_cache=cache.key,
        value_cache=cache.value,
        block_table=cache.provenance.block_table.to(INDEX_DTYPES[staging.block_table]),
        query_start_loc=make_query_start_loc(case.lengths.query_lens, staging.query_start_loc),
        seq_lens=torch.tensor(case.lengths.seq_lens, dtype=INDEX_DTYPES[staging.seq_lens]),
        max_seq_len=case.passed_max_seq_len,
        max_query_len=case.passed_max_query_len,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        alibi_slopes=batch.alibi_slopes,
        sinks=batch.sinks,
        sliding_window=case.sliding_window,
        sm_scale=case.sm_scale,
        softcap=case.softcap,
        num_splits=case.num_splits,
        interleave_v=case.interleave_v,
        strides=case.kv_layout,
        padding=case.pad_batch,
    )


def _check_options(options: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise InvalidCall for an option that is not a further field of KernelCall."""
    known = [field.name for field in fields(KernelCall) if field.name not in arguments]
    for name in options:
        if name not in known:
            raise InvalidCall(f"option must be one of {', '.join(known)}, got {name}", field=name)
