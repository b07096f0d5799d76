"""Notebook kernels as forks of one process that has imported torch, matplotlib and attnlab.

Each kernel would otherwise import them again, which takes 2.7 s of processor time.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from typing import IO, Any, cast

from attnlab.kernels.child_process import end_with_parent

# None of them uses a GPU or starts a thread when it is imported.
_IMPORTED = (
    "torch",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "attnlab.lab.lab",
    "attnlab.lab.stage_table",
    "attnlab.show.notebook",
    "attnlab.study.claims",
    "attnlab.study.html_table",
    "attnlab.study.incident",
    "attnlab.study.predictions",
    "attnlab.study.set_up",
)
_LAUNCH = ("-m", "ipykernel_launcher", "-f")


class ForkedKernel:
    """The process of a kernel, with what jupyter_client uses of :class:`subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        """Keep a process that has started."""
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """Return how the process ended, as Popen does; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """Wait until the process has ended; return how."""
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process."""
        self.send_signal(signal.SIGKILL)


def start_fork_server(environment: Mapping[str, str]) -> bool:
    """Start the process that kernels are forked from; return False if there can be none here.

    Only the main thread starts it, because it ends with its thread, and it stays until this process ends.
    ``environment``: variables of the process, unless this process has others. Some, such as those of
    malloc, count only when a process starts.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if sys.platform != "linux" or not is_main:
        return False
    added = {name: text for name, text in environment.items() if name not in os.environ}
    os.environ.update(added)
    try:
        forkserver.set_forkserver_preload(list(_IMPORTED))
        forkserver.ensure_running()
    finally:
        for name in added:
            del os.environ[name]
    return True


def can_fork(command: Sequence[str]) -> bool:
    """Return whether a command starts ipykernel with this Python, without an option of Python."""
    return tuple(command[:4]) == (sys.executable, *_LAUNCH)


def fork_kernel(
    command: Sequence[str], environment: Mapping[str, str], folder: str | None, words: IO[bytes]
) -> ForkedKernel:
    """Start the kernel of a command that can fork, in ``folder``.

    What it writes to its own stdout and stderr goes to ``words``.
    """
    context = multiprocessing.get_context("forkserver")
    kernel = _Kernel(list(command[3:]), dict(environment), folder, words.fileno())
    process = context.Process(target=kernel)
    process.start()
    return ForkedKernel(process)


class _Kernel:
    """What a forked process runs; the file descriptor is duplicated when it is sent there."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], folder: str | None, words: int
    ) -> None:
        self._given = (arguments, environment, folder)
        self._words: Any = words

    def __getstate__(self) -> tuple[Any, Any]:
        return self._given, DupFd(self._words)

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self._given, self._words = state[0], state[1].detach()

    def __call__(self) -> None:
        arguments, environment, folder = self._given
        # The fork server ends with the process that started it, unless a child keeps its pipe open.
        os.close(vars(forkserver)["_forkserver"]._forkserver_alive_fd)
        end_with_parent(os.getppid())
        tracker: Any = vars(resource_tracker)["_resource_tracker"]
        tracker._fd = tracker._pid = None  # its semaphores are tracked by a process of its own
        os.setsid()
        for number in (1, 2):
            os.dup2(self._words, number)
        os.environ.clear()
        os.environ.update(environment)
        if folder:
            os.chdir(folder)
        _run_kernel(arguments)


def _run_kernel(arguments: list[str]) -> None:
    """Run ipykernel in this process, as ``python -m ipykernel_launcher`` does."""
    import torch
    from ipykernel.kernelapp import launch_new_instance

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():  # torch has read the fork server's variable
        torch.set_num_threads(int(threads))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    # ipykernel read its default, an environment variable, in the fork server.
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"
    sys.argv = ["ipykernel_launcher", *arguments, parent]
    cast(Any, launch_new_instance)()
