"""Known findings: a list of faults that are expected, each with a link, so that only new ones count.

As text, one finding per line, "#" begins a comment; "*" stands for any diagnosis:

    # op               kind          diagnosis          link
    unified_attention  wrong_output  sink_beside_alibi  https://example.org/issues/1

As JSON, a list of objects with op, kind, link and, optionally, diagnosis.
"""

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.ops import TRITON_OPS
from attnlab.checker.finding import KINDS, Finding

ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFinding:
    """An expected fault. ``diagnosis`` "*" matches any; ``finding``: the fault that it matched, or None."""

    op: str
    kind: str
    link: str
    diagnosis: str = ANY
    finding: Finding | None = None

    def matches(self, finding: Finding) -> bool:
        """Answer whether a finding is the expected one."""
        is_same = (self.op, self.kind) == (finding.op, finding.kind)
        return is_same and self.diagnosis in (ANY, finding.diagnosis)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON-able values."""
        return {
            "op": self.op,
            "kind": self.kind,
            "diagnosis": self.diagnosis if self.finding is None else self.finding.diagnosis,
            "link": self.link,
        }


def split_known(
    known: Sequence[KnownFinding], faults: Sequence[Finding], complete: AbstractSet[str]
) -> tuple[list[KnownFinding], list[KnownFinding]]:
    """Return the entries that faults match, one for each such fault, and those that none matches.

    ``complete``: the ops whose cases all ran. A missing fault of another op means nothing.
    """
    matched = []
    for finding in faults:
        entry = next((entry for entry in known if entry.matches(finding)), None)
        if entry is not None:
            fields = {name: getattr(entry, name) for name in ("op", "kind", "link", "diagnosis")}
            matched.append(KnownFinding(**fields, finding=finding))
    missing = [
        entry
        for entry in known
        if entry.op in complete and not any(entry.matches(finding) for finding in faults)
    ]
    return matched, missing


def read_known(path: Path) -> list[KnownFinding]:
    """Return the entries of a file. Raises InvalidCase, with the line or the index, for a wrong entry."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidCase(f"known must be a file that can be read, got {path}: {why}") from error
    if path.suffix == ".json" or text.lstrip().startswith("["):
        return _of_json(text, path)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = _words(line)
        if not words:
            continue
        if len(words) < 3:
            refuse(f"line {number} of {path}", "OP KIND [DIAGNOSIS] LINK", line)
        op, kind, *diagnosis, link = words
        found.append(_entry(f"line {number} of {path}", op, kind, " ".join(diagnosis), link))
    return found


def _words(line: str) -> list[str]:
    """Return the words of a line up to a comment; a "#" inside a word begins none, as in a link."""
    words = line.split()
    end = next((i for i, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:end]


def _of_json(text: str, path: Path) -> list[KnownFinding]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise InvalidCase(f"known must be JSON or text, got {path}: {error}") from error
    if not isinstance(entries, list):
        refuse("known", "a list of objects", entries)
    found = []
    for i, fields in enumerate(entries):
        where = f"entry {i} of {path}"
        if not isinstance(fields, dict) or not {"op", "kind", "link"} <= fields.keys():
            refuse(where, "an object with op, kind and link", fields)
        op, kind, link = (str(fields[name]) for name in ("op", "kind", "link"))
        found.append(_entry(where, op, kind, str(fields.get("diagnosis", ANY)), link))
    return found


def _entry(where: str, op: str, kind: str, diagnosis: str, link: str) -> KnownFinding:
    if op not in TRITON_OPS:
        refuse(f"op in {where}", f"one of {', '.join(TRITON_OPS)}", op)
    if kind not in KINDS:
        refuse(f"kind in {where}", f"one of {', '.join(KINDS)}", kind)
    return KnownFinding(op=op, kind=kind, diagnosis=diagnosis or ANY, link=link)
