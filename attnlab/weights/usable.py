"""UsableRows: the finite rows of a measurement, and what belongs to them."""

import dataclasses
from dataclasses import dataclass

import torch

from attnlab.weights.device import moved
from attnlab.weights.examine import Examined
from attnlab.weights.fit import Law, fit_law
from attnlab.weights.head_groups import some_rows
from attnlab.weights.magnitudes import Magnitudes, fit_magnitudes
from attnlab.weights.plan import right_plan
from attnlab.weights.setup import AttentionSetup, near_slots
from attnlab.weights.slot_owner import SlotOwners


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UsableRows:
    """Rows of a measurement.

    - ``rows``: [n] indices into those of the measurement; ``setup``, ``measured``, ``expected``: of them.
    - ``law``, ``magnitudes``: fits of the weights, of some rows of a large call; None if there are too few.
    - ``is_all``: whether they are all rows of the measurement.
    """

    rows: torch.Tensor
    setup: AttentionSetup
    measured: torch.Tensor
    expected: torch.Tensor
    owners: SlotOwners
    law: Law | None
    magnitudes: Magnitudes | None
    is_all: bool

    @property
    def zero(self) -> torch.Tensor:
        """Return which rows are 0 although they have keys, [n] bool."""
        has_keys = (self.expected.sum(-1) > 0).any(1)
        is_zero: torch.Tensor = (self.measured == 0).all(-1).all(-1) & has_keys
        return is_zero

    def take(self, keep: torch.Tensor) -> "UsableRows":
        """Return some of the rows; ``keep``: [n] bool."""
        return _usable(
            self.rows[keep],
            self.setup.take(torch.nonzero(keep).flatten(), _every_head(self.setup)),
            self.measured[keep],
            self.expected[keep],
            self.owners,
            is_all=self.is_all and bool(keep.all()),
        )


_MANY = 4096  # slots, beyond which those that no row reads or may read are left out


def usable_rows(found: Examined, *, every_slot: bool = True) -> UsableRows:
    """Return the rows whose query and output are finite.

    Without ``every_slot``, slots of a large cache are left out that have no weight and are far from the
    blocks of all sequences.
    """
    finite = found.measurement.finite & found.setup.query.isfinite().flatten(1).all(1)
    rows = torch.nonzero(finite).flatten()
    setup, measured, expected = found.setup, found.measurement.weights, found.expected
    owners = found.owners
    if not bool(finite.all()):
        setup = setup.take(rows, _every_head(setup))
        measured, expected = measured[rows], expected[rows]
    if every_slot or setup.num_slots <= _MANY or not len(rows):
        return _usable(rows, setup, measured, expected, owners, is_all=bool(finite.all()))
    kept = near_slots(setup, (measured != 0).any(0).any(0))
    setup, measured, expected = setup.with_slots(kept), measured[..., kept], expected[..., kept]
    return _usable(rows, setup, measured, expected, owners.take(kept), is_all=bool(finite.all()))


def _usable(
    rows: torch.Tensor,
    setup: AttentionSetup,
    measured: torch.Tensor,
    expected: torch.Tensor,
    owners: SlotOwners,
    *,
    is_all: bool,
) -> UsableRows:
    law, magnitudes = None, None
    if len(rows):
        some = some_rows(setup)
        is_small = len(some) == len(rows)
        part = setup if is_small else setup.take(some, _every_head(setup))
        plan, fitted = right_plan(part), measured if is_small else measured[some]
        law = fit_law(plan, fitted, with_distance=plan.slopes is not None)
        fit = fit_magnitudes(plan, fitted)
        magnitudes = None if fit is None else moved(fit, "cpu")
    return UsableRows(
        rows=rows,
        setup=setup,
        measured=measured,
        expected=expected,
        owners=owners,
        law=law,
        magnitudes=magnitudes,
        is_all=is_all,
    )


def _every_head(setup: AttentionSetup) -> torch.Tensor:
    return torch.arange(len(setup.heads), device=setup.device)


def with_elements(found: Examined, elements: torch.Tensor | None) -> Examined:
    """Return a measurement whose outputs are read in the order ``elements``, [head_size], or as they are."""
    if elements is None:
        return found
    return dataclasses.replace(
        found, measurement=found.measurement.reordered(found.setup, elements)
    )
