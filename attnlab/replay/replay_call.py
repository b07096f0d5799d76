"""Replay a call on several targets, and compare each output with the correct and with the recorded one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import (
    InvalidCase,
    InvalidValue,
    KernelFailed,
    KernelRejected,
    NotDeterministic,
    Unavailable,
)
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.defects.problem import Problem
from attnlab.diagnosis.captured import where_it_ran
from attnlab.kernels.backend import Backend
from attnlab.kernels.control import controlled
from attnlab.replay.expected import Expected, distance, other_bits
from attnlab.replay.replays import (
    CANNOT_RUN,
    MATCH,
    MISMATCH,
    REJECTED,
    UNSTABLE,
    Difference,
    Replay,
    Replays,
)
from attnlab.replay.run_call import check_replayable, run_call, where_to_run
from attnlab.replay.targets import ReplayTarget
from attnlab.tensors.call import KernelCall

OnTarget = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """A run of a call on a backend.

    ``output`` is on the CPU, None if the run ended with ``failure``. ``expected`` is the correct output under
    the rules of ``case``, the platform and the release.
    """

    case: Case
    expected: Expected
    output: torch.Tensor | None = None
    failure: Exception | None = None

    @property
    def status(self) -> str:
        """Return the verdict, one of :data:`attnlab.replay.replays.STATUSES`."""
        if self.output is not None:
            return MISMATCH if bool((self.expected.ratio(self.output) > 1).any()) else MATCH
        if isinstance(self.failure, NotDeterministic):
            return UNSTABLE
        return REJECTED if isinstance(self.failure, KernelRejected) else CANNOT_RUN


def expected_of(call: KernelCall, ran: Case) -> Expected:
    """Return the correct output of a call on the platform and release of a Case."""
    call = call.with_buffer()
    if call.spec.writes_cache:
        return Expected.of_write(call, Target.of(ran))
    return Expected.of(Problem.of_call(call.cpu(), Target.of(ran), kernels_of(ran, call)))


def run_once(call: KernelCall, backend: Backend, case: Case, given: tuple[str, ...] = ()) -> Ran:
    """Run a call on a backend. ``case`` and ``given``: as for :func:`where_it_ran`.

    A rejection and a backend that cannot run the call are no exceptions, but the run's ``failure``.
    """
    ran = where_to_run(call, backend, case, given)
    expected = expected_of(call, ran)
    try:
        return Ran(case=ran, expected=expected, output=run_call(call, backend, ran))
    except (InvalidValue, KernelRejected, Unavailable) as error:
        return Ran(case=ran, expected=expected, failure=error)


def run_on(call: KernelCall, backend: Backend, case: Case, given: tuple[str, ...] = ()) -> Ran:
    """Run a call as :func:`run_once` does; outputs of equal runs that differ are its ``failure``."""
    with controlled() as control:
        found = run_once(call, backend, case, given)
    if control.found is None:
        return found
    ran = where_to_run(call, backend, case, given)
    failure = NotDeterministic(control.found.text)
    return Ran(case=ran, expected=expected_of(call, ran), failure=failure)


def compare_outputs(
    output: torch.Tensor, other: torch.Tensor | None, expected: Expected, *, bounds: float = 1.0
) -> Difference:
    """Return how two outputs differ; elements count that differ by more than ``bounds`` rounding bounds.

    ``other``: None for the correct output.
    """
    right = expected.output if other is None else expected.numbers(other)
    difference = distance(expected.numbers(output), right)
    ratio = expected.in_bounds(difference)
    beyond = ratio > bounds
    own = difference[expected.rows]
    places = torch.nonzero(beyond)
    bits = own > 0
    if other is not None and output.dtype == other.dtype:
        bits = other_bits(output, other)[expected.rows]
    return Difference(
        elements=len(places),
        total=own.numel(),
        rows=int(beyond.flatten(1).any(1).sum()),
        num_rows=int(expected.rows.sum()),
        largest=float(own.max()) if own.numel() else 0.0,
        in_bounds=float(ratio.max()) if ratio.numel() else 0.0,
        first=tuple(places[0].tolist()) if len(places) else None,
        other_bits=int(bits.sum()),
    )


def replay_all(
    call: KernelCall,
    targets: Sequence[ReplayTarget],
    case: Case,
    given: tuple[str, ...] = (),
    *,
    name: str = "",
    on_target: OnTarget = lambda name, done, total: None,
) -> Replays:
    """Run a call on each target, and return the verdicts.

    - ``case``, ``given``: as for :func:`attnlab.diagnosis.captured.where_it_ran`; ``name``: the call's path.
    - ``on_target``: called with a target's name, how many are done, and how many there are.

    Raises InvalidCall for a call that is no attention or has arguments without a reference.
    """
    check_replayable(call)
    recorded = where_it_ran(call, case, given)
    replays = []
    for number, target in enumerate(targets):
        on_target(target.name, number, len(targets))
        replays.append(_replay(call, target, case, given))
    status, error = _recorded(call, recorded.case)
    assumed = tuple(text for text in recorded.assumed if not text.startswith("the release"))
    return Replays(
        call=name or call.op,
        op=call.op,
        origin=str(call.origin),
        recorded=status,
        recorded_error=error,
        replays=tuple(replays),
        assumed=assumed,
    )


def _replay(call: KernelCall, target: ReplayTarget, case: Case, given: tuple[str, ...]) -> Replay:
    """Run a call on one target."""
    try:
        backend = target.find()
        version = backend.version
        ran = run_on(call, backend, case, given)
    except (InvalidCase, Unavailable) as error:
        return Replay(
            target=target.name, backend=target.backend, status=CANNOT_RUN, reason=str(error)
        )
    if ran.output is None:
        return Replay(
            target=target.name,
            backend=version,
            status=ran.status,
            reason=str(ran.failure),
            failed=isinstance(ran.failure, KernelFailed),
        )
    recorded = None if call.rejection or call.output is None else call.output.cpu()
    return Replay(
        target=target.name,
        backend=version,
        status=ran.status,
        error=_error(ran.output, ran.expected),
        from_recorded=(
            None if recorded is None else compare_outputs(ran.output, recorded, ran.expected)
        ),
    )


def _recorded(call: KernelCall, ran: Case) -> tuple[str, Difference | None]:
    """Return the verdict on the recorded output, and its error."""
    if call.rejection:
        return REJECTED, None
    if call.output is None:
        return "unknown", None
    error = _error(call.output.cpu(), expected_of(call, ran))
    return MISMATCH if error.elements else MATCH, error


def _error(output: torch.Tensor, expected: Expected) -> Difference:
    return compare_outputs(output, None, expected)
