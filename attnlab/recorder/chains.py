"""Attention that is written out in torch, softmax(q @ k.T) @ v: recorded as one call, with its weights.

Products, and what is made of them, are followed by :class:`attnlab.recorder.watch.Watch`. A product whose
first factor is the exponential, or the softmax, of another product of two tensors is attention.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.recorder.arguments import Reading
from attnlab.recorder.ops import other_readings, read_dense
from attnlab.recorder.watch import note_of, set_note

_EXPONENTIALS = ("softmax", "exp", "exp_", "exp2", "exp2_")
_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm")
# Dimensions of a product; the others are those of its batch.
_ROWS, _KEYS, _SIZE = "row", "key", "size"
_MOST = 1 << 26  # elements of a tensor that is followed
_NOISE = 1e-3  # of scores that are equal but for rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What a tensor was made of: queries [*batch, rows, size] and keys [*batch, keys, size].

    ``are_weights``: an exponential was taken since.
    """

    query: torch.Tensor
    key: torch.Tensor
    are_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Attention that was written out: ``weights`` [*batch, rows, keys], and where, as "module.py:line"."""

    scores: Scores
    weights: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    place: str


def follow(name: str, args: Sequence[Any], result: Any) -> Chain | None:
    """Follow one call of a torch function; return the attention that it completes, if it does."""
    if type(result) is not torch.Tensor or result.dim() < 2 or result.numel() > _MOST:
        return None
    if name in _PRODUCTS:
        return _of_product(name, args, result)
    for one in args[0] if args and isinstance(args[0], (list, tuple)) else args:
        scores = note_of(one)
        if isinstance(scores, Scores):
            weights = scores.are_weights or name in _EXPONENTIALS
            set_note(result, dataclasses.replace(scores, are_weights=weights))
            break
    return None


def _of_product(name: str, args: Sequence[Any], result: torch.Tensor) -> Chain | None:
    """Note the factors of a product, or return the attention whose values are its second factor."""
    if name == "einsum":
        equation, *factors = args
        factors = list(factors[0]) if isinstance(factors[0], (list, tuple)) else factors
    else:
        equation, factors = "", list(args[name == "baddbmm" :][:2])
    if len(factors) != 2 or not all(isinstance(one, torch.Tensor) for one in factors):
        return None
    letters = _letters(equation, factors)
    if letters is None:
        return None
    first, second, out = letters
    for at, (names, others) in enumerate(((first, second), (second, first))):
        scores = note_of(factors[at])
        if isinstance(scores, Scores) and scores.are_weights and (at == 0 or equation):
            named = _named(names, others, out, values=True)
            if named is not None:
                value = _ordered(factors[1 - at], others, named, (_KEYS, _SIZE))
                weights = _ordered(factors[at], names, named, (_ROWS, _KEYS))
                output = _ordered(result, out, named, (_ROWS, _SIZE))
                return Chain(
                    scores=scores, weights=weights, value=value, output=output, place=_place()
                )
    at = 0 if out[-1] in second else 1
    query, key = (first, second)[at], (second, first)[at]
    named = _named(query, key, out, values=False)
    if named is not None:
        scores = Scores(
            query=_ordered(factors[at], query, named, (_ROWS, _SIZE)),
            key=_ordered(factors[1 - at], key, named, (_KEYS, _SIZE)),
        )
        set_note(result, scores)
    return None


def _letters(equation: str, factors: Sequence[torch.Tensor]) -> tuple[str, str, str] | None:
    """Return the letters of both factors and of the result; of a product without an equation, its own."""
    if equation:
        left, arrow, out = equation.replace(" ", "").partition("->")
        first, comma, second = left.partition(",")
        if not (arrow and comma and out) or "." in equation:
            return None
        return first, second, out
    batch = "abcdefgh"[: max(one.dim() for one in factors) - 2]
    if min(one.dim() for one in factors) < 2:
        return None
    first, second = (batch[len(batch) + 2 - one.dim() :] for one in factors)
    return f"{first}ij", f"{second}jk", f"{batch}ik"


def _named(left: str, right: str, out: str, *, values: bool) -> dict[str, str] | None:
    """Return which letter is a row, a key and an element, and those of the batch, in the order of ``out``.

    Of scores: left is the query, right the key. Of an output: left are the weights, right the values.
    """
    shared = [one for one in left if one in right and one not in out]
    of_left = [one for one in out if one in left and one not in right]
    of_right = [one for one in out if one in right and one not in left]
    if len(shared) != 1 or not of_left or len(of_right) != 1:
        return None
    if values and left[-1] != shared[0]:
        return None
    row = left[-2] if values else of_left[-1]
    inner, last = (_KEYS, _SIZE) if values else (_SIZE, _KEYS)
    named = {_ROWS: row, inner: shared[0], last: of_right[0]}
    order = left if values else out
    named["batch"] = "".join(one for one in order if one not in named.values())
    return named


def _ordered(
    tensor: torch.Tensor, letters: str, named: dict[str, str], last: tuple[str, str]
) -> torch.Tensor:
    """Return a view [*batch, *last]; a dimension of the batch that the tensor lacks has size 1."""
    order = [*named["batch"], *(named[one] for one in last)]
    for one in order:
        if one not in letters:
            tensor, letters = tensor[None], f"{one}{letters}"
    return tensor.permute([letters.index(one) for one in order])


def _place() -> str:
    """Return the file and line of the test or of what it calls, as "name.py:line"."""
    frame: Any = sys._getframe()
    own, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    while frame is not None and frame.f_code.co_filename.startswith((own, torchs)):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def reading_of(chain: Chain) -> Reading | None:
    """Return a chain as a call without a mask and with the usual scale; None if its parts do not fit.

    What else it may be are its other readings: causal, or with the weights that it had.
    """
    batch = torch.broadcast_shapes(chain.weights.shape[:-2], chain.value.shape[:-2])
    shapes = (chain.scores.query.shape, chain.scores.key.shape)
    rows, keys = chain.weights.shape[-2:]
    of_scores = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    if (rows, keys) != (shapes[0][-2], shapes[1][-2]) or math.prod(of_scores) != math.prod(batch):
        return None
    given = {
        "query": chain.scores.query.expand(*of_scores, *shapes[0][-2:]),
        "key": chain.scores.key.expand(*of_scores, *shapes[1][-2:]),
        "value": chain.value.expand(*batch, *chain.value.shape[-2:]),
    }
    heads = batch[-1] if len(batch) > 1 else 1  # as torch's own attention has them
    as_4 = {name: one.reshape(-1, heads, *one.shape[-2:]) for name, one in given.items()}
    reading = Reading(fields={}, guessed=("causal",))
    read_dense(as_4, reading)
    reading.weights = chain.weights.expand(*batch, rows, keys).reshape(-1, heads, rows, keys)
    return reading


def readings_of(reading: Reading) -> Iterator[Reading]:
    """Yield the other ways to read a call: those of its arguments, then those of its weights.

    A window may count the row's own key or not. Heads that have the same keys and values may share them. The
    weights state the scale and the mask.
    """
    for one in (reading, *other_readings(reading)):
        if one is not reading:
            yield one
        yield from _of_window(one)
    if reading.weights is None:
        return
    query, key, value = _dense_parts(reading)
    heads = _distinct(torch.cat([key, value], -1))
    if heads is not None:
        key, value = key[:, heads], value[:, heads]
        shared = _read_as(reading, f"{len(heads)} KV heads", query, key, value)
        yield shared
        yield from other_readings(shared)
    scale, bias = _of_weights(query, key, reading.weights)
    yield _read_as(
        reading,
        "the scale and the mask of its weights",
        query,
        key,
        value,
        scale=scale,
        attn_mask=bias,
    )


def _of_window(reading: Reading) -> Iterator[Reading]:
    """Yield a call with an unknown argument for a window as one of so many keys, and of one key more."""
    for name, value in reading.unknown.items():
        if "window" not in name or type(value) is not int or not reading.fields.get("causal", True):
            continue
        unknown = {one: given for one, given in reading.unknown.items() if one != name}
        is_none = value < 1 or value >= int(reading.fields["seq_lens"].max())
        for keys in (0,) if is_none else (value, value + 1):
            text = [f"{name}={value} as {keys} keys, the row's own included"] if keys else []
            yield dataclasses.replace(
                reading,
                fields={**reading.fields, "sliding_window": keys},
                unknown=unknown,
                read_as=[*reading.read_as, *text],
            )


def _dense_parts(reading: Reading) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value as [batch, heads, tokens, size]."""
    fields = reading.fields
    query = fields["query"].unflatten(0, (len(fields["seq_lens"]), -1)).transpose(1, 2)
    return query, fields["key_cache"], fields["value_cache"]


