"""Bind the arguments of an op to a KernelCall, as the op's record states (:mod:`attnlab.library.op`).

The arguments of all releases are in the record, by the library's names. :func:`bind` passes those that the
function at hand has.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

import torch

from attnlab.case.errors import Unavailable
from attnlab.contracts.contract import Target
from attnlab.kernels import model as paged
from attnlab.kernels.model import Partials, partials, slot_mapping, written_cache
from attnlab.kernels.replaced import replacing, setting
from attnlab.kernels.triton.interpreter import interpret_if_possible
from attnlab.kernels.vllm.features import check_call
from attnlab.library.op import names_in
from attnlab.tensors.cache import as_flash, to_flash
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import flash, mask_of
from attnlab.tensors.formats import FORMATS, coarse_step

Arguments = dict[str, Any]
_MOST_BEFORE = 1 << 28  # elements of blocks that are copied before the lowest of the block table
_DEFAULT = object()  # of a parameter that is not passed
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs
_NUMBER: ContextVar[float] = ContextVar("scratch", default=float("nan"))


def scratch_full_of(number: float) -> AbstractContextManager[float]:
    """Let scratch memory be full of ``number`` inside the block, in place of NaN.

    An output that changes depends on scratch memory that no kernel has written.
    """
    return setting(_NUMBER, number)


def scratch_number() -> float:
    """Return what scratch memory is full of here."""
    return _NUMBER.get()


def new_empty_is_scratch() -> AbstractContextManager[None]:
    """Let ``Tensor.new_empty`` return scratch memory inside the block, for buffers that an op makes."""
    original = torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made = original(tensor, *size, **options)
        return made.fill_(_NUMBER.get()) if made.is_floating_point() else made

    return replacing(torch.Tensor, new_empty=new_empty)


def scratch(call: KernelCall, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 scratch memory full of NaN, so that a read before a write shows in the output."""
    return torch.full(shape, _NUMBER.get(), device=call.query.device)


class _Scratch:
    """What ``float32`` means in a record: ``float32[sizes]`` is scratch memory of that shape."""

    def __init__(self, call: KernelCall) -> None:
        self._call = call

    def __getitem__(self, sizes: int | tuple[int, ...]) -> torch.Tensor:
        return scratch(self._call, sizes if isinstance(sizes, tuple) else (sizes,))


def _one(call: KernelCall, number: float | None) -> torch.Tensor | None:
    """Return a number as [1] float32, None for none."""
    return None if number is None else torch.tensor([number], device=call.query.device)


