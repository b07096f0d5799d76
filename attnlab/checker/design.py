"""Covering design: rows of knob values in which every allowed pair occurs, and every allowed triple of mask,
cache kind and split.

covertable makes the rows. What is allowed follows from the rules of a Case: the values of a pair must fit
when all other knobs are plain, and every row must be a Case.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import covertable

from attnlab.case.errors import InvalidCase
from attnlab.checker.knobs import TRIPLE, Value

Row = dict[str, str]  # the name of a value by the name of its knob
Tuple = tuple[tuple[str, str], ...]  # the same for some knobs
Make = Callable[[Mapping[str, Any]], object]  # returns the Case of fields, or raises InvalidCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The knobs of an op, and what is not allowed.

    - ``values``: the values by the names of knob and value; each is allowed alone.
    - ``refused``: the reason of each value, pair and triple that is not allowed.
    - ``make``: returns the Case of a row's fields.
    """

    values: Mapping[str, Mapping[str, Value]]
    refused: Mapping[Tuple, str]
    make: Make

    def fields(self, row: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of a Case that a row sets; raise InvalidCase if two values set one field."""
        fields: dict[str, Any] = {}
        for knob, name in row.items():
            for field, value in self.values[knob][name].fields.items():
                if field in fields and fields[field] != value:
                    raise InvalidCase(f"two values set {field}", field=field)
                fields[field] = value
        return fields

    def plain(self) -> Row:
        """Return the row of plain values."""
        return {knob: next(iter(values)) for knob, values in self.values.items()}

    def wanted(self) -> Iterator[Tuple]:
        """Yield every allowed pair, and every allowed triple of mask, cache kind and split."""
        triple = [knob for knob in self.values if knob in TRIPLE]
        groups = [*combinations(self.values, 2), *([tuple(triple)] if len(triple) == 3 else [])]
        for knobs in groups:
            for names in product(*(self.values[knob] for knob in knobs)):
                entry = tuple(zip(knobs, names, strict=True))
                if not self.reason(entry):
                    yield entry

    def reason(self, entry: Tuple) -> str:
        """Return why a pair or triple is not allowed, or ""."""
        sizes = range(2, len(entry) + 1)
        parts = (part for size in sizes for part in combinations(entry, size))
        return next((self.refused[part] for part in parts if part in self.refused), "")

    def rows(self, seed: int, first: Sequence[Row] = ()) -> Iterator[Row]:
        """Yield the rows, those that cover most first. Rows that ``first`` has are not repeated."""
        knobs = {knob: list(values) for knob, values in self.values.items()}
        triple = [knob for knob in knobs if knob in TRIPLE]
        made = covertable.make_async(
            knobs,
            strength=2,
            sub_models=[{"fields": triple, "strength": 3}] if len(triple) == 3 else [],
            constraints=list(self._constraints()),
            presets=[dict(row) for row in first],
            salt=str(seed),
        )
        for row in made:
            if row not in first:
                yield row

    def _constraints(self) -> Iterator[dict[str, Any]]:
        """Yield the constraints in covertable's form: of each pair or triple of knobs, and of whole rows."""
        knobs = {tuple(knob for knob, _ in entry) for entry in self.refused if len(entry) > 1}
        for names in sorted(knobs):

            def is_allowed(row: Row, names: tuple[str, ...] = names) -> bool:
                return tuple((knob, row[knob]) for knob in names) not in self.refused

            yield {"operator": "fn", "requires": list(names), "evaluate": is_allowed}
        yield {"operator": "fn", "requires": list(self.values), "evaluate": self._is_case}

    def _is_case(self, row: Row) -> bool:
        try:
            self.make(self.fields(row))
        except InvalidCase:
            return False
        return True


def find_design(values: Mapping[str, Mapping[str, Value]], make: Make) -> Design:
    """Return the design of some knobs, without the values that are not allowed alone."""
    refused: dict[Tuple, str] = {}
    every = Design(values=values, refused=refused, make=make)
    kept: dict[str, dict[str, Value]] = {}
    for knob, named in values.items():
        kept[knob] = {}
        made = list[object]()
        for name, value in named.items():
            row = {**every.plain(), knob: name}
            why = _refusal(every, row)
            if not why and (case := make(every.fields(row))) in made:
                why = "it changes nothing"
            if why:
                refused[((knob, name),)] = why
            else:
                made.append(case)
                kept[knob][name] = value
    kept = {knob: named for knob, named in kept.items() if len(named) > 1}
    design = Design(values=kept, refused=refused, make=make)
    for one, other in combinations(kept, 2):
        for names in product(kept[one], kept[other]):
            entry = ((one, names[0]), (other, names[1]))
            why = _refusal(design, {**design.plain(), **dict(entry)})
            if why:
                refused[entry] = why
    return design


def _refusal(design: Design, row: Row) -> str:
    """Return why a row is not a Case, or ""."""
    try:
        design.make(design.fields(row))
    except InvalidCase as error:
        return str(error)
    return ""


def uncovered(design: Design, rows: Iterable[Mapping[str, str]]) -> list[Tuple]:
    """Return the allowed pairs and triples that no row has."""
    made = [dict(row) for row in rows]
    return [
        entry
        for entry in design.wanted()
        if not any(all(row.get(knob) == name for knob, name in entry) for row in made)
    ]
