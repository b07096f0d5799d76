"""Block pointers, which Triton 3.8 has removed and kernels of other libraries still use.

The interpreters of earlier releases have them, but attnlab's records of operations take two of theirs for
equal, so that a pointer does not move in a loop: these replace them in every release.

Triton's compilers up to 3.8 compute their addresses in int64, and mask the dimensions that a load or a store
lists in ``boundary_check``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class BlockPointer:
    """A block pointer: base, and int64 shape, strides and offsets; ``block`` is the shape of the block."""

    base: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offsets: tuple[Any, ...]
    block: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """Return the type of a pointer to an element."""
        return self.base.dtype

    type = dtype


def patch_block_pointers(
    interpreter: Any, scope: Any, wide: Callable[[Any], Any] | None = None
) -> None:
    """Give the language block pointers, through ``scope``; ``wide``: what makes a number int64."""
    tl = interpreter.tl
    load, store = tl.load, tl.store
    wide = wide or (lambda number: _wide(tl, number))

    def loaded(pointer: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(pointer, BlockPointer):
            return load(pointer, *args, **named)
        pointers, mask = _pointers(tl, pointer, named.get("boundary_check", ()))
        padding = _plain(named.get("padding_option", ""))
        other = {"zero": 0.0, "nan": float("nan")}.get(padding)
        return load(pointers, mask=mask, other=None if mask is None else other)

    def stored(pointer: Any, value: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(pointer, BlockPointer):
            return store(pointer, value, *args, **named)
        pointers, mask = _pointers(tl, pointer, named.get("boundary_check", ()))
        return store(pointers, value.to(pointer.base.dtype.element_ty), mask=mask)

    def advance(pointer: BlockPointer, offsets: Any, **named: Any) -> BlockPointer:
        pairs = zip(pointer.offsets, offsets, strict=True)
        return replace(pointer, offsets=tuple(a + wide(b) for a, b in pairs))

    def make(
        base: Any,
        shape: Any,
        strides: Any,
        offsets: Any,
        block_shape: Any,
        order: Any = None,
        **named: Any,
    ) -> BlockPointer:
        sizes = tuple(int(_plain(n)) for n in block_shape)
        numbers = [tuple(wide(n) for n in some) for some in (shape, strides, offsets)]
        return BlockPointer(base, numbers[0], numbers[1], numbers[2], sizes)

    patches = {"load": loaded, "store": stored, "make_block_ptr": make, "advance": advance}
    for name, function in patches.items():
        scope.set_attr(tl, name, function)


def _plain(value: Any) -> Any:
    """Return the value of a constexpr."""
    return getattr(value, "value", value)


def _wide(tl: Any, number: Any) -> Any:
    number = _plain(number)
    return number if isinstance(number, int) else number.to(tl.int64)


def _pointers(tl: Any, pointer: BlockPointer, checked: Any) -> tuple[Any, Any]:
    """Return the pointers of a block, and the mask of the checked dimensions or None."""
    checked = {int(_plain(n)) for n in _plain(checked) or ()}
    total, mask = None, None
    for dim, size in enumerate(pointer.block):
        index = tl.arange(0, size).to(tl.int64)
        for axis in range(len(pointer.block)):
            if axis != dim:
                index = tl.expand_dims(index, axis)
        index = index + pointer.offsets[dim]
        part = index * pointer.strides[dim]
        total = part if total is None else total + part
        if dim in checked:
            one = (index >= 0) & (index < pointer.shape[dim])
            mask = one if mask is None else mask & one
    return pointer.base + total, mask
