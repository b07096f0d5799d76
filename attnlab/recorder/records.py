"""Read calls of a library's ops as their records state: :mod:`attnlab.kernels.binding`, backwards.

A record states each argument as an expression in the names of a call (:mod:`attnlab.library.op`). Most are a
name, or a view of a tensor, and so state the name, too. What was read is bound again by the record, and the
arguments that differ from those of the call are not understood. The values of such a call are not checked.
"""

import ast
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCall
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import Target
from attnlab.kernels import by_name
from attnlab.kernels.binding import Values, bind, evaluate, finish, is_default
from attnlab.library.op import Op, libraries, names_in, ops_of
from attnlab.recorder.arguments import (
    BoundArguments,
    Reading,
    RecordedOp,
    call_of_reading,
    shown,
    table_of_lists,
)
from attnlab.tensors.call import KernelCall, Origin

_CACHES = ("key_cache", "value_cache")
_STATED = (
    *("query", "key", "value", "output", "block_table", "seq_lens", "query_start_loc", "sm_scale"),
    *("softcap", "alibi_slopes", "sinks", "causal", "k_scale", "v_scale", "kv_cache_dtype"),
    *("sliding_window", "max_query_len", "max_seq_len"),
)  # fmt: skip
# Names whose values are read and copied as they are, or that only a binding makes.
_NOT_COMPARED = frozenset(
    (
        *(*_CACHES, *(f"flash_{name}" for name in _CACHES), "flat_keys", "flat_values"),
        *("query", "key", "value", "output", "before", "float32", "nan_like", "partials"),
        *("returned", "request_index", "request_table", "token_slots", "context_slots"),
        *("triton_dtype", "splits", "block_size"),
    )
)
# Layouts of a cache, and of keys without pages, as ops name them: heads, tokens (s) and elements.
LAYOUTS = {"bshd": "flash", "NHD": "flash", "bhsd": "HND", "HND": "HND"}
_AXES = {"s": "tokens", "h": "heads", "d": "size"}
_LAYOUT = "kv_layout"  # the argument that states them, which is in no record


def library_ops() -> tuple[RecordedOp, ...]:
    """Return the attention ops of all libraries but vLLM, which :mod:`attnlab.recorder.ops` has."""
    found: dict[tuple[str, str], list[Op]] = {}
    for library in libraries():
        for record in ops_of(library) if library != "vllm" else ():
            for module in () if record.writes_cache or record.merges else record.import_names:
                found.setdefault((module, record.function), []).append(record)
    return tuple(
        RecordedOp(
            module=module,
            function=function,
            op=records[0].name,
            adjust=partial(read_by_record, records),
            reads=tuple(sorted({name for record in records for name in record.arguments})),
        )
        for (module, function), records in found.items()
    )


def read_by_record(records: Sequence[Op], given: Mapping[str, Any], reading: Reading) -> None:
    """Read the arguments of an op by the record whose numbers they have. Changes the reading.

    Numbers and lists of numbers are compared with those of the record's call when that is made.
    """
    op, unread = _record_of(records, given), list[str]()
    found = stated(op, given, unread)
    _read(op, found, given, reading)
    _take_quantised(found, reading)
    if op.result is not None and "returned" in names_in(op.result):
        reading.result = lambda returned: (output_of(op, {}, returned), None)
    changed = given.given if isinstance(given, BoundArguments) else given.keys()
    masks = op.parameters("qq_bias")
    kept = {
        name: given[name] for name in changed if name not in masks and op.why_neutral(name) is None
    }
    reading.unknown |= {n: kept[n] for n in unread if n in kept and not _is_small(kept[n])}
    small = {
        name: one.clone() if isinstance(one, torch.Tensor) else copy(one)
        for name, one in kept.items()
        if _is_compared(op, name) and _is_small(one)
    }

    def differing(call: KernelCall) -> tuple[str, ...]:
        return tuple(f"{name}={shown(small[name])}" for name in _differences(op, call, small))

    reading.stated = differing


