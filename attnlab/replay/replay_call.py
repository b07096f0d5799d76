"""Replay a call on several targets, and compare each output with the correct and with the recorded one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import (
    AttnLabError,
    InvalidCall,
    InvalidCase,
    InvalidValue,
    KernelFailed,
    KernelRejected,
    NotDeterministic,
    Unavailable,
)
from attnlab.case.shown import Document, Shown
from attnlab.contracts.contract import Target
from attnlab.diagnosis.candidates import correct_and_bound
from attnlab.diagnosis.captured import check_diagnosable, problem_of, where_it_ran
from attnlab.kernels.backend import Backend
from attnlab.kernels.control import controlled
from attnlab.kernels.run_call import run_call
from attnlab.kernels.runner import Runner, one_backend, runners
from attnlab.lab.cache_write import expected_write
from attnlab.lab.call_lab import CallLab, call_lab
from attnlab.lab.problem import Problem, RowSlice
from attnlab.lab.result import Result
from attnlab.show.sheets.sheet import Facts, Grid, Lines, Row, Sheet, Tone, Words
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import distance
from attnlab.tensors.quantised import Formats

_SHARP_WORK = 1 << 26  # products of a weight and a value, up to which every row has the sharp bound
_EXACT_ELEMENTS = 1 << 22  # up to this size of an output, the correct one is computed in float64
_ROWS_AT_ONCE = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """The correct output of a call; ``output`` and ``bound`` are [num_tokens, num_heads, value_size].

    - ``bound``: how far rounding may move each element.
    - ``rows``: [num_tokens] bool, the rows of sequences; padding rows are not compared.
    - ``formats``: how the call stores its output, or None if plainly.
    """

    output: torch.Tensor
    bound: torch.Tensor
    rows: torch.Tensor
    formats: Formats | None = None

    @classmethod
    def of_write(cls, call: KernelCall, target: Target) -> "Expected":
        """Return what a cache must hold after a write; its rows are slots."""
        right = expected_write(call.cpu(), target)
        rows = torch.ones(len(right.numbers), dtype=torch.bool)
        return cls(output=right.numbers, bound=right.bound, rows=rows)

    @classmethod
    def of(cls, problem: Problem) -> "Expected":
        """Compute the correct output of a problem's call, whose tensors are on the CPU."""
        call = problem.call
        shape = call.buffer.shape
        dtype = torch.float64 if call.buffer.numel() <= _EXACT_ELEMENTS else torch.float32
        output, bound = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        rows = torch.zeros(shape[0], dtype=torch.bool)
        starts = problem.row_starts()
        for seq in range(problem.num_seqs):
            own = slice(starts[seq], starts[seq + 1])
            if own.start == own.stop:
                continue
            rows[own] = True
            work = problem.query_len(seq) * problem.seq_len(seq) * shape[1] * shape[2]
            if work <= _SHARP_WORK:
                output[own], bound[own] = _sharp(problem, seq)
            else:
                output[own], bound[own] = correct_and_bound(problem, seq, slice(None), dtype, None)
        return cls(output=output, bound=bound, rows=rows, formats=problem.formats)

    def ratio(self, output: torch.Tensor) -> torch.Tensor:
        """Return each element's error in units of its bound; above 1 it is wrong.

        Infinite where the output is not finite, 0 in padding rows.
        """
        return self.in_bounds(self.error(output))

    def numbers(self, output: torch.Tensor) -> torch.Tensor:
        """Return the numbers of an output that the op stored, in the dtype of the correct output."""
        scale = 1.0 if self.formats is None else self.formats.output_scale
        wide = output.to(self.output.dtype)
        return wide if scale == 1.0 else wide * scale

    def error(self, output: torch.Tensor) -> torch.Tensor:
        """Return each element's absolute error; infinite where only one of both is finite."""
        return distance(self.numbers(output), self.output)

    def in_bounds(self, difference: torch.Tensor) -> torch.Tensor:
        """Return an absolute difference per element in units of the bound; 0 in padding rows."""
        ratio = torch.where(difference == 0, 0.0, difference / self.bound)
        return ratio.masked_fill(~self.rows[:, None, None], 0.0)


