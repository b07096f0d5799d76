"""Finding: one fault of a kernel, or one observation, with the smallest Case that shows it.

A fault makes a result wrong by more than rounding. An observation does not: it is worth knowing, but no
error by itself."""

import ast
import dataclasses
import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.ops import OPS
from attnlab.case.shown import Shown
from attnlab.linear.state_case import STATE_OPS, StateCase

if TYPE_CHECKING:  # the flags of a check are refused without torch
    from attnlab.diagnosis.claims import KernelLine
    from attnlab.kernels.backend import Backend

HORIZON, BEYOND = "int32_horizon", "int32_beyond"
KINDS = {
    "wrong_output": "the output differs from the reference by more than rounding",
    "wrong_bytes": "the cache holds other bytes than it should after the write",
    "wrong_lse": "the log-sum-exp returned with the output is wrong",
    "wrong_state": "states of linear attention are wrong after the call, and every output is right",
    "rows_not_written": "rows of the output are not written",
    "reads_unwritten_slots": "the output depends on slots that were never written",
    "reads_freed_blocks": "the output depends on blocks that the sliding window has freed",
    "not_deterministic": "equal calls give different outputs",
    "fails": "the op raises an error that its contract does not state",
    HORIZON: "an int32 offset overflows at a size that fits on one GPU of 288 GB",
}
OBSERVATIONS = {
    "out_of_bounds": "a kernel reads or writes outside its tensors",
    "int32_wrap": "a product of int32 numbers overflows",
    BEYOND: "an int32 offset overflows only at a size that does not fit on one GPU of 288 GB",
    "follows_empty_slots": "the output depends on unwritten slots, within rounding",
    "reads_foreign_slots": "a kernel reads slots of another sequence, or slots that no sequence owns",
    "reads_future_slots": "a kernel reads tokens after the last row that the program computes",
    "reads_empty_slots": "a kernel reads unwritten slots of the sequence's own blocks",
    "reads_outside_window": "a kernel reads tokens before the sliding window of every row",
}
UNNAMED = "unnamed"  # the diagnosis of a wrong output before what explains it was looked for
# Diagnoses that are neither a defect of the catalogue nor a rule, in words.
_IN_WORDS = {
    "empty slots": "the output depends on what slots hold that were never written",
    "empty blocks": "the output depends on blocks that the sliding window has freed, which are empty",
    "recycled blocks": "the output depends on blocks that the sliding window has freed, which another "
    "sequence has taken",
    "strides ignored": "the result is wrong with strided tensors, and right if they are contiguous",
    "padding not left out": "the result is wrong if rows pad the batch, and right without them",
    "both parts empty": "the output of a padding row whose parts are both empty is not 0",
    "logarithm of the sum": "the log-sum-exp is wrong",
    "contents of the output buffer": "the output depends on what its buffer held before the call",
    "unwritten memory": "the output depends on memory that no kernel has written: scratch memory, or an "
    "output that the op allocates",
    "not deterministic": "equal calls give different outputs",
    "finite contents": "the output changes with the numbers in unwritten slots, within rounding",
    "block offset beyond 2^31 elements": "the output is wrong if blocks lie beyond 2^31 elements, and right "
    "with small block numbers",
    "own slot": "the cache holds wrong bytes in a slot of a token",
    "slot without owner": "the cache holds wrong bytes in a slot without a token",
    "rows_never_written": "rows of the output keep what its buffer held",
    "unexplained": "the output is wrong, and no known fault explains it",
    UNNAMED: "the output is wrong, and the search for what explains it did not end",
    "FP8 query without a scale": "FP8 queries are accepted, and the op has no argument for their scale",
    "FP8 cache without a scale": "FP8 caches are accepted, and the op has no argument for a scale",
    "FP8 cache without scales": "FP8 caches are accepted, and the op has no arguments for their scales",
    "int8 cache without a scale": "int8 caches are accepted, and the op has no argument for a scale",
    "int8 cache without scales": "int8 caches are accepted, and the op has no arguments for their scales",
}
_OP_ARGUMENT = "op_argument "
_TUPLES = ("names", "wrong_in", "right_in", "contents", "horizon")


