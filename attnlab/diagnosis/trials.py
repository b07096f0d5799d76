"""Trials: change one expression of an interpreted kernel and see whether wrong results become right."""

import ast
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import cycle, islice
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.kernels.binding import Values, arguments_of, evaluate
from attnlab.kernels.child_process import can_copy, run_in_copies
from attnlab.kernels.plugin import same_bits
from attnlab.kernels.triton.interpreter import cores
from attnlab.kernels.triton.kernel_text import (
    branch_lines,
    called_functions,
    compile_text,
    place_of,
    statement_lines,
    text_of,
    without_unused,
)
from attnlab.kernels.triton.lockstep.edits import compile_edits
from attnlab.kernels.triton.lockstep.rewriting import compile_lockstep
from attnlab.kernels.triton.probe import LaunchLog, Line
from attnlab.kernels.triton.replay import Replay, Unit
from attnlab.kernels.triton.run_log import TooLong
from attnlab.kernels.triton.source_edits import Edit, edits
from attnlab.lab.cache_write import slot_order
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result, as_slice
from attnlab.library.op import names_in
from attnlab.tensors.quantised import OUTPUT_SCALE

# Edited kernels: the text of a kernel that ran, and its interpreted forms with edits.

_TOGETHER = 96  # edits of a function that run one after another, before those of others
# How many edits of a function are compiled together, then those after them, then the rest: an early edit may
# repair everything.
_COMPILED = (96, 384, None)
_ALONE = "alone"


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
Outcome = tuple[float, bool]  # the share of the wrong elements that are right, and whether it holds


def _shares(found: Sequence[Found], count: int) -> list[list[int]]:
    """Divide the numbers of edits among ``count`` processes; those that run together stay together."""
    shares: list[list[int]] = [[] for _ in range(count)]
    in_turn, numbers, own = cycle(shares), Counter[Any](), dict[Any, list[int]]()
    for number, (kernel, text, _) in enumerate(found):
        key = (id(kernel), text)
        if not numbers[key] % _TOGETHER:
            own[key] = next(in_turn)
        numbers[key] += 1
        own[key].append(number)
    return [share for share in shares if share]


class EditedForms:
    """Compiles edited kernels, many edits of a function together."""

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found
        self._batches: dict[int, tuple[int, ...]] = {}  # the edits that are compiled with one
        self._forms: dict[tuple[int, ...], tuple[Any, frozenset[int]]] = {}
        self._outputs: dict[int, torch.Tensor | str | None] = {}
        self.shares: dict[int, tuple[float, bool]] = {}  # as of Trials, by the id of an output
        of_functions = dict[Any, list[int]]()
        for number, (kernel, text, _) in enumerate(found):
            of_functions.setdefault((id(kernel), text), []).append(number)
        for numbers in of_functions.values():
            left = iter(numbers)
            for batch in (tuple(islice(left, count)) for count in _COMPILED):
                self._batches |= dict.fromkeys(batch, batch)

    def output(
        self, number: int, replay: Replay, units: Sequence[Unit]
    ) -> torch.Tensor | str | None:
        """Return the output of some units with an edit, None if it raises something, or _ALONE if it did not
        run in lockstep.

        The next edits of the same function run with it.
        """
        if replay.is_judged_alone:
            return _ALONE
        if number not in self._outputs:
            kernel, batch = self._found[number][0], self._batches[number]
            chosen = batch[batch.index(number) :][:_TOGETHER]
            form, known = self._form(batch)
            in_order = sorted(known.intersection(chosen), key=lambda one: self._found[one][2].start)
            ran = replay.run_edits(units, kernel.function, form, in_order) if in_order else {}
            self._outputs |= {**dict.fromkeys(chosen, _ALONE), **ran}
        return self._outputs[number]

    def _form(self, batch: tuple[int, ...]) -> tuple[Any, frozenset[int]]:
        """Return a function with edits, and the numbers of those that it has."""
        if batch not in self._forms:
            kernel, text, _ = self._found[batch[0]]
            changes = {one: self._found[one][2].changes for one in batch}
            try:
                self._forms[batch] = compile_edits(kernel.function, text, changes)
            except Exception:  # lockstep refuses the function, or Python one of the edits
                self._forms[batch] = None, frozenset()
        return self._forms[batch]

    def form_together(self, number: int) -> dict[Any, Any]:
        """Return the form with an edit that a batch of programs runs, by its function; none if lockstep or
        Python refuses it."""
        kernel, text, edit = self._found[number]
        try:
            return {
                kernel.function.fn: compile_lockstep(kernel.function, ast.parse(edit.apply(text)))
            }
        except Exception:  # an edited text may be no Python
            return {}

    def edited(self, number: int) -> dict[Any, Callable[[], Any]]:
        """Return what makes the interpreted form with an edit, once, by the function that it changes.

        It raises what Python or the interpreter raises for the text.
        """
        kernel, text, edit = self._found[number]
        return {kernel.function.fn: cache(lambda: compile_text(kernel.function, edit.apply(text)))}


