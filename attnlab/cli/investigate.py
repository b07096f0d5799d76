"""The command ``attnlab investigate``."""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from attnlab.case.errors import InvalidCase, check_installed
from attnlab.case.fields import Int, Number, is_plugin
from attnlab.case.flags import notebook_parameters
from attnlab.cli.command import errors, notice, print_json, progress, runs, show
from attnlab.tasks.run import handling

if TYPE_CHECKING:
    from attnlab.reports.notebook_result import Outcome, Results

_NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def run_investigate(args: argparse.Namespace) -> "Results":
    """Run the notebooks that the flags select; raise AttnLabError for bad input."""
    from attnlab.reports.investigate import default_jobs, find_notebooks, investigate

    paths = find_notebooks(args.notebooks, args.notebooks_folder or _NOTEBOOKS)
    parameters = notebook_parameters(args.parameter)
    jobs = default_jobs(paths) if args.jobs is None else Int(1, 64).check("jobs", args.jobs)
    timeout_s = Number().check("timeout", args.timeout)
    with (
        _index_on_interrupt(args.reports),
        handling(("SIGTERM", "SIGHUP"), _terminate),
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
    """Return 0 if all notebooks are as expected, 2 if one refused its parameters, else 1."""
    if any(outcome.status == "refused" for outcome in results):
        return 2
    return 0 if results.ok else 1


@contextmanager
def _index_on_interrupt(reports: Path) -> Iterator[None]:
    """Print where the results are if the block is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        index = reports / "index.html"
        if index.exists():
            print(f"attnlab: results so far: {index}", file=sys.stderr)
        raise


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal as an interruption, so that no notebook kernel keeps running."""
    print(f"attnlab: terminated by {signal.Signals(signum).name}", file=sys.stderr)
    sys.exit(128 + signum)


class _Progress:
    """Progress on standard error: bars on a terminal, otherwise one line per notebook."""

    def __init__(self, names: list[str]) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._names, self._done = names, 0
        console = errors()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._bars.add_task("notebooks", total=len(names), unit="notebooks")
        self._tasks = {
            name: self._bars.add_task(name, total=None, visible=False, start=False, unit="cells")
            for name in names
        }

    @contextmanager
    def shown(self) -> "Iterator[_Progress]":
        """Show the progress while the block runs."""
        with self._bars:
            yield self

    def step(self, name: str, cell: int, total: int) -> None:
        """Update the number of cells of a notebook that are done."""
        task = self._tasks[name]
        if not self._bars.disable and self._bars.tasks[task].start_time is None:
            self._bars.start_task(task)
        self._bars.update(task, completed=cell, total=total, visible=True)

    def end(self, outcome: "Outcome") -> None:
        """Report the status of a notebook that has ended."""
        self._done += 1
        self._bars.update(self._tasks[outcome.name], visible=False)
        self._bars.update(self._all, completed=self._done)
        count = f"{self._done} of {len(self._names)}"
        line = f"attnlab: {count}: {outcome.name} {outcome.status} in {outcome.seconds:.0f} s"
        self._bars.console.print(line, markup=False)


@runs("investigate")
def _investigate(args: argparse.Namespace) -> int:
    results = run_investigate(args)
    if args.json:
        print_json(json.loads((args.reports / "verdicts.json").read_text(encoding="utf-8")))
    else:
        show(results)
        print(f"reports: {args.reports / 'index.html'}")
    return exit_code(results)


@runs("new-investigation")
def _new(args: argparse.Namespace) -> int:
    folder, start = args.notebooks_folder or _NOTEBOOKS, args.start
    if not folder.is_dir():
        raise InvalidCase(f"notebooks-folder must be a folder, got {folder}")
    is_id = "[" in start or start.startswith("test_")
    if args.full and not is_id:
        raise InvalidCase("full must be given with a pytest id")
    if not (is_id or is_plugin(start) or Path(start).expanduser().exists()):
        raise InvalidCase(f"from must be a call, a Case, a pytest id or a kernel, got {start!r}")

    check_installed("attnlab new-investigation", "nbclient", "ipykernel")
    from attnlab.replay.new_investigation import next_notebook, read_start, write_notebook

    path = next_notebook(folder, args.title)
    kernel, source = args.kernel or "", args.source or ""
    is_reduced = is_id and not args.full
    if is_reduced:
        notice("reduced to 8 heads and lengths up to 128; --full runs the size of the test")
    with progress("running the experiments") as on_step:
        begun = read_start(start, kernel=kernel, source=source, stage=args.stage, is_full=args.full)
        found = write_notebook(path, begun, args.title, on_step)
    if args.json:
        print_json({"notebook": str(path), "cause": found.sentences[0]})
    else:
        flags = "" if folder == _NOTEBOOKS else f" --notebooks-folder {shlex.quote(str(folder))}"
        again = f"attnlab investigate {path.stem[:2]}{flags}"
        print(f"{found.sentences[0]}\nwritten: {path}\nrun it again: {again}")
    return 0


@runs("claims")
def _claims(args: argparse.Namespace) -> int:
    from attnlab.reports.investigate import import_study

    judge_claims = import_study().judge_claims
    with progress("testing the claims") as on_step:
        findings = judge_claims(on_step=on_step)
    if args.json:
        print_json([finding.to_dict() for finding in findings])
    else:
        show(findings)
    return 0
