"""XRay: the measured and the expected weights of a call, and what the difference is."""

from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.json import json_value
from attnlab.case.shown import Shown
from attnlab.weights.description import Description
from attnlab.weights.examine import Examined
from attnlab.weights.fit import Law
from attnlab.weights.magnitudes import Magnitudes
from attnlab.weights.measurement import Measurement
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.slot_owner import SlotOwners

STATUSES = ("right", "precision", "described", "undecided", "unreadable")
_MOST_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class XRay(Shown):
    """The effective attention weights of a kernel.

    - ``status``: "right"; "precision" (they differ by rounding that is coarser than the bound); "described"
      (a rule explains every weight within the bound); "undecided" (no rule does, or the bound is so large
      that right weights show nothing); "unreadable" (no row is finite).
    - ``examined``: the measurement, on the device that computed it. All other tensors are on the CPU: those
      of a GPU are copied when they are first asked for.
    - ``descriptions``: the rules that explain the weights, simplest first; all predict the same weights here.
    - ``confirmed``: whether the first also predicts another case that was measured; None if none was.
    - ``law``: the fit of the log weights; ``magnitudes``: the scales of keys, values and output; None if
      there are too few weights.
    - ``sentences``: the conclusion, then the pattern and the limits.
    """

    status: str
    case: Case | None
    backend: str
    examined: Examined
    descriptions: tuple[Description, ...]
    confirmed: bool | None
    law: Law | None
    magnitudes: Magnitudes | None
    sentences: tuple[str, ...]
    tried: int
    seconds: float

    @property
    def setup(self) -> AttentionSetup:
        """Return the rows, the heads, and the slots: of the cache, then of new tokens."""
        return self.examined.on_cpu.setup

    @property
    def measurement(self) -> Measurement:
        """Return what the runs gave."""
        return self.examined.on_cpu.measurement

    @property
    def expected(self) -> torch.Tensor:
        """Return the right weights, [rows, heads, slots] float64."""
        return self.examined.on_cpu.expected

    @property
    def owners(self) -> SlotOwners:
        """Return the sequence and the position of each slot."""
        return self.examined.on_cpu.owners

    @property
    def drawn(self) -> bool:
        """Answer whether query and keys were replaced by N(0, 1) numbers."""
        return self.examined.drawn

    @property
    def weights(self) -> torch.Tensor:
        """Return the measured weights, [rows, heads, slots] float64; NaN where the output was not finite."""
        return self.measurement.weights

    @property
    def is_wrong(self) -> bool:
        """Answer whether the weights are wrong, or cannot be judged."""
        return self.status not in ("right", "precision")

    @property
    def description(self) -> Description | None:
        """Return the simplest description, or None."""
        return self.descriptions[0] if self.descriptions else None

    @property
    def bound(self) -> torch.Tensor:
        """Return the rounding bound of each weight, [rows, heads, slots]."""
        setup = self.setup
        return self.expected * setup.relative[:, None, None] + setup.fixed[:, None, None]

    @property
    def wrong(self) -> torch.Tensor:
        """Return which rows and heads are beyond the bound or not finite, [rows, heads] bool."""
        return ~((self.weights - self.expected).abs() <= self.bound).all(-1)

    def to_dict(self) -> dict[str, Any]:
        """Return the X-ray as values of strict JSON, with the sums of at most 200 rows."""
        law = self.law
        rows = [self._row(index) for index in range(min(len(self.setup.rows), _MOST_ROWS))]
        converted: dict[str, Any] = json_value(
            {
                "status": self.status,
                "backend": self.backend,
                "sentences": list(self.sentences),
                "descriptions": [one.to_dict() for one in self.descriptions],
                "confirmed": self.confirmed,
                "law": None
                if law is None
                else {
                    "score_slope": law.score,
                    "score_slope_error": law.score_error,
                    "distance_slopes": list(law.distance),
                    "spread": law.spread,
                    "weights": law.count,
                },
                "magnitudes": None if self.magnitudes is None else self.magnitudes.to_dict(),
                "runs": self.measurement.runs,
                "slots": self.setup.num_slots,
                "relative_precision": float(self.setup.relative.max()),
                "absolute_precision": float(self.setup.fixed.max()),
                "drawn": self.drawn,
                "rows": rows,
                "rows_left_out": max(0, len(self.setup.rows) - _MOST_ROWS),
                "seconds": self.seconds,
            }
        )
        return converted

    def _row(self, index: int) -> dict[str, Any]:
        """Return one row: where it is, and its sums by head."""
        setup = self.setup
        return {
            "row": int(setup.rows[index]),
            "sequence": int(setup.seq[index]),
            "position": int(setup.position[index]),
            "kernel": setup.kernels[index],
            "wrong_heads": setup.heads[self.wrong[index]].tolist(),
            "sums": self.weights[index].sum(-1).tolist(),
        }