def _read_as(
    reading: Reading, text: str, query: Any, key: Any, value: Any, **arguments: Any
) -> Reading:
    """Return a reading of other arguments, with the recorded output."""
    other = dataclasses.replace(reading, read_as=[*reading.read_as, text])
    read_dense({"query": query, "key": key, "value": value, **arguments}, other)
    other.fields["output"] = reading.fields["output"]
    return other


def _distinct(heads: torch.Tensor) -> list[int] | None:
    """Return the first of each group of equal heads, [batch, heads, tokens, size]; None if all differ."""
    count = heads.shape[1]
    first = [
        next(j for j in range(i + 1) if torch.equal(heads[:, i], heads[:, j])) for i in range(count)
    ]
    found = sorted(set(first))
    is_even = all(first.count(one) * len(found) == count for one in found)
    return found if is_even and len(found) < count else None


def _of_weights(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Return the scale of scores that weights show, and what was added to them, -inf for keys without weight.

    Weights are exp(scale × score + bias), but for a factor of each row.
    """
    group = query.shape[1] // key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(group, 1).mT
    seen, logs = weights > 0, weights.double().log()
    count = seen.sum(-1, keepdim=True).clamp(min=1)

    def centred(numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers.masked_fill(~seen, 0.0)
        return (numbers - numbers.sum(-1, keepdim=True) / count).masked_fill(~seen, 0.0)

    x, y = centred(scores), centred(logs)
    scale = float((x * y).sum() / (x * x).sum().clamp(min=1e-30))
    rest = y - scale * x
    if float(rest.abs().max()) > _NOISE * max(1.0, float(y.abs().max())):
        scale = query.shape[-1] ** -0.5
        rest = y - scale * x
    else:
        rest = torch.zeros_like(rest)
    return scale, rest.masked_fill(~seen, -torch.inf)
