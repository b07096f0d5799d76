"""A missing optional package is reported with the extra that installs it."""

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
sys.exit(main({arguments!r}))
"""
HIDDEN = tuple(EXTRAS)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run attnlab in a process without the packages of the extras."""
    code = HIDE.format(hidden=HIDDEN, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


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


@pytest.mark.parametrize("command", ["explain", "run", "diagnose", "power"])
def test_a_command_runs_without_extras(command: str) -> None:
    done = run(command, *CASE, "--json")
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.startswith("{")
    assert done.stderr == ""


def test_investigate_names_its_extra() -> None:
    done = run("investigate", "01")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "attnlab[lab]" in done.stderr
