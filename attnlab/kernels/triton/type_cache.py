"""What Triton's language works out from the types of operands alone, worked out once.

For small tiles this takes most of the interpreter's time: names and shapes of types, and which operations of
the builder an expression such as ``a + b`` consists of.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from attnlab.kernels.triton.run_log import running_log


def cache_types(interpreter: Any, scope: Any) -> None:
    """Patch Triton's type functions, through ``scope``, with cached versions."""
    tl = interpreter.tl
    scope.set_attr(interpreter, "_get_np_dtype", _np_dtype(interpreter._get_np_dtype))
    scope.set_attr(tl.block_type, "__init__", _block_type(tl, tl.block_type.__init__))
    scope.set_attr(tl.tensor, "__init__", _tensor(tl.tensor.__init__))
    semantic = type(interpreter.interpreter_semantic)
    scope.set_attr(semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value))
    scope.set_attr(semantic, "expand_dims", _expand_dims(semantic.expand_dims))
    scope.set_attr(
        semantic, "computation_type_impl", _computation_type(semantic.computation_type_impl)
    )


def _np_dtype(compute: Any) -> Any:
    """Return a cached ``_get_np_dtype``; the original builds a table of all dtypes at each call."""
    known: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = compute(dtype)
        return known[dtype.name]

    return np_dtype


