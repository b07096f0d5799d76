"""Draft: the values of a panel's controls before they form a valid Case."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import InvalidCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a draft is not a Case: the field at fault, or "", and the text of the InvalidCase."""

    field: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A value for every field of a Case, not yet checked against the rules between fields.

    - ``values``: by field; for a field in ``unread`` its last valid value.
    - ``unread``: by field, why the text in its control cannot be parsed.
    - ``last``: the field that was changed last, or "".
    """

    values: Mapping[str, Any]
    unread: Mapping[str, str] = field(default_factory=dict)
    last: str = ""

    @classmethod
    def of(cls, case: Case) -> "Draft":
        """Return the draft with the values of a Case."""
        return cls(values=dataclasses.asdict(case))

    def with_value(self, name: str, value: Any) -> "Draft":
        """Return the draft with another value of one field."""
        unread = {other: why for other, why in self.unread.items() if other != name}
        return Draft(values={**self.values, name: value}, unread=unread, last=name)

    def with_unread(self, name: str, why: str) -> "Draft":
        """Return the draft with a field whose control holds a text that cannot be parsed."""
        return Draft(values=self.values, unread={**self.unread, name: why}, last=name)

    def case(self) -> Case:
        """Return the Case; raise InvalidCase if the values do not form one."""
        for name, why in self.unread.items():
            raise InvalidCase(why, field=name)
        return Case.from_dict(self.values)

    def problem(self) -> Problem | None:
        """Return why the values do not form a Case, or None if they do.

        If the error names no field of a Case, the field that was changed last is at fault.
        """
        try:
            self.case()
        except InvalidCase as error:
            name = error.field if error.field in FIELDS else self.last
            return Problem(field=name, text=str(error))
        return None
