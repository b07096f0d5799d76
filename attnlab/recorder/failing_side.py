"""Which side of a failed comparison is wrong: the kernel, its arguments, the expected value or the test.

The output of the call and the test's expected tensor are both compared with attnlab's reference. A difference
that the rounding bound of the kernel covers is no error. If a recorded call made the expected tensor, that
call is compared with its own reference.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.contracts.contract import Target
from attnlab.diagnosis.candidates import locate
from attnlab.diagnosis.captured import diagnose_captured, problem_of, where_it_ran
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.lab.cache_write import ExpectedWrite, expected_write
from attnlab.recorder.arguments import LAUNCH
from attnlab.recorder.patches import Function, Patches
from attnlab.recorder.snapshot import copied
from attnlab.recorder.watch import Projection, follow_product, note_of, operands, set_note
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import distance
from attnlab.tensors.quantised import FP8_DTYPES, has_scaled_output, in_numbers, output_numbers

# Comparisons: what a test passed to a comparison of torch or numpy.
#
# They are observed like ops: wrapped where they are defined and under every name in other modules.

# Actual and expected tensor, atol and rtol; None if a comparison is not one of tensors.
Compared = tuple[torch.Tensor, torch.Tensor, float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """One comparison: both tensors, the tolerances, and whether it passed.

    An element passes if its difference is at most atol + rtol × |expected|. ``reason``: the first line of the
    error, if it raised one. ``is_measured``: the test computed a difference itself; whether it passed, and
    with which tolerance, is unknown (False, 0). ``projection``: what the test multiplied both tensors by
    before it compared them; the tolerances are those of the products.
    """

    actual: torch.Tensor
    expected: torch.Tensor
    atol: float
    rtol: float
    passed: bool
    reason: str = ""
    is_measured: bool = False
    projection: Projection | None = None

    def exchanged(self) -> "Comparison":
        """Return the comparison of a test that passed the output as the expected value."""
        return dataclasses.replace(self, actual=self.expected, expected=self.actual)

    @property
    def share(self) -> float:
        """Return the largest difference in units of the largest expected element; 0 if that is 0."""
        actual, expected = self._compared()
        largest = float(expected.abs().nan_to_num(0.0).max()) if expected.numel() else 0.0
        return float(distance(actual, expected).max()) / largest if largest else 0.0

    @property
    def is_close(self) -> bool:
        """Answer whether the values pass, whatever the dtypes and devices."""
        actual, expected = self._compared()
        return bool(torch.isclose(actual, expected, rtol=self.rtol, atol=self.atol).all())

    def _compared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the test compared, in float64."""
        if self.projection is not None:
            return self.projection.of(self.actual), self.projection.of(self.expected)
        return self.actual.cpu().double(), self.expected.cpu().double()


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
        self.measured: deque[Comparison] = deque(maxlen=keep)  # differences
        self.has_failed = False  # since it was last set, whether recorded or not
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
        """Record nothing inside the context, where attnlab or a comparison itself compares tensors."""
        outer, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = outer

    def follow(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record a comparison by a function or method of torch, or the size of a difference."""
        if self._is_paused or len(args) < 1:
            return
        follow_product(name, args, result, self._sizes)
        if name in _SUBTRACTIONS:
            is_pair = len(args) > 1 and _are_alike(*args[:2]) and isinstance(result, torch.Tensor)
            if is_pair and result.numel() in self._sizes():
                set_note(result, _Difference(*args[:2]))
        elif name in _COMPARED_BY:
            error = result if isinstance(result, RuntimeError) else None
            passed = bool(result.all()) if name == "isclose" and error is None else bool(result)
            self._add(_COMPARED_BY[name], args, {}, passed and error is None, error)
        elif name in _SIZES_OF_TWO and len(args) > 1:
            self._add(_equal, args[:2], {}, None)
        elif name in _SIZES and isinstance(difference := note_of(args[0]), _Difference):
            self._add(_equal, (difference.left, difference.right), {}, None)

    def _wrapper(self, module: str, function: str, original: Function) -> Function:
        read = _READERS[module][function]

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                with self.paused():
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
        passed: bool | None,
        error: Exception | None = None,
    ) -> None:
        """Record a comparison. ``passed``: None if the test computed a difference itself."""
        if self._is_paused:
            return
        try:
            found = read(*args, **kwargs)
            self.has_failed |= not passed and found is not None
            if found is None:
                return
            *tensors, atol, rtol = found
            with self.paused(), torch._C.DisableTorchFunction():
                rows = operands(*tensors)
            *tensors, projection = rows or (*tensors, None)
            if not self._is_of_interest(tensors[0].numel(), bool(passed)):
                return
            if isinstance(error, RuntimeError) and tensors[0].dtype == tensors[1].dtype:
                return  # not about the values
            actual, expected = (copied(t).cpu() if self._host else copied(t) for t in tensors)
            one = Comparison(
                actual=actual,
                expected=expected,
                atol=atol,
                rtol=rtol,
                passed=bool(passed),
                reason=next(iter(str(error or "").splitlines()), ""),
                is_measured=passed is None,
                projection=projection,
            )
            (self.measured if one.is_measured else self.last).append(one)
        except Exception as problem:
            self._on_error("a comparison", problem)

    def _is_of_interest(self, size: int, passed: bool) -> bool:
        """Answer whether tensors of a size may be a recorded output, or a part of it that failed."""
        sizes = self._sizes()
        return size in sizes or (not passed and 0 < size < max(sizes, default=0))


def _assert_close(
    actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, **_: Any
) -> Compared:
    """Return what torch.testing.assert_close compares; the default tolerances are those of the dtypes."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return None
    if actual.shape != expected.shape:
        return None
    if rtol is None or atol is None:
        rtol, atol = torch.testing._comparison.default_tolerances(actual, expected)
    return actual, expected, float(atol), float(rtol)


_equal = functools.partial(_assert_close, rtol=0.0, atol=0.0)


def _reader(first: str, second: str, rtol: float, atol: float) -> Callable[..., Compared]:
    """Return what reads a comparison; ``first``, ``second``: its first parameters, before rtol and atol."""

    def read(*args: Any, **kwargs: Any) -> Compared:
        names = (first, second, "rtol", "atol")
        given = {"rtol": rtol, "atol": atol, **dict(zip(names, args, strict=False)), **kwargs}
        both = (torch.as_tensor(given[name]) for name in names[:2])
        return _assert_close(*both, rtol=given["rtol"], atol=given["atol"])

    return read


_allclose = _reader("input", "other", 1e-05, 1e-08)
_numpy_allclose = _reader("actual", "desired", 1e-07, 0)
_READERS: dict[str, dict[str, Callable[..., Compared]]] = {
    "torch.testing": {"assert_close": _assert_close},
    "torch.testing._comparison": {"assert_close": _assert_close},
    "numpy": {"allclose": _reader("a", "b", 1e-05, 1e-08)},
    "numpy.testing": {"assert_allclose": _numpy_allclose},
    "numpy.testing._private.utils": {"assert_allclose": _numpy_allclose},
}
# Functions and methods of torch: comparisons, and sizes of a difference.
_COMPARED_BY: dict[str, Callable[..., Compared]] = {
    "allclose": _allclose, "isclose": _allclose, "equal": _equal,
}  # fmt: skip
_SUBTRACTIONS = ("sub", "subtract", "rsub")
_SIZES_OF_TWO = ("cosine_similarity", "mse_loss", "l1_loss", "smooth_l1_loss", "dist")
_SIZES = ("abs", "absolute", "norm", "vector_norm", "linalg_vector_norm", "pow", "square", "mul")


@dataclass(frozen=True, slots=True, eq=False)
class _Difference:
    """The two tensors that a difference is of."""

    left: torch.Tensor
    right: torch.Tensor


def _are_alike(left: Any, right: Any) -> bool:
    both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return both and left.shape == right.shape and left.numel() > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Half:
    """The keys or the values of a written cache, as a test's tensor has them.

    - ``columns``: of the call's output. ``factor``: what the stored numbers were multiplied by in the tensor.
    - ``index``: [elements of the tensor] int64, the place of each in [num_slots, num_kv_heads, width].
    """

    columns: slice
    factor: float
    index: torch.Tensor

    def by_slot(self, tensor: torch.Tensor, call: KernelCall) -> torch.Tensor:
        """Return a tensor of the test as [num_slots, num_kv_heads, width] float64."""
        shape = call.buffer[..., self.columns].shape
        found = torch.empty(shape, dtype=torch.float64)
        found.view(-1)[self.index] = tensor.cpu().double().flatten()
        return found


def half_of(call: KernelCall, tensor: torch.Tensor) -> Half | None:
    """Return which half of the written cache a tensor is, None if it is neither.

    The tensor may hold the stored elements, their bytes, or their numbers with or without the scale.
    """
    size = call.query.shape[2]
    for name, columns in (("k_scale", slice(0, size)), ("v_scale", slice(size, None))):
        stored = call.buffer.cpu()[..., columns]
        if tensor.numel() != stored.numel():
            continue
        index = _in_layout(call, torch.arange(stored.numel()).view(stored.shape), name == "k_scale")
        scale = getattr(call, name)
        factors = {1.0, scale} if isinstance(scale, float) else {1.0}
        for factor in factors:
            half = Half(columns=columns, factor=factor, index=index)
            given = tensor.view(stored.dtype) if _holds_bytes(tensor, stored) else tensor
            numbers = (stored.double() * factor).to(_plain(given.dtype)).double()
            if torch.equal(half.by_slot(given, call).nan_to_num(1e9), numbers.nan_to_num(1e9)):
                return half
    return None


def _holds_bytes(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and stored.dtype in FP8_DTYPES


def _plain(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in FP8_DTYPES else dtype


def _in_layout(call: KernelCall, index: torch.Tensor, is_key: bool) -> torch.Tensor:
    """Return [num_slots, num_kv_heads, width] in the order of the caller's cache, flat."""
    paged = index.unflatten(0, (-1, call.block_size))
    if call.layout == "x-split":
        by_head = paged.permute(0, 2, 3, 1)
        x = call.key_cache.shape[4]
        paged = by_head.unflatten(2, (-1, x)).transpose(3, 4) if is_key else by_head
    elif call.layout == "HND":
        paged = paged.transpose(1, 2)
    flat: torch.Tensor = paged.flatten()
    return flat


def errors_of_write(
    call: KernelCall, target: Target, comparison: Comparison
) -> tuple[float, int, bool]:
    """Return the expected value's largest error, its wrong slots, and whether the tolerance is exceeded."""
    half = half_of(call, comparison.actual)
    if half is None:
        return 0.0, 0, False
    call = call.cpu()
    right: ExpectedWrite = expected_write(call, target)
    given = comparison.expected
    if _holds_bytes(given, call.buffer):
        given = given.view(call.buffer.dtype)
    expected = half.by_slot(given, call)
    correct = right.numbers[..., half.columns] * half.factor
    bound = right.bound[..., half.columns] * half.factor
    error = distance(expected, correct)
    wrong = error > bound
    allowed = comparison.atol + comparison.rtol * expected.abs().nan_to_num(0.0)
    return (
        float(error.max()),
        int(wrong.flatten(1).any(1).sum()),
        bool((wrong & (error > allowed)).any()),
    )


# Which elements of a call's output a tensor of a test has.
#
# A test may compare the output itself, or what it made of it: another dtype or device, another shape or
# order of dimensions, some rows, heads or elements. The tensor is recognised by its values.

_NAN = 1e9  # stands for NaN where values are compared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """The elements of an output that a tensor has.

    - ``index``: [elements of the tensor] int64, the place of each in the flat output.
    - ``factor``: what the tensor must be multiplied by to be the numbers of the output.
    """

    index: torch.Tensor
    factor: float = 1.0
    is_whole: bool = True

    def spread(self, tensor: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Return ``rest``, of the output's shape, in float64 with the elements of a tensor of the test."""
        found = rest.double().clone(memory_format=torch.contiguous_format)
        found.view(-1)[self.index] = tensor.cpu().double().flatten() * self.factor
        return found

    def is_plain(self, call: KernelCall, tensor: torch.Tensor) -> bool:
        """Answer whether the test's tensor is at least as precise as the output."""
        kinds = (tensor.dtype, call.buffer.dtype)
        precise, own = (torch.finfo(kind).eps for kind in kinds)
        return bool(precise <= own)

    def cells(self, shape: torch.Size) -> torch.Tensor:
        """Return how many elements of each row and head the tensor has, [num_tokens, num_heads] int64."""
        places = torch.bincount(self.index // shape[2], minlength=shape[0] * shape[1])
        return places.view(shape[0], shape[1])


def output_matches(call: KernelCall, tensor: torch.Tensor) -> bool:
    """Answer whether a tensor has the numbers of the whole output, in any shape and dtype; NaN equals NaN."""
    if call.output is None:
        return False
    if call.spec.writes_cache:
        return half_of(call, tensor) is not None
    found = match_of(call, tensor)
    return found is not None and found.is_whole


def match_of(call: KernelCall, tensor: torch.Tensor) -> Match | None:
    """Return which elements of a call's output a tensor has; None if it is another.

    A scaled output may have been multiplied by its scale already.
    """
    if call.output is None or not tensor.numel() or not tensor.is_floating_point():
        return None
    output, tensor = call.output.cpu(), tensor.cpu()
    if tensor.numel() > output.numel():
        return None
    if output.dtype == torch.float32 and tensor.dtype == torch.float64:
        tensor = tensor.float()  # the call may have been made in float64
    whole = _whole(call, output, tensor) if tensor.numel() == output.numel() else None
    if whole is not None or has_scaled_output(call):
        return whole
    return _part(_comparable(output, tensor.dtype), _comparable(tensor, tensor.dtype))


def _whole(call: KernelCall, output: torch.Tensor, tensor: torch.Tensor) -> Match | None:
    """Return the match of a tensor with as many elements as the output, its dimensions in any order."""
    scale = 1.0 if call.output_scale is None else call.output_scale
    pairs = [(scale, output.double()), (1.0, output_numbers(call, output))]
    given = _comparable(tensor, tensor.dtype).flatten()
    for factor, numbers in pairs if has_scaled_output(call) else pairs[1:]:
        values = _comparable(numbers, tensor.dtype)
        for order in itertools.permutations(range(3)):
            if torch.equal(values.permute(order).flatten(), given):
                places = torch.arange(output.numel()).view(output.shape)
                return Match(index=places.permute(order).flatten(), factor=factor)
    return None


def _part(output: torch.Tensor, tensor: torch.Tensor) -> Match | None:
    """Return the match of a tensor with some rows, heads or elements of an output.

    Rows of equal numbers alone are no match: padding and other outputs have them, too.
    """
    size, width = output.shape[2], tensor.shape[-1] if tensor.dim() else 1
    width = size if width % size == 0 else width
    vectors = tensor.reshape(-1, width)
    if width > size or bool((vectors == vectors[:, :1]).all()):
        return None
    for first in dict.fromkeys((0, size - width, *range(0, size - width + 1, width))):
        index = _cells_of(output[..., first : first + width].reshape(-1, width), vectors)
        if index is not None:
            columns = torch.arange(first, first + width)
            places = (index[:, None] * size + columns).flatten()
            return Match(index=places, is_whole=len(places.unique()) == output.numel())
    return None


def _cells_of(cells: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor | None:
    """Return the cell of each vector, [n] int64; equal cells are taken in turn. None if one has no cell."""
    places: dict[bytes, deque[int]] = defaultdict(deque)
    wanted = [one.numpy().tobytes() for one in vectors.contiguous()]
    known = set(wanted)
    for at, one in enumerate(cells.contiguous()):
        if (data := one.numpy().tobytes()) in known:
            places[data].append(at)
    found = []
    for data in wanted:
        if not places[data]:
            return None
        found.append(places[data][0])
        places[data].rotate(-1)
    return torch.tensor(found)


def _comparable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a tensor as a test has them in ``dtype``, in float64; no NaN, one zero."""
    return tensor.to(dtype).double().nan_to_num(_NAN, torch.inf, -torch.inf) + 0.0


# Contents of the cache.
_IN_CACHE = "newest_slot_zero", "newest_slot_nan", "newest_slot_unwritten"
# Arguments that two calls may differ in, and what a difference is called.
_ARGUMENTS = (
    "softcap", "sliding_window", "window_right", "causal", "alibi_slopes", "sinks", "k_scale", "v_scale",
    "q_scale", "output_scale", "mm_prefix_range", "chunk_lookback", "qq_bias", "rswa_prefix_lens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """What is wrong with a call and its comparison.

    - ``side``: "the kernel", "the arguments of the call", "the expected value", "the kernel and the expected
      value", "the tolerance", "the test's dtypes", "the test's arguments", "neither" or "unknown".
    - ``diagnosis``: that of the call's output. ``comparison``: the test's, or None if it compared
      something else.
    """

    side: str
    evidence: str
    diagnosis: Diagnosis
    comparison: Comparison | None = None
    read_as: tuple[str, ...] = ()


def judge(
    call: KernelCall,
    comparison: Comparison | None,
    *,
    maker: KernelCall | None = None,
    is_guess: bool = False,
) -> Judgement:
    """Return which side is wrong. ``comparison.actual`` must be the call's output, or a part of it.

    ``maker``: the recorded call whose output the expected value is, if there is one. If both calls are right,
    and their arguments differ, the test compares two different things. ``is_guess``: nobody said that the
    call is attention, so that a wrong expected value means that it is not, or another attention. Raises
    InvalidCall for a call without a reference.
    """
    diagnosis = diagnose_captured(call, Case())
    if comparison is None or diagnosis.status == "not decided":
        side = _side_of_output(diagnosis) if diagnosis.is_wrong else "unknown"
        evidence = _of_output(diagnosis)
        if comparison is None and diagnosis.status == "nothing wrong":
            evidence += "; no comparison of the test was recognised as one of this output"
    else:
        off, rows, beyond = _errors_of_expected(call, comparison)
        noun = "slots" if call.spec.writes_cache else "rows"
        expected = "expected value" if maker is None else "expected value, from another call,"
        side, evidence = _decide(diagnosis, comparison, off, f"{rows} {noun}", beyond, expected)
        other = None if maker is None else _diagnosis(maker)
        if other is not None and other.status not in ("rejected", "not decided"):
            if side == "the kernel and the expected value" and not is_guess:
                side = _side_of_output(diagnosis)
            if side == "the expected value" and not other.is_wrong and maker is not None:
                side, evidence = "the test's arguments", _other_arguments(call, maker)
                evidence += _of_expected(call, comparison)
        if side == "the expected value" and _is_at_bottom_right(call, comparison):
            evidence += f"; it is exact {_BOTTOM_RIGHT}"
        elif side == "the expected value":
            evidence += _of_expected(call, comparison)
        own = dataclasses.replace(comparison, expected=comparison.actual)
        if side == "the kernel" and _is_at_bottom_right(call, own):
            side = "the test's arguments"
            evidence += f"; the output is exact {_BOTTOM_RIGHT}"
    return Judgement(
        side=_or_arguments(side, call.origin.op or ""),
        evidence=evidence,
        diagnosis=diagnosis,
        comparison=comparison,
        read_as=call.read_as,
    )


def _or_arguments(side: str, op: str) -> str:
    """Return a side of a call with unchecked arguments, or of attention that the test computes."""
    if side == "the kernel" and op.startswith(UNRECORDED):
        return "the kernel, or its arguments"
    if side == "the expected value" and op.startswith((*TORCHS, LAUNCH)):
        return "the expected value, or the arguments"
    return side


_BOTTOM_RIGHT = (
    "with the causal mask at the bottom right, where the last row sees all keys; is_causal=True of "
    "scaled_dot_product_attention aligns it at the top left, where row i sees keys 0 to i"
)


def _is_at_bottom_right(call: KernelCall, comparison: Comparison) -> bool:
    """Answer whether the expected value of dense causal attention is right if the last row sees all keys."""
    keys, rows = call.value_cache.shape[-1], call.max_query_len
    is_dense = call.block_table.shape[1] == 1 and bool((call.seq_lens == rows).all())
    if call.spec.writes_cache or not call.causal or not is_dense or keys <= rows:
        return False
    lens = torch.full_like(call.seq_lens, keys)
    aligned = dataclasses.replace(call, seq_lens=lens, max_seq_len=keys)
    return not _errors_of_expected(aligned, comparison)[2]


def _of_expected(call: KernelCall, comparison: Comparison) -> str:
    """Return how a wrong expected value differs from the attention of the arguments, "" if that is unknown.

    It is diagnosed as an output of the call. What a test computed with more precision is not rounded as the
    output's dtype rounds, which the bounds cover.
    """
    match = match_of(call, comparison.actual)
    if call.spec.writes_cache or match is None or not match.is_whole:
        return ""
    expected = match.spread(comparison.expected, _rest(call, match)).to(call.buffer.dtype)
    found = _diagnosis(dataclasses.replace(call, output=expected))
    if found is None or found.status not in ("explained", "ambiguous", "described"):
        return ""
    names = [one.text for one in found.explanations[:_MOST_CAUSES]]
    text = " or ".join(names) if found.status != "described" else found.conclusion
    return f"; in the expected value, {text}"


def agrees(call: KernelCall, comparison: Comparison, *, exactly: bool) -> bool:
    """Answer whether the expected value of a comparison is the attention of a call within the tolerance.

    Without ``exactly``: whether the output is, up to rounding.
    """
    if not exactly:
        comparison = dataclasses.replace(comparison, expected=comparison.actual, atol=0.0, rtol=0.0)
    return not _errors_of_expected(call, comparison)[2]


UNRECORDED = "code that was not recorded"
CHAIN = "softmax(q @ k.T) @ v"
TORCHS = ("torch.", CHAIN)  # attention whose arguments a test computes: they are as likely wrong
_MOST_CAUSES = 2  # in a text
_COARSE = 0.25  # of the largest element: a rounding bound that allows more excludes no fault
_NARROW = (torch.float16, torch.bfloat16)


def stand_in(call: KernelCall, comparison: Comparison) -> KernelCall | None:
    """Return an exact call with the other output of a comparison, that of code that was not recorded.

    ``comparison.expected`` must be the call's output. The other output is taken to be rounded as the
    narrowest dtype that holds the arguments rounds: a test converts them for its reference. None if the
    call is not exact, or if a GPU may have rounded float32 as TF32.
    """
    match, found = match_of(call, comparison.expected), _diagnosis(call)
    if match is None or not match.is_whole or found is None or found.status != "nothing wrong":
        return None
    call = call.cpu()
    tensors = {name: getattr(call, name) for name in ("query", "key", "value", *_CACHES)}
    kind = next((kind for kind in _NARROW if _holds(kind, tensors.values())), torch.float32)
    if kind == torch.float32 and call.origin.platform is not None:
        return None
    output = match.spread(comparison.actual, call.buffer)
    narrow = {name: one.to(kind) for name, one in tensors.items() if one is not None}
    return dataclasses.replace(call, **narrow, output=output.to(kind), before=None)


_CACHES = ("key_cache", "value_cache")


def _holds(kind: torch.dtype, tensors: Iterable[torch.Tensor | None]) -> bool:
    """Answer whether a dtype has all the numbers of some tensors."""
    return all(one is None or torch.equal(one.to(kind).to(one.dtype), one) for one in tensors)


def _diagnosis(call: KernelCall) -> Diagnosis | None:
    """Return the diagnosis of a call, or None if it has no reference or no output."""
    try:
        return diagnose_captured(call, Case())
    except AttnLabError:
        return None


def _other_arguments(call: KernelCall, maker: KernelCall) -> str:
    """Return in which arguments two calls differ that are both right."""
    both = "the output and the expected value, from another call, are each exact up to rounding"
    names = [_difference(call, maker, name) for name in _ARGUMENTS]
    scales = [
        one.query.shape[2] ** -0.5 if one.sm_scale is None else one.sm_scale
        for one in (call, maker)
    ]
    if scales[0] != scales[1]:
        names.insert(0, f"sm_scale ({scales[0]:.6g} and {scales[1]:.6g})")
    for name in ("query", "seq_lens", "query_start_loc"):
        names.append(name if _differs(getattr(call, name), getattr(maker, name)) else "")
    found = [name for name in names if name]
    return f"{both}; the calls differ in {', '.join(found) or 'their keys and values'}"


def _difference(call: KernelCall, maker: KernelCall, name: str) -> str:
    one, other = getattr(call, name), getattr(maker, name)
    if not _differs(one, other):
        return ""
    is_tensor = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
    return name if is_tensor else f"{name} ({one} and {other})"


def _differs(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.cpu().double(), other.cpu().double()
        return one.shape != other.shape or not torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return True
    return (one or 0) != (other or 0)


def _decide(
    diagnosis: Diagnosis, comparison: Comparison, off: float, rows: str, beyond: bool, expected: str
) -> tuple[str, str]:
    """Return the side and the evidence.

    ``off``: the largest error of the expected value; ``rows``: how many rows or slots are above the bound, in
    words; ``beyond``: whether it exceeds the tolerance somewhere; ``expected``: what to call it.
    """
    if diagnosis.status == "rejected":
        return _side_of_output(diagnosis), f"the op raised: {diagnosis.rejection}"
    output = _of_output(diagnosis)
    is_off = f"{output}; the {expected} is off by up to {off:.3g} in {rows}"
    if diagnosis.is_wrong and beyond:
        return "the kernel and the expected value", is_off
    if diagnosis.is_wrong:
        exact = f"{output}; the {expected} is within {off:.3g} of the exact result"
        return _side_of_output(diagnosis), exact
    if beyond:
        return "the expected value", is_off
    return _of_right_values(comparison, off, expected, rows)


def _of_right_values(
    comparison: Comparison, off: float, expected: str, rows: str
) -> tuple[str, str]:
    """Return the side and the evidence if the output is right, and the expected value, but for ``rows``, too.

    Errors of these rows are above their rounding bound, and no more than the tolerance.
    """
    allowed = f"atol {comparison.atol:g}, rtol {comparison.rtol:g}"
    exact = f"output and {expected} are both exact up to rounding ({off:.3g} in the latter)"
    if not rows.startswith("0 "):
        exact = f"the output is exact up to rounding, the {expected} within {off:.3g} in {rows}"
    if comparison.is_measured:
        return "neither", f"{exact}; the test's own limit is not known"
    if comparison.passed:
        return "neither", f"output and {expected} agree within {allowed}"
    if not comparison.is_close and comparison.share > _COARSE:
        return (
            "unknown",
            f"the {expected} is within {off:.3g} of the exact result; the output differs from it by "
            f"{comparison.share:.0%} of the largest element, which its coarse rounding, as of FP8, allows: "
            "a wrong output is not excluded",
        )
    if not comparison.is_close:
        return ("the tolerance", f"{exact}, but {allowed} does not allow their difference")
    kinds = [_dtype(one) for one in (comparison.actual, comparison.expected)]
    if kinds[0] != kinds[1]:
        return (
            "the test's dtypes",
            f"the test compares {kinds[0]} with {kinds[1]}; the values of output and {expected} agree "
            f"within {allowed}",
        )
    reason = f": {comparison.reason}" if comparison.reason else ""
    return "unknown", f"output and {expected} agree within {allowed}; the comparison failed{reason}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_output(diagnosis: Diagnosis) -> str:
    if diagnosis.status == "not decided":
        return "; ".join(diagnosis.sentences()[:2])
    if not diagnosis.is_wrong:
        return "the output is exact up to rounding"
    if diagnosis.status == "rejected":
        return f"the op raised: {diagnosis.rejection}"
    noun = "slots" if diagnosis.pattern.of("slots") else "rows"
    return f"the output is off by up to {diagnosis.largest:.3g} in {diagnosis.wrong_rows} {noun}"


def _side_of_output(diagnosis: Diagnosis) -> str:
    """Return "the arguments of the call" if the call violates a contract, otherwise "the kernel"."""
    violated = any(one.effect != "harmless" for one in diagnosis.violations)
    name = "" if diagnosis.cause is None else diagnosis.cause.name
    if violated or name in _IN_CACHE:
        return "the arguments of the call"
    return "the kernel"


def _errors_of_expected(call: KernelCall, comparison: Comparison) -> tuple[float, int, bool]:
    """Return the expected value's largest error, its wrong rows, and whether it exceeds the tolerance."""
    if call.spec.writes_cache:
        target = Target.of(where_it_ran(call, Case()).case)
        return errors_of_write(call, target, comparison)
    call = call.cpu()
    match = match_of(call, comparison.actual)
    if match is None:
        return 0.0, 0, False
    expected = match.spread(comparison.expected, _rest(call, match))
    compared = match.cells(call.buffer.shape) > 0
    problem = problem_of(call)
    found = locate(problem, expected)
    error = found.error.double().masked_fill(~compared, 0.0)
    size = expected.abs().nan_to_num(0.0, 0.0, 0.0)
    rounding = size * _unit(comparison.expected.dtype)
    rounding *= not match.is_plain(call, comparison.actual)
    is_wrong = found.is_wrong & compared & (error > rounding.amax(2))
    rows = torch.nonzero(is_wrong.any(1)).flatten()
    beyond = False
    off = float(error.max()) if error.numel() else 0.0
    if len(rows):
        correct = problem.correct_rows(rows, torch.arange(expected.shape[1])).output.double()
        if comparison.projection is not None:
            return off, len(rows), _product_exceeds(comparison, match, expected, rows, correct)
        allowed = comparison.atol * match.factor + comparison.rtol * size + rounding
        exceeds = distance(expected[rows], correct) > allowed[rows]
        beyond = bool((exceeds & is_wrong[rows][..., None]).any())
    return off, int(is_wrong.any(1).sum()), beyond


def _product_exceeds(
    comparison: Comparison,
    match: Match,
    expected: torch.Tensor,
    rows: torch.Tensor,
    correct: torch.Tensor,
) -> bool:
    """Answer whether the product of an expected value exceeds the tolerance; only ``rows`` are wrong."""
    right = expected.clone()
    right[rows] = correct
    first, second = (one.flatten()[match.index] / match.factor for one in (right, expected))
    assert comparison.projection is not None
    exceeds = comparison.projection.exceeds(first, second, comparison.atol, comparison.rtol)
    return bool(exceeds.any())


def _unit(dtype: torch.dtype) -> float:
    """Return the relative size of a rounding to a dtype."""
    return float(torch.finfo(dtype).eps) / 2 if dtype.is_floating_point else 0.0


def _rest(call: KernelCall, match: Match) -> torch.Tensor:
    """Return numbers of the output's shape where a test compared none: the output, and the correct numbers in
    heads of which it compared a part."""
    rest = in_numbers(call).buffer.double().clone()
    cells = match.cells(rest.shape)
    rows = torch.nonzero(((cells > 0) & (cells < rest.shape[2])).any(1)).flatten()
    if len(rows):
        correct = problem_of(call).correct_rows(rows, torch.arange(rest.shape[1]))
        rest[rows] = correct.output.double()
    return rest
