"""Run code in a copy of this process, which has its imports already: torch and Triton take seconds."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from tempfile import TemporaryFile


def outcome_of(run: Callable[[], object]) -> tuple[int, str]:
    """Run a function in a copy of this process; return its exit code and what it prints.

    The code is that of sys.exit, 0 without it, and 1 after any other exception. Whatever the function
    changes, such as sys.modules, stays in the copy.
    """
    with TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
            child = os.fork()
        if not child:
            _run(run, file.fileno())
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return os.waitstatus_to_exitcode(status), file.read().decode()


def _run(run: Callable[[], object], file: int) -> None:
    """Run the function with both streams in a file, and end this process."""
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(file, stream)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        warnings.simplefilter("ignore")
        try:
            run()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
    finally:
        os._exit(code)
