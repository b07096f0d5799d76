"""What commands print: a document or a sheet on standard output, everything else on standard error."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnlab.case.json import json_value
from attnlab.case.shown import Shown

if TYPE_CHECKING:
    from rich.console import Console


def errors() -> "Console":
    """Return the console of standard error."""
    return _console(stderr=True, soft_wrap=True)


def _console(**options: Any) -> "Console":
    """Return a console that raises if its pipe is closed; rich would end the process with exit code 1.

    rich is imported here, because a wrong argument and --help need none of it.
    """
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise

    return Output(highlight=False, **options)


def print_json(document: Any) -> None:
    """Print one strict JSON document on standard output."""
    print(json.dumps(json_value(document), indent=2, allow_nan=False))


def show(noun: Shown) -> None:
    """Print a noun's sheet on standard output, complete; 110 columns wide unless a terminal says."""
    from attnlab.show.sheets import WIDTH, text

    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = _console(width=WIDTH if fixed else None)
    console.print(text(noun, complete=True), crop=False)


def notice(text: str) -> None:
    """Print one line on standard error."""
    print(f"attnlab: {text}", file=sys.stderr)


@contextmanager
def progress(text: str) -> Iterator[Callable[..., None]]:
    """Show the current step on standard error if that is a terminal.

    Yields a function of (step, done, total); with ``done`` and ``total`` it draws a bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = errors()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=None)

        def update(
            step: str | None = None, done: int | None = None, total: int | None = None
        ) -> None:
            bar.update(task, description=step or text, completed=done, total=total)

        yield update