def _block_type(tl: Any, compute: Any) -> Any:
    """Return a cached ``block_type.__init__``; the original checks and formats the shape at each call."""
    known: dict[tuple[Any, ...], tuple[Any, Any, str]] = {}

    def init(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = [n.value if isinstance(n, tl.constexpr) else n for n in shape]
        key = (element_ty.name, *sizes)
        if key not in known:
            compute(block, element_ty, shape)
            known[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = known[key]

    return init


def _tensor(compute: Any) -> Any:
    """Return a cached ``tensor.__init__``; the original makes a constexpr of each size at each call."""
    known: dict[str, tuple[Any, Any]] = {}

    def init(tensor: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            compute(tensor, handle, type)
            known[type.name] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known[type.name]

    return init


def _broadcast(compute: Any) -> Any:
    """Return ``broadcast_impl_value`` that finds the types of its results once for two types.

    The original builds and compares tuples of constexpr at each call.
    """
    known: dict[tuple[str, str], tuple[Any, Any]] = {}  # None: the value is returned as it is

    def broadcast(semantic: Any, lhs: Any, rhs: Any) -> Any:
        key = (lhs.type.name, rhs.type.name)
        if key not in known:
            left, right = compute(semantic, lhs, rhs)
            known[key] = (None if left is lhs else left.type, None if right is rhs else right.type)
            return left, right
        left_ty, right_ty = known[key]
        return _spread(semantic, lhs, left_ty), _spread(semantic, rhs, right_ty)

    return broadcast


def _expand_dims(compute: Any) -> Any:
    """Return ``expand_dims`` that finds the type of its result once for a type and an axis."""
    known: dict[tuple[str, int], Any] = {}

    def expand_dims(semantic: Any, value: Any, axis: int) -> Any:
        if not value.type.is_block():
            return compute(semantic, value, axis)
        key = (value.type.name, axis)
        if key not in known:
            found = compute(semantic, value, axis)
            known[key] = found.type
            return found
        return semantic.tensor(semantic.builder.create_expand_dims(value.handle, axis), known[key])

    return expand_dims


def _spread(semantic: Any, value: Any, type: Any) -> Any:
    """Return a value with the shape of a type, or itself for None."""
    if type is None:
        return value
    if value.type.is_block():
        handle = semantic.builder.create_broadcast(value.handle, type.shape)
    else:
        handle = semantic.builder.create_splat(type, value.handle)
    return semantic.tensor(handle, type)


def _computation_type(compute: Any) -> Any:
    """Return a cached ``computation_type_impl``, the dtype of an operation on two scalar types."""
    known: dict[tuple[Any, ...], Any] = {}

    def computation_type(semantic: Any, a_ty: Any, a_is_scalar: Any, b_ty: Any, *rest: Any) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, *rest)
        if key not in known:
            known[key] = compute(semantic, a_ty, a_is_scalar, b_ty, *rest)
        return known[key]

    return computation_type


# Records of operations: the calls of the builder for a function of the language and types of operands.
#
# The calls depend on the types and on constants alone: the language converts operands, spreads them, and
# calls the builder. So they are recorded once, and made again for other operands of the same types.
#
# A function is not recorded if it looks at the numbers of an operand, if it gets tensors in a tuple, if it
# makes handles without the builder, or for two operands that are one value: which of them a call got is not
# known.

_MOST = 4096  # records of a function: the constants of a loop may be many
_FOLDED = {
    "create_make_range",
    "create_splat",
    "create_broadcast",
}  # of constants, these are constants
_EXACT = (int, bool, str, type(None))  # types whose equal values are the same
_OPEN: list["_Recorder"] = []  # the recorder that records, if one does


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """The calls of the builder for some types of operands, and the result.

    ``constants``: values after the operands' handles. ``calls``: a method, what picks its arguments from the
    values, and its named arguments; each call appends a value. ``result``: the position of the value that
    is returned as a tensor of ``type``, or of the operand that is returned, if ``type`` is None.
    ``uncounted``: operations that are not made again, but count.
    """

    constants: list[Any]
    calls: list[tuple[str, Callable[[Any], Any], dict[str, Any]]]
    result: int
    type: Any
    uncounted: int


class _Unknown(Exception):
    """A function cannot be recorded."""


class _Recorder:
    """The builder, which records its calls until a function returns."""

    def __init__(self, builder: Any, handle_type: Any, operands: list[Any]) -> None:
        self._builder, self._handle_type = builder, handle_type
        self._operands, self._constants = operands, list[Any]()
        self._results, self._calls = list[Any](), list[tuple[str, list[tuple[str, int]], Any]]()
        self._begin, self._counted = running_log().operations, 0
        self.is_known = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        is_call = name.startswith(("create_", "get_"))
        return functools.partial(self._call, name, found) if is_call else found

    def _call(self, name: str, method: Any, *args: Any, **named: Any) -> Any:
        before = running_log().operations
        found = method(*args, **named)
        is_handle = isinstance(found, self._handle_type)
        if not is_handle and name.startswith("get_"):
            return found
        places = [self._place(value) for value in args]
        if (found is not None and not is_handle) or any(map(self._has_handle, named.values())):
            self.is_known = False
        elif name.startswith("get_") or (name in _FOLDED and {kind for kind, _ in places} == {"c"}):
            self._constants.append(found)
        else:
            self._counted += running_log().operations - before
            self._calls.append((name, places, named))
            self._results.append(found)
        return found

    def _place(self, value: Any) -> tuple[str, int]:
        """Return where a value is: among operands, constants or results; add other constants."""
        for kind, values in (("r", self._results), ("o", self._operands), ("c", self._constants)):
            for i, known in enumerate(values):
                if known is value and isinstance(value, self._handle_type):
                    return kind, i
        if self._has_handle(value):
            self.is_known = False  # made without the builder
        self._constants.append(value)
        return "c", len(self._constants) - 1

    def _has_handle(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._has_handle, value))
        return isinstance(value, self._handle_type)

    def look_at(self, handle: Any) -> None:
        """Note that the function looks at the numbers of a value."""
        if not any(handle is one for one in self._constants):
            self.is_known = False

    def record(self, found: Any, operands: list[Any], tensor: Any) -> _Record | None:
        """Return the record of a function that returned ``found`` for some tensors, or None."""
        if type(found) is not tensor:
            return None
        same = next((i for i, one in enumerate(operands) if one is found), None)
        if same is None and found.handle is None and self._results and self._results[-1] is None:
            place = "r", len(self._results) - 1
        elif same is None:
            place = self._place(found.handle)
        else:
            place = "o", same
        if not self.is_known:
            return None
        first = {"o": 0, "c": len(self._operands)}
        first["r"] = first["c"] + len(self._constants)
        calls = [
            (name, _picker([first[kind] + i for kind, i in places]), named)
            for name, places, named in self._calls
        ]
        return _Record(
            constants=self._constants,
            calls=calls,
            result=first[place[0]] + place[1],
            type=None if same is not None else found.type,
            uncounted=running_log().operations - self._begin - self._counted,
        )


def _picker(places: list[int]) -> Callable[[Any], Any]:
    if len(places) == 1:
        return lambda values, at=places[0]: (values[at],)  # type: ignore[misc]
    return operator.itemgetter(*places) if places else lambda values: ()


class Records:
    """The records of an interpreter's functions under some patches; :meth:`recorded` makes them."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._recorded = interpreter, dict[Any, Any]()

    def recorded(self, function: Any) -> Any:
        """Return a function of the language that is recorded."""
        if function not in self._recorded:
            self._recorded[function] = self._with_records(function)
        return self._recorded[function]

    def _with_records(self, function: Any) -> Any:
        tensor, semantic = self._interpreter.tl.tensor, self._interpreter.interpreter_semantic
        known: dict[Any, _Record | None] = {}
        key_of, unseen = self._key_of, object()

        def call(*args: Any, **named: Any) -> Any:
            named.pop("_semantic", None)
            if _OPEN:
                return function(*args, **named, _semantic=semantic)
            operands: list[Any] = []
            values: list[Any] = []
            parts: list[Any] = [*named]
            try:
                for value in (*args, *named.values()) if named else args:
                    if type(value) is tensor:
                        operands.append(value)
                        values.append(value.handle)
                        parts.append(value.type.name)
                    else:
                        parts.append(key_of(value))
            except _Unknown:
                return function(*args, **named, _semantic=semantic)
            made: Any = known.get(key := tuple(parts), unseen)
            is_clear = made is unseen and len({*map(id, values)}) == len(values)
            if is_clear and len(known) < _MOST:
                with self._recording(values) as recorder:
                    found = function(*args, **named, _semantic=semantic)
                known[key] = recorder.record(found, operands, tensor)
                return found
            if made is unseen or made is None:
                return function(*args, **named, _semantic=semantic)
            running_log().operated(made.uncounted)
            values += made.constants
            builder = semantic.builder
            for name, pick, options in made.calls:
                values.append(getattr(builder, name)(*pick(values), **options))
            if made.type is None:
                return operands[made.result]
            return tensor(values[made.result], made.type)

        return call

    @contextmanager
    def _recording(self, operands: list[Any]) -> Iterator[_Recorder]:
        """Record the calls of the builder inside the block."""
        semantic = self._interpreter.interpreter_semantic
        builder = semantic.builder
        recorder = _Recorder(builder, self._interpreter.TensorHandle, operands)
        semantic.builder = recorder
        _OPEN.append(recorder)
        try:
            yield recorder
        finally:
            semantic.builder = builder
            _OPEN.pop()

    def _key_of(self, value: Any) -> Any:
        """Return what identifies a constant; raise _Unknown for any other value."""
        kind, tl = type(value), self._interpreter.tl
        if kind in _EXACT:
            return kind, value
        if kind is tl.constexpr:
            return kind, self._key_of(value.value)
        if isinstance(value, tl.dtype):
            return tl.dtype, value.name
        if isinstance(value, float | int):  # also LoopIndex; 0.0 and -0.0 differ
            return kind, repr(value)
        if kind is slice:
            return kind, self._key_of((value.start, value.stop, value.step))
        if kind is tuple or kind is list:
            return kind, *map(self._key_of, value)
        raise _Unknown


@functools.cache
def records_of(interpreter: Any, name: str, debug: bool) -> Records:
    """Return the records of an interpreter under the patches of a name, in debug mode or not."""
    return Records(interpreter)


def record_operations(interpreter: Any, scope: Any, name: str) -> None:
    """Record the functions of the language that ``scope`` patched, for the patches of a name."""
    debug = interpreter.interpreter_builder.options.debug
    records, is_builtin = records_of(interpreter, name, debug), interpreter.tl.core.is_builtin
    changes = Counter((id(one), attribute) for one, attribute, _ in scope._changes)
    for one, attribute, before in [*scope._changes]:
        if is_builtin(before) and changes[id(one), attribute] == 1:  # nothing else replaces it
            scope.set_attr(one, attribute, records.recorded(before))


def watch_truth(interpreter: Any, scope: Any) -> None:
    """Note which numbers a function looks at while it is recorded, through ``scope``."""
    tensor = interpreter.tl.tensor

    def noted(method: Any) -> Any:
        def look(value: Any) -> Any:
            if _OPEN:
                _OPEN[-1].look_at(value.handle)
            return method(value)

        return look

    for name in ("__bool__", "__index__"):
        scope.set_attr(tensor, name, noted(getattr(tensor, name)))
