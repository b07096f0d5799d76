"""Run notebooks headless and write what they found, each on its own."""

import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.parameters import share_out
from attnlab.reports.baseline import Change, Kept, compare, read_baseline
from attnlab.reports.notebook_result import (
    Outcome,
    Results,
    plain_dict,
    write_junit,
    write_verdicts,
)
from attnlab.reports.pages import write_index
from attnlab.reports.runner import OnProgress, Run

__all__ = ["OnEnd", "OnProgress", "Outcome", "default_jobs", "find_notebooks", "investigate"]

NOTEBOOKS = Path(__file__).resolve().parent.parent.parent / "notebooks"
OnEnd = Callable[[Outcome], None]

_NOTEBOOK_GIB = 6.0  # the largest notebook held 5.3 GiB at the real test's size


def find_notebooks(names: Sequence[str], root: Path) -> list[Path]:
    """Return the notebooks in `root` that the names mean, in the order of the names.

    A name is a number (`03` or `3`), a slug, or a file name. No names mean all `NN-*.ipynb`.
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
    """Run the notebooks and write `reports`; return the Outcome of each, in the order of paths.

    A parameter goes to the notebooks that know it. `timeout_s` bounds each notebook, `jobs` how many
    run at once; their processes share the cores. `on_progress` gets a notebook's name, how many of its
    cells are done and how many there are, from the thread that runs it; `on_end` an Outcome. The index,
    verdicts.json and junit.xml are written anew as each notebook ends, so that an interrupted run
    leaves what it had finished. `baseline` is a verdicts.json to compare with, read before all else.

    Raises AttnLabError, before anything runs, where no notebook knows a parameter or `reports`
    cannot be written, InvalidCase for a wrong baseline or value, and Unavailable where Jupyter is not
    installed.
    """
    _check_installed()
    kept = None if baseline is None else read_baseline(baseline)
    with _quiet():
        given = share_out(parameters, paths)
        _make_folder(reports / "executed", paths)
        reports, stop = reports.resolve(), threading.Event()
        runs = [
            Run(
                source=path.resolve(),
                parameters=given[path],
                reports=reports,
                timeout_s=timeout_s,
                on_progress=on_progress or (lambda name, cell, total: None),
                stop=stop,
                threads=max(1, cores() // max(1, min(jobs, len(paths)))),
                pages=_pages(paths, reports),
                folder_flag=path.resolve().parent != NOTEBOOKS,
            )
            for path in paths
        ]
        book = _Book(runs=runs, reports=reports, baseline=baseline, kept=kept)
        _run_all(book, jobs, stop, on_end or (lambda outcome: None))
        return book.results()


def default_jobs(paths: Sequence[Path]) -> int:
    """Return how many notebooks to run at once: one a core, as far as the free memory reaches."""
    return max(1, int(min(cores(), len(paths), free_memory_gib() / _NOTEBOOK_GIB)))


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_gib() -> float:
    """Return the memory that is available, or infinity where the system does not say.

    A container's limit counts as what is available at most.
    """
    free = math.inf
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = (
            next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
        )
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**30)
    except (OSError, StopIteration, ValueError):  # another system, no limit, or "max"
        return free
    return free


@dataclass(slots=True, kw_only=True)
class _Book:
    """Keep what has ended, by place in the order of the runs, and write it."""

    runs: Sequence[Run]
    reports: Path
    baseline: Path | None
    kept: Mapping[str, Kept] | None
    ended: dict[int, Outcome] = field(default_factory=dict)

    def results(self) -> Results:
        """Return what is known so far."""
        outcomes = [self.ended[place] for place in sorted(self.ended)]
        left = [run.name for place, run in enumerate(self.runs) if place not in self.ended]
        return Results(
            outcomes=outcomes,
            not_run=left,
            baseline="" if self.baseline is None else str(self.baseline),
            changes=None if self.kept is None else self._changes(self.kept, outcomes),
        )

    def write(self) -> None:
        """Write the index, verdicts.json and junit.xml anew."""
        results = self.results()
        write_index(results, self.reports / "index.html")
        write_verdicts(results, self.reports / "verdicts.json")
        write_junit(results, self.reports / "junit.xml")

    def _changes(self, kept: Mapping[str, Kept], outcomes: Sequence[Outcome]) -> list[Change]:
        """Compare what has ended, and what is no notebook any more, with the baseline."""
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
    """Run at most `jobs` notebooks at once; when interrupted, end their kernels first.

    The runs have threads of their own even one at a time: the main thread is the one that a
    Ctrl-C reaches, and nbclient would swallow it there. What was running then is an outcome too.
    """
    book.write()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        order = {pool.submit(run.outcome): place for place, run in enumerate(book.runs)}
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


def _is_named(path: Path, name: str) -> bool:
    number, slug = path.stem.split("-", 1)
    if name.isdecimal():
        return int(name) == int(number)
    return Path(name).name in (path.name, path.stem, slug)


def _pages(paths: Sequence[Path], reports: Path) -> frozenset[str]:
    """Return the notebooks that have a page in `reports`, or will have."""
    there = {page.stem for page in reports.glob("[0-9][0-9]-*.html")}
    return frozenset(there | {path.stem for path in paths})


def _make_folder(executed: Path, paths: Sequence[Path]) -> None:
    """Make the folder of the executed notebooks, and see that each of the files can be written there."""
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
        if file.is_dir():
            raise AttnLabError(f"{file} cannot be written: it is a folder")


def _check_installed() -> None:
    """Raise Unavailable where what runs notebooks is missing."""
    for package in ("papermill", "nbconvert", "ipykernel"):
        if find_spec(package) is None:
            raise Unavailable(
                f"notebooks run with {package}, which is not installed: pip install 'attnlab[lab]'"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep papermill's log, and warnings about its own insides, off the terminal."""
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