def _is_small(value: Any) -> bool:
    """Answer whether an argument is a number, or a list of integers."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and not value.is_floating_point()
    if isinstance(value, list):
        return all(isinstance(one, int) for one in value)
    return isinstance(value, (bool, int, float, str))


def _record_of(records: Sequence[Op], given: Mapping[str, Any]) -> Op:
    """Return the record that has most of the numbers that a call states, such as a number of bits."""

    def agreeing(record: Op) -> int:
        stated = {name: text for name, text in record.arguments.items() if text.isdigit()}
        return sum(1 if given.get(name) == int(text) else -1 for name, text in stated.items())

    return max(records, key=agreeing)


def call_of(
    op: Op, given: BoundArguments, origin: Origin, output: torch.Tensor | None
) -> KernelCall:
    """Return the KernelCall of the arguments of an op's function; its tensors are those of the arguments.

    ``output``: of the op, [tokens, num_heads, value_size], None to take the argument that the op writes.
    ``unknown_arguments`` has the arguments that the call does not state. Raises InvalidCall if the arguments
    are not those of attention, or contradict each other.
    """
    reading = Reading(fields={})
    understood = _read(op, stated(op, given), given, reading)
    if output is not None:
        reading.fields["output"] = output
    if reading.why_not:
        raise InvalidCall(reading.why_not)
    if "query" in reading.fields and "key_cache" not in reading.fields:
        raise InvalidCall("key_cache must be one that a call can hold, got one of another form")
    call = call_of_reading(reading, origin, op=op.name)
    others = sorted(n for n in given.given - op.arguments.keys() if given[n] is not None)
    unknown = (*call.unknown_arguments, *_differences(op, call, given), *others)
    return replace(
        call, unknown_arguments=tuple(n for n in dict.fromkeys(unknown) if n not in understood)
    )


def _read(
    op: Op, found: Mapping[str, Any], given: Mapping[str, Any], reading: Reading
) -> Collection[str]:
    """Set the fields of what the arguments state; return the arguments that were read apart from it."""
    fields = reading.fields = {name: found[name] for name in _STATED if name in found}
    fields["op"] = op.name
    understood: list[str] = []
    if not isinstance(fields.get("query"), torch.Tensor):
        return understood
    _take_numbers(fields, found, reading)
    _take_lengths(op, fields, found, reading)
    if _take_cache(op, fields, found, str(given.get(_LAYOUT) or ""), reading):
        reading.unknown.pop(_LAYOUT, None)
        understood.append(_LAYOUT)
    if op.cache_layout is not None and op.new_tokens_from == "cache":
        fields.pop("key", None)
        fields.pop("value", None)
    if _take_mask(op, given, reading, found.get("window_starts")):
        understood += op.parameters("qq_bias")
    return understood


def stated(op: Op, given: Mapping[str, Any], unread: list[str] | None = None) -> dict[str, Any]:
    """Return what the arguments state, by the names of :class:`attnlab.kernels.binding.Values`.

    Those that state nothing are added to ``unread``. A cache of integers has two names for each half, such as
    flash_key_cache.scales; then ``affine`` is the number of bits.
    """
    found: dict[str, Any] = {}
    for parameter, text in op.arguments.items():
        is_given = given.get(parameter) is not None
        if is_given and not _solve(_tree(text), given[parameter], found) and unread is not None:
            unread.append(parameter)
    return found


@lru_cache(maxsize=512)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _solve(node: ast.expr, value: Any, found: dict[str, Any]) -> bool:
    """Note the names that an expression states if it has a value; answer whether it states one."""
    match node:
        case ast.Name(id=name):
            found.setdefault(name, value)
            return True
        case ast.Tuple(elts=parts) if isinstance(value, (tuple, list)):
            return all([_solve(*pair, found) for pair in zip(parts, value, strict=False)])
        case ast.Attribute(value=ast.Call(func=ast.Name(id="affine"), args=args), attr=part):
            cache, bits, _ = args
            found |= {f"{ast.unparse(cache)}.{part}": value, "affine": ast.literal_eval(bits)}
            return True
    inner = _undone(node, value) if isinstance(value, torch.Tensor) else None
    inner = inner or _chosen(node, value)
    return inner is not None and _solve(*inner, found)


def _chosen(node: ast.expr, value: Any) -> tuple[ast.expr, Any] | None:
    """Return the part of an expression that has its value, which is not None."""
    match node:
        case ast.BoolOp(op=ast.Or(), values=[first, *_]):
            return (first, value) if isinstance(value, torch.Tensor) or value else None
        case ast.IfExp(test=ast.Compare(ops=[ast.Is()])):  # X if Y is None else Z
            return node.orelse, value
        case ast.IfExp():
            return node.body, value
        case ast.Call(func=ast.Name(id="one"), args=[first]):
            return first, value
    return None


def _undone(node: ast.expr, value: torch.Tensor) -> tuple[ast.expr, torch.Tensor] | None:
    """Return the tensor that an expression makes a view of, and what it was."""
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=args):
            method = _BACK.get(name)
            numbers = [ast.literal_eval(one) for one in args if isinstance(one, ast.Constant)]
            return None if method is None else (inner, method(value, *numbers))
        case ast.Subscript(value=inner, slice=index):
            view = _SLICES.get(ast.unparse(index).strip("()"))
            return None if view is None else (inner, view(value))
    return None


# What undoes a method, or an index, of an expression. A cache that is repeated has a head per query head.
_BACK: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(
        ("int", "float", "contiguous", "expand", "view", "repeat_interleave"),
        lambda tensor, *args: tensor,
    ),
    "flatten": lambda tensor, first, last: tensor.unflatten(first, (-1, 1)),
    "transpose": lambda tensor, first, second: tensor.transpose(first, second),
}
_SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    ":, None": lambda tensor: tensor[:, 0],
    "None": lambda tensor: tensor[0],
}


def _take_numbers(fields: dict[str, Any], found: Mapping[str, Any], reading: Reading) -> None:
    """Set the scale, the window and the numbers that have other names in a record."""
    if "scale" in found:
        fields.setdefault("sm_scale", found["scale"])
    left, right = found.get("window_left"), found.get("window_right", -1)
    if isinstance(left, (tuple, list)):  # window_size of FlashAttention
        left, right = left
    if left is not None:
        fields["sliding_window"] = max(0, int(left) + 1)
    if right not in (-1, 0):
        reading.unmodelled.append("window_size to the right")
    if isinstance(fields.get("softcap"), (int, float)) and not fields["softcap"]:
        del fields["softcap"]


def _take_lengths(
    op: Op, fields: dict[str, Any], found: Mapping[str, Any], reading: Reading
) -> None:
    """Set lengths, the first row of each sequence, and the table of a list of slots."""
    query, starts = fields["query"], fields.get("query_start_loc")
    lens = fields.get("seq_lens")
    if starts is not None and lens is not None and len(starts) == len(lens):
        starts = fields["query_start_loc"] = torch.cat([starts, starts.new_tensor([len(query)])])
    if starts is None and op.prefill and lens is not None:
        own = found.get("query_lens")
        if own is None:
            own = lens - found["context_lens"][: len(lens)] if "context_lens" in found else lens
        sums = torch.nn.functional.pad(own.long().cumsum(0), (1, 0))
        starts = fields["query_start_loc"] = sums.int()
    for name in ("token", "context"):
        if f"{name}_starts" not in found or f"{name}_slots" not in found:
            continue
        first = found.get("window_starts")
        new = starts.diff() if name == "context" and starts is not None else None
        table, lens = table_of_lists(found[f"{name}_starts"], found[f"{name}_slots"], first, new)
        fields["block_table"], fields["seq_lens"] = table, lens
        reading.read_as.append("the lists of slots as a block table with blocks of one token")
    if "request_table" in found and "request_index" in found:
        rows = found["request_index"].long()[: len(fields["seq_lens"])]
        fields["block_table"] = found["request_table"][rows]
        reading.read_as.append("the block table as the rows that the request index names")
    if not op.prefill:
        fields.pop("query_start_loc", None)
        if "seq_lens" in fields:
            fields["seq_lens"] = fields["seq_lens"][: len(query)]


def _take_cache(
    op: Op, fields: dict[str, Any], found: Mapping[str, Any], layout: str, reading: Reading
) -> bool:
    """Set the cache, which an op without one has in its keys and values.

    ``layout``: as the call states it, or "". Answer whether it is known.
    """
    is_flat, order = "flat_keys" in found, layout or "hsd"
    if is_flat and sorted(order) != sorted("shd"):
        reading.why_not = f"kv_layout must be an order of s, h and d, got {order}"
        return False
    for name in _CACHES:
        own = name.removesuffix("_cache")
        cache = found.get(f"flash_{name}", found.get(name))
        if is_flat:
            cache = found[f"flat_{own}s"].permute([order.index(axis) for axis in "shd"])[:, None]
        elif op.cache_layout is None and own in fields:
            cache = fields[own][:, None]
        elif cache is not None and LAYOUTS.get(layout) == "HND":
            cache = cache.transpose(1, 2)
        if cache is not None:
            fields[name] = cache
    if is_flat and order != "shd":
        axes = ", ".join(_AXES[axis] for axis in order)
        reading.read_as.append(f"keys and values [{axes}] by token")
    starts = found.get("flat_starts", fields.get("query_start_loc"))
    if starts is not None and (is_flat or op.cache_layout is None):
        slots = torch.arange(int(starts[-1]), dtype=torch.int32, device=starts.device)
        fields["block_table"], fields["seq_lens"] = table_of_lists(starts, slots)
    fields["layout"] = "x-split" if op.cache_layout == "x-split" else "flash"
    return is_flat or layout in LAYOUTS


def _take_quantised(found: Mapping[str, Any], reading: Reading) -> None:
    """Read a cache of integers as their numbers, (stored - zero point) * scale, in the query's dtype."""
    if "affine" not in found or "query" not in reading.fields:
        return
    for name in _CACHES:
        numbers, scales = (found.get(f"flash_{name}.{part}") for part in ("numbers", "scales"))
        if numbers is None or scales is None:
            return
        if found["affine"] == 4:
            numbers = torch.cat([numbers & 0xF, numbers >> 4], -1)
        exact = (numbers.float() - scales[..., 1:].float()) * scales[..., :1].float()
        reading.fields[name] = exact.to(reading.fields["query"].dtype)
    text = f"int{found['affine']}, rounded to the query's dtype"
    reading.unknown["the cache's numbers"] = text


