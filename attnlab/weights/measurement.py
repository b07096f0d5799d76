"""Measurement: the weights of a kernel, from runs of the unmodified kernel with coded values."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.machine import available_bytes
from attnlab.case.ops import check_weighs_values
from attnlab.contracts.contract import Target
from attnlab.kernels.backend import Backend, RunOptions
from attnlab.kernels.control import run_backend
from attnlab.kernels.run_call import on_device
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import has_fp8_query, has_scaled_output
from attnlab.weights.codes import (
    Lanes,
    SlotOwners,
    holds_token,
    num_slots,
    one_hot,
    own_slots,
    random_codes,
    shared_lanes,
    slot_owners,
    values_shape,
    with_drawn_keys,
    with_finite_keys,
    with_values,
)
from attnlab.weights.fit import explained, head_groups, right_weights, some_rows
from attnlab.weights.plan import right_plan
from attnlab.weights.setup import (
    BYTES,
    AttentionSetup,
    cache_slots,
    make_setup,
    moved,
    near_slots,
    one_number,
    places,
    store,
    with_argument,
)

# Sketch: find which slots of a large cache have a weight, with few runs of random signed codes.
#
# A lane measures the sum of its slots. Where it deviates, slots outside the row's sequence have a weight.
# Each slot then gets ±1 in every element of every run; 1 and -1 are exact in float16, bfloat16 and FP8.
# With M numbers per row, the weights of up to M / 2 such slots follow from them: those that correlate with
# what the lanes do not explain.

NUMBERS = 1024  # M, about
_ROUNDS = 24  # of slots that are added
_AT_ONCE = 32  # slots that a round adds at most
_LEAST_EXPLAINED = 16  # rows and heads in which a round looks for slots
_ERRORS = 10.0
# An error of a weight, in units of its relative precision, that leaves nothing to explain.
_SMALL = 0.25
_CHANCE = 5.0  # a correlation of so many standard deviations is none of chance


def sketch_runs(call: KernelCall) -> int:
    """Return the number of runs with signed codes."""
    return -(-NUMBERS // call.query.shape[2])


def signed_codes(call: KernelCall, run: int) -> torch.Tensor:
    """Return ±1 for every slot and element, the same for all KV heads, [N, num_kv_heads, head_size] int8."""
    generator = torch.Generator().manual_seed(100 + run)
    slots, head_size = num_slots(call), call.query.shape[2]
    signs = torch.randint(0, 2, (slots, 1, head_size), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).expand(-1, call.key.shape[1], -1).contiguous()


def solve_near(
    setup: AttentionSetup,
    outputs: torch.Tensor,
    codes_of: Callable[[torch.Tensor], torch.Tensor],
    folded: torch.Tensor,
    lanes: Lanes,
    own: torch.Tensor,
    near: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """Return weights [R, H, N] as :func:`solve` does, from few slots if these explain the outputs.

    - ``outputs``: [R, H, M], what the runs gave. ``codes_of``: returns the codes of some slots, [n, M].
    - ``near``: the slots to try first, [n] ascending, with all of ``own``; then all slots are tried.
    """
    every = torch.arange(len(lanes.of))
    for kept in (near, every):
        part = dataclasses.replace(lanes, of=lanes.of[kept])
        own_kept = places(kept, own)
        weights, error = solve(codes_of(kept), outputs, folded, part, own_kept, setup.seq)
        if error <= _SMALL * float(setup.relative.max()):
            break
    found = weights.new_zeros(*weights.shape[:2], len(every))
    found[..., kept] = weights
    found[weights.isnan().flatten(1).all(1)] = torch.nan
    return found, error


def solve(
    codes: torch.Tensor,
    outputs: torch.Tensor,
    folded: torch.Tensor,
    lanes: Lanes,
    own: torch.Tensor,
    seq: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """Return weights [R, H, N] that explain lanes and sketch, and the largest error of a weight.

    - ``codes``: [N, M] float32, the stored codes times the scale of the values. ``outputs``: [R, H, M]
      float32, what the runs gave.
    - ``folded``: [R, H, lanes], the measured sums. ``own``: [R, lanes], the slot of each lane that the row's
      sequence has, -1 for none. ``seq``: [R].

    The error is ten standard deviations of what the weights leave unexplained: it holds for the largest of
    many weights, whose errors are not independent. Rows that are not finite stay NaN.
    """
    weights = folded.new_full((*folded.shape[:2], len(lanes.of)), torch.nan)
    folded = folded.float()
    error = 0.0
    readable = (folded.isfinite().all(-1) & outputs.isfinite().all(-1)).all(-1)
    for one in seq[readable].unique().tolist():
        rows = torch.nonzero((seq == one) & readable).flatten()
        given, sums = (numbers[rows].flatten(0, 1) for numbers in (outputs, folded))
        part, deviation = _solve(codes, given, sums, lanes, own[rows[0]])
        weights[rows] = part.view(len(rows), -1, part.shape[1]).double()
        error = max(error, _ERRORS * deviation)
    return weights, error


def _solve(
    codes: torch.Tensor,
    outputs: torch.Tensor,
    folded: torch.Tensor,
    lanes: Lanes,
    own: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """Return the weights [n, N] of n rows and heads of a sequence, and the standard deviation of one."""
    with_dummy = torch.cat([codes, codes.new_zeros(1, codes.shape[1])])
    # a weight of another slot is missing in the lane's own slot
    moved = codes - with_dummy[own][lanes.of]
    target = outputs - folded @ with_dummy[own]
    is_own = torch.zeros(len(codes) + 1, dtype=torch.bool).index_fill(0, own, True)[:-1]
    size, used = moved.square().sum(1).sqrt().clamp(min=1e-12), torch.zeros_like(is_own)
    foreign, rest = _fit(moved, target, used)
    for _ in range(_ROUNDS):
        spread = rest.square().mean(1).sqrt().clamp(min=1e-12)
        least = spread.topk(min(_LEAST_EXPLAINED, len(rest))).indices
        scores = ((rest / spread[:, None])[least] @ moved.T / size).abs().amax(0)
        new = (scores > _CHANCE) & ~used & ~is_own
        # slots of one lane correlate with each other: the best come first
        best = scores.masked_fill(~new, 0.0).topk(min(_AT_ONCE, int(new.sum())))
        if not len(best.indices) or int(used.sum()) + len(best.indices) > codes.shape[1] // 2:
            break
        used[best.indices[best.values >= best.values[0] / 2]] = True
        foreign, rest = _fit(moved, target, used)
    # what was added by chance has the weight 0 up to the error
    error = float(rest.square().mean(1).sqrt().max() / size.median())
    foreign, rest = _fit(moved, target, used & (foreign.abs().amax(0) > _CHANCE * error))
    weights = torch.cat([foreign, foreign.new_zeros(len(foreign), 1)], 1)
    lane_own = folded.new_zeros(folded.shape).index_add(1, lanes.of, foreign)
    weights[:, own] += folded - lane_own
    deviation = float(rest.square().mean(1).sqrt().max() / size.median())
    return weights[:, :-1], deviation


def _fit(
    codes: torch.Tensor, target: torch.Tensor, used: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [n, N] of the used slots that fit the target [n, M] best, and what is left."""
    slots = torch.nonzero(used).flatten()
    weights = target.new_zeros(len(target), len(codes))
    if not len(slots):
        return weights, target
    solution = torch.linalg.lstsq(codes[slots].T, target.T).solution.T
    return weights.index_copy(1, slots, solution), target - solution @ codes[slots]


