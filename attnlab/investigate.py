"""Run notebooks headless and write what they found, each on its own."""

import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnlab.errors import AttnLabError, Unavailable
from attnlab.headless import OnProgress, Run
from attnlab.outcome import Outcome, write_junit, write_verdicts
from attnlab.report import write_index

__all__ = ["OnProgress", "Outcome", "find_notebooks", "investigate"]


def find_notebooks(names: Sequence[str], root: Path) -> list[Path]:
    """Return the notebooks in `root` that the names mean, in the order of the names.

    A name is a number (`03` or `3`), a slug, or a file name. No names mean all `NN-*.ipynb`.
    """
    known = sorted(root.glob("[0-9][0-9]-*.ipynb"))
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
    jobs: int = 1,
) -> list[Outcome]:
    """Run the notebooks and write `reports`; return one Outcome for each, in the order of paths.

    A parameter goes to the notebooks that know it. `timeout_s` bounds each cell. `on_progress`
    gets a notebook's name, how many of its cells are done and how many there are, from the thread
    that runs it. The index, verdicts.json and junit.xml are written anew as each notebook ends,
    so that an interrupted run leaves what it had finished.

    Raises AttnLabError, before anything runs, where no notebook knows a parameter or `reports`
    cannot be written, and Unavailable where Jupyter is not installed.
    """
    _check_installed()
    with _quiet():
        given = _share_out(parameters, paths)
        _make_folder(reports / "executed")
        stop = threading.Event()
        runs = [
            Run(
                source=path.resolve(),
                parameters=given[path],
                reports=reports.resolve(),
                timeout_s=timeout_s,
                on_progress=on_progress or (lambda name, cell, total: None),
                stop=stop,
            )
            for path in paths
        ]
        return _run_all(runs, reports.resolve(), jobs, stop)


def _run_all(runs: Sequence[Run], reports: Path, jobs: int, stop: threading.Event) -> list[Outcome]:
    """Run at most `jobs` notebooks at once; when interrupted, end their kernels first.

    The runs have threads of their own even one at a time: the main thread is the one that a
    Ctrl-C reaches, and nbclient would swallow it there.
    """
    outcomes: dict[int, Outcome] = {}
    _write_results([], reports, total=len(runs))
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        order = {pool.submit(run.outcome): index for index, run in enumerate(runs)}
        try:
            for future in as_completed(order):
                outcomes[order[future]] = future.result()
                finished = [outcomes[index] for index in sorted(outcomes)]
                _write_results(finished, reports, total=len(runs))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [outcomes[index] for index in sorted(outcomes)]


def _is_named(path: Path, name: str) -> bool:
    number, slug = path.stem.split("-", 1)
    if name.isdecimal():
        return int(name) == int(number)
    return Path(name).name in (path.name, path.stem, slug)


def _share_out(parameters: Mapping[str, Any], paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Give each notebook the parameters that it defines; raise if nobody takes one."""
    known = {path: _read_parameters(path) if parameters else set() for path in paths}
    everywhere = set().union(*known.values())
    for name in parameters:
        if name not in everywhere:
            there = ", ".join(sorted(everywhere)) or "none"
            raise AttnLabError(f"parameter must be one that a notebook has ({there}), got {name!r}")
    return {
        path: {name: value for name, value in parameters.items() if name in known[path]}
        for path in paths
    }


def _read_parameters(path: Path) -> set[str]:
    """Return what the notebook's `parameters` cell defines; nothing where it cannot be read.

    Such a notebook gets its outcome when it runs.
    """
    from papermill.inspection import inspect_notebook

    try:
        return set(inspect_notebook(str(path)))
    except Exception:
        return set()


def _write_results(outcomes: Sequence[Outcome], reports: Path, *, total: int) -> None:
    write_index(outcomes, reports / "index.html", total=total)
    write_verdicts(outcomes, reports / "verdicts.json", total=total)
    write_junit(outcomes, reports / "junit.xml")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AttnLabError(f"{folder} cannot be made: {error.strerror}") from error


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