def _take_mask(op: Op, given: Mapping[str, Any], reading: Reading, first: Any) -> bool:
    """Read a mask of bytes for each row if it is the causal mask; there is no reference else.

    ``first``: the position of the first slot of each sequence, None for 0. Answer whether it was read.
    """
    name = next((name for name, text in op.arguments.items() if "seen(" in text), "")
    mask = given.get(name)
    if mask is None:
        return False
    fields = reading.fields
    if {"seq_lens", "query_start_loc"} <= fields.keys():
        lens, rows = fields["seq_lens"].long(), fields["query_start_loc"].long().diff()
        if first is not None and "seen(window_starts)" in op.arguments[name]:
            lens = lens - first.long()[: len(lens)]
        causal = [mask.new_zeros(0).bool()]
        for new, length in zip(rows.tolist(), lens.tolist(), strict=True):
            ones = torch.ones(new, length, dtype=torch.bool, device=mask.device)
            causal.append(ones.tril(length - new).flatten())
        wanted = torch.cat(causal)
        if torch.equal(mask[: len(wanted)].bool(), wanted):
            fields["causal"] = True
            reading.read_as.append(f"{name} as the causal mask")
            return True
    reading.unmodelled.append(name)
    return False


def _is_compared(op: Op, parameter: str) -> bool:
    text = op.arguments.get(parameter)
    is_neutral = text is None or op.why_neutral(parameter) is not None
    return not is_neutral and not names_in(text or "") & _NOT_COMPARED


