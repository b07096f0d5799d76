"""Contain a user's code: it cannot end attnlab, and its exceptions name the line of the user's file.

``sys.exit``, ``os._exit`` and a KeyboardInterrupt that the code raises itself become UserCodeFailed. Ctrl-C
still interrupts.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn


class UserCodeFailed(Exception):
    """A user's code tried to end the process; the text says how."""


class _Exit(BaseException):
    """Replaces the end of the process by os._exit."""


@contextmanager
def contained() -> Iterator[None]:
    """Run a user's code; raise UserCodeFailed if it tries to end the process."""
    with _noted_interrupt() as interrupted, _no_exit():
        try:
            yield
        except SystemExit as error:
            raise UserCodeFailed(f"SystemExit: {error.code}") from error
        except _Exit as error:
            raise UserCodeFailed(str(error)) from error
        except KeyboardInterrupt as error:
            if interrupted.is_set():
                raise
            raise UserCodeFailed("KeyboardInterrupt") from error


@contextmanager
def _noted_interrupt() -> Iterator[threading.Event]:
    """Yield an event that is set if the user presses Ctrl-C while the block runs."""
    interrupted = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupted  # the signal does not raise KeyboardInterrupt in this thread
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _no_exit() -> Iterator[None]:
    """Let os._exit raise in this process; child processes still end."""
    real, process = os._exit, os.getpid()

    def refused(status: int) -> NoReturn:
        if os.getpid() != process:
            real(status)
        raise _Exit(f"os._exit({status})")

    os._exit = refused
    try:
        yield
    finally:
        os._exit = real


def text_of(error: BaseException, file: str | None) -> str:
    """Return an exception in one line, as "mine.py:12: ValueError: text".

    The line is the last one in ``file``, or in a file of the same folder, that was running.
    """
    own = isinstance(error, UserCodeFailed)
    text = " ".join(str(error).split())
    text = text if own else f"{type(error).__name__}: {text}".removesuffix(": ")
    traced = error.__cause__ if own and error.__cause__ is not None else error
    return f"{_line_of(traced, file)}{text}"


def _line_of(error: BaseException, file: str | None) -> str:
    """Return "mine.py:12: ", or "" if no frame of the exception is in the folder of ``file``."""
    if file is None:
        return ""
    folder, found = Path(file).resolve().parent, ""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{Path(error.filename).name}:{error.lineno}: "
    trace = error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.resolve().parent == folder:
            found = f"{path.name}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return found
