"""Reruns: what an output depends on although it must not, found by running a changed Case.

This needs no candidate: a row that changes with the output buffer was not written, and a row that changes
with unwritten cache slots reads them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.kernels.control import rows_agree, rows_equal
from attnlab.tensors.cache import NOBODY, PagedCache, freed_blocks, interleaved
from attnlab.tensors.case_call import make_output

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
    sequences that the Case leaves out are ignored.
    """
    ran = _heads_that_ran(case)
    unwritten = find_unwritten(rerun, case, output)
    unwritten = unwritten[is_wrong[unwritten]]
    outputs = {
        fill: output if fill == case.empty_slots else rerun(case.replace(empty_slots=fill))
        for fill in ("garbage", "zeros", "nan")
    }
    on_finite = ~rows_agree(outputs["zeros"][:, ran], outputs["garbage"][:, ran])
    on_nan = ~rows_agree(outputs["zeros"][:, ran], outputs["nan"][:, ran])
    return Dependence(
        unwritten=unwritten,
        on_slots=_rows_that_ran(on_finite | on_nan, case),
        on_finite_slots=_rows_that_ran(on_finite, case),
    )


def find_unwritten(rerun: Rerun, case: Case, output: torch.Tensor) -> torch.Tensor:
    """Return the rows that keep the contents of the output buffer, [n] int64.

    The buffer alone is changed, so a row that is NaN because of what it reads is not one of them, and a row
    must keep what it held in both runs: a kernel may write what the buffer held. ``output``: what ``rerun``
    returned for ``case``.
    """
    ran = _heads_that_ran(case)
    unwritten = rows_equal(output[:, ran], make_output(case)[:, ran])
    if bool(unwritten.any()):
        other = case.replace(output_init="zeros" if case.output_init == "recycled" else "recycled")
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
