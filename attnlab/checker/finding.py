"""Finding: one fault of a kernel, or one observation, with the smallest Case that shows it.

A fault makes a result wrong by more than rounding. An observation does not: it is worth knowing, but no
error by itself.
"""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.shown import Shown

if TYPE_CHECKING:
    from attnlab.diagnosis.kernel_location import KernelLine

KINDS = {
    "wrong_output": "the output differs from the reference by more than rounding",
    "wrong_bytes": "the cache holds other bytes than it should after the write",
    "wrong_lse": "the log-sum-exp returned with the output is wrong",
    "rows_not_written": "rows of the output are not written",
    "reads_unwritten_slots": "the output depends on slots that were never written",
    "reads_freed_blocks": "the output depends on blocks that the sliding window has freed",
    "not_deterministic": "equal calls give different outputs",
    "fails": "the op raises an error that its contract does not state",
}
OBSERVATIONS = {
    "out_of_bounds": "a kernel reads or writes outside its tensors",
    "int32_wrap": "a product of int32 numbers overflows",
    "follows_empty_slots": "the output depends on unwritten slots, within rounding",
    "reads_foreign_slots": "a kernel reads slots of another sequence, or slots that no sequence owns",
    "reads_future_slots": "a kernel reads tokens after the last row that the program computes",
    "reads_empty_slots": "a kernel reads unwritten slots of the sequence's own blocks",
    "reads_outside_window": "a kernel reads tokens before the sliding window of every row",
}
_TUPLES = ("names", "wrong_in", "right_in", "contents")


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

    @property
    def is_fault(self) -> bool:
        """Return whether the finding makes a result wrong."""
        return self.kind in KINDS

    @property
    def title(self) -> str:
        """Return the diagnosis, with the names of an ambiguous one or the description of one without."""
        if self.diagnosis == "ambiguous" and self.names:
            return f"ambiguous: {', '.join(self.names)}"
        if self.diagnosis == "described" and self.description:
            return f"described: {self.description}"
        return self.diagnosis

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

    def _is_separate(self, other: "Finding") -> bool:
        """Answer whether rows of one kernel are wrong here and right there, or hold other contents."""
        if set(self.wrong_in) & set(other.right_in) or set(other.wrong_in) & set(self.right_in):
            return True
        return bool(self.contents and other.contents) and not set(self.contents) & set(
            other.contents
        )

    def joined(self, other: "Finding") -> "Finding":
        """Return this finding with what another one of the same fault adds.

        Only names that explain both are left; a single one is the diagnosis.
        """
        both: dict[str, Any] = {
            name: tuple(sorted({*getattr(self, name), *getattr(other, name)}))
            for name in ("wrong_in", "right_in")
        }
        joined = dataclasses.replace(self, **both)
        names = tuple(name for name in self.names if name in other.names)
        if not names:
            return joined
        diagnosis = names[0] if len(names) == 1 else self.diagnosis
        return dataclasses.replace(joined, names=names, diagnosis=diagnosis)

    @property
    def command(self) -> str:
        """Return the command line that reproduces the finding: the same kernel on the smallest Case.

        It exits with 1 as long as a fault exists. For an observation of accesses it records them. An
        output that follows empty slots needs two runs: the command makes both, and compares them.
        """
        case, flags = self.case, self.flags
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
        return cls(**{**fields, "case": Case.from_dict(fields["case"]), **tuples})


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
        if first.diagnosis not in first.names and one.diagnosis in one.names:
            first, other = one, first
        found[i] = dataclasses.replace(first.joined(other), seen=first.seen + other.seen)
    return found


def _is_one_fault(one: Finding, other: Finding) -> bool:
    if (one.op, one.kind) == (other.op, other.kind) and one.case == other.case:
        return True
    return bool(set(one.names) & set(other.names)) and one.is_same(other)
