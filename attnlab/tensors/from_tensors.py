"""Arguments of a KernelCall from plain tensors: checks, defaults and conversion of the cache.

:meth:`attnlab.tensors.call.KernelCall.from_tensors` is the public entry.
"""

from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import KV_CACHE_DTYPES, OPS, UNIFIED, WRAPPER, Op
from attnlab.tensors.cache_layout import LAYOUTS, find_layout, to_x_split
from attnlab.tensors.shapes import check_dims, check_index, check_shape, check_tensor

_FP8 = {
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2: "fp8_e5m2",
}


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
            "op": op.name,
            "query": self.query,
            "key": key,
            "value": value,
            "output": self.output,
            "kv_cache_dtype": kv_cache_dtype,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_table": self.block_table,
            "query_start_loc": starts,
            "seq_lens": self.seq_lens,
            "layout": layout,
            "new_tokens": "in the cache" if self.key is None else "given",
        }

    def _check_tensors(self) -> None:
        """Check types, devices and the shapes that do not depend on the layout."""
        check_tensor("query", self.query)
        for name in ("key_cache", "value_cache", "block_table", "seq_lens"):
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
            raise InvalidCall(f"op must be one of {', '.join(OPS)}, got {self.op!r}", field="op")
        if (self.key is None) != (self.value is None):
            missing = "key" if self.key is None else "value"
            other = "value" if self.key is None else "key"
            raise InvalidCall(f"{missing} must be given with {other}, got None", field=missing)
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
            raise InvalidCall(f"{text}, got None", field="query_start_loc")
        return torch.arange(num_seqs + 1, dtype=torch.int32, device=self.seq_lens.device)

    def _check_lens(self, starts: torch.Tensor, query_lens: torch.Tensor) -> None:
        tokens = self.query.shape[0]
        ends = int(starts[-1])
        if int(starts[0]) != 0 or bool((query_lens < 0).any()) or ends > tokens:
            text = f"query_start_loc must rise from 0 to at most {tokens}, the rows of query"
            raise InvalidCall(f"{text}, got {starts.tolist()}", field="query_start_loc")
        short = torch.nonzero(self.seq_lens.long() < query_lens.to(self.seq_lens.device)).flatten()
        if len(short):
            seq = int(short[0])
            text = f"seq_lens[{seq}] must be at least its query_len {int(query_lens[seq])}"
            raise InvalidCall(f"{text}, got {int(self.seq_lens[seq])}", field="seq_lens")

    def _layout(self) -> str:
        if self.layout is not None:
            if self.layout not in LAYOUTS:
                text = f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}"
                raise InvalidCall(text, field="layout")
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
                raise InvalidCall(f"{text}, got {columns}", field="block_table")
            for column, block in enumerate(self.block_table[seq, :needed].tolist()):
                if not 0 <= block < num_blocks:
                    text = f"block_table[{seq}][{column}] must be from 0 to {num_blocks - 1}"
                    raise InvalidCall(f"{text}, got {block}", field="block_table")

    def _kv_cache_dtype(self) -> str:
        """Return kv_cache_dtype, given or by the dtype of the cache."""
        cache, model = self.key_cache.dtype, self.query.dtype
        if self.value_cache.dtype != cache:
            text = f"value_cache must be {cache} like key_cache, got {self.value_cache.dtype}"
            raise InvalidCall(text, field="value_cache")
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in KV_CACHE_DTYPES:
            text = f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}"
            raise InvalidCall(f"{text}, got {self.kv_cache_dtype!r}", field="kv_cache_dtype")
        found = _FP8.get(cache, "auto" if cache == model else None)
        if cache == torch.uint8 and self.kv_cache_dtype in (None, "auto"):
            text = (
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES[1:])} for a uint8 cache"
            )
            raise InvalidCall(f"{text}, got {self.kv_cache_dtype}", field="kv_cache_dtype")
        if cache != torch.uint8 and found is None:
            text = f"key_cache must be {model} like query, uint8 or FP8, got {cache}"
            raise InvalidCall(text, field="key_cache")
        given = self.kv_cache_dtype or found
        assert given is not None  # of a uint8 cache it is given
        if found is not None and (given == "auto") != (found == "auto"):
            text = f"kv_cache_dtype must be {found} for a cache of {cache}, got {given}"
            raise InvalidCall(text, field="kv_cache_dtype")
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
        raise InvalidCall(text, field="key_cache")
    values = check_dims("value_cache", value_cache, 4)
    fits = (values[0], values[1], values[3]) == (blocks, kv_heads, block_size)
    shape = (blocks, kv_heads, values[2] if fits else head_size, block_size)
    check_shape("value_cache", value_cache, shape)
    if kv_heads == 0 or query.shape[1] % kv_heads:
        text = f"query must have a multiple of {kv_heads} heads, as key_cache has {kv_heads}"
        raise InvalidCall(f"{text}, got {query.shape[1]}", field="query")
