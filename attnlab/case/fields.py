"""Field types: what a field of a Case may hold, and its text on a command line.

Each type has three methods: ``check`` returns an allowed value in its canonical form, ``parse`` reads a
command-line text, ``text`` writes it. The first two raise :class:`~attnlab.case.errors.InvalidCase` with
one line that names the field, what is allowed and what was given.
"""

import ast
import dataclasses
import difflib
import json
import math
import re
import reprlib
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, Self

from attnlab.case.errors import InvalidCase
from attnlab.case.shown import json_fields
from attnlab.library.op import Package, libraries, package_of, package_of_module

# Names in use elsewhere, lower case, and what a Case calls them.
_GPUS = {
    "gfx90a": ("mi200", "mi210", "mi250", "mi250x"),
    "gfx942": ("mi300", "mi300a", "mi300x", "mi325", "mi325x"),
    "gfx950": ("mi350", "mi350x", "mi355", "mi355x"),
    "gfx1100": ("7900", "7900xtx", "7900xt", "w7900"),
    "gfx1201": ("9070", "9070xt", "r9700"),
    "sm_80": ("a100", "a800", "sm80", "ampere"),
    "sm_90": ("h100", "h200", "h20", "gh200", "sm90", "hopper"),
}
_OTHER = {
    "float16": ("fp16", "half", "f16"),
    "bfloat16": ("bf16",),
    "float32": ("fp32", "float", "f32"),
    "fp8_e4m3": ("e4m3", "e4m3fn", "e4m3fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    "fp8_e5m2": ("e5m2", "float8_e5m2"),
    "cuda": ("gpu",),
}
_MEANT = {
    word: name for table in (_GPUS, _OTHER) for name, words in table.items() for word in words
}
# GPUs without rules of their own: the nearest platform, and the difference.
_NEAR = {
    word: ("sm_90", f"attnlab has no rules for {architecture}")
    for architecture, words in {
        "sm_100": ("b100", "b200", "gb200", "sm100", "sm_100", "blackwell"),
        "sm_103": ("b300", "gb300", "sm103", "sm_103"),
        "sm_120": ("rtx5090", "sm120", "sm_120"),
        "sm_89": ("l4", "l40", "l40s", "rtx4090", "sm89", "sm_89"),
    }.items()
    for word in words
}


def suggestion(word: object, allowed: Iterable[str]) -> str:
    """Return "; did you mean …?" with the nearest of the allowed values, or "" if none is near."""
    if not isinstance(word, str):
        return ""
    known = [name for name in allowed if isinstance(name, str)]
    key = re.sub(r"[\s-]+", "", word.lower())
    key = re.sub(r"^(amd|nvidia|instinct|radeon|geforce|rx|torch\.)+", "", key)
    if key in _NEAR and _NEAR[key][0] in known:
        name, why = _NEAR[key]
        return f"; {why}, the nearest platform is {name}"
    found = next((name for name in (_MEANT.get(key), key) if name in known), None)
    if found is None and (release := _nearest_release(word, known)):
        return release
    if found is None:
        folded = {name.lower().replace("-", "_"): name for name in known}
        close = difflib.get_close_matches(word.lower().replace("-", "_"), folded, 1, 0.6)
        found = folded[close[0]] if close else None
    return "" if found is None or found == word else f"; did you mean {found}?"


def _version(text: str) -> tuple[int, ...] | None:
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?\S*", text)
    return None if match is None else tuple(int(part or 0) for part in match.groups())


def _nearest_release(word: str, known: list[str]) -> str:
    """Return the supported rules that a release follows most, as attnlab applies them to a --source."""
    releases = {version: name for name in known if (version := _version(name)) is not None}
    wanted = _version(word)
    if wanted is None or len(releases) != len(known):
        return ""
    first, last = min(releases), max(releases)
    name = releases[first if wanted[:2] <= first[:2] else last]
    return f"; the rules of {name} are used for {word}{difference(word)}"


def difference(release: str) -> str:
    """Return how a release between 0.11.2 and 0.33.0 differs from the rules that are used for it, or "".

    Measured on single releases (docs/findings.md, docs/emulated-device.md); a change is somewhere between
    the last release that has it and the first that does not.
    """
    version = _version(release)
    if version is None or version[:2] <= (0, 11) or version[:2] >= (0, 33):
        return ""
    changes = (
        ((0, 16, 0), "its default softmax scale may be that of 0.11.2"),
        (
            (0, 25, 1),
            "its Triton decode kernel lets NaN of the value cache's unwritten tail through",
        ),
        (
            (0, 25, 1),
            "its ROCm kernel reads past the query with head size 64 and a GQA ratio up to 4",
        ),
        ((0, 31, 0), "its ROCm kernel lets NaN of the value cache's unwritten tail through"),
    )
    differs = [text for first, text in changes if version < first]
    return f", but {'; '.join(differs)}" if differs else ""


def refuse(name: str, allowed: str, value: object, hint: str = "") -> NoReturn:
    """Raise InvalidCase with the line "name must be ``allowed``, got ``value``", and a hint after it."""
    try:
        shown = " ".join(reprlib.repr(value).split())
    except ValueError:  # an integer with more digits than Python converts
        shown = "a very large integer"
    raise InvalidCase(f"{name} must be {allowed}, got {shown}{hint}")


class FieldType(Protocol):
    """What a field may hold."""

    def check(self, name: str, value: Any) -> Any:
        """Return ``value`` in its canonical form, or raise InvalidCase."""

    def parse(self, name: str, text: str) -> Any:
        """Return the value that the command-line ``text`` denotes, unchecked; raise InvalidCase."""
        try:
            return self._read(text)
        except (ValueError, KeyError):
            refuse(name, self.allowed, text)

    def _read(self, text: str) -> Any:
        """Return the value of a text; raise ValueError or KeyError for another."""
        return text

    def text(self, value: Any) -> str:
        """Return the text that :meth:`parse` reads as ``value``."""
        return str(value)

    @property
    def allowed(self) -> str:
        """Return what the field may hold, as text."""


@dataclass(frozen=True)
class OneOf(FieldType):
    """One of several names; ``meanings`` has what each does, for --help-all, if the names do not say it."""

    choices: tuple[str, ...]
    meanings: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.choices)

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.choices:
            refuse(name, self.allowed, value, suggestion(value, self.choices))
        return value


