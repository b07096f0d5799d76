"""Pattern: what an error looks like, stated before any hypothesis about its cause."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from attnlab.case.shown import json_value
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.edit import TILES
from attnlab.diagnosis.candidates import Cells, ratio_of

PLACES = ("sequences", "rows", "heads")


@dataclass(frozen=True, slots=True)
class Fact:
    """One regularity of an error.

    - ``kind``: what was found, for example "rows", "heads", "zeros", "factor", "keys".
    - ``what``: the regularity; ``where``: the rows, heads or sequences that it concerns, in words.
    - ``values``: the same as numbers.
    - ``accounts_for``: how many wrong cells the fact reproduces up to rounding; 0 for facts about places
      and sizes. A cell is one head of one row.
    """

    kind: str
    what: str
    where: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    accounts_for: int = 0

    @property
    def sentence(self) -> str:
        """Return the fact in words."""
        return f"{self.where}: {self.what}" if self.where else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What an error looks like.

    - ``facts``: places first, then sizes and values.
    - ``wrong_cells``: the number of wrong cells (heads of rows) that were examined.
    """

    facts: tuple[Fact, ...] = ()
    wrong_cells: int = 0

    @property
    def rules(self) -> list[Fact]:
        """Return the facts that reproduce wrong cells."""
        return [fact for fact in self.facts if fact.accounts_for]

    @property
    def rules_text(self) -> str:
        """Return the facts that reproduce wrong cells in one sentence, "" for none."""
        return "; ".join(fact.sentence for fact in self.rules)

    @property
    def is_complete(self) -> bool:
        """Answer whether the rules reproduce every wrong cell that was examined, or 99 % of many."""
        return 0 < 0.99 * self.wrong_cells <= sum(fact.accounts_for for fact in self.rules)

    def of(self, kind: str) -> list[Fact]:
        """Return the facts of a kind."""
        return [fact for fact in self.facts if fact.kind == kind]

    def sentences(self) -> list[str]:
        """Return the pattern in words: one sentence about places, then one per fact."""
        places = "; ".join(fact.sentence for fact in self.facts if fact.kind in PLACES)
        others = [fact.sentence for fact in self.facts if fact.kind not in PLACES]
        return [places, *others] if places else others

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern as JSON-able values."""
        facts = [
            {
                "kind": fact.kind,
                "sentence": fact.sentence,
                "accounts_for": fact.accounts_for,
                **fact.values,
            }
            for fact in self.facts
        ]
        document = {"wrong_cells": self.wrong_cells, "complete": self.is_complete, "facts": facts}
        converted: dict[str, Any] = json_value(document)
        return converted


def list_text(noun: str, numbers: Sequence[int], most: int = 6) -> str:
    """Return "row 5", "rows 5–9" or "rows 5, 7, 9, … (12)"."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{noun}s {numbers[0]}–{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:most]))
    return f"{noun}s {shown}" + (f", … ({len(numbers)})" if len(numbers) > most else "")


def region_text(cells: Cells, mask: torch.Tensor) -> str:
    """Return the cells in ``mask`` [n] bool as rows and heads, such as "row 20" or "head 3"."""
    rows, heads = cells.row[mask].unique(), cells.head[mask].unique()
    is_box = int((torch.isin(cells.row, rows) & torch.isin(cells.head, heads)).sum())
    if is_box != int(mask.sum()):
        if bool((mask == cells.is_wrong).all()):
            return "every wrong row and head"
        return f"{int(mask.sum())} of {int(cells.is_wrong.sum())} wrong cells"
    has_all_rows = len(rows) == len(cells.row.unique())
    has_all_heads = len(heads) == len(cells.head.unique())
    if has_all_rows and has_all_heads:
        return "the whole output"
    if has_all_heads:
        return list_text("row", rows.tolist())
    head_text = list_text("head", heads.tolist())
    return head_text if has_all_rows else f"{list_text('row', rows.tolist())}, {head_text}"


