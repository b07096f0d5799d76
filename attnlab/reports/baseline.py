"""Compare the verdicts of a run with a baseline: the verdicts.json of an earlier run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.show.notebook import Json, Verdict

ChangeKind = Literal["gone", "broken", "changed", "fixed", "new", "figures", "parameters"]
_LOSSES = ("gone", "broken", "changed")
_WRONG = "baseline must be a verdicts.json of attnlab investigate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Hold one difference from the baseline.

    ``kind`` is "gone" (the verdict no longer exists), "broken" (it was as expected before), "changed" (it
    found another value and is as right or wrong as before), "fixed" (it is as expected now), "new",
    "figures" (the same value with other evidence) or "parameters" (the notebook ran with other ones).
    ``before`` and ``after`` are the values found, or the evidence that differs.
    """

    notebook: str
    verdict: str
    kind: ChangeKind
    before: Json = None
    after: Json = None

    @property
    def is_loss(self) -> bool:
        """Answer whether the change fails a regression run."""
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
    """Hold the verdicts and parameters of one notebook in a baseline."""

    verdicts: tuple[Verdict, ...]
    parameters: Mapping[str, Json]


def read_baseline(path: Path) -> dict[str, Kept]:
    """Return the content of a verdicts.json, by notebook.

    Raises InvalidCase if the file cannot be read or has another form.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCase(f"{_WRONG}, got {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCase(f"{_WRONG}, got {path}: {' '.join(str(error).split())}") from error
    try:
        return {notebook["name"]: _kept(notebook) for notebook in document["notebooks"]}
    except (AttnLabError, KeyError, TypeError, ValueError) as error:
        raise InvalidCase(f"{_WRONG}, got {path}, which has another form") from error


def compare(name: str, now: Kept, before: Kept | None) -> list[Change]:
    """Return the differences between a notebook's verdicts now and in the baseline, losses first."""
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
            _difference(before.parameters, now.parameters),
            _difference(now.parameters, before.parameters),
        )
        changes.append(Change(notebook=name, verdict="", kind="parameters", before=old, after=new))
    return sorted(changes, key=lambda change: not change.is_loss)


def _change(name: str, was: Verdict | None, now: Verdict) -> Change | None:
    if was is None:
        return Change(notebook=name, verdict=now.name, kind="new", after=now.found)
    before, after = was.found, now.found
    if was.ok != now.ok:
        kind: ChangeKind = "fixed" if now.ok else "broken"
    elif before != after:
        kind = "changed"
    elif was.evidence != now.evidence:
        kind = "figures"
        before, after = (
            _difference(was.evidence, now.evidence),
            _difference(now.evidence, was.evidence),
        )
    else:
        return None
    return Change(notebook=name, verdict=now.name, kind=kind, before=before, after=after)


def _difference(mapping: Mapping[str, Json], other: Mapping[str, Json]) -> Json:
    """Return the entries of a mapping that the other does not have."""
    return {key: value for key, value in mapping.items() if key not in other or other[key] != value}


def _kept(notebook: Mapping[str, Any]) -> Kept:
    verdicts: Sequence[Mapping[str, Any]] = notebook["verdicts"]
    return Kept(
        verdicts=tuple(Verdict.from_json(verdict) for verdict in verdicts),
        parameters=dict(notebook.get("parameters", {})),
    )
