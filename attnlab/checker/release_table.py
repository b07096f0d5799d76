"""ReleaseTable: which release of vLLM has which fault."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.shown import Shown
from attnlab.checker.finding import Finding
from attnlab.checker.report import NotRun

FINDING, SOUND, ABSENT, NOT_RUN = "finding", "sound", "absent", "not run"
STATES = {
    FINDING: "the release has the fault",
    SOUND: "every case ran, and none showed the fault",
    ABSENT: "the release does not have the op, or does not support what the fault needs",
    NOT_RUN: "cases that could show the fault did not run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault in the releases.

    - ``cells``: a key of STATES by release; ``releases``: those that have the fault, the oldest first.
    - ``finding``: the fault at its smallest Case, in the first release that has it.
    """

    finding: Finding
    cells: dict[str, str]

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
    - ``not_run``: what did not run, with the release before the op.
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
        }