# TrialTarget: the tensor that trial edits must make right: the output, padded rows, or the log-sum-exp.

Judge = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialTarget:
    """What trial edits run and compare.

    - ``replay``: of the recorded launches, with that tensor as the output. ``judge``: returns which of its
      rows and heads are right, bool. ``right``: those of the unchanged kernels.
    """

    replay: Replay
    judge: Judge
    right: torch.Tensor


def target_of(lab: Lab, case: Case, ran: Result, launches: list[LaunchLog]) -> TrialTarget:
    """Return the first tensor of a run that is wrong: the output, rows of padding, or the log-sum-exp.

    Of a cache write, that is the keys or the values of the cache.
    """
    if case.spec.writes_cache:
        return _of_cache(lab, case, ran, launches)
    judge = judge_of(lab, case)
    right = judge(ran.output)
    found = TrialTarget(replay=Replay(launches, ran.output.shape), judge=judge, right=right)
    if not bool(right.all()):
        return found
    others = (_padded(ran, launches), _lse(lab, case, ran, launches))
    return next((one for one in others if one is not None and not bool(one.right.all())), found)


def judge_of(lab: Lab, case: Case) -> Judge:
    """Return the function that answers which rows and heads of an output are right up to rounding.

    An output in FP8 is decoded first.
    """
    own = case.replace(atol=None, rtol=0.0)
    call, expected = lab.call(own), lab.reference(own)

    def judge(output: torch.Tensor) -> torch.Tensor:
        is_coded = output.element_size() == 1
        call.buffer.copy_(output.float() * OUTPUT_SCALE if is_coded else output)
        return lab.errors(own, call, expected).mismatches == 0

    return judge


def _of_cache(lab: Lab, case: Case, ran: Result, launches: list[LaunchLog]) -> TrialTarget:
    """Return the half of a cache that a write leaves wrong, [slots, heads, size], the keys first.

    Its replay has no output if no argument of the kernels is that half, without gaps.
    """
    own = case.replace(atol=None, rtol=0.0)
    call, expected = lab.call(own), lab.reference(own)
    order = slot_order(own, lab.cache(own).provenance.block_table)
    slots, heads = ran.output.shape[:2]

    def judge_of_half(columns: slice) -> Judge:
        def judge(half: torch.Tensor) -> torch.Tensor:
            whole = expected.to(call.buffer.dtype, copy=True)
            whole[..., columns] = half.view(whole.dtype)
            call.buffer.copy_(whole)
            right = torch.empty(slots, heads, dtype=torch.bool)
            right[order] = lab.errors(own, call, expected).mismatches == 0
            return right

        return judge

    found = []
    for columns in (slice(case.head_size), slice(case.head_size, None)):
        half, judge = ran.output[..., columns].contiguous(), judge_of_half(columns)
        if not bool((right := judge(half)).all()):
            stored = next((one for one in _arguments(launches) if _holds(one, half)), None)
            shape = half.shape
            coded = None if stored is not None else _coded(lab, own, ran.output, launches, columns)
            if coded is not None:
                stored, decode = coded
                shape = torch.Size((slots, heads, stored.shape[-1]))
                judge = _judge_of_coded(decode, judge, columns)
            replay = Replay(launches if stored is not None else (), shape, stored)
            replay.is_judged_alone = coded is not None
            found.append(TrialTarget(replay=replay, judge=judge, right=right))
    if not found:
        right = torch.ones(slots, heads, dtype=torch.bool)
        found = [TrialTarget(replay=Replay((), ran.output.shape), judge=judge, right=right)]
    return next((one for one in found if one.replay.output is not None), found[0])


