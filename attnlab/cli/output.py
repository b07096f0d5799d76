"""What commands print: a document or a sheet on standard output, everything else on standard error."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from attnlab.case.shown import Shown

ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one strict JSON document on standard output."""
    print(json.dumps(json_value(document), indent=2, allow_nan=False))


def json_value(value: Any) -> Any:
    """Return a value with NaN and infinities as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def show(noun: Shown) -> None:
    """Print a noun's sheet on standard output, complete; 110 columns wide unless a terminal says."""
    from attnlab.show.sheets import WIDTH, text

    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(highlight=False, width=WIDTH if fixed else None)
    console.print(text(noun, complete=True))


def notice(text: str) -> None:
    """Print one line on standard error."""
    print(f"attnlab: {text}", file=sys.stderr)


@contextmanager
def progress(text: str) -> Iterator[Callable[..., None]]:
    """Show the current step on standard error if that is a terminal.

    Yields a function of (step, done, total); with ``done`` and ``total`` it draws a bar.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=ERRORS, transient=True, disable=not ERRORS.is_terminal) as bar:
        task = bar.add_task(text, total=None)

        def update(
            step: str | None = None, done: int | None = None, total: int | None = None
        ) -> None:
            bar.update(task, description=step or text, completed=done, total=total)

        yield update
