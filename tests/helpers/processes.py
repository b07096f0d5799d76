"""Processes: start a command, find the processes that descend from it, and wait for their end."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def is_running(process: int) -> bool:
    """Return whether a process runs; one that ended and was not yet collected does not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def descendants(process: int) -> set[int]:
    """Return the children of a process, their children, and so on."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found, new = set[int](), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def wait_for(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Wait until a condition is true; fail after ``limit_s``."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def survivors(processes: Iterable[int], limit_s: float = 30.0) -> list[int]:
    """Return which processes still run after ``limit_s``, and kill them; a busy machine ends them late."""
    processes = list(processes)
    end = time.monotonic() + limit_s
    while any(map(is_running, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    found = [process for process in processes if is_running(process)]
    for process in found:
        os.kill(process, 9)
    return found


def popen(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command with the default actions of SIGINT and SIGHUP.

    A test runner in the background of a shell, or under nohup, ignores them, and its children inherit that.
    """
    return subprocess.Popen(command, preexec_fn=_default_signals, **options)


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def in_copy(main: Callable[[], int], folder: Path) -> tuple[int, str]:
    """Call a function in a folder, in a copy of this process; return its exit code, and what it printed.

    A new process needs seconds to import torch. The copy has imported no more than Python's modules,
    installed packages and this checkout.
    """
    with tempfile.TemporaryFile("w+") as printed:
        process = os.fork()
        if process == 0:
            code = 70
            try:
                _leave_tests(folder, printed.fileno())
                code = main()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(process, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read()


def _leave_tests(folder: Path, output: int) -> None:
    """Print to a file, import from a folder, and forget the modules and warning filters of tests."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = map(os.fdopen, (1, 2), "ww")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if not _is_installed(name.partition(".")[0])]:
        del sys.modules[name]
    warnings.resetwarnings()


def _is_installed(package: str) -> bool:
    """Answer whether a top-level module is of Python, an installed package or this checkout."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    places = (sys.prefix, sys.base_prefix, str(ROOT))
    return package in {*sys.stdlib_module_names, "__main__", "__mp_main__"} or file.startswith(
        places
    )
