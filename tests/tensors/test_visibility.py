"""Visibility: the mask of each sequence is that of a plain statement, and spans have every visible key."""

import dataclasses
from typing import Any

import pytest
import torch
from bench import visible_flops
from helpers.cases import call_of, same_bits
from helpers.masked_cases import random_case, sees

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.masks import MASKS
from attnlab.lab.reference import exact_attention
from attnlab.tensors.cache import make_batch
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import hollow_call, mask_of, presented, visibility_of
from attnlab.tensors.visibility import Visibility


@pytest.mark.parametrize("mask", list(MASKS))
def test_masks_are_those_of_a_plain_statement(mask):
    checked = 0
    for number in range(12):
        case = random_case(mask, number)
        data = MASKS[mask].data
        if mask in ("tree", "ranges", "ranges_in_window") and getattr(case, data) is None:
            continue
        lens = zip(case.ctx_lens, case.query_lens, strict=True)
        for seq, (ctx_len, query_len) in enumerate(lens):
            seq_len = ctx_len + query_len
            one = visibility_of(case).of_seq(seq, ctx_len, seq_len)
            rows = torch.arange(ctx_len, seq_len)
            expected = torch.tensor(
                [[sees(case, seq, row, key) for key in range(seq_len)] for row in rows.tolist()]
            )
            assert torch.equal(one.visible(rows), expected), number
            assert torch.equal(one.seen(), expected.any(0))
            for first in (ctx_len, seq_len - 1):
                span = one.span(first, seq_len - 1)
                outside = expected[first - ctx_len :].clone()
                outside[:, span.start : span.stop] = False
                assert not outside.any()
            checked += 1
    assert checked > 4


def test_the_reference_is_attention_under_the_mask():
    """In one step, over a square of scores; and work is counted for visible keys only."""
    for mask in MASKS:
        case = random_case(mask, 1, sinks=False, softcap=None, kv_cache_dtype="auto")
        batch = make_batch(case)
        got = exact_attention(case, batch).output
        pairs = 0
        for seq, (ctx_len, seq_len) in enumerate(
            zip(case.ctx_lens, case.lengths.seq_lens, strict=True)
        ):
            rows = slice(*batch.token_start_loc[seq : seq + 2])
            own = slice(*batch.kv_start_loc[seq : seq + 2])
            group = case.num_queries_per_kv
            key, value = (
                one[own].double().repeat_interleave(group, 1) for one in (batch.key, batch.value)
            )
            one = visibility_of(case).of_seq(seq, ctx_len, seq_len)
            at = torch.arange(ctx_len, seq_len)
            scores = torch.einsum("qhd,khd->hqk", batch.query[rows].double(), key)
            scores = scores * case.head_size**-0.5
            bias = one.bias(at)
            scores = (scores if bias is None else scores + bias).masked_fill(
                ~one.visible(at), -torch.inf
            )
            expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
            assert torch.allclose(got[rows], expected, atol=1e-12)
            pairs += int(one.visible(at).sum())
        assert visible_flops(case) == pairs * case.num_heads * case.head_size * 4


def test_a_row_without_visible_keys_gives_zero():
    """A tree may hide every key."""
    call, _ = call_of(random_case("tree", 0, query_lens=(2,), ctx_lens=(0,), tree_parents=None))
    mask = mask_of(dataclasses.replace(call, qq_bias=torch.full((2, 2), -torch.inf)), 0)
    assert not mask.visible(torch.arange(2)).any()


def test_plain_rules():
    assert Visibility().is_plain
    assert Visibility(sliding_window=3).is_plain
    for changes in (
        {"causal": False},
        {"causal": torch.ones(2)},
        {"qq_bias": torch.zeros(2, 2)},
        {"sliding_window": 4, "chunk_lookback": 1},
    ):
        assert not Visibility(**changes).is_plain


@pytest.mark.parametrize("mask", ["causal_by_sequence", "ranges_in_window", "tree", "chunks"])
def test_a_saved_call_keeps_its_mask(mask, tmp_path):
    call, _ = call_of(random_case(mask, 3))
    call.save(tmp_path / "call")
    again = KernelCall.load(tmp_path / "call")
    for field in dataclasses.fields(Visibility):
        one, other = getattr(call, field.name), getattr(again, field.name)
        assert same_bits(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"causal": torch.ones(9)}, "causal"),
        ({"causal": 1.5}, "causal"),
        ({"mm_prefix_range": torch.zeros(1, 2)}, "mm_prefix_range"),
        ({"mm_prefix_range": torch.zeros(9, 1, 2)}, "mm_prefix_range"),
        ({"rswa_prefix_lens": torch.zeros(9)}, "rswa_prefix_lens"),
        ({"qq_bias": torch.zeros(2, 3)}, "qq_bias"),
        ({"qq_bias": torch.zeros(2, 2)}, "qq_bias"),
    ],
)
def test_data_that_do_not_fit_a_call(changes, field):
    call, _ = call_of(random_case("causal", 1, query_lens=(3, 1), ctx_lens=(2, 5)))
    with pytest.raises(InvalidCall) as caught:
        dataclasses.replace(call, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize("mask", ["causal_by_sequence", "ranges", "prefix_and_window"])
def test_a_padded_batch_has_mask_data_for_each_sequence(mask):
    """The sequences that pad a batch are empty, and see nothing."""
    window = 7 if mask == "prefix_and_window" else 0
    fields: dict[str, Any] = {"mask": mask, "sliding_window": window, "query_lens": (2, 3)}
    call = hollow_call(
        Case(
            op="unified_attention",
            num_heads=2,
            head_size=16,
            pad_batch=3,
            ctx_lens=(9, 4),
            **fields,
        )
    )
    padded = presented(call)
    assert len(padded.seq_lens) == 5
    data = [getattr(padded, name) for name in ("causal", "mm_prefix_range", "rswa_prefix_lens")]
    assert [len(one) for one in data if isinstance(one, torch.Tensor)] == [5]
