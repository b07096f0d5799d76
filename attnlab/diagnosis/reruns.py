"""Reruns: what an output depends on although it must not, found by running a changed Case.

This needs no candidate: a row that changes with the output buffer was not written, and a row that changes
with unwritten cache slots reads them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.contracts.dispatch import decide
from attnlab.kernels.control import rows_agree, rows_equal
from attnlab.kernels.replaced import setting
from attnlab.kernels.triton.run_log import other_outside
from attnlab.tensors.cache import NOBODY, PagedCache, freed_blocks, interleaved
from attnlab.tensors.case_call import make_output
from attnlab.weights.conclude import if_allowed, other_case, with_more_heads

# A second case with other lengths and odd scales, in which an explanation must hold again.
#
# Degenerate numbers let a wrong defect explain an output: k_scale 0.5 squared is v_scale 0.25, 1 / sqrt(4
# heads) is half, and lengths may be multiples of every block and tile.

SECOND_SCALES = {"k_scale": 0.7, "v_scale": 0.3}  # neither is a power or a product of the other
_SCALE = 0.73  # the second scale of the scores, in units of the first
_CAP = 0.83  # the second soft cap, in units of the first
_MORE_NEW, _MORE_CONTEXT = 3, 5  # tokens added to a sequence
_WINDOW = 293  # keys of another sliding window: three tiles of 128, and no whole ones
_LONG_WINDOW = 512  # one that 16 sequences do not exceed, for time
_LARGE_TOKENS = 2048  # a longer batch is replaced by a short one
_SHORT = ((1, 300), (19, 261), (43, 0), (1, 37), (7, 22))  # (query_len, ctx_len)
_DECODES = ((1, 37), (1, 21), (1, 90), (1, 300), (1, 7))
_FURTHER = (  # 64 keys, and 128 of a context, fill the tiles of a kernel
    ((1, 0), (3, 0), (1, 33), (12, 128), (1, 15)),
    ((2, 62), (35, 64), (1, 0), (1, 280)),
    ((150, 4), (1, 26), (263, 0)),  # several tiles of new tokens, for the largest of tiles
    ((1, 40), (1, 19), (1, 130)),  # decodes alone, which an op may compute in another way
)
# Several sequences without context at the end, which a merge copies: tokens of one alone count like rows.
_LAST_WITHOUT_CONTEXT = ((3, 21), (1, 9), (4, 0), (2, 0), (3, 0))
# Of a drawn batch: the least and most context of its decode, and of its prefills new tokens and context.
_DRAWN = (((200, 520), ((2, 40), (1, 140))), ((1, 60), ((90, 210), (1, 60))))
_NEARBY = 12  # cases with lengths like those of a Case
# Few sequences: a statement about some of several sequences must also be true of one.
_FEW = (
    ((1, 300), (20, 37)),
    ((23, 40),),
    ((1, 33),),
    ((1, 0), (1, 9)),
    ((3, 30), (1, 0), (4, 0)),
    ((1, 0), (1, 0)),
)
_WHOLE_TILES = ((2, 62), (1, 127), (1, 255))  # a quarter is a whole tile of 16, of 32, or of 64
_MIXED = ((1, 37), (5, 21), (1, 90), (70, 64), (2, 7))  # several tiles, and other lengths


def second_cases(case: Case) -> Iterator[Case]:
    """Yield cases in which an explanation must hold again: the second case, one without short sequences that
    has decodes and prefills if the same kernels serve both, and one with more heads. If only decodes ran, a
    further batch of decodes follows, because an op may compute those in another way; its blocks have another
    size, if the op has one, so that a part of as many tokens as a block is not taken for one. Of a scale with
    which one key has nearly all weight, the case with the default scale comes first: with the other one, the
    sum of the weights is 1 in each tile."""
    only_decodes = max(case.lengths.query_lens, default=0) == 1
    mixed = _longer_case(case, _MIXED, 7)
    few = _longer_case(case, ((1, 44), (1 if only_decodes else 2, 18)), 19)
    found = [second_case(case), mixed or other_case(case), few and with_more_heads(few)]
    if (case.sm_scale or 0) > 1 and "sm_scale" not in _FIXED.get():
        found.insert(0, case.replace(sm_scale=None))
    if only_decodes:
        decodes = _longer_case(case, _DECODES, 11)
        found.append(decodes and _with_other_blocks(decodes))
    yield from (other for other in found if other is not None)


PLAIN_VALUES = ("normal", "uniform_1e-3")


def further_cases(case: Case) -> Iterator[Case]:
    """Yield the cases in which a description must hold again: those of an explanation, and more.

    A description says less than an explanation, so more lengths can refute it, some of them drawn with the
    seed of the Case. Unusual values may hide what separates two descriptions; normal ones come first.
    """
    if case.distribution not in PLAIN_VALUES:
        yield case.replace(distribution="normal")
    yield from second_cases(case)
    only_decodes = max(case.lengths.query_lens, default=0) == 1
    batches = [*_FURTHER, *_drawn_lengths(case.seed)]
    batches += [_LAST_WITHOUT_CONTEXT] if case.spec.merges else []
    for seed, pairs in enumerate(batches, 13):
        chosen = [(1, ctx) for _, ctx in pairs] if only_decodes else pairs
        if other := _longer_case(case, chosen, seed):
            yield other
    if case.sliding_window:
        yield from _with_other_windows(case, only_decodes)
    if case.spec.parts:  # two parts of several tiles each, so that a tile is not taken for a part
        pairs = ((1, 101), (1 if only_decodes else 5, 74), (1, 43))
        if other := _longer_case(case, pairs, 29, num_splits=2):
            yield other


def _with_other_windows(case: Case, only_decodes: bool) -> Iterator[Case]:
    """Yield cases with other sliding windows: one that hides no key, and one of several tiles that are not
    whole, in a batch of its own."""
    longest = max(case.lengths.seq_lens)
    if longest > case.sliding_window and (other := if_allowed(case, sliding_window=longest)):
        yield other
    size = _WINDOW if case.sliding_window < _WINDOW else case.sliding_window // 2 + 5
    pairs = ((1, size + 26), (1 if only_decodes else 19, size + 9), (1, 7))
    if other := _longer_case(case, pairs, 27, sliding_window=size):
        yield other


def _drawn_lengths(seed: int) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (query_len, ctx_len) with lengths of their own: one with a long context, one with
    several tiles of new tokens."""
    random = Random(seed)
    for decode, (queries, contexts) in _DRAWN:
        pairs = [(random.randint(*queries), random.randint(*contexts)) for _ in range(2)]
        yield [(1, random.randint(*decode)), *pairs, (random.randint(2, 9), 0)]


