"""Run notebooks headless and write their pages, the index, verdicts.json and junit.xml."""

import asyncio
import json
import logging
import math
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import IO, Any, cast

from attnlab.case.errors import AttnLabError, check_installed
from attnlab.case.flags import share_out
from attnlab.case.machine import available_bytes, cores
from attnlab.case.output_file import check_output_file
from attnlab.kernels.child_process import end_with_parent, ending_with_parent
from attnlab.lab.products import sharing_between_processes
from attnlab.reports.notebook_result import (
    Change,
    Kept,
    Outcome,
    Results,
    Status,
    compare,
    one_line,
    plain_dict,
    read_baseline,
    write_junit,
    write_verdicts,
)
from attnlab.reports.pages import (
    drop_widgets,
    read_post_mortem,
    read_summary,
    read_title,
    read_verdicts,
    write_index,
    write_post_mortem,
)

# Notebook kernels as forks of one process that has imported torch, matplotlib and attnlab.
#
# Each kernel would otherwise import them again, which takes 2.7 s of processor time.

# None of them uses a GPU or starts a thread when it is imported.
_IMPORTED = (
    "torch",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "attnlab.lab.lab",
    "attnlab.show.notebook",
    "attnlab.show.plots",
    "attnlab.diagnosis.diagnose",
    "attnlab.mutation.power",
    "attnlab.reports.notebook_result",
    "attnlab.show.panels.boxes",
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
    """Start the kernel of a command that can fork, in ``folder``."""
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


# The import of jsonschema, which nbformat needs, without a parser that takes most of its time.

_PARSER = "rfc3987_syntax"


def import_jsonschema() -> None:
    """Import jsonschema without its checks of IRIs, unless it is imported already.

    The parser of IRIs builds 38 grammars when it is imported, which takes 1.4 s. The schema of notebooks
    has none, and jsonschema works without the parser.
    """
    if {"jsonschema", _PARSER} & set(sys.modules):
        return
    sys.modules[_PARSER] = None  # type: ignore[assignment]  # its import raises ImportError
    try:
        with suppress(ImportError):  # nbformat reports what is missing
            import_module("jsonschema")
    finally:
        del sys.modules[_PARSER]


# The kernel manager of a notebook that runs headless, and how its kernel ended.

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
    in ``ended``. It ends with this process, even if that is killed. With ``fork`` it is forked if its command
    allows it.
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
        """Execute the notebook, write its page and return how it ended."""
        started = time.perf_counter()
        self.executed.unlink(missing_ok=True)
        status, message = self._execute()
        seconds = time.perf_counter() - started
        try:
            status, message, executed = self._report(status, message)
        except Exception as error:  # a broken notebook must not stop the others
            message = message or _in_one_line(error)
            from nbformat import v4, write

            cell = v4.new_markdown_cell(f"# {self.name}\n\nThis notebook could not be run or read.")
            write(v4.new_notebook(cells=[cell]), self.executed)
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
        words = ["attnlab", "investigate", self.name.split("-", 1)[0]]
        if self.folder_flag:
            words += ["--notebooks-folder", str(self.source.parent)]
        for name, value in self.parameters.items():
            words += ["-p", f"{name}={as_flag(value)}"]
        write_post_mortem(
            self.executed,
            self.html,
            command=shlex.join(words),
            failure=message,
            status=status,
            pages=self.pages,
        )
        return status, message, notebook

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


NOTEBOOKS = Path(__file__).resolve().parent.parent.parent / "notebooks"
OnEnd = Callable[[Outcome], None]

# glibc keeps freed memory for the next tensor: getting it from the system again takes longer than filling it.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
# The longest notebooks start first, so that none runs alone at the end. 06 does not wait for what 03 makes.
_START_FIRST = ("03", "06", "00", "07", "08", "04")
_NOTEBOOK_BYTES = 6 << 30  # the largest notebook needed 5.3 GiB at the size of the test


def find_notebooks(names: Sequence[str], root: Path) -> list[Path]:
    """Return the named notebooks in ``root``, in the order of the names.

    A name is a number (``03`` or ``3``), a slug, or a file name. Without names, return all ``NN-*.ipynb``.
    Raises AttnLabError for an unknown name or a folder without notebooks.
    """
    known = sorted(root.glob("[0-9][0-9]-*.ipynb"))
    if not known and root.resolve() == NOTEBOOKS:
        raise AttnLabError(
            "attnlab is installed without its notebooks: give --notebooks-folder PATH, such as notebooks/ "
            "of a checkout or of the sdist"
        )
    if not known:
        raise AttnLabError(f"{root} must hold notebooks named NN-slug.ipynb, got none")
    found: dict[Path, None] = {}
    for name in names:
        matches = [path for path in known if _is_named(path, name)]
        if not matches:
            there = ", ".join(path.stem for path in known)
            raise AttnLabError(f"notebook must be one of {there}; got {name!r}")
        found |= dict.fromkeys(matches)
    return list(found) if names else known


def import_study() -> ModuleType:
    """Import the module ``study`` of the notebooks; raise AttnLabError without a checkout."""
    if not (NOTEBOOKS / "study").is_dir():
        raise AttnLabError(
            "attnlab is installed without its notebooks, and the experiments on the claims are there: "
            "run attnlab from a checkout or the unpacked sdist"
        )
    if str(NOTEBOOKS) not in sys.path:
        sys.path.append(str(NOTEBOOKS))
    return import_module("study")


def investigate(
    paths: Sequence[Path],
    *,
    parameters: Mapping[str, Any],
    reports: Path,
    timeout_s: float,
    on_progress: OnProgress | None = None,
    on_end: OnEnd | None = None,
    jobs: int = 1,
    baseline: Path | None = None,
) -> Results:
    """Run the notebooks and write ``reports``; return the Outcome of each, in the order of paths.

    - ``parameters``: each goes to the notebooks that have it.
    - ``timeout_s``: limits each notebook; ``jobs``: notebooks run at once, which share the cores.
    - ``on_progress``: called with a notebook's name, cells done and cells in total, in the thread that
      runs the notebook; ``on_end``: called with each Outcome.
    - ``baseline``: a verdicts.json to compare with; it is read first.

    The index, verdicts.json and junit.xml are rewritten as each notebook ends, so an interrupted run
    keeps the finished notebooks.

    Raises AttnLabError before anything runs if no notebook has a parameter or ``reports`` cannot be
    written, InvalidCase for a wrong baseline or value, and Unavailable if Jupyter is not installed.
    """
    check_installed("attnlab investigate", "papermill", "nbconvert", "ipykernel")
    import_jsonschema()
    kept = None if baseline is None else read_baseline(baseline)
    with _quiet(), sharing_between_processes() as environment:
        threads = max(1, cores() // max(1, min(jobs, len(paths))))
        environment = {"OMP_NUM_THREADS": str(threads), **_KEEP_MEMORY, **environment}
        given = share_out(parameters, paths)
        _make_folder(reports / "executed", paths)
        fork = len(paths) > jobs and start_fork_server(environment)
        reports, stop = reports.resolve(), threading.Event()
        runs = [
            Run(
                source=path.resolve(),
                parameters=given[path],
                reports=reports,
                timeout_s=timeout_s,
                on_progress=on_progress or (lambda name, cell, total: None),
                stop=stop,
                environment=environment,
                fork=fork,
                pages=_pages(paths, reports),
                folder_flag=path.resolve().parent != NOTEBOOKS,
            )
            for path in paths
        ]
        book = _Book(runs=runs, reports=reports, baseline=baseline, kept=kept)
        _run_all(book, jobs, stop, on_end or (lambda outcome: None))
        return book.results()


def default_jobs(paths: Sequence[Path]) -> int:
    """Return how many notebooks to run at once: one per core, limited by the free memory."""
    return max(1, int(min(cores(), len(paths), available_bytes() / _NOTEBOOK_BYTES)))


@dataclass(slots=True, kw_only=True)
class _Book:
    """Collect the outcomes by the position of their runs, and write them."""

    runs: Sequence[Run]
    reports: Path
    baseline: Path | None
    kept: Mapping[str, Kept] | None
    ended: dict[int, Outcome] = field(default_factory=dict)

    def results(self) -> Results:
        """Return the results so far."""
        outcomes = [self.ended[place] for place in sorted(self.ended)]
        left = [run.name for place, run in enumerate(self.runs) if place not in self.ended]
        return Results(
            outcomes=outcomes,
            not_run=left,
            baseline="" if self.baseline is None else str(self.baseline),
            changes=None if self.kept is None else self._changes(self.kept, outcomes),
        )

    def write(self) -> None:
        """Rewrite the index, verdicts.json and junit.xml."""
        results = self.results()
        write_index(results, self.reports / "index.html")
        write_verdicts(results, self.reports / "verdicts.json")
        write_junit(results, self.reports / "junit.xml")

    def _changes(self, kept: Mapping[str, Kept], outcomes: Sequence[Outcome]) -> list[Change]:
        """Compare finished notebooks, and notebooks that no longer exist, with the baseline."""
        now = {
            one.name: Kept(verdicts=tuple(one.verdicts), parameters=plain_dict(one.parameters))
            for one in outcomes
        }
        folders = {run.source.parent for run in self.runs}
        for name in kept:
            if name not in now and not any((one / f"{name}.ipynb").exists() for one in folders):
                now[name] = Kept(verdicts=(), parameters=kept[name].parameters)
        return [change for name in now for change in compare(name, now[name], kept.get(name))]


def _run_all(book: _Book, jobs: int, stop: threading.Event, on_end: OnEnd) -> None:
    """Run at most ``jobs`` notebooks at once; on an interrupt, end their kernels first.

    Each run has its own thread, even with one job: Ctrl-C reaches the main thread, and nbclient would
    swallow it there. Interrupted runs are outcomes too.
    """
    book.write()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        places = sorted(range(len(book.runs)), key=lambda place: _start(book.runs[place].name))
        order = {pool.submit(book.runs[place].outcome): place for place in places}
        try:
            for future in as_completed(order):
                outcome = book.ended[order[future]] = future.result()
                book.write()
                on_end(outcome)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            for future, place in order.items():
                if not future.cancelled() and future.exception() is None:
                    book.ended[place] = future.result()
            book.write()
            raise


def _start(name: str) -> int:
    """Return the place of a notebook in the order of their starts; those that are not listed come last."""
    number = name[:2]
    return _START_FIRST.index(number) if number in _START_FIRST else len(_START_FIRST)


def _is_named(path: Path, name: str) -> bool:
    number, slug = path.stem.split("-", 1)
    if name.isdecimal():
        return int(name) == int(number)
    return Path(name).name in (path.name, path.stem, slug)


def _pages(paths: Sequence[Path], reports: Path) -> dict[str, str]:
    """Return the notebooks that have or will have a page in ``reports``, with their titles."""
    titles = {page.stem: "" for page in reports.glob("[0-9][0-9]-*.html")}
    folders = {path.parent for path in paths}
    known = {path.stem: path for folder in folders for path in folder.glob("[0-9][0-9]-*.ipynb")}
    titles |= {path.stem: "" for path in paths}
    return {name: _title(known.get(name)) or name for name in titles}


def _title(path: Path | None) -> str:
    """Return the title of a notebook file, or "" if it cannot be read."""
    import nbformat

    try:
        return "" if path is None else read_title(nbformat.read(path, as_version=4))
    except Exception:
        return ""


def _make_folder(executed: Path, paths: Sequence[Path]) -> None:
    """Make the folder of the executed notebooks, and check that each output file can be written."""
    try:
        executed.mkdir(parents=True, exist_ok=True)
        for folder in (executed, executed.parent):
            with TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise AttnLabError(f"{executed} cannot be made or written: {error.strerror}") from error
    names = ("index.html", "verdicts.json", "junit.xml", *(f"{path.stem}.html" for path in paths))
    files = [executed.parent / name for name in names] + [executed / path.name for path in paths]
    for file in files:
        check_output_file(file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep papermill's log and its internal warnings off the terminal."""
    log = logging.getLogger("papermill")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            for module in ("papermill", "nbformat", "nbclient", "jupyter_client", "nbconvert"):
                warnings.filterwarnings("ignore", module=rf"{module}\b")
            yield
    finally:
        log.setLevel(level)
