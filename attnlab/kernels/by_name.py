"""Call a function that takes tensors, not a KernelCall: its arguments are found by their names.

:class:`ByName` does so for a function that stands for an op of vLLM. :func:`record_of` makes the record of an
op that has none.

The names are those of vLLM, FlashAttention and FlashInfer. :mod:`attnlab.recorder.arguments` reads calls by
the same table.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.fields import refuse, suggestion
from attnlab.case.ops import DECODE_FWD, RELEASES, UNIFIED, Op
from attnlab.kernels.binding import known_names
from attnlab.library.op import libraries, names_in, ops_of, package_of
from attnlab.tensors.cache import in_layout
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import flash

# All keys of a sequence, in ops that read every key from the cache; of ops that get new tokens, those before.
CONTEXT_LENS = "context_lens"
# By field, the names of parameters that stand for it; without any, its own.
_ROWS = """\
query: query q
key_cache: key_cache k_cache k_buffer
value_cache: value_cache v_cache v_buffer
key: key k
value: value v
output: output out o
block_table: block_table block_tables b_loc req_to_token page_table block_offsets
request_index: b_req_idx req_pool_indices
token_starts: kv_indptr
token_slots: kv_indices
seq_lens: seq_lens seqused_k b_seq_len cache_seqlens kv_seqlens kv_lens context_lens
query_start_loc: query_start_loc cu_seqlens_q b_start_loc cum_seq_lens_q qo_indptr q_start_loc
slot_mapping
max_query_len: max_query_len max_seqlen_q max_input_len max_q_len
max_seq_len: max_seq_len max_seqlen_k max_kv_len
sm_scale: sm_scale softmax_scale scale
k_scale: k_scale k_descale
v_scale: v_scale v_descale
softcap: softcap logit_cap logits_soft_cap
alibi_slopes
sinks: sinks s_aux
sliding_window
kv_cache_dtype
q_scale: q_scale q_descale
output_scale: output_scale fp8_out_scale
causal: causal is_causal
mm_prefix_range
mm_prefix_clamp_sliding_window
rswa_prefix_lens
chunk_lookback
qq_bias
lse: lse softmax_lse
before
op
layout"""
NAMES: dict[str, tuple[str, ...]] = {
    field: tuple(names.split()) or (field,)
    for field, _, names in (row.partition(":") for row in _ROWS.split("\n"))
}
# Arguments that repeat a size of the tensors: neutral if they have this value.
SIZES: dict[str, Callable[[KernelCall], int]] = {
    **dict.fromkeys(("num_heads", "num_q_heads", "num_qo_heads"), lambda call: call.query.shape[1]),
    **dict.fromkeys(("num_kv_heads", "kv_heads"), lambda call: call.key.shape[1]),
    **dict.fromkeys(("head_size", "head_dim"), lambda call: call.query.shape[2]),
    **dict.fromkeys(("block_size", "page_size"), lambda call: call.block_size),
    **dict.fromkeys(("batch_size", "num_seqs"), lambda call: len(call.seq_lens)),
    **dict.fromkeys(("kv_group_num", "num_queries_per_kv"), lambda call: call.num_queries_per_kv),
}
_FIELDS = {alias: name for name, aliases in NAMES.items() for alias in aliases}
_CACHES = {"key": "key_cache", "value": "value_cache"}
_WINDOWS = ("window_size", "window_left")
# What decode_attention_fwd does not have, and unified_attention has.
_BEYOND_DECODE = {"query_start_loc", "sliding_window", "alibi_slopes", "sinks"}
_MISSING = inspect.Parameter.empty
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_USUAL = (
    *("query", "key_cache", "value_cache", "block_table", "seq_lens", "query_start_loc"),
    *("sm_scale", "sliding_window", "output"),
)


def output_of(result: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return output and log-sum-exp of what an op returned: a tensor, or a sequence that starts with both.

    The output is None if no tensor was returned.
    """
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    found = [one if isinstance(one, torch.Tensor) else None for one in (*tensors[:2], None, None)]
    return found[0], found[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class ByName:
    """A kernel, a function of a KernelCall, that calls a function with arguments by their names.

    ``example``: the arguments of a recorded call by name, which state the form of each: a number or a tensor,
    the dimensions, the sides of a window. Without it, the forms of vLLM's ops are used.
    """

    function: Callable[..., Any]
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> str:
        """Return the op that the function stands for: its attribute, or what its arguments fit.

        A function that has no starts of the queries gets one token per sequence.
        """
        parameters = inspect.signature(self.function).parameters
        has = {self._field(name, parameters) for name in parameters}
        return getattr(self.function, "op", DECODE_FWD if not has & _BEYOND_DECODE else UNIFIED)

    def check(self, spec: str) -> None:
        """Raise InvalidCase if the function has an argument without default that no call can hold."""
        parameters = inspect.signature(self.function).parameters
        for name, one in parameters.items():
            is_needed = one.default is _MISSING and one.kind not in (
                one.VAR_POSITIONAL,
                one.VAR_KEYWORD,
            )
            if is_needed and name not in SIZES and self._field(name, parameters) is None:
                text = f"{spec}: {name} must be an argument that attnlab knows ({', '.join(_USUAL)}, …), "
                raise InvalidCase(f"{text}or have a default", field="backend")

    @property
    def fixed_fields(self) -> tuple[str, ...]:
        """Return the scales for which the function has no argument."""
        parameters = inspect.signature(self.function).parameters
        given = {self._field(name, parameters) for name in parameters}
        return tuple(name for name in ("sm_scale", "k_scale", "v_scale") if name not in given)

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "kv_cache_dtypes", "masks", "large_caches"):  # of a user's kernel
            return getattr(self.function, name)
        raise AttributeError(name)

    def __call__(self, call: KernelCall) -> None:
        """Call the function and write what it returns, if it has no argument for the output.

        Raises Unsupported for an argument that a call does not hold.
        """
        parameters = inspect.signature(self.function).parameters
        given = self.arguments(call)
        has_output = "output" in {self._field(name, parameters) for name in given}
        positional = [
            name for name in given if parameters[name].kind is parameters[name].POSITIONAL_ONLY
        ]
        returned = self.function(*[given.pop(name) for name in positional], **given)
        if not has_output:
            found = output_of(returned)[0]
            if found is not None:
                call.buffer.copy_(found.reshape(call.buffer.shape))

    def arguments(self, call: KernelCall) -> dict[str, Any]:
        """Return the arguments for a call by name. Raises Unsupported for one that a call does not hold."""
        parameters = inspect.signature(self.function).parameters
        given: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if parameter.kind in _OPEN:
                continue
            value = self._argument(name, parameters, call)
            if value is not _MISSING:
                given[name] = value
            elif parameter.default is _MISSING:
                raise Unsupported(f"argument {name} must be one that a call holds")
        fields_given = {self._field(name, parameters) for name in given}
        for name, is_needed in _needed(call).items():
            if is_needed and name not in fields_given:
                raise Unsupported(f"the function must have an argument {name} for this call")
        return given

    def _field(self, name: str, parameters: Mapping[str, Any]) -> str | None:
        """Return the field of a KernelCall, or of NAMES, that an argument is; None if it is none."""
        found = "sliding_window" if name in _WINDOWS else _FIELDS.get(name)
        if name == CONTEXT_LENS and any(new in parameters for new in NAMES["key"]):
            caches = NAMES["key_cache"]
            return found if not any(cache in parameters for cache in caches) else None
        if found not in _CACHES or any(cache in parameters for cache in NAMES[_CACHES[found]]):
            return found
        example = self.example.get(name)
        is_cache = not isinstance(example, torch.Tensor) or example.dim() >= 4
        return _CACHES[found] if is_cache else found

    def _argument(self, name: str, parameters: Mapping[str, Any], call: KernelCall) -> Any:
        """Return the value of an argument, _MISSING to leave it at its default."""
        example = self.example.get(name, parameters[name].default)
        field_name = self._field(name, parameters)
        if field_name == "sliding_window":
            return _window(name, call, example)
        if field_name is None:
            if name in SIZES:
                return SIZES[name](call)
            if isinstance(example, torch.Tensor):
                raise Unsupported(f"argument {name} must be one that a call holds, got a tensor")
            return example
        if field_name in ("key_cache", "value_cache"):
            return _formed(self._cache(field_name, call), example)
        value = getattr(call, field_name, _MISSING)
        if value is _MISSING:
            raise Unsupported(f"argument {name} must be one that a call holds")
        if field_name == "sm_scale" and value is None and example is not None:
            value = call.query.shape[2] ** -0.5
        if value is None and example is not _MISSING and not isinstance(example, torch.Tensor):
            return example
        has_starts = any(name in parameters for name in NAMES["query_start_loc"])
        return _formed(value, example, at=0 if has_starts else 1)

    def _cache(self, name: str, call: KernelCall) -> torch.Tensor:
        """Return keys or values in the layout of the function's cache, with the strides of the call."""
        layout = call.layout
        if layout == "x-split" and call.spec.cache_layout == "flash":
            layout = "flash"
        key, value = in_layout(call.key_cache, call.value_cache, layout)
        key, value = key.contiguous(), value.contiguous()
        if layout == "flash":
            key, value = flash(key, value, call.strides)
        return key if name == "key_cache" else value


