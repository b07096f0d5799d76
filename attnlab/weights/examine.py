"""examine: measure a call on a backend, and conclude."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.ops import check_weighs_values
from attnlab.contracts.target import Target
from attnlab.kernels.backend import Backend, RunOptions
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import has_fp8_query, has_scaled_output
from attnlab.weights.argument_setup import with_argument, with_stored
from attnlab.weights.codes import num_slots, with_drawn_keys, with_finite_keys
from attnlab.weights.device import moved
from attnlab.weights.evidence import explained
from attnlab.weights.head_groups import right_weights, some_rows
from attnlab.weights.lanes import shared_lanes
from attnlab.weights.measurement import (
    MOST_RUNS,
    Measurement,
    measure,
    runner,
    values_are_right,
)
from attnlab.weights.plan import right_plan
from attnlab.weights.setup import AttentionSetup, make_setup
from attnlab.weights.size import check_size
from attnlab.weights.slot_owner import SlotOwners, holds_token, slot_owners

COARSE = 2.0**-8  # rounding of bfloat16: weights that differ by no more than rounding of this size
COARSE_VALUES = 0.05  # relative rounding of the output where the weights are right
_COARSE_MOST, _COARSE_SUM = 0.5, 0.1  # the largest relative errors that are called rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What is measured: a call, where it runs, and which rows and heads.

    - ``rows`` [R], ``heads`` [H]: output rows and query heads; ``written``: [cache slots] bool, slots that
      hold a token, or None if that is unknown.
    - ``device``: where the weights are computed.
    """

    call: KernelCall
    target: Target
    kernels: tuple[str, ...]
    backend: Backend
    options: RunOptions
    rows: torch.Tensor
    heads: torch.Tensor
    written: torch.Tensor | None = None
    case: Case | None = None
    device: torch.device | str = "cpu"


@dataclass(frozen=True, kw_only=True, eq=False)
class Examined:
    """A measurement with what is expected of it, on the device of the subject."""

    setup: AttentionSetup
    measurement: Measurement
    expected: torch.Tensor
    owners: SlotOwners
    drawn: bool

    @cached_property
    def on_cpu(self) -> "Examined":
        """Return this with all tensors on the CPU."""
        return self if self.setup.device.type == "cpu" else moved(self, "cpu")

    @cached_property
    def is_right(self) -> bool:
        """Answer whether every row is finite, with the right weights and values."""
        found, setup = self.measurement, self.setup
        return (
            bool(found.finite.all())
            and bool(explained(setup, found.weights, self.expected, 1.0).all())
            and bool(values_are_right(setup, found, COARSE_VALUES).all())
        )


def examine(subject: Subject, *, resolve: bool = True, values: bool = True) -> Examined:
    """Measure a subject; raise InvalidCase for an op without values.

    Without ``resolve`` only the sums of lanes are measured, and without ``values`` there is no run with
    random values, which takes fewer runs.
    """
    call, target, device = subject.call, subject.target, subject.device
    check_weighs_values(call.spec)
    call = as_measurable(call)
    check_size(call, len(subject.rows), len(subject.heads))
    owners = slot_owners(call)
    held = holds_token(call, owners) if subject.written is None else subject.written
    call = with_finite_keys(call, target, ~held)
    setup = _setup(subject, call)
    drawn = not law_is_visible(setup)
    if drawn:
        call = with_drawn_keys(call, target)
        setup = _setup(subject, call)
    run = runner(subject.backend, target, subject.kernels, subject.options, device)
    if is_packed(subject.case):  # INT4 cannot store random codes
        values, resolve = False, resolve and num_slots(call) <= MOST_RUNS * setup.width
    expected = right_weights(setup)
    lanes = moved(shared_lanes(call, owners), device)
    measurement = measure(setup, run, expected, lanes, resolve=resolve, values=values)
    setup = with_stored(setup, subject.case, measurement.lanes.of, not measurement.error)
    if measurement.error:
        setup = dataclasses.replace(setup, fixed=setup.fixed + measurement.error)
    return Examined(
        setup=setup,
        measurement=measurement,
        expected=expected,
        owners=moved(owners, device),
        drawn=drawn,
    )


def _setup(subject: Subject, call: KernelCall) -> AttentionSetup:
    """Return the setup of a subject whose call is ``call``."""
    rows, heads = subject.rows, subject.heads
    setup = make_setup(call, subject.target, subject.kernels, rows, heads, subject.device)
    return with_argument(setup, subject.case, subject.backend.device == "cuda")


def is_packed(case: Case | None) -> bool:
    """Answer whether the cache of a Case has two numbers in a byte."""
    return case is not None and case.argument.is_packed


def as_measurable(call: KernelCall) -> KernelCall:
    """Return the call with its scales as numbers; raise InvalidCall for one that the X-ray cannot measure."""
    if call.unmodelled or call.unknown_arguments:
        text = ", ".join((*call.unmodelled, *call.unknown_arguments))
        raise InvalidCall(f"call must be without what attnlab has no reference for, got {text}")
    if has_fp8_query(call) or has_scaled_output(call):
        raise InvalidCall("call must have its query and output in 16 or 32 bits for an X-ray")
    if call.value_cache.shape[2] != call.query.shape[2]:
        sizes = f"{call.value_cache.shape[2]} and {call.query.shape[2]}"
        raise InvalidCall(f"values and keys must have one head size for an X-ray, got {sizes}")
    scales: dict[str, Any] = {}
    for name in ("k_scale", "v_scale"):
        scale = torch.as_tensor(getattr(call, name), dtype=torch.float32).flatten()
        if bool((scale != scale[0]).any()):
            raise InvalidCall(f"{name} must be one number for an X-ray, got several", field=name)
        scales[name] = float(scale[0])
    return dataclasses.replace(call, **scales)


def law_is_visible(setup: AttentionSetup) -> bool:
    """Answer whether the scores differ by more than the precision of a weight."""
    if not bool(setup.query.isfinite().all()):
        return True
    rows = some_rows(setup)
    if len(rows) < len(setup.rows):
        setup = setup.take(rows, torch.arange(len(setup.heads), device=setup.device))
    plan = right_plan(setup)
    seen = (plan.visible > 0)[:, None].expand(-1, len(setup.heads), -1)
    scores = plan.scores()[seen]
    return scores.numel() < 2 or float(scores.std()) > 0.05


def is_coarse(setup: AttentionSetup, measured: torch.Tensor, expected: torch.Tensor) -> bool:
    """Answer whether weights [R, H, N] differ by no more than rounding everything to bfloat16 can explain.

    Rounding halves no weight, and it moves the sum of the weights by some percent at most.
    """
    logits = right_plan(setup).logits()
    seen = (right_plan(setup).visible > 0)[:, None]
    size = float(torch.where(seen, logits.abs(), 0.0).max()) if logits.numel() else 0.0
    relative = 8 * COARSE + float(torch.tensor(2 * COARSE * size).expm1())
    absolute = COARSE * COARSE + setup.fixed[:, None, None]
    sums = (measured.sum(-1) - expected.sum(-1)).abs()
    if bool((sums > _COARSE_SUM * expected.sum(-1) + setup.fixed[:, None]).any()):
        return False
    bound = min(relative, _COARSE_MOST) * expected + absolute
    return bool(((measured - expected).abs() <= bound).all())
