"""Edited kernels: the text of a kernel that ran, and its interpreted forms with edits."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.kernels.triton.kernel_text import KernelTree, compile_text, statement_lines, text_of
from attnlab.kernels.triton.limits import TooLong
from attnlab.kernels.triton.probe import Line
from attnlab.kernels.triton.replay import Replay, Unit
from attnlab.kernels.triton.source_edits import Edit

_OBSERVED_SLACK = 2  # of a run that computes a statement and its edits, for each of them


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


def kernel_text(function: Any, wrong: Collection[Line], ran: Collection[Line]) -> KernelText:
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


Found = tuple[KernelText, str, Edit]


class EditedForms:
    """Compiles edited kernels, those of one statement and cost together."""

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found
        self._trees: dict[tuple[int, str], KernelTree] = {}
        self._groups: dict[tuple[int, str, int, int], list[int]] = {}
        for number, (kernel, text, edit) in enumerate(found):
            key = (id(kernel), text, edit.statement, edit.cost)
            self._groups.setdefault(key, []).append(number)
        self._done: dict[int, Any] = {}
        self._effective: dict[int, bool] = {}

    def has_effect(self, number: int, replay: Replay, units: Sequence[Unit]) -> bool:
        """Answer whether an edit changes a value in some units; True if that was not observed.

        One run observes all edits of a statement. An edit with the same value each time changes nothing, and
        one that raises before another value has no result.
        """
        if number not in self._effective:
            kernel, text, edit = self._found[number]
            group = self._group(number)
            observer = _Observer(len(group))
            changes = [self._found[one][2].change for one in group]
            form = self._tree(kernel, text).observed(edit.statement, changes, observer)
            try:
                if form is None:
                    raise ValueError("a statement without a value")
                replay.run(units, {kernel.function.fn: form}, _OBSERVED_SLACK * (1 + len(group)))
            except (Exception, TooLong):
                self._effective |= dict.fromkeys(group, True)
            else:
                self._effective |= {one: at in observer.differ for at, one in enumerate(group)}
        return self._effective[number]

    def _group(self, number: int) -> list[int]:
        kernel, text, edit = self._found[number]
        return self._groups[id(kernel), text, edit.statement, edit.cost]

    def _tree(self, kernel: KernelText, text: str) -> KernelTree:
        key = (id(kernel), text)
        if key not in self._trees:
            self._trees[key] = KernelTree(kernel.function, text)
        return self._trees[key]

    def compiled(self, number: int) -> Any:
        """Return the interpreted form with an edit, or None if Python or the interpreter rejects its text."""
        kernel, text, edit = self._found[number]
        if number not in self._done:
            group = self._group(number)
            changes = [self._found[one][2].change for one in group]
            forms = self._tree(kernel, text).variants(edit.statement, changes)
            self._done |= dict(zip(group, forms, strict=True))
        if self._done[number] is None:
            try:
                return compile_text(kernel.function, edit.apply(text))
            except (
                Exception
            ):  # an edited text may be no Python, or none that the interpreter accepts
                return None
        return self._done[number]


class _Observer:
    """Compares the value of a statement with those of its edits, each time the statement runs.

    ``differ``: the edits that had another value.
    """

    def __init__(self, count: int) -> None:
        self._same = set(range(count))
        self.differ: set[int] = set()

    def __call__(self, value: Callable[[], Any], *others: Callable[[], Any]) -> Any:
        own = value()
        for at in list(self._same):
            try:
                is_same = _same_value(own, others[at]())
            except Exception:
                self._same.discard(at)
                continue
            if not is_same:
                self._same.discard(at)
                self.differ.add(at)
        return own


def _same_value(one: Any, other: Any) -> bool:
    """Answer whether two values of a kernel have the same type and the same bits; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if not hasattr(one, "handle"):
        return bool(one == other)
    a, b = one.handle.data, other.handle.data
    return (
        one.type.name == other.type.name
        and a.shape == b.shape
        and bool(((a == b) | ((a != a) & (b != b))).all())
    )
