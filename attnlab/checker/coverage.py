"""Coverage: which lines and branches of the kernels no case of a check reached.

It is built from the header of a check, which has the functions of each op, and from the verdicts, which
have the points that each case reached (:mod:`attnlab.kernels.triton.coverage`).
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnlab.case.ops import OPS
from attnlab.case.shown import Document
from attnlab.kernels.backend import Backend
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.triton.coverage import Points
from attnlab.kernels.vllm.features import Function, file_kernels, op_functions

# Parts of vLLM's ops that no hostile case reaches, each with its reason.
#
# The list is checked: a part that a case does reach is reported as such, so that the entry is removed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """An outcome of a branch that no hostile case reaches, with the block that then runs.

    - ``function``: its function. ``text``: the condition, or what a loop runs over, as ``ast.unparse`` writes
      it. ``outcome``: True or False; of a loop, whether it has an iteration.
    - ``block``: how the first line of the block begins, if the text alone is ambiguous.
    - ``op``: the op whose cases do not reach it; "" for all.
    """

    function: str
    text: str
    outcome: bool
    reason: str
    block: str = ""
    op: str = ""


_TABLE = tomllib.loads((files(__package__) / "unreachable.toml").read_text(encoding="utf-8"))
UNREACHABLE = tuple(Unreachable(**entry) for entry in _TABLE["entries"])

NO_STRIDE = "The kernels get no stride of it; it must be contiguous."


# Coverage of arguments: which parameters of an op got one value only, and which strides and dtypes no case
# had.
#
# It is built from the facts of the cases (:mod:`attnlab.kernels.vllm.op_arguments`).

_INDEX_DTYPES = ("int32", "int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """What the cases of an op passed for a parameter.

    - ``values``: the values of a number, and "tensor"; ``dtypes``: of tensors.
    - ``strides``: dimensions whose stride differed from that of a contiguous tensor; ``no_strides``: the
      others that had more than one index.
    - ``gaps``: what is missing; ``reasons``: what is missing for a reason.
    """

    name: str
    values: tuple[str, ...]
    dtypes: tuple[str, ...]
    strides: tuple[int, ...]
    no_strides: tuple[int, ...]
    gaps: tuple[str, ...]
    reasons: tuple[str, ...]


def parameter_uses(
    op: str, parameters: Sequence[str], measured: Iterable[Mapping[str, Sequence[str]]]
) -> list[ParameterUse]:
    """Return what some cases of an op passed, in the order of its parameters."""
    facts: dict[str, set[str]] = {name: set() for name in parameters}
    for case in measured:
        for name, several in case.items():
            facts.setdefault(name, set()).update(several)
    return [_use(op, name, facts[name]) for name in parameters]


def _use(op: str, name: str, facts: set[str]) -> ParameterUse:
    values = _after(facts, "value ")
    dtypes = _after(facts, "dtype ")
    dims = {int(n) for n in _after(facts, "dim ")}
    strides = {int(n) for n in _after(facts, "stride ")}
    gaps: list[str] = []
    reasons: list[str] = []
    record = OPS[op]
    reason = record.why_neutral(name)
    if reason is not None:
        reasons.append(reason)
    elif not dtypes and len(values) < 2:
        gaps.append("one value only")
    used = record.strides.get(name, 0)
    for dim in sorted(dims - strides):
        text = f"stride {dim} is that of a contiguous tensor"
        if dim >= used:
            reasons.append(f"{text}: {NO_STRIDE}")
        else:
            gaps.append(text)
    if set(dtypes) & set(_INDEX_DTYPES):
        wanted = record.index_dtypes.get(name, _INDEX_DTYPES)
        gaps += [f"never {dtype}" for dtype in wanted if dtype not in dtypes]
    return ParameterUse(
        name=name,
        values=(*values, *(["tensor"] if dtypes else [])),
        dtypes=tuple(dtypes),
        strides=tuple(sorted(strides)),
        no_strides=tuple(sorted(dims - strides)),
        gaps=tuple(gaps),
        reasons=tuple(reasons),
    )


def _after(facts: set[str], word: str) -> list[str]:
    """Return what follows a word in the facts that begin with it, sorted."""
    return sorted(fact.removeprefix(word) for fact in facts if fact.startswith(word))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A line, or an outcome of a branch, that no case reached.

    - ``what``: "line", or the outcome: "true", "false", "entered" or "not entered".
    - ``text``: the line, or the condition. ``reason``: why no case can reach it, or "".
    """

    file: str
    line: int
    function: str
    what: str
    text: str
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Count:
    """How many lines or outcomes there are, how many were reached, and how many of the others have a
    reason."""

    total: int = 0
    reached: int = 0
    excused: int = 0

    @property
    def percent(self) -> float:
        """Return the part that was reached, of all."""
        return 100.0 * self.reached / self.total if self.total else 100.0

    @property
    def percent_of_reachable(self) -> float:
        """Return the part that was reached, of those without a reason."""
        reachable = self.total - self.excused
        return 100.0 * self.reached / reachable if reachable else 100.0

    def to_dict(self) -> dict[str, float]:
        """Return the numbers as JSON-able values."""
        percents = {name: getattr(self, name) for name in ("percent", "percent_of_reachable")}
        return {**asdict(self), **{name: round(value, 1) for name, value in percents.items()}}


