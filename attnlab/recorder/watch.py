"""Watch the functions of torch that Python calls, and remember things about tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

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