def _sharp(problem: Problem, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correct output of a sequence and the sharp bound, some rows at a time."""
    heads = torch.arange(problem.num_heads)
    parts = [
        problem.correct(RowSlice(seq=seq, tokens=tokens, heads=heads))
        for tokens in torch.arange(problem.query_len(seq)).split(_ROWS_AT_ONCE)
    ]
    return torch.cat([one.output for one in parts]), torch.cat([one.bound for one in parts])


def other_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements of two tensors of one dtype have other bytes; NaN equals any NaN."""
    kind = _BITS[one.element_size()]
    differs = one.contiguous().view(kind) != other.contiguous().view(kind)
    return differs & ~(one.double().isnan() & other.double().isnan())


def where_to_run(call: KernelCall, backend: Backend, case: Case, given: tuple[str, ...]) -> Case:
    """Return the Case with the platform of the call and the release whose rules the backend follows."""
    ran = where_it_ran(call, case, given).case
    return ran if "release" in given else ran.replace(release=backend.release)


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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replays(Document, Shown):
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
        if len(self.replays) == 1 and self._says_nothing(self.replays[0]):
            return SKIP
        statuses = {one.status for one in self.replays}
        if statuses & {MISMATCH, REJECTED, UNSTABLE}:
            return 1
        return 3 if CANNOT_RUN in statuses else 0

    def _says_nothing(self, one: Replay) -> bool:
        """Answer whether a replay did not run, or the op states itself that it does not accept the call."""
        is_limit = one.status == REJECTED and not one.failed and self.recorded != REJECTED
        return one.status == CANNOT_RUN or is_limit

    @property
    def first_bad(self) -> Replay | None:
        """Return the first replay that mismatches, fails or is not deterministic, or None.

        A release whose op does not have the call, or does not accept it, is none.
        """
        bad = (one for one in self.replays if one.status != MATCH and not self._says_nothing(one))
        return next(bad, None)

    def first_bad_sentence(self) -> str:
        """Return the first bad release and the one before it, of releases in their order."""
        bad = self.first_bad
        if bad is None:
            silent = sum(map(self._says_nothing, self.replays))
            return "no release is bad" + (f"; {silent} do not run the call" if silent else "")
        earlier = self.replays[: list(self.replays).index(bad)]
        if not earlier:
            before = "none ran before it"
        elif self._says_nothing(earlier[-1]):
            before = f"{earlier[-1].target} before it does not run the call"
        else:
            before = f"before it, {earlier[-1].target}: {earlier[-1].status}"
        return f"first bad release: {bad.target} ({bad.status}); {before}"

    def sentence(self) -> str:
        """Return the verdicts in one sentence."""
        if len({one.status for one in self.replays}) == 1 and len(self.replays) > 1:
            return f"all {len(self.replays)} {self.replays[0].status}"
        return ", ".join(f"{one.target}: {one.status}" for one in self.replays)


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
        """Return the verdict, one of :data:`attnlab.replay.replay_call.STATUSES`."""
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
    return Expected.of(problem_of(call.cpu(), ran))


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
    targets: Sequence[Runner],
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
    check_diagnosable(call, writes=True)
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


def _replay(call: KernelCall, target: Runner, case: Case, given: tuple[str, ...]) -> Replay:
    """Run a call on one target."""
    try:
        backend = target.find()
        version = backend.version
        ran = run_on(call, backend, case, given)
    except (InvalidCase, Unavailable) as why:
        return Replay(
            target=target.name, backend=target.backend, status=CANNOT_RUN, reason=str(why)
        )
    recorded = None if call.rejection or call.output is None else call.output.cpu()
    error = None if ran.output is None else compare_outputs(ran.output, None, ran.expected)
    from_recorded = None
    if ran.output is not None and recorded is not None:
        from_recorded = compare_outputs(ran.output, recorded, ran.expected)
    return Replay(
        target=target.name,
        backend=version,
        status=ran.status,
        reason=str(ran.failure or ""),
        failed=isinstance(ran.failure, KernelFailed),
        error=error,
        from_recorded=from_recorded,
    )


def _recorded(call: KernelCall, ran: Case) -> tuple[str, Difference | None]:
    """Return the verdict on the recorded output, and its error."""
    if call.rejection:
        return REJECTED, None
    if call.output is None:
        return "unknown", None
    error = compare_outputs(call.output.cpu(), None, expected_of(call, ran))
    return MISMATCH if error.elements else MATCH, error


def lab_of_call(
    call: KernelCall, case: Case, given: Sequence[str], runner: Backend | None
) -> CallLab | None:
    """Return the lab that runs a call on its kernel; None without a kernel or a Case for the call."""
    if runner is None:
        return None
    ran = where_to_run(call, runner, case, tuple(given))
    try:
        return call_lab(call.cpu(), ran, runner)
    except AttnLabError:
        return None


def call_result(
    call: KernelCall,
    *,
    source: Path | str | None = None,
    backend: str | None = None,
    device: str | None = None,
    **changes: Any,
) -> Result:
    """Run a saved call and return its Result, as :func:`attnlab.run` does for a Case.

    The arguments are those of :func:`attnlab.shrink_call`. Raises InvalidCall if no Case has the arguments
    of the call.
    """
    runner = one_backend(source, backend, device)
    lab = lab_of_call(call, Case(**changes), tuple(changes), runner)
    if lab is None:
        raise InvalidCall("call must be one that a Case can have, run on a source or a backend")
    return lab.run(lab.case.replace(trace_reads=lab.runner.traces_reads))


def replay_call(
    call: KernelCall,
    *,
    sources: Sequence[Path | str] = (),
    backends: Sequence[str] = (),
    device: str | None = None,
    **changes: Any,
) -> Replays:
    """Run a saved call on several backends and releases, and compare the verdicts.

    - ``sources``: wheels, sdists and checkouts of vLLM, or versions that ``attnlab fetch`` downloaded.
    - ``backends``: names as in ``Case.backend``, such as "mine.py:fn". Default: the models.
    - ``device``: where the kernels of a vLLM run, "cuda" or "cpu". Default: the GPU if torch can use one.
    - ``changes``: where the call ran, for example ``platform="sm_90"``. Default: the call's origin.

    Raises InvalidCall for a call that is no attention or has arguments without a reference.
    """
    targets = runners([str(one) for one in sources], backends, device)
    return replay_all(call, targets, Case(**changes), tuple(changes))


TONES: dict[str, Tone] = {
    **{MATCH: "good", MISMATCH: "bad", UNSTABLE: "bad"},
    **{REJECTED: "odd", CANNOT_RUN: "quiet"},
}
_COLUMNS = ("target", "kernels", "verdict", "beyond rounding", "largest error", "recorded bits")


def replays(one: "Replays") -> Sheet:
    """Return what each backend made of a call, one row each."""
    tone: Tone = "good" if one.exit_code == 0 else "bad" if one.exit_code == 1 else "warn"
    recorded = one.recorded
    if one.recorded_error is not None:
        recorded += f": {beyond_text(one.recorded_error)}"
    return Sheet.of(
        "Replays",
        one.sentence(),
        Facts([("op", one.op), ("recorded on", one.origin), ("recorded output", recorded)]),
        Grid(_COLUMNS, [_row(each) for each in one.replays], most=len(one.replays)),
        Lines([Words(f"assumed: {text}", "quiet") for text in one.assumed]),
        tone=tone,
        name=f"Replays of {one.call}",
    )


def _row(one: "Replay") -> Row:
    verdict = Words(one.status, TONES[one.status])
    kernels = "" if one.backend == one.target else one.backend  # a function's name is both
    if one.error is None:
        return [one.target, kernels, verdict, one.reason, "", ""]
    error = one.error
    size = f"{error.largest:.3g}, {error.in_bounds:.3g} bounds"
    return [one.target, kernels, verdict, beyond_text(error), size, bits_text(one.from_recorded)]


def beyond_text(error: Difference) -> str:
    """Return how many elements and rows are beyond rounding."""
    if not error.elements:
        return "none"
    return f"{error.elements} of {error.total}, in {error.rows} of {error.num_rows} rows"


def bits_text(found: "Difference | None") -> str:
    """Return how an output agrees with the recorded one."""
    if found is None:
        return "unknown"
    if not found.other_bits:
        return "the same"
    return f"{found.other_bits} differ, by up to {found.in_bounds:.3g} bounds"
