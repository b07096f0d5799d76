"""Result: the outcome of running a Case."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.json import json_value
from attnlab.case.ops import MERGE
from attnlab.case.shown import Shown
from attnlab.contracts.dispatch import Decision
from attnlab.contracts.rows import unwritten_rows
from attnlab.contracts.slot_map import SlotMap, slot_map
from attnlab.contracts.target import Target
from attnlab.contracts.violation import Violations
from attnlab.lab.error_map import ErrorMap, Place
from attnlab.lab.reads import MemoryReport
from attnlab.lab.reads import to_dict as memory_to_dict
from attnlab.lab.side_outputs import LSE, PADDING, SideError
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
    "atol_is_derived",
    "rtol",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Result(Shown):
    """The outcome of running a Case.

    - ``backend``: where the kernels came from, with their version.
    - ``status``: "match", "mismatch", or "rejected" if the kernel raised ``error``. A match includes what
      the op returned in addition to the output.
    - ``errors``: the ErrorMap; None if the call was rejected.
    - ``violations``: where the call violates the contracts, found without running it.
    - ``seconds``: the time of each step, without the steps in ``shared``.
    - ``shared``: the steps whose products an earlier run of the same Lab had made.
    - ``call``, ``cache``: what was run.
    - ``memory``: what the kernels read from the cache; None unless the Case has ``trace_reads``.
    - ``launches``: the kernels that Triton's interpreter launched, with their grids; ``wraps``: source lines
      with int32 overflow; ``outside``: source lines with out-of-bounds access. One text each.
    - ``lse``, ``padded``: what the op returned in addition to the output, or None
      (:class:`attnlab.kernels.triton.run_log.RunLog`). ``side_errors``: what is wrong with them.
    - ``compare_with_rounding``: returns the ErrorMap with the rounding bound of each element as tolerance.
    - ``failed``: whether a rejected call broke the kernel, instead of exceeding a limit that it states.
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
    side_errors: tuple[SideError, ...] = ()
    failed: bool = False
    compare_with_rounding: Callable[[], ErrorMap] = field(repr=False)

    @property
    def output(self) -> torch.Tensor:
        """Return the output, [num_tokens, num_heads, head_size]; see :class:`KernelCall`."""
        return self.call.buffer

    @property
    def beyond_rounding(self) -> int | None:
        """Return how many elements are off by more than rounding; None if the call was rejected.

        It is computed on first use if the Case has its own tolerance; otherwise it is the number of
        mismatches. Rounding explains no error of a cache write.
        """
        if self.errors is None:
            return None
        if self.case.has_own_tolerance:
            return self.compare_with_rounding().mismatched
        return self.errors.mismatched

    def places(self) -> list[Place]:
        """Return the rows with mismatches; none if the call was rejected."""
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
    def side_outputs(self) -> tuple[str, ...]:
        """Return which side outputs were compared: "lse", "padding", both or none."""
        has_padding = self.padded is not None and self.case.op == MERGE
        given = ((LSE, self.lse is not None), (PADDING, has_padding))
        return tuple(name for name, is_given in given if is_given)

    @property
    def verdict(self) -> str:
        """Return the outcome in one line."""
        if self.errors is None:
            return f"rejected: {self.error}"
        line = f"{self.errors.mismatched} of {self.errors.total}"
        if self.errors.heads is not None:
            heads = self.errors.heads
            line += f" (query heads {heads.start} to {heads.stop - 1} of {self.case.num_heads} run)"
        if self.case.seq_range is not None:
            line += f" (sequences {self.case.seq_range[0]} to {self.case.seq_range[1] - 1} run)"
        if self.errors.first_index is not None:
            line += f", first {self.errors.first_index}"
        return "; ".join([line, *(error.short() for error in self.side_errors)])

    def to_dict(self, most_places: int) -> dict[str, Any]:
        """Return the result as values of strict JSON, with the first ``most_places`` places."""
        places = self.places()
        numbers = self.errors.to_dict() if self.errors is not None else dict.fromkeys(_NUMBERS)
        document = {
            "case": dataclasses.asdict(self.case),
            "kernel": self.decision.kernels[-1],
            "kernels": list(self.decision.kernels),
            "backend": self.backend,
            "reasons": self.decision.reasons,
            "status": self.status,
            "error": self.error,
            **numbers,
            "side_outputs": list(self.side_outputs),
            "side_errors": [error.to_dict() for error in self.side_errors],
            "beyond_rounding": self.beyond_rounding,
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
        converted: dict[str, Any] = json_value(document)
        return converted

    def _place(self, place: Place) -> dict[str, Any]:
        """Return a place with the slot of the newest token, if the row reads it from the cache."""
        fields = dataclasses.asdict(place)
        if place.query_len == 1 and self.decision.decode is not None:
            position = self.case.lengths.seq_lens[place.seq] - 1
            block, offset = self.cache.provenance.slot(place.seq, position)
            written = int(self.cache.provenance.pos[block, offset]) == position
            newest = {"position": position, "block": block, "offset": offset, "written": written}
            fields["newest_slot"] = newest
        return fields
