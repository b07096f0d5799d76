"""Control flow of programs that run together: conditions, branches, loops and masks of active programs.

A batch of P programs runs as one. Every value is an array with a leading axis: of length P, or of length 1 if
it is the same for all programs. A scalar has shape (P,) or (1,). A kernel's function is rewritten
(:mod:`attnlab.kernels.triton.lockstep.rewriting`) to call the functions here:

- A branch whose condition differs between programs runs both blocks, each with a mask of the programs that
  take it, and merges the variables.
- A loop runs to the longest trip count, with a mask of the programs that are still in it.
- What cannot be masked, such as an early return, splits the batch: :class:`Diverged` ends the run of the
  batch, and its parts run on their own. Stores are kept until the end of a run, so nothing was written.

Values of programs that are not active mean nothing. They are never stored, and conditions ignore them.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from attnlab.kernels.triton.run_log import Budget, TooLong, iterated

_MOST_STEPS = 1 << 20  # iterations of a while loop
_SMALL = 1 << 30  # loop variables below it stay far from the end of int32
_MOST_IDLE = 24  # idle programs in the mean of a loop's iterations, before a batch is split
_MOST_TIMES = 8  # the median of the trips of a loop, and one, that an edit may take with others


class Refused(Exception):
    """Lockstep does not run this launch; the text says why."""


class Diverged(Exception):
    """The programs of a batch must run in parts: ``groups``, arrays of their numbers in the batch."""

    def __init__(self, groups: Sequence[Any]) -> None:
        super().__init__("programs diverge")
        if len(groups) < 2 or not all(len(group) for group in groups):
            raise Refused("a batch of programs cannot be split further")
        self.groups = groups


MISSING = object()  # the value of a variable that is not assigned yet


@dataclass(slots=True, eq=False)
class Batch:
    """Programs that run together.

    - ``ids``: (P, 3) int32, the index of each program in the grid. ``numbers``: (P,) int64, the position of
      each in the order in which the interpreter runs them one after the other.
    - ``tensors``: the memory of the launch. ``active``: (P,) bool, or None if all are active.
    - ``limit``: the elements that a value may have; a batch with a larger one is
      split, so that its values fit into memory.
    - ``places``: (P,) int64, the places of the programs in the batch that this is a part of, or None.
    - ``edits``: (P,) int64, the edit of the kernel that each program has, if they have any. ``raised``: what
      the expressions of edits raised; ``apart``: groups of edits with values that cannot be united with the
      others. Programs with such an edit go on with a value of others, and what they do means nothing.
      ``skipped``: edits whose expression takes too long, or with a loop that is much longer than those of
      the others, which they do not run. ``budget``: the limit of operations, which does not count those of
      edits' expressions.
    - ``scalar_loops``: the number of loops around whose variable is a scalar of Triton, not an int.
    """

    ids: Any
    numbers: Any
    interpreter: Any
    tensors: Any = None
    active: Any = None
    limit: int = 1 << 20
    places: Any = None
    edits: Any = None
    raised: dict[int, Exception] = field(default_factory=dict)
    apart: list[list[int]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    budget: Budget = field(default_factory=lambda: Budget(operations=0))
    scalar_loops: int = 0

    @property
    def size(self) -> int:
        """Return the number of programs."""
        return len(self.numbers)

    @property
    def is_active(self) -> Any:
        """Return which programs are active, (P,) bool."""
        return np.ones(self.size, np.bool_) if self.active is None else self.active

    def check_size(self, elements: int) -> None:
        """Raise Diverged if a value with so many elements per program is too large for the batch."""
        if len(self.numbers) * elements > self.limit and len(self.numbers) > 1:
            most = max(1, self.limit // elements)
            raise Diverged(np.array_split(np.arange(self.size), -(-self.size // most)))

    def live(self, data: Any) -> Any:
        """Return the part of an array (P or 1, …) that belongs to active programs."""
        return data if self.active is None or data.shape[0] == 1 else data[self.active]


_RUNNING: list[Batch] = []


def begin(batch: Batch | None) -> None:
    """Make a batch the one that runs; None: none does."""
    _RUNNING[:] = [] if batch is None else [batch]


def running() -> Batch:
    """Return the batch that runs."""
    return _RUNNING[0]


def live(data: Any) -> Any:
    """Return the part of a value's array that belongs to active programs, or all of it if no batch runs."""
    return _RUNNING[0].live(data) if _RUNNING else data


