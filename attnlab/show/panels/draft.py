"""A Case in the making: what the controls say, whether it is a Case, and which control is wrong if not."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import InvalidCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a draft is no Case: the knob that is named, or "", and the text of the InvalidCase."""

    knob: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A value for every knob, not yet held to the rules between them.

    - ``values``: by knob; of a knob in ``unread`` the last good one.
    - ``unread``: by knob, why the text in its control is no value.
    - ``last``: the knob that was changed last, or "".
    """

    values: Mapping[str, Any]
    unread: Mapping[str, str] = field(default_factory=dict)
    last: str = ""

    @classmethod
    def of(cls, case: Case) -> "Draft":
        """Return the draft that is the Case."""
        return cls(values=dataclasses.asdict(case))

    def with_value(self, name: str, value: Any) -> "Draft":
        """Return the draft with another value of one knob."""
        unread = {knob: why for knob, why in self.unread.items() if knob != name}
        return Draft(values={**self.values, name: value}, unread=unread, last=name)

    def with_unread(self, name: str, why: str) -> "Draft":
        """Return the draft with a control whose text is no value."""
        return Draft(values=self.values, unread={**self.unread, name: why}, last=name)

    def case(self) -> Case:
        """Return the Case; raise InvalidCase."""
        for name, why in self.unread.items():
            raise InvalidCase(why, field=name)
        return Case.from_dict(self.values)

    def problem(self) -> Problem | None:
        """Return why this is no Case, or None where it is one."""
        try:
            self.case()
        except InvalidCase as error:
            return Problem(
                knob=error.field if error.field in FIELDS else self.last, text=str(error)
            )
        return None
