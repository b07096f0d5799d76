"""Watch the functions of torch that Python calls, and remember things about tensors."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from attnlab.tensors.formats import distance

# The tolerances of torch.allclose and isclose, in the order of arguments.
_TOLERANCES = {"rtol": 1e-5, "atol": 1e-8}
Listener = Callable[[str, Sequence[Any], Any], None]


class Watch(TorchFunctionMode):
    """Tells listeners of each function of torch that Python calls: name, arguments, and result or error.

    What a function of torch calls itself, and compiled code, is not seen.
    """

    def __init__(self, *listeners: Listener) -> None:
        super().__init__()
        self._listeners = listeners

    def start(self) -> None:
        """Tell the listeners from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Tell them nothing any more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            self._tell(func, args, kwargs, error)
            raise
        self._tell(func, args, kwargs, result)
        return result

    def _tell(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        given = (*args, *kwargs.values()) if kwargs else args
        if kwargs and _TOLERANCES.keys() & kwargs.keys():
            left = ("input", "other", *_TOLERANCES)[len(args) :]
            given = (*args, *(kwargs.get(one, _TOLERANCES.get(one)) for one in left))
        for listener in self._listeners:
            listener(func.__name__, given, result)


_notes = WeakIdKeyDictionary()


def set_note(tensor: torch.Tensor, note: object) -> None:
    """Remember something about a tensor for as long as there is the tensor."""
    _notes[tensor] = note


def note_of(tensor: Any) -> Any:
    """Return what was last remembered about a tensor, None if nothing was."""
    return _notes.get(tensor) if isinstance(tensor, torch.Tensor) else None


# Tensors that a test multiplies by a matrix before it compares them, as a model's output projection does.
#
# The operands of a product are remembered with its result. If both sides of a comparison are products with
# the same matrix, the comparison is one of the operands, and its tolerance is one of the products.

# Functions of torch: whether their second operand has the matrix's rows as columns.
_PRODUCTS = {"linear": False, "matmul": True, "__matmul__": True, "mm": True}
# Functions whose result has the elements of their argument in the same order.
_KEEPING = frozenset(
    ("float", "double", "to", "cpu", "clone", "detach", "contiguous", "view", "reshape", "flatten")
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A product of rows with a matrix: ``weight`` [columns, width], ``bias`` [columns] or None.

    ``dtype``: of the result as it is compared.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the product of the rows of a tensor, [rows, columns] float64."""
        found = self.rows(tensor) @ self.weight.cpu().double().T
        return found if self.bias is None else found + self.bias.cpu().double()

    def bound(self, bound: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return how far the product may be off, [rows, columns] float64, if its rows are off by ``bound``.

        Twice the rounding to the result's dtype is added, for the products of both sides.
        """
        found: torch.Tensor = self.rows(bound) @ self.weight.cpu().double().abs().T
        return found + self.of(tensor).abs() * torch.finfo(self.dtype).eps

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor as rows of the matrix's width, in float64."""
        return tensor.cpu().double().reshape(-1, self.weight.shape[1])

    def exceeds(
        self, tensor: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float
    ) -> torch.Tensor:
        """Return where the products of two tensors differ by more than a tolerance, [rows, columns] bool."""
        wanted = self.of(expected)
        return distance(self.of(tensor), wanted) > atol + rtol * wanted.abs().nan_to_num(0.0)

    def is_same(self, other: "Projection") -> bool:
        """Answer whether another has the same numbers."""
        pairs = ((self.weight, other.weight), (self.bias, other.bias))
        return all(
            a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    """The operands of a product: the rows, as the test has them, and the matrix."""

    rows: torch.Tensor
    projection: Projection


def follow_product(
    name: str, args: Sequence[Any], result: Any, sizes: Callable[[], Collection[int]]
) -> None:
    """Remember the operands of a product whose left one has one of ``sizes()`` elements."""
    if not isinstance(result, torch.Tensor):
        return
    if name in _KEEPING:
        note = note_of(args[0]) if args else None
        if isinstance(note, _Product) and result.numel() == args[0].numel():
            set_note(result, note)
    elif name in _PRODUCTS and len(args) > 1:
        left, right = args[:2]
        is_matrix = isinstance(right, torch.Tensor) and right.dim() == 2
        if is_matrix and isinstance(left, torch.Tensor) and left.numel() in sizes():
            bias = args[2] if name == "linear" and len(args) > 2 else None
            weight = right.T if _PRODUCTS[name] else right
            made = Projection(weight=weight, bias=bias, dtype=result.dtype)
            set_note(result, _Product(rows=left, projection=made))


def operands(
    actual: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Projection] | None:
    """Return the rows and the matrix of two tensors that are products with the same matrix, or None.

    Rows or a matrix that were changed since are not those of the tensors: the products are made again.
    """
    both = [note_of(one) for one in (actual, expected)]
    if not all(isinstance(one, _Product) for one in both):
        return None
    first, second = both
    if first.rows.shape != second.rows.shape or not first.projection.is_same(second.projection):
        return None
    for note, tensor in zip(both, (actual, expected), strict=True):
        made = note.projection
        again = torch.nn.functional.linear(note.rows, made.weight, made.bias)
        if not torch.equal(again.flatten().to(tensor.dtype), tensor.flatten()):
            return None
    return first.rows, second.rows, first.projection
