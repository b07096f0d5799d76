"""The mask of a Case: what is refused, with which field, and the ways to state one."""

import pytest

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import InvalidCase
from attnlab.case.masks import DATA_FIELDS, MASK_DATA, MASKS

LENS = {"op": "unified_attention", "query_lens": (3, 1), "ctx_lens": (5, 9)}


def test_every_mask_has_an_op_and_its_data_a_field():
    assert set(MASK_DATA) == set(DATA_FIELDS)
    assert set(MASK_DATA) < set(FIELDS)
    assert all(mask.ops or mask.name == "causal" for mask in MASKS.values())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"mask": "range"}, "mask"),
        ({"mask": "ranges", "op": "context_attention_fwd"}, "mask"),
        ({"mask": "bidirectional", "op": "merge_attn_states"}, "mask"),
        ({"mask": "bidirectional", "release": "0.11.2"}, "mask"),
        ({"mask": "bidirectional", "op": "context_attention_fwd", "alibi": True}, "alibi"),
        ({"mask": "chunks"}, "sliding_window"),
        ({"mask": "prefix_and_window"}, "sliding_window"),
        ({"mask": "ranges", "sliding_window": 4, "freed": "empty"}, "freed"),
        ({"mask": "ranges", "chunk_lookback": 1}, "chunk_lookback"),
        ({"causal_seqs": (1, 0)}, "causal_seqs"),
        ({"mask": "causal_by_sequence", "causal_seqs": (1,)}, "causal_seqs"),
        ({"mask": "causal_by_sequence", "causal_seqs": (1, 2)}, "causal_seqs"),
        ({"mask": "ranges", "mm_prefix_range": ((0, 3),)}, "mm_prefix_range"),
        ({"mask": "ranges", "mm_prefix_range": ((0, 3, 4), (0, 1, 1))}, "mm_prefix_range"),
        ({"mask": "ranges", "mm_prefix_range": ((0, 8), (0, 1))}, "mm_prefix_range"),
        ({"mask": "ranges", "mm_prefix_range": ((3, 1), (0, 1))}, "mm_prefix_range"),
        (
            {"mask": "prefix_and_window", "sliding_window": 2, "rswa_prefix_lens": (9, 0)},
            "rswa_prefix_lens",
        ),
        ({"mask": "chunks", "sliding_window": 2, "chunk_lookback": 2}, "chunk_lookback"),
        ({"mask": "tree", "tree_parents": (0, 0)}, "tree_parents"),
        ({"mask": "tree", "tree_parents": (0, 2, 0)}, "tree_parents"),
    ],
)
def test_impossible_combinations(fields, field):
    with pytest.raises(InvalidCase) as caught:
        Case(**{**LENS, **fields})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mask", list(MASKS))
def test_a_case_survives_json_and_the_command_line(mask):
    given = {"causal_seqs": (1, 0), "rswa_prefix_lens": (4, 0), "chunk_lookback": 2}
    given |= {"mm_prefix_range": ((0, 6), (2, 9)), "tree_parents": (0, 0, 1)}
    data = {MASKS[mask].data: given[MASKS[mask].data]} if MASKS[mask].data else {}
    case = Case(**LENS, mask=mask, sliding_window=6, **data)
    assert Case.from_json(case.to_json()) == case
    assert mask == "causal" or f"--mask {mask}" in case.to_cli()
