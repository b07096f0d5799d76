"""The mask in a script: its function and its data say the same as the Visibility of the call."""

import pytest
import torch
from helpers.triton_example import CASE

from attnlab.case.masks import MASKS
from attnlab.lab.lab import Lab
from attnlab.reports.upstream import has_script, mask_facts, render, tensor_text
from attnlab.tensors.case_visibility import mask_of

LENGTHS = {"query_lens": (5, 8, 1), "ctx_lens": (20, 9, 30)}
WINDOWS = {"ranges_in_window": 5, "prefix_and_window": 6, "chunks": 16}
CALLS = {
    **{name: {"sliding_window": WINDOWS.get(name, 0)} for name in MASKS if name != "causal"},
    "bidirectional": {"sliding_window": 7},
    "causal_by_sequence": {"causal_seqs": (0, 1, 0), "sliding_window": 4},
    "ranges": {"mm_prefix_range": ((2, 23), (9, 15), (0, 0)), "sliding_window": 3},
    "tree": {"tree_parents": (0, 0, 1, 1, 2, 3, 3, 4)},
}


@pytest.mark.parametrize("mask", CALLS)
def test_the_function_sees_what_the_call_says(mask):
    case = CASE.replace(mask=mask, fill="all_rows", backend="model", **LENGTHS, **CALLS[mask])
    assert has_script(case)
    call = Lab().call(case)
    facts = {**mask_facts(call), "sliding_window": case.sliding_window}
    names = {"torch": torch, "ctx_lens": LENGTHS["ctx_lens"], "seq_lens": call.seq_lens.tolist()}
    data = "\n".join(f"{name} = {text}" for name, text in facts["mask_data"].items())
    exec(f"{data}\n{render('mask.py.j2', facts)}", names)
    for seq in range(3):
        whole = mask_of(call, seq)
        expected = whole.visible(torch.arange(whole.ctx_len, whole.seq_len))
        assert torch.equal(names["visible"](seq), expected)


def test_a_tensor_as_text():
    given = torch.tensor([[0.5, -torch.inf], [torch.inf, 1.0]])
    assert torch.equal(eval(tensor_text(given), {"torch": torch}), given)


def test_a_causal_call_has_no_mask():
    assert mask_facts(Lab().call(CASE))["mask"] is None
