"""Scripts of Cases with an op argument, and of merges."""

import re
from pathlib import Path

import pytest
from helpers.sources import needs_triton, of_release
from helpers.triton_example import CASE
from helpers.upstream import script_outcome, written

from attnlab.case.case import Case
from attnlab.kernels.vllm.backend import load
from attnlab.kernels.vllm.source import Source

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
FAR = {
    "backend": "vllm",
    "op": "context_attention_fwd",
    "op_argument": "far_rows",
    "query_lens": (4,),
}


def patched(source: Source):
    """Return the ops on the interpreter with attnlab's patches, which computes int32 as a GPU does."""
    return load(source, CASE.machine, "cpu")


def outcome(folder: Path, case: Case, is_on_a_gpu: bool = False) -> int:
    """Return the exit code of the script of a Case on 0.33.0.

    ``is_on_a_gpu``: with int32 as on a GPU, and without the check that there is one.
    """
    script = written(folder, case, "wrong_output")
    if is_on_a_gpu:
        check = re.compile(
            'if device == "cpu":\\n    print\\("cannot tell.*?sys.exit\\(2\\)\\n', re.DOTALL
        )
        text, count = check.subn("", script.read_text())
        assert count == 1
        script.write_text(text)
    source = of_release("0.33.0")
    code, text = script_outcome(script, source, *([patched] if is_on_a_gpu else []))
    assert code in (0, 1, 2), text
    return code


def test_a_merge(tmp_path: Path) -> None:
    """A merge is right. With rows beyond 2^31 elements it is wrong, which takes a GPU to see."""
    case = CASE.replace(backend="vllm", **MERGED)
    far = case.replace(op_argument="far_rows")
    assert outcome(tmp_path / "right", case) == 0
    assert outcome(tmp_path / "far", far) == 2
    assert outcome(tmp_path / "gpu", far, is_on_a_gpu=True) == 1
    heads = far.replace(op_argument="far_dim_1")
    assert outcome(tmp_path / "heads", heads, is_on_a_gpu=True) == 1


def test_an_encoder(tmp_path: Path) -> None:
    """0.33.0 loses a window of one token, and computes the offsets of rows and heads in int32."""
    case = CASE.replace(**ENCODER)
    assert outcome(tmp_path / "two", case.replace(sliding_window=2)) == 0
    assert outcome(tmp_path / "one", case.replace(sliding_window=1)) == 1
    for name in ("far_rows", "far_dim_1"):
        far = case.replace(op_argument=name, query_lens=(4,), head_size=32)
        assert outcome(tmp_path / name, far, is_on_a_gpu=True) == 1


@pytest.mark.parametrize(("name", "code"), [("far_dim_1", 0), ("far_dim_3", 1)])
def test_a_far_dimension(tmp_path: Path, name: str, code: int) -> None:
    """unified_attention of 0.33.0 computes the offset of an element in int32, but not that of a head."""
    case = CASE.replace(
        backend="vllm", op="unified_attention", op_argument=name, fill="all_rows", num_blocks=None
    )
    assert outcome(tmp_path, case, is_on_a_gpu=True) == code


def test_far_rows(tmp_path: Path) -> None:
    """0.33.0's prefill kernel computes the offset of a row in int32."""
    case = CASE.replace(fill="all_rows", num_blocks=None, **{**FAR, "ctx_lens": (0,)})
    assert outcome(tmp_path / "far", case) == 2
    assert outcome(tmp_path / "gpu", case, is_on_a_gpu=True) == 1


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
