"""Case: one attention call of the lab, with all its settings in one frozen, validated, hashable value.

Notebook parameters, panels, command-line flags, JSON files and vLLM's pytest ids are all converted to a
Case. The lab has no other configuration.
"""

import dataclasses
import json
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
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


_Rules = Iterator[tuple[str, bool, str]]  # as of Declared._rules


def _mask_rules(case: CaseQuantities) -> _Rules:
    """Yield the rules of the mask: the op has it, other fields allow it, and its data fit the lengths."""
    mask, of_mask = MASKS[case.mask], f"with mask {case.mask}"
    if not mask.is_in(case.op, case.release):
        names = (name for name, other in MASKS.items() if other.is_in(case.op, case.release))
        yield "mask", True, f"{' or '.join(names)} with {case.op} of vLLM {case.release}"
    for name in MASK_DATA:
        yield name, name != mask.data and getattr(case, name) is not None, f"none {of_mask}"
    if case.mask == CAUSAL:
        return
    yield "sliding_window", mask.needs_window and not case.sliding_window, f"at least 1 {of_mask}"
    # context_attention_fwd asserts it in every release that has causal (prefix_prefill.py, 0.20.2 on)
    is_refused = case.alibi and case.op in (WRAPPER, PREFILL)
    yield "alibi", is_refused, f"false {of_mask}, which {case.op} rejects with ALiBi"
    is_seen = case.freed != "kept" and mask.sees_beyond_window
    yield "freed", is_seen, f"kept {of_mask}, which sees keys before the window"
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


def _head_rules(case: CaseQuantities) -> _Rules:
    is_uneven = case.num_heads % case.num_queries_per_kv > 0
    yield "num_queries_per_kv", is_uneven, f"a divisor of num_heads ({case.num_heads})"
    # [blocks, KV heads, head_size / x, block_size, x]
    yield "head_size", case.head_size % case.key_x > 0, f"a multiple of x ({case.key_x})"


def _backend_rules(case: CaseQuantities) -> _Rules:
    """Yield the rules by which the op runs on the backend, the platform and the release."""
    op, of_op = case.spec, f"with op {case.op}"
    has_plugins = op.library != "vllm" or "model" in op.backends
    if case.backend not in op.backends and not (is_plugin(case.backend) and has_plugins):
        names = (name for name, other in OPS.items() if case.backend in other.backends)
        is_cpu = case.backend == "vllm-cpu"
        yield "op", is_cpu, f"{' or '.join(names)} with backend {case.backend}"
        yield "backend", True, f"{' or '.join(op.backends)} {of_op}"
    if op.platforms is not None:
        yield "platform", case.platform not in op.platforms, f"{' or '.join(op.platforms)} {of_op}"
    yield "release", case.release not in op.releases, f"{' or '.join(op.releases)} {of_op}"
    traces = case.backend in ("rocm", "vllm") or is_plugin(case.backend)
    yield "trace_reads", case.trace_reads and not traces, f"false with backend {case.backend}"


def _subset_rules(case: CaseQuantities) -> _Rules:
    """Yield the rules of the ranges of KV heads and sequences."""
    num_seqs = len(case.query_lens) if case.query_lens is not None else case.num_seqs
    limits = {
        "kv_head_range": (case.num_kv_heads, "the KV heads"),
        "seq_range": (num_seqs, "the sequences"),
    }
    for name, (limit, noun) in limits.items():
        span = getattr(case, name)
        if span is None:
            continue
        yield name, case.backend != "vllm", f"none with backend {case.backend}, which runs all"
        yield name, not case.spec.attends_to_cache, f"none with {case.op}, which runs all"
        yield name, span[1] > limit, f"at most 0:{limit}, {noun}"


def _takes_layouts(case: CaseQuantities) -> bool:
    """Return whether the backend takes tensors with other strides, padding, and caches of any size."""
    return case.backend in ("model", "vllm", "cuda") or is_plugin(case.backend)