# How large an X-ray may be.

MOST_WEIGHTS = 1 << 26  # of a measurement, on any machine; more if memory is available


def check_numbers(rows: int, heads: int, slots: int) -> None:
    """Raise InvalidCall if an X-ray would hold too many numbers."""
    if rows * heads * slots > (most := max(MOST_WEIGHTS, available_bytes() // BYTES)):
        raise InvalidCall(
            f"rows × heads × slots must be at most {most}, got {rows} × {heads} × {slots}; "
            "choose a part with --seq-range and --kv-head-range, or fewer blocks",
            field="num_blocks",
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


def runner(subject: "Subject", device: torch.device | str) -> Run:
    """Return the function that runs a call as that of a subject, and returns its output on a device."""
    backend, ran = subject.backend, (subject.target, subject.kernels, subject.options)

    def run(call: KernelCall) -> torch.Tensor:
        is_there = call.buffer.device.type == backend.device
        there = call if is_there else on_device(call, backend.device)
        run_backend(backend, there, *ran)
        return there.buffer.to(device).double()

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
    slots = torch.arange(num_slots(call), device=setup.device)
    single = Lanes(of=slots, cached=cache_slots(call), count=len(slots))  # one for every slot
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
    if not resolve or bool(explained(setup, folded, expected, 1.0)[_finite(folded)].all()):
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


def values_are_right(setup: AttentionSetup, found: Measurement, coarse: float) -> torch.Tensor:
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

    def _one_hot(self, lanes: Lanes) -> Iterator[torch.Tensor]:
        """Return the values of the runs that measure lanes."""
        _, kv_heads, head_size = values_shape(self._setup.call)
        of = lanes.of.to(self._setup.call.query.device)
        return one_hot(of, self._setup.width, kv_heads, head_size)

    def lanes(self, lanes: Lanes) -> torch.Tensor:
        """Return the sums of the weights by lane, then zeros, [R, H, runs × head_size]."""
        read = self._outputs(self._one_hot(lanes))
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
        codes = random_codes(values_shape(call))
        numbers = codes[..., : setup.width].to(setup.device).double()
        predicted, magnitude = weigh(call, weights, numbers, setup.kv_head)
        output = self._output(codes) if self._values else predicted
        unwritten = read.isnan().flatten(1).all(1)
        if self._values:
            unwritten &= output.isnan().flatten(1).all(1)
        if bool(unwritten.any()):  # a run that differs from one with NaN in the buffer alone
            same = codes if self._values else next(self._one_hot(lanes))
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

    @property
    def bound(self) -> torch.Tensor:
        """Return the rounding bound of each weight, [rows, heads, slots]."""
        return self.setup.bound(self.expected)

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
    check_numbers(len(subject.rows), len(subject.heads), num_slots(call))
    owners = slot_owners(call)
    held = holds_token(call, owners) if subject.written is None else subject.written
    call = with_finite_keys(call, target, ~held)
    setup = _setup(subject, call)
    drawn = not law_is_visible(setup)
    if drawn:
        call = with_drawn_keys(call, target)
        setup = _setup(subject, call)
    run = runner(subject, device)
    case = subject.case
    if case is not None and case.argument.is_packed:  # INT4 cannot store random codes
        values, resolve = False, resolve and num_slots(call) <= MOST_RUNS * setup.width
    expected = right_weights(setup)
    lanes = moved(shared_lanes(call, owners), device)
    measurement = measure(setup, run, expected, lanes, resolve=resolve, values=values)
    if measurement.error:
        setup = dataclasses.replace(setup, fixed=setup.fixed + measurement.error)
    elif case is not None and case.argument.cache is not None:
        setup = dataclasses.replace(
            setup, stored=store(case, setup.call, measurement.lanes.of.cpu())
        )
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
            raise InvalidCall(f"{name} must be one number for an X-ray, got several")
        scales[name] = float(scale[0])
    return dataclasses.replace(call, **scales)


def law_is_visible(setup: AttentionSetup) -> bool:
    """Answer whether the scores differ by more than the precision of a weight."""
    if not bool(setup.query.isfinite().all()):
        return True
    rows = some_rows(setup)
    if len(rows) < len(setup.rows):
        setup = setup.take(rows)
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
