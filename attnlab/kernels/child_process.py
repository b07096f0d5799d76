"""End a child process when its parent ends, however the parent ends.

python child_process.py PARENT COMMAND…   run a command that ends with the process PARENT
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

# A forked child could not use a GPU that its parent uses, nor torch's threads.
START_METHOD = "spawn"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_INTERVAL_S = 0.5


def end_with_parent(parent: int) -> None:
    """Kill this process as soon as the process ``parent`` has ended. Call it first in the child.

    On Linux the kernel sends SIGKILL, also while native code runs. Elsewhere a thread checks the parent
    every half second. The parent's *thread* that started the child must live as long as the child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the request
        os._exit(1)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` and ends with this process, from its start on.

    Only on Linux, where the request to the kernel outlives exec; elsewhere ``command`` itself.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), str(os.getpid()), *command]


def start_context() -> Any:
    """Return the multiprocessing context whose processes run :func:`run_in_child`."""
    return multiprocessing.get_context(START_METHOD)


def run_in_child(job: bytes, sender: Any) -> None:
    """Run a pickled (function, arguments) as the target of a multiprocessing child that ends with its parent.

    The function gets ``sender``, then the arguments. They are restored after the request to end, because
    that may take seconds.
    """
    parent = multiprocessing.parent_process()
    end_with_parent(os.getppid() if parent is None or parent.pid is None else parent.pid)
    function, arguments = pickle.loads(job)
    function(sender, *arguments)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL_S)
    os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