def _differences(op: Op, call: KernelCall, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments that differ from those of the call by its record."""
    platform = PLATFORMS.get(call.origin.platform or "", PLATFORMS["sm_90"])
    values = Values(call, Target(platform=platform))
    for parameter, text in op.arguments.items():
        if parameter not in given or not _is_compared(op, parameter):
            continue
        try:
            expected = evaluate(text, values)
        except (AttnLabError, RuntimeError, IndexError, TypeError, ValueError):
            yield parameter
            continue
        if not is_default(expected) and not _is_same(expected, given[parameter]):
            yield parameter
    if call.kv_cache_dtype == "auto":  # an op may use scales of a cache that needs none
        for scale in ("k_scale", "v_scale"):
            if not _is_same(1.0, getattr(call, scale)):
                yield from (name for name in op.parameters(scale) if name in given)


def _is_same(expected: Any, given: Any) -> bool:
    """Answer whether two arguments are equal; a list of integers may be longer than what is used of it."""
    if isinstance(expected, (tuple, list)) and isinstance(given, (tuple, list)):
        pairs = zip(expected, given, strict=False)
        return len(expected) == len(given) and all(_is_same(a, b) for a, b in pairs)
    if isinstance(expected, torch.Tensor) and isinstance(given, torch.Tensor):
        if expected.dim() == given.dim() == 1 and not given.is_floating_point():
            size = min(len(expected), len(given))
            expected, given = expected[:size], given[:size]
        if expected.shape == given.shape:
            return bool(torch.equal(expected.to(given), given))
    one, other = (
        value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for value in (expected, given)
    )
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)  # stored in float32 on the way
    return bool(one == other)


def output_of(op: Op, given: Mapping[str, Any], returned: Any) -> torch.Tensor | None:
    """Return what an op returned as [tokens, num_heads, value_size], None if it writes an argument."""
    if op.result is None or "returned" not in names_in(op.result):
        return None
    found, _ = by_name.output_of(evaluate(op.result, {**given, "returned": returned}))
    while found is not None and found.dim() > 3 and len(found) == 1:
        found = found[0]
    return found


def run_by_record(function: Callable[..., Any], call: KernelCall) -> None:
    """Run a call by the function of its op, as the op's record states, and write the call's output."""
    target = Target.of(Case())
    arguments = bind(function, call, target)
    finish(call, target, arguments, function(**arguments))
