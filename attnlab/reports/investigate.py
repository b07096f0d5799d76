"""Run notebooks headless and write their pages, the index, verdicts.json and junit.xml."""

import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.flags import share_out
from attnlab.case.output_file import check_output_file
from attnlab.lab.products import sharing_between_processes
from attnlab.reports.notebook_result import (
    Change,
    Kept,
    Outcome,
    Results,
    compare,
    plain_dict,
    read_baseline,
    write_junit,
    write_verdicts,
)
from attnlab.reports.pages import read_title, write_index
from attnlab.reports.runner import OnProgress, Run, import_jsonschema, start_fork_server

__all__ = ["OnEnd", "OnProgress", "Outcome", "default_jobs", "find_notebooks", "investigate"]

NOTEBOOKS = Path(__file__).resolve().parent.parent.parent / "notebooks"
OnEnd = Callable[[Outcome], None]

# glibc keeps freed memory for the next tensor: getting it from the system again takes longer than filling it.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
# The longest notebooks start first, so that none runs alone at the end. 06 does not wait for what 03 makes.
_START_FIRST = ("03", "06", "00", "07", "08", "04")
_NOTEBOOK_GIB = 6.0  # the largest notebook needed 5.3 GiB at the size of the test


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
    _check_installed()
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
    return max(1, int(min(cores(), len(paths), free_memory_gib() / _NOTEBOOK_GIB)))


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_gib() -> float:
    """Return the available memory, at most the limit of the container; infinity if it is unknown."""
    free = math.inf
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = (
            next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
        )
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**30)
    except (OSError, StopIteration, ValueError):  # not Linux, no limit, or "max"
        return free
    return free


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


def _check_installed() -> None:
    """Raise Unavailable if a package that runs notebooks is missing."""
    for package in ("papermill", "nbconvert", "ipykernel"):
        if find_spec(package) is None:
            raise Unavailable(
                f"notebooks need {package}, which is not installed: pip install 'attnlab[lab]'"
            )


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
