"""Trials: change one expression of an interpreted kernel and see whether wrong results become right."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnlab.diagnosis.edited_kernels import EditedForms, Found, KernelText, kernel_text
from attnlab.kernels.child_process import run_in_copy
from attnlab.kernels.triton.kernel_text import (
    branch_lines,
    called_functions,
    place_of,
    without_unused,
)
from attnlab.kernels.triton.limits import TooLong
from attnlab.kernels.triton.probe import Line
from attnlab.kernels.triton.replay import Replay, Unit
from attnlab.kernels.triton.source_edits import Edit, edits

COSTS = (1, 2, 3)
# What an edit that uses an unused name gains, in units of the cost: a fault may have left it out. The first
# is for a statement with similar names.
_REVIVED, _REVIVED_ELSEWHERE = 2.0, 0.8
_MOST_IDLE = (
    4  # programs that store nothing, of those that run if no program stores a wrong element
)
_GRACE_S = 15.0  # that trials may take longer than their limit: one run, and one of a second case
_OFTEN = 50  # trials between two messages about their number
_STEP = 0.003  # by which an edit of a statement comes after that before it, in units of the cost
Judge = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many edits are tried, and for how long, in seconds of processor time."""

    edits: int
    seconds: float = math.inf


FULL = Limit(edits=4000, seconds=20.0)


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

    @property
    def is_in_test(self) -> bool:
        """Answer whether it changes the test of a branch, so that another branch may run."""
        return self.edit.is_in_test(self.text) if self.text else False

    def texts(self) -> dict[Line, str]:
        """Return the edited text of the function by the place of the function, for a Probe."""
        whole = self.kernel.text  # a further case may take a branch that ``text`` leaves out
        text = self.edit.moved(self.text, whole).apply(whole)
        return {place_of(self.kernel.function): text}


@dataclass(slots=True, kw_only=True, eq=False)
class Trials:
    """Trial edits of a recorded call.

    - ``judge``: returns which rows and heads of an output are right, [rows, heads] bool; ``right``: those of
      the unchanged kernels.
    - ``holds``: answers whether an edit that makes everything right does so in a second case; None if there
      is none.
    - ``repairs``: what was found; ``tried``: the number of edits, up to a few if the trials ended early.
    - ``ended``: by what signal the trials ended early, or "".
    - ``suspects``: the units with wrong elements or, if rows are wrong that no program stores, some programs
      that store nothing, else some that store right elements.
    """

    replay: Replay
    judge: Judge
    right: torch.Tensor
    holds: Callable[[Repair], bool] | None = None
    tried: int = 0
    ended: str = ""
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
        self.kernels = [kernel_text(function, wrong, ran) for function in _functions(self.replay)]

    def run(
        self, suspicion: Callable[[Line], float], lines: Collection[Line], limit: Limit
    ) -> None:
        """Try edits up to the limit, the cheapest of the most suspicious lines first.

        ``suspicion``: of a line, in units of the cost. Edits that add a part are tried on ``lines`` only.
        If edits of one cost repair everything, more costly ones are not tried.

        The trials run in a copy of this process: a crash, or a loop that nothing else stops, ends the trials
        only. What was found before is kept.
        """
        repairs = list(self.repairs)

        def receive(thing: Any) -> None:
            if isinstance(thing, int):
                self.tried = thing
            else:
                at, fields = thing
                repairs.append(Repair(kernel=self.kernels[at], **fields))

        def try_all(send: Callable[[Any], None]) -> None:
            self._run(suspicion, lines, limit, send)
            send(self.tried)

        self.ended = run_in_copy(try_all, receive, limit.seconds + _GRACE_S)
        self.repairs = repairs

    def _run(
        self,
        suspicion: Callable[[Line], float],
        lines: Collection[Line],
        limit: Limit,
        send: Callable[[Any], None],
    ) -> None:
        """Try edits as :meth:`run` says.

        Sends the number of edits and, of each repair, the index of its kernel and the other fields.
        """
        end = time.process_time() + limit.seconds
        forms = EditedForms(found := list(self._edits(suspicion, lines)))
        first = [min(self.wrong_units, key=lambda unit: unit.cost)] if self.wrong_units else []
        for number, (kernel, text, edit) in enumerate(found):
            is_done = any(one.is_full and one.edit.cost < edit.cost for one in self.repairs)
            if is_done or time.process_time() > end or self.tried >= limit.edits:
                return
            self.tried += 1
            if not self.tried % _OFTEN:
                send(self.tried)
            if first and not forms.has_effect(number, self.replay, first):
                continue
            if (compiled := forms.compiled(number)) is None:
                continue
            edited = {kernel.function.fn: compiled}
            share, is_elsewhere = self._share(first or self.suspects, edited)
            if share == 1 or is_elsewhere:
                share = max(self._share(None, edited)[0], 0.5 * (share == 1))
            if share > 0:
                fields: dict[str, Any] = {"text": text, "edit": edit, "share": share}
                repair = Repair(kernel=kernel, **fields)
                if share == 1 and self.holds is not None and not self.holds(repair):
                    repair = replace(repair, holds=False)
                self.repairs.append(repair)
                send((self.kernels.index(kernel), {**fields, "holds": repair.holds}))

    def _edits(
        self, suspicion: Callable[[Line], float], lines: Collection[Line]
    ) -> Iterator[Found]:
        """Yield edits with the texts that they change, in the order in which they are tried."""
        found = []
        for kernel in self.kernels:
            inside = {n for n in kernel.executed if kernel.line(n) in lines}
            branches = branch_lines(kernel.text)  # an edit of them may take one that did not run
            short = without_unused(kernel.text, kernel.ran)
            for cost in COSTS:
                wanted = kernel.executed if cost < COSTS[-1] else inside
                for text, chosen in ((kernel.text, wanted & branches), (short, wanted - branches)):
                    ranks = Counter[
                        int
                    ]()  # so that the edits of a statement take turns with the others
                    for edit in edits(text, chosen, cost, kernel.text):
                        order = cost - suspicion(kernel.line(edit.statement))
                        order += _STEP * ranks[edit.statement]
                        ranks[edit.statement] += 1
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
    found = [one for launch in replay.launches for one in called_functions(launch.function)]
    return list({one.fn: one for one in found}.values())