def _flash(call: KernelCall, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and value cache, each [num_blocks, block_size, num_kv_heads, head_size].

    If the blocks before the lowest one in the block table have more than 2^28 elements, they are not copied:
    they are untouched memory. The cache of a saved call that has this layout, or HND, is not copied: the op
    gets it with its own strides.
    """
    dtype = paged.format_of(call, target).dtype
    if call.layout != "x-split" and call.strides == "contiguous" and not call.spec.writes_cache:
        key, value = as_flash(call.key_cache, call.value_cache)
        return key.view(dtype), value.view(dtype)
    first = int(call.block_table.min()) if call.block_table.numel() else 0
    if first * call.key_cache[0].numel() <= _MOST_BEFORE:
        first = 0
    key, value = flash(*to_flash(call.key_cache, call.value_cache, first), call.strides)
    return key.view(dtype), value.view(dtype)


def _partials(call: KernelCall, target: Target) -> Partials:
    """Return the partial outputs and their log-sum-exp.

    The log-sum-exp of an empty part is -inf, as in FlashAttention 3. In a padded call it is +inf in every
    second row, as in FlashAttention 2.
    """
    parts = partials(call, target)
    if call.padding:
        for log in (parts.prefix_lse, parts.suffix_lse):
            log[:, ::2] = log[:, ::2].masked_fill(log[:, ::2] == -torch.inf, torch.inf)
    return parts


def _slots(call: KernelCall) -> torch.Tensor:
    """Return the slots with -1 for half of the padded tokens; the other half has no entry, as in vLLM."""
    slots = slot_mapping(call)
    return torch.cat([slots, slots.new_full((call.padding // 2,), -1)])


def _right(call: KernelCall) -> int:
    """Return the window to the right, 0 for causal rows; unified_attention takes the left one for it."""
    if not call.sliding_window:
        return -1
    return 0 if call.causal is True or call.window_right is None else call.window_right


def _window_starts(call: KernelCall) -> torch.Tensor:
    """Return the position of the first key that the first new token of each sequence sees, [num_seqs] int32.

    It is 0 without a window. The keys before it are in no list of slots, as in SGLang.
    """
    if not call.sliding_window:
        return torch.zeros_like(call.seq_lens).int()
    return (_context_lens(call) - call.sliding_window + 1).clamp(min=0).int()


def _context_lens(call: KernelCall) -> torch.Tensor:
    """Return the number of tokens before the new ones, [num_seqs] int32."""
    return (call.seq_lens - call.query_lens).int()


def _slots_of(
    call: KernelCall, ends: torch.Tensor, firsts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the slots of the positions from ``firsts`` (window_starts) to ``ends``, sequence after sequence,
    [n] int64."""
    slots = [call.block_table.new_zeros(0)]
    firsts = _window_starts(call) if firsts is None else firsts
    for row, first, end in zip(_slot_table(call), firsts, ends, strict=True):
        slots.append(row[first:end])
    return torch.cat(slots).long()


def _slot_table(call: KernelCall) -> torch.Tensor:
    """Return the slots of all positions of each sequence, [num_seqs, n] int32."""
    slots = torch.arange(call.block_size, device=call.query.device)
    return (call.block_table[..., None] * call.block_size + slots).flatten(1).int()


def _flat(call: KernelCall, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of all tokens, sequence after sequence, each [num_kv_heads, tokens, size].

    A block of zeros follows, as in LMDeploy (lmdeploy/pytorch/backends/cuda/attention/default.py, 0.18.0).
    """
    slots = _slots_of(call, call.seq_lens, torch.zeros_like(call.seq_lens))
    pad = (0, 0, 0, call.block_size)
    key, value = (
        torch.nn.functional.pad(one.flatten(0, 1)[slots].transpose(0, 1), pad).contiguous()
        for one in _flash(call, target)
    )
    return key, value


def _starts_of(call: KernelCall, ends: torch.Tensor) -> torch.Tensor:
    """Return where the slots of each sequence begin, [num_seqs + 1] int32."""
    return _sums(ends - _window_starts(call)).int()


def _sums(lens: torch.Tensor) -> torch.Tensor:
    """Return the sums of the lengths before each sequence, [num_seqs + 1]."""
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0))


def _seen(call: KernelCall, firsts: torch.Tensor) -> torch.Tensor:
    """Return which keys from a position on each new token sees, but for the window, [n] uint8.

    ``firsts``: that position for each sequence. The tokens follow each other, each with all keys of its
    sequence from there on.
    """
    found = [call.query.new_zeros(0, dtype=torch.uint8)]
    lens = zip(_context_lens(call).tolist(), call.seq_lens.tolist(), firsts.tolist(), strict=True)
    for seq, (ctx_len, seq_len, first) in enumerate(lens):
        rows = torch.arange(ctx_len, seq_len, device=call.query.device)
        seen = mask_of(call, seq, sliding_window=0).visible(rows, first)
        found.append(seen.flatten().to(torch.uint8))
    return torch.cat(found)


def _four_bit_cache(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return keys in E4M3 and values in 4 bits with their scale and least number in float16, [blocks,
    block_size, heads, 3 * head_size / 2 + 4] uint8 (ops/triton_turboquant_store.py, 0.33.0)."""
    step = coarse_step(value)
    numbers = (value.float() / step + 8).nan_to_num(0.0).to(torch.uint8).unflatten(-1, (-1, 2))
    lost = torch.where(value.isnan().any(-1, keepdim=True), torch.nan, 1.0)
    parts = torch.cat([step * lost, -8 * step * lost], -1).half().contiguous().view(torch.uint8)
    keys = key.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([keys, numbers[..., 0] | (numbers[..., 1] << 4), parts], -1)


class Quantised(NamedTuple):
    """A cache [blocks, block_size, heads, size] as numbers of a narrow format, and their scales."""

    numbers: torch.Tensor
    scales: torch.Tensor


def _scaled(call: KernelCall, target: Target, cache: torch.Tensor) -> Quantised:
    """Return numbers of 4 bits in the platform's E4M3, and their scales [..., 1] float32, as AITER's."""
    step = coarse_step(cache)
    return Quantised((cache.float() / step).to(FORMATS[target.platform.fp8_e4m3].dtype), step)


def _affine(call: KernelCall, cache: torch.Tensor, bits: int, first: int) -> Quantised:
    """Return numbers of 4 bits as (numbers - zero) * scale, as LMDeploy's: numbers of ``bits`` in uint8, the
    halves of a token in one byte with 4 bits, and [..., 2] scales and zero points in the query's dtype.

    Zero points differ by slot and head, from the ``first`` on.
    """
    step, shape = coarse_step(cache), cache.shape[:-1]
    at = torch.arange(cache[..., 0].numel(), device=cache.device).view(shape)[..., None] + first
    zero = 7 + at % ((1 << bits) - 14)
    numbers = (cache.float() / step).round().clamp(-7, 7).nan_to_num(0.0) + zero
    lost = torch.where(cache.isnan().any(-1, keepdim=True), torch.nan, 1.0)
    scales = torch.cat([step * lost, zero], -1).to(call.query.dtype)
    stored = numbers.to(torch.uint8)
    if bits == 4:
        low, high = stored.chunk(2, -1)
        stored = low | (high << 4)
    return Quantised(stored.contiguous(), scales)


def _decoded(call: KernelCall, written: Quantised, cache: torch.Tensor, first: int) -> torch.Tensor:
    """Return ``cache`` with the numbers that were ``written`` to the places of ``_affine`` since."""
    bits = 8 * written.numbers.shape[-1] // cache.shape[-1]
    before, numbers = _affine(call, cache, bits, first), written.numbers
    if bits == 4:
        numbers = torch.cat([numbers & 0xF, numbers >> 4], -1)
    pairs = zip(before, written, strict=True)
    same = [torch.isclose(a, b, 0, 0, equal_nan=True).all(-1) for a, b in pairs]
    scale, zero = written.scales.float().split(1, -1)
    found = ((numbers.float() - zero) * scale).to(cache.dtype)
    return torch.where((same[0] & same[1])[..., None], cache, found)


# Of DeepSeek's MLA: the latent, which is the value, and the rest of the key.
_LATENT, _APART = 512, 64


def _latent(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value and the first half of a key as a latent, and the other half apart, [..., 576]."""
    half, pad = key.shape[-1] // 2, torch.nn.functional.pad
    latent = torch.cat([value, key[..., :half]], -1)
    parts = (pad(latent, (0, _LATENT - latent.shape[-1])), pad(key[..., half:], (0, _APART - half)))
    return torch.cat(parts, -1)


def _seen_slots(call: KernelCall) -> torch.Tensor:
    """Return the places of the keys that each row and KV head sees, in a list of the heads of all slots,
    [tokens * kv_heads, 1, n] int32, -1 after them; n is a multiple of 16."""
    width, slots = -(-int(call.seq_lens.max()) // 16) * 16, _slot_table(call)
    heads = torch.arange(call.key.shape[1])[:, None]
    found = torch.full((call.query.shape[0], len(heads), width), -1, dtype=torch.int32)
    ctx_lens = _context_lens(call).tolist()
    for seq, (first, end) in enumerate(pairwise(call.query_start_loc.tolist())):
        rows = torch.arange(ctx_lens[seq], ctx_lens[seq] + end - first)
        seen = mask_of(call, seq).visible(rows, 0)
        own = slots[seq, : seen.shape[1]] * len(heads) + heads
        found[first:end, :, : own.shape[1]] = torch.where(seen[:, None], own, -1).int()
    return found.flatten(0, 1)[:, None].to(call.query.device)


def _triton_dtype(call: KernelCall) -> Any:
    """Return the query's dtype as Triton's."""
    interpret_if_possible()
    import triton.language

    return getattr(triton.language, str(call.query.dtype).removeprefix("torch."))


# What an expression of a record can name, in addition to the fields of a KernelCall.
_VALUES: dict[str, Callable[[KernelCall, Target], Any]] = {
    "default": lambda call, target: _DEFAULT,
    # Sizes.
    "tokens": lambda call, target: call.query.shape[0],
    "seqs": lambda call, target: len(call.seq_lens),
    "heads": lambda call, target: call.query.shape[1],
    "kv_heads": lambda call, target: call.key.shape[1],
    "head_size": lambda call, target: call.query.shape[2],
    "value_size": lambda call, target: call.value_cache.shape[2],
    "block_size": lambda call, target: call.block_size,
    "splits": lambda call, target: (
        call.spec.default_splits if call.num_splits is None else call.num_splits
    ),
    # Scales: the numbers, and the scale of the scores as passed, else the op's default by its contract.
    **{
        name: lambda call, target, name=name: call.number(name)  # type: ignore[misc]
        for name in ("k_scale", "v_scale", "q_scale")
    },
    "scale": paged.scale_of,
    "triton_dtype": lambda call, target: _triton_dtype(call),
    "is_fp8": lambda call, target: paged.format_of(call, target).is_fp8,
    # Which keys a row sees: those to the left and to the right of its own, -1 for all.
    "window_left": lambda call, target: call.sliding_window - 1 if call.sliding_window else -1,
    "window_right": lambda call, target: _right(call),
    "has_window": lambda call, target: call.causal is not False or call.sliding_window > 0,
    "has_rswa": lambda call, target: call.rswa_prefix_lens is not None,
    "rswa_window": lambda call, target: call.sliding_window,
    # The cache as [num_blocks, block_size, num_kv_heads, size], and lists of the slots of each sequence.
    "flash_cache": _flash,
    "flat_cache": _flat,  # flat_keys and flat_values, whose sequences begin at flat_starts
    "flat_starts": lambda call, target: _sums(call.seq_lens).int(),
    "cache_dtype": lambda call, target: paged.format_of(call, target).dtype,
    "slot_mapping": lambda call, target: _slots(call),
    "slot_table": lambda call, target: _slot_table(call),
    # A table of all requests, and the row of each sequence; here the last row is the first sequence's.
    "request_table": lambda call, target: _slot_table(call).flip(0),
    "request_index": lambda call, target: torch.arange(
        len(call.seq_lens) - 1, -1, -1, dtype=torch.int32, device=call.query.device
    ),
    # ``token_slots`` has all tokens from window_starts on, ``context_slots`` those before the new ones.
    "context_lens": lambda call, target: _context_lens(call),
    "window_starts": lambda call, target: _window_starts(call),
    "token_slots": lambda call, target: _slots_of(call, call.seq_lens),
    "token_starts": lambda call, target: _starts_of(call, call.seq_lens),
    "context_slots": lambda call, target: _slots_of(call, _context_lens(call)),
    "context_starts": lambda call, target: _starts_of(call, _context_lens(call)),
    "all_slots": lambda call, target: torch.nn.functional.pad(
        slot_mapping(call), (0, call.padding), value=-1
    ),
    # Attention over the cache, and over the new tokens.
    "partials": _partials,
    # Functions.
    "one": lambda call, target: lambda number: _one(call, number),
    "given": lambda call, target: lambda value: _DEFAULT if value is None else value,
    "float32": lambda call, target: _Scratch(call),
    "int32": lambda call, target: (
        lambda values: torch.tensor(values, dtype=torch.int32, device=call.query.device)
    ),
    "nan_like": lambda call, target: lambda tensor: torch.full_like(tensor, float("nan")),
    "seen": lambda call, target: lambda firsts: _seen(call, firsts),
    "sums": lambda call, target: _sums,
    "power_of_2": lambda call, target: lambda size: 1 << (size - 1).bit_length(),
    "scaled": lambda call, target: partial(_scaled, call, target),
    "affine": lambda call, target: partial(_affine, call),
    "decoded": lambda call, target: (
        lambda numbers, scales, *rest: _decoded(call, Quantised(numbers, scales), *rest)
    ),
    "four_bit_cache": lambda call, target: _four_bit_cache,
    "latent_query": lambda call, target: _latent(
        *(
            one.unflatten(1, (call.key.shape[1], -1)).flatten(0, 1)
            for one in (call.query, torch.zeros_like(call.query))
        )
    ),
    "latent_cache": lambda call, target: _latent(*_flash(call, target)).flatten(0, 2)[:, None],
    "seen_slots": lambda call, target: _seen_slots(call),
    "written_cache": lambda call, target: written_cache,
}


def known_names() -> frozenset[str]:
    """Return the names that an expression of a record can use."""
    own = (name for name in dir(KernelCall) if not name.startswith("_"))
    caches = ("flash_key_cache", "flash_value_cache", "flat_keys", "flat_values")
    return frozenset((*_VALUES, *_BUILTINS, *own, *caches))


_BUILTINS: Mapping[str, Any] = {one.__name__: one for one in (int, float, bool, len, max, min)}


class Values(dict[str, Any]):
    """The values that the expressions of a record can name, each computed when it is first used.

    ``given``: further ones, such as the arguments of a call that was made.
    """

    def __init__(
        self, call: KernelCall, target: Target, given: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(given or {})
        self._call, self._target = call, target

    def __missing__(self, name: str) -> Any:
        if name in ("flash_key_cache", "flash_value_cache"):
            found = self["flash_cache"][name == "flash_value_cache"]
        elif name in ("flat_keys", "flat_values"):
            found = self["flat_cache"][name == "flat_values"]
        elif name in _BUILTINS:
            found = _BUILTINS[name]
        elif name in _VALUES:
            found = _VALUES[name](self._call, self._target)
        elif hasattr(self._call, name):
            found = getattr(self._call, name)
        else:
            text = f"the record of {self._call.op} must use names of attnlab/kernels/binding.py"
            raise Unavailable(f"{text}, got {name}")
        self[name] = found
        return found


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression of a record."""
    return eval(_code(text), {"__builtins__": {}}, values)


@lru_cache(maxsize=512)
def _code(text: str) -> CodeType:
    return compile(text, f"<{text}>", "eval")


def is_default(value: Any) -> bool:
    """Answer whether a value stands for a parameter that is not passed."""
    return value is _DEFAULT


def arguments_of(call: KernelCall, target: Target, names: Any = None) -> Arguments:
    """Return the arguments of a call's op by name, of all releases; ``names``: only these."""
    values = Values(call, target)
    texts = call.spec.arguments.items()
    found = {name: evaluate(text, values) for name, text in texts if names is None or name in names}
    return {name: value for name, value in found.items() if not is_default(value)}


def bind(
    function: Callable[..., Any],
    call: KernelCall,
    target: Target,
    inside: Collection[str] | None = None,
) -> Arguments:
    """Return the arguments of an op by the parameter names of ``function``.

    ``inside``: the names that the op's source has (:func:`attnlab.kernels.vllm.features.names_inside`), None
    if unknown. Raises Unavailable for a required parameter that the record does not have, Unsupported for a
    feature that the call uses and the function does not have.
    """
    parameters = inspect.signature(function).parameters
    check_call(call, parameters, inside)
    return passed(function, arguments_of(call, target, parameters), call.op)


def taken(function: Callable[..., Any]) -> list[str]:
    """Return the arguments that a function takes by name: its parameters, and those that it looks up in
    ``**kwargs``, as in ``kwargs.get("A_log")``."""
    parameters = inspect.signature(function).parameters
    names = [name for name, one in parameters.items() if one.kind not in _OPEN]
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        code = getattr(inspect.unwrap(function), "__code__", None)
        names += [one for one in getattr(code, "co_consts", ()) if isinstance(one, str)]
    return names


def required_of(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the parameters that have no default."""
    found = {name: one for name, one in parameters.items() if one.default is one.empty}
    return [name for name, one in found.items() if one.kind not in _OPEN]


def passed(function: Callable[..., Any], given: Arguments, op: str) -> Arguments:
    """Return the arguments that a function takes; raise Unavailable if it requires another one."""
    for name in required_of(inspect.signature(function).parameters):
        if name not in given:
            raise Unavailable(
                f"{op} requires the argument {name}, which the lab does not know: "
                "add it to the arguments of the op's record"
            )
    return {name: given[name] for name in taken(function) if name in given}


def finish(call: KernelCall, target: Target, arguments: Arguments, returned: Any = None) -> None:
    """Copy the result into ``call.output`` if the op has it elsewhere, in the same form."""
    op = call.spec
    if op.result is not None:
        found = evaluate(op.result, Values(call, target, {**arguments, "returned": returned}))
        while found.dim() > call.buffer.dim() and len(found) == 1:  # [1, rows, heads, size]
            found = found[0]
        call.buffer.copy_(found.view(call.buffer.dtype) if found.dtype == torch.uint8 else found)
    elif (written := arguments[op.parameters("output")[0]]) is not call.output:
        call.buffer.copy_(written[: len(call.buffer)])


def lse_of(
    call: KernelCall, target: Target, arguments: Arguments, returned: Any = None
) -> torch.Tensor | None:
    """Return the log-sum-exp that the op wrote, [rows, num_heads] float32, or None."""
    given = {**arguments, "returned": returned}
    if call.spec.lse is None or names_in(call.spec.lse) & {*call.spec.arguments} - given.keys():
        return None
    found: torch.Tensor | None = evaluate(call.spec.lse, Values(call, target, given))
    return found
