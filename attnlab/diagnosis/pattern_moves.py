"""Equalities: wrong cells that hold the correct result of another row or head."""

from collections import Counter

import torch

from attnlab.diagnosis.cells import Cells, ratio_of
from attnlab.diagnosis.pattern import Fact, list_text, region_text

_MOST_COMPARED = 768  # wrong cells that are compared with all others
_CLEAR = 4.0  # a cell is compared if its size exceeds this many rounding bounds
_SHOWN = 6


def move_facts(cells: Cells, row_starts: list[int], left: torch.Tensor) -> list[Fact]:
    """Return which of the cells ``left`` [n] bool hold the correct result of another cell.

    Heads of the same row are tried first, then rows of the same head, then any cell. The transposed
    order of heads and elements is tried for whole rows.
    """
    transposed = _transposed(cells, left)
    if transposed is not None:
        return [transposed]
    size = cells.output.abs().amax(1)
    clear = left & cells.output.isfinite().all(1) & (size > _CLEAR * cells.bound.amax(1))
    indices = torch.nonzero(clear).flatten()
    if not len(indices) or len(indices) < int(left.sum()) / 2:
        return []
    if len(indices) > _MOST_COMPARED:
        indices = indices[torch.linspace(0, len(indices) - 1, _MOST_COMPARED).long()]
    for find in (_heads_moved, _rows_moved):
        fact = find(cells, indices, row_starts)
        if fact is not None:
            return [fact]
    return []


