"""Rules between the fields of a Case: what each field alone cannot know."""

from typing import TYPE_CHECKING

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import is_plugin, refuse

if TYPE_CHECKING:
    from attnlab.case.case import Case

# Ops that have an argument for attention sinks (0.11.2, 0.33.0; the CPU's is s_aux).
SINK_OPS = (
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "unified_attention",
    "cpu_attention_with_kv_cache",
)
# Ops that have one for a soft cap; decode_attention_fwd's is logit_cap.
SOFTCAP_OPS = ("unified_attention", "decode_attention_fwd", "cpu_attention_with_kv_cache")
_E4M3_OPS = ("unified_attention", "decode_attention_fwd", "reshape_and_cache_flash")
# Ops of which a choice of heads or sequences cannot be run apart.
PARTS_UNKNOWN = ("merge_attn_states", "reshape_and_cache_flash")


def check_rules(case: "Case") -> None:
    """Raise InvalidCase where two fields contradict each other; the text names one of them."""
    _check_heads(case)
    _check_backend(case)
    _check_lengths(case)
    _check_cache(case)
    _check_op(case)
    if case.sinks and case.op not in SINK_OPS:
        refuse("sinks", f"false with {case.op}, which takes none", case.sinks)
    if case.softcap is not None and case.op not in SOFTCAP_OPS:
        refuse("softcap", f"none with {case.op}, which takes none", case.softcap)


def _check_heads(case: "Case") -> None:
    if case.num_heads % case.num_queries_per_kv:
        refuse(
            "num_queries_per_kv",
            f"a divisor of num_heads ({case.num_heads})",
            case.num_queries_per_kv,
        )
    if case.head_size % case.key_x:
        refuse("head_size", f"a multiple of x ({case.key_x})", case.head_size)
    if case.alibi and case.sliding_window:
        refuse(
            "sliding_window",
            "0 with alibi (vLLM's ALiBi prefill kernel knows no window)",
            case.sliding_window,
        )


def _check_backend(case: "Case") -> None:
    _check_cpu(case)
    if case.trace_reads and case.backend not in ("rocm", "vllm") and not is_plugin(case.backend):
        refuse("trace_reads", f"false with backend {case.backend}", case.trace_reads)
    _check_memory(case)
    limits = {
        "kv_head_range": (case.num_kv_heads, "the KV heads"),
        "seq_range": (_num_seqs(case), "the sequences"),
    }
    for name, (limit, words) in limits.items():
        span = getattr(case, name)
        if span is None:
            continue
        if case.backend != "vllm":
            refuse(name, f"none with backend {case.backend}, which runs all", span)
        if case.op in PARTS_UNKNOWN:
            refuse(name, f"none with {case.op}, which runs all", span)
        if span[1] > limit:
            refuse(name, f"at most 0:{limit}, {words}", span)


def _takes_layouts(case: "Case") -> bool:
    """Return whether the backend takes tensors with other strides, padding, and caches of any size."""
    return case.backend in ("model", "vllm") or is_plugin(case.backend)


def _check_memory(case: "Case") -> None:
    """Check how tensors lie in memory, which only vLLM's Triton ops are asked to follow."""
    for name, plain in (("kv_layout", "contiguous"), ("pad_batch", 0)):
        if not _takes_layouts(case) and getattr(case, name) != plain:
            refuse(name, f"{plain} with backend {case.backend}", getattr(case, name))
    if case.kv_layout == "HND" and case.op not in ("unified_attention", "reshape_and_cache_flash"):
        refuse("kv_layout", f"contiguous or fused with {case.op}, whose cache knows no HND", "HND")


def _check_op(case: "Case") -> None:
    """Check what single ops do not know."""
    query_lens = case.lengths.query_lens
    if case.op == "decode_attention_fwd":
        if set(query_lens) != {1}:
            refuse(
                "query_lens",
                "1 everywhere with decode_attention_fwd, which has no prefill",
                query_lens,
            )
        for name, off in (("sliding_window", 0), ("alibi", False)):
            if getattr(case, name) != off:
                refuse(
                    name, f"{off} with decode_attention_fwd, which has none", getattr(case, name)
                )
    if case.kv_cache_dtype == "fp8_e5m2" and case.op in _E4M3_OPS:
        allowed = f"auto, fp8 or fp8_e4m3 with {case.op}: vLLM hands it e4m3 under this name, too"
        refuse("kv_cache_dtype", allowed, case.kv_cache_dtype)
    if case.num_splits is not None and case.op not in ("unified_attention", "decode_attention_fwd"):
        refuse("num_splits", f"none with {case.op}, which splits nothing", case.num_splits)
    if case.interleave_v:
        _check_interleaved(case)
    splits = case.num_splits or 0
    if case.num_splits == 0 and case.op == "decode_attention_fwd":
        refuse("num_splits", "at least 1 with decode_attention_fwd", splits)
    if splits & (splits - 1) and case.op == "unified_attention":
        refuse("num_splits", "0 or a power of two with unified_attention", splits)