@dataclass(slots=True, kw_only=True)
class OpCoverage(Document):
    """The coverage of an op.

    - ``parameters``: what the cases passed for the parameters of the op.
    - ``combinations``: of knob values (:func:`attnlab.checker.hostile.combinations_of`).
    - ``missing``: gaps without a reason; ``excused``: those with one.
    - ``outdated``: entries of :mod:`attnlab.checker.coverage` that a case reached.
    - ``functions``, ``points``: what it was computed from; the points by file.
    """

    _without = ("functions", "points")

    lines: Count = field(default_factory=Count)
    branches: Count = field(default_factory=Count)
    parameters: list[ParameterUse] = field(default_factory=list)
    combinations: dict[str, Any] = field(default_factory=dict)
    missing: list[Gap] = field(default_factory=list)
    excused: list[Gap] = field(default_factory=list)
    outdated: list[Gap] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list, repr=False)
    points: dict[str, Points] = field(default_factory=dict, repr=False)


def functions_of(backend: Backend, op: str) -> list[dict[str, Any]]:
    """Return the functions whose coverage is measured, as JSON-able values; none for the models."""
    if (source := backend.op_source) is not None:
        return [one.to_dict(source.root) for one in op_functions(source, op)]
    if isinstance(backend, PluginBackend) and backend.file is not None:
        return [one.to_dict(_root(backend)) for one in file_kernels(Path(backend.file).resolve())]
    return []


def relative_points(backend: Backend, points: Mapping[str, Points]) -> dict[str, list[str]]:
    """Return the points of each file, sorted, with names of files as in :func:`functions_of`."""
    root, found = _root(backend), {}
    for name, seen in points.items():
        file = Path(name).resolve()
        short = file.relative_to(root) if file.is_relative_to(root) else file
        found[short.as_posix()] = sorted(seen)
    return found


def _root(backend: Backend) -> Path:
    return Path.cwd() if backend.op_source is None else backend.op_source.root


def op_coverage(
    op: str,
    functions: Iterable[Mapping[str, Any]],
    measured: Iterable[Mapping[str, Sequence[str]]],
    arguments: Iterable[Mapping[str, Sequence[str]]] = (),
) -> OpCoverage:
    """Return the coverage of an op.

    - ``functions``: as :func:`functions_of` returns them.
    - ``measured``: the points of each case, as :func:`relative_points` returns them.
    - ``arguments``: the facts about the arguments of each case (:mod:`attnlab.kernels.vllm.op_arguments`).
    """
    found = OpCoverage(functions=[Function.of_dict(one) for one in functions])
    for function in found.functions:
        if function.name == OPS[op].function and not function.is_kernel:
            found.parameters = parameter_uses(op, function.parameters, arguments)
    for points in measured:
        for file, seen in points.items():
            found.points.setdefault(file, set()).update(seen)
    entries = [entry for entry in UNREACHABLE if entry.op in ("", op)]
    for function in found.functions:
        own = [entry for entry in entries if entry.function == function.name]
        _add(found, function, found.points.get(function.file.as_posix(), set()), own)
    return found


def _add(
    found: OpCoverage, function: Function, seen: Points, entries: Sequence[Unreachable]
) -> None:
    """Add a function's numbers and gaps."""
    own, inside = _excuses(function, entries)
    for point, gap in _points(function):
        count = found.lines if gap.what == "line" else found.branches
        count.total += 1
        reason = own.get(point) or inside.get(point)
        if point in seen:
            count.reached += 1
            if point in own:
                found.outdated.append(replace(gap, reason=own[point]))
        elif reason is None:
            found.missing.append(gap)
        else:
            count.excused += 1
            found.excused.append(replace(gap, reason=reason))


def _points(function: Function) -> Iterator[tuple[str, Gap]]:
    """Yield each point of a function and the gap that it is if no case reaches it, by line."""
    found = []
    for line in function.statements:
        found.append((str(line), line, "line", _text_of(function, line)))
    for name, branch in function.branches.items():
        words = ("entered", "not entered") if branch.kind == "for" else ("true", "false")
        for sign, what in zip("+-", words, strict=True):
            found.append((f"{name}{sign}", branch.line, what, f"{branch.kind} {branch.text}"))
    file = function.file.as_posix()
    for point, line, what, text in sorted(found, key=lambda one: one[1]):
        yield point, Gap(file=file, line=line, function=function.name, what=what, text=text)


def _text_of(function: Function, line: int) -> str:
    return function.text[line - function.line].strip()


def _excuses(
    function: Function, entries: Sequence[Unreachable]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the reasons of outcomes that need not be reached, by point, and those of all points inside the
    blocks that then run."""
    own: dict[str, str] = {}
    inside: dict[str, str] = {}
    for entry in entries:
        for name, branch in function.branches.items():
            block = branch.then if entry.outcome else branch.otherwise
            if branch.text != entry.text:
                continue
            if not entry.block or _text_of(function, block[0]).startswith(entry.block):
                own[f"{name}{'+' if entry.outcome else '-'}"] = entry.reason
                inside |= dict.fromkeys(_inside(function, block), entry.reason)
    return own, inside


def _inside(function: Function, block: tuple[int, int]) -> Iterator[str]:
    """Yield the points of a block."""
    first, last = block
    yield from (str(n) for n in function.statements if first <= n <= last)
    for name, branch in function.branches.items():
        if first <= branch.line <= last:
            yield from (f"{name}{sign}" for sign in "+-")