# A user's kernel as a backend: a function in a file or a module, or an entry point of group attnlab.kernels.
ENTRY_POINT = re.compile(r"plugin:[\w.-]+")
MODULE_FUNCTION = re.compile(r"(?!plugin:)(?!.*\.py:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_FILE_FUNCTION = re.compile(r"[^\n]+\.py:[^\W\d]\w*")
_MAPPED = re.compile(r"([^\n]+?:[^\W\d]\w*)\((.*)\)")


@dataclass(frozen=True)
class ArgumentName(OneOf):
    """One of the names of op arguments; that of a former one has a hint at what replaces it."""

    def check(self, name: str, value: Any) -> str:
        if isinstance(value, str) and value not in self.choices and "far_" in value:
            new = value.replace("far_values", "spaced_values")
            hint = "; offsets beyond 2^31 elements are found by attnlab horizon"
            refuse(name, "a known one", value, f"; it is now {new}" if new != value else hint)
        return super().check(name, value)


@dataclass(frozen=True)
class BackendName(OneOf):
    """One of a few names, or a user's kernel: "FILE.py:FUNCTION", "MODULE:FUNCTION", or "plugin:NAME" for an
    entry point.

    Only the form is checked; :mod:`attnlab.kernels.plugin` loads the function.
    """

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.choices)}, FILE.py:FUNCTION, MODULE:FUNCTION or plugin:NAME"

    def check(self, name: str, value: Any) -> str:
        if isinstance(value, str) and is_plugin(value):
            return value
        return super().check(name, value)


def split_mapping(backend: str) -> tuple[str, dict[str, str] | None]:
    """Return the name of a user's kernel without the values of its parameters, and these by parameter.

    "acme:attention(queries=query)" is ("acme:attention", {"queries": "query"}). The values are expressions as
    in the record of an op. None without parentheses. Raises InvalidCase for other text in them.
    """
    match = _MAPPED.fullmatch(backend)
    if match is None:
        return backend, None
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(one.arg for one in call.keywords):
            raise SyntaxError
    except SyntaxError:
        refuse("map", "their_name=expression, separated by commas", match[2])
    return match[1], {str(one.arg): ast.unparse(one.value) for one in call.keywords}


