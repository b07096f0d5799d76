"""SecondCase: another case on the same backend, which descriptions must predict before they are stated."""

import dataclasses
from collections.abc import Callable

import torch

from attnlab.case.errors import AttnLabError
from attnlab.weights.description import Description
from attnlab.weights.evidence import compare
from attnlab.weights.examine import Examined, Subject, examine
from attnlab.weights.head_rules import HeadGain, HeadScore
from attnlab.weights.search import Found
from attnlab.weights.usable import usable_rows, with_elements
from attnlab.weights.values import ValueFaults, predicts_values

Other = Callable[[tuple[int, ...] | None, bool], Subject | None]


class SecondCase:
    """Measures another case when it is needed, once for the same heads.

    ``other`` returns another subject on the same backend, or None. Its arguments: the query heads that a
    description concerns (None for all), and whether every head is needed.
    """

    def __init__(self, other: Other | None) -> None:
        self._other = other
        self._known: dict[tuple[tuple[int, ...] | None, bool], Examined | None] = {}

    def examined(self, heads: tuple[int, ...] | None, *, every_head: bool) -> Examined | None:
        """Return the sums of the lanes of another case; None without one."""
        for key in ((None, True), (heads, every_head)):
            if key in self._known:
                return self._known[key]
        subject = None if self._other is None else self._other(heads, every_head)
        found = None
        if subject is not None:
            try:
                found = examine(subject, resolve=False, values=every_head)
            except AttnLabError:
                found = None
        self._known[heads, every_head] = found
        return found

    def confirmed(self, search: Found, faults: ValueFaults) -> tuple[Found, bool | None]:
        """Return the descriptions that predict the other case's weights, and whether there was one."""
        first = search.descriptions[0]
        every_head = any(_is_by_head(one) for one in search.descriptions) or faults.is_rule
        found = self.examined(first.scope.heads, every_head=every_head)
        if found is None:
            return search, None
        found = with_elements(found, faults.elements)
        usable, lanes = usable_rows(found), found.measurement.lanes
        if not len(usable.rows):
            return search, None
        folded = found.measurement.folded[usable.rows]
        kept = [
            one
            for one in search.descriptions
            if compare(usable.setup, folded, lanes.fold(one.weights(usable.setup))).complete
        ]
        return dataclasses.replace(search, descriptions=tuple(kept)), bool(kept)

    def confirms_values(self, faults: ValueFaults) -> bool | None:
        """Answer whether the faults predict the output of another case; None without one."""
        found = self.examined(None, every_head=True)
        if found is None or not bool(found.measurement.finite.any()):
            return None
        found = with_elements(found, faults.elements)
        rows: torch.Tensor = predicts_values(found.setup, found.measurement, faults)
        return bool(rows[found.measurement.finite].all())


def _is_by_head(one: Description) -> bool:
    return any(isinstance(rule, HeadScore | HeadGain) for rule in one.rules)
