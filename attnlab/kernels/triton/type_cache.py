"""Cache type computations of Triton's interpreter during a launch.

For small tiles a third of the interpreter's time is spent on the names and shapes of types. These are
pure functions of their arguments.
"""

from typing import Any


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
            known[key] = (
                None if left is lhs else left.type,
                None if right is rhs else right.type,
            )
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
