"""Run one notebook without a person, and tell how that ended."""

import asyncio
import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from attnlab.notebook import Verdict
from attnlab.outcome import Outcome, Status, one_line
from attnlab.report import drop_widgets, read_title, read_verdicts, write_post_mortem

OnProgress = Callable[[str, int, int], None]


@dataclass(slots=True, kw_only=True)
class Run:
    """Run one notebook; the fields that change are what nbclient's hooks tell on the way."""

    source: Path
    parameters: Mapping[str, Any]
    reports: Path
    timeout_s: float
    on_progress: OnProgress
    stop: threading.Event
    cell: str = ""
    total: int = 0

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
        """Execute the notebook, write its report and say how it ended.

        Raises AttnLabError where the report cannot be written; all else is in the Outcome.
        """
        started = time.perf_counter()
        self.executed.unlink(missing_ok=True)
        status, message = self._execute()
        seconds = time.perf_counter() - started
        try:
            status, message, verdicts, title = self._report(status, message)
        except Exception as error:  # whatever is in this notebook, the others go on
            message = message or _in_one_line(error)
            self._replace_executed()
            status, message, verdicts, title = self._report("error", message)
        return Outcome(
            name=self.name,
            title=title or self.name,
            status=status,
            message=message,
            verdicts=verdicts,
            seconds=seconds,
            executed=self.executed,
            html=self.html,
        )

    def _report(self, status: Status, message: str) -> tuple[Status, str, list[Verdict], str]:
        """Write the report; return status, message, verdicts and title as the notebook has them.

        A wrong verdict fails a notebook that never concluded, too, or that is unavailable from there on.
        """
        from nbformat import read, write

        notebook = read(self.executed, as_version=4)
        drop_widgets(notebook)
        write(notebook, self.executed)
        verdicts = read_verdicts(notebook)
        if status in ("passed", "unavailable") and not all(verdict.ok for verdict in verdicts):
            status = "failed"
            message = "; ".join(str(verdict) for verdict in verdicts if not verdict.ok)
        command = _command(self.source, self.parameters)
        write_post_mortem(self.executed, self.html, command=command, failure=message)
        return status, message, verdicts, read_title(notebook)

    def _execute(self) -> tuple[Status, str]:
        """Run papermill; return the status and one line on what went wrong."""
        from nbclient.exceptions import CellTimeoutError, DeadKernelError
        from papermill.exceptions import PapermillExecutionError

        with TemporaryFile() as words:
            try:
                self._run_papermill(words)
            except PapermillExecutionError as error:
                said = one_line(error.evalue)
                if error.ename == "VerdictFailed":
                    return "failed", said
                if error.ename == "Unavailable":
                    return "unavailable", said
                return "error", f"{error.ename}: {said}"
            except CellTimeoutError:
                return "timeout", f"longer than {self.timeout_s:g} s: {one_line(self.cell)}"
            except DeadKernelError:
                how = "interrupted" if self.stop.is_set() else "the kernel died"
                return "died", f"{how} in: {one_line(self.cell)}{_last_words(words)}"
            except Exception as error:  # no kernel, or a file that is no notebook
                return "error", _in_one_line(error)
            finally:
                _close_event_loop()
        return "passed", ""

    def _run_papermill(self, words: IO[bytes]) -> None:
        """Execute `source` into `executed`, the kernel starting in the notebook's own folder."""
        from papermill.execute import execute_notebook

        execute_notebook(
            self.source,
            self.executed,
            parameters=dict(self.parameters),
            kernel_name="python3",
            language="python",
            progress_bar=False,
            # papermill's own cwd would move this whole process, and so every other thread
            resources={"metadata": {"path": str(self.source.parent)}},
            kernel_manager_class=_kernel_class(self.stop, words),
            shutdown_kernel="immediate",
            coalesce_streams=True,
            timeout_func=lambda cell: self.timeout_s,
            on_notebook_start=self._on_start,
            on_cell_execute=self._on_execute,
            on_cell_executed=self._on_executed,
        )
        self.on_progress(self.name, self.total, self.total)

    def _on_start(self, notebook: Any) -> None:
        self.total = len(notebook.cells)

    def _on_execute(self, cell: Any, cell_index: int) -> None:
        self.cell = cell.source

    def _on_executed(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        self.on_progress(self.name, cell_index + 1, self.total)

    def _replace_executed(self) -> None:
        """Put a notebook that says so where the executed one is missing or broken."""
        from nbformat import v4, write

        cell = v4.new_markdown_cell(f"# {self.name}\n\nThis notebook could not be run or read.")
        write(v4.new_notebook(cells=[cell]), self.executed)


def _kernel_class(stop: threading.Event, words: IO[bytes]) -> type[Any]:
    """Return a kernel manager whose kernel ends soon after `stop` and speaks to `words` only."""
    from jupyter_client.manager import AsyncKernelManager

    class Kernel(AsyncKernelManager):
        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            await super().start_kernel(stdout=words, stderr=words, **options)

        async def _async_is_alive(self) -> bool:
            # nbclient asks this once a second, also before the kernel is ready
            if stop.is_set() and self.provisioner is not None:
                await self.provisioner.kill()
            return await super()._async_is_alive()

        is_alive = _async_is_alive

    return Kernel


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error))}"


def _last_words(words: IO[bytes]) -> str:
    """Return the last line that a kernel wrote past Jupyter, such as a fatal error of C++."""
    words.seek(0)
    lines = [line.strip() for line in words.read().decode(errors="replace").splitlines()]
    own = [line for line in lines if line and not line.startswith("[IPKernelApp]")]
    return f" ({own[-1]})" if own else ""


def _close_event_loop() -> None:
    """Cancel what nbclient leaves behind after a timeout, or it complains when collected."""
    from jupyter_core.utils import ensure_event_loop

    loop = ensure_event_loop()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def _command(path: Path, parameters: Mapping[str, Any]) -> str:
    """Return the command line that makes a notebook's report again."""
    words = ["attnlab", "investigate", path.stem.split("-", 1)[0]]
    for name, value in parameters.items():
        words += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)
