"""Command: the name, the help and the function of one command."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BAD_INPUT = "2 bad input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the command line.

    - ``purpose``: one sentence; ``examples``: command lines; ``exit_codes``: those besides 2, as
      "0 …; 1 …"; ``notes``: a further paragraph of the help.
    - ``add_flags`` adds the command's flags; ``run`` runs it and returns the exit code.
    """

    name: str
    purpose: str
    examples: tuple[str, ...]
    exit_codes: str
    run: Callable[[argparse.Namespace], int]
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    notes: str = ""

    @property
    def epilog(self) -> str:
        """Return the end of the help: examples, exit codes and notes."""
        lines = ["examples:", *(f"  {example}" for example in self.examples)]
        lines += ["", "exit codes:", f"  {self.exit_codes}; {BAD_INPUT}"]
        return "\n".join([*lines, *(["", self.notes.strip()] if self.notes else [])])

    def add_to(self, commands: Any) -> None:
        """Add the command to the subparsers of the command line."""
        parser: argparse.ArgumentParser = commands.add_parser(
            self.name,
            help=self.purpose[0].lower() + self.purpose[1:].rstrip("."),
            description=self.purpose,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_flags(parser)
        parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON document on standard output instead of text",
        )
        parser.set_defaults(command=self.run)