def _needed(call: KernelCall) -> dict[str, bool]:
    """Return, by field, whether a call's output depends on it."""
    scale, default = call.sm_scale, call.query.shape[2] ** -0.5
    needed = {
        "query_start_loc": bool((call.query_lens != 1).any()),
        "sm_scale": scale is not None and abs(scale - default) > 1e-6 * default,
        "sliding_window": call.sliding_window > 0,
        "causal": call.causal is not True,
    }
    optional: tuple[str, ...] = (
        "softcap",
        "alibi_slopes",
        "sinks",
        "q_scale",
        "output_scale",
        "qq_bias",
    )
    optional += ("mm_prefix_range", "rswa_prefix_lens")
    needed |= {name: getattr(call, name) is not None for name in optional}
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name)
        is_one = not isinstance(scale, torch.Tensor) and scale == 1.0
        needed[name] = call.kv_cache_dtype != "auto" and not is_one
    return needed


def _formed(value: Any, example: Any, *, at: int = 0) -> Any:
    """Return a value in the form of an example: a tensor of one number, its FP8 dtype, its dimensions.

    Further dimensions are of size 1, before dimension ``at``.
    """
    if not isinstance(example, torch.Tensor):
        return value
    if isinstance(value, int | float):
        if example.numel() != 1:
            raise Unsupported(f"a tensor {tuple(example.shape)} must be one number")
        return torch.full_like(example, value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.uint8 and example.dtype.itemsize == 1:
        value = value.view(example.dtype)
    if example.dim() == 3 and value.dim() == 4:  # a cache without a dimension for its blocks
        value = value.flatten(0, 1)
    if example.dim() == value.dim() - 1:  # heads and elements in one
        value = value.view(*value.shape[:-2], -1)
    for _ in range(example.dim() - value.dim()):
        value = value.unsqueeze(at)
    return value


def _window(name: str, call: KernelCall, example: Any) -> Any:
    """Return a window in the form that an argument has: a number of keys, keys to the left, or both sides.

    What stands for no window is the example. A function without one gets a number of keys that hides none.
    """
    window = call.sliding_window
    if name == "window_left":
        return window - 1
    if isinstance(example, tuple | list):
        right = example[1] if len(example) > 1 and window else -1
        return type(example)((window - 1, right))
    if name == "window_size":
        return (window - 1, 0) if window else (-1, -1)
    if window:
        return window
    is_none = example is None or (isinstance(example, int) and example <= 0)
    return example if is_none else max(1, int(call.seq_lens.max()))


# The record of an op that has none: its parameters get the values that parameters of their names have in the
# records of all libraries.

# Of a kernel whose source was not read: products and sums in the query's dtype, of up to 64 keys.
_UNREAD = {"products": "always", "query": True, "terms": 8}
_LIKE = 0.6  # the part of two ops' parameters that they share if one is a copy of the other


def record_of(function: Callable[..., Any], made: Op, mapping: Mapping[str, str]) -> Op:
    """Return the record of a function: ``made``, which says where it is, with arguments and abilities.

    ``mapping``: expressions by parameter, which win over the names. A name that several records have gets the
    value of the record that shares most parameters with the function. If a record shares enough of them, the
    function is a copy of its op, and has its abilities; otherwise they follow from the arguments. It gets
    contiguous tensors, no FP8 cache, and may round more than ops whose source was read. Raises InvalidCase
    for a parameter without a default that has no value, and for a wrong mapping.
    """
    parameters = inspect.signature(function).parameters
    _check_mapping(made, parameters, mapping)
    ordered = sorted(libraries(), key="vllm".__ne__)  # of equals, vLLM's first
    records = [op for library in ordered for op in ops_of(library) if op.is_triton]
    ranked = sorted(records, key=lambda op: -_likeness(op, parameters))
    required = [
        name
        for name, one in parameters.items()
        if one.default is _MISSING and one.kind not in _OPEN
    ]
    found = {name: mapping.get(name) or _value_of(name, ranked) for name in parameters}
    arguments = {name: text for name, text in found.items() if text is not None}
    for name in required:  # what a call may not state is not optional here
        if arguments.get(name) == "sm_scale":
            arguments[name] = "scale"
    missing = [name for name in required if name not in arguments]
    if missing:
        each = " ".join(f"--map {name}=…" for name in missing)
        names = "query, output, flash_key_cache, flash_value_cache, block_table, seq_lens, scale, …"
        text = (
            f"{made.summary.partition(',')[0]} has parameters whose names no record has: add {each}"
        )
        raise InvalidCase(f"{text} (expressions in {names})", field="map")
    where = {name: getattr(made, name) for name in ("name", "summary", "library", "module")}
    where |= {"python_name": made.python_name, "backends": made.backends, "arguments": arguments}
    where |= {"rounding": _UNREAD, "kv_cache_dtypes": ("auto",)}
    if _likeness(ranked[0], parameters) >= _LIKE:
        like = f"{package_of(ranked[0].library).title}'s {ranked[0].name}"
        where["summary"] = f"{made.summary} as those of {like}"
        where |= {"platforms": None, "releases": RELEASES, "strided": False, "hnd": False}
        return dataclasses.replace(ranked[0], **where)
    return dataclasses.replace(made, **where, **_abilities(arguments.values()))


def _likeness(op: Op, parameters: Collection[str]) -> float:
    """Return which part of the parameters of two ops both have."""
    return len(op.arguments.keys() & parameters) / len(op.arguments.keys() | set(parameters))


def _value_of(name: str, records: Iterable[Op]) -> str | None:
    """Return the value of a parameter in the first record that has it, or another name for the same."""
    same = NAMES.get(_FIELDS.get(name, ""), ())
    for names in ((name,), same):
        for op in records:
            for one in names:
                if one in op.arguments:
                    return op.arguments[one]
    return None


def _check_mapping(made: Op, parameters: Collection[str], mapping: Mapping[str, str]) -> None:
    """Raise InvalidCase for a parameter that the function lacks, or a name that no call has."""
    for name, text in mapping.items():
        if name not in parameters:
            known = ", ".join(parameters)
            refuse("map", f"an expression for a parameter of {made.function} ({known})", name)
        for used in sorted(names_in(text) - known_names()):
            near = suggestion(used, known_names())
            refuse("map", f"{name}=… of names in a call, such as query or block_table", used, near)


def _abilities(values: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a record that follow from the values of its arguments."""
    used = frozenset().union(*map(names_in, values))
    is_flash = bool(used & {"flash_key_cache", "flash_value_cache", "token_slots", "flat_keys"})
    layout = "flash" if is_flash else "x-split" if "key_cache" in used else None
    prefill = layout is None or bool(used & {"query_start_loc", "max_query_len"})
    contract = {name: "any" for name in ("softcap", "sinks") if name in used}
    return {
        "contract": contract if prefill else {**contract, "serves": "decode"},
        "prefill": prefill,
        "strided": False,
        "result": None if "output" in used else "returned",
        "new_tokens_from": "arguments" if "key" in used else "cache",
        "cache_layout": layout,
        "context": layout is not None,
        "min_splits": int("splits" in used),
    }
