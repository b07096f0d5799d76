"""Read the arguments of an op of a library into a KernelCall: the expressions of its record, backwards.

A record states each argument as an expression in the names of a call (:mod:`attnlab.library.op`). Most are a
name, or a view of a tensor, and so state the name, too. What was read is bound again by the record, and the
arguments that differ from those of the call are not understood: nothing is said about the values of such a
call.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from attnlab.case.errors import AttnLabError, InvalidCall
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import Target
from attnlab.kernels.binding import Values, evaluate, is_default
from attnlab.library.op import Op, names_in
from attnlab.recorder.arguments import BoundArguments, Reading, call_of_reading
from attnlab.tensors.call import KernelCall, Origin

_CACHES = (
    "flash_key_cache",
    "flash_value_cache",
    "key_cache",
    "value_cache",
    "flat_keys",
    "flat_values",
)
_ROWS = ("query", "key", "value", "output", "before")
# Names whose values are read and copied as they are, or that only a binding makes.
_NOT_COMPARED = frozenset(
    (
        *(*_CACHES, *_ROWS, "float32", "nan_like", "partials", "returned"),
        *("request_index", "request_table", "triton_dtype", "splits"),
    )
)
_STATED = (
    *("query", "key", "value", "output", "block_table", "seq_lens", "query_start_loc", "sm_scale"),
    *("softcap", "alibi_slopes", "sinks", "causal", "k_scale", "v_scale", "kv_cache_dtype"),
    *("sliding_window", "max_query_len", "max_seq_len"),
)  # fmt: skip
_CLOSE = 1e-6  # relative; numbers are stored in float32 on the way


def call_of(
    op: Op, given: BoundArguments, origin: Origin, output: torch.Tensor | None
) -> KernelCall:
    """Return the KernelCall of the arguments of an op's function; its tensors are those of the arguments.

    ``output``: of the op, [tokens, num_heads, value_size], None to take the argument that the op writes.
    ``unknown_arguments`` has the arguments that the call does not state. Raises InvalidCall if the arguments
    are not those of attention, or contradict each other.
    """
    found = stated(op, given)
    fields = {name: found[name] for name in _STATED if name in found}
    if output is not None:
        fields["output"] = output
    if "query" not in fields:
        raise InvalidCall("query must be among the arguments, got none")
    _take_numbers(fields, found)
    _take_lengths(op, fields, found)
    _take_cache(op, fields, found)
    if "key_cache" not in fields:
        raise InvalidCall("key_cache must be one that a call can hold, got one of another form")
    if op.cache_layout is not None and op.new_tokens_from == "cache":
        fields = {name: one for name, one in fields.items() if name not in ("key", "value")}
    call = call_of_reading(Reading(fields=fields), origin, op=op.name)
    unknown = tuple(dict.fromkeys((*call.unknown_arguments, *_differences(op, call, given))))
    return replace(call, unknown_arguments=unknown)


def stated(op: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the arguments state, by the names of :class:`attnlab.kernels.binding.Values`."""
    found: dict[str, Any] = {}
    for parameter, text in op.arguments.items():
        if given.get(parameter) is not None:
            _solve(_tree(text), given[parameter], found)
    return found


@lru_cache(maxsize=512)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _solve(node: ast.expr, value: Any, found: dict[str, Any]) -> None:
    """Note the names that an expression states if it has a value; one of another form states none."""
    if isinstance(node, ast.Name):
        found.setdefault(node.id, value)
    elif isinstance(node, ast.Tuple) and isinstance(value, (tuple, list)):
        for part, one in zip(node.elts, value, strict=False):
            _solve(part, one, found)
    else:
        inner = _undone(node, value) if isinstance(value, torch.Tensor) else None
        inner = inner or _chosen(node, value)
        if inner is not None:
            _solve(*inner, found)


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
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = _BACK.get(node.func.attr)
        numbers = [ast.literal_eval(one) for one in node.args if isinstance(one, ast.Constant)]
        return None if method is None else (node.func.value, method(value, *numbers))
    if isinstance(node, ast.Subscript):
        view = _SLICES.get(ast.unparse(node.slice).strip("()"))
        return None if view is None else (node.value, view(value))
    return None


# What undoes a method, or an index, of an expression.
_BACK: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("int", "float", "contiguous", "expand", "view"), lambda tensor, *args: tensor),
    "repeat_interleave": lambda tensor, *args: (
        tensor
    ),  # read as a cache with a head for each query head
    "flatten": lambda tensor, first, last: tensor.unflatten(first, (-1, 1)),
    "transpose": lambda tensor, first, second: tensor.transpose(first, second),
}
_SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    ":, None": lambda tensor: tensor[:, 0],
    "None": lambda tensor: tensor[0],
}


