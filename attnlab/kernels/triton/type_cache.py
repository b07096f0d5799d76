"""What Triton's interpreter works out again at every operation, worked out once.

A third of the interpreter's time on a small tile goes into the names and shapes of types. These are pure
functions of their arguments, and are remembered here while a launch lasts.
"""

from typing import Any


def remember(interpreter: Any, scope: Any) -> None:
    """Patch Triton's types and dtypes, through ``scope``, with functions that remember."""
    tl = interpreter.tl
    scope.set_attr(interpreter, "_get_np_dtype", _np_dtype(interpreter._get_np_dtype))
    scope.set_attr(tl.block_type, "__init__", _block_type(tl, tl.block_type.__init__))
    scope.set_attr(tl.tensor, "__init__", _tensor(tl.tensor.__init__))


def _np_dtype(work_out: Any) -> Any:
    """Return ``_get_np_dtype``, which builds a table of all dtypes at each call, with a memory."""
    known: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = work_out(dtype)
        return known[dtype.name]

    return np_dtype


def _block_type(tl: Any, work_out: Any) -> Any:
    """Return ``block_type.__init__``, which checks a shape and writes it out, with a memory."""
    known: dict[tuple[Any, ...], tuple[Any, Any, str]] = {}

    def init(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = [n.value if isinstance(n, tl.constexpr) else n for n in shape]
        key = (element_ty.name, *sizes)
        if key not in known:
            work_out(block, element_ty, shape)
            known[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = known[key]

    return init


def _tensor(work_out: Any) -> Any:
    """Return ``tensor.__init__``, which makes a constexpr of each size, with a memory."""
    known: dict[str, tuple[Any, Any]] = {}

    def init(tensor: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            work_out(tensor, handle, type)
            known[type.name] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known[type.name]

    return init
