"""Where findings are in source code."""

from pathlib import Path

import pytest

from attnlab.checker.locations import Location, location_of, op_locations
from attnlab.kernels import find_backend

UNIFIED = "unified_attention"
FILE = """
import math

def helper():
    pass

def unified_attention(q):
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm" / "v1" / "attention" / "ops"
    folder.mkdir(parents=True)
    (folder / "triton_unified_attention.py").write_text(FILE)
    return tmp_path


def test_an_op_is_at_its_definition(checkout: Path) -> None:
    """Relative to the root of the source; ops that the release does not have are left out."""
    found = op_locations(find_backend("vllm", checkout, "cpu"))
    file = "vllm/v1/attention/ops/triton_unified_attention.py"
    assert found == {UNIFIED: Location(file=file, line=7)}
    assert op_locations(find_backend("model")) == {}


def test_a_kernel_of_a_user_is_at_its_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the folder where the command runs, as a CI job shows it."""
    kernel = "def kernel(call):\n    pass\n\n\nkernel.op = 'unified_attention'\n"
    (tmp_path / "mine.py").write_text(f"\n\n{kernel}")
    monkeypatch.chdir(tmp_path)
    found = op_locations(find_backend("mine.py:kernel"))
    assert found == {UNIFIED: Location(file="mine.py", line=3)}


def test_evidence_names_a_line() -> None:
    """In the folder of the op. Without a line, or for an op without a file, it is the op's or none."""
    ops = {UNIFIED: Location(file="a/b/op.py", line=7)}
    lines = {
        "kernels.py:12 reads 4 bytes before out": Location(file="a/b/kernels.py", line=12),
        "op.py:30 multiplies in int32: 1 × 2 = 3": Location(file="a/b/op.py", line=30),
        "rows [1, 2] differ at 3:4": ops[UNIFIED],
    }
    for evidence, location in lines.items():
        assert location_of(UNIFIED, evidence, ops) == location
    assert location_of("merge_attn_states", "op.py:3 reads", ops) is None
