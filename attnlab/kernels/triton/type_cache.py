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
