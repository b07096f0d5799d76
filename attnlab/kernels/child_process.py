"""End a child process when its parent ends, however the parent ends."""

import ctypes
import os
import signal
import sys
import threading
import time

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


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL_S)
    os._exit(1)
