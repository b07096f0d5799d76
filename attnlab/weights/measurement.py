"""Measurement: the weights of a kernel, from runs of the unmodified kernel with coded values."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from attnlab.case.errors import InvalidCall
from attnlab.contracts.target import Target
from attnlab.kernels.backend import Backend, RunOptions
from attnlab.kernels.control import run_backend
from attnlab.tensors.call import KernelCall
from attnlab.weights.codes import num_slots, one_hot, random_codes, with_values
from attnlab.weights.device import moved
from attnlab.weights.evidence import explained
from attnlab.weights.head_groups import head_groups
from attnlab.weights.lanes import Lanes, own_slots, single_lanes
from attnlab.weights.setup import AttentionSetup, cache_slots, near_slots, one_number
from attnlab.weights.sketch import signed_codes, sketch_runs, solve_near

_SMALL = (
    1.0  # an error of a weight, in units of the relative precision, that leaves nothing to explain
)
_KEPT = 0.375  # in the output buffer; a row that keeps it and, in an equal run, NaN is not written
MOST_RUNS = 64  # runs that measure every slot by itself; for more slots, random codes find those that matter
MOST_LANE_RUNS = 4096
Run = Callable[[KernelCall], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measurement:
    """What the runs gave.

    - ``call``: the call with finite keys; its values are those of the caller.
    - ``rows`` [R], ``heads`` [H]: output rows and query heads that were measured.
    - ``lanes``: the lanes that were measured. ``read``: [R, H, runs × head_size] float64, the outputs of
      those runs in order, divided by v_scale for slots of the cache; first one number for each lane.
    - ``weights``: [R, H, N] float64, NaN where an output was not finite.
    - ``unwritten``: [R] bool, rows that kept the contents of the output buffer.
    - ``output``: [R, H, head_size], of the run with random codes. ``residual``: the output minus what the
      weights give; ``magnitude``: the sum of their absolute terms.
    - ``needs_values``: whether rows are finite with random values, and not with values of 0 and 1.
    - ``runs``: how often the kernel ran. ``error``: the absolute error of a weight that random codes add.
    """

    call: KernelCall
    rows: torch.Tensor
    heads: torch.Tensor
    lanes: Lanes
    read: torch.Tensor
    weights: torch.Tensor
    unwritten: torch.Tensor
    output: torch.Tensor
    residual: torch.Tensor
    magnitude: torch.Tensor
    needs_values: bool
    runs: int
    error: float = 0.0

    @property
    def folded(self) -> torch.Tensor:
        """Return the sums of the weights by lane, [R, H, lanes]."""
        return self.read[..., : self.lanes.count]

    def reordered(self, setup: AttentionSetup, elements: torch.Tensor) -> "Measurement":
        """Return what was measured if the output has the elements of the values in the order ``elements``."""
        read = torch.zeros_like(self.read).unflatten(-1, (-1, len(elements)))
        read[..., elements] = self.read.unflatten(-1, (-1, len(elements)))
        read = read.flatten(-2)
        weights = unfolded(setup, self.lanes, read[..., : self.lanes.count])
        return dataclasses.replace(self, read=read, weights=weights)

    @property
    def finite(self) -> torch.Tensor:
        """Return which rows are finite in all heads, [R] bool."""
        return _finite(self.folded)


def runner(
    backend: Backend,
    target: Target,
    kernels: tuple[str, ...],
    options: RunOptions,
    device: torch.device | str = "cpu",
) -> Run:
    """Return the function that runs a call on the backend and returns its output on a device."""

    def run(call: KernelCall) -> torch.Tensor:
        run_backend(backend, call, target, kernels, options)
        return call.buffer.to(device).double()

    return run


def measure(
    setup: AttentionSetup,
    run: Run,
    expected: torch.Tensor,
    shared: Lanes,
    *,
    resolve: bool = True,
    values: bool = True,
) -> Measurement:
    """Measure the weights of the rows and heads of a setup.

    - ``expected``: the right weights, [R, H, N]. ``shared``: lanes with several slots each, which are
      measured first: if their sums are right, so are the weights.
    - ``resolve``: if they are not, and the run with random codes shows that slots outside the row's sequence
      have a weight, measure the slots one by one, or, if that takes more than MOST_RUNS runs, find those
      with a weight with random signed codes.
    - ``values``: run once more with random values.
    """
    call, reader = setup.call, _Reader(setup, run, values=values)
    single = single_lanes(call, num_slots(call), setup.device)
    few, all_runs = reader.runs_of(shared), reader.runs_of(single)
    if few > MOST_LANE_RUNS:
        raise InvalidCall(
            f"the longest sequence must take at most {MOST_LANE_RUNS} runs, got {few}"
        )
    if few >= all_runs:
        return reader.finish(single, reader.lanes(single))
    read = reader.lanes(shared)
    folded = read[..., : shared.count]
    expected = shared.fold(expected)
    if not resolve or _agrees(setup, folded, expected):
        return reader.finish(shared, read)
    found = reader.finish(shared, read)
    if _is_own(setup, found, folded - expected):
        return found
    if all_runs <= MOST_RUNS:
        return reader.finish(single, reader.lanes(single))
    outputs, here = reader.sketch().cpu(), moved(setup, "cpu")  # least squares of few numbers
    lanes = moved(shared, "cpu")
    own, near = own_slots(here, lanes), near_slots(here)
    solved, error = solve_near(here, outputs, reader.sketch_codes, folded.cpu(), lanes, own, near)
    return reader.finish(shared, read, solved.to(setup.device), error)


def _agrees(setup: AttentionSetup, folded: torch.Tensor, expected: torch.Tensor) -> bool:
    """Answer whether the lanes of all finite rows have the right sums."""
    return bool(explained(setup, folded, expected, 1.0)[_finite(folded)].all())


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    """Return which rows of [R, H, n] numbers are finite, [R] bool."""
    return numbers.isfinite().flatten(1).all(1)


def residual_bound(setup: AttentionSetup, found: Measurement, coarse: float = 0.0) -> torch.Tensor:
    """Return how far the output with random codes may be from what the weights give, [R, H, head_size].

    ``coarse``: a relative rounding error to allow in addition.
    """
    count = (found.weights != 0).sum(-1, keepdim=True)
    bound = (3 * setup.relative[:, None, None] + coarse) * found.magnitude
    return bound + 8 * setup.fixed[:, None, None] * (1 + count)


def values_are_right(
    setup: AttentionSetup, found: Measurement, coarse: float = 0.0
) -> torch.Tensor:
    """Return which rows and heads have the output that their weights give, [R, H] bool.

    ``coarse``: a relative rounding error to allow in addition.
    """
    return (found.residual.abs() <= residual_bound(setup, found, coarse)).all(-1)


def _is_own(setup: AttentionSetup, found: Measurement, off: torch.Tensor) -> bool:
    """Answer whether wrong sums of lanes, ``off`` [R, H, lanes], belong to the row's own sequence.

    The output with random codes must be what the weights give, and the deviations of each kernel must be so
    large that it would not be if they belonged to other slots.
    """
    bound = residual_bound(setup, found)
    if not bool((found.residual.abs() <= bound)[found.finite].all()):
        return False
    largest, limit = off.abs().amax((1, 2)), bound.amax((1, 2))
    names = sorted(set(setup.kernels))
    kernels = torch.tensor([names.index(one) for one in setup.kernels]).to(setup.device)
    wrong = ~explained(setup, found.folded, found.folded - off, 1.0).all(1) & found.finite
    return all(
        bool((largest > limit)[wrong & (kernels == one)].any()) for one in kernels[wrong].unique()
    )


class _Reader:
    """Runs the kernel of a setup with coded values, and counts the runs."""

    def __init__(self, setup: AttentionSetup, run: Run, *, values: bool = True) -> None:
        self._setup, self._run, self._runs, self._values = setup, run, 0, values

    def runs_of(self, lanes: Lanes) -> int:
        """Return the number of runs that measure lanes."""
        return -(-lanes.count // self._setup.width)

    def _outputs(self, codes: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the outputs of the rows and heads for each of the codes, [R, H, runs × head_size]."""
        return torch.cat([self._output(one) for one in codes], 2)

    def _output(self, codes: torch.Tensor, output: float = float("nan")) -> torch.Tensor:
        call = with_values(self._setup.call, self._setup.target, codes)
        call.buffer.fill_(output)
        self._runs += 1
        found = self._run(call)[..., : self._setup.width]
        rows, heads = self._setup.rows, self._setup.heads
        if found.shape[:2] == (len(rows), len(heads)):
            return found  # the rows and heads are ascending
        return found[rows][:, heads]

    def lanes(self, lanes: Lanes) -> torch.Tensor:
        """Return the sums of the weights by lane, then zeros, [R, H, runs × head_size]."""
        read = self._outputs(one_hot(self._setup.call, lanes.of, self._setup.width))
        scale = value_scale(self._setup.call)
        if scale != 1:
            read[..., : lanes.cached] /= scale
        return read

    def sketch(self) -> torch.Tensor:
        """Return the outputs of the runs with signed codes, [R, H, M]."""
        call = self._setup.call
        return self._outputs(signed_codes(call, run) for run in range(sketch_runs(call))).float()

    def sketch_codes(self, slots: torch.Tensor) -> torch.Tensor:
        """Return what the kernel weighs of some slots in those runs, [n, M] float32."""
        call, runs = self._setup.call, range(sketch_runs(self._setup.call))
        width = self._setup.width
        codes = torch.cat([signed_codes(call, run)[slots, 0, :width] for run in runs], 1).float()
        codes[slots < cache_slots(call)] *= value_scale(call)
        return codes

    def finish(
        self,
        lanes: Lanes,
        read: torch.Tensor,
        weights: torch.Tensor | None = None,
        error: float = 0.0,
    ) -> Measurement:
        """Return the measurement: run once more with random codes, and find the rows that are not written."""
        setup, call = self._setup, self._setup.call
        if weights is None:
            weights = unfolded(setup, lanes, read[..., : lanes.count])
        codes = random_codes(call)
        numbers = codes[..., : setup.width].to(setup.device).double()
        predicted, magnitude = weigh(call, weights, numbers, setup.kv_head)
        output = self._output(codes) if self._values else predicted
        unwritten = read.isnan().flatten(1).all(1)
        if self._values:
            unwritten &= output.isnan().flatten(1).all(1)
        if bool(unwritten.any()):  # a run that differs from one with NaN in the buffer alone
            same = codes if self._values else next(one_hot(call, lanes.of, setup.width))
            unwritten &= (self._output(same, _KEPT) == _KEPT).flatten(1).all(1)
        return Measurement(
            call=call,
            rows=setup.rows,
            heads=setup.heads,
            lanes=lanes,
            read=read,
            weights=weights,
            unwritten=unwritten,
            output=output,
            residual=output - predicted,
            magnitude=magnitude,
            needs_values=bool(_finite(output[~_finite(read[..., : lanes.count])]).any()),
            runs=self._runs,
            error=error,
        )


