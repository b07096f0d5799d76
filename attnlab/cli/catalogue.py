"""Commands that list a catalogue of the lab, or explain one entry of it."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.case.fields import refuse
from attnlab.case.platforms import PLATFORMS, STAGES
from attnlab.cli.command import Command, print_json, show
from attnlab.show.sheets.sheet import Facts, Grid, Row, Sheet, Words

# Sheets of a catalogue: a table of all entries, and the facts of one.


def list_sheet(
    noun: str, entries: Mapping[str, Mapping[str, Any]], columns: Sequence[str]
) -> Sheet:
    """Return a row for each entry, with the facts in ``columns``."""
    rows: list[Row] = [
        [Words(name, code=True), *(_text(facts[column]) for column in columns)]
        for name, facts in entries.items()
    ]
    titles = [noun, *(column.replace("_", " ") for column in columns)]
    table = Grid(titles, rows, most=len(rows))
    return Sheet.of(f"{noun.capitalize()}s", str(len(entries)), table)


def one_sheet(noun: str, name: str, facts: Mapping[str, Any]) -> Sheet:
    """Return every fact of an entry."""
    rows = [(fact.replace("_", " "), _text(value)) for fact, value in facts.items()]
    return Sheet.of(noun.capitalize(), Words(name, code=True), Facts(rows))


def _text(value: Any) -> str:
    """Return a fact as text: yes or no, and lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


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
            print_json(chosen if args.entry is None else chosen[args.entry])
        elif args.entry is None:
            show(list_sheet(self.noun, chosen, self.columns))
        else:
            show(one_sheet(self.noun, args.entry, chosen[args.entry]))
        return 0


# The command ``attnlab defects``.


def _load_defects() -> dict[str, dict[str, Any]]:
    """Return the facts of each defect. This imports torch."""
    from attnlab.defects import DEFECTS

    return {
        name: {
            "what_happens": defect.text,
            "family": defect.family,
            "rows_it_can_change": defect.touches,
            "changes_only_rounding": defect.harmless,
            "violations_that_cause_it": list(defect.links),
            "reported_in": list(defect.seen_in),
        }
        for name, defect in DEFECTS.items()
    }


DEFECTS_COMMAND = Catalogue(
    noun="defect",
    purpose="List the defects that a diagnosis recognises and that power plants in a test's kernels.",
    example="kv_head_modulo",
    columns=("what_happens", "family"),
    load=_load_defects,
).command


# The command ``attnlab platforms``.


def _load_platforms() -> dict[str, dict[str, Any]]:
    """Return the facts of each platform."""
    return {
        name: {
            "example": platform.example,
            "family": platform.family,
            "format_of_fp8": platform.fp8_e4m3,
            "runs_rocm_code": platform.is_rocm,
            "triton_converts_e4m3": platform.triton_e4m3,
        }
        for name, platform in PLATFORMS.items()
    }


PLATFORMS_COMMAND = Catalogue(
    noun="platform",
    purpose="List the platforms whose dispatch and formats the lab models.",
    example="gfx942",
    columns=("example", "family", "format_of_fp8", "triton_converts_e4m3"),
    load=_load_platforms,
).command


# The command ``attnlab stages``.


def _load_stages() -> dict[str, dict[str, Any]]:
    """Return the facts of each stage."""
    return {
        name: {
            "meaning": stage.story,
            "block_table": stage.block_table,
            "seq_lens": stage.seq_lens,
            "query_start_loc": stage.query_start_loc,
            "fill": stage.fill,
            "wrapper_cast": stage.wrapper_cast,
        }
        for name, stage in STAGES.items()
    }


STAGES_COMMAND = Catalogue(
    noun="stage",
    purpose="List the stages of vLLM's test: dtypes of its index tensors, and what it writes to the cache.",
    example="int32_before_cumsum",
    columns=("meaning", "query_start_loc", "fill"),
    load=_load_stages,
).command
