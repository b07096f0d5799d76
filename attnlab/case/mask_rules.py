"""Rules for the mask of a Case and its data, checked before anything is allocated."""

from collections.abc import Sequence

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.masks import CAUSAL, MASK_DATA, MASKS
from attnlab.case.ops import PREFILL, WRAPPER
from attnlab.case.quantities import CaseQuantities


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
        raise InvalidCase(
            f"{text}, got {[list(row) for row in rows]!r:.80}", field="mm_prefix_range"
        )
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
