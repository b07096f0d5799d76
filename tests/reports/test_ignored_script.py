"""Scripts of masks that an op ignores with an INT4 cache."""

from pathlib import Path

import pytest
from helpers.sources import needs_triton, of_release
from helpers.upstream import script_outcome, written

from attnlab.case.case import Case

pytestmark = [needs_triton, pytest.mark.releases]
CASE = Case(
    op="unified_attention",
    backend="vllm",
    op_argument="int4_per_token_head",
    num_heads=1,
    head_size=32,
    query_lens=(1,),
    ctx_lens=(4,),
    sliding_window=2,
    fill="all_rows",
)
# By mask: the argument that carries it.
MASKS = {
    "ranges_in_window": "mm_prefix_clamp_sliding_window",
    "prefix_and_window": "rswa_prefix_lens",
    "chunks": "chunk_lookback",
}


@pytest.mark.parametrize("mask", MASKS)
def test_0_33_0_ignores_the_argument(tmp_path: Path, mask: str) -> None:
    script = written(tmp_path, CASE.replace(mask=mask), "wrong_output")
    code, text = script_outcome(script, of_release("0.33.0"))
    assert code == 1, text
    assert f"{MASKS[mask]} changes nothing" in text


@pytest.mark.parametrize("mask", MASKS)
def test_an_op_that_uses_the_argument_passes(tmp_path: Path, mask: str) -> None:
    """The op is replaced by one that uses the argument: the script sees another output."""
    script = written(tmp_path, CASE.replace(mask=mask), "wrong_output")
    text = script.read_text()
    call = "unified_attention(**given)"
    assert text.count(call) == 1
    used = f'given["out"] += int(given["{MASKS[mask]}"] is arguments["{MASKS[mask]}"])'
    script.write_text(text.replace(call, f"{call}\n    {used}"))
    code, printed = script_outcome(script, of_release("0.33.0"))
    assert code == 0, printed


def test_a_release_without_the_argument_cannot_tell(tmp_path: Path) -> None:
    script = written(tmp_path, CASE.replace(mask="chunks"), "wrong_output")
    code, text = script_outcome(script, of_release("0.11.2"))
    assert code == 2
    assert "no argument" in text
