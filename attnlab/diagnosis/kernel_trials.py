"""Trials: change one expression of an interpreted kernel and see whether wrong results become right."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnlab.kernels.triton.kernel_text import (
    KernelTree,
    branch_lines,
    compile_text,
    statement_lines,
    text_of,
    without_unused,
)
from attnlab.kernels.triton.probe import Line
from attnlab.kernels.triton.replay import Replay, TooLong, Unit
from attnlab.kernels.triton.source_edits import Edit, edits

COSTS = (1, 2, 3)
# What an edit that uses an unused name gains, in units of the cost: a fault may have left it out. The first
# is for a statement with similar names.
_REVIVED, _REVIVED_ELSEWHERE = 2.0, 0.8
_MOST_IDLE = (
    4  # programs that store nothing, of those that run if no program stores a wrong element
)
Judge = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many edits are tried, and for how long, in seconds of processor time."""

    edits: int
    seconds: float = math.inf


FULL = Limit(edits=1000, seconds=20.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelText:
    """A kernel or device function that ran, with its text from ``def`` on, and where that begins.

    ``first``: the number of the line before ``def``. ``executed``: lines of statements that ran in programs
    with wrong results, and ``ran``: in any program, as numbers in the text.
    """

    function: Any
    text: str
    file: str
    first: int
    executed: frozenset[int]
    ran: frozenset[int]

    def line(self, number: int) -> Line:
        """Return the file and line of a line of the text."""
        return self.file, self.first + number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repair:
    """An edit that makes a ``share`` of the wrong elements right and no right one wrong.

    ``text``: the text that it changes; a share below 1 is that of one program. ``holds``: not refuted by a
    second case.
    """

    kernel: KernelText
    text: str
    edit: Edit
    share: float
    holds: bool = True

    @property
    def is_full(self) -> bool:
        """Answer whether it makes every element right, in a second case, too."""
        return self.share == 1 and self.holds

    @property
    def line(self) -> Line:
        """Return the file and the line of the expression."""
        return self.kernel.line(self.edit.line)

    def edited(self) -> dict[Any, Any]:
        """Return the edited function by its original."""
        function = self.kernel.function
        return {function.fn: compile_text(function, self.edit.apply(self.text))}


@dataclass(slots=True, kw_only=True, eq=False)
class Trials:
    """Trial edits of a recorded call.

    - ``judge``: returns which rows and heads of an output are right, [rows, heads] bool; ``right``: those of
      the unchanged kernels.
    - ``holds``: answers whether an edit that makes everything right does so in a second case; None if there
      is none.
    - ``repairs``: what was found; ``tried``: the number of edits.
    - ``suspects``: the units with wrong elements or, if rows are wrong that no program stores, some programs
      that store nothing, else some that store right elements.
    """

    replay: Replay
    judge: Judge
    right: torch.Tensor
    holds: Callable[[Repair], bool] | None = None
    tried: int = 0
    repairs: list[Repair] = field(default_factory=list)
    wrong_units: list[Unit] = field(init=False)
    suspects: list[Unit] = field(init=False)
    kernels: list[KernelText] = field(init=False)

    def __post_init__(self) -> None:
        units = self.replay.units
        self.wrong_units = [unit for unit in units if bool((unit.cells & ~self.right).any())]
        idle = sorted(self.replay.idle, key=lambda unit: -len(unit.lines))
        self.suspects = self.wrong_units or idle[:_MOST_IDLE] or units[:_MOST_IDLE]
        every = [*units, *self.replay.idle]
        wrong, ran = (
            set[Line]().union(*(unit.lines for unit in some)) for some in (self.suspects, every)
        )
        self.kernels = [_kernel_text(function, wrong, ran) for function in _functions(self.replay)]

    def run(
        self, suspicion: Callable[[Line], float], lines: Collection[Line], limit: Limit
    ) -> None:
        """Try edits up to the limit, the cheapest of the most suspicious lines first.

        ``suspicion``: of a line, in units of the cost. Edits that add a part are tried on ``lines`` only.
        If edits of one cost repair everything, more costly ones are not tried.
        """
        end = time.process_time() + limit.seconds
        trees: dict[tuple[int, str], KernelTree] = {}
        first = [min(self.wrong_units, key=lambda unit: unit.cost)] if self.wrong_units else []
        for kernel, text, edit in self._edits(suspicion, lines):
            is_done = any(one.is_full and one.edit.cost < edit.cost for one in self.repairs)
            if is_done or time.process_time() > end or self.tried >= limit.edits:
                return
            self.tried += 1
            key = (id(kernel), text)
            if key not in trees:
                trees[key] = KernelTree(kernel.function, text)
            try:
                compiled = trees[key].compiled(edit.apply(text), edit.statement)
            except (
                Exception
            ):  # an edited text may be no Python, or none that the interpreter accepts
                continue
            edited = {kernel.function.fn: compiled}
            share, is_elsewhere = self._share(first or self.suspects, edited)
            if share == 1 or is_elsewhere:
                share = max(self._share(None, edited)[0], 0.5 * (share == 1))
            if share > 0:
                found = Repair(kernel=kernel, text=text, edit=edit, share=share)
                if share == 1 and self.holds is not None and not self.holds(found):
                    found = replace(found, holds=False)
                self.repairs.append(found)

    def _edits(
        self, suspicion: Callable[[Line], float], lines: Collection[Line]
    ) -> Iterator[tuple[KernelText, str, Edit]]:
        """Yield edits with the texts that they change, in the order in which they are tried."""
        found = []
        for kernel in self.kernels:
            inside = {n for n in kernel.executed if kernel.line(n) in lines}
            branches = branch_lines(kernel.text)  # an edit of them may take one that did not run
            short = without_unused(kernel.text, kernel.ran)
            for cost in COSTS:
                wanted = kernel.executed if cost < COSTS[-1] else inside
                for text, chosen in ((kernel.text, wanted & branches), (short, wanted - branches)):
                    for edit in edits(text, chosen, cost, kernel.text):
                        order = cost - suspicion(kernel.line(edit.statement))
                        if edit.revives:
                            order -= _REVIVED if edit.is_kin else _REVIVED_ELSEWHERE
                        found.append((order, kernel, text, edit))
        found.sort(key=lambda one: one[0])
        yield from ((kernel, text, edit) for _, kernel, text, edit in found)

    def _share(self, units: Sequence[Unit] | None, edited: dict[Any, Any]) -> tuple[float, bool]:
        """Return which share of the wrong elements of units an edit makes right, 0 if it makes one wrong.

        The second result is whether it makes elements right that are not of the units: the edited programs
        store other rows. None stands for all programs and all elements.
        """
        try:
            right = self.judge(self.replay.run(units, edited))
        except (Exception, TooLong):  # an edited kernel may raise anything
            return 0.0, False
        cells = torch.ones_like(right)
        if units is not None:
            cells = torch.stack([unit.cells for unit in units]).any(0)
        gained, wrong = right & ~self.right, cells & ~self.right
        is_elsewhere = bool((gained & ~cells).any())
        if bool((cells & self.right & ~right).any()) or not bool(wrong.any()):
            return 0.0, is_elsewhere
        return float((gained & cells).sum() / wrong.sum()), is_elsewhere


def _functions(replay: Replay) -> list[Any]:
    """Return the kernels of the launches and the device functions that they call, each once."""
    todo, found = [launch.function for launch in replay.launches], list[Any]()
    while todo:
        function = todo.pop()
        if any(function.fn is one.fn for one in found):
            continue
        found.append(function)
        names = function.fn.__code__.co_names
        others = (function.fn.__globals__.get(name) for name in names)
        todo += [one for one in others if type(one) is type(function)]
    return found


def _kernel_text(function: Any, wrong: Collection[Line], ran: Collection[Line]) -> KernelText:
    """Return a function with its lines among those that ran in wrong programs, and in any."""
    text = text_of(function)
    file, first = function.rewriter.filename, function.rewriter.def_file_lineno - 1
    own = statement_lines(text)

    def numbers(lines: Collection[Line]) -> frozenset[int]:
        inside = (line - first for name, line in lines if name == file)
        return frozenset(own[number] for number in inside if number in own)

    return KernelText(
        function=function,
        text=text,
        file=file,
        first=first,
        executed=numbers(wrong),
        ran=numbers(ran),
    )
