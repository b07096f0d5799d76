"""Read calls of a library's ops as their records state: :mod:`attnlab.kernels.binding`, backwards.

A record has each argument as an expression in the fields of a call. An argument is read as the field that
its expression names. What a call states and the record would not is an argument that attnlab does not know.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.contracts.contract import Target
from attnlab.kernels.binding import Values, bind, evaluate, finish
from attnlab.kernels.by_name import NAMES, output_of
from attnlab.library.op import Op, libraries, names_in, ops_of, package_of
from attnlab.recorder.arguments import BoundArguments, Reading, RecordedOp
from attnlab.tensors.call import KernelCall

# An expression that is a field's value, perhaps as a tensor of one number or in another shape.
_PLAIN = re.compile(
    r"(?:one\()?(\w+)\)?(?: if is_fp8 else None| or 0(?:\.0)?|\.int\(\)|\.flatten\(0, 1\)"
    r"|\.view\(cache_dtype\)|\[:-1\]|\.transpose\(1, 2\))?"
)
_QUANTISED = re.compile(r"affine\(flash_(key|value)_cache, (\d), \d\)\.(numbers|scales)")
_FIELDS = {
    "flash_key_cache": "key_cache",
    "flash_value_cache": "value_cache",
    "scale": "sm_scale",
    "flat_starts": "key_starts",
}
# What is read apart, and what is no more than a size, a choice of a path, or scratch memory.
_APART = (
    *("context_starts", "context_slots", "context_lens", "query_lens", "window_left"),
    *("flat_keys", "flat_values", "key_starts"),
)
_SIZES = {"splits", "block_size", "max_query_len", "max_seq_len", "triton_dtype", "float32", "seqs"}
# Layouts of a cache, and of keys without pages, as ops name them: heads, tokens (s) and elements.
LAYOUTS = {"bshd": "flash", "NHD": "flash", "bhsd": "HND", "HND": "HND"}


def library_ops() -> tuple[RecordedOp, ...]:
    """Return the attention ops of all libraries but vLLM, which :mod:`attnlab.recorder.ops` has."""
    found: dict[str, list[Op]] = {}
    for library in libraries():
        for record in ops_of(library) if library != "vllm" else ():
            if not record.writes_cache and not record.merges:
                for module in _modules(record):
                    found.setdefault(f"{module}:{record.function}", []).append(record)
    return tuple(_recorded(place, records) for place, records in found.items())


def _modules(record: Op) -> Iterator[str]:
    """Yield the modules that a record's op may be in, with one name for each layout of its package."""
    for folder in package_of(record.library).folders:
        yield f"{folder}/{record.module}".replace("/", ".")


def _recorded(place: str, records: Sequence[Op]) -> RecordedOp:
    module, _, function = place.partition(":")
    names = {name for record in records for name in record.arguments}
    return RecordedOp(
        module=module,
        function=function,
        op=records[0].name,
        adjust=partial(read_by_record, records),
        reads=tuple(sorted(names)),
    )


def read_by_record(records: Sequence[Op], given: dict[str, Any], reading: Reading) -> None:
    """Read the arguments of an op by the record whose numbers they have. Changes the reading."""
    record = _record_of(records, given)
    fields = _plain_fields(record, given, reading)
    layout = given.get("kv_layout")
    if layout in LAYOUTS or sorted(str(layout)) == sorted("shd"):
        reading.unknown.pop("kv_layout", None)
    if record.cache_layout == "flash" and "layout" not in fields:
        fields["layout"] = LAYOUTS.get(str(layout), "flash")
    reading.fields = fields | {"op": record.name}
    _take_window(fields, reading)
    _take_quantised(record, given, reading)
    _take_flat(str(layout or "hsd"), reading)
    _take_dense(record, reading)
    _take_context(reading)
    _check_prefix(record, given, reading)
    _take_mask(record, given, reading)
    if record.result is not None:
        reading.result = lambda returned: (output_of(returned)[0], None)
    reading.stated = _differing(record, given)


