"""The arguments of an attention op by the names that they have in vLLM, FlashAttention and FlashInfer.

A :class:`Reading` has the arguments of :meth:`attnlab.tensors.call.KernelCall.from_tensors` that were found.
Nothing is computed on tensors here: an argument is only looked up, so that reading is cheap on a GPU.
"""

import dataclasses
import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.case.ops import KV_CACHE_DTYPES
from attnlab.case.platforms import PLATFORMS
from attnlab.kernels.by_name import CONTEXT_LENS, NAMES, SIZES, output_of
from attnlab.tensors.call import KernelCall, Origin
from attnlab.tensors.quantised import FP8_DTYPES

Arguments = Mapping[str, Any]
REQUIRED = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
REQUIRED_OF_WRITE = ("key", "value", "key_cache", "value_cache", "slot_mapping")
# Arguments that change the result and that attnlab has no reference for, and the values that change nothing.
_UNMODELLED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("k_scale_cache", "v_scale_cache", "q_v", "mask_mod"), (None,)),
    **dict.fromkeys(("attn_mask", "gather_kv_indices", "dynamic_causal", "mask"), (None,)),
    "block_sparse_tensors": (None,),
    **dict.fromkeys(("use_alibi_sqrt", "skip_decode", "use_interleaved_v_cache"), (False,)),
    "interleaved_v": (False,),
    "interleaved_v_pack_factor": (0,),
    "blocksparse_vert_stride": (0,),
    "dropout_p": (0.0,),
    "cp_world_size": (1,),
    "kv_quant_mode": (0, 1),
}
# Arguments that change no number beyond rounding: scratch memory, tuning, and what is only returned.
_NEUTRAL = (
    "attn_logits", "attn_logits_max", "attn_lse", "exp_sum", "exp_sums", "max_logits", "tmp_out",
    "tmp_output", "workspace", "workspace_buffer", "scheduler_metadata", "softmax_segm_output",
    "softmax_segm_max", "softmax_segm_expsum", "lean_Mp", "lean_Lp", "lean_Op", "lean_locks",
    "num_splits", "num_kv_splits", "max_kv_splits", "num_par_softmax_segments", "seq_threshold_3D",
    "use_td", "enable_pdl", "use_pdl", "enable_lean", "uneven_batch", "pack_gqa", "sm_margin",
    "fa_version", "ver", "deterministic", "backend", "isa", "mfma_type", "num_warps", "num_stages",
    "waves_per_eu", "return_softmax_lse", "return_attn_probs", "return_lse", "out_dtype",
    "o_sf_vec_size", "cu_seqlens_k", "cum_seq_lens_kv", "max_len_in_batch", "rotary_interleaved",
)  # fmt: skip


