"""The X-ray of a Case with a mask expects the keys of the mask, and the models have them."""

import pytest

import attnlab
from attnlab.case.case import Case
from attnlab.weights.plan import right_keys
from attnlab.weights.xray import XRay


def masked(mask: str, **changes: object) -> XRay:
    """Return the X-ray of a small Case with a mask."""
    case = Case(
        op="unified_attention",
        mask=mask,
        query_lens=(5,),
        ctx_lens=(12,),
        num_heads=1,
        head_size=16,
        block_size=16,
        distribution="normal",
        platform="sm_90",
        fill="all_rows",
    )
    return attnlab.xray(case.replace(**changes), confirm=False)


@pytest.mark.parametrize("mask", ["bidirectional", "ranges", "tree"])
def test_the_models_are_right(mask):
    """And the expected keys are those of the mask, not those of causal attention."""
    found, causal = masked(mask), masked("causal")
    assert found.status == "right"
    assert not right_keys(found.setup).equal(right_keys(causal.setup))
