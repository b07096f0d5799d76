"""KeyColumns: the weights of one sequence's rows with keys in logical order, and foreign slots apart."""

from dataclasses import dataclass

import torch

from attnlab.weights.slot_owner import NONE
from attnlab.weights.tile_edges import tile_edges
from attnlab.weights.xray import XRay


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyColumns:
    """Weights of some rows and one head.

    - ``measured``, ``expected``: [rows, columns]; columns are the positions of the sequence, from the cache
      or from new tokens, then the slots after its end in its own blocks, then one column for each of
      ``foreign``.
    - ``rows``: [rows] output rows. ``positions``: number of positions; ``tail``: number of slots after them.
    - ``foreign``: labels of the last columns, sums over the slots of another sequence or of unmapped blocks.
    - ``context``: the end of the context; ``block_size``: of the cache; ``tiles``: positions at which the
      kernel begins another tile.
    """

    measured: torch.Tensor
    expected: torch.Tensor
    rows: torch.Tensor
    seq: int
    head: int
    positions: int
    tail: int
    foreign: tuple[str, ...]
    context: int
    block_size: int
    tiles: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """Return the number of columns of the sequence itself, those before ``foreign``."""
        return self.positions + self.tail

    @property
    def foreign_width(self) -> int:
        """Return how many columns wide a picture draws each foreign one, so that its label has room."""
        return max(1, self.own // 14)

    @property
    def difference(self) -> torch.Tensor:
        """Return measured minus expected, [rows, columns]."""
        return self.measured - self.expected


def key_columns(one: XRay, seq: int | None = None, head: int | None = None) -> KeyColumns:
    """Return the columns of a sequence and a head; by default those with the largest difference."""
    worst_row, worst_head = _worst(one)
    seq = int(one.setup.seq[worst_row]) if seq is None else seq
    head = int(one.setup.heads[worst_head]) if head is None else head
    setup, owners = one.setup, one.owners
    rows = torch.nonzero(setup.seq == seq).flatten()
    at = torch.nonzero(setup.heads == head).flatten()[0]
    length, context = int(setup.seq_len[rows[0]]), int(setup.ctx_len[rows[0]])
    own = owners.seq == seq
    last = _last_column(one, own, length, rows, int(at))
    own &= owners.position < last
    others = sorted(set(owners.seq[(owners.seq != seq) & (owners.seq != NONE)].tolist()))
    column = torch.where(own, owners.position, 0)
    for index, other in enumerate(others):
        column = torch.where(owners.seq == other, last + index, column)
    rest = (owners.seq == NONE) | ((owners.seq == seq) & ~own)  # the latter have no weight
    column = torch.where(rest, last + len(others), column)
    measured, expected = (
        torch.zeros(len(rows), last + len(others) + 1, dtype=torch.float64).index_add_(
            1, column, weights[rows, at]
        )
        for weights in (one.weights, one.expected)
    )
    return KeyColumns(
        measured=measured,
        expected=expected,
        rows=setup.rows[rows],
        seq=seq,
        head=head,
        positions=length,
        tail=last - length,
        foreign=(*(f"seq {other}" for other in others), "unmapped"),
        context=context,
        block_size=setup.call.block_size,
        tiles=tile_edges(
            one, setup.kernels[int(rows[0])], context, int(setup.cached[rows[0]]), length
        ),
    )


def _last_column(one: XRay, own: torch.Tensor, length: int, rows: torch.Tensor, head: int) -> int:
    """Return the number of columns of a sequence: to the end of its last block, and of the last slot of its
    blocks that has a weight."""
    size = one.setup.call.block_size
    weighed = own & (one.weights[rows, head].nan_to_num(0.0) != 0).any(0)
    last = int(one.owners.position[weighed].max()) + 1 if bool(weighed.any()) else length
    most = int(one.owners.position[own].max()) + 1 if bool(own.any()) else length
    return min(most, -(-max(last, length) // size) * size)


def _worst(one: XRay) -> tuple[int, int]:
    """Return the indices of the row and the head with the largest difference; NaN counts as the largest."""
    off = (one.weights - one.expected).abs().nan_to_num(torch.inf).amax(-1)
    row, head = divmod(int(off.argmax()), off.shape[1])
    return row, head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawPoints:
    """Expected and measured logarithms of weights, each [n]: those of wrong rows and heads if ``wrong``."""

    expected: torch.Tensor
    measured: torch.Tensor
    wrong: torch.Tensor


def law_points(one: XRay, most: int = 4000) -> LawPoints:
    """Return at most about ``most`` pairs of weights above the absolute precision."""
    floor = 4 * one.setup.fixed[:, None, None]
    used = (one.expected > floor) & (one.weights > floor)
    wrong = one.wrong[..., None].expand_as(used)[used]
    step = max(1, len(wrong) // most)
    return LawPoints(
        expected=one.expected[used].log()[::step],
        measured=one.weights[used].log()[::step],
        wrong=wrong[::step],
    )