def _layout_rules(case: CaseQuantities) -> _Rules:
    """Yield the rules of strides and padding, which backends with compiled ops do not all support."""
    for name, plain in (("kv_layout", "contiguous"), ("pad_batch", 0)):
        is_other = getattr(case, name) != plain and not _takes_layouts(case)
        yield name, is_other, f"{plain} with backend {case.backend}"
    is_strided = case.kv_layout != "contiguous"
    yield "kv_layout", is_strided and not case.spec.strided, f"contiguous with {case.op}"
    # In x-split caches the heads precede the slots anyway; decode_attention_fwd states "Assume (...,
    # PAGE_SIZE, NUM_HEADS, HEAD_DIM)" where it takes the strides (triton_decode_attention.py).
    is_hnd = case.kv_layout == "HND"
    yield "kv_layout", is_hnd and not case.spec.hnd, f"contiguous or fused with {case.op}"


def _length_rules(case: CaseQuantities) -> _Rules:
    if (case.query_lens is None) != (case.ctx_lens is None):
        names = ("query_lens", "ctx_lens")
        missing, other = names if case.query_lens is None else names[::-1]
        raise InvalidCase(f"{missing} must be given with {other}, got None")
    count = len(case.query_lens or ())
    yield "ctx_lens", count != len(case.ctx_lens or ()), f"as long as query_lens ({count})"
    room = case.blocks_per_seq * case.block_size
    for i, seq_len in enumerate(case.lengths.seq_lens):
        if seq_len > room:
            blocks = f"{case.blocks_per_seq} blocks of {case.block_size} per row of the block table"
            raise InvalidCase(f"seq_lens[{i}] must be at most {room} ({blocks}), got {seq_len}")


def _cache_rules(case: CaseQuantities) -> _Rules:
    num_seqs = len(case.lengths.query_lens)
    if case.block_table is not None:
        _check_block_table(case, case.block_table, num_seqs)
    else:
        needed = case.first_block + num_seqs * case.blocks_per_seq
        reason = f"{num_seqs} sequences of {case.blocks_per_seq} blocks"
        reason += f" after first_block {case.first_block}" if case.first_block else ""
        yield "num_blocks", case.total_blocks < needed, f"at least {needed} ({reason})"
    frees = case.spec.attends_to_cache and case.sliding_window
    allowed = f"kept with {case.op} and sliding_window {case.sliding_window}"
    yield "freed", case.freed != "kept" and not frees, allowed
    if case.first_block:  # not if something copies the whole cache, or a block table is given
        conflicts = {
            "op": not case.spec.attends_to_cache,
            "backend": not _takes_layouts(case),
            "block_table": case.block_table is not None,
        }
        for name, is_wrong in conflicts.items():
            yield "first_block", is_wrong, f"0 with {name} {getattr(case, name)}"
    is_numeric, has_format = case.cache_write == "numeric", case.cache_format is not None
    yield "cache_write", is_numeric and not case.is_fp8, "scaled unless kv_cache_dtype is fp8"
    yield "cache_format", has_format and not case.is_fp8, "none unless kv_cache_dtype is fp8"


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


def _op_rules(case: CaseQuantities) -> _Rules:
    """Yield the rules of fields that only some ops accept: the others have no argument for them."""
    op, of_op = case.spec, f"with {case.op}"
    if not op.prefill and set(case.lengths.query_lens) != {1}:
        allowed = f"1 everywhere {of_op}, which has no prefill"
        refuse("query_lens", allowed, case.lengths.query_lens)
    if not op.context and any(case.lengths.ctx_lens):
        refuse("ctx_lens", f"0 everywhere {of_op}, which has no context", case.lengths.ctx_lens)
    window = case.sliding_window
    yield "sliding_window", window > 0 and not op.sliding_window, f"0 {of_op}"
    is_small = 0 < window < op.min_window
    yield "sliding_window", is_small, f"0 or at least {op.min_window} {of_op}"
    is_freed = case.freed != "kept" and not op.frees_blocks
    yield "freed", is_freed, f"kept {of_op}, whose caller removes freed blocks"
    yield "alibi", case.alibi and not op.alibi, f"false {of_op}"
    yield "sinks", case.sinks and not op.sinks, f"false {of_op}"
    yield "softcap", case.softcap is not None and not op.softcap, f"none {of_op}"
    formats = op.kv_cache_dtypes
    is_other = case.kv_cache_dtype not in formats
    yield "kv_cache_dtype", is_other, f"one of {', '.join(formats)} {of_op}"


