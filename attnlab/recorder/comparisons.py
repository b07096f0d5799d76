"""Comparisons: what a test passed to a comparison of torch or numpy.

They are observed like ops: wrapped where they are defined and under every name in other modules.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.recorder.patches import Function, Patches
from attnlab.recorder.snapshot import copied

# Actual and expected tensor, atol and rtol; None if a comparison is not one of tensors.
Compared = tuple[torch.Tensor, torch.Tensor, float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """One comparison: both tensors, the tolerances, and whether it passed.

    An element passes if its difference is at most atol + rtol × |expected|. ``reason``: the first line of the
    error, if it raised one.
    """

    actual: torch.Tensor
    expected: torch.Tensor
    atol: float
    rtol: float
    passed: bool
    reason: str = ""

    @property
    def is_close(self) -> bool:
        """Answer whether the values pass, whatever the dtypes and devices."""
        actual, expected = (one.cpu().double() for one in (self.actual, self.expected))
        return bool(torch.isclose(actual, expected, rtol=self.rtol, atol=self.atol).all())


class Comparisons:
    """Records the last comparisons of tensors, from :meth:`start` to :meth:`stop`.

    Only tensors with as many elements as a recorded output are copied, and smaller ones if the comparison
    failed: ``sizes()`` returns these numbers. ``host``: copy them to CPU memory. An error while recording
    goes to ``on_error``, and the comparison takes place as without attnlab.
    """

    def __init__(
        self,
        *,
        keep: int,
        sizes: Callable[[], Collection[int]],
        on_error: Callable[[str, Exception], None],
        host: bool = False,
    ) -> None:
        self.last: deque[Comparison] = deque(maxlen=keep)
        self._sizes = sizes
        self._on_error = on_error
        self._host = host
        self._is_paused = False
        self._patches = Patches(_READERS, self._wrapper)

    def start(self) -> None:
        """Wrap the functions."""
        self._patches.install()

    def stop(self) -> None:
        """Put the functions back."""
        self._patches.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the context, where attnlab itself compares tensors."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _wrapper(self, module: str, function: str, original: Function) -> Function:
        read = _READERS[module][function]

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                result = original(*args, **kwargs)
            except (AssertionError, RuntimeError) as error:
                self._add(read, args, kwargs, False, error)
                raise
            self._add(read, args, kwargs, result is None or bool(result))
            return result

        return observed

    def _add(
        self,
        read: Callable[..., Any],
        args: Any,
        kwargs: Any,
        passed: bool,
        error: Exception | None = None,
    ) -> None:
        if self._is_paused:
            return
        try:
            found = read(*args, **kwargs)
            if found is None or not self._is_of_interest(found[0].numel(), passed):
                return
            *tensors, atol, rtol = found
            if isinstance(error, RuntimeError) and tensors[0].dtype == tensors[1].dtype:
                return  # not about the values
            actual, expected = (copied(t).cpu() if self._host else copied(t) for t in tensors)
            one = Comparison(
                actual=actual,
                expected=expected,
                atol=atol,
                rtol=rtol,
                passed=passed,
                reason=next(iter(str(error or "").splitlines()), ""),
            )
            self.last.append(one)
        except Exception as problem:
            self._on_error("a comparison", problem)

    def _is_of_interest(self, size: int, passed: bool) -> bool:
        """Answer whether tensors of a size may be a recorded output, or a part of it that failed."""
        sizes = self._sizes()
        return size in sizes or (not passed and 0 < size < max(sizes, default=0))


def _assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    **_: Any,
) -> Compared:
    """Return what torch.testing.assert_close compares; the default tolerances are those of the dtypes."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return None
    if actual.shape != expected.shape:
        return None
    if rtol is None or atol is None:
        rtol, atol = torch.testing._comparison.default_tolerances(actual, expected)
    return actual, expected, float(atol), float(rtol)


def _allclose(
    input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Compared:
    """Return what torch.allclose compares."""
    return _assert_close(input, other, rtol=rtol, atol=atol)


def _equal(input: Any, other: Any) -> Compared:
    """Return what torch.equal compares."""
    return _assert_close(input, other, rtol=0.0, atol=0.0)


def _numpy_allclose(
    actual: Any, desired: Any, rtol: float = 1e-07, atol: float = 0, *_: Any, **__: Any
) -> Compared:
    """Return what numpy.testing.assert_allclose compares."""
    return _assert_close(torch.as_tensor(actual), torch.as_tensor(desired), rtol=rtol, atol=atol)


_READERS: dict[str, dict[str, Callable[..., Compared]]] = {
    "torch.testing": {"assert_close": _assert_close},
    "torch.testing._comparison": {"assert_close": _assert_close},
    "torch": {"allclose": _allclose, "equal": _equal},
    "numpy.testing": {"assert_allclose": _numpy_allclose},
    "numpy.testing._private.utils": {"assert_allclose": _numpy_allclose},
}
