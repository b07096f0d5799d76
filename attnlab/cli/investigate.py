"""The command ``attnlab investigate``: the notebooks, headless, as a regression run and for sharing."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnlab.case.fields import Int, Number
from attnlab.case.flags import notebook_parameters

if TYPE_CHECKING:
    from attnlab.reports.notebook_result import Outcome, Results

_ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
_NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"
EPILOG = """\
exit codes: 0 all notebooks passed, or cannot run here while another passed. 1 a verdict differs, or a
notebook broke, died, took too long or found nothing out; with --baseline also where a verdict of the
baseline is gone, broken (it was as expected) or changed (it found something else). New and mended
verdicts and other figures beside the same finding are shown and make no 1. 2 bad input, a parameter
that a notebook refuses among it. 130 interrupted, 143 terminated; what had ended is kept.

Keep a baseline with: cp reports/verdicts.json baseline.json. --baseline reports/verdicts.json compares
with the run before."""


def add_investigate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``attnlab investigate``."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "notebooks", nargs="*", metavar="NAME", help="number or name of a notebook; default: all"
    )
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter for the notebooks that have it",
    )
    parser.add_argument(
        "--reports",
        type=Path,
        default=Path("reports"),
        metavar="FOLDER",
        help="where the results go (reports)",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="a verdicts.json of before: what changed since is shown, here and in the index",
    )
    parser.add_argument(
        "--notebooks-folder",
        type=Path,
        metavar="FOLDER",
        default=_NOTEBOOKS,
        help="where the notebooks are (default: beside the package)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1200.0,
        metavar="SECONDS",
        help="the most that a notebook may take (1200)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="notebooks at a time (default: one a core, as far as 6 GiB of free memory are there for "
        "each); their processes share the cores, unless OMP_NUM_THREADS says otherwise",
    )


def run_investigate(args: argparse.Namespace) -> "Results":
    """Run the notebooks as the flags say; raises AttnLabError for bad input."""
    from attnlab.reports.investigate import default_jobs, find_notebooks, investigate

    paths = find_notebooks(args.notebooks, args.notebooks_folder)
    parameters = notebook_parameters(args.parameter)
    jobs = default_jobs(paths) if args.jobs is None else Int(1, 64).check("jobs", args.jobs)
    timeout_s = Number().check("timeout", args.timeout)
    with (
        _telling(args.reports),
        _terminable(),
        _Progress([path.stem for path in paths]).shown() as progress,
    ):
        return investigate(
            paths,
            parameters=parameters,
            reports=args.reports,
            timeout_s=timeout_s,
            on_progress=progress.step,
            on_end=progress.end,
            jobs=jobs,
            baseline=args.baseline,
        )


def exit_code(results: "Results") -> int:
    """Return 0 where all is well, 2 where a notebook refused its parameters, else 1."""
    if any(one.status == "refused" for one in results):
        return 2
    return 0 if results.ok else 1


@contextmanager
def _telling(reports: Path) -> Iterator[None]:
    """Say where the results are when the block is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        index = reports / "index.html"
        if index.exists():
            print(f"attnlab: what had ended, and what had not: {index}", file=sys.stderr)
        raise


@contextmanager
def _terminable() -> Iterator[None]:
    """Take SIGTERM and SIGHUP as an interruption, so that no kernel is left behind."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        print(f"attnlab: ended by {signal.Signals(signum).name}", file=sys.stderr)
        sys.exit(128 + signum)

    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    try:
        before = {one: signal.signal(one, stop) for one in signals}
    except ValueError:  # not in the main thread, which alone may do this
        yield
        return
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class _Progress:
    """Show on standard error what runs: bars while a person watches, else a line a notebook."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._done = names, 0
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            console=_ERRORS,
            transient=True,
            disable=not _ERRORS.is_terminal,
        )
        self._all = self._bars.add_task("notebooks", total=len(names), unit="notebooks")
        self._tasks = {
            name: self._bars.add_task(name, total=None, visible=False, start=False, unit="cells")
            for name in names
        }

    @contextmanager
    def shown(self) -> "Iterator[_Progress]":
        """Show it while the block runs."""
        with self._bars:
            yield self

    def step(self, name: str, cell: int, total: int) -> None:
        """Tell how many cells of a notebook are done."""
        task = self._tasks[name]
        if not self._bars.disable and self._bars.tasks[task].start_time is None:
            self._bars.start_task(task)
        self._bars.update(task, completed=cell, total=total, visible=True)

    def end(self, outcome: "Outcome") -> None:
        """Tell that a notebook has ended, and how."""
        self._done += 1
        self._bars.update(self._tasks[outcome.name], visible=False)
        self._bars.update(self._all, completed=self._done)
        place = f"{self._done} of {len(self._names)}"
        said = f"attnlab: {place}: {outcome.name} {outcome.status} in {outcome.seconds:.0f} s"
        self._bars.console.print(said, markup=False)
