"""Result: what came of a Case."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.shown import Shown
from attnlab.contracts.dispatch import Decision
from attnlab.contracts.rows import unwritten_rows
from attnlab.contracts.slot_map import SlotMap, slot_map
from attnlab.contracts.target import Target
from attnlab.contracts.violation import Violations
from attnlab.lab.error_map import ErrorMap, Place
from attnlab.lab.reads import MemoryReport
from attnlab.lab.reads import to_dict as memory_to_dict
from attnlab.tensors.cache import PagedCache
from attnlab.tensors.call import KernelCall

_NUMBERS = (
    "mismatched",
    "total",
    "max_abs_error",
    "max_index",
    "first_index",
    "nan_elements",
    "heads_run",
    "rows_run",
    "atol",
    "rtol",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Result(Shown):
    """What came of a Case.

    - ``status``: "match", "mismatch", or "rejected" where the kernel raised ``error``.
    - ``errors``: the ErrorMap; None where the call was rejected.
    - ``violations``: what the contracts say of the call, found without running it.
    - ``seconds``: the time of each step that this run did itself; what it shared is not in it.
    - ``shared``: the steps whose product an earlier run of the same Lab had left.
    - ``call``, ``cache``: what was run, for a closer look.
    - ``memory``: what the kernel read, where the Case asked the emulated device to watch; else None.
    - ``launches``: the kernels that Triton's interpreter launched, and their grids; ``wraps``,
      ``outside``: their lines where an int32 product wrapped, or that touched what is none of their
      tensors; in words.
    - ``lse``, ``padded``: what the op gave beside the output (:class:`attnlab.kernels.triton.run_log.RunLog`).
    - ``failed``: of a rejected call, that the kernel broke, and did not state a limit of its own.
    """

    case: Case
    decision: Decision
    backend: str
    status: str
    error: str | None
    errors: ErrorMap | None
    violations: Violations
    seconds: dict[str, float]
    shared: tuple[str, ...]
    call: KernelCall
    cache: PagedCache
    memory: MemoryReport | None = None
    launches: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    lse: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    failed: bool = False

    def places(self) -> list[Place]:
        """Return the rows with mismatches; none where the call was rejected."""
        return [] if self.errors is None else self.errors.places()

    def unwritten_rows(self) -> torch.Tensor:
        """Return which output rows no kernel writes by its contract, [num_tokens] bool."""
        contracts = self.decision.contracts(Target.of(self.case), self.call.op)
        return unwritten_rows(contracts, self.call)

    def slot_map(self) -> SlotMap:
        """Return who wrote each slot of the cache, and who reads it by the kernels' contracts."""
        contracts = self.decision.contracts(Target.of(self.case), self.call.op)
        return slot_map(self.call, contracts, self.cache.provenance)

    @property
    def verdict(self) -> str:
        """Return one line that says what came of it."""
        if self.errors is None:
            return f"rejected: {self.error}"
        line = f"{self.errors.mismatched} of {self.errors.total}"
        if self.errors.heads is not None:
            ran = self.errors.heads
            line += f" (query heads {ran.start} to {ran.stop - 1} of {self.case.num_heads} run)"
        if self.case.seq_range is not None:
            line += f" (sequences {self.case.seq_range[0]} to {self.case.seq_range[1] - 1} run)"
        if self.errors.first_index is not None:
            line += f", first {self.errors.first_index}"
        return line

    def to_dict(self, most_places: int) -> dict[str, Any]:
        """Return the result as JSON-able values, with the first ``most_places`` places."""
        places = self.places()
        numbers = self.errors.to_dict() if self.errors is not None else dict.fromkeys(_NUMBERS)
        return {
            "case": dataclasses.asdict(self.case),
            "kernel": self.decision.kernels[-1],
            "kernels": list(self.decision.kernels),
            "backend": self.backend,
            "reasons": self.decision.reasons,
            "status": self.status,
            "error": self.error,
            **numbers,
            "places": [self._place(place) for place in places[:most_places]],
            "places_left_out": max(0, len(places) - most_places),
            "memory": memory_to_dict(self.memory),
            "violations": [violation.to_dict() for violation in self.violations],
            "launches": list(self.launches),
            "wraps": list(self.wraps),
            "outside": list(self.outside),
            "seconds": sum(self.seconds.values()),
            "seconds_by_step": self.seconds,
        }

    def _place(self, place: Place) -> dict[str, Any]:
        """Return a place with the slot of the newest token, where the row takes it from the cache."""
        fields = dataclasses.asdict(place)
        if place.query_len == 1 and self.decision.decode is not None:
            position = self.case.lengths.seq_lens[place.seq] - 1
            block, offset = self.cache.provenance.slot(place.seq, position)
            written = int(self.cache.provenance.pos[block, offset]) == position
            newest = {"position": position, "block": block, "offset": offset, "written": written}
            fields["newest_slot"] = newest
        return fields
