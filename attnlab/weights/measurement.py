"""Measurement: the weights of a kernel, from runs of the unmodified kernel with coded values."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.case.errors import InvalidCall
from attnlab.contracts.target import Target
from attnlab.kernels.backend import Backend, RunOptions
from attnlab.tensors.call import KernelCall
from attnlab.weights.codes import num_runs, num_slots, one_hot, random_codes, with_values
from attnlab.weights.setup import cache_slots, one_number

MOST_WEIGHTS = 1 << 26  # numbers of a measurement: 256 MiB of float32
MOST_RUNS = 4096
Run = Callable[[KernelCall], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measurement:
    """What the runs gave.

    - ``call``: the call with finite keys; its values are those of the caller.
    - ``rows`` [R], ``heads`` [H]: output rows and query heads that were measured.
    - ``read``: [R, H, runs × head_size] float64, the outputs of the runs in order, divided by v_scale for
      slots of the cache; its first N numbers are the weights of the slots.
    - ``unwritten``: [R] bool, rows that kept the contents of the output buffer.
    - ``residual``: [R, H, head_size], the output of the run with random codes minus what the weights give;
      ``magnitude``: the sum of their absolute terms.
    - ``runs``: how often the kernel ran.
    """

    call: KernelCall
    rows: torch.Tensor
    heads: torch.Tensor
    read: torch.Tensor
    unwritten: torch.Tensor
    residual: torch.Tensor
    magnitude: torch.Tensor
    runs: int

    @property
    def weights(self) -> torch.Tensor:
        """Return the weights, [R, H, N] float64, NaN where an output was not finite."""
        return self.read[..., : num_slots(self.call)]

    @property
    def finite(self) -> torch.Tensor:
        """Return which rows are finite in all heads, [R] bool."""
        return self.weights.isfinite().flatten(1).all(1)


def runner(backend: Backend, target: Target, kernels: tuple[str, ...], options: RunOptions) -> Run:
    """Return the function that runs a call on the backend and returns its output on the CPU."""

    def run(call: KernelCall) -> torch.Tensor:
        backend.run(call, target, kernels, options)
        return call.output.cpu().double()

    return run


def measure(
    call: KernelCall, target: Target, run: Run, rows: torch.Tensor, heads: torch.Tensor
) -> Measurement:
    """Measure the weights of some rows and heads.

    Raises InvalidCall if there are more numbers or runs than the X-ray holds.
    """
    check_size(call, len(rows), len(heads))
    parts = [_taken(run(with_values(call, target, codes)), rows, heads) for codes in one_hot(call)]
    read = torch.cat(parts, 2)
    read[..., : cache_slots(call)] /= value_scale(call)
    weights = read[..., : num_slots(call)]
    runs = len(parts)
    unwritten = weights.isnan().flatten(1).all(1)
    if bool(unwritten.any()):
        zeros = with_values(call, target, next(one_hot(call)))
        zeros = dataclasses.replace(zeros, output=torch.zeros_like(zeros.output))
        unwritten &= (_taken(run(zeros), rows, heads) == 0).flatten(1).all(1)
        runs += 1
    codes = random_codes(call)
    output = _taken(run(with_values(call, target, codes)), rows, heads)
    predicted, magnitude = weigh(call, weights, codes.double(), heads)
    return Measurement(
        call=call,
        rows=rows,
        heads=heads,
        read=read,
        unwritten=unwritten,
        residual=output - predicted,
        magnitude=magnitude,
        runs=runs + 1,
    )


def check_size(call: KernelCall, rows: int, heads: int) -> None:
    """Raise InvalidCall if the X-ray of so many rows and heads would be too large."""
    check_numbers(rows, heads, num_slots(call), num_runs(call))


def check_numbers(rows: int, heads: int, slots: int, runs: int) -> None:
    """Raise InvalidCall if an X-ray would hold too many numbers or take too many runs."""
    if rows * heads * slots > MOST_WEIGHTS:
        raise InvalidCall(
            f"rows × heads × slots must be at most {MOST_WEIGHTS}, got {rows} × {heads} × {slots}; "
            "choose a part with --seq-range and --kv-head-range, or fewer blocks",
            field="num_blocks",
        )
    if runs > MOST_RUNS:
        raise InvalidCall(
            f"slots / head_size must be at most {MOST_RUNS} runs, got {runs}; give the cache fewer blocks",
            field="num_blocks",
        )


def value_scale(call: KernelCall) -> float:
    """Return the factor that a right kernel applies to values of the cache."""
    return one_number(call.v_scale) if call.kv_cache_dtype != "auto" else 1.0


def weigh(
    call: KernelCall, weights: torch.Tensor, values: torch.Tensor, heads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of weights [R, H, N] on values [N, num_kv_heads, head_size], and its magnitude.

    The values of the cache are stored numbers; both results are [R, H, head_size].
    """
    scale = torch.ones(len(values), 1, 1, dtype=torch.float64)
    scale[: cache_slots(call)] = value_scale(call)
    value = (values * scale)[:, heads // call.num_queries_per_kv].transpose(0, 1)
    by_head = weights.transpose(0, 1)
    return (by_head @ value).transpose(0, 1), (by_head.abs() @ value.abs()).transpose(0, 1)


def _taken(output: torch.Tensor, rows: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    return output[rows][:, heads]
