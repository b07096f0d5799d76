"""Flags: conversion of a command line to a Case, or to parameters of a notebook."""

import argparse
import ast
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import FieldType, Flag, Int, Maybe, Number, OneOf, refuse, suggestion

# Fields by name, each declared with a group, a type and a help text.
Declarations = Mapping[str, "dataclasses.Field[Any]"]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports a wrong command line in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}{self._hint(message)}\n")

    def _hint(self, message: str) -> str:
        """Return a suggestion for the command, the flag or the choice that a message rejects."""
        if match := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            return suggestion(match[1], re.findall(r"[\w.-]+", match[2]))
        if match := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            return suggestion(match[1], self._flags())
        return ""

    def _flags(self) -> list[str]:
        """Return the flags of this parser and of its commands."""
        commands = [
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
        ]
        return [flag for parser in (self, *commands) for flag in parser._option_string_actions]

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print a help text or an error; argparse would ignore a full disk or a closed pipe."""
        if message:
            (file or sys.stderr).write(message)


_PATHS = ("FILE", "FILE.html", "DIR", "FOLDER", "PATH")
_TYPES = {"int": int, "float": float, "str": str, "Path": Path}


def flag(group: Any, spec: str, text: str, **options: Any) -> None:
    """Add a flag such as "--out DIR", or "call CALL:Path" without dashes, to a group; ``text`` is its help.

    The word after the name stands for the value, which is a Path if the word is FILE, DIR, FOLDER or PATH.
    ":int", ":float", ":str" or ":Path" states another type, "a|b" the values that are allowed, "…" that the
    flag may be repeated, and "= value" the default. A flag without a word is true or false. What has no
    dashes may end with "?", "*" or "+", as nargs. "-p/--parameter" has two names. ``options``: of
    add_argument.
    """
    spec, has_default, default = re.fullmatch(r"(.*?)( =(?: (.*))?)?", spec, re.DOTALL).groups("")  # type: ignore[union-attr]
    names, _, word = spec.partition(" ")
    given: dict[str, Any] = {"default": default} if has_default else {}
    if word.endswith("…"):
        given["action"] = "append"
    elif word[-1:] in ("?", "*", "+") and not names.startswith("-"):
        given["nargs"] = word[-1]
    word = word.rstrip("…?*+") if given.keys() & {"action", "nargs"} else word
    shown, _, kind = word.rpartition(":")
    shown, kind = (shown, kind) if kind in _TYPES else (word, "Path" if word in _PATHS else "str")
    if "|" in word:
        given["choices"] = tuple(word.split("|"))
    elif word:
        given |= {"type": _TYPES[kind], "metavar": shown}
    elif names.startswith("-") and "choices" not in options:
        given["action"] = "store_true"
    group.add_argument(*names.split("/"), help=text, **{**given, **options})


def add_case_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of a Case, in groups, and the flags --test-id and --case."""
    base = parser.add_argument_group("initial case, which the flags below change")
    flag(base, "--test-id ID", "start from this pytest id of vLLM's attention tests")
    flag(base, "--case FILE", "start from the Case in this JSON file; - means standard input")
    add_field_flags(parser, FIELDS)


def add_field_flags(parser: argparse.ArgumentParser, fields: Declarations) -> None:
    """Add a flag for each of the declared fields, in their groups."""
    groups: dict[str, Any] = {}
    for name, field in fields.items():
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        kind: FieldType = field.metadata["kind"]
        inner = kind.kind if isinstance(kind, Maybe) else kind
        optional = {"nargs": "?", "const": "true"} if isinstance(inner, Flag) else {}
        default = kind.text(field.default)
        allowed = kind.allowed
        if isinstance(kind, OneOf) and kind.meanings:
            allowed = "; ".join(f"{choice}: {text}" for choice, text in kind.meanings.items())
        groups[title].add_argument(
            "--" + name.replace("_", "-"),
            dest="field_" + name,
            metavar="VALUE",
            help=f"{field.metadata['help']}; {allowed} (default: {default})".replace("%", "%%"),
            **optional,
        )


def given_fields(args: argparse.Namespace, fields: Declarations) -> dict[str, Any]:
    """Return the values of the declared fields that the command line sets; raise InvalidCase."""
    texts = {name: getattr(args, "field_" + name) for name in fields}
    return {
        name: fields[name].metadata["kind"].parse(name, text)
        for name, text in texts.items()
        if text is not None
    }


def case_of(args: argparse.Namespace) -> Case:
    """Return the Case of the flags; raise InvalidCase."""
    if args.test_id is not None and args.case is not None:
        raise InvalidCase("test-id must not be given with case", field="test_id")
    case = Case()
    if args.test_id is not None:
        case = Case.from_test_id(args.test_id)
    elif args.case is not None:
        case = Case.from_json(read_text(str(args.case)))
    return case.replace(**given_fields(args, FIELDS))


def read_text(file: str) -> str:
    """Return the text of a file, or of standard input for "-"; raise InvalidCase."""
    if file == "-" and sys.stdin is None:
        raise InvalidCase("standard input must not be closed")
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        name = "standard input" if file == "-" else file
        raise InvalidCase(f"{name} must be a readable text file: {error}") from error


def notebook_parameters(words: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE words as notebook parameters; raise InvalidCase.

    The value of a Case's field is parsed and checked by the field's type. Other values are integers if
    they look like one, otherwise text.
    """
    parameters: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise InvalidCase(f"parameter must be NAME=VALUE, got {word!r}")
        if name in FIELDS:
            kind = field_type(name)
            parameters[name] = kind.check(name, kind.parse(name, text))
        else:
            parameters[name] = int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
    return parameters


_INJECTED = "# Parameters\n"  # first line of the cell that papermill inserts


@dataclass(frozen=True)
class _Whole(Int):
    """Any integer of 32 bits."""

    @property
    def allowed(self) -> str:
        return "an integer"


_KINDS: dict[type, FieldType] = {bool: Flag(), int: _Whole(-(2**31)), float: Number(zero=True)}


def share_out(parameters: Mapping[str, Any], paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Return for each notebook those of the parameters that it has, checked."""
    known = {path: read_parameters(path) for path in paths}
    everywhere = set().union(*known.values())
    for name in parameters:
        if name not in everywhere:
            known_names = ", ".join(sorted(everywhere)) or "none"
            raise InvalidCase(
                f"parameter must be one that a notebook has ({known_names}), got {name!r}"
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
    """Raise InvalidCase if papermill got a parameter that the notebook does not have."""
    for place, source in enumerate(cells[1:], 1):
        if source.startswith(_INJECTED):
            known = _assigned(cells[place - 1])
            for name in _assigned(source):
                if name not in known:
                    raise InvalidCase(f"parameter must be one of {', '.join(known)}, got {name!r}")
            return


def _assigned(source: str) -> dict[str, Any]:
    """Return the names that a cell assigns, each with its value, or None if that is not a literal."""
    found: dict[str, Any] = {}
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return found
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            several = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in several:
                if isinstance(target, ast.Name):
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
