"""The horizon of every kernel of a source, and what it means for a deployment."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.shown import Shown
from attnlab.horizon.assumed import assumed_launches
from attnlab.horizon.deployment import Deployment
from attnlab.horizon.launch import Launch, evaluate, programs, read_launches
from attnlab.horizon.machine import LIMIT, Access, Observation, Runner, Site, running
from attnlab.horizon.source import Kernel, load_kernels
from attnlab.kernels.triton.interpreter import cores

# Find the horizon of each integer expression in each size, and prove it by two runs.
#
# Two runs with different sizes give the growth of an expression, which predicts the size at which it wraps.
# Runs at that size and just below confirm it, or the search goes on from there. So a statement rests on a run
# without the wrap and on a run with it, at neighbouring sizes.


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


# The horizons of a source, and what they mean for a deployment.


LAUNCHES = Path(__file__).parent / "launches.toml"
_Task = tuple[Kernel, list[Launch], bool]  # the launches are assumed if the last is true
_ALONE = 8  # kernels that one process does alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A statement and what a deployment makes of it.

    - ``limits``: the largest value of each size in the deployment; empty without one.
    - ``also``: how many more expressions make the same access wrong, at the same or a larger size.
    """

    kernel: KernelHorizon
    statement: Statement
    limits: Mapping[str, int]
    also: int

    @property
    def margin(self) -> float | None:
        """Return how many times the deployment the horizon is; None if that is unknown."""
        one, launch = self.statement, self.kernel.launch
        if (
            one.wrong_at is None
            or one.size not in self.limits
            or launch is None
            or launch.is_assumed
        ):
            return None
        sizes = {**one.sizes, one.size: one.wrong_at}
        needed = {one.size: one.wrong_at} | {
            n: evaluate(t, sizes) for n, t in launch.within.items()
        }
        return float(max(value / self.limits[name] for name, value in needed.items()))

    @property
    def is_described(self) -> bool:
        """Answer whether the kernel ran with a launch that a table describes."""
        return self.kernel.is_described

    @property
    def is_reached(self) -> bool:
        """Answer whether the deployment reaches the horizon."""
        return self.margin is not None and self.margin <= 1


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Survey(Shown):
    """The horizons of a source's kernels.

    - ``broken``: files that are no Python, with the reason; ``seconds``: processor time.
    """

    source: str
    kernels: Sequence[KernelHorizon]
    deployment: Deployment | None
    broken: dict[str, str]
    seconds: float

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Return the statements whose access is wrong, one for each access and size, the nearest first.

        Those with a size from 2^30 on, which nearly fills an int32 itself, are in the JSON only.
        """
        found: dict[tuple[Any, ...], list[Row]] = {}
        limits = {} if self.deployment is None else self.deployment.limits
        for kernel in self.kernels:
            for one in kernel.statements:
                if one.access is None or one.is_extreme or kernel.launch is None:
                    continue
                key = (
                    kernel.file,
                    kernel.kernel,
                    kernel.launch.sizes.keys(),
                    one.access.site,
                    one.size,
                )
                found.setdefault((str(key),), []).append(
                    Row(kernel=kernel, statement=one, limits=limits, also=0)
                )
        rows = [_nearest(some) for some in found.values()]
        return sorted(
            rows,
            key=lambda row: (
                row.kernel.launch.is_assumed if row.kernel.launch else True,
                row.margin if row.margin is not None else 1e9,
                row.statement.wrong_at or 0,
            ),
        )

    @property
    def reached(self) -> list[Row]:
        """Return the statements that the deployment reaches."""
        return [row for row in self.rows if row.is_reached]

    @property
    def not_run(self) -> list[KernelHorizon]:
        """Return the kernels that could not be run."""
        return [one for one in self.kernels if one.why]

    @property
    def exit_code(self) -> int:
        """Return 1 if the deployment reaches a horizon, 3 if not and something could not be run, else 0."""
        return 1 if self.reached else 3 if self.not_run or self.broken else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as JSON has it."""
        return {
            "source": self.source,
            "deployment": None
            if self.deployment is None
            else {"name": self.deployment.name, **self.deployment.limits},
            "kernels": [_kernel_dict(one) for one in self.kernels],
            "reached": [_row_dict(one) for one in self.reached],
            "broken": self.broken,
            "processor_s": round(self.seconds, 1),
            "exit_code": self.exit_code,
        }


def _nearest(rows: list[Row]) -> Row:
    first = min(rows, key=lambda row: row.statement.wrong_at or 0)
    return Row(
        kernel=first.kernel, statement=first.statement, limits=first.limits, also=len(rows) - 1
    )


