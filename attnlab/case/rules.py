"""Rules between the fields of a Case, which no field can check alone.

A combination is refused only for what it means, for the layout of a tensor, or for what the op itself states;
the comments name the source. What an op accepts is a Case, also if the op then ignores a part of it.
"""

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import is_plugin, refuse
from attnlab.case.mask_rules import check_mask
from attnlab.case.masks import MASKS
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import OPS
from attnlab.case.quantities import CaseQuantities


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
    if case.backend not in op.backends and not (is_plugin(case.backend) and "model" in op.backends):
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
    # In x-split caches the heads precede the slots anyway; decode_attention_fwd states "Assume (...,
    # PAGE_SIZE, NUM_HEADS, HEAD_DIM)" where it takes the strides (triton_decode_attention.py).
    if case.kv_layout == "HND" and not case.spec.hnd:
        refuse("kv_layout", f"contiguous or fused with {case.op}", case.kv_layout)


def _check_lengths(case: CaseQuantities) -> None:
    if (case.query_lens is None) != (case.ctx_lens is None):
        missing = "query_lens" if case.query_lens is None else "ctx_lens"
        other = "ctx_lens" if case.query_lens is None else "query_lens"
        raise InvalidCase(f"{missing} must be given with {other}, got None", field=missing)
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
    if case.backend != "vllm":
        refuse("op_argument", f"{NONE} with backend {case.backend}", name)
    for other, needed in argument.needs.items():
        value = getattr(case, other)
        if value != needed:
            refuse(other, f"{needed} with op_argument {name}", value)
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