def scalars(value: Any) -> Any:
    """Return the numbers of a scalar of Triton, (P,) or (1,); None for any other value.

    A block with one element counts as a scalar, as for Triton's interpreter.
    """
    handle = getattr(value, "handle", None)
    data = getattr(handle, "data", None)
    if not isinstance(data, np.ndarray) or data.size != data.shape[0]:
        return None
    return data.reshape(-1)


def is_uniform(data: Any) -> bool:
    """Answer whether all active programs have the same number; ``data``: (P,) or (1,)."""
    some = running().live(data)
    return bool((some == some[0]).all())


def same_for_all(data: Any) -> Any:
    """Return the number that all active programs have; raise Diverged if they differ."""
    some = running().live(data)
    if not (some == some[0]).all():
        raise split(data)
    return some[0].item()


def split(values: Any) -> Diverged:
    """Return a split of the batch by what its active programs have; ``values``: (P,) or (1,).

    Programs that are not active join those with the first value.
    """
    batch = running()
    every = np.broadcast_to(values, (batch.size,))
    if batch.active is not None:
        every = np.where(batch.active, every, every[np.argmax(batch.active)])
    kinds, of = np.unique(every, return_inverse=True)
    return Diverged([np.flatnonzero(of == i) for i in range(len(kinds))])


def truth(value: Any) -> Any:
    """Return whether a condition holds: a bool, or (P,) bool if programs of the batch that runs differ."""
    data = scalars(value) if _RUNNING else None
    if data is None:
        return bool(value)
    found = data != 0
    some = running().live(found)
    if (some == some[0]).all():
        return bool(some[0])
    return found  # it differs, so it has an element per program


def is_same_for_all(value: Any) -> bool:
    """Return the truth of a condition; raise Diverged if active programs differ."""
    found = truth(value)
    if isinstance(found, bool):
        return found
    raise split(found)


def narrowed(mask: Any) -> Any:
    """Return the active programs among those of ``mask``, (P,) bool."""
    active = running().active
    return mask if active is None else active & mask


def merged(mask: Any, one: Any, other: Any) -> Any:
    """Return ``one`` for the programs of ``mask``, (P,) bool, and ``other`` for the rest.

    What has no common type splits the batch.
    """
    if one is other:
        return one
    batch = running()
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return batch.interpreter._tuple_create(one, [merged(mask, x, y) for x, y in pairs])
    plain = [_plain(batch, value) for value in (one, other)]
    if any(value is None for value in plain):
        if type(one) is type(other) and one == other:
            return one
        raise Diverged([np.flatnonzero(mask), np.flatnonzero(~mask)])
    left, right = plain
    if left.type != right.type:
        raise Diverged([np.flatnonzero(mask), np.flatnonzero(~mask)])
    data = _chosen(mask, left.handle.data, right.handle.data)
    return batch.interpreter.tl.tensor(
        batch.interpreter.TensorHandle(data, left.handle.dtype), left.type
    )


def _plain(batch: Batch, value: Any) -> Any:
    """Return a value as a tensor of Triton, or None if it is no number."""
    tl = batch.interpreter.tl
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, tl.tensor):
        return value
    if isinstance(value, bool | int | float):
        return batch.interpreter.interpreter_semantic.to_tensor(value)
    return None


def _chosen(mask: Any, one: Any, other: Any) -> Any:
    few = np.flatnonzero(~mask)
    if one.shape == other.shape and len(one) == len(mask) and 2 * len(few) < len(mask):
        data = one.copy()
        data[few] = other[few]
        return data
    return np.where(mask.reshape(-1, *(1,) * (one.ndim - 1)), one, other)