def few_sequences(case: Case, *, fewer_kernels: bool = False) -> Iterator[Case]:
    """Yield cases with one to three sequences, decodes alone among them.

    ``fewer_kernels``: also those that need fewer of the kernels.
    """
    only_decodes = max(case.lengths.query_lens, default=0) == 1
    for seed, pairs in enumerate(_FEW, 31):
        chosen = [(1, ctx + query - 1) for query, ctx in pairs] if only_decodes else pairs
        if other := _longer_case(case, chosen, seed, fewer_kernels=fewer_kernels):
            yield other


def nearby_cases(case: Case) -> Iterator[Case]:
    """Yield cases whose sequences have up to three tokens more or fewer; each keeps its kind.

    A default scale stays the default: a kernel may compute that alone wrongly.
    """
    random = Random(case.seed)
    fixed = ("sm_scale",) if case.sm_scale is None else ()
    for seed in range(_NEARBY):
        pairs = [
            (max(2, query + random.randint(-3, 3)) if query > 1 else 1, ctx and max(1, ctx + more))
            for query, ctx in zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)
            for more in [random.randint(-3, 3)]
        ]
        with keeping((*_FIXED.get(), *fixed)):
            other = _longer_case(case, pairs, 51 + seed)
        if other:
            yield other


def whole_tiles_case(case: Case) -> Case | None:
    """Return a batch whose sequences and their quarters end with whole tiles of several sizes, or None."""
    only_decodes = max(case.lengths.query_lens, default=0) == 1
    pairs = [(1, ctx + query - 1) if only_decodes else (query, ctx) for query, ctx in _WHOLE_TILES]
    return _longer_case(case, pairs, 29)


def decodes_alone(case: Case) -> Iterator[Case]:
    """Yield a batch of decodes if it needs fewer of the kernels: the op may launch these otherwise."""
    other = _longer_case(case, _FURTHER[-1], 47, fewer_kernels=True)
    if other is not None and set(decide(other).kernels) < set(decide(case).kernels):
        yield other


