"""Run pytest with the plugin in another process, and read what it reported."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]


def plugin_arguments() -> list[str]:
    """Return how to load the plugin: not at all if this attnlab is installed with its entry point."""
    points = importlib.metadata.entry_points(group="pytest11", name="attnlab")
    return [] if list(points) else ["-p", "attnlab.recorder.pytest_plugin"]


def pytest_in(folder: Path, *options: str, code: int = 1, fresh: bool = False) -> str:
    """Run pytest in a folder; return what it prints.

    It runs in a copy of this process, which has imported torch, or in a ``fresh`` one, as users start it.
    """
    words = [*plugin_arguments(), "-p", "no:cacheprovider", "--junitxml=junit.xml", *options]
    with tempfile.TemporaryFile("w+") as printed:
        if fresh:
            command = [sys.executable, "-m", "pytest", *words]
            ended = subprocess.run(command, cwd=folder, stdout=printed, stderr=printed).returncode
        else:
            process = os.fork()
            if process == 0:
                _run_in_copy(folder, words, printed.fileno())
            ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        printed.seek(0)
        text = printed.read()
    assert ended == code, text
    return text


def _run_in_copy(folder: Path, words: list[str], output: int) -> NoReturn:
    """Run pytest as in a process that has imported installed packages and attnlab alone, and end."""
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = map(os.fdopen, (1, 2), "ww")
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        for name in [name for name in sys.modules if not _is_installed(name.partition(".")[0])]:
            del sys.modules[name]
        warnings.resetwarnings()
        code = int(pytest.main(words))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _is_installed(package: str) -> bool:
    """Answer whether a top-level module is of Python, an installed package or this checkout."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    places = (sys.prefix, sys.base_prefix, str(ROOT))
    return package in {*sys.stdlib_module_names, "__main__", "__mp_main__"} or file.startswith(
        places
    )


def properties(folder: Path) -> dict[str, dict[str, str]]:
    """Return each test's JUnit properties."""
    found = {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        found[str(case.get("name"))] = {
            str(p.get("name")): str(p.get("value")) for p in case.iter("property")
        }
    return found
