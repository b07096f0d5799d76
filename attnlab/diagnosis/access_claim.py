"""AccessClaim: accesses that a kernel must not make, or lacks, wherever its output is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnlab.diagnosis.store_facts import UNWRITTEN, is_conflict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AccessFacts:
    """Statements about the accesses of one Case.

    - ``places``: for each statement, the rows and heads that it concerns, [num_tokens, num_heads] bool.
    - ``is_wrong``: the wrong rows and heads, of the same shape; empty if the Case cannot run.
    - ``num_seqs``: the number of sequences.
    """

    places: Mapping[str, torch.Tensor]
    is_wrong: torch.Tensor
    num_seqs: int

    def covers(self, *facts: str) -> bool:
        """Answer whether each wrong row and head is a place of at least one of the statements."""
        left = self.is_wrong.clone()
        for fact in facts:
            left &= ~self.places[fact] if fact in self.places else True
        return not bool(left.any())

    @property
    def refuted(self) -> frozenset[str]:
        """Return the statements that cannot be the fault: they are true of a right output.

        A conflict between programs is a fault even then: their order decides which number stays.
        """
        if bool(self.is_wrong.any()):
            return frozenset()
        return frozenset(fact for fact in self.places if not is_conflict(fact))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessClaim:
    """Statements about the slots that a kernel reads and the elements that it writes, of one kind.

    - ``facts``: in every case, each concerns every wrong row and head.
    - ``either``: in every case, each wrong row and head is concerned by at least one of these.
    - ``some``: in every case with a wrong output, each concerns some rows.
    - ``cases``: the number of further cases with wrong outputs.
    - ``several``: it is about batches of several sequences.

    None is true of a case with a right output, except that programs may store different numbers to the same
    elements and leave the right one there.
    """

    facts: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    some: tuple[str, ...] = ()
    cases: int
    several: bool = False

    @property
    def is_unwritten(self) -> bool:
        """Answer whether the claim says that no kernel writes what is wrong."""
        return any(fact.startswith(UNWRITTEN) for fact in self.facts)

    @property
    def text(self) -> str:
        """Return the claim in words."""
        plural = "case" if self.cases == 1 else "cases"
        said = "; ".join((*self.facts, *self.some))
        if self.either:
            said = f"of each wrong row, one of these is true: {'; '.join(self.either)}"
        if self.several:
            said = f"in batches of several sequences, {said}"
        return f"{said} (confirmed on {self.cases} further {plural})"

    def holds_in(self, found: AccessFacts) -> bool:
        """Answer whether the claim is true of another case."""
        if self.several and found.num_seqs < 2:
            return True
        if found.refuted & {*self.facts, *self.either, *self.some}:
            return False
        if not bool(found.is_wrong.any()):
            return True
        is_everywhere = all(found.covers(fact) for fact in self.facts)
        is_split = not self.either or found.covers(*self.either)
        return is_everywhere and is_split and set(self.some) <= set(found.places)
