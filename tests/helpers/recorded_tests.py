"""Run pytest with the plugin in another process, and read what it reported."""

import importlib.metadata
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from helpers.processes import in_copy


def plugin_arguments() -> list[str]:
    """Return how to load the plugin: not at all if this attnlab is installed with its entry point."""
    points = importlib.metadata.entry_points(group="pytest11", name="attnlab")
    return [] if list(points) else ["-p", "attnlab.recorder.pytest_plugin"]


def pytest_in(folder: Path, *options: str, code: int = 1, fresh: bool = False) -> str:
    """Run pytest in a folder; return what it prints.

    It runs in a copy of this process, which has imported torch, or in a ``fresh`` one, as users start it.
    """
    words = [*plugin_arguments(), "-p", "no:cacheprovider", "--junitxml=junit.xml", *options]
    if fresh:
        command = [sys.executable, "-m", "pytest", *words]
        done = subprocess.run(command, cwd=folder, stdout=-1, stderr=subprocess.STDOUT, text=True)
        ended, printed = done.returncode, done.stdout
    else:
        ended, printed = in_copy(lambda: int(pytest.main(words)), folder)
    assert ended == code, printed
    return printed


def properties(folder: Path) -> dict[str, dict[str, str]]:
    """Return each test's JUnit properties."""
    found = {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        found[str(case.get("name"))] = {
            str(p.get("name")): str(p.get("value")) for p in case.iter("property")
        }
    return found
