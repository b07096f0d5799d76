"""Scripts of Cases with an op argument, and of merges."""

from pathlib import Path

import pytest
from helpers.sources import needs_triton, of_release
from helpers.triton_example import CASE
from helpers.upstream import script_outcome, written

from attnlab.case.case import Case

pytestmark = [needs_triton, pytest.mark.releases]
MERGED = {"op": "merge_attn_states", "query_lens": (1, 2), "ctx_lens": (20, 5), "num_blocks": None}
ENCODER = {
    "op": "triton_prefill_attention",
    "backend": "vllm",
    "query_lens": (2,),
    "ctx_lens": (0,),
    "fill": "all_rows",
    "num_blocks": None,
}


def outcome(folder: Path, case: Case) -> int:
    """Return the exit code of the script of a Case on 0.33.0."""
    script = written(folder, case, "wrong_output")
    code, text = script_outcome(script, of_release("0.33.0"))
    assert code in (0, 1, 2), text
    return code


def test_a_merge(tmp_path: Path) -> None:
    """A merge is right."""
    assert outcome(tmp_path, CASE.replace(backend="vllm", **MERGED)) == 0


def test_an_encoder(tmp_path: Path) -> None:
    """0.33.0 loses a window of one token."""
    case = CASE.replace(**ENCODER)
    assert outcome(tmp_path / "two", case.replace(sliding_window=2)) == 0
    assert outcome(tmp_path / "one", case.replace(sliding_window=1)) == 1


def test_tensor_descriptors(tmp_path: Path) -> None:
    """NaN after the end of a sequence reaches the output of 0.33.0; zeros there do not change it."""
    fields = {
        "backend": "vllm",
        "op": "unified_attention",
        "op_argument": "tensor_descriptors",
        "fill": "all_rows",
    }
    case = CASE.replace(**fields, query_lens=(1,), ctx_lens=(1,), num_blocks=None)
    assert outcome(tmp_path / "nan", case) == 1
    assert outcome(tmp_path / "zeros", case.replace(empty_slots="zeros")) == 0
