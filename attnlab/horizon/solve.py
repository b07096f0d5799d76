"""Find the horizon of each integer expression in each size, and prove it by two runs.

Two runs with different sizes give the growth of an expression, which predicts the size at which it wraps.
Runs at that size and just below confirm it, or the search goes on from there. So a statement rests on a run
without the wrap and on a run with it, at neighbouring sizes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import Unavailable
from attnlab.horizon.launch import Launch, programs
from attnlab.horizon.machine import LIMIT, Access, Observation, Runner, Site, running

_MOST = LIMIT - 1
_EXTREME = LIMIT // 2
_BUDGET_S = 12.0  # processor time per kernel
_TRIES = 18  # sizes tried after a wrap, each twice as far, for an access that it makes wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The horizon of an expression in one size, the others as in ``sizes``.

    - ``wraps_at``: the smallest value at which the expression has a value that int32 does not have.
    - ``wrong_at``: the smallest value at which that makes an access wrong, or None; ``access``: the first.
    - Each was seen in a run, and not in the run with one less; without both runs there is no statement.
    """

    kernel: str
    site: Site
    size: str
    sizes: Mapping[str, int]
    wraps_at: int
    wrong_at: int | None
    access: Access | None

    @property
    def is_extreme(self) -> bool:
        """Answer whether the size itself nearly fills an int32, as in ``position + 1`` at 2^31 - 1."""
        return self.wrong_at is not None and self.wrong_at >= _EXTREME

    @property
    def effect(self) -> str:
        """Return what the wrap does, in words."""
        if self.access is None:
            return "no access uses the wrapped value"
        if self.access.kind == "skips":
            return f"skips elements of {self.access.tensor}"
        if self.access.kind.startswith("stores"):
            return f"{self.access.kind} in {self.access.tensor}"
        away = f"{abs(self.access.away) / 2**30:.3g} GiB {'before' if self.access.away < 0 else 'after'}"
        where = f", in {self.access.lands}" if self.access.lands else ", outside all tensors"
        if self.access.lands == self.access.tensor:
            where = ", in the same tensor"
        return f"{self.access.kind} {away} the element of {self.access.tensor}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelHorizon:
    """The statements about a kernel, or why it could not be run.

    - ``runs``: runs of its programs; ``live``: accesses of the run at the given sizes.
    """

    kernel: str
    file: str
    line: int
    launch: Launch | None
    statements: tuple[Statement, ...] = ()
    why: str = ""
    runs: int = 0
    live: int = 0

    @property
    def is_described(self) -> bool:
        """Answer whether it ran with a launch that a table describes."""
        return self.launch is not None and not self.launch.is_assumed


