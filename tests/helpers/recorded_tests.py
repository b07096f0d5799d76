"""Run pytest with the plugin in a process of its own, and read what it reported."""

import importlib.metadata
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def plugin_arguments() -> list[str]:
    """Return how to load the plugin: not at all if this attnlab is installed with its entry point."""
    points = importlib.metadata.entry_points(group="pytest11", name="attnlab")
    return [] if list(points) else ["-p", "attnlab.recorder.pytest_plugin"]


def pytest_in(folder: Path, *options: str, code: int = 1) -> str:
    """Run pytest in a process of its own; return what it prints."""
    command = [sys.executable, "-m", "pytest", *plugin_arguments(), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--junitxml=junit.xml", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def properties(folder: Path) -> dict[str, dict[str, str]]:
    """Return each test's JUnit properties."""
    found = {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        found[str(case.get("name"))] = {
            str(p.get("name")): str(p.get("value")) for p in case.iter("property")
        }
    return found
