"""The starts of a capture in a process, and the command that is captured.

vLLM calls :func:`activate` in every process that it starts, some of them twice: it is the entry point of the
group ``vllm.general_plugins``. For another library, each Python process that the command starts runs
``site/sitecustomize.py``, which calls :func:`activate_library`. Without the environment variable, nothing is
imported and nothing happens.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from attnlab.case.errors import InvalidCase
from attnlab.case.output_file import make_output_folder, write_text
from attnlab.library.op import Op, ops_of
from attnlab.recorder.patches import Function, Patches, by_module
from attnlab.serving.settings import SETTINGS, CaptureSettings

if TYPE_CHECKING:
    from attnlab.serving.library_calls import LibrarySession

VARIABLE = "ATTNLAB_CAPTURE"
NAME = "attnlab"  # of the entry point; VLLM_PLUGINS must have it if that is set


def activate() -> None:
    """Start the capture if ``ATTNLAB_CAPTURE`` has its settings; never raise."""
    settings = os.environ.get(VARIABLE)
    if not settings:
        return
    try:
        from attnlab.serving.start import start

        start(settings)
    except Exception as error:  # the server must start in any case
        import logging

        text = " ".join(str(error).split())
        log = logging.getLogger("attnlab.serving")
        log.warning("attnlab captures nothing: %s: %s", type(error).__name__, text)


def activate_library() -> None:
    """Wrap the ops of the library of ``ATTNLAB_CAPTURE`` when their modules are imported; never raise.

    Nothing of torch is imported before the first of these modules is.
    """
    settings = os.environ.get(VARIABLE)
    if not settings or _wrapped:
        return
    try:
        found = CaptureSettings.of_text(settings)
        if found.library is not None:
            _wrapped.append(patches_of(found, found.library))
            _wrapped[0].install()
    except Exception as error:  # the program must start in any case
        print(f"attnlab captures nothing: {type(error).__name__}: {error}", file=sys.stderr)


_wrapped: list[Patches] = []


def patches_of(settings: CaptureSettings, library: str) -> Patches:
    """Return the wrappers of a library's attention ops; each starts the capture of its process if needed."""
    records = dict[tuple[str, str], list[Op]]()
    for op in ops_of(library):
        for module in op.import_names if op.scores else ():
            records.setdefault((module, op.function), []).append(op)
    sessions: list[LibrarySession] = []

    def wrap(module: str, name: str, original: Function) -> Function | None:
        try:
            from attnlab.serving.library_calls import LibrarySession

            if not sessions:
                sessions.append(LibrarySession(settings))
            return sessions[0].wrapper(records[module, name], module, original)
        except Exception as error:
            print(f"attnlab does not check {module}.{name}: {error}", file=sys.stderr)
            return None

    return Patches(by_module(records), wrap)


SITE = Path(__file__).parent / "site"
_PASSED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT")


def run_command(command: Sequence[str], settings: CaptureSettings, *, to_stderr: bool) -> int:
    """Run a command, and return its exit code: 128 + n if signal n ended it.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on, except a SIGINT that the terminal sends to
    the command, too. An end by a signal that was passed on counts as 0. ``to_stderr``: write the command's
    standard output to standard error. Raises InvalidCase if the command or the folder cannot be used.
    """
    folder = Path(settings.out)
    make_output_folder(folder, "out")
    if any(folder.glob("*.jsonl")):
        raise InvalidCase(f"out must be a folder without records, got {folder}")
    file = folder.resolve() / SETTINGS
    write_text(file, settings.to_json() + "\n")
    environment = {**os.environ, VARIABLE: str(file)}
    plugins = environment.get("VLLM_PLUGINS")
    if settings.library is not None:
        paths = [str(SITE), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    elif plugins is not None and NAME not in plugins.split(","):
        environment["VLLM_PLUGINS"] = f"{plugins},{NAME}".lstrip(",")
    try:
        child = subprocess.Popen(
            list(command), env=environment, stdout=sys.stderr.fileno() if to_stderr else None
        )
    except OSError as error:
        raise InvalidCase(f"{command[0]} must be a command: {error.strerror}") from error
    return _waited(child)


def _waited(child: "subprocess.Popen[bytes]") -> int:
    """Wait for a child; pass signals on."""
    passed: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        if number != signal.SIGINT or not _has_terminal():
            child.send_signal(number)

    from attnlab.tasks.run import handling

    with handling(_PASSED, pass_on):
        code = child.wait()
    if code < 0:
        code = 0 if -code in passed else 128 - code
    elif code > 128 and code - 128 in passed:
        code = 0
    return code


def _has_terminal() -> bool:
    """Answer whether the terminal sends its signals to this process and to the command."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