def few_keys(case: Case) -> Iterator[Case]:
    """Yield a batch of sequences with one to four keys, so that the largest score of a row may be negative.

    The blocks begin with the first one, wherever those of the Case do.
    """
    pairs = [(1, ctx) for ctx in (0, 1, 2, 3, 0, 0, 1)]
    if max(case.lengths.query_lens, default=0) > 1:
        pairs.append((2, 1))
    near = case.replace(first_block=0, num_blocks=None) if case.first_block else case
    if other := _longer_case(near, pairs, 43):
        yield other


def every_remainder_case(case: Case) -> Case | None:
    """Return a batch of decodes in which the first and the last key have every place in tiles of 16, and 16
    places in larger ones; one prefill, too, if the Case has one. None if other kernels run it.

    A long window hides nothing there: the batch would take too long.
    """
    hidden = case.sliding_window if case.sliding_window <= _LONG_WINDOW else 0
    pairs = [(1, hidden + more) for more in range(32, 32 + 16 * 3, 3)]
    if max(case.lengths.query_lens, default=0) > 1:
        pairs.append((5, 21))
    return _longer_case(case, pairs, 37)


def with_larger_groups(case: Case) -> Case | None:
    """Return a case with one query head more per KV head, or None if other kernels run it."""
    group = case.num_queries_per_kv + 1
    heads = case.num_kv_heads * group
    return _on_same_kernels(case, if_allowed(case, num_heads=heads, num_queries_per_kv=group))


def _on_same_kernels(case: Case, other: Case | None, fewer: bool = False) -> Case | None:
    """Return another case if the same kernels run it, or, with ``fewer``, some of them; else None."""
    if other is None:
        return None
    own, others = set(decide(case).kernels), set(decide(other).kernels)
    return other if others == own or (fewer and others < own) else None


def edge_case(case: Case, limit: int) -> Case | None:
    """Return a batch of decodes whose lengths are around a limit that a rule states, or None."""
    return _longer_case(case, [(1, limit + more) for more in (-2, -1, 0, 1)] + [(1, 3)], 17)


def with_known_contents(case: Case) -> Case:
    """Return a Case with finite garbage in empty slots, and with an output buffer that can be recognised."""
    return with_contents(case, empty_slots="garbage", output_init="recycled")


def with_contents(case: Case, **contents: str) -> Case:
    """Return a Case with other contents of memory, except those that its op argument needs."""
    needs = case.argument.needs
    return case.replace(**{name: what for name, what in contents.items() if name not in needs})


def _longer_case(
    case: Case,
    pairs: Sequence[tuple[int, int]],
    seed: int,
    *,
    fewer_kernels: bool = False,
    **more: Any,
) -> Case | None:
    """Return a case whose sequences have contexts and different lengths, or None if other kernels run it.

    ``fewer_kernels``: one that needs fewer of the kernels is returned, too. ``more``: further fields.
    """
    if case.block_table is not None or case.seq_range is not None or case.first_block:
        return None
    if not case.spec.context:
        pairs = [(query + ctx, 0) for query, ctx in pairs]
    changes = {**_lengths(case, pairs), **_other_scales(case), **more}
    changed = if_allowed(case, seed=case.seed + seed, freed="kept", **changes)
    return _on_same_kernels(case, changed, fewer_kernels)


def _with_other_blocks(case: Case) -> Case:
    """Return a case with another block size, or the case itself if that must stay."""
    for size in () if "block_size" in _FIXED.get() else (8, 16, 32):  # few tiles have 8 keys
        other = if_allowed(case, block_size=size, num_blocks=None)
        if size != case.block_size and other:
            return other
    return case


def with_other_numbers(case: Case) -> Case | None:
    """Return a case with the same lengths, normal numbers from another seed and odd scales, or None."""
    return if_allowed(case, seed=case.seed + 41, **_other_scales(case))


def second_case(case: Case) -> Case | None:
    """Return a case with other lengths and scales for the same kernels, or None if there is none."""
    lens = _other_lens(case)
    for changes in ({**lens, **_other_scales(case)}, _other_scales(case), lens):
        changed = _on_same_kernels(case, if_allowed(case, **changes))
        if changed and changed != case:
            return changed
    return None