def _plain_fields(record: Op, given: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Return the fields that single arguments state; keep those that are not understood as unknown."""
    fields: dict[str, Any] = {}
    for name, text in record.arguments.items():
        value, found = given.get(name), _PLAIN.fullmatch(text)
        if value is None:
            continue
        if text == "(window_left, window_right)":
            fields["window_left"] = value
        if found is None:
            if name in _given(given) and not _is_read_apart(record, name, value):
                reading.unknown[name] = value
            continue
        field = _FIELDS.get(found[1], found[1])
        if field in NAMES or field in _APART:
            fields[field] = value
        if text.endswith(".transpose(1, 2)"):
            fields["layout"] = "HND"
        if text.endswith("[:-1]"):
            fields[field] = torch.nn.functional.pad(value, (0, 1), value=len(given[_query(record)]))
    return fields


def _given(given: Mapping[str, Any]) -> set[str]:
    """Return the names of the arguments that are not at their default."""
    return given.given if isinstance(given, BoundArguments) else set(given)


def _is_read_apart(record: Op, name: str, value: Any) -> bool:
    """Answer whether an argument changes no result, or is read by more than the name of its field."""
    text = record.arguments[name]
    if record.why_neutral(name) is not None or names_in(text) & _SIZES:
        return True
    is_number = isinstance(value, (bool, int, float, str))  # compared with what the record passes
    is_mask = "window_" in text or "qq_bias" in names_in(text)
    return is_number or is_mask or _QUANTISED.fullmatch(text) is not None


def _query(record: Op) -> str:
    return next(name for name, text in record.arguments.items() if text == "query")


def _record_of(records: Sequence[Op], given: Mapping[str, Any]) -> Op:
    """Return the record that has most of the numbers that a call states, such as a number of bits."""

    def agreeing(record: Op) -> int:
        stated = {name: text for name, text in record.arguments.items() if text.isdigit()}
        return sum(1 if given.get(name) == int(text) else -1 for name, text in stated.items())

    return max(records, key=agreeing)


def _take_window(fields: dict[str, Any], reading: Reading) -> None:
    """Read the number of keys to the left, -1 for all, or a pair with those to the right."""
    left = fields.pop("window_left", None)
    if isinstance(left, (tuple, list)):
        left, right = left
        if right not in (-1, 0):
            reading.unmodelled.append("window_size to the right")
    reading.fields.pop("window_left", None)
    if isinstance(left, int) and left >= 0:
        reading.fields["sliding_window"] = left + 1


def _take_quantised(record: Op, given: Mapping[str, Any], reading: Reading) -> None:
    """Read a cache of integers as their numbers, (stored - zero point) * scale, in the query's dtype."""
    stored: dict[tuple[str, str], Any] = {}
    bits = 8
    for name, text in record.arguments.items():
        if (found := _QUANTISED.fullmatch(text)) is not None:
            bits = int(found[2])
            stored[found[1], found[3]] = given.get(name)
    if not stored or any(one is None for one in stored.values()):
        return
    for half in ("key", "value"):
        numbers, scales = stored[half, "numbers"], stored[half, "scales"].float()
        if bits == 4:
            numbers = torch.cat([numbers & 0xF, numbers >> 4], -1)
        exact = (numbers.float() - scales[..., 1:]) * scales[..., :1]
        reading.fields[f"{half}_cache"] = exact.to(reading.fields["query"].dtype)
    for name in ("k_scale", "v_scale"):
        reading.fields.pop(name, None)
    reading.unknown["the cache's numbers"] = f"int{bits}, rounded to the query's dtype"


def _take_flat(layout: str, reading: Reading) -> None:
    """Read keys and values without pages as a cache with blocks of one token.

    ``layout``: the order of heads (h), tokens (s) and elements (d).
    """
    fields = reading.fields
    starts = fields.pop("key_starts", None)
    both = {name: fields.pop(f"flat_{name}s", None) for name in ("key", "value")}
    if not all(isinstance(one, torch.Tensor) and one.dim() == 3 for one in both.values()):
        return
    if sorted(layout) != sorted("shd"):
        reading.why_not = f"kv_layout must be an order of s, h and d, got {layout}"
        return
    for name, one in both.items():
        fields[f"{name}_cache"] = one.permute([layout.index(axis) for axis in "shd"])
    count = fields["key_cache"].shape[0]
    slots = torch.arange(count, dtype=torch.int32, device=both["key"].device)
    fields |= {"token_starts": starts, "token_slots": slots}
    if layout != "shd":
        reading.read_as.append(
            f"keys and values [{', '.join(_AXES[axis] for axis in layout)}] by token"
        )


_AXES = {"s": "tokens", "h": "heads", "d": "size"}


def _take_dense(record: Op, reading: Reading) -> None:
    """Read the keys and values of an op without a cache as the tokens of their sequences, one to a block."""
    fields = reading.fields
    lens, starts = fields.get("seq_lens"), fields.get("query_start_loc")
    if record.cache_layout is not None or not {"query", "key", "value"} <= fields.keys():
        return
    if not isinstance(lens, torch.Tensor) or not isinstance(starts, torch.Tensor):
        return
    sums = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    if not torch.equal(starts[: len(lens)].long(), sums[:-1].long()):
        reading.why_not = f"{_name_of(record, 'query_start_loc')} leaves rows between sequences"
        return
    rows = torch.arange(len(fields["key"]), dtype=torch.int32, device=lens.device)
    del fields["seq_lens"]
    fields |= {"query_start_loc": sums.int(), "token_starts": sums.int(), "token_slots": rows}
    fields |= {f"{name}_cache": fields[name] for name in ("key", "value")}


def _name_of(record: Op, field: str) -> str:
    return next(name for name, text in record.arguments.items() if field in names_in(text))


def _take_context(reading: Reading) -> None:
    """Add the new tokens, which have no slots, to lists of the slots of the context."""
    fields = reading.fields
    starts, slots = fields.pop("context_starts", None), fields.pop("context_slots", None)
    queries = fields.get("query_start_loc")
    lists = [one for one in (starts, slots, queries) if isinstance(one, torch.Tensor)]
    if len(lists) < 3:
        return
    starts, slots, queries = lists
    counts, lens = starts.long().diff(), queries.long().diff().to(starts.device)
    placed = [
        torch.nn.functional.pad(slots[first : first + count].int(), (0, new))
        for first, count, new in zip(starts.tolist(), counts.tolist(), lens.tolist(), strict=False)
    ]
    fields["token_slots"] = torch.cat(placed) if placed else slots.int()
    fields["token_starts"] = torch.nn.functional.pad((counts + lens).cumsum(0), (1, 0)).int()


def _check_prefix(record: Op, given: Mapping[str, Any], reading: Reading) -> None:
    """Keep lengths of the context that are not those before the new tokens as an unknown argument."""
    starts, queries = (reading.fields.get(name) for name in ("token_starts", "query_start_loc"))
    name = next((n for n, t in record.arguments.items() if t.startswith("context_lens -")), "")
    lens = given.get(name)
    found = [one for one in (starts, queries, lens) if isinstance(one, torch.Tensor)]
    if len(found) < 3:
        return
    counts, rows = (one.long().diff() for one in found[:2])
    if not torch.equal(counts - rows, found[2].long()):
        reading.unknown[name] = lens


def _take_mask(record: Op, given: Mapping[str, Any], reading: Reading) -> None:
    """Read a mask of bytes for each row if it is the causal mask; there is no reference else."""
    names = [name for name, text in record.arguments.items() if "seen(" in text]
    mask = next((given[name] for name in names if given.get(name) is not None), None)
    if mask is None:
        return
    fields = reading.fields
    starts, queries = fields.get("token_starts"), fields.get("query_start_loc")
    if isinstance(starts, torch.Tensor) and isinstance(queries, torch.Tensor):
        lens, rows = starts.long().diff().tolist(), queries.long().diff().tolist()
        causal = [
            torch.ones(new, length, device=mask.device).tril(length - new).flatten() > 0
            for length, new in zip(lens, rows, strict=True)
        ]
        wanted = torch.cat(causal) if causal else mask.new_zeros(0).bool()
        if torch.equal(mask[: len(wanted)].bool(), wanted):
            fields["causal"] = True
            reading.read_as.append(f"{names[0]} as the causal mask")
            return
    reading.unmodelled.append(names[0])


def run_by_record(function: Callable[..., Any], call: KernelCall) -> None:
    """Run a call by the function of its op, as the op's record states, and write the call's output."""
    target = Target.of(Case())
    arguments = bind(function, call, target)
    finish(call, target, arguments, function(**arguments))


def _differing(record: Op, given: Mapping[str, Any]) -> Callable[[KernelCall], tuple[str, ...]]:
    """Return a function that names the numbers of a call which its record would not pass, "name=value"."""
    numbers = {
        name: given[name]
        for name, text in record.arguments.items()
        if name in _given(given)
        and isinstance(given[name], (bool, int, float, str))
        and record.why_neutral(name) is None
        and not names_in(text) & _SIZES
    }

    def differing(call: KernelCall) -> tuple[str, ...]:
        values = Values(call, Target.of(Case()))
        return tuple(f"{n}={one}" for n, one in numbers.items() if not _is_passed(n, one, values))

    def _is_passed(name: str, one: Any, values: Values) -> bool:
        try:
            passed = evaluate(record.arguments[name], values)
        except AttnLabError:
            return False
        if isinstance(passed, torch.Tensor) and passed.numel() == 1:
            passed = passed.item()
        if isinstance(one, str) or isinstance(passed, str) or passed is None:
            return passed is None if not isinstance(one, str) else one == passed
        return not isinstance(passed, torch.Tensor) and math.isclose(one, passed, rel_tol=1e-6)

    return differing
