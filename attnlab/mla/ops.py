"""The ops of an MLA path: models in torch, or those of a vLLM release.

All tensors are on the CPU; :class:`VllmOps` moves them to its device and back.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from attnlab.case.errors import Unsupported
from attnlab.case.ops import DECODE_FWD, MERGE
from attnlab.case.platforms import Platform
from attnlab.kernels.vllm.backend import calling, load
from attnlab.kernels.vllm.source import Source, find_source

_COMBINE_MODULES = ("dcp", "common")  # of correct_attn_out: 0.33.0, older releases
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeCall:
    """A call of decode_attention_fwd as TRITON_MLA makes it, with one row per new token.

    - ``query``: [rows, num_heads, size]; ``key``: [blocks, block_size, kv_heads, size]; ``value``: its view
      [..., :value_size], or another tensor.
    - ``table``: [rows, max_blocks] int32; ``lens``: [rows] int32, the keys of each row.
    - ``is_mla``: whether the value is the first part of the key. ``lse_dtype``: of the LSE.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    num_splits: int
    scale: float
    k_scale: float
    is_mla: bool
    lse_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """What the last merge also does: see the fields of the same names of an MlaCase.

    ``divisor``: by what the output is divided; the reader multiplies it by ``output_scale``.
    """

    tokens_with_context: int | None = None
    output_scale: float | None = None
    divisor: float | None = None


NOT_LAST = Last()


class MlaOps(Protocol):
    """The ops that a path uses."""

    @property
    def name(self) -> str:
        """Return whose the ops are."""

    def decode(self, call: DecodeCall) -> Pair:
        """Return output [rows, num_heads, value_size] and LSE [rows, num_heads]."""

    def merge(self, prefix: Pair, suffix: Pair, dtype: torch.dtype, last: Last) -> Pair:
        """Return the output in ``dtype`` and the LSE of two parts, each an output and its LSE."""

    def combine(self, outputs: torch.Tensor, lses: torch.Tensor) -> Pair:
        """Return output and LSE of outputs [ranks, rows, heads, size] and LSE [ranks, rows, heads]."""