def _take_numbers(fields: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Set the scale, the window and the numbers that have other names in a record."""
    if "scale" in found:
        fields.setdefault("sm_scale", found["scale"])
    left = found.get("window_left")
    if left is not None:
        fields["sliding_window"] = max(0, int(left) + 1)
    if isinstance(fields.get("softcap"), (int, float)) and not fields["softcap"]:
        del fields["softcap"]


def _take_lengths(op: Op, fields: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Set lengths, the first row of each sequence, and the table of a list of slots."""
    query, starts = fields["query"], fields.get("query_start_loc")
    lens = fields.get("seq_lens")
    if starts is not None and lens is not None and len(starts) == len(lens):
        starts = fields["query_start_loc"] = _closed(starts, query)
    if starts is None and op.prefill and lens is not None:
        own = found.get("query_lens")
        if own is None:
            own = lens - found["context_lens"][: len(lens)] if "context_lens" in found else lens
        starts = fields["query_start_loc"] = _sums(own)
    for name in ("token", "context"):
        if f"{name}_starts" not in found or f"{name}_slots" not in found:
            continue
        first = found.get("window_starts")
        new = starts.diff() if name == "context" and starts is not None else None
        table, lens = _table(found[f"{name}_starts"], found[f"{name}_slots"], first, new)
        fields["block_table"], fields["seq_lens"] = table, lens
    if "request_table" in found and "request_index" in found:
        rows = found["request_index"].long()[: len(fields["seq_lens"])]
        fields["block_table"] = found["request_table"][rows]
    if not op.prefill:
        fields.pop("query_start_loc", None)
        if "seq_lens" in fields:
            fields["seq_lens"] = fields["seq_lens"][: len(query)]


def _take_cache(op: Op, fields: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Set the cache, which an op without one has in its keys and values."""
    for name in ("key_cache", "value_cache"):
        flat = found.get(f"flat_{name.removesuffix('_cache')}s")
        cache = found.get(f"flash_{name}", found.get(name))
        if flat is not None:
            cache = flat.transpose(0, 1)[:, None]
        elif op.cache_layout is None and fields.get(name.removesuffix("_cache")) is not None:
            cache = fields[name.removesuffix("_cache")][:, None]
        if cache is not None:
            fields[name] = cache
    if "flat_starts" in found or op.cache_layout is None:
        starts = found.get("flat_starts", fields.get("query_start_loc"))
        if starts is not None:
            slots = torch.arange(int(starts[-1]), dtype=torch.int32, device=starts.device)
            fields["block_table"], fields["seq_lens"] = _table(starts, slots, None, None)
    fields["layout"] = "x-split" if op.cache_layout == "x-split" else "flash"


def _closed(starts: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the first row of each sequence, with the end."""
    return torch.cat([starts, starts.new_tensor([len(query)])])


def _sums(lens: torch.Tensor) -> torch.Tensor:
    """Return the sums of lengths before each sequence, and the end, [n + 1] int32."""
    return torch.nn.functional.pad(lens.long().cumsum(0), (1, 0)).int()


def _table(
    starts: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor | None,
    new: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of all positions, [num_seqs, n], and the lengths, of lists of slots.

    ``first``: the position of the first slot of each list. ``new``: how many tokens of each sequence follow
    its list; they have slot 0, which is not read.
    """
    counts = starts.long().diff().to(slots.device)
    before = torch.zeros_like(counts) if first is None else first.long().to(slots.device)
    after = torch.zeros_like(counts) if new is None else new.long().to(slots.device)
    lens = before[: len(counts)] + counts + after[: len(counts)]
    width = max(1, int(lens.max()) if len(lens) else 1)
    at = torch.arange(width, device=slots.device) - before[: len(counts), None]
    inside = (at >= 0) & (at < counts[:, None])
    index = (starts[:-1].long().to(slots.device)[:, None] + at).clamp(0, max(0, len(slots) - 1))
    table = slots[index] if len(slots) else at * 0
    return torch.where(inside, table, 0), lens.int()


def _differences(op: Op, call: KernelCall, given: BoundArguments) -> Iterator[str]:
    """Yield the arguments that differ from those of the call by its record, or that no record has."""
    platform = PLATFORMS.get(call.origin.platform or "", PLATFORMS["sm_90"])
    values = Values(call, Target(platform=platform))
    for parameter, text in op.arguments.items():
        if parameter not in given or parameter in op.neutral or names_in(text) & _NOT_COMPARED:
            continue
        try:
            expected = evaluate(text, values)
        except (AttnLabError, RuntimeError, IndexError, TypeError, ValueError) as error:
            yield f"{parameter}: {' '.join(str(error).split()):.60}"
            continue
        if not is_default(expected) and not _is_same(expected, given[parameter]):
            yield parameter
    others = given.given - op.arguments.keys()
    yield from sorted(name for name in others if given[name] is not None)
    if call.kv_cache_dtype == "auto":  # an op may use scales of a cache that needs none
        scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
        yield from (name for name, scale in scales.items() if not _is_same(1.0, scale))


def _is_same(expected: Any, given: Any) -> bool:
    """Answer whether two arguments are equal; a list of integers may be longer than what is used of it."""
    if isinstance(expected, torch.Tensor) and isinstance(given, torch.Tensor):
        if expected.dim() == given.dim() == 1 and not given.is_floating_point():
            size = min(len(expected), len(given))
            expected, given = expected[:size], given[:size]
        if expected.shape != given.shape:
            return False
        return bool(torch.equal(expected.to(given), given))
    if isinstance(expected, (tuple, list)) and isinstance(given, (tuple, list)):
        pairs = zip(expected, given, strict=False)
        return len(expected) == len(given) and all(_is_same(a, b) for a, b in pairs)
    one, other = _number(expected), _number(given)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= _CLOSE * max(abs(one), abs(other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)


def _number(value: Any) -> Any:
    """Return the number of a tensor of one element, and another value as it is."""
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_one else value


def output_of(op: Op, given: Mapping[str, Any], returned: Any) -> torch.Tensor | None:
    """Return what an op returned as [tokens, num_heads, value_size], None if it writes an argument."""
    if op.result is None or "returned" not in names_in(op.result):
        return None
    found = evaluate(op.result, {**given, "returned": returned})
    while isinstance(found, torch.Tensor) and found.dim() > 3 and len(found) == 1:
        found = found[0]
    return found if isinstance(found, torch.Tensor) else None
