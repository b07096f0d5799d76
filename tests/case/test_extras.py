"""A missing optional package is reported with the extra that installs it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attnlab.case.errors import EXTRAS, Unavailable, named_extra

ROOT = Path(__file__).parent.parent.parent
HIDE = """
import sys
sys.modules.update(dict.fromkeys({hidden!r}))  # an import of these fails as if they were not installed
from attnlab.cli.main import main
for arguments in {commands!r}:
    print(main(arguments))
"""
HIDDEN = tuple(EXTRAS)


def run(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run commands in a process without the packages of the extras; the exit code of each is printed."""
    code = HIDE.format(hidden=HIDDEN, commands=commands)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_an_extra_is_named() -> None:
    with (
        pytest.raises(Unavailable, match=r"x needs the extra lab: pip install 'attnlab\[lab\]'"),
        named_extra("x"),
    ):
        raise ModuleNotFoundError("no", name="matplotlib.pyplot")


def test_another_missing_module_is_an_error_of_its_own() -> None:
    with pytest.raises(ModuleNotFoundError), named_extra("x"):
        raise ModuleNotFoundError("no", name="matplotlib_of_another")


def test_every_extra_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*EXTRAS.values()} <= {*project["optional-dependencies"]}


CASE = ("--num-heads", "2", "--head-size", "64", "--query-lens", "3,1", "--ctx-lens", "2,5")


def test_commands_run_without_extras() -> None:
    done = run(*([name, *CASE, "--json"] for name in ("explain", "run", "diagnose", "power")))
    assert done.stderr == ""
    documents = re.findall(r"^(\{.*?^\})\n(\d)$", done.stdout, re.MULTILINE | re.DOTALL)
    assert [code in "01" for _, code in documents] == [True] * 4


def test_investigate_names_its_extra() -> None:
    done = run(["investigate", "01"])
    assert done.stdout == "2\n"
    assert len(done.stderr.splitlines()) == 1
    assert "attnlab[lab]" in done.stderr
