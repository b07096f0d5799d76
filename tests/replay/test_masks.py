"""Parts of calls with a mask: the kept rows see the same kept keys as before."""

import dataclasses

import pytest
import torch
from helpers.plugins import RIGHT
from helpers.saved_calls import call_of, kernel_file

import attnlab
from attnlab.replay.parts import KeptSequence, can_drop_first_rows, with_sequences, without_tokens
from attnlab.tensors.case_visibility import mask_of

LENGTHS = {"query_lens": (6, 5), "ctx_lens": (40, 50)}
CALLS = {
    "bidirectional": {"sliding_window": 5},
    "causal_by_sequence": {"causal_seqs": (0, 1)},
    "ranges": {"mm_prefix_range": ((2, 18, 30, 43), (0, 0, 49, 54)), "sliding_window": 4},
    "ranges_in_window": {"mm_prefix_range": ((36, 42), (17, 52)), "sliding_window": 7},
    "prefix_and_window": {"rswa_prefix_lens": (25, 9), "sliding_window": 3},
    "chunks": {"sliding_window": 16, "chunk_lookback": 1},
    "tree": {"tree_parents": (0, 0, 1, 1, 0, 4)},
}


def seen(call, seq, rows):
    """Return which keys some rows of a sequence see, [rows, keys]."""
    mask = mask_of(call, seq)
    return mask.visible(torch.arange(mask.ctx_len, mask.seq_len)[rows.start : rows.stop])


@pytest.mark.parametrize("mask", CALLS)
def test_the_rows_see_the_same_keys(mask):
    """Rows are dropped at the end of one sequence, and a block of 16 keys at the begin of the other."""
    call = call_of(mask=mask, **LENGTHS, **CALLS[mask])
    kept = [
        KeptSequence(seq=1, first=0, last=5, blocks=1),
        KeptSequence(seq=0, first=0, last=4),
    ]
    part = with_sequences(call, kept)
    assert torch.equal(seen(part, 0, range(5)), seen(call, 1, range(5))[:, 16:])
    assert torch.equal(seen(part, 1, range(4)), seen(call, 0, range(4))[:, :44])
    alone = with_sequences(call, [KeptSequence(seq=0, first=0, last=6)])
    shorter = without_tokens(alone, 16)
    assert torch.equal(seen(shorter, 0, range(6)), seen(call, 0, range(6))[:, 16:])


@pytest.mark.parametrize("mask", [mask for mask in CALLS if mask != "tree"])
def test_dropped_first_rows_become_context(mask):
    call = call_of(mask=mask, **LENGTHS, **CALLS[mask])
    part = with_sequences(call, [KeptSequence(seq=0, first=2, last=6)])
    assert torch.equal(seen(part, 0, range(4)), seen(call, 0, range(2, 6)))


def test_a_tree_without_its_first_rows_keeps_their_branches():
    """The bias is cut by the rows that every sequence drops; one sequence alone cannot drop any."""
    call = call_of(mask="tree", **LENGTHS, **CALLS["tree"])
    part = with_sequences(call, [KeptSequence(seq=0, first=2, last=5)])
    assert torch.equal(part.qq_bias, call.qq_bias[2:5, 2:5])
    assert (can_drop_first_rows(call), can_drop_first_rows(part)) == (False, True)


def test_a_call_with_a_mask_loses_rows_and_context(tmp_path):
    """A kernel that is causal is wrong on a call with ranges: two rows and no context show it."""
    call = call_of(mask="ranges", **LENGTHS, mm_prefix_range=((38, 45), (0, 0)))
    causal = RIGHT + "\nmy_attention.masks = ('causal', 'ranges')\n"
    found = attnlab.shrink_call(call, backend=kernel_file(tmp_path, causal, "causal"))
    assert found.is_failing
    assert found.is_complete
    sizes = {name: found.after[name] for name in ("sequences", "rows", "heads")}
    assert sizes == {"sequences": 1, "rows": 2, "heads": 1}
    assert found.after["longest context"] == 0
    assert found.call.mm_prefix_range.tolist() == [[[0, 1]]]
    assert dataclasses.replace(found.call, mm_prefix_range=None).visibility.is_plain
