"""RepairClaim: an edit of one expression of a kernel's source with which every output is right."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.diagnosis.kernel_trials import Repair


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepairClaim:
    """The statement that a kernel is right with one expression changed, in a call and in further cases.

    The edits that are tried are small: another operator, number, name or operand, or one more part. So the
    claim finds faults of one expression. It does not say that the author meant this expression.

    - ``repair``: the edit. With it, outputs and side outputs are right in every case, with NaN and with
      finite numbers in slots without a token. ``source``: the text of its line.
    - ``cases``: the number of further cases in which the unchanged kernel is wrong.
    - ``only_finite``: some outputs stay wrong with NaN in slots without a token, so the claim is about finite
      numbers there.
    - ``others``: other edits that pass the same cases.
    """

    repair: Repair
    source: str
    cases: int
    only_finite: bool = False
    others: tuple[Repair, ...] = ()

    @property
    def file(self) -> str:
        """Return the path of the source."""
        return self.repair.line[0]

    @property
    def line(self) -> int:
        """Return the line of the expression, from 1."""
        return self.repair.line[1]

    @property
    def place(self) -> str:
        """Return the name of the file and the line."""
        return _place(self.repair)

    @property
    def text(self) -> str:
        """Return the claim in words."""
        finite = ", for finite numbers in slots without a token" if self.only_finite else ""
        return (
            f"{self.place}: with {self.repair.edit.text} the output is right, here and in {self.cases} "
            f"further {_cases(self.cases)}{finite}{self._others_text()}"
        )

    @property
    def addition(self) -> str:
        """Return the claim as an addition to a better explanation."""
        return f"the fault may be at {self.text}"

    def _others_text(self) -> str:
        if not self.others:
            return ""
        named = " or ".join(
            f"{'' if one.line == self.repair.line else _place(one) + ': '}{one.edit.text}"
            for one in self.others[:2]
        )
        rest = len(self.others) - 2
        more = f", or {rest} more" if rest > 0 else ""
        return f"; so it is with {named}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        edit = self.repair.edit
        return {
            "file": self.file,
            "line": self.line,
            "source": self.source,
            "before": edit.before,
            "after": edit.after,
            "cases": self.cases,
            "only_finite": self.only_finite,
            "others": [
                {"file": one.line[0], "line": one.line[1], "edit": one.edit.text}
                for one in self.others
            ],
            "text": self.text,
        }


def _place(repair: Repair) -> str:
    return f"{Path(repair.line[0]).name}, line {repair.line[1]}"


def _cases(count: int) -> str:
    return "case" if count == 1 else "cases"