class Search:
    """Runs of a launch at different sizes, each run once; ``names``: the parameters of the kernel."""

    def __init__(self, run: Runner, names: Sequence[str], launch: Launch) -> None:
        self._run_programs, self._names, self.launch = run, names, launch
        self._known: dict[tuple[str, int], Observation | None] = {}
        self.runs = 0
        self._begin = time.process_time()

    def at(self, size: str, value: int) -> Observation | None:
        """Return the run with one size changed; None if it cannot be launched or leaves its tensors."""
        key = ("", 0) if value == self.launch.sizes.get(size) else (size, value)
        if key not in self._known:
            self._known[key] = self._run({**self.launch.sizes, **({size: value} if size else {})})
        return self._known[key]

    def _run(self, sizes: Mapping[str, int]) -> Observation | None:
        bound = self.launch.bind(sizes)
        if bound is None:
            return None
        self.runs += 1
        if time.process_time() - self._begin > _BUDGET_S:
            raise Unavailable(f"not done after {_BUDGET_S:.0f} s of processor time")
        arguments = {n: v for n, v in bound[0].items() if n in self._names}
        seen = self._run_programs(arguments, bound[1], programs(bound[1], self.launch.tail))
        return seen if seen.is_valid and (self.launch.is_assumed or not seen.outside) else None

    def statements(self) -> Iterator[Statement]:
        """Yield the statements about all expressions and sizes."""
        base = self.at("", 0)
        if base is None:
            bound = self.launch.bind(self.launch.sizes)
            why = "has more programs than a GPU allows"
            raise Unavailable(
                f"the launch {why if bound is None else 'accesses memory outside of its tensors'}"
            )
        for size in self.launch.sweep:
            yield from self._of_size(size, base)

    def _of_size(self, size: str, base: Observation) -> Iterator[Statement]:
        value, most = self.launch.sizes[size], min(self.launch.most.get(size, _MOST), _MOST)
        other = min(2 * value, most) if value < most else max(1, value // 2)
        try:
            second = self.at(size, other)
        except Unavailable:
            return
        if second is None:
            return
        for site in {**base.peaks, **second.peaks}:
            first, last = base.peaks.get(site, 0), second.peaks.get(site, 0)
            growth = (last - first) / (other - value)
            if growth <= 0 or not site.line:
                continue
            guess = value + int((LIMIT - first) / growth)
            found = self._statement(site, size, max(1, min(guess, most)), most)
            if found is not None:
                yield found

    def _statement(self, site: Site, size: str, guess: int, most: int) -> Statement | None:
        """Return the statement about an expression, or None if it does not wrap up to ``most``."""
        try:
            wraps_at = self._boundary(lambda seen: site in seen.wraps, size, guess, most, 40)
            if wraps_at is None:
                return None
            seen = self.at(size, wraps_at)
            if seen is None or site in seen.follows:
                return None  # an operand had wrapped before: its statement is the one to make
            wrong_at = self._boundary(
                lambda seen: _hit(seen, site) is not None, size, wraps_at, most, _TRIES
            )
        except Unavailable:
            return None
        access = None
        if wrong_at is not None:
            last = self.at(size, wrong_at)
            access = None if last is None else _hit(last, site)
        return Statement(
            kernel=self.launch.kernel,
            site=site,
            size=size,
            wraps_at=wraps_at,
            access=access,
            wrong_at=None if access is None else wrong_at,
            sizes={n: v for n, v in self.launch.sizes.items() if n != size},
        )

    def _boundary(
        self, holds: Callable[[Observation], bool], size: str, guess: int, most: int, tries: int
    ) -> int | None:
        """Return the smallest value near ``guess`` at which something holds that does not hold just below."""

        def at(value: int) -> bool:
            seen = self.at(size, value)
            return seen is not None and holds(seen)

        low, high, step = 0, 0, 1
        if at(guess):
            high = guess
            while high - step > 0 and at(high - step):
                high, step = high - step, 2 * step
            low = max(0, high - step)
        else:
            low = guess
            for _ in range(tries):
                value = min(low + step, most)
                if value <= low:
                    return None
                if at(value):
                    high = value
                    break
                low, step = value, 2 * step
            if not high:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle) else (middle, high)
        return high if low and self.at(size, low) is not None else None


def _hit(seen: Observation, site: Site) -> Access | None:
    """Return the first access that an expression's wrap makes wrong."""
    return next((one for one in seen.accesses if site in one.sources), None)


def kernel_horizon(kernel: Any, launches: Iterable[Launch], files: list[str]) -> KernelHorizon:
    """Return the horizon of a kernel for the first launch that runs and accesses memory.

    ``files``: those that the code of the kernel may be in.
    """
    facts: dict[str, Any] = {
        "kernel": kernel.name,
        "file": kernel.shown,
        "line": kernel.node.lineno,
    }
    why = ""
    for launch in launches:
        try:
            with running(function := kernel.function, files) as run:
                search = Search(run, function.arg_names, launch)
                base = search.at("", 0)
                found = tuple(search.statements())
        except Unavailable as error:
            why = why or str(error)
            continue
        if base is not None and base.live:
            return KernelHorizon(
                **facts, launch=launch, statements=found, runs=search.runs, live=base.live
            )
        why = why or "no access of the programs that ran is enabled by its mask"
    return KernelHorizon(**facts, launch=None, why=why)
