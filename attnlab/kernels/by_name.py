"""Call a function that takes tensors, not a KernelCall: its arguments are found by their names.

:class:`ByName` does so for a function that stands for an op of vLLM. :func:`record_of` makes the record of an
op that has none.

The names are those of vLLM, FlashAttention and FlashInfer. :mod:`attnlab.recorder.arguments` reads calls by
the same table.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.errors import InvalidCase, Unsupported
from attnlab.case.fields import refuse, suggestion
from attnlab.case.ops import DECODE_FWD, RELEASES, UNIFIED, Op
from attnlab.kernels.binding import known_names, required_of
from attnlab.kernels.control import rows_equal
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
sm_scale: sm_scale softmax_scale scale sm_scale_withk
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


_OPTIONAL = (
    *("softcap", "alibi_slopes", "sinks", "q_scale", "output_scale", "qq_bias"),
    *("mm_prefix_range", "rswa_prefix_lens"),
)
# What the functions of NATIVE state of a call.
_STATED = (
    *("query_start_loc", "sm_scale", "sliding_window", "causal"),
    *("softcap", "alibi_slopes", "sinks"),
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
    def is_compiled(self) -> bool:
        """Answer whether the function is an op of a library that has no kernels for a CPU."""
        return getattr(self.function, "__name__", "") in COMPILED

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
        for name in required_of(parameters):
            if name not in SIZES and self._field(name, parameters) is None:
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
        """Call the function and write what it returns, if it writes nothing to an argument for the output."""
        parameters = inspect.signature(self.function).parameters
        given = self.arguments(call)
        has_output = "output" in {self._field(name, parameters) for name in given}
        positional = [
            name for name in given if parameters[name].kind is parameters[name].POSITIONAL_ONLY
        ]
        before = call.buffer.clone() if has_output else None
        returned = self.function(*[given.pop(name) for name in positional], **given)
        found = output_of(returned)[0]
        is_written = before is not None and not bool(rows_equal(call.buffer, before).all())
        if found is None or is_written or (has_output and found.shape != call.buffer.shape):
            return
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
    needed |= {name: getattr(call, name) is not None for name in _OPTIONAL}
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name)
        is_one = not isinstance(scale, torch.Tensor) and scale == 1.0
        needed[name] = call.kv_cache_dtype != "auto" and not is_one
    return needed


def _formed(value: Any, example: Any, *, at: int = 0) -> Any:
    """Return a value in the form of an example: a tensor of one number, its FP8 dtype, its dimensions."""
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


# Ops whose arguments are not those of a call: pages as lists, a query with a dimension for the rows of each
# sequence, a latent cache. The signatures are those of flash_attn 2.8, flash_mla and flashinfer 0.4.


def _flash_decode(function: Callable[..., Any], call: KernelCall) -> Any:
    key, value = _pages(call)
    given = {"cache_seqlens": call.seq_lens, "block_table": call.block_table, "causal": call.causal}
    window = (call.sliding_window - 1, 0) if call.sliding_window else None
    others = {"window_size": window, "softcap": call.softcap, "alibi_slopes": call.alibi_slopes}
    return _with(function, call, (_by_sequence(call), key, value), given, others)


def _flash_mla(function: Callable[..., Any], call: KernelCall) -> Any:
    cache, size = _latent(call)
    plan = getattr(sys.modules.get(function.__module__), "get_mla_metadata", None)
    per_head = call.query_lens.max().item() * call.query.shape[1]
    both = (None, None) if plan is None else plan(call.seq_lens, per_head, 1)
    given = (_by_sequence(call), cache, call.block_table, call.seq_lens, size, *both)
    return _with(function, call, given, {"causal": call.causal}, {})


def _trtllm_mla(function: Callable[..., Any], call: KernelCall) -> Any:
    cache, size = _latent(call)
    given = {
        **{"query": _by_sequence(call), "kv_cache": cache[:, :, 0], "qk_nope_head_dim": 128},
        **{"kv_lora_rank": size, "qk_rope_head_dim": call.query.shape[2] - size},
        **_of_trtllm(call),
    }
    return _with(function, call, (), given, {}, scale="bmm1_scale")


def _trtllm_decode(function: Callable[..., Any], call: KernelCall) -> Any:
    rows = int(call.query_lens.max())
    given = {"query": _by_sequence(call).flatten(0, 1), "kv_cache": _both(call), **_of_trtllm(call)}
    others = {
        **_window_left(call),
        "sinks": call.sinks,
        "q_len_per_req": rows if rows > 1 else None,
    }
    return _with(function, call, (), {**given, "kv_layout": "NHD"}, others, scale="bmm1_scale")


def _trtllm_context(function: Callable[..., Any], call: KernelCall) -> Any:
    lens = torch.nn.functional.pad(call.seq_lens.cumsum(0), (1, 0)).int()
    given = {"query": call.query, "kv_cache": _pages(call), **_of_trtllm(call), "bmm2_scale": 1.0}
    given |= {"max_q_len": call.max_query_len, "max_kv_len": given.pop("max_seq_len")}
    given |= {"batch_size": len(call.seq_lens), "cum_seq_lens_q": call.query_start_loc}
    given |= {"cum_seq_lens_kv": lens, "kv_layout": "NHD"}
    others = {**_window_left(call), "sinks": call.sinks}
    return _with(function, call, (), given, others, scale="bmm1_scale")


def _wrapper(kind: Callable[..., Any], call: KernelCall) -> Any:
    """Plan and run a wrapper of FlashInfer."""
    is_prefill = kind.__name__.startswith("BatchPrefill")
    if not is_prefill and bool((call.query_lens != 1).any()):
        raise Unsupported(f"{kind.__name__} takes one new token per sequence")
    size, wrapper = call.block_size, kind(_workspace(call), "NHD")
    counts = -(-call.seq_lens // size)
    pages = [row[:count] for row, count in zip(call.block_table, counts.tolist(), strict=True)]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    heads = (call.query.shape[1], call.key.shape[1], call.query.shape[2], size)
    lists = (starts, torch.cat(pages).int(), (call.seq_lens - (counts - 1) * size).int(), *heads)
    given = {"causal": call.causal} if is_prefill else {}
    others = {**_window_left(call), "logits_soft_cap": call.softcap}
    first = (call.query_start_loc, *lists) if is_prefill else lists
    _with(wrapper.plan, call, first, given, others, scale="sm_scale")
    return wrapper.run(call.query, _both(call))


NATIVE: Mapping[str, Callable[[Callable[..., Any], KernelCall], Any]] = {
    "flash_attn_with_kvcache": _flash_decode,
    "flash_mla_with_kvcache": _flash_mla,
    "trtllm_batch_decode_with_kv_cache_mla": _trtllm_mla,
    "trtllm_batch_decode_with_kv_cache": _trtllm_decode,
    "trtllm_batch_context_with_kv_cache": _trtllm_context,
    "BatchDecodeWithPagedKVCacheWrapper": _wrapper,
    "BatchPrefillWithPagedKVCacheWrapper": _wrapper,
}
COMPILED = frozenset([*NATIVE, "flash_attn_varlen_func"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Native(ByName):
    """A kernel that calls an op of :data:`NATIVE`, or plans and runs a wrapper of FlashInfer."""

    @property
    def op(self) -> str:
        """Return the op whose arguments describe these calls."""
        return UNIFIED

    @property
    def fixed_fields(self) -> tuple[str, ...]:
        """Return the scales that a call must not have."""
        return ("k_scale", "v_scale")

    def check(self, spec: str) -> None:
        """Check nothing: the arguments are known."""

    def __call__(self, call: KernelCall) -> None:
        """Call the op and write what it returns. Raises Unsupported for what it cannot do."""
        returned = NATIVE[self.function.__name__](self.function, call)
        found = output_of(returned)[0]
        if found is not None:
            call.buffer.copy_(found.reshape(call.buffer.shape))


def kernel_of(function: Callable[..., Any], example: Mapping[str, Any] | None = None) -> ByName:
    """Return what calls a function with the tensors of a KernelCall; ``example``: as of :class:`ByName`."""
    kind = Native if getattr(function, "__name__", "") in NATIVE else ByName
    return kind(function=function, example=example or {})


def _with(
    function: Callable[..., Any],
    call: KernelCall,
    first: Collection[Any],
    given: Mapping[str, Any],
    others: Mapping[str, Any],
    scale: str = "softmax_scale",
) -> Any:
    """Call a function; of ``others`` it gets those that are not None, and must have parameters for them."""
    used = {name: value for name, value in others.items() if value is not None}
    parameters = inspect.signature(function).parameters
    needed = [name for name, is_needed in _needed(call).items() if is_needed]
    others_needed = [name for name in needed if name not in (*_STATED, *given)]
    for name in (*(one for one in used if one not in parameters), *others_needed):
        raise Unsupported(f"{function.__name__} must have an argument {name} for this call")
    sm_scale = call.query.shape[2] ** -0.5 if call.sm_scale is None else call.sm_scale
    return function(*first, **given, **used, **{scale: sm_scale})


def _window_left(call: KernelCall) -> dict[str, Any]:
    return {"window_left": call.sliding_window - 1 if call.sliding_window else None}


def _by_sequence(call: KernelCall) -> torch.Tensor:
    """Return the query as [num_seqs, rows, heads, size]. Raises Unsupported for ragged queries."""
    rows = int(call.query_lens.max())
    if bool((call.query_lens != rows).any()):
        raise Unsupported("every sequence must have as many new tokens")
    rows_by_sequence: torch.Tensor = call.query.unflatten(0, (-1, rows))
    return rows_by_sequence


def _pages(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as [pages, tokens, heads, size]."""
    key, value = in_layout(call.key_cache, call.value_cache, "flash")
    return key.contiguous(), value.contiguous()


