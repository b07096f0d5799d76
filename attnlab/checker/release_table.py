"""ReleaseTable: which release of vLLM has which fault."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.shown import Shown
from attnlab.checker.finding import Finding
from attnlab.checker.report import NotRun

FINDING, SOUND, OTHER = "finding", "sound", "other fault"
ABSENT, NOT_RUN = "absent", "not run"
STATES = {
    FINDING: "the fault's smallest case is wrong in the release",
    SOUND: "this case is right there",
    OTHER: "this case shows another fault there",
    ABSENT: "the release does not have the op, or does not support the case",
    NOT_RUN: "the case did not run there",
}
YES, NO, NOT_RUNNABLE, UNTRIED = "yes", "no", "not runnable", "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRun:
    """A run of a fault's smallest Case on a GPU.

    ``is_confirmed``: whether it shows the fault, None if it cannot run there; ``why``: the reason, or "".
    """

    is_confirmed: bool | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault in the releases.

    - ``cells``: a key of STATES by release; ``releases``: those that have the fault, the oldest first.
    - ``finding``: the fault at its smallest Case, in the first release that has it. This Case ran in every
      release that has the op.
    - ``native``: its runs on a GPU, by release; empty if it was not tried.
    """

    finding: Finding
    cells: dict[str, str]
    native: dict[str, NativeRun] = field(default_factory=dict)

    @property
    def is_native(self) -> str:
        """Return whether a GPU confirms the fault: "yes", "no", "not runnable" or "not tried".

        It is "no" if one of the releases that ran there is right.
        """
        ran = [one.is_confirmed for one in self.native.values() if one.is_confirmed is not None]
        if ran:
            return YES if all(ran) else NO
        return NOT_RUNNABLE if self.native else UNTRIED

    @property
    def native_text(self) -> str:
        """Return what the runs on a GPU showed, release by release."""
        words = {True: "confirmed", False: "right"}
        return "; ".join(
            f"{version}: {words.get(one.is_confirmed) or f'not runnable, {one.why}'}"  # type: ignore[arg-type]
            for version, one in self.native.items()
        )

    @property
    def releases(self) -> list[str]:
        """Return the releases that have the fault."""
        return [version for version, state in self.cells.items() if state == FINDING]

    def to_dict(self) -> dict[str, Any]:
        """Return the fault as JSON-able values."""
        finding = self.finding
        return {
            "op": finding.op,
            "kind": finding.kind,
            "diagnosis": finding.diagnosis,
            "names": list(finding.names),
            "description": finding.description,
            "native": self.is_native,
            "native_runs": {
                version: dataclasses.asdict(one) for version, one in self.native.items()
            },
            "first": self.releases[0],
            "last": self.releases[-1],
            "cells": self.cells,
            "evidence": finding.evidence,
            "case": finding.case.changes(),
            "run": finding.case.to_cli(),
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReleaseTable(Shown):
    """The faults of many releases.

    - ``releases``: the versions, the oldest first; ``device``, ``platform``: where their ops ran.
    - ``ops``: by release and op, the release whose identical op ran; an absent op is left out.
    - ``cases``, ``cases_run``: of all releases; an op that several releases share counts once.
    - ``versions``: of attnlab and the packages that decide verdicts.
    - ``not_run``: what did not run, with the release before the op; ``left_out``: likewise, the cases that an
      op does not support, by its own error, or that violate its contract. ``cases`` is the sum of those that
      ran, those of the plan in ``not_run``, and these.
    """

    releases: list[str]
    device: str
    platform: str
    ops: dict[str, dict[str, str]]
    cases: int
    cases_run: int
    seconds: float
    versions: dict[str, str]
    faults: list[Fault] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    left_out: list[NotRun] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Return 1 for a fault, 3 if cases did not run, else 0."""
        return 1 if self.faults else 3 if self.not_run else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-able values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **fields,
            "states": STATES,
            "faults": [fault.to_dict() for fault in self.faults],
            "not_run": [dataclasses.asdict(entry) for entry in self.not_run],
            "left_out": [dataclasses.asdict(entry) for entry in self.left_out],
        }