def _kernel_dict(one: KernelHorizon) -> dict[str, Any]:
    return {
        "kernel": one.kernel,
        "file": one.file,
        "line": one.line,
        "why_not_run": one.why,
        "runs": one.runs,
        "launch": "" if one.launch is None else "assumed" if one.launch.is_assumed else "described",
        "sizes": {} if one.launch is None else dict(one.launch.sizes),
        "statements": [_statement_dict(each) for each in one.statements],
    }


def _statement_dict(one: Statement) -> dict[str, Any]:
    return {
        "line": one.site.line,
        "expression": one.site.text,
        "size": one.size,
        "wraps_at": one.wraps_at,
        "wrong_at": one.wrong_at,
        "access_line": None if one.access is None else one.access.site.line,
        "effect": one.effect,
    }


def _row_dict(row: Row) -> dict[str, Any]:
    facts = {
        "kernel": row.kernel.kernel,
        "file": row.kernel.file,
        "limit": row.limits.get(row.statement.size),
        "margin": row.margin,
    }
    return {**facts, **_statement_dict(row.statement)}


def survey(
    source: Path,
    *,
    op: str = "",
    deployment: Deployment | None = None,
    launches: Sequence[Launch] = (),
    is_assuming: bool = True,
    files: Sequence[Path] | None = None,
    sizes: Sequence[str] | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Return the horizons of the kernels of a source.

    - ``op``: part of the path or of the name of the kernels to run; "" for all.
    - ``launches``: descriptions that are tried before attnlab's own.
    - ``is_assuming``: whether kernels without a description are run with a launch that attnlab guesses.
    - ``files``: those of the folder ``source`` whose kernels are asked for, None for all.
    - ``sizes``: those whose horizon is asked for, if no other size is limited by their product; None for all.

    Raises InvalidCase for a source without such a kernel, and if ``op`` names kernels that the deployment
    does not fit.
    """
    begin = time.process_time()
    kernels, loaded, broken = load_kernels(source, files)
    kernels = [one for one in kernels if op in f"{one.shown}:{one.name}"]
    if not kernels:
        raise InvalidCase(
            f"op must be part of the path or name of a kernel of {source}, got {op!r}", field="op"
        )
    described = [*launches, *read_launches(LAUNCHES).values()]
    tasks: list[_Task] = []
    refused: list[InvalidCase] = []
    for one in kernels:
        own = [launch for launch in described if launch.suits(one.shown, one.name)]
        for launch in own:
            try:
                at = launch.at({} if deployment is None else deployment.sizes)
                asked = tuple(n for n in at.sweep if sizes is None or _is_asked(n, at, sizes))
                tasks.append((one, [dataclasses.replace(at, sweep=asked)], False))
            except InvalidCase as error:  # the library takes another kernel for this deployment
                refused.append(error)
        if not own and is_assuming:
            tasks.append((one, [], True))
    if refused and not tasks:
        raise refused[0]
    paths = [str(path) for path in loaded]
    found, seconds = _run(tasks, paths, on_step)
    seconds += time.process_time() - begin
    return Survey(
        source=str(source), kernels=found, deployment=deployment, broken=broken, seconds=seconds
    )


def _is_asked(size: str, launch: Launch, sizes: Sequence[str]) -> bool:
    factors = [n for n, text in launch.within.items() if n != size and size in text]
    return size in sizes and not factors


def _run(
    tasks: list[_Task],
    paths: list[str],
    on_step: Callable[[int, int], None],
) -> tuple[list[KernelHorizon], float]:
    """Return the horizons of the tasks, and the processor time of other processes."""
    total = len(tasks)
    if total <= _ALONE or cores() == 1:
        return [_horizon(task, paths) for task in _counted(tasks, on_step)], 0.0
    _TASKS[:] = [(task, paths) for task in tasks]
    found: list[KernelHorizon] = []
    seconds = 0.0
    with ProcessPoolExecutor(cores(), mp_context=get_context("fork")) as pool:
        for one, used in pool.map(_horizon_of, range(total), chunksize=1):
            found.append(one)
            seconds += used
            on_step(len(found), total)
    return found, seconds


_TASKS: list[Any] = []  # what the processes of a survey share


def _horizon_of(index: int) -> tuple[KernelHorizon, float]:
    begin = time.process_time()
    task, paths = _TASKS[index]
    return _horizon(task, paths), time.process_time() - begin


def _horizon(task: _Task, paths: list[str]) -> KernelHorizon:
    kernel, launches, is_assumed = task
    return kernel_horizon(kernel, assumed_launches(kernel) if is_assumed else launches, paths)


def _counted(tasks: Sequence[Any], on_step: Callable[[int, int], None]) -> Iterable[Any]:
    for i, task in enumerate(tasks):
        yield task
        on_step(i + 1, len(tasks))
