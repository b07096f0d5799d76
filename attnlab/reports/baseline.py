"""Compare the verdicts of a run with those of a run that was kept: a verdicts.json of before."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.show.notebook import Json, Verdict

FieldType = Literal["gone", "broken", "changed", "mended", "new", "figures", "parameters"]
_LOSSES = ("gone", "broken", "changed")
_WRONG = "baseline must be a verdicts.json of attnlab investigate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Hold one difference from the baseline.

    `kind` is "gone" (a verdict is not there any more), "broken" (it was as expected and is not now),
    "changed" (it found something else, and is as right or wrong as before), "mended" (it is as expected
    now), "new", "figures" (it found the same, on other evidence) or "parameters" (the notebook ran with
    others). `before` and `after` are what was found, or the figures that differ.
    """

    notebook: str
    verdict: str
    kind: FieldType
    before: Json = None
    after: Json = None

    @property
    def is_loss(self) -> bool:
        """Answer whether a regression run fails over it."""
        return self.kind in _LOSSES

    def to_json(self) -> dict[str, Json]:
        """Return the change as plain JSON values."""
        return {
            "notebook": self.notebook,
            "verdict": self.verdict,
            "kind": self.kind,
            "is_loss": self.is_loss,
            "before": self.before,
            "after": self.after,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Hold what a baseline says of one notebook."""

    verdicts: tuple[Verdict, ...]
    parameters: Mapping[str, Json]


def read_baseline(path: Path) -> dict[str, Kept]:
    """Return what a verdicts.json holds, by notebook.

    Raises InvalidCase, in one line, for a file that cannot be read or is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCase(f"{_WRONG}, got {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCase(f"{_WRONG}, got {path}: {' '.join(str(error).split())}") from error
    try:
        return {one["name"]: _kept(one) for one in document["notebooks"]}
    except (AttnLabError, KeyError, TypeError, ValueError) as error:
        raise InvalidCase(f"{_WRONG}, got {path}, which has another form") from error


def compare(name: str, now: Kept, before: Kept | None) -> list[Change]:
    """Return what differs between a notebook's verdicts now and in the baseline, losses first."""
    was = {verdict.name: verdict for verdict in before.verdicts} if before else {}
    found = {verdict.name: verdict for verdict in now.verdicts}
    changes = [
        Change(notebook=name, verdict=gone, kind="gone", before=verdict.found)
        for gone, verdict in was.items()
        if gone not in found
    ]
    for verdict in found.values():
        if change := _change(name, was.get(verdict.name), verdict):
            changes.append(change)
    if before and dict(before.parameters) != dict(now.parameters):
        old, new = (
            _apart(before.parameters, now.parameters),
            _apart(now.parameters, before.parameters),
        )
        changes.append(Change(notebook=name, verdict="", kind="parameters", before=old, after=new))
    return sorted(changes, key=lambda change: not change.is_loss)


def _change(name: str, was: Verdict | None, now: Verdict) -> Change | None:
    if was is None:
        return Change(notebook=name, verdict=now.name, kind="new", after=now.found)
    before, after = was.found, now.found
    if was.ok != now.ok:
        kind: FieldType = "mended" if now.ok else "broken"
    elif before != after:
        kind = "changed"
    elif was.evidence != now.evidence:
        kind = "figures"
        before, after = _apart(was.evidence, now.evidence), _apart(now.evidence, was.evidence)
    else:
        return None
    return Change(notebook=name, verdict=now.name, kind=kind, before=before, after=after)


def _apart(one: Mapping[str, Json], other: Mapping[str, Json]) -> Json:
    """Return what of one mapping the other does not have."""
    return {key: value for key, value in one.items() if key not in other or other[key] != value}


def _kept(notebook: Mapping[str, Any]) -> Kept:
    verdicts: Sequence[Mapping[str, Any]] = notebook["verdicts"]
    return Kept(
        verdicts=tuple(Verdict.from_json(verdict) for verdict in verdicts),
        parameters=dict(notebook.get("parameters", {})),
    )