def _split_rules(case: CaseQuantities) -> _Rules:
    if case.num_splits is None:
        return
    op, splits = case.spec, case.num_splits
    yield "num_splits", not op.num_splits, f"none with {case.op}"
    yield "num_splits", splits < op.min_splits, f"at least {op.min_splits} with {case.op}"
    # reduce_segments has tl.arange(0, NUM_SEGMENTS_PER_SEQ), whose range must be a power of two.
    is_other = op.splits_are_powers_of_two and splits & (splits - 1) > 0
    yield "num_splits", is_other, f"0 or a power of two with {case.op}"


def _interleave_rules(case: CaseQuantities) -> _Rules:
    """Yield the rules by which op, release and block size support interleaved values."""
    if not case.interleave_v:
        return
    has_none = case.release not in case.spec.interleave_v_releases
    yield "interleave_v", has_none, f"false with {case.op} of vLLM {case.release}"
    pack = 16 if case.is_fp8 else 8 if case.dtype != "float32" else 4
    # [blocks, KV heads, block_size / pack, head_size, pack]
    yield "block_size", case.block_size % pack > 0, f"a multiple of {pack} with interleave_v"


def _argument_rules(case: CaseQuantities) -> _Rules:
    """Yield the rules of the op argument: the op has it, and the other fields are those that it needs."""
    name = case.op_argument
    if name == NONE:
        return
    argument, of_name = OP_ARGUMENTS[name], f"with op_argument {name}"
    if case.op not in argument.ops:
        names = (other.name for other in OP_ARGUMENTS.values() if case.op in other.ops)
        yield "op_argument", True, f"{', '.join((NONE, *names))} with {case.op}"
    is_other = case.backend != "vllm" and case.spec.library == "vllm"
    yield "op_argument", is_other, f"{NONE} with backend {case.backend}"
    for other, needed in argument.needs.items():  # those of the cache only if the op gets one
        has_field = other != "kv_cache_dtype" or case.spec.cache_layout is not None
        yield other, has_field and getattr(case, other) != needed, f"{needed} {of_name}"
    masks = ", ".join(mask for mask in MASKS if mask not in argument.refused_masks)
    is_refused = case.mask in argument.refused_masks
    yield "mask", is_refused, f"one of {masks} {of_name}: {argument.refusal}"
    least, even = argument.least_head_size, "even, " if argument.is_packed else ""
    is_odd = argument.is_packed and case.head_size % 2 > 0
    yield "head_size", case.head_size < least or is_odd, f"{even}at least {least} {of_name}"
    is_uneven = name == "head_major_packed" and case.block_size % case.key_x > 0
    yield "block_size", is_uneven, f"a multiple of {case.key_x} {of_name}"
    is_part = case.kv_head_range is not None or case.seq_range is not None
    yield "op_argument", is_part, f"{NONE} for a part of a call"


_RULES = (
    *(_head_rules, _backend_rules, _subset_rules, _layout_rules, _length_rules, _cache_rules),
    *(_op_rules, _mask_rules, _split_rules, _interleave_rules, _argument_rules),
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case(Declared, CaseQuantities):
    """One configuration of one attention call.

    The fields are declared in :mod:`attnlab.case.declaration`; their defaults are those of vLLM's
    test_prefix_prefill.py. Raises InvalidCase, with a line that names the field, for a wrong value or
    for values that contradict each other.
    """

    _command = "run"

    def _rules(self) -> _Rules:
        return (rule for rules in _RULES for rule in rules(self))

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
