"""Where an error is: the wrong sequences, rows, heads and elements, and rules that may separate them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.diagnosis.cells import Cells
from attnlab.diagnosis.pattern import Fact, list_text

TILES = (16, 32, 64, 128)  # tile sizes of the kernels that the lab knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The lengths of the sequences and the sizes in which kernels work.

    - ``seqs``: the sequences that ran; ``query_lens``, ``ctx_lens``: of all sequences.
    - ``row_starts``: the prefix sums of ``query_lens``, length num_seqs + 1.
    - ``block_size``: slots per block; ``num_queries_per_kv``: query heads per KV head.
    """

    seqs: tuple[int, ...]
    query_lens: tuple[int, ...]
    ctx_lens: tuple[int, ...]
    row_starts: tuple[int, ...]
    block_size: int
    num_queries_per_kv: int

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
    return Fact(kind="sequences", where="", what=what, values=values)


def sequence_rules(sizes: Sizes) -> Iterable[tuple[str, set[int]]]:
    """Yield rules that sequences may have in common, the simplest first, each with its members."""

    def members(rule: Callable[[int], bool]) -> set[int]:
        return {seq for seq in sizes.seqs if sizes.query_lens[seq] and rule(seq)}

    query, ctx, size = sizes.query_lens, sizes.ctx_lens, sizes.block_size
    yield "with one new token", members(lambda seq: query[seq] == 1)
    yield "with several new tokens", members(lambda seq: query[seq] > 1)
    yield "with a context", members(lambda seq: ctx[seq] > 0)
    yield "without context", members(lambda seq: ctx[seq] == 0)
    yield "with more than one key", members(lambda seq: sizes.seq_len(seq) > 1)
    for what, lens in (
        ("seq_len", [sizes.seq_len(seq) for seq in range(len(query))]),
        ("ctx_len", ctx),
    ):
        yield (
            f"whose {what} is not a multiple of the block size",
            members(lambda seq, lens=lens: lens[seq] % size != 0),  # type: ignore[misc]
        )
        yield (
            f"whose {what} is a multiple of the block size",
            members(lambda seq, lens=lens: lens[seq] % size == 0),  # type: ignore[misc]
        )
        for limit in (PARTITION_SIZE, size, *TILES):
            yield (
                f"with {what} above {limit}",
                members(lambda seq, lens=lens, limit=limit: lens[seq] > limit),  # type: ignore[misc]
            )
    for limit in dict.fromkeys((*TILES, PARTITION_SIZE)):
        yield (
            f"with seq_len up to {limit}",
            members(lambda seq, limit=limit: sizes.seq_len(seq) <= limit),  # type: ignore[misc]
        )
    yield "after the first", members(lambda seq: seq > sizes.seqs[0])
    yield "before the last", members(lambda seq: seq < sizes.seqs[-1])


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
    return Fact(kind="rows", where="", what=what, values=values)


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
    from_position = min(ctx[seq] + found[0] for seq, found in tokens.items())
    to_position = max(ctx[seq] + found[-1] for seq, found in tokens.items())
    yield (
        f"from position {from_position} of the sequence on",
        lambda seq, token: ctx[seq] + token >= from_position,
    )
    yield (
        f"up to position {to_position} of the sequence",
        lambda seq, token: ctx[seq] + token <= to_position,
    )
    for size in dict.fromkeys((sizes.block_size, *TILES, 2)):
        position = {(ctx[seq] + t) % size for seq, found in tokens.items() for t in found}
        token_rest = {t % size for found in tokens.values() for t in found}
        if len(position) == 1:
            rest = min(position)
            yield (
                f"positions p with p % {size} = {rest}",
                lambda seq, token, size=size, rest=rest: (ctx[seq] + token) % size == rest,  # type: ignore[misc]
            )
        if len(token_rest) == 1:
            rest = min(token_rest)
            yield (
                f"new tokens t with t % {size} = {rest}",
                lambda seq, token, size=size, rest=rest: token % size == rest,  # type: ignore[misc]
            )


def _heads(heads: torch.Tensor, ran: Sequence[int]) -> Fact:
    """Return which heads are wrong."""
    wrong = torch.nonzero(heads).flatten().tolist()
    if len(wrong) == len(ran):
        what = f"the error is in {f'all {len(ran)} heads' if len(ran) > 1 else 'the only head'}"
    else:
        is_or_are = "is" if len(wrong) == 1 else "are"
        what = f"only {list_text('head', wrong)} of {len(ran)} {is_or_are} wrong"
    return Fact(kind="heads", where="", what=what, values={"heads": wrong, "total": len(ran)})


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
    return [Fact(kind="elements", where="", what=what, values={"elements": elements})]
