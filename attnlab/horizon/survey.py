"""The horizon of every kernel of a source, and what it means for a deployment."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.shown import Shown
from attnlab.horizon.assumed import assumed_launches
from attnlab.horizon.deployment import Deployment
from attnlab.horizon.launch import Launch, evaluate, read_launches
from attnlab.horizon.solve import KernelHorizon, Statement, kernel_horizon
from attnlab.horizon.source import Kernel, load_kernels
from attnlab.kernels.triton.interpreter import cores

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