@dataclass(frozen=True, slots=True)
class ModelOps:
    """Models of vLLM's ops, in float32."""

    name: str = "model"

    def decode(self, call: DecodeCall) -> Pair:
        rows, heads, _ = call.query.shape
        output = call.query.new_zeros(rows, heads, call.value.shape[-1])
        lse = torch.full((rows, heads), -torch.inf, dtype=call.lse_dtype)
        group = heads // call.key.shape[2]
        for row, length in enumerate(call.lens.tolist()):
            if not length:
                continue
            blocks = call.table[row, : -(-length // call.key.shape[1])].long()
            key, value = (
                self._numbers(cache[blocks].flatten(0, 1)[:length], call).repeat_interleave(
                    group, 1
                )
                for cache in (call.key, call.value)
            )
            scores = torch.einsum("hd,nhd->hn", call.query[row].float(), key) * call.scale
            lse[row] = scores.logsumexp(1)
            output[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), value)
        return output, lse

    @staticmethod
    def _numbers(stored: torch.Tensor, call: DecodeCall) -> torch.Tensor:
        if stored.element_size() > 1:
            return stored.float()
        return (stored.float() * call.k_scale).to(call.query.dtype).float()

    def merge(self, prefix: Pair, suffix: Pair, dtype: torch.dtype, last: Last) -> Pair:
        lses = [lse.masked_fill(lse == torch.inf, -torch.inf) for _, lse in (prefix, suffix)]
        total = torch.logaddexp(*lses)
        weights = [(lse - total).exp().nan_to_num(0.0)[..., None] for lse in lses]
        output = weights[0] * prefix[0].float() + weights[1] * suffix[0].float()
        count = last.tokens_with_context
        if count is not None:
            output[count:], total[count:] = suffix[0][count:].float(), suffix[1][count:]
        if last.divisor is not None:
            most = torch.finfo(dtype).max
            output = (output / last.divisor).clamp(-most, most)
        return output.to(dtype), total

    def combine(self, outputs: torch.Tensor, lses: torch.Tensor) -> Pair:
        lses = lses.float().nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        total = lses.logsumexp(0)
        factors = (lses - total).exp().nan_to_num(0.0)[..., None]
        corrected = (outputs.float() * factors).masked_fill(factors == 0, 0.0).to(outputs.dtype)
        return _sum(corrected), total


@dataclass(frozen=True, kw_only=True)
class VllmOps:
    """The Triton ops of a vLLM release: on a GPU, or on a CPU with Triton's interpreter.

    ``where``: "cuda" or "cpu". Raises Unavailable or KernelRejected if an op cannot run.
    """

    source: Source
    platform: Platform
    where: str = "cpu"

    @classmethod
    def of(
        cls, path: Path | str | None, platform: Platform, device: str | None = None
    ) -> "VllmOps":
        """Return the ops of the vLLM at ``path``, None for the installed one."""
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(source=find_source(path), platform=platform, where=where)

    @property
    def name(self) -> str:
        """Return the source and where it runs."""
        how = torch.cuda.get_device_name() if self.where == "cuda" else "Triton interpreter"
        return f"{self.source.text()}, {how}"

    def decode(self, call: DecodeCall) -> Pair:
        rows, heads, _ = call.query.shape
        size = call.value.shape[-1]
        output = torch.zeros(rows, heads, size, dtype=call.query.dtype)
        logits = (rows, heads, call.num_splits, size + 1)
        key = call.key.to(self.where)
        value = key[..., :size] if call.is_mla else call.value.to(self.where)
        scale = torch.tensor(call.k_scale, device=self.where)
        given = {
            "q": call.query,
            "k_buffer": key,
            "v_buffer": value,
            "o": output,
            "lse": torch.zeros(rows, heads, dtype=call.lse_dtype),
            "req_to_token": call.table,
            "b_seq_len": call.lens,
            "attn_logits": torch.full(logits, float("nan")),
            "num_kv_splits": call.num_splits,
            "sm_scale": call.scale,
            "page_size": call.key.shape[1],
            "k_scale": scale,
            "v_scale": scale,
            "is_mla": call.is_mla,
        }
        function = self._op(DECODE_FWD)
        known = inspect.signature(function).parameters
        if "k_scale" not in known and call.key.element_size() == 1:
            raise Unsupported("kv_cache_dtype must be auto: decode_attention_fwd has no FP8 scales")
        given = {name: value for name, value in given.items() if name in known}
        done = self._run(DECODE_FWD, function, given)
        return done["o"], done["lse"]

    def merge(self, prefix: Pair, suffix: Pair, dtype: torch.dtype, last: Last) -> Pair:
        given = {
            "output": torch.empty(prefix[0].shape, dtype=dtype),
            "prefix_output": prefix[0],
            "prefix_lse": prefix[1].T.contiguous(),
            "suffix_output": suffix[0],
            "suffix_lse": suffix[1].T.contiguous(),
            "output_lse": torch.full(prefix[1].T.shape, float("nan")),
            "prefill_tokens_with_context": last.tokens_with_context,
            "output_scale": None if last.divisor is None else torch.tensor([last.divisor]),
        }
        done = self._run(MERGE, self._op(MERGE), {k: v for k, v in given.items() if v is not None})
        return done["output"], done["output_lse"].T

    def combine(self, outputs: torch.Tensor, lses: torch.Tensor) -> Pair:
        correct = self._combine_op()
        corrected = []
        for rank, output in enumerate(outputs):
            output = output.clone().to(self.where)
            given = {"out": output, "lses": lses.contiguous(), "cp_rank": rank, "ctx": _Context()}
            done = self._run("correct_attn_out", correct, given)
            corrected.append(done["result"][0].cpu())
        return _sum(torch.stack(corrected)), done["result"][1].cpu()

    def _op(self, name: str) -> Callable[..., Any]:
        return load(self.source, self.platform, self.where).function(name)

    def _combine_op(self) -> Callable[..., Any]:
        loader = load(self.source, self.platform, self.where).loader
        for name in _COMBINE_MODULES:
            try:
                found = getattr(loader.load(name), "correct_attn_out", None)
            except Unsupported:
                continue
            if found is not None:
                return found  # type: ignore[no-any-return]
        raise Unsupported(f"vLLM {self.source.version} has no correct_attn_out")

    def _run(self, op: str, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        """Run a function; return its arguments, on the CPU, and what it returns as "result"."""
        moved = {
            k: v.to(self.where) if isinstance(v, torch.Tensor) else v for k, v in given.items()
        }
        with calling(op, self.source):
            result = function(**moved)
        done = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in moved.items()}
        return {**done, "result": result}


class _Context:
    """Replace vLLM's CPTritonContext, which caches a compiled kernel: launch it each time."""

    def call_kernel(self, kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        kernel[grid](*args, **constants)


def _sum(corrected: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks in the outputs' dtype, as an all-reduce adds them."""
    total = corrected[0]
    for one in corrected[1:]:
        total = total + one
    return total


def in_pages(tokens: Sequence[torch.Tensor], block_size: int) -> Pair:
    """Return tokens [n, kv_heads, size] of each sequence in pages, and the block table.

    Slots without a token hold NaN; the pages are in reversed order.
    """
    counts = [-(-len(one) // block_size) for one in tokens]
    total = max(1, sum(counts))
    shape = (total, block_size, *tokens[0].shape[1:])
    pages = torch.full(shape, float("nan")).to(tokens[0].dtype)
    table = torch.zeros(len(tokens), max(1, *counts), dtype=torch.int32)
    used = 0
    for seq, (one, count) in enumerate(zip(tokens, counts, strict=True)):
        blocks = torch.arange(total - used - 1, total - used - 1 - count, -1)
        table[seq, :count] = blocks.int()
        at = torch.arange(len(one))
        pages[blocks[at // block_size], at % block_size] = one
        used += count
    return pages, table
