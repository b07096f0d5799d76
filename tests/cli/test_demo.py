"""The command ``attnlab demo``: its kernel is right, and the fault that it plants is found."""

import importlib.util
import json
from pathlib import Path

import pytest

import attnlab
from attnlab.cli import demo
from attnlab.cli.main import main

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="interprets the kernel with Triton"
)


def test_the_fault_is_one_expression_of_one_line(tmp_path: Path) -> None:
    file, line = demo.plant(tmp_path)
    right, wrong = (path.read_text().splitlines() for path in (demo.KERNEL, file))
    assert [n for n, (a, b) in enumerate(zip(right, wrong, strict=True), 1) if a != b] == [line]


@needs_triton
def test_the_kernel_is_right_and_the_planted_one_is_not(tmp_path: Path) -> None:
    """Also with lengths of several tiles, and with blocks that are no tile."""
    file, _ = demo.plant(tmp_path)
    kernel = tmp_path / "right.py"
    kernel.write_text(demo.KERNEL.read_text())
    sizes = {"query_lens": (20, 1, 3), "ctx_lens": (0, 70, 31), "block_size": 8, "num_heads": 6}
    case = attnlab.Case(**{**demo._CASE, **sizes, "num_queries_per_kv": 3})
    outcomes = [
        attnlab.run(case, backend=f"{path}:paged_attention").status for path in (kernel, file)
    ]
    assert outcomes == ["match", "mismatch"]


@needs_triton
@pytest.mark.slow
def test_the_demo_finds_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["found"]
    assert f"line {found['line']}" in (tmp_path / "page.html").read_text()
