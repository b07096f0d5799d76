"""Case: one attention call of the lab, with all its settings in one frozen, validated, hashable value.

Notebook parameters, panels, command-line flags, JSON files and vLLM's pytest ids are all converted to a
Case. The lab has no other configuration.
"""

import dataclasses
import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from attnlab.case.declaration import DTYPE_BYTES, CaseFields
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Declared, is_plugin, refuse
from attnlab.case.masks import CAUSAL, MASK_DATA, MASKS
from attnlab.case.op_arguments import NO_ARGUMENT, NONE, OP_ARGUMENTS, OpArgument
from attnlab.case.ops import OPS, PREFILL, WRAPPER, Op
from attnlab.case.platforms import PLATFORMS, STAGES, Platform, Stage
from attnlab.case.pytest_id import fields_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token counts of each sequence."""

    query_lens: tuple[int, ...]
    ctx_lens: tuple[int, ...]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Return ctx_len + query_len of each sequence."""
        return tuple(c + q for c, q in zip(self.ctx_lens, self.query_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens, which is the number of output rows."""
        return sum(self.query_lens)

    @property
    def token_start_loc(self) -> list[int]:
        """Return the first new token of each sequence among all, and their number; length num_seqs + 1."""
        return [0, *accumulate(self.query_lens)]

    @property
    def kv_start_loc(self) -> list[int]:
        """Return the first token of each sequence among all, and their number; length num_seqs + 1."""
        return [0, *accumulate(self.seq_lens)]

    def locate(self, row: int) -> tuple[int, int]:
        """Return (sequence, index of the new token in its query) of an output row."""
        starts = self.token_start_loc
        seq = bisect_right(starts, row) - 1
        return seq, row - starts[seq]

    def cached_lens(self, fill: str) -> tuple[int, ...]:
        """Return how many tokens of each sequence are in the cache under a fill policy.

        - "context_only": ctx_len.
        - "decode_rows": seq_len if query_len is 1, else ctx_len.
        - "all_rows": seq_len.

        The tokens that an op reads from the cache are counted by the same rule: see
        :attr:`attnlab.case.ops.Op.fill_read`.
        """
        return tuple(
            ctx_len + query_len
            if fill == "all_rows" or (fill == "decode_rows" and query_len == 1)
            else ctx_len
            for ctx_len, query_len in zip(self.ctx_lens, self.query_lens, strict=True)
        )


@lru_cache(maxsize=256)
def draw_lengths(
    seed: int, num_seqs: int, max_query_len: int, max_ctx_len: int, force_decode: bool
) -> Lengths:
    """Draw lengths as tests/kernels/attention/test_prefix_prefill.py does (vLLM 0.11.2).

    Python's random generator gives ``num_seqs`` query lengths from 16 to ``max_query_len``, then as many
    context lengths from 16 to ``max_ctx_len``. With ``force_decode`` (all tests but ALiBi's) the last
    query length is then set to 1; this changes no other length.
    """
    rng = random.Random(seed)
    query_lens = [rng.randint(min(16, max_query_len), max_query_len) for _ in range(num_seqs)]
    if force_decode:
        query_lens[-1] = 1
    ctx_lens = [rng.randint(min(16, max_ctx_len), max_ctx_len) for _ in range(num_seqs)]
    return Lengths(query_lens=tuple(query_lens), ctx_lens=tuple(ctx_lens))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CaseQuantities(CaseFields):
    """The fields of a Case and the quantities that follow from them."""

    @property
    def spec(self) -> Op:
        """Return the record of the op."""
        return OPS[self.op]

    @property
    def argument(self) -> OpArgument:
        """Return the record of the op argument."""
        return OP_ARGUMENTS.get(self.op_argument, NO_ARGUMENT)

    @property
    def plainer_argument(self) -> str:
        """Return the op argument that this one includes, or "none"."""
        return self.argument.includes.get(self.op, NONE)

    @property
    def machine(self) -> Platform:
        """Return the record of the platform."""
        return PLATFORMS[self.platform]

    @property
    def staging(self) -> Stage:
        """Return the stage with the fields that override it.

        Before an op that writes the cache, the cache holds only the context unless ``fill`` is given.
        """
        overrides: dict[str, Any] = {
            "fill": self.fill or ("context_only" if self.spec.writes_cache else None),
            "block_table": self.block_table_dtype,
            "seq_lens": self.seq_lens_dtype,
            "query_start_loc": self.query_start_loc_dtype,
        }
        given = {name: value for name, value in overrides.items() if value is not None}
        return dataclasses.replace(STAGES[self.stage], **given)

    @property
    def num_kv_heads(self) -> int:
        """Return num_heads / num_queries_per_kv."""
        return self.num_heads // self.num_queries_per_kv

    @property
    def query_heads(self) -> range | None:
        """Return the query heads that run, or None if all do."""
        if self.kv_head_range is None:
            return None
        return range(*(head * self.num_queries_per_kv for head in self.kv_head_range))

    @property
    def query_rows(self) -> range | None:
        """Return the output rows of the sequences that run, or None if all do."""
        if self.seq_range is None:
            return None
        starts = self.lengths.token_start_loc
        return range(*(starts[seq] for seq in self.seq_range))

    @property
    def is_fp8(self) -> bool:
        """Answer whether the cache holds FP8 bytes."""
        return self.kv_cache_dtype != "auto"

    @property
    def lengths(self) -> Lengths:
        """Return the lengths, given or drawn."""
        if self.query_lens is not None and self.ctx_lens is not None:
            return Lengths(query_lens=self.query_lens, ctx_lens=self.ctx_lens)
        return draw_lengths(
            self.seed,
            self.num_seqs,
            self.draw_max_query_len,
            self.draw_max_ctx_len,
            self.force_decode,
        )

    @property
    def passed_max_query_len(self) -> int:
        """Return the argument max_query_len: given, the true maximum of given lengths, or the constant
        that the test passes for drawn ones."""
        if self.max_query_len is not None:
            return self.max_query_len
        return max(self.query_lens) if self.query_lens else self.draw_max_query_len

    @property
    def passed_max_seq_len(self) -> int:
        """Return the argument max_seq_len: given, the true maximum of given lengths, or MAX_CTX_LEN,
        which the test passes for drawn ones (vLLM 0.11.2)."""
        if self.max_seq_len is not None:
            return self.max_seq_len
        return max(self.lengths.seq_lens) if self.query_lens else self.draw_max_ctx_len

    @property
    def blocks_per_seq(self) -> int:
        """Return the number of columns of the block table; 64 for the test's draw."""
        if self.block_table is not None:
            return len(self.block_table[0])
        if self.max_blocks_per_seq is not None:
            return self.max_blocks_per_seq
        drawn = self.draw_max_query_len + self.draw_max_ctx_len
        longest = max(self.lengths.seq_lens) if self.query_lens else drawn
        return -(-longest // self.block_size)

    @property
    def total_blocks(self) -> int:
        """Return the number of blocks of the cache; 640 for the test's draw."""
        if self.num_blocks is not None:
            return self.num_blocks
        if self.block_table is not None:
            return 1 + max(max(row) for row in self.block_table)
        return self.first_block + len(self.lengths.query_lens) * self.blocks_per_seq

    @property
    def key_x(self) -> int:
        """Return the size of the key cache's innermost dimension: given, or 16 bytes of elements."""
        return self.x or 16 // (1 if self.is_fp8 else DTYPE_BYTES[self.dtype])

    @property
    def tolerance(self) -> float | None:
        """Return atol if it is given, or 0 for a cache write, which is exact.

        None is the rounding bound of each element (:mod:`attnlab.lab.reference`).
        """
        if self.atol is None and self.spec.writes_cache:
            return 0.0
        return self.atol

    @property
    def has_own_tolerance(self) -> bool:
        """Answer whether the Case accepts other errors than rounding: atol or rtol is given."""
        return self.atol is not None or self.rtol > 0


def check_mask(case: CaseQuantities) -> None:
    """Raise InvalidCase unless the op has the mask, other fields allow it, and its data fit the lengths."""
    mask = MASKS[case.mask]
    if not mask.is_in(case.op, case.release):
        names = (name for name, other in MASKS.items() if other.is_in(case.op, case.release))
        refuse("mask", f"{' or '.join(names)} with {case.op} of vLLM {case.release}", case.mask)
    for name in MASK_DATA:
        if name != mask.data and getattr(case, name) is not None:
            refuse(name, f"none with mask {case.mask}", getattr(case, name))
    if case.mask == CAUSAL:
        return
    if mask.needs_window and not case.sliding_window:
        refuse("sliding_window", f"at least 1 with mask {case.mask}", case.sliding_window)
    if case.alibi and case.op in (WRAPPER, PREFILL):
        # context_attention_fwd asserts it in every release that has causal (prefix_prefill.py, 0.20.2 on)
        allowed = f"false with mask {case.mask}, which {case.op} rejects with ALiBi"
        refuse("alibi", allowed, case.alibi)
    if case.freed != "kept" and mask.sees_beyond_window:
        refuse(
            "freed", f"kept with mask {case.mask}, which sees keys before the window", case.freed
        )
    _check_data(case)


def _check_data(case: CaseQuantities) -> None:
    """Check the data of the mask, as far as they are given."""
    if case.causal_seqs is not None:
        _check_one_per_seq(case, "causal_seqs", case.causal_seqs, (1,) * len(case.lengths.seq_lens))
    if case.rswa_prefix_lens is not None:
        _check_one_per_seq(case, "rswa_prefix_lens", case.rswa_prefix_lens, case.lengths.seq_lens)
    if case.mm_prefix_range is not None:
        _check_ranges(case, case.mm_prefix_range)
    if case.chunk_lookback is not None and case.chunk_lookback >= case.sliding_window:
        most = case.sliding_window - 1
        refuse("chunk_lookback", f"at most sliding_window - 1 ({most})", case.chunk_lookback)
    if case.tree_parents is not None:
        _check_tree(case, case.tree_parents)


def _check_one_per_seq(
    case: CaseQuantities, name: str, values: Sequence[int], most: Sequence[int]
) -> None:
    """Check that there is one value per sequence, each at most its limit."""
    if len(values) != len(most):
        refuse(name, f"one number per sequence ({len(most)})", values)
    for seq, (value, limit) in enumerate(zip(values, most, strict=True)):
        if value > limit:
            refuse(f"{name}[{seq}]", f"at most {limit}", value)


def _check_ranges(case: CaseQuantities, rows: tuple[tuple[int, ...], ...]) -> None:
    """Check that each sequence has pairs of positions, first and last, within its length."""
    lens = case.lengths.seq_lens
    if len(rows) != len(lens) or len(rows[0]) % 2:
        text = f"mm_prefix_range must have one row per sequence ({len(lens)}), each of pairs first, last"
        raise InvalidCase(f"{text}, got {[list(row) for row in rows]!r:.80}")
    for seq, (row, seq_len) in enumerate(zip(rows, lens, strict=True)):
        for i in range(0, len(row), 2):
            first, last = row[i : i + 2]
            if first > last or last >= seq_len:
                name = f"mm_prefix_range[{seq}]"
                refuse(name, f"pairs first <= last <= {seq_len - 1}", row)


def _check_tree(case: CaseQuantities, parents: tuple[int, ...]) -> None:
    """Check that each new token has a parent before it, or itself for a root."""
    longest = max(case.lengths.query_lens)
    if len(parents) < longest:
        refuse("tree_parents", f"a parent for each of {longest} new tokens", parents)
    for token, parent in enumerate(parents):
        if parent > token:
            refuse(f"tree_parents[{token}]", f"at most {token}, the token itself", parent)


# Rules between the fields of a Case, which no field can check alone.
#
# A combination is refused only for what it means, for the layout of a tensor, or for what the op itself
# states; the comments name the source. What an op accepts is a Case, also if the op then ignores a part of
# it.


def check_rules(case: CaseQuantities) -> None:
    """Raise InvalidCase if two fields contradict each other; its ``field`` is one of them."""
    _check_heads(case)
    _check_backend(case)
    _check_subset(case)
    _check_layout(case)
    _check_lengths(case)
    _check_cache(case)
    _check_op(case)
    check_mask(case)
    _check_splits(case)
    _check_interleaved(case)
    _check_op_argument(case)


def _check_heads(case: CaseQuantities) -> None:
    if case.num_heads % case.num_queries_per_kv:
        allowed = f"a divisor of num_heads ({case.num_heads})"
        refuse("num_queries_per_kv", allowed, case.num_queries_per_kv)
    if case.head_size % case.key_x:  # [blocks, KV heads, head_size / x, block_size, x]
        refuse("head_size", f"a multiple of x ({case.key_x})", case.head_size)


def _check_backend(case: CaseQuantities) -> None:
    """Check that the op runs on the backend, the platform and the release."""
    op = case.spec
    has_plugins = op.library != "vllm" or "model" in op.backends
    if case.backend not in op.backends and not (is_plugin(case.backend) and has_plugins):
        if case.backend == "vllm-cpu":
            names = (name for name, other in OPS.items() if case.backend in other.backends)
            refuse("op", f"{' or '.join(names)} with backend {case.backend}", case.op)
        refuse("backend", f"{' or '.join(op.backends)} with op {case.op}", case.backend)
    if op.platforms is not None and case.platform not in op.platforms:
        refuse("platform", f"{' or '.join(op.platforms)} with op {case.op}", case.platform)
    if case.release not in op.releases:
        refuse("release", f"{' or '.join(op.releases)} with op {case.op}", case.release)
    if case.trace_reads and case.backend not in ("rocm", "vllm") and not is_plugin(case.backend):
        refuse("trace_reads", f"false with backend {case.backend}", case.trace_reads)


def _check_subset(case: CaseQuantities) -> None:
    """Check the ranges of KV heads and sequences."""
    num_seqs = len(case.query_lens) if case.query_lens is not None else case.num_seqs
    limits = {
        "kv_head_range": (case.num_kv_heads, "the KV heads"),
        "seq_range": (num_seqs, "the sequences"),
    }
    for name, (limit, noun) in limits.items():
        span = getattr(case, name)
        if span is None:
            continue
        if case.backend != "vllm":
            refuse(name, f"none with backend {case.backend}, which runs all", span)
        if not case.spec.attends_to_cache:
            refuse(name, f"none with {case.op}, which runs all", span)
        if span[1] > limit:
            refuse(name, f"at most 0:{limit}, {noun}", span)


def _takes_layouts(case: CaseQuantities) -> bool:
    """Return whether the backend takes tensors with other strides, padding, and caches of any size."""
    return case.backend in ("model", "vllm", "cuda") or is_plugin(case.backend)


def _check_layout(case: CaseQuantities) -> None:
    """Check strides and padding, which backends with compiled ops do not all support."""
    for name, plain in (("kv_layout", "contiguous"), ("pad_batch", 0)):
        if not _takes_layouts(case) and getattr(case, name) != plain:
            refuse(name, f"{plain} with backend {case.backend}", getattr(case, name))
    if case.kv_layout != "contiguous" and not case.spec.strided:
        refuse("kv_layout", f"contiguous with {case.op}", case.kv_layout)
    # In x-split caches the heads precede the slots anyway; decode_attention_fwd states "Assume (...,
    # PAGE_SIZE, NUM_HEADS, HEAD_DIM)" where it takes the strides (triton_decode_attention.py).
    if case.kv_layout == "HND" and not case.spec.hnd:
        refuse("kv_layout", f"contiguous or fused with {case.op}", case.kv_layout)


def _check_lengths(case: CaseQuantities) -> None:
    if (case.query_lens is None) != (case.ctx_lens is None):
        names = ("query_lens", "ctx_lens")
        missing, other = names if case.query_lens is None else names[::-1]
        raise InvalidCase(f"{missing} must be given with {other}, got None")
    if case.query_lens is not None and len(case.query_lens) != len(case.ctx_lens or ()):
        refuse("ctx_lens", f"as long as query_lens ({len(case.query_lens)})", case.ctx_lens)
    room = case.blocks_per_seq * case.block_size
    for i, seq_len in enumerate(case.lengths.seq_lens):
        if seq_len > room:
            blocks = f"{case.blocks_per_seq} blocks of {case.block_size} per row of the block table"
            raise InvalidCase(f"seq_lens[{i}] must be at most {room} ({blocks}), got {seq_len}")


def _check_cache(case: CaseQuantities) -> None:
    num_seqs = len(case.lengths.query_lens)
    if case.block_table is not None:
        _check_block_table(case, case.block_table, num_seqs)
    else:
        needed = case.first_block + num_seqs * case.blocks_per_seq
        if case.total_blocks < needed:
            reason = f"{num_seqs} sequences of {case.blocks_per_seq} blocks"
            reason += f" after first_block {case.first_block}" if case.first_block else ""
            refuse("num_blocks", f"at least {needed} ({reason})", case.num_blocks)
    if case.freed != "kept" and not (case.spec.attends_to_cache and case.sliding_window):
        refuse("freed", f"kept with {case.op} and sliding_window {case.sliding_window}", case.freed)
    if case.first_block:
        _check_first_block(case)
    if not case.is_fp8 and case.cache_write == "numeric":
        refuse("cache_write", "scaled unless kv_cache_dtype is fp8", case.cache_write)
    if not case.is_fp8 and case.cache_format is not None:
        refuse("cache_format", "none unless kv_cache_dtype is fp8", case.cache_format)


def _check_first_block(case: CaseQuantities) -> None:
    """Refuse untouched blocks if something copies the whole cache, or a block table is given."""
    for name, conflicts in (
        ("op", not case.spec.attends_to_cache),
        ("backend", not _takes_layouts(case)),
        ("block_table", case.block_table is not None),
    ):
        if conflicts:
            refuse("first_block", f"0 with {name} {getattr(case, name)}", case.first_block)


def _check_block_table(
    case: CaseQuantities, rows: tuple[tuple[int, ...], ...], num_seqs: int
) -> None:
    """Check that blocks which hold tokens exist and belong to one sequence."""
    if len(rows) != num_seqs:
        refuse("block_table", f"one row per sequence ({num_seqs})", rows)
    owner: dict[int, tuple[int, int]] = {}
    for i, (row, seq_len) in enumerate(zip(rows, case.lengths.seq_lens, strict=True)):
        for j, block in enumerate(row):
            name = f"block_table[{i}][{j}]"
            if block >= case.total_blocks:
                refuse(name, f"below num_blocks ({case.total_blocks})", block)
            if j * case.block_size < seq_len and owner.setdefault(block, (i, j)) != (i, j):
                row_of, column = owner[block]
                refuse(name, f"other than block_table[{row_of}][{column}]", block)


def _check_op(case: CaseQuantities) -> None:
    """Check the fields that only some ops accept: the signatures of the others have no argument for them."""
    op, query_lens = case.spec, case.lengths.query_lens
    if not op.prefill and set(query_lens) != {1}:
        refuse("query_lens", f"1 everywhere with {case.op}, which has no prefill", query_lens)
    if not op.context and any(case.lengths.ctx_lens):
        allowed = f"0 everywhere with {case.op}, which has no context"
        refuse("ctx_lens", allowed, case.lengths.ctx_lens)
    if case.sliding_window and not op.sliding_window:
        refuse("sliding_window", f"0 with {case.op}", case.sliding_window)
    if 0 < case.sliding_window < op.min_window:
        allowed = f"0 or at least {op.min_window} with {case.op}"
        refuse("sliding_window", allowed, case.sliding_window)
    if case.freed != "kept" and not op.frees_blocks:
        refuse("freed", f"kept with {case.op}, whose caller removes freed blocks", case.freed)
    if case.alibi and not op.alibi:
        refuse("alibi", f"false with {case.op}", case.alibi)
    if case.sinks and not op.sinks:
        refuse("sinks", f"false with {case.op}", case.sinks)
    if case.softcap is not None and not op.softcap:
        refuse("softcap", f"none with {case.op}", case.softcap)
    if case.kv_cache_dtype not in op.kv_cache_dtypes:
        allowed = f"one of {', '.join(op.kv_cache_dtypes)} with {case.op}"
        refuse("kv_cache_dtype", allowed, case.kv_cache_dtype)


def _check_splits(case: CaseQuantities) -> None:
    if case.num_splits is None:
        return
    op, splits = case.spec, case.num_splits
    if not op.num_splits:
        refuse("num_splits", f"none with {case.op}", splits)
    if splits < op.min_splits:
        refuse("num_splits", f"at least {op.min_splits} with {case.op}", splits)
    # reduce_segments has tl.arange(0, NUM_SEGMENTS_PER_SEQ), whose range must be a power of two.
    if op.splits_are_powers_of_two and splits & (splits - 1):
        refuse("num_splits", f"0 or a power of two with {case.op}", splits)


def _check_interleaved(case: CaseQuantities) -> None:
    """Check that op, release and block size support interleaved values."""
    if not case.interleave_v:
        return
    if case.release not in case.spec.interleave_v_releases:
        refuse("interleave_v", f"false with {case.op} of vLLM {case.release}", True)
    pack = 16 if case.is_fp8 else 8 if case.dtype != "float32" else 4
    if case.block_size % pack:  # [blocks, KV heads, block_size / pack, head_size, pack]
        refuse("block_size", f"a multiple of {pack} with interleave_v", case.block_size)


def _check_op_argument(case: CaseQuantities) -> None:
    """Check that the op has the argument, and that the other fields are those that it needs."""
    name = case.op_argument
    if name == NONE:
        return
    argument = OP_ARGUMENTS[name]
    if case.op not in argument.ops:
        names = (other.name for other in OP_ARGUMENTS.values() if case.op in other.ops)
        refuse("op_argument", f"{', '.join((NONE, *names))} with {case.op}", name)
    if case.backend != "vllm" and case.spec.library == "vllm":
        refuse("op_argument", f"{NONE} with backend {case.backend}", name)
    _check_needs(case, argument)
    if case.mask in argument.refused_masks:
        masks = ", ".join(mask for mask in MASKS if mask not in argument.refused_masks)
        refuse("mask", f"one of {masks} with op_argument {name}: {argument.refusal}", case.mask)
    least, even = argument.least_head_size, "even, " if argument.is_packed else ""
    if case.head_size < least or (argument.is_packed and case.head_size % 2):
        refuse("head_size", f"{even}at least {least} with op_argument {name}", case.head_size)
    if name == "head_major_packed" and case.block_size % case.key_x:
        refuse("block_size", f"a multiple of {case.key_x} with op_argument {name}", case.block_size)
    if case.kv_head_range is not None or case.seq_range is not None:
        refuse("op_argument", f"{NONE} for a part of a call", name)


def _check_needs(case: CaseQuantities, argument: OpArgument) -> None:
    """Check the fields that an op argument needs; those of the cache only if the op gets one."""
    for other, needed in argument.needs.items():
        value = getattr(case, other)
        has_field = other != "kv_cache_dtype" or case.spec.cache_layout is not None
        if has_field and value != needed:
            refuse(other, f"{needed} with op_argument {argument.name}", value)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case(Declared, CaseQuantities):
    """One configuration of one attention call.

    The fields are declared in :mod:`attnlab.case.declaration`; their defaults are those of vLLM's
    test_prefix_prefill.py. Raises InvalidCase, with a line that names the field, for a wrong value or
    for values that contradict each other.
    """

    _command = "run"

    def __post_init__(self) -> None:
        """Check every field by its type, then the rules between fields; raise InvalidCase."""
        Declared.__post_init__(self)
        check_rules(self)

    def reduced(self) -> "Case":
        """Return the Case of a smaller draw: 8 heads, or those of one KV head if more; lengths up to 128."""
        return self.replace(
            num_heads=max(8, self.num_queries_per_kv), draw_max_query_len=128, draw_max_ctx_len=128
        )

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Return the Case of a JSON object; missing fields get their defaults. Raises InvalidCase."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidCase(f"case must be a JSON object: {error}") from error
        if not isinstance(fields, dict):
            refuse("case", "a JSON object", fields)
        return cls.from_dict(fields)

    @classmethod
    def from_test_id(cls, test_id: str, **changes: Any) -> "Case":
        """Return the Case of a vLLM pytest id with ``changes``; see
        :func:`attnlab.case.pytest_id.fields_of`."""
        return cls.from_dict({**fields_of(test_id), **changes})


def as_case(case: Case | str, **changes: Any) -> Case:
    """Return the Case, or the Case of a pytest id of vLLM, with ``changes`` to its fields."""
    if isinstance(case, str):
        case = Case.from_test_id(case)
    elif not isinstance(case, Case):
        refuse("case", "a Case or a pytest id", case)
    return case.replace(**changes) if changes else case