def _values(names: Sequence[str], variables: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(variables.get(name, MISSING) for name in names)


class Branch:
    """An ``if`` statement: ``then`` and ``otherwise`` say which blocks run, ``differs`` whether both do."""

    def __init__(self, test: Any, names: Sequence[str], variables: Mapping[str, Any], masks: bool):
        found = truth(test)
        self.differs = not isinstance(found, bool)
        if not self.differs:
            self.then, self.otherwise = found, not found
            return
        if not masks:
            raise split(found)
        batch = running()
        self.then = self.otherwise = True
        self._mask, self._outer = found, batch.active
        self._before = _values(names, variables)
        batch.active = narrowed(found)

    def flip(self, names: Sequence[str], variables: Mapping[str, Any]) -> tuple[Any, ...]:
        """Turn to the other block; return the variables from before the first."""
        batch = running()
        self._first = _values(names, variables)
        batch.active = self._outer
        batch.active = narrowed(~self._mask)
        return self._before

    def end(self, names: Sequence[str], variables: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the variables after both blocks."""
        running().active = self._outer
        last = _values(names, variables)
        return tuple(merged(self._mask, x, y) for x, y in zip(self._first, last, strict=True))


def chosen(test: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return ``then() if test else otherwise()``."""
    found = truth(test)
    if isinstance(found, bool):
        return then() if found else otherwise()
    return merged(found, _under(found, then), _under(~found, otherwise))


def _under(mask: Any, function: Callable[[], Any]) -> Any:
    """Return what a function returns with only the programs of ``mask`` active."""
    batch = running()
    outer, batch.active = batch.active, narrowed(mask)
    try:
        return function()
    finally:
        batch.active = outer


# ``and``, ``or`` and chained comparisons, also of a program that runs alone.


def _is_block(value: Any) -> bool:
    """Answer whether a value is a block of Triton, not a scalar or a constant."""
    return bool(getattr(getattr(value, "type", None), "is_block", bool)())


def both(first: Any, *rest: Callable[[], Any]) -> Any:
    """Return ``first and rest[0]() and …``; blocks are combined element by element."""
    for other in rest:
        if _is_block(first):
            first = (first != 0) & (other() != 0)
            continue
        found = truth(first)
        if isinstance(found, bool):
            first = other() if found else first
        else:
            first = merged(found, _under(found, other), first)
    return first


def either(first: Any, *rest: Callable[[], Any]) -> Any:
    """Return ``first or rest[0]() or …``; blocks are combined element by element."""
    for other in rest:
        if _is_block(first):
            first = (first != 0) | (other() != 0)
            continue
        found = truth(first)
        if isinstance(found, bool):
            first = first if found else other()
        else:
            first = merged(found, first, _under(~found, other))
    return first


def chain(left: Any, *rest: Callable[..., Any]) -> Any:
    """Return ``left < a < b …``; ``rest``: each comparison, and a function that returns its right side."""
    found: Any = True
    for compare, right in zip(rest[::2], rest[1::2], strict=True):
        if not _is_block(found) and not is_same_for_all(found):
            return found
        left, before = right(), left
        one = compare(before, left)
        found = one if found is True else both(found, functools.partial(_same, one))
    return found


def _same(value: Any) -> Any:
    return value


def negated(value: Any) -> Any:
    """Return ``not value``."""
    found = truth(value)
    return not found if isinstance(found, bool) else value == 0


Part = tuple[
    Sequence[str], Callable[..., Any]
]  # names of variables, and a function of their values


class Edited(Protocol):
    """Edits of an expression, by their numbers."""

    @property
    def edits(self) -> Mapping[int, Any]:
        """Return the expression of each edit."""

    def part(self, number: int) -> Part:
        """Return the part that an edit puts in the place of the expression."""


def varied(variables: Mapping[str, Any], value: Part, site: Edited, read: Any) -> Any:
    """Return the value of an expression, but for programs with an edit of the site that of its part.

    Each is computed for its programs alone. The most frequent kind of value counts; edits with another one,
    or that raise something, are noted. ``read`` has the names of all variables that a part reads.
    """
    batch = running()
    present = set(batch.edits.tolist()).difference(batch.raised, batch.skipped, *batch.apart)
    found: dict[Any, list[tuple[Any, Any]]] = {}
    rest = np.ones(batch.size, np.bool_)
    for number in sorted(present.intersection(site.edits)):
        mask = batch.edits == number
        if narrowed(mask).any():
            try:
                with batch.budget.part():
                    one = _of_part(batch, mask, site.part(number), variables)
            except Diverged:
                raise
            except TooLong:
                batch.skipped.append(number)
            except Exception as error:  # also Refused
                batch.raised[number] = error
            else:
                rest &= ~mask
                found.setdefault(_kind(one), []).append((mask, one))
    if not found:
        return value[1](*(variables[name] for name in value[0] if name in variables))
    if narrowed(rest).any():
        own = _of_part(batch, rest, value, variables)
        found.setdefault(_kind(own), []).append((rest, own))
    return _united(_most_frequent(batch, found))


def decided(value: Any) -> Any:
    """Return a condition as a bool, or as it is if active programs differ: for a branch, all that is true is
    alike."""
    found = truth(value)
    return found if isinstance(found, bool) else value


def _most_frequent(batch: Batch, found: Mapping[Any, list[tuple[Any, Any]]]) -> Any:
    """Return the masks and values of the kind that most programs have; note the edits of the others.

    Integers of 32 and 64 bits with the same numbers are of one kind here.
    """
    several = max(found.values(), key=lambda of_kind: sum(int(mask.sum()) for mask, _ in of_kind))
    like, united = several[0][1], [*several]
    for others in found.values():
        if others is several:
            continue
        same = [(mask, _as_integers(value, like)) for mask, value in others]
        if all(value is not None for _, value in same):
            united += same
        else:
            mask = np.logical_or.reduce([mask for mask, _ in others])
            numbers = np.unique(batch.edits[narrowed(mask)]).tolist()
            if _is_address(others[0][1]) == _is_address(like):
                batch.apart.append(numbers)
            else:
                batch.raised |= dict.fromkeys(numbers, NoAddress())
    return united


class NoAddress(Exception):
    """An edit gives a number in the place of an address, or the other way round: no load or sum takes it."""


def _is_address(value: Any) -> bool:
    return getattr(value, "handle", None) is not None and value.type.scalar.is_ptr()


def _as_integers(value: Any, like: Any) -> Any:
    """Return integers of 32 or 64 bits as those of ``like``, or None if these cannot have them."""
    mine, theirs = getattr(value, "handle", None), getattr(like, "handle", None)
    if mine is None or theirs is None or value.type == like.type:
        return None
    data, other = mine.data, theirs.data
    is_integer = {data.dtype, other.dtype} == {np.dtype(np.int32), np.dtype(np.int64)}
    if not is_integer or value.shape != like.shape:
        return None
    own = data.astype(other.dtype)
    if not (own == data).all():
        return None
    tl = running().interpreter.tl
    return tl.tensor(running().interpreter.TensorHandle(own, theirs.dtype), like.type)


def _of_part(batch: Batch, mask: Any, part: Part, variables: Mapping[str, Any]) -> Any:
    """Return the value of a part, computed by the programs of a mask, (P,) bool, as a batch of their own."""
    chosen, (names, function) = np.flatnonzero(mask), part
    active = None if batch.active is None else batch.active[chosen]
    own = replace(
        batch,
        ids=batch.ids[chosen],
        numbers=batch.numbers[chosen],
        edits=batch.edits[chosen],
        places=chosen if batch.places is None else batch.places[chosen],
        active=None if active is None or active.all() else active,
    )
    begin(own)
    try:
        return function(*(_taken(batch, variables[name], chosen) for name in names))
    except KeyError as error:
        raise UnboundLocalError(str(error)) from error
    except Diverged as diverged:
        groups = [chosen[group] for group in diverged.groups]
        groups[0] = np.sort(np.concatenate([groups[0], np.flatnonzero(~mask)]))
        raise Diverged(groups) from diverged
    finally:
        begin(batch)


def _taken(batch: Batch, value: Any, chosen: Any) -> Any:
    """Return the part of a value that belongs to some programs of a batch."""
    if isinstance(value, tuple):
        parts = [_taken(batch, one, chosen) for one in value]
        return batch.interpreter._tuple_create(value, parts)
    handle = getattr(value, "handle", None)
    if handle is None or not isinstance(value, batch.interpreter.tl.tensor):
        return value
    if hasattr(handle, "parts"):
        parts = [part if len(part) == 1 else part[chosen] for part in handle.parts]
        shape = (max(map(len, parts)), *handle.shape[1:])
        return batch.interpreter.tl.tensor(type(handle)(parts, shape, handle.dtype), value.type)
    if len(handle.data) == 1:
        return value
    own = batch.interpreter.TensorHandle(handle.data[chosen], handle.dtype)
    return batch.interpreter.tl.tensor(own, value.type)


def _kind(value: Any) -> Any:
    """Return what values have in common that can be united."""
    if isinstance(value, tuple):
        return ("tuple", *map(_kind, value))
    if isinstance(value, Range):
        return "range"
    handle = getattr(value, "handle", None)
    if handle is not None:
        return value.type.name, handle.data.dtype.str
    if isinstance(value, running().interpreter.tl.tensor):
        return "nothing"  # of a store
    plain = getattr(value, "value", value)
    return type(value), type(plain), repr(plain) if isinstance(plain, float) else plain


def _united(several: Sequence[tuple[Any, Any]]) -> Any:
    """Return one value from those of some programs each, all of one kind."""
    first = several[0][1]
    masks = [mask for mask, _ in several]
    if len(several) == 1 and masks[0].all():
        return first
    if isinstance(first, tuple):
        parts = [_united([*zip(masks, some, strict=True)])
                 for some in zip(*(value for _, value in several), strict=True)]  # fmt: skip
        return running().interpreter._tuple_create(first, parts)
    if isinstance(first, Range):
        found = Range(0)
        bounds = zip(*(value.bounds for _, value in several), strict=True)
        found.bounds = [_stacked(masks, some) for some in bounds]
        return found
    if getattr(first, "handle", None) is None:
        return first
    data = _stacked(masks, [value.handle.data for _, value in several])
    interpreter = running().interpreter
    return interpreter.tl.tensor(interpreter.TensorHandle(data, first.handle.dtype), first.type)


def _stacked(masks: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """Return an array (P, …) with the elements of each array at the programs of its mask."""
    shape = np.broadcast_shapes(*(one.shape[1:] for one in arrays))
    data = np.empty((running().size, *shape), dtype=arrays[0].dtype)
    data[:] = arrays[0][:1]  # of programs that have no mask
    for mask, one in zip(masks, arrays, strict=True):
        data[mask] = one
    return data


Marks = tuple[Callable[[str], None], str]  # adds a point; the name of a branch


def marked(add: Callable[[str], None], name: str, test: Any) -> Any:
    """Return a condition; add the outcomes that it has for active programs."""
    found = truth(test)
    outcomes = (found,) if isinstance(found, bool) else (True, False)
    for outcome in outcomes:
        add(f"{name}{'+' if outcome else '-'}")
    return test


class Range:
    """``range`` of a kernel, whose bounds may differ between programs."""

    def __init__(self, first: Any, stop: Any = None, step: Any = None, **options: Any) -> None:
        bounds = (0, first) if stop is None else (first, stop)
        self.bounds = [_numbers(one) for one in (*bounds, 1 if step is None else step)]
        if (self.bounds[2] == 0).any():
            raise Refused("a loop with step 0")

    def __iter__(self) -> Iterator[int]:
        return iter(range(*(same_for_all(one) for one in self.bounds)))

    def check_begin(self, may_differ: bool) -> None:
        """Raise Diverged if begin or step differ, and may not, or are numbers that int32 may not hold."""
        begin, end, step = self.bounds
        for one in (begin, step):
            if not is_uniform(one):
                some = running().live(one)
                is_small = int(some.min()) >= 0 and int(np.abs(end).max()) < _SMALL
                if not may_differ or not is_small:
                    raise split(one)

    def trips(self) -> Any:
        """Return the number of iterations of each program, (P,) int64."""
        begin, end, step = self.bounds
        found = np.maximum(0, -((begin - end) // step))
        return np.broadcast_to(found, (running().size,))


def _numbers(value: Any) -> Any:
    """Return an integer, or a scalar of Triton, as int64 numbers (P,) or (1,).

    Raises TypeError for other numbers, as Triton's compiler does for the bounds of a loop.
    """
    value = getattr(value, "value", value) if not hasattr(value, "handle") else value
    data = scalars(value)
    if data is None:
        return np.array([operator.index(value)])
    if data.dtype.kind == "f":
        raise TypeError("the bounds of a range must be integers")
    return data.astype(np.int64)


def loop(items: Any, masks: bool, any_begin: bool, marks: Marks | None = None) -> Iterator[Any]:
    """Yield the items of a ``for`` loop; with ``masks``, programs that have fewer are masked off.

    With ``any_begin``, the loop may have another begin or step for each program, and its variable is a scalar
    of Triton then; otherwise it is an int, as for Triton's interpreter. The batch is split if masks would
    leave too many programs idle.
    """
    entered = False
    for item in _steps(items, masks, any_begin, marks):
        if marks and not entered:
            marks[0](f"{marks[1]}+")
        entered = True
        yield iterated(item)
    if marks and not entered:
        marks[0](f"{marks[1]}-")


def _steps(items: Any, masks: bool, any_begin: bool, marks: Marks | None) -> Iterator[Any]:
    if not isinstance(items, Range) or all(is_uniform(one) for one in items.bounds):
        yield from items
        return
    items.check_begin(any_begin)
    batch, trips = running(), _without_skipped(items.trips())
    if is_uniform(trips):
        most = int(batch.live(trips)[0])
    elif not masks:
        raise split(trips)
    else:
        most = _longest(batch, trips)
    if marks and (batch.live(trips) == 0).any() and most:
        marks[0](f"{marks[1]}-")
    tl, outer = batch.interpreter.tl, batch.active
    begin, _, step = items.bounds
    is_scalar = not (is_uniform(begin) and is_uniform(step))
    batch.scalar_loops += is_scalar
    for i in range(most):
        batch.active = outer
        still = narrowed(trips > i)
        batch.active = None if still.all() else still
        now = begin + i * step
        handle = batch.interpreter.TensorHandle(now.astype(np.int32), tl.int32)
        yield tl.tensor(handle, tl.int32) if is_scalar else int(batch.live(now)[0])
    batch.active = outer
    batch.scalar_loops -= is_scalar


def _without_skipped(trips: Any) -> Any:
    """Return the trip counts, 0 for edits that have much larger ones than others; these are noted."""
    batch = running()
    if batch.edits is None:
        return trips
    is_long = narrowed(trips > _MOST_TIMES * (1 + np.median(batch.live(trips))))
    if not is_long.any():
        return trips
    batch.skipped += np.unique(batch.edits[is_long]).tolist()
    return np.where(is_long, 0, trips)


def _longest(batch: Batch, trips: Any) -> int:
    """Return the longest trip count; raise Diverged if the batch is better split in two."""
    some = batch.live(trips)
    most = int(some.max())
    if batch.active is None and most * batch.size - some.sum() > _MOST_IDLE * most:
        order = np.argsort(trips, kind="stable")
        counts = trips[order]
        cost = [counts[k - 1] * k + most * (batch.size - k) for k in range(1, batch.size)]
        best = 1 + int(np.argmin(cost))
        raise Diverged([np.sort(order[:best]), np.sort(order[best:])])
    return most


class While:
    """A ``while`` loop."""

    def __init__(self, masks: bool) -> None:
        self._outer, self._masks, self._steps = running().active, masks, 0

    def goes_on(self, test: Any) -> bool:
        """Return whether any program goes on; mask the others off."""
        batch, found = running(), truth(iterated(test))
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise Refused(f"a while loop of more than {_MOST_STEPS} iterations")
        if isinstance(found, bool):
            if not found:
                batch.active = self._outer
            return found
        if not self._masks:
            raise split(found)
        batch.active = narrowed(found)
        return True


Saved = tuple[Any, tuple[Any, ...]]


def save(names: Sequence[str], variables: Mapping[str, Any]) -> Saved | None:
    """Return the mask and the variables at the begin of an iteration; None if all programs are active."""
    active = running().active
    return None if active is None else (active, _values(names, variables))


def restore(saved: Saved, names: Sequence[str], variables: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the variables at the end of an iteration: those of programs not in it are as before."""
    mask, before = saved
    now = _values(names, variables)
    return tuple(merged(mask, x, y) for x, y in zip(now, before, strict=True))