# Where an error is: the wrong sequences, rows, heads and elements, and rules that may separate them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The lengths of the sequences and the sizes in which kernels work.

    - ``seqs``: the sequences that ran; ``query_lens``, ``ctx_lens``: of all sequences.
    - ``row_starts``: the prefix sums of ``query_lens``, length num_seqs + 1.
    - ``block_size``: slots per block; ``num_queries_per_kv``: query heads per KV head.
    - ``partition_size``: keys per partition, of kernels that merge partitions.
    - ``takes_prefills``: the op computes sequences with several new tokens, too.
    """

    seqs: tuple[int, ...]
    query_lens: tuple[int, ...]
    ctx_lens: tuple[int, ...]
    row_starts: tuple[int, ...]
    block_size: int
    num_queries_per_kv: int
    partition_size: int = PARTITION_SIZE
    takes_prefills: bool = True

    def seq_len(self, seq: int) -> int:
        """Return the number of tokens of a sequence, context and new."""
        return self.query_lens[seq] + self.ctx_lens[seq]


def place_facts(is_wrong: torch.Tensor, ran_heads: Sequence[int], sizes: Sizes) -> list[Fact]:
    """Return which sequences, rows and heads are wrong.

    ``is_wrong``: [num_tokens, num_heads] bool; ``ran_heads``: the heads that ran, ascending.
    """
    rows, heads = is_wrong.any(1), is_wrong.any(0)
    if not bool(rows.any()):
        return []
    facts = [_sequences(rows, sizes), _rows(rows, sizes), _heads(heads, ran_heads)]
    return [fact for fact in facts if fact is not None]


def _sequences(rows: torch.Tensor, sizes: Sizes) -> Fact:
    """Return which sequences have wrong rows.

    What they have in common may be a coincidence of this call: PatternClaim states it if further cases
    confirm it.
    """
    wrong = {seq for seq in sizes.seqs if bool(rows[slice(*sizes.row_starts[seq : seq + 2])].any())}
    nonempty = {seq for seq in sizes.seqs if sizes.query_lens[seq]}
    names = list_text("sequence", sorted(wrong))
    if wrong == nonempty:
        what = "the only sequence is wrong" if len(wrong) == 1 else "every sequence has wrong rows"
    elif len(wrong) == 1:
        seq = min(wrong)
        what = (
            f"only sequence {seq} is wrong (query_len {sizes.query_lens[seq]}, "
            f"ctx_len {sizes.ctx_lens[seq]})"
        )
    else:
        what = f"{len(wrong)} of {len(nonempty)} sequences have wrong rows: {names}"
    values = {"sequences": sorted(wrong), "total": len(nonempty)}
    return Fact("sequences", what, values=values)


def sequence_rules(sizes: Sizes) -> Iterable[tuple[str, set[int]]]:
    """Yield rules that sequences may have in common, the simplest first, each with its members."""
    for text, has_rule in _sequence_rules(sizes):
        yield text, {seq for seq in sizes.seqs if sizes.query_lens[seq] and has_rule[seq]}


def _sequence_rules(sizes: Sizes) -> Iterable[tuple[str, list[bool]]]:
    """Yield rules, each with whether a sequence has it, for all sequences."""
    query, ctx, size = sizes.query_lens, sizes.ctx_lens, sizes.block_size
    every = range(len(query))
    total = [sizes.seq_len(seq) for seq in every]
    yield "with one new token", [n == 1 for n in query]
    yield "with several new tokens", [n > 1 for n in query]
    yield "with a context", [n > 0 for n in ctx]
    yield "without context", [n == 0 for n in ctx]
    yield "with more than one key", [n > 1 for n in total]
    for what, lens in (("seq_len", total), ("ctx_len", ctx)):
        yield f"whose {what} is not a multiple of the block size", [n % size != 0 for n in lens]
        yield f"whose {what} is a multiple of the block size", [n % size == 0 for n in lens]
        for limit in (sizes.partition_size, size, *TILES):
            yield f"with {what} above {limit}", [n > limit for n in lens]
    for limit in dict.fromkeys((*TILES, sizes.partition_size)):
        yield f"with seq_len up to {limit}", [n <= limit for n in total]
    yield "after the first", [seq > min(sizes.seqs, default=0) for seq in every]
    yield "before the last", [seq < max(sizes.seqs, default=0) for seq in every]


def _rows(rows: torch.Tensor, sizes: Sizes) -> Fact:
    """Return which rows are wrong."""
    wrong = torch.nonzero(rows).flatten().tolist()
    ran = [row for seq in sizes.seqs for row in range(*sizes.row_starts[seq : seq + 2])]
    if len(wrong) == len(ran):
        what = f"all {len(ran)} rows are wrong"
    else:
        what = f"the wrong rows are {list_text('row', wrong).removeprefix('row ').removeprefix('rows ')}"
        if len(wrong) == 1:
            what = f"the only wrong row is {wrong[0]}"
    values = {"rows": wrong[:1000], "count": len(wrong), "total": len(ran)}
    return Fact("rows", what, values=values)


def row_rules(
    tokens: dict[int, list[int]], sizes: Sizes
) -> Iterable[tuple[str, Callable[[int, int], bool]]]:
    """Yield rules of rows, the simplest first, each as text and predicate of (sequence, token)."""
    query, ctx = sizes.query_lens, sizes.ctx_lens
    yield "the first row of each", lambda seq, token: token == 0
    yield "the last row of each", lambda seq, token: token == query[seq] - 1
    yield "all but the first row of each", lambda seq, token: token > 0
    yield "all but the last row of each", lambda seq, token: token < query[seq] - 1
    first = min(found[0] for found in tokens.values())
    last = max(found[-1] for found in tokens.values())
    yield f"from new token {first} on", lambda seq, token: token >= first
    yield f"up to new token {last}", lambda seq, token: token <= last
    start = min(ctx[seq] + found[0] for seq, found in tokens.items())
    stop = max(ctx[seq] + found[-1] for seq, found in tokens.items())
    yield f"from position {start} of the sequence on", lambda seq, token: ctx[seq] + token >= start
    yield f"up to position {stop} of the sequence", lambda seq, token: ctx[seq] + token <= stop
    for size in dict.fromkeys((sizes.block_size, *TILES, 2)):
        for what, counted in (
            ("positions p with p", ctx),
            ("new tokens t with t", (0,) * len(ctx)),
        ):
            rests = {(counted[seq] + t) % size for seq, found in tokens.items() for t in found}
            if len(rests) == 1:
                yield (
                    f"{what} % {size} = {min(rests)}",
                    partial(_has_rest, counted, size, min(rests)),
                )


def _has_rest(counted: Sequence[int], size: int, rest: int, seq: int, token: int) -> bool:
    return (counted[seq] + token) % size == rest


def _heads(heads: torch.Tensor, ran: Sequence[int]) -> Fact:
    """Return which heads are wrong."""
    wrong = torch.nonzero(heads).flatten().tolist()
    if len(wrong) == len(ran):
        what = f"the error is in {f'all {len(ran)} heads' if len(ran) > 1 else 'the only head'}"
    else:
        is_or_are = "is" if len(wrong) == 1 else "are"
        what = f"only {list_text('head', wrong)} of {len(ran)} {is_or_are} wrong"
    return Fact("heads", what, values={"heads": wrong, "total": len(ran)})


def element_facts(cells: Cells) -> list[Fact]:
    """Return the fact that only some elements of the heads are wrong, if so."""
    wrong = cells.select(cells.is_wrong)
    error = (wrong.output - wrong.correct).abs().nan_to_num(torch.inf, torch.inf)
    elements = torch.nonzero((error > wrong.bound).any(0)).flatten().tolist()
    head_size = cells.output.shape[1]
    if (
        not elements
        or len(elements) == head_size
        or (len(wrong) < 3 and len(elements) > head_size // 2)
    ):
        return []
    what = f"only {list_text('element', elements)} of {head_size} in each head are wrong"
    return [Fact("elements", what, values={"elements": elements})]


# Equalities: wrong cells that hold the correct result of another row or head.

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
    found = (_moved(cells, indices, row_starts, kind) for kind in ("heads", "rows"))
    return [fact for fact in found if fact is not None][:1]


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


def _moved(cells: Cells, indices: torch.Tensor, row_starts: list[int], kind: str) -> Fact | None:
    """Find one map of heads that holds in all rows, or one of rows that holds in all heads."""
    own, other = (cells.head, cells.row) if kind == "heads" else (cells.row, cells.head)
    allowed = (other[indices][:, None] == other) & (own[indices][:, None] != own)
    votes = _votes(own[indices], own, _nearest(cells, indices, allowed))
    if not votes:
        return None
    pairs = list(zip(own.tolist(), other.tolist(), strict=True))
    at, wrong = {pair: i for i, pair in enumerate(pairs)}, [pairs[i] for i in indices.tolist()]
    for mapped in [votes] if kind == "heads" else _row_maps(cells, votes, row_starts):
        held = _held(
            cells, indices, torch.tensor([at.get((mapped.get(a, -1), b), -1) for a, b in wrong])
        )
        if held is not None:
            found = {a: mapped[a] for a, _ in wrong}
            text = _head_map_text(found) if kind == "heads" else _row_map_text(found, row_starts)
            values = {"from": {str(name): source for name, source in sorted(found.items())}}
            where = region_text(cells, held)
            return Fact(f"{kind}_moved", text, where, values, int(held.sum()))
    return None


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


def _row_maps(cells: Cells, rows: dict[int, int], row_starts: list[int]) -> list[dict[int, int]]:
    """Return maps of rows that may hold: one distance for all, as most have it; to the same new token of
    another sequence, as most rows of each have it; and that of each row."""
    every, count = cells.row.tolist(), row_starts[-1]
    shift = Counter(source - row for row, source in rows.items()).most_common(1)[0][0]
    seq_of = dict(zip(every, cells.seq.tolist(), strict=True))
    votes: dict[int, Counter[int]] = {}
    for row, source in rows.items():
        votes.setdefault(seq_of[row], Counter())[seq_of[source]] += 1
    start = {seq: row_starts[found.most_common(1)[0][0]] for seq, found in votes.items()}
    of_token = {row: start[seq_of[row]] + row - row_starts[seq_of[row]] for row in rows}
    return [{row: (row + shift) % count for row in every}, of_token, rows]


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
    what = "heads and elements are exchanged: [num_heads, head_size] was stored as [head_size, num_heads]"
    values = {"rows": names[:1000]}
    return Fact("transposed", what, list_text("row", names), values, int(left.sum()))