def _judge_of_coded(decode: Judge, judge: Judge, columns: slice) -> Judge:
    """Return a judge of numbers that a cache holds in place of keys or values."""
    return lambda numbers: judge(decode(numbers)[..., columns].contiguous())


def _coded(
    lab: Lab, case: Case, output: torch.Tensor, launches: list[LaunchLog], columns: slice
) -> tuple[torch.Tensor, Judge] | None:
    """Return the numbers that a write leaves for keys or values, and the function that decodes them.

    They are arguments of the kernels. The op's record computes the written cache from them and from others,
    such as scales; None if no arguments give that of the run. Scales are taken as the kernels left them.
    """
    call, target = lab.call(case), Target.of(case)
    text = call.spec.result or ""
    names = names_in(text) & call.spec.arguments.keys()
    bound = arguments_of(call, target, names)
    left = list({one.data_ptr(): one for one in _arguments(launches)}.values())
    held: dict[str, torch.Tensor] = {}
    for name in call.spec.arguments:
        wanted = bound.get(name)
        if isinstance(wanted, torch.Tensor):
            fits = (one for one in left if one.shape == wanted.shape and one.dtype == wanted.dtype)
            if (one := next(fits, None)) is None:
                return None
            held[name] = one
            left = [other for other in left if other is not one]
    numbers = [name for name, one in held.items() if one.dtype == torch.uint8]
    if len(numbers) < 2:
        return None
    name = numbers[columns.start is not None]

    def decode(given: torch.Tensor) -> torch.Tensor:
        values = {**held, name: given.view(held[name].dtype).view(held[name].shape)}
        found: torch.Tensor = evaluate(text, Values(call, target, values))
        return found.view(output.dtype)

    return (held[name], decode) if same_bits(decode(held[name]), output) else None