def _nearest(cells: Cells, indices: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return, for each cell of ``indices``, the allowed cell whose correct result is nearest, or -1 if it
    differs by more than rounding. ``allowed``: [len(indices), n] bool."""
    distance = torch.cdist(cells.output[indices], cells.correct)
    nearest = distance.masked_fill(~allowed, torch.inf).argmin(1)
    return torch.where(_fits(cells, indices, nearest), nearest, -1)


def _fits(cells: Cells, wrong: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return which wrong cells equal the correct result of the source cells, up to rounding."""
    difference = cells.output[wrong] - cells.correct[source]
    return ratio_of(difference, torch.maximum(cells.bound[source], cells.bound[wrong])) <= 1


def _heads_moved(cells: Cells, indices: torch.Tensor, row_starts: list[int]) -> Fact | None:
    """Find one map of heads that holds in all rows."""
    allowed = cells.row[indices][:, None] == cells.row
    allowed &= cells.head[indices][:, None] != cells.head
    nearest = _nearest(cells, indices, allowed)
    heads = _votes(cells.head[indices], cells.head, nearest)
    if not heads:
        return None
    at = {
        (r, h): i
        for i, (r, h) in enumerate(zip(cells.row.tolist(), cells.head.tolist(), strict=True))
    }
    source = [
        at.get((r, heads.get(h, -1)), -1)
        for r, h in zip(cells.row[indices].tolist(), cells.head[indices].tolist(), strict=True)
    ]
    held = _held(cells, indices, torch.tensor(source))
    if held is None:
        return None
    return Fact(
        kind="heads_moved",
        where=region_text(cells, held),
        what=_head_map_text(heads),
        values={"from": {str(h): source for h, source in sorted(heads.items())}},
        accounts_for=int(held.sum()),
    )


def _votes(own: torch.Tensor, names: torch.Tensor, nearest: torch.Tensor) -> dict[int, int]:
    """Return, for each own name, the name of the source that most of its cells have."""
    votes: dict[int, Counter[int]] = {}
    for name, source in zip(own.tolist(), nearest.tolist(), strict=True):
        if source >= 0:
            votes.setdefault(name, Counter())[int(names[source])] += 1
    return {name: counter.most_common(1)[0][0] for name, counter in votes.items()}


def _held(cells: Cells, indices: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """Return the mask [n] of the cells that equal their source, or None if one has none or differs.

    Cells that were not compared, because there are too many, count as the compared ones.
    """
    if bool((source < 0).any()) or not bool(_fits(cells, indices, source).all()):
        return None
    mask = torch.zeros(len(cells), dtype=torch.bool)
    mask[indices] = True
    return cells.is_wrong if len(indices) == _MOST_COMPARED else mask


def _head_map_text(heads: dict[int, int]) -> str:
    """Return a map of heads in words."""
    shifts = {source - head for head, source in heads.items()}
    pairs = {tuple(sorted(item)) for item in heads.items() if heads.get(item[1]) == item[0]}
    if pairs and 2 * len(pairs) == len(heads):
        shown = "; ".join(f"heads {a} and {b}" for a, b in sorted(pairs)[:_SHOWN])
        return f"{shown} {'are' if len(pairs) == 1 else 'are each'} exchanged"
    if len(shifts) == 1 and len(heads) > 1:
        shift = shifts.pop()
        return f"head h holds the correct result of head h {'+' if shift > 0 else '-'} {abs(shift)}"
    if len(set(heads.values())) == 1 and len(heads) > 1:
        return f"every one of these heads holds the correct result of head {next(iter(heads.values()))}"
    shown = ", ".join(f"{h} from {source}" for h, source in sorted(heads.items())[:_SHOWN])
    more = ", …" if len(heads) > _SHOWN else ""
    return f"heads hold the correct results of other heads ({shown}{more})"


def _rows_moved(cells: Cells, indices: torch.Tensor, row_starts: list[int]) -> Fact | None:
    """Find rows that hold the results of other rows, with the same head."""
    allowed = cells.head[indices][:, None] == cells.head
    allowed &= cells.row[indices][:, None] != cells.row
    rows = _votes(cells.row[indices], cells.row, _nearest(cells, indices, allowed))
    if not rows:
        return None
    at = {
        (r, h): i
        for i, (r, h) in enumerate(zip(cells.row.tolist(), cells.head.tolist(), strict=True))
    }
    wrong = list(zip(cells.row[indices].tolist(), cells.head[indices].tolist(), strict=True))
    shift = Counter(source - row for row, source in rows.items()).most_common(1)[0][0]
    count = row_starts[-1]
    maps = [
        {row: (row + shift) % count for row, _ in wrong},
        _same_token_map(cells, rows, row_starts),
        rows,
    ]
    for mapped in maps:
        source = torch.tensor([at.get((mapped.get(row, -1), head), -1) for row, head in wrong])
        held = _held(cells, indices, source)
        if held is not None:
            return Fact(
                kind="rows_moved",
                where=region_text(cells, held),
                what=_row_map_text({row: mapped[row] for row, _ in wrong}, row_starts),
                values={"from": {str(row): mapped[row] for row, _ in wrong}},
                accounts_for=int(held.sum()),
            )
    return None


def _same_token_map(cells: Cells, rows: dict[int, int], row_starts: list[int]) -> dict[int, int]:
    """Return the map of rows to the same new token of another sequence, as most rows of each have it."""
    seq_of = dict(zip(cells.row.tolist(), cells.seq.tolist(), strict=True))
    votes: dict[int, Counter[int]] = {}
    for row, source in rows.items():
        votes.setdefault(seq_of[row], Counter())[seq_of[source]] += 1
    return {
        row: row_starts[votes[seq_of[row]].most_common(1)[0][0]] + row - row_starts[seq_of[row]]
        for row in rows
    }


def _row_map_text(rows: dict[int, int], row_starts: list[int]) -> str:
    """Return a map of rows in words."""
    if len(rows) == 1:
        ((row, source),) = rows.items()
        return f"row {row} holds the correct result of row {source}"
    count = row_starts[-1]
    shifts = {(source - row) % count for row, source in rows.items()}
    if len(shifts) == 1:
        shift = shifts.pop()
        shift = shift - count if shift > count // 2 else shift
        return f"row r holds the correct result of row r {'+' if shift > 0 else '-'} {abs(shift)}"
    if len(set(rows.values())) == 1:
        return f"all of these rows hold the correct result of row {next(iter(rows.values()))}"
    if all(rows.get(source) == row for row, source in rows.items()):
        pairs = sorted({tuple(sorted(item)) for item in rows.items()})
        shown = "; ".join(f"rows {a} and {b}" for a, b in pairs[:_SHOWN])
        return f"{shown}{'; …' if len(pairs) > _SHOWN else ''} are exchanged"
    shown = ", ".join(f"{row} from {source}" for row, source in sorted(rows.items())[:_SHOWN])
    return f"rows hold the correct results of other rows ({shown}{', …' if len(rows) > _SHOWN else ''})"


def _transposed(cells: Cells, left: torch.Tensor) -> Fact | None:
    """Find rows whose heads and elements are exchanged: [heads, head_size] stored as [head_size, heads]."""
    heads, head_size = len(cells.head.unique()), cells.output.shape[1]
    if heads < 2 or len(cells) % heads or not bool(left.any()):
        return None
    grid = cells.row.view(-1, heads)
    if not bool((grid == grid[:, :1]).all()):
        return None
    rows = left.view(-1, heads).any(1)
    correct, output = (t.view(-1, heads, head_size)[rows] for t in (cells.correct, cells.output))
    bound = cells.bound.view(-1, heads, head_size)[rows]
    moved = correct.transpose(1, 2).reshape(correct.shape)
    limit = bound.transpose(1, 2).reshape(bound.shape)
    if not bool((ratio_of(output - moved, limit) <= 1).all()):
        back = correct.view(-1, head_size, heads).transpose(1, 2)
        limit = bound.view(-1, head_size, heads).transpose(1, 2)
        if not bool((ratio_of(output - back, limit) <= 1).all()):
            return None
    names = cells.row.view(-1, heads)[rows, 0].unique().tolist()
    return Fact(
        kind="transposed",
        where=list_text("row", names),
        what="heads and elements are exchanged: [num_heads, head_size] was stored as [head_size, "
        "num_heads]",
        values={"rows": names[:1000]},
        accounts_for=int(left.sum()),
    )