def is_plugin(backend: str) -> bool:
    """Return whether the name of a backend has the form of a user's kernel."""
    forms, name = (MODULE_FUNCTION, _FILE_FUNCTION), split_mapping(backend)[0]
    return bool(ENTRY_POINT.fullmatch(backend)) or any(form.fullmatch(name) for form in forms)


def library_of(backend: str) -> str | None:
    """Return the library whose kernels a backend takes from a source: vllm, or that of "library:NAME"."""
    if backend in ("vllm", "rocm", "cuda"):
        return "vllm"
    kind, _, name = backend.partition(":")
    return name if kind == "library" else None


def package_of_backend(backend: str) -> Package | None:
    """Return the package whose source a backend runs; that of "MODULE:FUNCTION(…)" has no record."""
    if (library := library_of(backend)) is not None:
        if library not in libraries():
            refuse("library", f"one of {', '.join(libraries())}", library)
        return package_of(library)
    name, mapping = split_mapping(backend)
    is_module = mapping is not None and MODULE_FUNCTION.fullmatch(name)
    return package_of_module(name.partition(":")[0]) if is_module else None


def runs_triton(backend: str) -> bool:
    """Answer whether a backend runs Triton ops of a source, of vLLM or of another library."""
    return backend not in ("rocm", "cuda") and package_of_backend(backend) is not None


def names_file(backend: str) -> bool:
    """Return whether the name of a user's kernel is not one of a module or an entry point."""
    name = split_mapping(backend)[0]
    return not (ENTRY_POINT.fullmatch(name) or MODULE_FUNCTION.fullmatch(name))


def check_plugin_file(backend: str) -> Path:
    """Return the file of "FILE.py:FUNCTION". Raises InvalidCase if it does not exist."""
    path = Path(split_mapping(backend)[0].rpartition(":")[0]).expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise InvalidCase(
            f"backend must be FILE.py:FUNCTION of a file that exists, got {backend!r}"
        )
    return path


