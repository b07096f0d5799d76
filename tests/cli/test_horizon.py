"""The command ``attnlab horizon``: exit codes, JSON, the page, and bad input."""

import json
import re
from pathlib import Path

import pytest

from attnlab.cli.main import main

KERNELS = str(Path(__file__).parent.parent / "horizon" / "kernels.py")
LAUNCH = """
[row_product]
sizes = { tokens = 100, seqs = 1 }
grid = ["tokens"]
sweep = ["tokens"]
[row_product.arguments]
x = "float16[tokens, 4096]"
stride = "x.stride(0)"
WIDTH = 16
"""
WRONG_AT = 2**31 // 4096 + 1


@pytest.fixture
def launch(tmp_path: Path) -> str:
    (tmp_path / "launch.toml").write_text(LAUNCH)
    return str(tmp_path / "launch.toml")


def test_json_and_exit_codes(launch: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["horizon", KERNELS, "--kernel", "row_product", "--launch", launch, "--json"]
    assert main([*command, "--batched-tokens", str(WRONG_AT)]) == 1
    (row,) = json.loads(capsys.readouterr().out)["reached"]
    assert (row["size"], row["wrong_at"], row["margin"]) == ("tokens", WRONG_AT, 1.0)
    assert row["expression"] == "row * stride"
    assert main([*command, "--batched-tokens", str(WRONG_AT - 1)]) == 0
    assert main(command) == 0
    capsys.readouterr()
    assert main(["horizon", KERNELS, "--kernel", "not_here"]) == 3
    assert "no_such_function" in capsys.readouterr().out


def test_the_page(launch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    command = ["horizon", KERNELS, "--kernel", "row_product", "--launch", launch]
    assert main([*command, "--deployment", "phi-4", "--html", str(page)]) == 0
    assert f"{WRONG_AT:,}" in capsys.readouterr().out
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "row * stride" in text
    assert re.search(r"src=\"http", text) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--deployment", "none-such"], "deployment must be a TOML file or one of Llama-3.1-8B"),
        (["--heads", "30"], "heads must be a multiple of kv_heads 8, got 30"),
        (["--layers", "0"], "layers must be an int of at least 1, got 0"),
        (["--op", "no kernel"], "op must be part of the path or name"),
        (["--op", "a", "--kernel", "b"], "op and kernel must not both be given"),
        (["--html", "page.txt"], "html"),
    ],
)
def test_bad_input(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horizon", KERNELS, *flags]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horizon", "--deployment", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert all("/" in line.split(maxsplit=1)[1] for line in lines)  # each with its source
    assert main(["horizon"]) == 2
    assert "source must be given" in capsys.readouterr().err