def _other_lens(case: Case) -> dict[str, Any]:
    """Return other lengths: each sequence stays a decode or a prefill, with or without context."""
    if case.block_table is not None or case.seq_range is not None:
        return {}
    pairs = list(zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True))
    if sum(query + ctx for query, ctx in pairs) > _LARGE_TOKENS:
        kinds = {query == 1 for query, _ in pairs}
        pairs = [pair for pair in _SHORT if (pair[0] == 1) in kinds]
    else:
        pairs = [
            (query if query == 1 else query + _MORE_NEW, ctx + _MORE_CONTEXT * (ctx > 0))
            for query, ctx in pairs
        ]
    return _lengths(case, pairs)


def _lengths(case: Case, pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the fields of a batch of pairs (query_len, ctx_len); sizes that were given follow from it."""
    sizes = ("num_blocks", "max_blocks_per_seq", "max_query_len", "max_seq_len", *DATA_OF_LENGTHS)
    return {
        "query_lens": tuple(query for query, _ in pairs),
        "ctx_lens": tuple(ctx for _, ctx in pairs),
        **{name: None for name in sizes if getattr(case, name) is not None},
    }


def _other_scales(case: Case) -> dict[str, Any]:
    """Return an odd scale of the scores, unless the default is at issue, an odd soft cap, and odd scales of
    an FP8 cache. Numbers of ±1e-3 become normal ones: else all scores, and the maxima of all parts, are
    about 0.
    """
    changes: dict[str, Any] = {}
    if case.distribution == "uniform_1e-3":
        changes["distribution"] = "normal"
    if case.sm_scale is not None or case.release != "0.11.2":
        changes["sm_scale"] = round(_SCALE * (case.sm_scale or case.head_size**-0.5), 5)
    if case.softcap is not None:  # 2 · tanh(s) has twice the scale of 2 · tanh(s / 2)
        changes["softcap"] = round(_CAP * case.softcap, 5)
    if case.is_fp8 and (case.k_scale, case.v_scale) != (1.0, 1.0):
        changes |= SECOND_SCALES
    return {name: value for name, value in changes.items() if name not in _FIXED.get()}


_FIXED: ContextVar[tuple[str, ...]] = ContextVar("fixed", default=())


def keeping(fields: tuple[str, ...]) -> contextlib.AbstractContextManager[object]:
    """Leave some fields as they are in the further cases of the block, because the kernel ignores them."""
    return setting(_FIXED, fields)


Rerun = Callable[[Case], torch.Tensor]
CacheRun = Callable[[Case, PagedCache], torch.Tensor]  # runs a Case with another cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """The rows that depend on what they must not, each [n] int64.

    - ``unwritten``: wrong rows that keep the buffer's previous contents, in two runs with different contents
      that differ in nothing else.
    - ``on_slots``: rows that change with the contents of unwritten slots, finite or NaN.
    - ``on_finite_slots``: those that change between two finite contents.
    """

    unwritten: torch.Tensor
    on_slots: torch.Tensor
    on_finite_slots: torch.Tensor


def find_dependence(
    rerun: Rerun, case: Case, output: torch.Tensor, is_wrong: torch.Tensor
) -> Dependence:
    """Run the Case with other contents of the output buffer and of unwritten slots, and compare the bits.

    ``rerun`` returns the output of a Case, [num_tokens, num_heads, head_size]; ``output`` is what it
    returned for ``case``, and ``is_wrong`` [num_tokens] bool which of its rows are wrong. Heads and
    sequences that the Case leaves out are ignored. Of an op that may read slots after a sequence's end, NaN
    there is the caller's fault and no content.
    """
    ran = _heads_that_ran(case)
    unwritten = find_unwritten(rerun, case, output)
    unwritten = unwritten[is_wrong[unwritten]]
    outputs = {
        fill: output if fill == case.empty_slots else rerun(case.replace(empty_slots=fill))
        for fill in dict.fromkeys(("garbage", "zeros", case.spec.poison))
    }
    on_finite = ~rows_agree(outputs["zeros"][:, ran], outputs["garbage"][:, ran])
    on_nan = ~rows_agree(outputs["zeros"][:, ran], outputs[case.spec.poison][:, ran])
    return Dependence(
        unwritten=unwritten,
        on_slots=_rows_that_ran(on_finite | on_nan, case),
        on_finite_slots=_rows_that_ran(on_finite, case),
    )


def output_of_outside(rerun: Rerun, case: Case) -> torch.Tensor | None:
    """Return the output of a Case with other numbers than 0 outside of all tensors.

    None if it is the same, or if the kernel raises.
    """
    try:
        plain = rerun(case)
        with other_outside():
            output = rerun(case)
    except AttnLabError:
        return None
    return None if bool(rows_agree(output, plain).all()) else output


def find_unwritten(rerun: Rerun, case: Case, output: torch.Tensor) -> torch.Tensor:
    """Return the rows that keep the contents of the output buffer, [n] int64.

    The buffer alone is changed, so a row that is NaN because of what it reads is not one of them, and a row
    must keep what it held in both runs: a kernel may write what the buffer held. ``output``: what ``rerun``
    returned for ``case``.
    """
    ran = _heads_that_ran(case)
    unwritten = rows_equal(output[:, ran], make_output(case)[:, ran])
    if bool(unwritten.any()):
        init = "zeros" if case.output_init == "recycled" else "recycled"
        other = with_contents(case, output_init=init)
        unwritten &= other != case
        unwritten &= rows_equal(rerun(other)[:, ran], make_output(other)[:, ran])
    return _rows_that_ran(unwritten, case)


def _heads_that_ran(case: Case) -> slice:
    heads = case.query_heads
    return slice(None) if heads is None else slice(heads.start, heads.stop)


def find_slot_kinds(run: CacheRun, case: Case, cache: PagedCache) -> dict[str, list[int]]:
    """Return, by kind of empty slots, the rows that change if slots of that kind alone hold NaN.

    ``case`` has zeros in its empty slots, and ``cache`` is its cache. Kinds without a dependent row are
    left out.
    """
    correct = run(case, cache)
    found: dict[str, list[int]] = {}
    for kind, slots in empty_slots_by_kind(case, cache).items():
        if bool(slots.any()):
            output = run(case, _poisoned(case, cache, slots))
            rows = _rows_that_ran(~rows_agree(output, correct), case).tolist()
            found |= {kind: rows} if rows else {}
    return found


def empty_slots_by_kind(case: Case, cache: PagedCache) -> dict[str, torch.Tensor]:
    """Return the slots without a token as masks [num_blocks, block_size] bool: "tail", after the last token
    of a sequence in its last block; "freed", in blocks before the window; "unmapped", all others but those
    of tokens that were not written."""
    is_empty, size = cache.provenance.seq == NOBODY, case.block_size
    kinds = {kind: torch.zeros_like(is_empty) for kind in ("tail", "freed", "own")}
    freed = freed_blocks(case) if case.freed == "empty" else [0] * len(case.lengths.seq_lens)
    for seq, seq_len in enumerate(case.lengths.seq_lens):
        blocks = cache.provenance.block_table[seq, : -(-seq_len // size)].long()
        kinds["freed"][blocks[: freed[seq]]] = True
        kinds["own"][blocks[freed[seq] :]] = True
        if seq_len % size:
            kinds["tail"][blocks[-1], seq_len % size :] = True
    kinds["unmapped"] = ~(kinds["own"] | kinds["freed"] | kinds["tail"])
    return {kind: kinds[kind] & is_empty for kind in ("tail", "freed", "unmapped")}


def _poisoned(case: Case, cache: PagedCache, slots: torch.Tensor) -> PagedCache:
    """Return a copy of a cache with NaN in the slots of a mask."""
    nan = cache.format.nan if cache.format.is_fp8 else torch.nan
    mask = slots.to(cache.key.device)
    key = cache.key.masked_fill(mask[:, None, None, :, None], nan)
    plain = interleaved(cache.value, back=True) if case.interleave_v else cache.value
    value = plain.masked_fill(mask[:, None, None, :], nan)
    value = interleaved(value) if case.interleave_v else value
    return dataclasses.replace(cache, key=key, value=value)


def _rows_that_ran(rows: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the indices of the true rows, of the sequences that ran."""
    found = torch.nonzero(rows).flatten()
    ran = case.query_rows
    return found if ran is None else found[(found >= ran.start) & (found < ran.stop)]
