"""The plot of a mask draws what each row sees."""

import numpy as np
import pytest
import torch

import attnlab
from attnlab.case.case import Case
from attnlab.case.masks import MASKS
from attnlab.show.plots.weights import BIASED, FUTURE, HIDDEN, VISIBLE
from attnlab.tensors.case_visibility import longest_mask


@pytest.mark.parametrize("mask", list(MASKS))
def test_every_cell_is_that_of_the_mask(mask):
    case = Case(
        op="unified_attention",
        mask=mask,
        sliding_window=6,
        query_lens=(2, 11),
        ctx_lens=(5, 9),
        num_heads=1,
    )
    ax = attnlab.plot(case)
    (image,) = ax.images
    codes = np.ma.getdata(image.get_array())
    one = longest_mask(case)
    assert (one.seq, codes.shape) == (1, (11, 20))
    assert np.array_equal(codes != HIDDEN, one.visible(torch.arange(9, 20)).numpy())
    after = np.arange(20) > np.arange(9, 20)[:, None]
    assert not after[codes == VISIBLE].any()
    assert after[codes == FUTURE].all()
    has_future = mask in ("bidirectional", "causal_by_sequence", "ranges", "ranges_in_window")
    assert bool((codes == FUTURE).any()) == has_future
    assert bool((codes == BIASED).any()) == (mask == "tree")
    assert "sequence 1" in ax.get_title()
