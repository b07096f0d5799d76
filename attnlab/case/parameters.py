"""Parameters of notebooks: reading their defaults, checking values, and assigning them to notebooks."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import FieldType, Flag, Int, Number, refuse

_INJECTED = "# Parameters\n"  # first line of the cell that papermill inserts


@dataclass(frozen=True)
class _Whole(Int):
    """Any integer of 32 bits."""

    @property
    def allowed(self) -> str:
        return "an integer"


_KINDS: dict[type, FieldType] = {bool: Flag(), int: _Whole(-(2**31)), float: Number(zero=True)}


def share_out(parameters: Mapping[str, Any], paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Return for each notebook those of the parameters that it has, checked.

    Raises InvalidCase if no notebook has a parameter, if a value has the wrong type, and if the values
    of a notebook contradict each other.
    """
    known = {path: read_parameters(path) for path in paths}
    everywhere = set().union(*known.values())
    for name in parameters:
        if name not in everywhere:
            known_names = ", ".join(sorted(everywhere)) or "none"
            raise InvalidCase(
                f"parameter must be one that a notebook has ({known_names}), got {name!r}",
                field="parameter",
            )
    shared = {
        path: {
            name: typed(name, value, defaults[name])
            for name, value in parameters.items()
            if name in defaults
        }
        for path, defaults in known.items()
    }
    for path, given in shared.items():
        if given:
            _check_together(path, {**known[path], **given})
    return shared


def read_parameters(path: Path) -> dict[str, Any]:
    """Return the names that a notebook's `parameters` cell defines, with their defaults.

    A default that is not a literal counts as None. The result is empty if the file cannot be read; that
    is reported when the notebook runs.
    """
    import nbformat

    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:
        return {}
    tagged = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    return _assigned(tagged[0]) if tagged else {}


def check_injected(cells: Sequence[str]) -> None:
    """Raise InvalidCase if papermill got a parameter that the notebook does not have.

    `cells` are the sources of the cells that have run. papermill would define such a parameter, and no
    cell would read it.
    """
    for place, source in enumerate(cells[1:], 1):
        if source.startswith(_INJECTED):
            known = _assigned(cells[place - 1])
            for name in _assigned(source):
                if name not in known:
                    raise InvalidCase(
                        f"parameter must be one of {', '.join(known)}, got {name!r}",
                        field="parameter",
                    )
            return


def _assigned(source: str) -> dict[str, Any]:
    """Return the names that a cell assigns, each with its value, or None if that is not a literal."""
    found: dict[str, Any] = {}
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return found
    for statement in statements:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        elif isinstance(statement, ast.Assign):
            targets = statement.targets
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(statement, ast.Assign | ast.AnnAssign):
                found[target.id] = _literal(statement.value)
    return found


def _literal(value: ast.expr | None) -> Any:
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def typed(name: str, value: Any, default: Any) -> Any:
    """Return a value, which may be command-line text, in the type of a parameter's default.

    The value of a Case's field is checked by the field's type. `source` is a path, which is made
    absolute because notebooks run in another folder. Raises InvalidCase.
    """
    kind = _KINDS.get(type(default))
    if name in FIELDS:
        value = field_type(name).check(name, value)
        if name == "backend" and ".py:" in value:
            value = str(Path(value).absolute())
        return value
    if name == "source" and value:
        if not Path(value).exists():
            refuse(name, "a path that exists", value)
        return str(Path(value).absolute())
    if isinstance(default, str):
        return str(value)
    if kind is None:
        return value
    return kind.check(name, kind.parse(name, str(value)))


def _check_together(path: Path, values: Mapping[str, Any]) -> None:
    """Build the Case of a notebook's parameters, so that a contradiction is reported before it runs.

    None means "as in the test id".
    """
    given = {name: value for name, value in values.items() if name in FIELDS and value is not None}
    try:
        if test_id := values.get("test_id"):
            Case.from_test_id(test_id, **given)
        else:
            Case.from_dict(given)
    except InvalidCase as error:
        raise InvalidCase(f"{path.stem}: {error}", field=error.field) from None
