"""Visibility: which keys each row of a call sees, and what is added to their scores.

The reference, the rounding bound, the models, contracts, defects, traces and plots all take it from here.
Its rules are those of compute_kv_seq_mask (triton_attention_helpers.py, vLLM 0.33.0).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visibility:
    """Which keys the rows of a call see, by the names that vLLM's ops have for it.

    - ``causal``: no row sees keys after its own position. A tensor [num_seqs] of integers is 0 for the
      sequences that are not causal.
    - ``sliding_window``: the number of keys up to its own that a row sees; 0 for all. ``window_right``: of a
      row that is not causal, how many keys after its own it sees within a window; None for all.
    - ``mm_prefix_range``: [num_seqs, n, 2] integers or None: first and last position of ranges in which each
      row also sees every key. A range counts if its first position is below its last.
      ``mm_prefix_clamp_sliding_window``: the window limits the ranges to the left.
    - ``rswa_prefix_lens``: [num_seqs] integers or None: keys before this position are visible besides the
      window (R-SWA).
    - ``chunk_lookback``: with 0 or more, the window is replaced by chunks of sliding_window //
      (chunk_lookback + 1) tokens: a row sees its own and so many before. -1 for none.
    - ``qq_bias``: [n, n] floating or None, added to the score of a row (first index) and a new token of its
      sequence; -inf hides the key. [num_seqs, n, m] for one in each sequence, for all its keys.
    """

    causal: bool | torch.Tensor = True
    sliding_window: int = 0
    window_right: int | None = None
    mm_prefix_range: torch.Tensor | None = None
    mm_prefix_clamp_sliding_window: bool = False
    rswa_prefix_lens: torch.Tensor | None = None
    chunk_lookback: int = -1
    qq_bias: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Answer whether every row sees the keys up to its own, within a window if there is one."""
        return not self.masks

    @property
    def masks(self) -> tuple[str, ...]:
        """Return the names in :data:`attnlab.case.masks.MASKS` of what differs from causal attention."""
        clamp = self.mm_prefix_clamp_sliding_window and self.sliding_window > 0
        has = {
            "causal_by_sequence": isinstance(self.causal, torch.Tensor),
            "bidirectional": self.causal is False,
            "ranges_in_window" if clamp else "ranges": self.mm_prefix_range is not None,
            "prefix_and_window": self.rswa_prefix_lens is not None,
            "chunks": self.has_chunks,
            "tree": self.qq_bias is not None,
        }
        return tuple(name for name, is_there in has.items() if is_there)

    @property
    def has_chunks(self) -> bool:
        """Answer whether chunks replace the window."""
        return self.chunk_lookback > -1 and self.sliding_window > 0

    @property
    def largest_bias(self) -> float:
        """Return the largest finite magnitude of ``qq_bias``, 0 without one."""
        finite = torch.zeros(1) if self.qq_bias is None else self.qq_bias[self.qq_bias.isfinite()]
        return float(finite.abs().max()) if len(finite) else 0.0

    def is_causal(self, seq: int) -> bool:
        """Answer whether a sequence is causal, apart from ranges."""
        return bool(self.causal[seq] if isinstance(self.causal, torch.Tensor) else self.causal)

    def of_seq(self, seq: int, ctx_len: int, seq_len: int) -> "SequenceMask":
        """Return the mask of a sequence of ``seq_len`` tokens, the first ``ctx_len`` of them context."""
        return SequenceMask(rules=self, seq=seq, ctx_len=ctx_len, seq_len=seq_len)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceMask:
    """The mask of one sequence; keys are named by their positions.

    ``rules``: of the call. ``seq``: the index of the sequence, ``ctx_len`` and ``seq_len`` its lengths.
    """

    rules: Visibility
    seq: int
    ctx_len: int
    seq_len: int

    @property
    def is_plain(self) -> bool:
        """Answer whether the rules are :attr:`Visibility.is_plain`."""
        return self.rules.is_plain

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last position of each bidirectional range."""
        if self.rules.mm_prefix_range is not None:
            for first, last in self.rules.mm_prefix_range[self.seq].tolist():
                if first < last:
                    yield first, last

    def span(self, first: int, last: int) -> range:
        """Return a range that has every key which a row from position ``first`` to ``last`` sees."""
        rules, window = self.rules, self.rules.sliding_window
        begin, end = 0, last + 1
        if rules.has_chunks:
            begin = (first // self._chunk - rules.chunk_lookback) * self._chunk
        elif window and not self._prefix_len:
            begin = first - window + 1
        if not rules.is_causal(self.seq):
            right = rules.window_right if window else None
            end = self.seq_len if right is None or rules.has_chunks else end + right
        for range_first, range_last in self.ranges():
            if range_first <= last and range_last >= first:
                begin, end = min(begin, range_first), max(end, range_last + 1)
        return range(max(0, begin), min(end, self.seq_len))

    def visible(
        self, position: torch.Tensor, begin: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """Return which keys from ``begin`` to ``end`` - 1 rows see, [rows, keys] bool.

        ``position``: [rows] int64, the positions of the rows. The default of ``end`` is seq_len.
        """
        at = position[:, None]
        keys = torch.arange(begin, self.seq_len if end is None else end, device=position.device)
        seen = self._base(at, keys)
        for first, last in self.ranges():
            inside = (at >= first) & (at <= last) & (keys >= first) & (keys <= last)
            if self.rules.mm_prefix_clamp_sliding_window and self.rules.sliding_window:
                inside &= at - keys < self.rules.sliding_window
            seen |= inside
        bias = self._bias(position, keys)
        return seen if bias is None else seen & (bias != -torch.inf)

    def bias(
        self, position: torch.Tensor, begin: int = 0, end: int | None = None
    ) -> torch.Tensor | None:
        """Return what is added to the scores of visible keys, [rows, keys], or None for nothing.

        The arguments are those of :meth:`visible`. Keys that the bias hides have 0.
        """
        keys = torch.arange(begin, self.seq_len if end is None else end, device=position.device)
        bias = self._bias(position, keys)
        return None if bias is None else bias.masked_fill(bias == -torch.inf, 0.0)

    def seen(self) -> torch.Tensor:
        """Return which keys any new token sees, [seq_len] bool."""
        found = torch.zeros(self.seq_len, dtype=torch.bool)
        for rows in torch.arange(self.ctx_len, self.seq_len).split(_ROWS):
            span = self.span(int(rows[0]), int(rows[-1]))
            seen = self.visible(rows, span.start, span.stop).any(0)
            found[span.start : span.stop] |= seen
        return found

    @property
    def _chunk(self) -> int:
        """Return the number of tokens of a chunk."""
        return max(1, self.rules.sliding_window // (self.rules.chunk_lookback + 1))

    @property
    def _prefix_len(self) -> int:
        lens = self.rules.rswa_prefix_lens
        return 0 if lens is None else int(lens[self.seq])

    def _base(self, at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return what rows see before ranges and bias, [rows, keys]; ``at``: [rows, 1]."""
        rules, window, away = self.rules, self.rules.sliding_window, at - keys
        is_causal = rules.is_causal(self.seq)
        seen = away >= 0 if is_causal else torch.ones_like(away, dtype=torch.bool)
        if rules.has_chunks:
            return seen & (at // self._chunk - keys // self._chunk <= rules.chunk_lookback)
        if not window:
            return seen
        within = away < window
        if not is_causal and rules.window_right is not None:
            within &= away >= -rules.window_right
        if rules.rswa_prefix_lens is not None:
            within |= keys < self._prefix_len
        return seen & within

    def _bias(self, position: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return the bias of each row for each key, [rows, keys]; [n, n] has 0 for keys of the context."""
        bias = self.rules.qq_bias
        if bias is None:
            return None
        if bias.dim() == 3:
            return bias[self.seq].to(position.device)[position - self.ctx_len][:, keys]
        new = keys >= self.ctx_len
        rows = bias.to(position.device)[position - self.ctx_len]
        found = rows.new_zeros(len(position), len(keys))
        found[:, new] = rows[:, keys[new] - self.ctx_len]
        return found


_ROWS = 256  # of a mask that is in memory at once
