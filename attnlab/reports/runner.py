"""Run one notebook headless and report how it ended."""

import asyncio
import json
import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from attnlab.reports.executed import (
    drop_widgets,
    read_post_mortem,
    read_summary,
    read_title,
    read_verdicts,
)
from attnlab.reports.kernel_manager import Ended, kernel_class
from attnlab.reports.notebook_result import Outcome, Status, one_line
from attnlab.reports.pages import write_post_mortem

OnProgress = Callable[[str, int, int], None]


@dataclass(slots=True, kw_only=True)
class Run:
    """Run one notebook. nbclient's hooks update ``cell``, ``cell_index``, ``total`` and ``deadline``.

    ``timeout_s`` limits the whole notebook. ``environment``: variables of its processes, unless this
    process has others. ``fork``: fork the kernel from the fork server. ``pages`` maps the notebooks to
    which this page may link to their titles.
    """

    source: Path
    parameters: Mapping[str, Any]
    reports: Path
    timeout_s: float
    on_progress: OnProgress
    stop: threading.Event
    environment: Mapping[str, str] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)
    fork: bool = False
    folder_flag: bool = False
    cell: str = ""
    cell_index: int = 0
    total: int = 0
    deadline: float = math.inf

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def executed(self) -> Path:
        return self.reports / "executed" / self.source.name

    @property
    def html(self) -> Path:
        return self.reports / f"{self.name}.html"

    def outcome(self) -> Outcome:
        """Execute the notebook, write its page and return how it ended.

        Raises AttnLabError if the page cannot be written; every other failure is in the Outcome.
        """
        started = time.perf_counter()
        self.executed.unlink(missing_ok=True)
        status, message = self._execute()
        seconds = time.perf_counter() - started
        try:
            status, message, executed = self._report(status, message)
        except Exception as error:  # a broken notebook must not stop the others
            message = message or _in_one_line(error)
            self._replace_executed()
            status, message, executed = self._report("error", message)
        return Outcome(
            name=self.name,
            title=read_title(executed) or self.name,
            status=status,
            message=message,
            verdicts=read_verdicts(executed),
            summary=read_summary(executed),
            report=read_post_mortem(executed),
            seconds=seconds,
            executed=self.executed,
            html=self.html,
            cells=(self.total if status == "passed" else self.cell_index, self.total),
            parameters=self.parameters,
        )

    def _report(self, status: Status, message: str) -> tuple[Status, str, Any]:
        """Write the page; return the final status, the message and the executed notebook.

        A wrong verdict fails the notebook even if it did not conclude or became unavailable later.
        """
        from nbformat import read, write

        notebook = read(self.executed, as_version=4)
        drop_widgets(notebook)
        write(notebook, self.executed)
        verdicts = read_verdicts(notebook)
        if status in ("passed", "unavailable") and not all(verdict.ok for verdict in verdicts):
            status = "failed"
            message = "; ".join(str(verdict) for verdict in verdicts if not verdict.ok)
        write_post_mortem(
            self.executed,
            self.html,
            command=self._command(),
            failure=message,
            status=status,
            pages=self.pages,
        )
        return status, message, notebook

    def _command(self) -> str:
        """Return the command line that reproduces the page."""
        words = ["attnlab", "investigate", self.name.split("-", 1)[0]]
        if self.folder_flag:
            words += ["--notebooks-folder", str(self.source.parent)]
        for name, value in self.parameters.items():
            words += ["-p", f"{name}={as_flag(value)}"]
        return shlex.join(words)

    def _execute(self) -> tuple[Status, str]:
        """Run papermill; return the status and one line about the failure."""
        from nbclient.exceptions import CellTimeoutError, DeadKernelError
        from papermill.exceptions import PapermillExecutionError

        ended = Ended()
        with TemporaryFile() as words:
            try:
                self._run_papermill(words, ended)
            except PapermillExecutionError as error:
                text = one_line(error.evalue)
                if error.ename == "VerdictFailed":
                    return "failed", text
                if error.ename == "Unavailable":
                    return "unavailable", text
                if error.ename == "InvalidCase" and self.parameters:
                    return "refused", text
                return "error", f"{error.ename}: {text}"
            except CellTimeoutError:
                return "timeout", f"longer than {self.timeout_s:g} s, {self._place()}"
            except DeadKernelError:
                if self.stop.is_set():
                    return "interrupted", f"interrupted {self._place()}"
                return "died", f"the kernel died{ended.text} {self._place()}{_last_words(words)}"
            except Exception as error:  # no kernel, or not a notebook
                if self.stop.is_set():
                    return "interrupted", "interrupted before its first cell"
                return "error", _in_one_line(error)
            finally:
                _close_event_loop()
        return "passed", ""

    def _place(self) -> str:
        return f"in cell {self.cell_index} of {self.total}: {one_line(self.cell)}"

    def _run_papermill(self, words: IO[bytes], ended: "Ended") -> None:
        """Execute ``source`` into ``executed``; the kernel starts in the folder of the notebook."""
        from papermill.execute import execute_notebook

        self.deadline = time.monotonic() + self.timeout_s
        execute_notebook(
            self.source,
            self.executed,
            parameters=dict(self.parameters),
            kernel_name="python3",
            language="python",
            progress_bar=False,
            # papermill's cwd option would change the directory of this process, and of all threads
            resources={"metadata": {"path": str(self.source.parent)}},
            kernel_manager_class=kernel_class(self.stop, words, ended, self.environment, self.fork),
            shutdown_kernel="immediate",
            coalesce_streams=True,
            # nbclient reads 0 as no limit
            timeout_func=lambda cell: max(1e-3, self.deadline - time.monotonic()),
            on_notebook_start=self._on_start,
            on_cell_execute=self._on_execute,
            on_cell_executed=self._on_executed,
        )
        self.on_progress(self.name, self.total, self.total)

    def _on_start(self, notebook: Any) -> None:
        self.total = len(notebook.cells)

    def _on_execute(self, cell: Any, cell_index: int) -> None:
        self.cell, self.cell_index = cell.source, cell_index + 1

    def _on_executed(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        self.on_progress(self.name, cell_index + 1, self.total)

    def _replace_executed(self) -> None:
        """Replace a missing or broken executed notebook by one that says so."""
        from nbformat import v4, write

        cell = v4.new_markdown_cell(f"# {self.name}\n\nThis notebook could not be run or read.")
        write(v4.new_notebook(cells=[cell]), self.executed)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error))}"


def _last_words(words: IO[bytes]) -> str:
    """Return the last line that the kernel wrote to its own stderr, such as a fatal C++ error."""
    words.seek(0)
    lines = [line.strip() for line in words.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("[IPKernelApp]")]
    return f" ({lines[-1]})" if lines else ""


def _close_event_loop() -> None:
    """Cancel tasks that nbclient leaves after a timeout; otherwise asyncio warns at collection."""
    from jupyter_core.utils import ensure_event_loop

    loop = ensure_event_loop()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def as_flag(value: Any) -> str:
    """Return a parameter as the VALUE of NAME=VALUE; a tuple as "1,2"."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