class BoundArguments(dict[str, Any]):
    """The arguments of a call by name, with defaults. ``given``: the names of those not at their default."""

    def __init__(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.given = {
            name
            for name, value in arguments.items()
            if name not in defaults or not _is_same(value, defaults[name])
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """What was read from the arguments of a call.

    - ``fields``: arguments of ``KernelCall.from_tensors``, by its names.
    - ``unmodelled``: the names of arguments without a reference.
    - ``unknown``: arguments that were not understood and differ from their defaults, by name.
    - ``read_as``: how arguments of another form were read, in words.
    - ``why_not``: why the call is not recorded, or "".
    - ``result``: returns (output, log-sum-exp or None) from what the op returned; None if the op writes
      ``fields["output"]``.
    - ``guessed``: what of a dense function's arguments their names do not say, of "order" (of tokens and
      heads) and "causal"; ``dims``: the dimensions of its query.
    - ``weights``: those that attention in torch had, [batch, heads, rows, keys]; None of other calls.
    - ``stated``: returns the arguments, "name=value", that the record of the op would pass otherwise for the
      call as it was read; None without a record.
    """

    fields: dict[str, Any]
    unmodelled: list[str] = field(default_factory=list)
    unknown: dict[str, Any] = field(default_factory=dict)
    read_as: list[str] = field(default_factory=list)
    why_not: str = ""
    result: Callable[[Any], tuple[torch.Tensor | None, torch.Tensor | None]] | None = None
    guessed: tuple[str, ...] = ()
    dims: int = 0
    weights: torch.Tensor | None = None
    stated: Callable[[KernelCall], tuple[str, ...]] | None = None

    def unknown_texts(self, call: KernelCall) -> tuple[str, ...]:
        """Return the unknown arguments as "name=value", without those that repeat a size of the call."""
        found = [
            f"{name}={shown(value)}"
            for name, value in self.unknown.items()
            if name not in SIZES or shown(value) != str(SIZES[name](call))
        ]
        return tuple(dict.fromkeys((*found, *(self.stated(call) if self.stated else ()))))


def read_arguments(arguments: Arguments, known: Collection[str] = ()) -> Reading:
    """Return the fields that the arguments of an op hold, by the names in :data:`NAMES`.

    Of :class:`BoundArguments`, those that are not understood are kept; ``known``: further names that are. A
    dict of tensors may hold anything: only a window_size that is not understood is kept.
    """
    fields, used = {}, {*known, *_UNMODELLED, *_NEUTRAL}
    for name, aliases in NAMES.items():
        for alias in aliases:
            if arguments.get(alias) is not None:
                fields[name] = arguments[alias]
                used.add(alias)
                break
    for new, cache in (("key", "key_cache"), ("value", "value_cache")):
        tensor = fields.get(new)
        if cache not in fields and isinstance(tensor, torch.Tensor) and tensor.dim() >= 4:
            fields[cache] = fields.pop(new)
    if "key" in fields and fields.get("seq_lens") is arguments.get(CONTEXT_LENS):
        fields.pop("seq_lens", None)
    used |= _take_window(fields, arguments)
    given = arguments.given if isinstance(arguments, BoundArguments) else {"window_size"}
    unknown = {
        name: arguments[name]
        for name in arguments
        if name in given and name not in used and arguments[name] is not None
    }
    unmodelled = [
        name
        for name, neutral in _UNMODELLED.items()
        if name in arguments and not _is_one_of(arguments[name], neutral)
    ]
    if not isinstance(fields.get("causal", True), (bool, int, float, torch.Tensor)):
        fields.pop("causal")
    return Reading(fields=fields, unmodelled=unmodelled, unknown=unknown)


def _is_same(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return value is default
    try:
        return value is default or (type(value) is type(default) and bool(value == default))
    except (TypeError, ValueError, RuntimeError):
        return False


def shown(value: Any) -> str:
    """Return an argument as short text; of a larger tensor, only its shape."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return str(value.item())
        return f"a tensor {tuple(value.shape)}"
    return " ".join(f"{value!r:.40}".split())


def missing(fields: Mapping[str, Any], *, writes_cache: bool = False) -> list[str]:
    """Return the required fields of an attention op, or of a cache write, that are not there.

    Lists of token slots (``kv_indptr``, ``kv_indices``) stand for block table and lengths.
    """
    required = REQUIRED_OF_WRITE if writes_cache else REQUIRED
    listed = {"token_starts", "token_slots"} <= fields.keys()
    instead = ("block_table", "seq_lens") if listed else ()
    return [name for name in required if name not in fields and name not in instead]


def check_complete(reading: Reading, *, writes_cache: bool = False) -> None:
    """Raise InvalidCall unless every required field was read."""
    for name in missing(reading.fields, writes_cache=writes_cache):
        names = " or ".join(NAMES[name])
        raise InvalidCall(f"{name} must be among the arguments, as {names}, got none")


def take_tables(reading: Reading) -> None:
    """Bring tables and caches of other forms into those of a KernelCall. Changes the reading.

    - Lists of token slots become a block table; their lengths are waited for on a GPU.
    - A table for every request of an engine is read at the requests of the call.
    - A cache without a dimension for its blocks gets one.
    """
    page_size, fields = reading.unknown.get("page_size", 1), reading.fields
    reading.read_as += [
        *_table_of_slots(fields),
        *_table_of_requests(fields),
        *_paged_caches(fields, page_size),
    ]


def _table_of_slots(fields: dict[str, Any]) -> list[str]:
    """Make a block table and lengths from lists of the sequences' token slots, with blocks of one token."""
    starts, slots = fields.pop("token_starts", None), fields.pop("token_slots", None)
    tensors = isinstance(starts, torch.Tensor) and isinstance(slots, torch.Tensor)
    if not tensors or "block_table" in fields or "seq_lens" in fields:
        return []
    fields["block_table"], fields["seq_lens"] = table_of_lists(starts, slots)
    return ["kv_indptr and kv_indices as a block table with blocks of one token"]


def table_of_lists(
    starts: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor | None = None,
    new: torch.Tensor | None = None,
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


def _table_of_requests(fields: dict[str, Any]) -> list[str]:
    """Take the rows of a table of all requests that belong to the call."""
    index, table = fields.pop("request_index", None), fields.get("block_table")
    if not isinstance(index, torch.Tensor) or not isinstance(table, torch.Tensor):
        return []
    fields["block_table"] = table[index.long().to(table.device)]
    return ["the block table as the rows that the request index names"]


def _paged_caches(fields: dict[str, Any], page_size: Any) -> list[str]:
    """Give a cache [num_slots, num_kv_heads, head_size] a dimension for its blocks."""
    size = page_size if type(page_size) is int and page_size > 0 else 1
    caches = {name: fields.get(name) for name in ("key_cache", "value_cache")}
    flat = {n: one for n, one in caches.items() if isinstance(one, torch.Tensor) and one.dim() == 3}
    if len(flat) < 2 or any(len(one) % size for one in flat.values()):
        return []
    fields.update({name: one.unflatten(0, (-1, size)) for name, one in flat.items()})
    fields.setdefault("layout", "flash")
    tokens = "one token" if size == 1 else f"{size} tokens"
    return [f"the caches with blocks of {tokens}"]


def _take_window(fields: dict[str, Any], arguments: Arguments) -> set[str]:
    """Set ``sliding_window`` to the number of keys that a row sees, 0 for all; return the arguments read.

    FlashAttention's window_size is (keys to the left, keys to the right), -1 for all; FlashInfer's
    window_left is the first of them. A window_size of one number is not read: it may count the row's own key
    or not. Nor is one that shows keys to the right.
    """
    window, used = arguments.get("window_size"), {"window_left", "rswa_window"}
    left = arguments.get("window_left")
    if isinstance(window, (tuple, list)) and len(window) == 2:
        left = window[0]
        used |= {"window_size"} if window[1] in (0, -1) else set()
    if left is not None:
        fields["sliding_window"] = left + 1 if left >= 0 else 0
    if isinstance(fields.get("sliding_window"), (tuple, list)):
        fields["sliding_window"] = fields["sliding_window"][0] + 1
    if "sliding_window" in fields:
        fields["sliding_window"] = max(0, int(fields["sliding_window"]))
    if arguments.get("rswa_window") is None:  # R-SWA needs both arguments
        fields.pop("rswa_prefix_lens", None)
    elif "rswa_prefix_lens" in fields:
        fields["sliding_window"] = int(arguments["rswa_window"])
    return used


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    return value is None or value in neutral


_FP8_PLATFORM = {torch.float8_e4m3fn: "sm_90", torch.float8_e4m3fnuz: "gfx942"}


def _has_format(platform: str | None, other: str) -> bool:
    """Answer whether a platform has the FP8 format of another: an interpreter runs both on a CPU."""
    known = PLATFORMS.get(platform or "")
    return known is not None and known.fp8_e4m3 == PLATFORMS[other].fp8_e4m3


def call_of_reading(
    reading: Reading, origin: Origin, *, op: str | None = None, layout: str | None = None
) -> KernelCall:
    """Return the KernelCall of what was read. ``op``, ``layout``: as for ``from_tensors``.

    Raises InvalidCall with one line that names the first argument that is missing or does not fit.
    """
    take_tables(reading)
    check_complete(reading)
    fields = {name: value for name, value in reading.fields.items() if value is not None}
    read_as = [*reading.read_as, *_normalised(fields), *_in_float32(fields)]
    for name, value in fields.items():
        if name in _NUMBERS and name not in _SCALES and not _is_by_sequence(name, value):
            fields[name] = number_of(name, value)
    if getattr(fields["query"], "dtype", None) not in FP8_DTYPES:
        fields.pop("q_scale", None)  # ops read it with a query in FP8 only
    for name in _SCALES:
        if name in fields:
            fields[name] = _scale(name, fields[name], fields)
    if not fields.get("softcap"):
        fields.pop("softcap", None)
    for name in _BY_SEQUENCE:  # an engine's buffers may have room for more sequences
        if isinstance(fields.get(name), torch.Tensor) and fields[name].dim():
            fields[name] = fields[name][: len(fields["seq_lens"])]
    key_cache = fields["key_cache"]
    given = fields.get("kv_cache_dtype")  # vLLM also has the names of 16-bit dtypes
    is_named = getattr(key_cache, "dtype", None) == torch.uint8 and given in KV_CACHE_DTYPES
    fields["kv_cache_dtype"] = given if is_named else None
    format_of = _FP8_PLATFORM.get(getattr(key_cache, "dtype", torch.uint8))
    if format_of is not None and not _has_format(origin.platform, format_of):
        origin = dataclasses.replace(origin, platform=format_of)
    fields.setdefault("op", op)
    fields.setdefault("layout", layout)
    read_as += _take_mask(fields)
    _drop_new_tokens(fields)
    call = KernelCall.from_tensors(
        **fields, origin=origin, unmodelled=tuple(reading.unmodelled), read_as=tuple(read_as)
    )
    return dataclasses.replace(call, unknown_arguments=reading.unknown_texts(call))


def _normalised(fields: dict[str, Any]) -> list[str]:
    """Bring query and output into the shapes of a KernelCall; return what was done. Changes ``fields``.

    Leading dimensions of 1 go, and so does a dimension for the new tokens of each sequence.
    """
    done: list[str] = []
    query = fields["query"]
    if not isinstance(query, torch.Tensor):
        return done
    shape = query.shape
    seqs = len(fields["seq_lens"]) if isinstance(fields["seq_lens"], torch.Tensor) else -1
    if query.dim() == 4 and query.shape[0] == seqs and "query_start_loc" not in fields:
        starts = torch.arange(seqs + 1, dtype=torch.int32, device=query.device)
        fields["query_start_loc"] = starts * query.shape[1]
        query = query.flatten(0, 1)
    while query.dim() > 3 and query.shape[0] == 1:
        query = query[0]
    if query.dim() == 3 and query.shape != shape:
        fields["query"] = query
        done.append(f"query {tuple(shape)} as {tuple(query.shape)}")
    for name in ("output", "before"):
        given = fields.get(name)
        if isinstance(given, torch.Tensor) and _is_flat_output(given, shape, query):
            fields[name] = given.reshape(*query.shape[:2], -1)
            if name == "output":
                done.append(f"output {tuple(given.shape)} as {tuple(fields[name].shape)}")
    return done


def _in_float32(fields: dict[str, Any]) -> list[str]:
    """Take arguments in float64 as float32, if they have its numbers. Changes ``fields``."""
    kind, names = torch.float64, ("query", "key_cache", "value_cache")
    if not all(getattr(fields[name], "dtype", None) == kind for name in names):
        return []
    if not all(torch.equal(fields[name].float().double(), fields[name]) for name in names):
        raise InvalidCall("query, keys and values must be numbers of float32, got float64")
    for name, one in fields.items():
        if isinstance(one, torch.Tensor) and one.dtype == kind:
            fields[name] = one.float()
    return ["numbers of float64 as float32"]


def _take_mask(fields: dict[str, Any]) -> list[str]:
    """State a mask [num_seqs, rows, keys] as lengths, causality and a window, if it is no more than these.

    Then these have the names of the catalogue. Changes ``fields``; returns what was done.
    """
    bias = fields.get("qq_bias")
    if not isinstance(bias, torch.Tensor) or bias.dim() != 3 or fields.get("causal"):
        return []
    visible, (_, rows, keys) = bias == 0, bias.shape
    number = torch.arange(keys, device=bias.device)
    lens = torch.where(visible.any(1), number + 1, 0).amax(1)
    back = (lens[:, None] - rows + torch.arange(rows, device=bias.device))[:, :, None] - number
    widest = int(back.masked_fill(~visible, -1).max()) + 1
    if not bool(((bias == -torch.inf) | visible).all()) or int(lens.min()) < rows:
        return []
    for text, window in {"all keys": None, "the causal mask": keys, "": widest}.items():
        wanted = number < lens[:, None, None]
        if window is not None:
            wanted = wanted & (back >= 0) & (back < window)
        if torch.equal(wanted.expand_as(visible), visible):
            fields |= {"qq_bias": None, "causal": window is not None, "seq_lens": lens.int()}
            fields["sliding_window"] = widest if not text else 0
            short = bool((lens < keys).any())
            what = text or f"the causal mask with a window of {widest} keys"
            return [f"the mask as {what}" + ", of the first keys of each sequence" * short]
    return []


def _is_flat_output(output: torch.Tensor, given: torch.Size, query: torch.Tensor) -> bool:
    """Answer whether an output has the elements of [num_tokens, num_heads, value_size] in this order.

    It may have leading dimensions of 1, those of the query as it was ``given``, and heads and elements in
    one.
    """
    if query.dim() != 3 or (output.dim() == 3 and output.shape[:2] == query.shape[:2]):
        return False
    tokens, heads, _ = query.shape
    sizes = list(output.shape)
    while len(sizes) > 2 and sizes[0] == 1:
        del sizes[0]
    if len(sizes) == len(given) and sizes[:-1] == list(given[:-1]):
        return True
    if len(sizes) == 2:
        return sizes[0] == tokens and sizes[1] % heads == 0
    return len(sizes) == 3 and sizes[:2] == [tokens, heads]


_SCALES = ("k_scale", "v_scale", "q_scale")
_NUMBERS = {
    **dict.fromkeys(("sm_scale", "softcap", "output_scale", *_SCALES), float),
    **dict.fromkeys(("max_query_len", "max_seq_len", "sliding_window"), int),
    **dict.fromkeys(("chunk_lookback", "window_right"), int),
    **dict.fromkeys(("causal", "mm_prefix_clamp_sliding_window"), bool),
}
_BY_SEQUENCE = ("causal", "mm_prefix_range", "rswa_prefix_lens")  # tensors with a row per sequence


def _is_by_sequence(name: str, value: Any) -> bool:
    """Answer whether a field that may be a number is a tensor with one number per sequence."""
    return name in _BY_SEQUENCE and isinstance(value, torch.Tensor) and value.dim() == 1


def number_of(name: str, value: Any) -> Any:
    """Return a field that is a number, of a tensor with one element, too; raise InvalidCall."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return _NUMBERS[name](value)
    except (TypeError, ValueError) as error:
        kind = _NUMBERS[name].__name__
        raise InvalidCall(f"{name} must be one {kind}, got {value!r:.60}") from error


def _scale(name: str, scale: Any, fields: dict[str, Any]) -> float | torch.Tensor:
    """Return a number for a tensor of one element; a scale per KV head as one per sequence and head."""
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return float(number_of(name, scale))
    if scale.dim() == 1:
        return scale.expand(len(fields["seq_lens"]), -1)
    return scale


def _drop_new_tokens(fields: dict[str, Any]) -> None:
    """Drop key and value unless both are there: a part of them means nothing."""
    if ("key" in fields) != ("value" in fields):
        fields.pop("key", None)
        fields.pop("value", None)


def plain_kv_cache_dtype(given: Any, key_cache: torch.Tensor, model: torch.dtype) -> str:
    """Return the kv_cache_dtype of a cache; ``model``: the dtype of the tokens. Raises InvalidCall."""
    if key_cache.dtype in FP8_DTYPES:
        return "fp8_e5m2" if key_cache.dtype == torch.float8_e5m2 else "fp8"
    if key_cache.dtype == torch.uint8:
        if given in KV_CACHE_DTYPES[1:]:
            return str(given)
        text = f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES[1:])} for a uint8 cache"
        raise InvalidCall(f"{text}, got {given!r:.40}")
    if key_cache.dtype != model:
        text = f"key_cache must be {model} like key, uint8 or FP8, got {key_cache.dtype}"
        raise InvalidCall(text)
    return "auto"


Adjust = Callable[[dict[str, Any], Reading], None]
Bind = Callable[[tuple[Any, ...], dict[str, Any]], BoundArguments]


LAUNCH = "a launch of"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """A function whose calls are recorded.

    - ``module``, ``function``: where it is defined; "Class.method" for a method.
    - ``is_plan``: the call is not recorded. Its arguments complete those of later calls of the same object.
    - ``is_launch``: it launches a kernel of Triton, which may be attention.
    - ``op``: the op of :data:`attnlab.case.ops.OPS` that describes its arguments; None chooses by the
      layout of the cache. ``layout``: that of its cache, None to find it by the shapes.
    - ``writes_cache``: the op writes a cache; otherwise it is an attention op.
    - ``adjust``: completes what :func:`attnlab.recorder.arguments.read_arguments` found by the names of
      the arguments. It changes the Reading and computes nothing that waits for a GPU.
    - ``is_guess``: the function was not named by anybody; its arguments have the names of attention's.
    - ``is_dense``: keys and values are no cache, so the function cannot run other calls.
    - ``reads``: the names of further arguments that ``adjust`` reads, or that change no number. Others whose
      names are not known are kept with the call, and what may depend on them is not decided.
    """

    module: str
    function: str
    op: str | None = None
    layout: str | None = None
    adjust: Adjust = lambda arguments, reading: None
    writes_cache: bool = False
    reads: tuple[str, ...] = ()
    is_guess: bool = False
    is_dense: bool = False
    is_plan: bool = False
    is_launch: bool = False

    @property
    def name(self) -> str:
        """Return "module.function", of a kernel of Triton as a launch."""
        name = f"{self.module}.{self.function}"
        return f"{LAUNCH} {name}" if self.is_launch and self.is_guess else name

    def read(self, arguments: dict[str, Any]) -> Reading:
        """Return what the arguments hold; ``why_not`` says what they lack of attention or a cache write."""
        reading = read_arguments(arguments, self.reads)
        self.adjust(arguments, reading)
        if reading.result is None and "output" not in reading.fields and not self.writes_cache:
            reading.result = lambda returned: (
                output_of(returned)[0],
                None,
            )  # what else is not known
        if not self.writes_cache:
            take_tables(reading)
        absent = missing(reading.fields, writes_cache=self.writes_cache)
        if absent and not reading.why_not:
            reading.why_not = f"no argument {' or '.join(NAMES[absent[0]])}"
        return reading


_PLAN = "_attnlab_plan"


def keep_plan(arguments: BoundArguments) -> None:
    """Keep the arguments of a plan with its object, with copies of their tensors."""
    kept = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name != "self"
    }
    setattr(arguments["self"], _PLAN, BoundArguments(kept, {}))


def with_plan(arguments: BoundArguments) -> BoundArguments:
    """Return the arguments of a call completed by those of its object's last plan."""
    plan = getattr(arguments.get("self"), _PLAN, None)
    if plan is None:
        return arguments
    given = {name: value for name, value in arguments.items() if name in arguments.given}
    return BoundArguments({**arguments, **plan, **given}, {})


def binder(signature: inspect.Signature) -> Bind:
    """Return a function (args, kwargs) that returns a call's arguments by name, with defaults.

    It raises TypeError for arguments that there are no parameters for. ``inspect.Signature.bind`` takes many
    times as long; it is used for parameters like *args.
    """
    parameters = signature.parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(one.kind not in named for one in parameters):
        return functools.partial(_bound, signature)
    positional = [one.name for one in parameters if one.kind is named[0]]
    names = {one.name for one in parameters}
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        if len(args) > len(positional) or not names.issuperset(kwargs):
            raise TypeError(f"there is no parameter for each argument of {signature}")
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        return BoundArguments({**defaults, **given}, defaults)

    return bind


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> BoundArguments:
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()
    arguments, defaults = dict(found.arguments), dict[str, Any]()
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            defaults[name] = ()
        elif parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    return BoundArguments(arguments, defaults)


def release_of(program: str) -> str | None:
    """Return the release of an imported or installed package."""
    version = getattr(sys.modules.get(program), "__version__", None)
    return version if isinstance(version, str) else _installed_release(program)


@functools.cache
def _installed_release(program: str) -> str | None:
    try:
        return importlib.metadata.version(program)
    except importlib.metadata.PackageNotFoundError:
        return None


def op_of_text(text: str) -> RecordedOp:
    """Return the op "module:function"; its arguments are found by their names. Raises InvalidCase."""
    module, colon, function = text.partition(":")
    if not (colon and module and function.isidentifier()):
        raise InvalidCase(f"op must be MODULE:FUNCTION, got {text!r}")
    return RecordedOp(module=module, function=function)
