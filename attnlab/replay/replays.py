"""Replay: what one backend made of a call. Replays: those of several backends, as one table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.case.json import json_number
from attnlab.case.shown import Shown

MATCH, MISMATCH, REJECTED, CANNOT_RUN = "match", "mismatch", "rejected", "cannot run"
UNSTABLE = "not deterministic"
STATUSES = (MATCH, MISMATCH, REJECTED, CANNOT_RUN, UNSTABLE)
SKIP = 125  # the exit code with which git bisect skips a commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How an output differs from the correct one, or from the recorded one.

    - ``elements`` of ``total``: beyond the rounding bound. ``rows`` of ``num_rows`` have such an element.
    - ``largest``: the largest absolute difference; ``in_bounds``: the largest in units of the bound.
    - ``first``: (row, head, element) of the first element beyond the bound, or None.
    - ``other_bits``: elements whose bytes differ.
    """

    elements: int
    total: int
    rows: int
    num_rows: int
    largest: float
    in_bounds: float
    first: tuple[int, int, int] | None
    other_bits: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        numbers = {name: json_number(getattr(self, name)) for name in ("largest", "in_bounds")}
        return {name: getattr(self, name) for name in self.__slots__} | numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one backend made of a call.

    - ``target``: the source or the backend, as the user named it; ``backend``: the kernels and their version.
    - ``status``: "match", "mismatch", "rejected" (the kernel raises), "cannot run" (the source does not
      have the op, or this machine cannot run it) or "not deterministic" (equal runs differ). ``reason``:
      why, for the last three.
    - ``failed``: a rejection that the op does not state itself: it crashed or does not compile.
    - ``error``: the difference from the correct output; ``from_recorded``: that from the recorded output.
      None if the call did not run, or if no output was recorded.
    """

    target: str
    backend: str
    status: str
    reason: str = ""
    failed: bool = False
    error: Difference | None = None
    from_recorded: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        found = {name: getattr(self, name) for name in self.__slots__}
        for name in ("error", "from_recorded"):
            found[name] = None if found[name] is None else found[name].to_dict()
        return found


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replays(Shown):
    """The replays of a call.

    - ``call``: the call as text; ``op``: its op; ``origin``: where it ran.
    - ``recorded``: what the recorded output is: "match", "mismatch", "rejected", or "unknown" without one.
      ``recorded_error``: its difference from the correct output.
    - ``assumed``: what neither the call nor the user stated.
    """

    call: str
    op: str
    origin: str
    recorded: str
    recorded_error: Difference | None
    replays: Sequence[Replay]
    assumed: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return the exit code of ``attnlab replay``.

        0 every replay matches; 1 one mismatches, rejects the call, or is not deterministic; 3 none does, but
        one cannot run. With one target, git bisect must skip a commit that says nothing about the fault:
        125 if it cannot run the call, or if the op states itself that it does not accept it, unless a
        rejection was recorded.
        """
        if len(self.replays) == 1:
            (one,) = self.replays
            limit = one.status == REJECTED and not one.failed and self.recorded != REJECTED
            if one.status == CANNOT_RUN or limit:
                return SKIP
        statuses = {one.status for one in self.replays}
        if statuses & {MISMATCH, REJECTED, UNSTABLE}:
            return 1
        return 3 if CANNOT_RUN in statuses else 0

    def sentence(self) -> str:
        """Return the verdicts in one sentence."""
        if len({one.status for one in self.replays}) == 1 and len(self.replays) > 1:
            return f"all {len(self.replays)} {self.replays[0].status}"
        return ", ".join(f"{one.target}: {one.status}" for one in self.replays)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as values of strict JSON."""
        error = self.recorded_error
        return {
            "call": self.call,
            "op": self.op,
            "origin": self.origin,
            "recorded": self.recorded,
            "recorded_error": None if error is None else error.to_dict(),
            "replays": [one.to_dict() for one in self.replays],
            "assumed": list(self.assumed),
        }