def _arguments(launches: list[LaunchLog]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of launches."""
    for launch in launches:
        yield from (one for one in launch.arguments.values() if isinstance(one, torch.Tensor))


def _holds(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    """Answer whether a tensor, in any order of its dimensions but without gaps, has the bytes of rows."""
    extent = 1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    if not tensor.numel() == extent == rows.numel():
        return False
    if tensor.shape[-2:] != rows.shape[-2:] or tensor.element_size() != rows.element_size():
        return False
    own, given = (one.contiguous().view(torch.uint8).flatten() for one in (tensor, rows))
    return torch.equal(own, given)


def _padded(ran: Result, launches: list[LaunchLog]) -> TrialTarget | None:
    """Return the output with its rows of padding, which must be 0."""
    if ran.padded is None or "padding" not in ran.side_outputs:
        return None
    rows, heads, size = ran.output.shape
    shape = torch.Size((rows + len(ran.padded), heads, size))
    replay = Replay(launches, shape)

    def judge(output: torch.Tensor) -> torch.Tensor:
        right = (output.float() == 0).all(2)
        right[:rows] = True  # of the batch, which the judge of the output compares
        return right

    if replay.output is None:
        return None
    return TrialTarget(replay=replay, judge=judge, right=judge(replay.contents()))


def _lse(lab: Lab, case: Case, ran: Result, launches: list[LaunchLog]) -> TrialTarget | None:
    """Return the log-sum-exp, with as many dimensions as it is stored; rows of padding must have -inf."""
    if ran.lse is None:
        return None
    address = ran.lse.data_ptr()
    stored = next((one for one in _arguments(launches) if one.data_ptr() == address), None)
    if stored is None or stored.dim() != 2:
        return None
    expected, bound = (one.cpu().double() for one in lab.expected_lse(case))
    heads_first, rows_first = stored.stride()[::-1], stored.stride()
    is_turned = ran.lse.stride() == heads_first != rows_first
    if ran.lse.stride() not in (heads_first, rows_first):
        return None
    if stored.shape[0 if is_turned else 1] != expected.shape[1]:  # of more heads than the op has
        return None
    rows, heads = case.query_rows, case.query_heads
    has_padding = "padding" in ran.side_outputs

    def judge(output: torch.Tensor) -> torch.Tensor:
        lse = output[..., 0].T if is_turned else output[..., 0]
        right = torch.ones(lse.shape, dtype=torch.bool)
        near = (lse[: len(expected)].double() - expected).abs() <= bound
        ran_here = (as_slice(rows), as_slice(heads))
        right[: len(expected)][ran_here] = near[ran_here]
        if has_padding:
            right[len(expected) :] = lse[len(expected) :] == -torch.inf
        return right.T if is_turned else right

    shape = torch.Size((*stored.shape, 1))
    replay = Replay(launches, shape, stored)
    return TrialTarget(replay=replay, judge=judge, right=judge(stored[..., None]))


COSTS = (1, 2, 3)
# What an edit that uses an unused name gains, in units of the cost: a fault may have left it out. The first
# is for a statement with similar names.
_REVIVED, _REVIVED_ELSEWHERE = 2.0, 0.8
# Programs that store nothing, of those that run if no program stores a wrong element.
_MOST_IDLE = 4
_GRACE_S = 15.0  # that trials may take longer than their limit: one run, and one of a second case
_STEP = 0.003  # by which an edit of a statement comes after that before it, in units of the cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many edits are tried, and for how long, in seconds of processor time."""

    edits: int
    seconds: float = math.inf


FULL = Limit(edits=2500, seconds=20.0)


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
    def key(self) -> Any:
        """Return what is equal for edits that change the same text in the same way."""
        return id(self.kernel), self.text, *self.edit.changes

    def having(self, edit: Edit) -> "Repair":
        """Return the repair with another edit."""
        return self if edit == self.edit else replace(self, edit=edit)

    @property
    def change(self) -> str:
        """Return the edit in words."""
        first, last = (self.kernel.line(number)[1] for number in self.edit.lines)
        lines = f"line {first}" if first == last else f"lines {first}–{last}"
        return self.edit.words.format(lines=lines) or self.edit.text

    def of_argument(self) -> "tuple[str, Repair] | None":
        """Return an argument of the function and the edit that has another value wherever it is read, if that
        may do what this one does."""
        whole = self.kernel.text
        found = self.edit.of_argument(whole) if self.text else None
        return None if found is None else (found[0], replace(self, text=whole, edit=found[1]))

    def switches(self) -> list["Repair"]:
        """Return the edits that leave out one alternative of the choice that this one changes."""
        return [self.having(one) for one in self.edit.switches(self.text)] if self.text else []

    def longer_loops(self) -> list["Repair"]:
        """Return the edits with which a loop has twice as many iterations, if this one may change its end."""
        return [self.having(one) for one in self.edit.longer_loops(self.text)]

    @property
    def is_in_test(self) -> bool:
        """Answer whether it changes the test of a branch, so that another branch may run."""
        return self.edit.is_in_test(self.text) if self.text else False

    @property
    def is_in_maximum(self) -> bool:
        """Answer whether it changes a maximum or a minimum of tiles, or what one is taken of."""
        return self.edit.is_in_maximum(self.text) if self.text else False

    @lru_cache(maxsize=64)  # noqa: B019 -- many cases run the same few edits
    def texts(self, observer: str = "") -> dict[Line, str]:
        """Return the edited text of the function by the place of the function, for a Probe.

        ``observer``: the name of a function of one argument that the condition of the edit is passed to.
        """
        whole = self.kernel.text  # a further case may take a branch that ``text`` leaves out
        edit = self.edit.moved(self.text, whole)
        text, span = edit.apply(whole), edit.condition(whole) if observer else None
        if span is not None:
            data, (start, end) = text.encode(), span
            call = f"{observer}(".encode() + data[start:end] + b")"
            text = (data[:start] + call + data[end:]).decode()
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

        The trials run in copies of this process, one for each core: a crash, or a loop that nothing else
        stops, ends the trials of its copy only. What was found before is kept.
        """
        found = list(islice(self._edits(suspicion, lines), limit.edits))
        outcomes, is_done = dict[int, Outcome](), False

        def receive(thing: tuple[int, Outcome]) -> bool:
            nonlocal is_done
            outcomes[thing[0]] = thing[1]
            while self.tried in outcomes and not is_done:  # in order, whichever copy is faster
                self._note(found[self.tried], outcomes.pop(self.tried))
                is_done = self.tried < len(found) and self._is_enough(found[self.tried][2])
            return is_done

        shares = _shares(found, cores() if can_copy() else 1)
        parts = [[found[number] for number in share] for share in shares]
        each_s = limit.seconds / max(1, len(parts))
        ended = run_in_copies(
            [
                lambda send, share=share, part=part: self._run(part, share, each_s, send)  # type: ignore[misc]
                for share, part in zip(shares, parts, strict=True)
            ],
            receive,
            each_s + _GRACE_S,
        )
        self.ended = next(filter(None, ended), "")
        self.tried += sum(map(bool, ended))
        for number in () if is_done else sorted(outcomes):  # after one that there was no time for
            self._note(found[number], outcomes[number])

    def _note(self, found: Found, outcome: Outcome) -> None:
        """Count an edit, and add it to the repairs if it is one."""
        self.tried += 1
        share, holds = outcome
        if share > 0:
            kernel, text, edit = found
            self.repairs.append(
                Repair(kernel=kernel, text=text, edit=edit, share=share, holds=holds)
            )

    def _is_enough(self, edit: Edit) -> bool:
        """Answer whether a cheaper edit than the next one repairs everything."""
        return any(one.is_full and one.edit.cost < edit.cost for one in self.repairs)

    def _run(
        self,
        found: Sequence[Found],
        numbers: Sequence[int],
        seconds: float,
        send: Callable[[tuple[int, Outcome]], object],
    ) -> None:
        """Try edits as :meth:`run` says; send the number of each with its outcome."""
        end = time.process_time() + seconds
        forms = EditedForms(found)
        cheap = min(self.wrong_units, key=lambda unit: unit.cost, default=None)
        # Several programs may write parts of the same rows.
        first = (
            [] if cheap is None else [u for u in self.wrong_units if (u.cells & cheap.cells).any()]
        )
        least = math.inf  # cost of an edit that repairs everything
        for at, number in enumerate(numbers):
            kernel, text, edit = found[at]
            if edit.cost > least or time.process_time() > end:
                return
            share, is_elsewhere = self._first_share(forms, at, first)
            if share == 1 or is_elsewhere:
                share = max(self._full_share(forms, at), 0.5 * (share == 1))
            repair = Repair(kernel=kernel, text=text, edit=edit, share=share)
            holds = share < 1 or self.holds is None or self.holds(repair)
            if share == 1 and holds:
                least = min(least, edit.cost)
            send((number, (share, holds)))

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
                    ranks = Counter[int]()  # the edits of a statement take turns with others
                    for edit in edits(text, chosen, cost, kernel.text):
                        order = cost - suspicion(kernel.line(edit.statement))
                        order += _STEP * ranks[edit.statement]
                        ranks[edit.statement] += 1
                        if edit.revives:
                            order -= _REVIVED if edit.is_kin else _REVIVED_ELSEWHERE
                        found.append((order, kernel, text, edit))
        found.sort(key=lambda one: one[0])
        yield from ((kernel, text, edit) for _, kernel, text, edit in found)

    def _first_share(
        self, forms: EditedForms, number: int, first: Sequence[Unit]
    ) -> tuple[float, bool]:
        """Return :meth:`_share` of an edit for one wrong unit, or for all suspects if there is none."""
        units = first or self.suspects
        output = forms.output(number, self.replay, units)
        if output is None:
            return 0.0, False
        if isinstance(output, torch.Tensor):
            if id(output) not in forms.shares:  # several edits may have one output
                forms.shares[id(output)] = self._share(units, output)
            return forms.shares[id(output)]
        return self._share_of_run(units, lambda: self.replay.run(units, forms.edited(number)))

    def _full_share(self, forms: EditedForms, number: int) -> float:
        """Return the share of all wrong elements that an edit makes right, 0 if it makes one wrong."""
        edited, together = forms.edited(number), forms.form_together(number)
        return self._share_of_run(None, lambda: self.replay.run(None, edited, together))[0]

    def _share_of_run(
        self, units: Sequence[Unit] | None, run: Callable[[], torch.Tensor]
    ) -> tuple[float, bool]:
        try:
            output = run()
            return self._share(units, output)
        except (Exception, TooLong):  # an edited kernel may raise anything
            return 0.0, False

    def _share(self, units: Sequence[Unit] | None, output: torch.Tensor) -> tuple[float, bool]:
        """Return which share of the wrong elements of units is right in an output, 0 if one is wrong.

        The second result is whether elements are right that are not of the units: the edited programs store
        other rows. None stands for all programs and all elements.
        """
        right = self.judge(output)
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
