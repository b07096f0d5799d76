"""Commands that list a catalogue of the lab, or explain one entry of it."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.case.fields import refuse
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, show


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """What a command lists.

    - ``noun``: the name of one entry, such as "stage"; the command is its plural.
    - ``load`` returns each entry's facts by its name; ``columns`` are the facts that the list shows.
    """

    noun: str
    purpose: str
    example: str
    columns: Sequence[str]
    load: Callable[[], Mapping[str, Mapping[str, Any]]]

    @property
    def command(self) -> Command:
        """Return the command of the catalogue."""
        plural = f"{self.noun}s"
        return Command(
            name=plural,
            purpose=self.purpose,
            arguments="[NAME]",
            examples=(f"attnlab {plural}", f"attnlab {plural} {self.example}"),
            exit_codes="0 always",
            add_flags=self._add_flags,
            run=self._run,
            notes="--json prints one object with the facts of each entry by its name, or of NAME alone.",
        )

    def _add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "entry", nargs="?", metavar="NAME", help=f"explain this {self.noun} (default: list all)"
        )

    def _run(self, args: argparse.Namespace) -> int:
        entries = self.load()
        if args.entry is not None and args.entry not in entries:
            refuse(self.noun, f"one of {', '.join(entries)}", args.entry)
        chosen = entries if args.entry is None else {args.entry: entries[args.entry]}
        if args.json:
            facts = chosen if args.entry is None else chosen[args.entry]
            print_json({name: _json(value) for name, value in facts.items()})
            return 0
        from attnlab.cli.catalogue_sheet import list_sheet, one_sheet

        if args.entry is None:
            show(list_sheet(self.noun, chosen, self.columns))
        else:
            show(one_sheet(self.noun, args.entry, chosen[args.entry]))
        return 0


def _json(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
