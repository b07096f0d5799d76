"""The plan of a launch under Triton's interpreter: which programs run, where, and what is recorded."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.triton.trace import Watched

Program = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """How to launch: which programs run, in how many processes, and what is recorded.

    - ``needed(kernel, arguments, program)``: whether a program runs.
    - ``processes``: number of processes per launch. More than 1 requires that every tensor that a kernel
      writes is a :func:`shared_copy`.
    - ``on_programs``: called with (done, total), both estimates, while a launch runs.
    - ``observed``: the log that records the launch; it is mutated.
    - ``watched``: the layout of a call whose cache reads are traced, or None for no trace.
    """

    needed: Callable[[str, dict[str, Any], Program], bool] = lambda kernel, arguments, program: True
    processes: int = 1
    on_programs: Callable[[int, int], None] = lambda done, total: None
    observed: RunLog = field(default_factory=RunLog)
    watched: Watched | None = None


@dataclass(frozen=True, slots=True)
class LaunchParameters:
    """A kernel's name and the parameters of its launch that are integers, such as BLOCK_M."""

    kernel: str
    numbers: dict[str, int]


_PLAN: ContextVar[LaunchPlan | None] = ContextVar("plan", default=None)
_RECORDED: ContextVar[list["LaunchParameters"] | None] = ContextVar("recorded", default=None)
_TURN = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let other threads wait, until the block ends, before they interpret anything."""
    with _TURN:
        yield


@contextmanager
def launching(plan: LaunchPlan) -> Iterator[None]:
    """Use ``plan`` for all launches inside the block; other threads wait until it ends.

    Triton's interpreter keeps the program's index in one global object. Two launches at a time would
    read each other's index, and one would end the patches of the other.
    """
    with one_at_a_time():
        token = _PLAN.set(plan)
        try:
            yield
        finally:
            _PLAN.reset(token)


def current_plan() -> LaunchPlan | None:
    """Return the plan of the block that this thread is in, or None."""
    return _PLAN.get()


@contextmanager
def recording_launches() -> Iterator[list[LaunchParameters]]:
    """Record the launches of this thread inside the block instead of running their programs."""
    found: list[LaunchParameters] = []
    token = _RECORDED.set(found)
    try:
        yield found
    finally:
        _RECORDED.reset(token)


def is_recorded(kernel: str, arguments: dict[str, Any]) -> bool:
    """Record a launch if this thread records launches; return whether it does."""
    found = _RECORDED.get()
    if found is None:
        return False
    numbers = {name: value for name, value in arguments.items() if type(value) is int}
    found.append(LaunchParameters(kernel, numbers))
    return True