def unfolded(setup: AttentionSetup, lanes: Lanes, folded: torch.Tensor) -> torch.Tensor:
    """Return the weights [R, H, N] if each lane's sum belongs to the slot of the row's own sequence."""
    if lanes.is_one_to_one:
        return folded
    own = own_slots(setup, lanes)
    slots = torch.where(own < 0, len(lanes.of), own)[:, None].expand_as(folded)
    weights = folded.new_zeros(*folded.shape[:2], len(lanes.of) + 1).scatter_(2, slots, folded)
    return weights[..., :-1]


def value_scale(call: KernelCall) -> float:
    """Return the factor that a right kernel applies to values of the cache."""
    return one_number(call.v_scale) if call.kv_cache_dtype != "auto" else 1.0


def weigh(
    call: KernelCall, weights: torch.Tensor, values: torch.Tensor, kv_heads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of weights [R, H, N] on values [N, num_kv_heads, head_size], and its magnitude.

    The values of the cache are stored numbers; ``kv_heads``: [H]. Both results are [R, H, head_size].
    """
    scale = torch.ones(len(values), 1, 1, dtype=torch.float64, device=values.device)
    scale[: cache_slots(call)] = value_scale(call)
    value = (values * scale)[:, kv_heads].transpose(0, 1)
    outputs, magnitudes = [], []
    for group in head_groups(weights.shape, weights.device):
        by_head = weights[:, group].transpose(0, 1)
        outputs.append(by_head @ value[group])
        magnitudes.append(by_head.abs() @ value[group].abs())
    return torch.cat(outputs).transpose(0, 1), torch.cat(magnitudes).transpose(0, 1)
