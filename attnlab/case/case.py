"""Case: one attention call of the lab, with all its settings in one frozen, validated, hashable value.

Notebook parameters, panels, command-line flags, JSON files and vLLM's pytest ids are all converted to a
Case. The lab has no other configuration.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.pytest_id import fields_of
from attnlab.case.quantities import CaseQuantities
from attnlab.case.rules import check_rules
from attnlab.case.suggestion import suggestion


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case(CaseQuantities):
    """One configuration of one attention call.

    The fields are declared in :mod:`attnlab.case.declaration`; their defaults are those of vLLM's
    test_prefix_prefill.py. Raises InvalidCase, with a line that names the field, for a wrong value or
    for values that contradict each other.
    """

    def __post_init__(self) -> None:
        """Check every field by its type, then the rules between fields; raise InvalidCase."""
        for name in FIELDS:
            object.__setattr__(self, name, field_type(name).check(name, getattr(self, name)))
        check_rules(self)

    def replace(self, **changes: Any) -> "Case":
        """Return a Case with ``changes``; raise InvalidCase as the constructor does."""
        return Case.from_dict({**dataclasses.asdict(self), **changes})

    def changes(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {
            name: getattr(self, name)
            for name, field in FIELDS.items()
            if getattr(self, name) != field.default
        }

    def to_json(self) -> str:
        """Return every field as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def to_cli(self) -> str:
        """Return the command line that runs this Case."""
        words = ["attnlab", "run"]
        for name, value in self.changes().items():
            words += ["--" + name.replace("_", "-"), field_type(name).text(value)]
        return shlex.join(words)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Case":
        """Return the Case of a mapping; raise InvalidCase for a name that is not a field."""
        for name in fields:
            if name not in FIELDS:
                shown = " ".join(str(name).split())
                hint = suggestion(shown, FIELDS)
                raise InvalidCase(
                    f"{shown} is not a field of a Case{hint}; it has {', '.join(FIELDS)}"
                )
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Return the Case of a JSON object; missing fields get their defaults. Raises InvalidCase."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidCase(f"case must be a JSON object: {error}") from error
        if not isinstance(fields, dict):
            refuse("case", "a JSON object", fields)
        return cls.from_dict(fields)

    @classmethod
    def from_test_id(cls, test_id: str, **changes: Any) -> "Case":
        """Return the Case of a vLLM pytest id with ``changes``; see
        :func:`attnlab.case.pytest_id.fields_of`."""
        return cls.from_dict({**fields_of(test_id), **changes})
