"""Pattern: what an error looks like, stated before any hypothesis about its cause."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.json import json_value
from attnlab.diagnosis.cells import Cells

PLACES = ("sequences", "rows", "heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One regularity of an error.

    - ``kind``: what was found, for example "rows", "heads", "zeros", "factor", "keys".
    - ``where``: the rows, heads or sequences that it concerns, in words; ``what``: the regularity.
    - ``values``: the same as numbers.
    - ``accounts_for``: how many wrong cells the fact reproduces up to rounding; 0 for facts about places
      and sizes. A cell is one head of one row.
    """

    kind: str
    where: str
    what: str
    values: dict[str, Any] = field(default_factory=dict)
    accounts_for: int = 0

    @property
    def sentence(self) -> str:
        """Return the fact in words."""
        return f"{self.where}: {self.what}" if self.where else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What an error looks like.

    - ``facts``: places first, then sizes and values.
    - ``wrong_cells``: the number of wrong cells (heads of rows) that were examined.
    """

    facts: tuple[Fact, ...] = ()
    wrong_cells: int = 0

    @property
    def rules(self) -> list[Fact]:
        """Return the facts that reproduce wrong cells."""
        return [fact for fact in self.facts if fact.accounts_for]

    @property
    def is_complete(self) -> bool:
        """Answer whether the rules reproduce every wrong cell that was examined, or 99 % of many."""
        return 0 < 0.99 * self.wrong_cells <= sum(fact.accounts_for for fact in self.rules)

    def of(self, kind: str) -> list[Fact]:
        """Return the facts of a kind."""
        return [fact for fact in self.facts if fact.kind == kind]

    def sentences(self) -> list[str]:
        """Return the pattern in words: one sentence about places, then one per fact."""
        places = "; ".join(fact.sentence for fact in self.facts if fact.kind in PLACES)
        others = [fact.sentence for fact in self.facts if fact.kind not in PLACES]
        return [places, *others] if places else others

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern as JSON-able values."""
        facts = [
            {
                "kind": fact.kind,
                "sentence": fact.sentence,
                "accounts_for": fact.accounts_for,
                **fact.values,
            }
            for fact in self.facts
        ]
        document = {"wrong_cells": self.wrong_cells, "complete": self.is_complete, "facts": facts}
        converted: dict[str, Any] = json_value(document)
        return converted


def list_text(noun: str, numbers: Sequence[int], most: int = 6) -> str:
    """Return "row 5", "rows 5–9" or "rows 5, 7, 9, … (12)"."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{noun}s {numbers[0]}–{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:most]))
    return f"{noun}s {shown}" + (f", … ({len(numbers)})" if len(numbers) > most else "")


def region_text(cells: Cells, mask: torch.Tensor) -> str:
    """Return the cells in ``mask`` [n] bool as rows and heads, such as "row 20" or "head 3"."""
    rows, heads = cells.row[mask].unique(), cells.head[mask].unique()
    is_box = int((torch.isin(cells.row, rows) & torch.isin(cells.head, heads)).sum())
    if is_box != int(mask.sum()):
        if bool((mask == cells.is_wrong).all()):
            return "every wrong row and head"
        return f"{int(mask.sum())} of {int(cells.is_wrong.sum())} wrong cells"
    has_all_rows = len(rows) == len(cells.row.unique())
    has_all_heads = len(heads) == len(cells.head.unique())
    if has_all_rows and has_all_heads:
        return "the whole output"
    if has_all_heads:
        return list_text("row", rows.tolist())
    head_text = list_text("head", heads.tolist())
    return head_text if has_all_rows else f"{list_text('row', rows.tolist())}, {head_text}"
