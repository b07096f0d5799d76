"""The kernel manager of a notebook that runs headless, and how its kernel ended."""

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from attnlab.kernels.child_process import ending_with_parent
from attnlab.reports.forked_kernels import can_fork, fork_kernel

SIGNALS = {
    "SIGKILL": "killed from outside, possibly for lack of memory",
    "SIGSEGV": "segmentation fault",
    "SIGABRT": "aborted",
}


@dataclass(slots=True)
class Ended:
    """Hold how the process of a kernel ended: ``code`` is its exit code, or minus the signal's number."""

    code: int | None = None

    @property
    def text(self) -> str:
        """Return the code or signal in brackets, or "" if it is unknown."""
        if self.code is None:
            return ""
        if self.code >= 0:
            return f" (exit code {self.code})"
        name = signal.Signals(-self.code).name
        return f" ({name}: {SIGNALS[name]})" if name in SIGNALS else f" ({name})"


def kernel_class(
    stop: threading.Event,
    words: IO[bytes],
    ended: Ended,
    environment: Mapping[str, str],
    fork: bool,
) -> type[Any]:
    """Return a kernel manager whose kernel ends soon after ``stop`` and writes to ``words`` only.

    Its processes get the variables ``environment``, unless this process has others. How it ends is stored
    in ``ended``. It ends with this process, even if that is killed. With ``fork`` it is forked, see
    :mod:`attnlab.reports.forked_kernels`, if its command allows it.
    """
    from jupyter_client.manager import AsyncKernelManager

    class Kernel(AsyncKernelManager):
        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            options["env"] = {**environment, **options.get("env", os.environ)}
            await super().start_kernel(stdout=words, stderr=words, **options)

        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            command = super().format_kernel_cmd(extra_arguments)
            return command if fork and can_fork(command) else ending_with_parent(command)

        async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
            if not can_fork(kernel_cmd):
                await super()._async_launch_kernel(kernel_cmd, **options)
                return
            provisioner: Any = self.provisioner
            provisioner.process = fork_kernel(kernel_cmd, options["env"], options.get("cwd"), words)
            provisioner.pid = provisioner.pgid = provisioner.process.pid
            self._reconcile_connection_info(provisioner.connection_info)

        _launch_kernel = _async_launch_kernel

        async def _async_is_alive(self) -> bool:
            # nbclient calls this every second, even before the kernel is ready
            if stop.is_set() and self.provisioner is not None:
                await self.provisioner.kill()
            alive = await super()._async_is_alive()
            if not alive and self.provisioner is not None:
                ended.code = await self.provisioner.poll()
            return alive

        is_alive = _async_is_alive

    return Kernel