def _both(call: KernelCall) -> torch.Tensor:
    return torch.stack(_pages(call), 1)


def _latent(call: KernelCall) -> tuple[torch.Tensor, int]:
    """Return the keys of one KV head, whose first part are the values, and the size of that part."""
    key, value = _pages(call)
    size = value.shape[-1]
    if key.shape[2] != 1 or not torch.equal(key[..., :size].nan_to_num(), value.nan_to_num()):
        raise Unsupported("the values must be the first part of the keys")
    return key, size


def _of_trtllm(call: KernelCall) -> dict[str, Any]:
    lens = {"block_tables": call.block_table, "seq_lens": call.seq_lens}
    return {**lens, "max_seq_len": call.max_seq_len, "workspace_buffer": _workspace(call)}


def _workspace(call: KernelCall) -> torch.Tensor:
    size = 1 << 27 if call.query.is_cuda else 1
    return torch.zeros(size, dtype=torch.uint8, device=call.query.device)


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
    required = required_of(parameters)
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
    own = _abilities(arguments.values())
    has_cache = own["cache_layout"] is not None  # a record without one is of another op
    is_copy = has_cache == (ranked[0].cache_layout is not None)
    if is_copy and _likeness(ranked[0], parameters) >= _LIKE:
        like = f"{package_of(ranked[0].library).title}'s {ranked[0].name}"
        where["summary"] = f"{made.summary} as those of {like}"
        where |= {"platforms": None, "releases": RELEASES, "strided": False, "hnd": False}
        return dataclasses.replace(ranked[0], **where)
    return dataclasses.replace(made, **where, **own)


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
