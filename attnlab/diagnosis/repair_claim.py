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
    - ``is_stated``: whether the text names the edit. It does not if what the edit adds had one value in all
      cases: then a rerun confirms the line alone.
    - ``only_finite``: some outputs stay wrong with NaN in slots without a token, so the claim is about finite
      numbers there.
    - ``others``: other edits that pass the same cases.
    """

    repair: Repair
    source: str
    cases: int
    only_finite: bool = False
    is_stated: bool = True
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
        """Return the claim in words, with its line."""
        return f"{self.place}: {self.reason}"

    @property
    def reason(self) -> str:
        """Return the edit in words, and the first equivalent edit of another line."""
        finite = ", for finite numbers in slots without a token" if self.only_finite else ""
        what = f"with {self.repair.edit.text}" if self.is_stated else "with a change of this line"
        elsewhere = next((one for one in self.others if one.line != self.repair.line), None)
        other = "" if elsewhere is None else f"; or {_place(elsewhere)}: with {elsewhere.edit.text}"
        return (
            f"{what} the output is right, here and in {self.cases} further "
            f"{_cases(self.cases)}{finite}{other}"
        )

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
            "stated": self.is_stated,
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
