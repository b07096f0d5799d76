"""Command: the name, the help and the function of one command."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BAD_INPUT = "2 bad input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the command line.

    - ``purpose``: one sentence; ``examples``: command lines; ``exit_codes``: all but 2, as
      "0 …; 1 …"; ``arguments``: the positional ones, for the usage line; ``notes``: the end of the help.
    - ``add_flags`` adds the command's flags; ``run`` runs it and returns the exit code.
    """

    name: str
    purpose: str
    examples: tuple[str, ...]
    exit_codes: str
    run: Callable[[argparse.Namespace], int]
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    arguments: str = ""
    notes: str = ""

    @property
    def description(self) -> str:
        """Return the beginning of the help: purpose, examples and exit codes."""
        examples = "\n".join(f"  {example}" for example in self.examples)
        codes = f"{self.exit_codes}; {BAD_INPUT}"
        return f"{self.purpose}\n\nexamples:\n{examples}\n\nexit codes: {codes}"

    def add_to(self, commands: Any) -> None:
        """Add the command to the subparsers of the command line."""
        parser: argparse.ArgumentParser = commands.add_parser(
            self.name,
            help=self.purpose[0].lower() + self.purpose[1:].rstrip("."),
            usage=f"attnlab {self.name} [OPTIONS] {self.arguments}".rstrip(),
            description=self.description,
            epilog=self.notes.strip() or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_flags(parser)
        parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON document on standard output instead of text",
        )
        parser.set_defaults(command=self.run)