def _check_interleaved(case: "Case") -> None:
    """Check that op, release and block size know interleaved values."""
    knows = case.op in ("chunked_prefill_paged_decode", "context_attention_fwd")
    if not knows or case.release == "0.11.2":
        refuse("interleave_v", f"false with {case.op} of vLLM {case.release}", True)
    pack = 16 if case.is_fp8 else 8 if case.dtype != "float32" else 4
    if case.block_size % pack:
        refuse("block_size", f"a multiple of {pack} with interleave_v", case.block_size)


def _num_seqs(case: "Case") -> int:
    return len(case.query_lens) if case.query_lens is not None else case.num_seqs


def _check_cpu(case: "Case") -> None:
    """Hold vLLM's compiled CPU attention to its one backend, platform and release."""
    own = case.op == "cpu_attention_with_kv_cache"
    if not own and case.backend == "vllm-cpu":
        refuse("op", "cpu_attention_with_kv_cache with backend vllm-cpu", case.op)
    if not own:
        return
    for name, allowed in (("backend", "vllm-cpu"), ("platform", "cpu"), ("release", "0.33.0")):
        if getattr(case, name) != allowed:
            refuse(name, f"{allowed} with op {case.op}", getattr(case, name))


def _check_lengths(case: "Case") -> None:
    if (case.query_lens is None) != (case.ctx_lens is None):
        missing = "query_lens" if case.query_lens is None else "ctx_lens"
        raise InvalidCase(
            f"{missing} must be given where the other lengths are, got None", field=missing
        )
    if case.query_lens is not None and len(case.query_lens) != len(case.ctx_lens or ()):
        refuse("ctx_lens", f"as long as query_lens ({len(case.query_lens)})", case.ctx_lens)
    room = case.blocks_per_seq * case.block_size
    for i, seq_len in enumerate(case.lengths.seq_lens):
        if seq_len > room:
            raise InvalidCase(
                f"seq_lens[{i}] must be at most {room} ({case.blocks_per_seq} blocks of "
                f"{case.block_size} in a row of the block table), got {seq_len}"
            )


def _check_cache(case: "Case") -> None:
    num_seqs = len(case.lengths.query_lens)
    if case.block_table is None:
        needed = case.first_block + num_seqs * case.blocks_per_seq
        if case.total_blocks < needed:
            refuse(
                "num_blocks",
                f"at least {needed} ({num_seqs} sequences of {case.blocks_per_seq} blocks)"
                + (f" behind first_block {case.first_block}" if case.first_block else ""),
                case.num_blocks,
            )
    else:
        _check_block_table(case, case.block_table, num_seqs)
    if case.freed != "kept" and (case.op in PARTS_UNKNOWN or not case.sliding_window):
        refuse("freed", f"kept with {case.op} and sliding_window {case.sliding_window}", case.freed)
    if case.first_block:
        _check_first_block(case)
    if not case.is_fp8 and case.cache_write == "numeric":
        refuse("cache_write", "scaled unless kv_cache_dtype is fp8", case.cache_write)
    if not case.is_fp8 and case.cache_format is not None:
        refuse("cache_format", "none unless kv_cache_dtype is fp8", case.cache_format)


def _check_first_block(case: "Case") -> None:
    """Refuse untouched blocks where something copies the cache whole, or the table says where to begin."""
    for name, copies in (
        ("op", case.op in PARTS_UNKNOWN),
        ("backend", not _takes_layouts(case)),
        ("block_table", case.block_table is not None),
    ):
        if copies:
            refuse("first_block", f"0 with {name} {getattr(case, name)}", case.first_block)


def _check_block_table(case: "Case", rows: tuple[tuple[int, ...], ...], num_seqs: int) -> None:
    if len(rows) != num_seqs:
        refuse("block_table", f"one row a sequence ({num_seqs})", rows)
    owner: dict[int, tuple[int, int]] = {}
    for i, (row, seq_len) in enumerate(zip(rows, case.lengths.seq_lens, strict=True)):
        for j, block in enumerate(row):
            if block >= case.total_blocks:
                refuse(f"block_table[{i}][{j}]", f"below num_blocks ({case.total_blocks})", block)
            if j * case.block_size < seq_len and owner.setdefault(block, (i, j)) != (i, j):
                refuse(
                    f"block_table[{i}][{j}]",
                    "a block of its own, not that of block_table[{}][{}]".format(*owner[block]),
                    block,
                )
