"""The Visibility of a Case: the data of its mask, given or from its lengths and seed."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths
from attnlab.case.masks import CAUSAL, MASKS
from attnlab.tensors.call import KernelCall
from attnlab.tensors.visibility import SequenceMask, Visibility

# The mask of one sequence of a call.


def mask_of(call: KernelCall, seq: int, **changes: Any) -> SequenceMask:
    """Return which keys the rows of a sequence see; ``changes``: of the call's Visibility."""
    rules = dataclasses.replace(call.visibility, **changes) if changes else call.visibility
    query_start_loc, seq_len = call.query_start_loc, int(call.seq_lens[seq])
    query_len = int(query_start_loc[seq + 1] - query_start_loc[seq])
    return rules.of_seq(seq, seq_len - query_len, seq_len)


# The data of masks for a part of a sequence: without its first keys, and without those after a new end.


def cut_ranges(
    ranges: torch.Tensor, dropped: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    """Return ranges [num_seqs, n, 2] that are moved to the front and end within the sequence.

    ``dropped``: of each sequence, the number of tokens before its first kept key; ``seq_lens``: the tokens
    that it keeps. A range that keeps fewer than two positions becomes (0, 0), which is unused.
    """
    moved, last_key = _column(dropped, ranges), _column(seq_lens, ranges) - 1
    first = (ranges[..., 0] - moved).clamp(min=0)
    last = (ranges[..., 1] - moved).minimum(last_key)
    is_used = (first < last) & (ranges[..., 0] < ranges[..., 1])
    return torch.stack([first, last], -1) * is_used[..., None]


def cut_prefixes(
    lens: torch.Tensor, dropped: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    """Return the visible prefixes [num_seqs] of what is kept; the arguments are those of cut_ranges."""
    kept = (lens - _column(dropped, lens)[:, 0]).clamp(min=0)
    return kept.minimum(_column(seq_lens, lens)[:, 0])


def _column(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype)[:, None]


_RANGES = 3


def visibility_of(case: Case) -> Visibility:
    """Return which keys the rows of a Case see; the tensors are shared: do not change them."""
    if case.mask == CAUSAL:
        return Visibility(sliding_window=case.sliding_window)
    return _masked(case)


@lru_cache(maxsize=16)
def _masked(case: Case) -> Visibility:
    """Return the Visibility of a Case whose mask is not causal."""
    window = case.sliding_window
    stated: dict[str, Any] = {
        name: _MADE[how](case) if isinstance(how, str) else how
        for name, how in MASKS[case.mask].states.items()
    }
    # A window is limited to the right as far as to the left, if the op has an argument for it.
    has_right = window and "causal" in stated and case.spec.has_right_window
    right = window - 1 if has_right else None
    return Visibility(sliding_window=window, window_right=right, **stated)


def causal_seqs(case: Case) -> torch.Tensor:
    """Return which sequences are causal, [num_seqs] int32: given, or every second one from the first."""
    if case.causal_seqs is not None:
        return torch.tensor(case.causal_seqs, dtype=torch.int32)
    return (torch.arange(len(case.lengths.query_lens)) % 2 == 0).int()


def ranges(case: Case) -> torch.Tensor:
    """Return bidirectional ranges of positions, [num_seqs, n, 2] int32; first and last are inclusive.

    They are as given. Else the first begins in the context and ends inside the new tokens, the second has the
    rest of them; it is empty (first = last) if nothing is left. The third is unused: (0, 0).
    """
    if case.mm_prefix_range is not None:
        given = torch.tensor(case.mm_prefix_range, dtype=torch.int32)
        return given.reshape(len(given), -1, 2)
    lengths: Lengths = case.lengths
    found = torch.zeros(len(lengths.query_lens), _RANGES, 2, dtype=torch.int32)
    lens = zip(lengths.query_lens, lengths.ctx_lens, strict=True)
    for seq, (query_len, ctx_len) in enumerate(lens):
        middle, last = ctx_len + query_len // 2, ctx_len + query_len - 1
        found[seq, 0] = torch.tensor([max(0, ctx_len - 9), middle])
        if middle + 1 < last:
            found[seq, 1] = torch.tensor([middle + 1, last])
    return found


def prefix_lens(case: Case) -> torch.Tensor:
    """Return the prefix that each row of a sequence sees, [num_seqs] int32: given, or half the context."""
    given = case.rswa_prefix_lens
    lens = [ctx_len // 2 for ctx_len in case.lengths.ctx_lens] if given is None else given
    return torch.tensor(lens, dtype=torch.int32)


def tree_bias(case: Case) -> torch.Tensor:
    """Return the bias of a row for the key of a new token, [n, n] float32; n is the largest query_len.

    With given parents it is 0 for a token and its ancestors, -inf for others. Else it is drawn from the seed,
    and -inf for some tokens before the row; 0 in place of the drawn numbers for an op that adds no bias.
    """
    size = max(case.lengths.query_lens)
    if case.tree_parents is not None:
        return _branches(case.tree_parents[:size])
    generator = torch.Generator().manual_seed(case.seed + 6)
    bias = torch.randn(size, size, generator=generator) * case.spec.adds_bias
    away = torch.arange(size)[:, None] - torch.arange(size)
    return bias.masked_fill((away > 0) & (away % 3 == 1), -torch.inf)


def lookback(case: Case) -> int:
    """Return how many chunks before its own a row sees: given, or one, and fewer than the window has keys."""
    given = 1 if case.chunk_lookback is None else case.chunk_lookback
    return min(given, case.sliding_window - 1)


_MADE: dict[str, Callable[[Case], Any]] = {
    one.__name__: one for one in (causal_seqs, ranges, prefix_lens, lookback, tree_bias)
}


def longest_mask(case: Case) -> SequenceMask:
    """Return the mask of the first sequence with the most new tokens."""
    lengths = case.lengths
    seq = max(range(len(lengths.query_lens)), key=lengths.query_lens.__getitem__)
    return visibility_of(case).of_seq(seq, lengths.ctx_lens[seq], lengths.seq_lens[seq])


def data_of_seq(case: Case, seq: int) -> dict[str, Any]:
    """Return the fields of a Case with the data of its mask for one of its sequences alone."""
    if MASKS[case.mask].data == "causal_seqs":
        return {"causal_seqs": (int(causal_seqs(case)[seq]),)}
    found: dict[str, Any] = {}
    for name in ("mm_prefix_range", "rswa_prefix_lens"):
        given = getattr(case, name)
        if given is not None:
            found[name] = given[seq : seq + 1]
    return found


def data_of_lengths(case: Case, query_len: int, ctx_len: int) -> dict[str, Any]:
    """Return the fields with the data of the mask of a Case with one sequence, cut to shorter lengths.

    The last new tokens and the first tokens of the context are dropped. Data that have no positions stay.
    """
    dropped = [case.lengths.ctx_lens[0] - ctx_len]
    seq_lens = [ctx_len + query_len]
    if MASKS[case.mask].data == "mm_prefix_range":
        kept = cut_ranges(ranges(case), dropped, seq_lens)
        used = kept[0][kept[0].any(-1)].flatten().tolist()
        return {"mm_prefix_range": (tuple(used or (0, 0)),)}
    if MASKS[case.mask].data == "rswa_prefix_lens":
        kept = cut_prefixes(prefix_lens(case), dropped, seq_lens)
        return {"rswa_prefix_lens": tuple(kept.tolist())}
    if case.tree_parents is not None:
        return {"tree_parents": case.tree_parents[:query_len]}
    return {}


def _branches(parents: tuple[int, ...]) -> torch.Tensor:
    """Return 0 for each token and its ancestors, -inf for others, [n, n] float32."""
    bias = torch.full((len(parents), len(parents)), -torch.inf)
    for token, parent in enumerate(parents):
        if parent < token:
            bias[token] = bias[parent]
        bias[token, token] = 0.0
    return bias
