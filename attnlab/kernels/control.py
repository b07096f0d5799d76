"""Controls: the same call again, wherever a statement rests on the comparison of two runs.

Two runs that differ in one field say something about that field only if two equal runs agree. Inside
:func:`controlled`, every run of a kernel is made twice on the same arguments, so that a comparison of A with
B rests on A, A, B, B. Kernels that the lab itself makes deterministic run once.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch

from attnlab.case.errors import NotDeterministic
from attnlab.case.shown import Document
from attnlab.contracts.contract import Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput
from attnlab.kernels.replaced import setting
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import same_numbers

MOST_RUNS, _MOST_S = 8, 10.0  # of one call, to count how many runs differ
_MOST_BYTES = 1 << 30  # of an output, of which copies are kept
_LEAST, _MOST = 2.0, 16.0  # units of the output's precision that another order of sums may change
_SHARE = 1 / 16  # of the largest number of a row and head, up to which the second holds
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instability(Document):
    """Outputs of equal calls that differ by more than another order of sums explains.

    - ``runs``: how many runs of the call; ``others``: how many differ from the most frequent output.
    """

    _more = ("text",)

    runs: int
    others: int
    rows: tuple[int, ...]
    num_rows: int
    largest: float

    @property
    def text(self) -> str:
        """Return the fact as one sentence."""
        shown = ", ".join(map(str, self.rows[:8])) + (", …" if len(self.rows) > 8 else "")
        size = (
            f"by up to {self.largest:.3g}" if self.largest == self.largest else "NaN in one of them"
        )
        return (
            f"the same call gives different outputs: {self.others} of {self.runs} runs differ from the "
            f"others, in {len(self.rows)} of {self.num_rows} rows ({shown}), {size}"
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Control:
    """What equal runs showed so far.

    ``found``: the first call whose outputs differ, or None; ``reorders``: equal runs differ in bits, by no
    more than another order of sums explains (atomic additions on a GPU).
    """

    found: Instability | None = None
    reorders: bool = False

    def compare(
        self, first: torch.Tensor, run: Callable[[], torch.Tensor], *, least: int = 2
    ) -> None:
        """Run a call again and compare its output with the first, [num_tokens, …].

        ``least``: the number of runs, the first included, if all agree. If two differ, run the call up to 8
        times and raise NotDeterministic.
        """
        if self.found is not None:  # a caller that has left out the error goes on
            raise NotDeterministic(self.found.text)
        began, outputs, differ = time.perf_counter(), [first], False
        with uncontrolled():
            while len(outputs) < (MOST_RUNS if differ else least):
                if len(outputs) > 1 and time.perf_counter() - began >= _MOST_S:
                    break
                outputs.append(run())
                differ = differ or not self._agree(first, outputs[-1])
        if differ:
            self.found = _instability(outputs)
            raise NotDeterministic(self.found.text)

    def _agree(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        if bool(rows_equal(first, second).all()):
            return True
        is_close = bool(rows_close(first, second).all())
        self.reorders |= is_close
        return is_close


T = TypeVar("T")
_ACTIVE: ContextVar[Control | None] = ContextVar("control", default=None)


@contextlib.contextmanager
def controlled() -> Iterator[Control]:
    """Run every call inside the block twice; yield what that shows.

    A block inside another one belongs to it. NotDeterministic ends the outermost block: read
    ``Control.found`` after it.
    """
    if (active := _ACTIVE.get()) is not None:
        yield active
        return
    with setting(_ACTIVE, Control()) as control, contextlib.suppress(NotDeterministic):
        yield control


def uncontrolled() -> contextlib.AbstractContextManager[None]:
    """Run calls inside the block once, because the caller compares them or records the run."""
    return setting(_ACTIVE, None)


def is_controlled() -> bool:
    """Answer whether calls are run twice here."""
    return _ACTIVE.get() is not None


def repeated(run: Callable[[T], torch.Tensor]) -> Callable[[T], torch.Tensor]:
    """Return a function whose outputs are compared inside :func:`controlled`, as those of a backend are."""

    def run_twice(given: T) -> torch.Tensor:
        control = _ACTIVE.get()
        with uncontrolled():
            output = run(given)
        if control is not None:
            control.compare(output, lambda: run(given))
        return output

    return run_twice


def run_backend(
    backend: Backend, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
) -> RunOutput:
    """Run the kernels of a call as ``backend.run`` does; twice inside :func:`controlled`."""
    control = _ACTIVE.get()
    is_large = call.buffer.numel() * call.buffer.element_size() > _MOST_BYTES
    if control is None or backend.is_deterministic or is_large:
        return backend.run(call, target, kernels, options)
    if control.found is not None:  # a caller that has left out the error goes on
        raise NotDeterministic(control.found.text)
    before = call.buffer.clone()
    ran = backend.run(call, target, kernels, options)
    again = dataclasses.replace(options, trace_reads=False)

    def run() -> torch.Tensor:
        call.buffer.copy_(before)
        backend.run(call, target, kernels, again)
        return call.buffer.clone()

    first = call.buffer.clone()
    control.compare(first, run)
    call.buffer.copy_(first)
    return ran


def rows_equal(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return which rows hold the same bits, [num_tokens] bool; NaN equals itself, -0.0 is not 0.0."""
    bits = _BITS[first.element_size()]
    equal: torch.Tensor = first.contiguous().view(bits) == second.contiguous().view(bits)
    return equal.flatten(1).all(1)


def rows_agree(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return which rows of two runs hold the same bits, [num_tokens] bool.

    If equal runs differ in bits, by another order of sums, rows that differ no more agree.
    """
    control = _ACTIVE.get()
    same = rows_equal(first, second)
    return same | rows_close(first, second) if control is not None and control.reorders else same


def rows_close(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return which rows differ by no more than another order of sums explains, [num_tokens] bool."""
    if not first.is_floating_point():
        return rows_equal(first, second)
    precision = torch.finfo(first.dtype).eps
    share = max(_LEAST * precision, min(_MOST * precision, _SHARE))
    a, b = (one.double().flatten(1) for one in (first, second))
    is_number = a.isfinite() & b.isfinite()
    size = torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0).unflatten(1, first.shape[1:])
    size = size.amax(-1, keepdim=True).expand_as(first).flatten(1)  # of a row and head
    return torch.where(is_number, (a - b).abs() <= share * size, same_numbers(a, b)).all(1)


def _instability(outputs: Sequence[torch.Tensor]) -> Instability:
    """Return how the outputs of equal calls differ from the most frequent of them."""
    alike = [[bool(rows_close(one, two).all()) for two in outputs] for one in outputs]
    most = max(range(len(outputs)), key=lambda at: sum(alike[at]))
    others = [one for one, is_alike in zip(outputs, alike[most], strict=True) if not is_alike]
    usual = outputs[most]
    rows = torch.stack([~rows_close(one, usual) for one in others]).any(0)
    sizes = [(one.double() - usual.double())[rows] for one in others]
    both_nan = [(one.isnan() & usual.isnan())[rows] for one in others]
    largest = torch.stack(
        [s.masked_fill(n, 0.0).abs().max() for s, n in zip(sizes, both_nan, strict=True)]
    )
    return Instability(
        runs=len(outputs),
        others=len(others),
        rows=tuple(torch.nonzero(rows).flatten().tolist()),
        num_rows=len(usual),
        largest=float(largest.max()),
    )