@dataclass(frozen=True)
class Int(FieldType):
    """An integer of at least ``least`` and at most ``most``."""

    least: int
    most: int = 2**31 - 1

    @property
    def allowed(self) -> str:
        return f"an integer from {self.least} to {self.most}"

    def check(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(name, self.allowed, value)
        if not self.least <= value <= self.most:
            refuse(name, self.allowed, value)
        return value

    def _read(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True)
class Number(FieldType):
    """A finite number above 0, or at least 0 with ``zero``."""

    zero: bool = False

    @property
    def allowed(self) -> str:
        return "a finite number of at least 0" if self.zero else "a finite number above 0"

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(name, self.allowed, value)
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the largest float
            refuse(name, self.allowed, value)
        if not math.isfinite(number) or number < 0 or (number == 0 and not self.zero):
            refuse(name, self.allowed, value)
        return number

    def _read(self, text: str) -> float:
        return float(text)

    def text(self, value: Any) -> str:
        return repr(float(value))


@dataclass(frozen=True)
class Flag(FieldType):
    """True or false."""

    allowed: str = "true or false"

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            refuse(name, self.allowed, value)
        return value

    def _read(self, text: str) -> bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return words[text.lower()]

    def text(self, value: Any) -> str:
        return str(value).lower()


@dataclass(frozen=True)
class Lens(FieldType):
    """A non-empty tuple of token counts of at least ``least``; on a command line "880,410,1"."""

    least: int

    @property
    def allowed(self) -> str:
        return f"a non-empty list of integers from {self.least} to {Int(self.least).most}"

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or not value:
            refuse(name, self.allowed, value)
        for i, n in enumerate(value):
            Int(self.least).check(f"{name}[{i}]", n)
        return tuple(value)

    def _read(self, text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    def text(self, value: Any) -> str:
        return ",".join(map(str, value))


@dataclass(frozen=True)
class Span(FieldType):
    """A non-empty range of indices A to B - 1; on a command line "A:B"."""

    allowed: str = f"a range A:B with 0 <= A < B <= {2**31 - 1}"

    def check(self, name: str, value: Any) -> tuple[int, int]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            refuse(name, self.allowed, value)
        first, last = (Int(0).check(f"{name}[{i}]", n) for i, n in enumerate(value))
        if first >= last:
            refuse(name, self.allowed, value)
        return first, last

    def _read(self, text: str) -> list[int]:
        return [int(n) for n in text.split(":")]

    def text(self, value: Any) -> str:
        return ":".join(map(str, value))


@dataclass(frozen=True)
class Table(FieldType):
    """Rows of numbers, one row per sequence; on a command line JSON, "[[3,1],[0,2]]"."""

    noun: str = "block numbers"

    @property
    def allowed(self) -> str:
        return f"a list of rows of equal length, each of {self.noun} from 0 to {2**31 - 1}"

    def check(self, name: str, value: Any) -> tuple[tuple[int, ...], ...]:
        if not isinstance(value, list | tuple) or not value:
            refuse(name, self.allowed, value)
        rows = tuple(Lens(0).check(f"{name}[{i}]", row) for i, row in enumerate(value))
        if len({len(row) for row in rows}) != 1:
            refuse(name, self.allowed, value)
        return rows

    def _read(self, text: str) -> Any:
        return json.loads(text)

    def text(self, value: Any) -> str:
        return json.dumps(value)


@dataclass(frozen=True)
class Maybe(FieldType):
    """Another type, or None, which means ``meaning``."""

    kind: FieldType
    meaning: str

    @property
    def allowed(self) -> str:
        return f"{self.kind.allowed}, or none ({self.meaning})"

    def check(self, name: str, value: Any) -> Any:
        return None if value is None else self.kind.check(name, value)

    def parse(self, name: str, text: str) -> Any:
        return None if text.lower() == "none" else self.kind.parse(name, text)

    def text(self, value: Any) -> str:
        return "none" if value is None else self.kind.text(value)


def group(title: str) -> Callable[[Any, FieldType, str], Any]:
    """Return the function that declares a field of a Case in the group ``title``."""

    def declare(default: Any, kind: FieldType, text: str) -> Any:
        return dataclasses.field(
            default=default, metadata={"group": title, "kind": kind, "help": text}
        )

    return declare


def _is_same(value: Any, other: Any) -> bool:
    """Answer whether a value of a field is another one, of its type, too."""
    is_plain = type(value) is type(other) and not isinstance(value, tuple)
    return value is other or (is_plain and bool(value == other))


class Declared:
    """A frozen dataclass whose fields :func:`group` declares: they are checked, and have texts and flags.

    ``_command``: the command whose flags they are.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, "dataclasses.Field[Any]"]]
    _command: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every field by its type, then the rules between fields; raise InvalidCase."""
        for name, one in self.__dataclass_fields__.items():
            if (value := getattr(self, name)) is not one.default:
                object.__setattr__(self, name, one.metadata["kind"].check(name, value))
        for name, is_wrong, allowed in self._rules():
            if is_wrong:
                refuse(name, allowed, getattr(self, name))

    def _rules(self) -> Iterable[tuple[str, bool, str]]:
        """Yield fields, whether their value is wrong, and what is allowed."""
        return ()

    def changes(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {
            name: value
            for name, one in self.__dataclass_fields__.items()
            if (value := getattr(self, name)) != one.default
        }

    def replace(self, **changes: Any) -> Self:
        """Return the object with ``changes``; raise InvalidCase as the constructor does."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if all(name in own and _is_same(value, own[name]) for name, value in changes.items()):
            return self
        return self.from_dict({**own, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a value of strict JSON."""
        return json_fields(self)

    def to_json(self) -> str:
        """Return every field as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the object of a mapping; raise InvalidCase for a name that is not a field."""
        for name in fields:
            if name not in (known := cls.__dataclass_fields__):
                shown = " ".join(str(name).split())
                hint = f"{suggestion(shown, known)}; it has {', '.join(known)}"
                raise InvalidCase(f"{shown} is not a field of {cls.__name__}{hint}", field=shown)
        return cls(**fields)

    def to_cli(self) -> str:
        """Return the command line that runs it."""
        words = ["attnlab", self._command]
        for name, value in self.changes().items():
            kind = self.__dataclass_fields__[name].metadata["kind"]
            words += ["--" + name.replace("_", "-"), kind.text(value)]
        return shlex.join(words)