def case_of(op: str, fields: Mapping[str, Any]) -> Case:
    """Return the Case of an op with some fields; of an op of linear attention a StateCase, which has what
    findings use: ``op``, ``changes``, ``replace``, ``to_cli``. Raises InvalidCase."""
    kind = StateCase if op in STATE_OPS else Case
    return cast(Case, kind.from_dict({**fields, "op": op}))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding(Shown):
    """One fault or observation.

    - ``kind``: a key of KINDS (a fault) or of OBSERVATIONS.
    - ``evidence``: what the run showed, in one sentence.
    - ``diagnosis``: the name of the defect that explains it, or the status of the diagnosis.
    - ``names``: all defects that explain the output of ``first``; several if that does not decide.
    - ``description``: what is known of the fault besides its name: the text of each defect in ``names``, or
      the rules that reproduce the output; "" if nothing is.
    - ``wrong_in``, ``right_in``: kinds of rows, "decode" and "prefill", in which the fault shows, and in
      which it would show if the kernel of these rows had it.
    - ``contents``: without a diagnosis, kinds of regularities that account for all wrong numbers.
    - ``case``: the smallest Case that shows it.
    - ``first``: the Case that showed it first; None if that is ``case``.
    - ``seen``: the number of cases that showed it.
    - ``lines``: source lines that may hold the fault, the likeliest first, if they were looked for;
      ``no_lines``: why there are none, or "".
    - ``flags``: what the command that reproduces it needs besides the Case, such as --source.
    - ``horizon``: the flags of ``attnlab horizon`` that show it, instead of a Case; empty for other kinds.
    """

    op: str
    kind: str
    case: Case
    evidence: str
    diagnosis: str
    seen: int = 1
    first: Case | None = None
    flags: tuple[str, ...] = ()
    lines: "tuple[KernelLine, ...]" = ()
    no_lines: str = ""
    names: tuple[str, ...] = ()
    description: str = ""
    wrong_in: tuple[str, ...] = ()
    right_in: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()
    horizon: tuple[str, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Return whether the finding makes a result wrong."""
        return self.kind in KINDS

    @property
    def state_case(self) -> StateCase | None:
        """Return ``case`` as what it is with an op of linear attention, else None."""
        return cast(StateCase, self.case) if self.op in STATE_OPS else None

    @property
    def is_named(self) -> bool:
        """Return whether a single defect explains the output."""
        return self.diagnosis in self.names

    @property
    def order(self) -> tuple[str, int]:
        """Return what findings of an op are sorted by: the kind, then how much is known of the fault."""
        known_less = ("ambiguous", "described", "unexplained", UNNAMED)
        is_less = self.diagnosis in known_less
        return self.kind, 1 + known_less.index(self.diagnosis) if is_less else 0

    @property
    def title(self) -> str:
        """Return what is known of the fault, in words."""
        if self.diagnosis == "ambiguous" and self.names:
            return f"several faults explain it: {self.description or ', '.join(self.names)}"
        if self.description:
            return self.description
        if self.kind == "fails":
            return f"the op raises: {self.evidence}"
        if self.horizon:
            kernel, _, size = self.diagnosis.partition(": ")
            return f"an int32 offset of {kernel} overflows with {size}"
        first, _, rest = self.diagnosis.partition(": ")
        if first.startswith(_OP_ARGUMENT):
            names = f"; it is as with {rest}" if rest else ""
            argument = first.replace(_OP_ARGUMENT, "the op argument ")
            return f"the output is wrong with {argument}{names}"
        if first in _IN_WORDS:
            return _IN_WORDS[first] + (f" (op argument {rest})" if rest else "")
        text = {**KINDS, **OBSERVATIONS}[self.kind]
        return text if self.diagnosis in ("described", self.kind) else f"{text}: {self.diagnosis}"

    @property
    def group(self) -> tuple[str, str, str]:
        """Return (op, kind, what is known of the fault); findings with the same group are reported once."""
        known = (self.diagnosis, *(f"not in {one} rows" for one in self.right_in), *self.contents)
        return self.op, self.kind, "; ".join(known)

    def is_same(self, other: "Finding") -> bool:
        """Answer whether another finding may be the same fault: an equal diagnosis, or a defect that explains
        both, and no evidence that separates them."""
        if (self.op, self.kind) != (other.op, other.kind) or self._is_separate(other):
            return False
        return self.diagnosis == other.diagnosis or bool(set(self.names) & set(other.names))

    def is_alike(self, other: "Finding") -> bool:
        """Answer whether one description reproduces both outputs; it says what wrong rows hold, not which
        rows are wrong."""
        mine, theirs = ((one.contents, one.description) for one in (self, other))
        return bool(self.contents and self.description) and mine == theirs

    def _is_separate(self, other: "Finding") -> bool:
        """Answer whether rows of one kernel are wrong here and right there, or hold other contents."""
        if self.is_alike(other):
            return False
        if set(self.wrong_in) & set(other.right_in) or set(other.wrong_in) & set(self.right_in):
            return True
        return bool(self.contents and other.contents) and not set(self.contents) & set(
            other.contents
        )

    def joined(self, other: "Finding") -> "Finding":
        """Return this finding with what another one of the same fault adds.

        Only names that explain both are left; a single one is the diagnosis, with its description.
        """
        both: dict[str, Any] = {
            name: tuple(sorted({*getattr(self, name), *getattr(other, name)}))
            for name in ("wrong_in", "right_in")
        }
        joined = dataclasses.replace(self, **both)
        names = tuple(name for name in self.names if name in other.names)
        if not names:
            return joined
        is_single = len(names) == 1 and self.diagnosis != UNNAMED
        diagnosis = names[0] if is_single else self.diagnosis
        texts = (one.description for one in (self, other) if set(one.names) == set(names))
        text = next(texts, self.description)
        return dataclasses.replace(joined, names=names, diagnosis=diagnosis, description=text)

    def seen_in(self, total: int | None = None) -> str:
        """Return how many cases show the finding, of a total if given; a horizon has runs of its own."""
        if self.horizon:
            return "two runs of the kernel"
        of = "" if total is None else f" of {total}"
        return f"{self.seen}{of} {'case' if self.seen == 1 and not of else 'cases'}"

    def run(self, source: str = "SOURCE") -> str:
        """Return the smallest Case as a command line, or the horizon of a kernel of ``source``."""
        if self.horizon:
            return shlex.join(["attnlab", "horizon", source, *self.horizon])
        return self.case.to_cli()

    @property
    def command(self) -> str:
        """Return the command line that reproduces the finding: the same kernel on the smallest Case.

        It exits with 1 as long as a fault exists. For an observation of accesses it records them. An
        output that follows empty slots needs two runs: the command makes both, and compares them.
        """
        case, flags = self.case, self.flags
        if self.horizon:
            return self.run(dict(itertools.pairwise(flags)).get("--source", "SOURCE"))
        if self.kind == "follows_empty_slots":
            flags = (*flags, "--against", "empty_slots=garbage")
        elif not self.is_fault and case.backend != "model" and not case.first_block:
            case = case.replace(trace_reads=True)
        return shlex.join([*shlex.split(case.to_cli()), *flags])

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON-able values; ``run`` is the command that reproduces it."""
        fields = dataclasses.asdict(self)
        first = None if self.first is None else self.first.to_cli()
        return {**fields, "run": self.command, "first": first}

    def to_verdict(self) -> dict[str, Any]:
        """Return the finding of one case as JSON-able values; :meth:`from_verdict` restores it."""
        names = ("op", "kind", "evidence", "diagnosis", "description", *_TUPLES)
        return {**{name: getattr(self, name) for name in names}, "case": self.case.changes()}

    @classmethod
    def from_verdict(cls, fields: Mapping[str, Any]) -> "Finding":
        """Return the finding of :meth:`to_verdict`."""
        tuples = {name: tuple(fields.get(name, ())) for name in _TUPLES}
        return cls(**{**fields, "case": case_of(fields["op"], fields["case"]), **tuples})


def merged_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings at their smallest Cases, with those of one fault joined.

    Two are one fault if they have the same smallest Case, which has one output, or if a defect explains both
    and nothing separates them (:meth:`Finding.is_same`). A finding with a name stands for one without.
    """
    found: list[Finding] = []
    for one in findings:
        i = next((i for i, other in enumerate(found) if _is_one_fault(other, one)), None)
        if i is None:
            found.append(one)
            continue
        first, other = found[i], one
        if not first.is_named and one.is_named:
            first, other = one, first
        found[i] = dataclasses.replace(first.joined(other), seen=first.seen + other.seen)
    return found


def _is_one_fault(one: Finding, other: Finding) -> bool:
    if (one.op, one.kind) == (other.op, other.kind) and one.case == other.case:
        return not one.horizon or one.diagnosis == other.diagnosis
    may_be = bool(set(one.names) & set(other.names)) or one.is_alike(other)
    return may_be and one.is_same(other)


# Known findings: a list of faults that are expected, each with a link, so that only new ones count.
#
# As text, one finding per line, "#" begins a comment; "*" stands for any diagnosis:
#
#     # op               kind          diagnosis          link
#     unified_attention  wrong_output  sink_beside_alibi  https://example.org/issues/1
#
# As JSON, a list of objects with op, kind, link and, optionally, diagnosis.

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
            matched.append(dataclasses.replace(entry, finding=finding))
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
        # A "#" inside a word begins no comment, as in a link.
        words = [*itertools.takewhile(lambda word: not word.startswith("#"), line.split())]
        if not words:
            continue
        if len(words) < 3:
            refuse(f"line {number} of {path}", "OP KIND [DIAGNOSIS] LINK", line)
        op, kind, *diagnosis, link = words
        found.append(_entry(f"line {number} of {path}", op, kind, " ".join(diagnosis), link))
    return found


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
    if op not in OPS:
        refuse(f"op in {where}", f"one of {', '.join(OPS)}", op)
    if kind not in KINDS:
        refuse(f"kind in {where}", f"one of {', '.join(KINDS)}", kind)
    return KnownFinding(op=op, kind=kind, diagnosis=diagnosis or ANY, link=link)


# Where findings are in source code: the definition of an op, or the line that the evidence names.


# As RunLog writes it: "prefix_prefill.py:123 reads …" and "prefix_prefill.py:123 multiplies in int32: …".
_EVIDENCE = re.compile(r"(?:^| )([\w.-]+\.py):(\d+)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A line of a file: ``file`` relative to the root of the source, with "/"; ``line`` from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def op_locations(backend: "Backend") -> dict[str, Location]:
    """Return where each op of a backend is defined; an op without a file, such as a model, is left out."""
    located = {op: _located(backend, op) for op in backend.ops}
    return {op: place for op, place in located.items() if place is not None}


def location_of(op: str, evidence: str, ops: dict[str, Location]) -> Location | None:
    """Return the line that the evidence of a finding names, else the definition of its op, or None.

    The files of a kernel are in the folder of its op.
    """
    defined = ops.get(op)
    match = _EVIDENCE.search(evidence)
    if defined is None or match is None:
        return defined
    file = PurePosixPath(defined.file).with_name(match[1])
    return Location(file=str(file), line=int(match[2]))


def _located(backend: "Backend", op: str) -> Location | None:
    """Return where an op is defined; None if it has no file."""
    if (source := backend.op_source) is not None:
        try:
            path = source.op_file(OPS[op].module)
        except AttnLabError:  # the release does not have the op
            return None
        return _definition(path, path.relative_to(source.root), OPS[op].function)
    from attnlab.kernels.plugin import PluginBackend

    if isinstance(backend, PluginBackend) and backend.file is not None:
        path = Path(backend.file)
        return _definition(path, Path(os.path.relpath(path)), backend.kernel.__name__)
    return None


def _definition(path: Path, shown: Path, function: str) -> Location:
    """Return the line of a function's ``def`` at the top of a file; line 1 if it is not there."""
    nodes = (n for n in ast.parse(path.read_bytes()).body if isinstance(n, ast.FunctionDef))
    lines = (node.lineno for node in nodes if node.name == function)
    return Location(file=shown.as_posix(), line=next(lines, 1))
