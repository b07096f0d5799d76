"""How the op argument of a Case is passed (:mod:`attnlab.case.op_arguments`)."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import OutOfMemory
from attnlab.case.op_arguments import DIFFKV, NONE, OP_ARGUMENTS, WRITE_DIFFKV, WRITE_SCALED
from attnlab.kernels.model import written_cache
from attnlab.kernels.vllm.features import check_argument
from attnlab.kernels.vllm.loader import Loader
from attnlab.library.op import names_in
from attnlab.tensors.cache import interleaved
from attnlab.tensors.formats import FORMATS
from attnlab.tensors.quantised import (
    OUTPUT_SCALE,
    QUERY_SCALE,
    latent_size,
    narrow_size,
    scaled_numbers,
    stored_numbers,
)


def with_gaps(tensor: torch.Tensor, used: int, times: int = 1) -> torch.Tensor:
    """Return a copy of a tensor in which the strides of the first ``used`` dimensions have gaps.

    The gaps hold NaN, or -1 in a tensor of integers. ``times``: how many times the usual one each gap has.
    """
    shape = [*tensor.shape, 1]
    shape[used] += times * (8 if used == tensor.dim() - 1 else 1)
    empty = float("nan") if tensor.is_floating_point() else -1
    larger = torch.full(shape, empty, device=tensor.device).to(tensor.dtype)
    part = larger[tuple(slice(size) for size in tensor.shape)][..., 0]
    return part.copy_(tensor)


def with_padded_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor [tokens, heads, head_size] in which NaN follows each head.

    The stride of a token is that of a head times the heads, as merge_attn_states computes it.
    """
    padded = torch.full((*tensor.shape[:2], tensor.shape[2] + 8), float("nan")).to(tensor)
    return padded[..., : tensor.shape[2]].copy_(tensor)


# Facts about the arguments of an op's call: values, dtypes and strides.
#
# A fact is a short text, so that the facts of many cases can be joined:
#
# - of a number, a text or None: "value X";
# - of a tensor: "dtype D"; for each dimension with more than one index "dim I", and "stride I" if its stride
#   is not that of a contiguous tensor of this shape.

_LONGEST = 40


def parameters_of(function: Callable[..., None]) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def argument_facts(
    function: Callable[..., None], arguments: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the facts of each parameter of an op; one that is not passed has its default."""
    bound = inspect.signature(function).bind(**arguments)
    bound.apply_defaults()
    return {name: [*_facts(value)] for name, value in bound.arguments.items()}


def _facts(value: Any) -> Iterator[str]:
    if not isinstance(value, torch.Tensor):
        yield f"value {value!r}"[:_LONGEST]
        return
    yield f"dtype {str(value.dtype).removeprefix('torch.')}"
    contiguous = 1
    for dim in reversed(range(value.dim())):
        size, stride = value.shape[dim], value.stride(dim)
        if size > 1:
            yield f"dim {dim}"
            yield from [f"stride {dim}"] * (stride != contiguous)
        contiguous *= size


Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The arguments of an op with a Case's op argument.

    - ``finish``: writes the result into an output [num_tokens, num_heads, head_size] of the query's dtype, or
      into the cache of a cache write. None if the arguments hold it in that form.
    - ``function``: module and name of the function that takes the arguments, or None for the op's own. It
      gets those that it has parameters for.
    """

    arguments: Arguments
    finish: Callable[[torch.Tensor], None] | None = None
    function: tuple[str, str] | None = None


def with_function(
    loader: Loader, function: Callable[..., None], passed: Passed
) -> tuple[Callable[..., None], Passed]:
    """Return the function that takes the arguments, by default ``function``, and those that it has."""
    if passed.function is None:
        return function, passed
    module, name = passed.function
    found: Callable[..., None] = getattr(loader.load(module), name)
    names = parameters_of(found)
    kept = {key: value for key, value in passed.arguments.items() if key in names}
    return found, replace(passed, arguments=kept)


# Op arguments that pass the cache in another format: scales per token and head, INT4, narrow values.

VALUE_SCALE = "value_scale"  # what values are stored with, or None for the scale of their numbers


def scaled_cache(case: Case, given: Arguments) -> Arguments:
    """Pass a quantised cache, with NaN as the scales of empty slots; scale caches have gaps."""
    cache = case.argument.cache
    assert cache is not None
    changed: Arguments = {"kv_quant_mode": cache.mode}
    halves = ("k_buffer", "v_buffer") if "k_buffer" in given else ("k", "v")
    for half, name in zip(halves, ("k", "v"), strict=True):
        # A GPU divides by a number by multiplying with its reciprocal, which rounds in another way.
        chosen = given.get(VALUE_SCALE) if name == "v" else None
        stored, scale = stored_numbers(case, given[half].cpu(), chosen)
        scale = scale.to(given[half].device)
        scales = with_gaps(scale, scale.dim())
        changed |= {half: stored.to(given[half].device), f"{name}_scale_cache": scales}
    return changed


def latent_cache(case: Case, given: Arguments) -> Passed:
    """Pass values that are the first part of the keys, and an output of their width."""
    size = latent_size(case)
    seqs, heads, _ = given["o"].shape
    narrow = given["o"].new_full((seqs, heads, size), float("nan"))
    logits = given["attn_logits"][..., : size + 1].contiguous()
    changed = {
        "v_buffer": given["k_buffer"][..., :size],
        **({"v_scale": given["k_scale"]} if "k_scale" in given else {}),
        "attn_logits": logits,
        "o": narrow,
        "is_mla": True,
    }
    return _narrow(narrow, {**given, **changed})


def diffkv(case: Case, given: Arguments) -> Passed:
    """Pass keys and narrower values as parts of one cache, and an output of the values' width.

    The function is that of the Triton backend for such models; its scratch memory has their width, too.
    """
    size, key = narrow_size(case), given["k"]
    cache = _one_cache(key, given["v"][..., :size])
    narrow = given["out"].new_full((*given["out"].shape[:2], size), float("nan"))
    width = key.shape[-1]
    changed = {"k": cache[..., :width], "v": cache[..., width:], "out": narrow}
    if "softmax_segm_output" in given:
        padded = 1 << (size - 1).bit_length()
        changed["softmax_segm_output"] = given["softmax_segm_output"][..., :padded].contiguous()
    return replace(_narrow(narrow, {**given, **changed}), function=DIFFKV)


def _one_cache(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return keys and values as parts of one cache: bytes of both, for torch cannot concatenate FP8."""
    parts = [one.view(torch.uint8) for one in (key, value.contiguous())]
    return torch.cat(parts, -1).view(key.dtype)


def _narrow(narrow: torch.Tensor, arguments: Arguments) -> Passed:
    """Return what is passed with a narrow output [rows, heads, size]; the rest of the output becomes 0."""

    def finish(output: torch.Tensor) -> None:
        output.zero_()
        output[..., : narrow.shape[-1]] = narrow[: len(output)]

    return Passed(arguments=arguments, finish=finish)


# Op arguments of cache writes in another format: scales per token and head, values of another width.


def write_scaled(case: Case, given: Arguments) -> Passed:
    """Pass quantised caches with their scales; the result is the numbers times their scales."""
    caches = {"k": given["key_cache"], "v": given["value_cache"]}
    made = scaled_cache(case, caches)
    changed = {name: made[name] for name in ("kv_quant_mode", "k_scale_cache", "v_scale_cache")}
    # The op has a program for each row of key, so it needs a slot for each, -1 for padding.
    slots, rows = given["slot_mapping"], len(given["key"])
    changed["slot_mapping"] = torch.cat([slots, slots.new_full((rows - len(slots),), -1)])
    arguments = {**given, **changed, "key_cache": made["k"], "value_cache": made["v"]}

    def finish(output: torch.Tensor) -> None:
        # On the CPU, as the reference: a GPU gives NaN other bytes.
        pairs = ((made[name].cpu(), made[f"{name}_scale_cache"].cpu()) for name in ("k", "v"))
        halves = (scaled_numbers(case, *pair).to(output.dtype) for pair in pairs)
        output.copy_(written_cache(*halves))

    return Passed(arguments=arguments, finish=finish, function=WRITE_SCALED)


def write_diffkv(case: Case, given: Arguments) -> Passed:
    """Pass narrower values, and one cache of both; the rest of the values in the result is 0."""
    size = narrow_size(case)
    cache = _one_cache(given["key_cache"], given["value_cache"][..., :size])
    arguments = {**given, "value": given["value"][..., :size].contiguous(), "kv_cache": cache}

    def finish(output: torch.Tensor) -> None:
        output.view(torch.uint8).zero_()
        output[..., : cache.shape[-1]] = cache.flatten(0, 1)

    return Passed(arguments=arguments, finish=finish, function=WRITE_DIFFKV)


def pass_argument(
    case: Case, arguments: Arguments, parameters: set[str], value_scale: torch.Tensor | None = None
) -> Passed:
    """Return ``arguments`` with the op argument of a Case; they are those that the op gets without one.

    ``parameters``: the names of the op's parameters. ``value_scale``: as in RunOptions. Raises
    Unsupported if the release lacks one, OutOfMemory if the tensors do not fit on a GPU.
    """
    name = case.op_argument
    if name == NONE:
        return Passed(arguments=arguments)
    check_argument(case, parameters)
    try:
        made = _made(case, {**arguments, VALUE_SCALE: value_scale})
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"op_argument {name} needs more memory than the GPU has") from error
    found = made if isinstance(made, Passed) else Passed(arguments={**arguments, **made})
    if found.function is not None:  # it has parameters of its own
        return found
    lacking = set(found.arguments) - set(arguments) - parameters
    kept = {key: value for key, value in found.arguments.items() if key not in lacking}
    if "prefill_tokens_with_context" in lacking:  # then every prefix is read
        kept |= {key: arguments[key] for key in ("prefix_output", "prefix_lse")}
    return replace(found, arguments=kept)


def _made(case: Case, given: Arguments) -> Arguments | Passed:
    """Return what an op argument changes: by the expressions of its record, or by its function here; with
    what the argument that it includes changes."""
    included, passes = case.argument.includes.get(case.op), case.argument.passes
    more = {} if included is None else _made(case.replace(op_argument=included), given)
    assert not isinstance(more, Passed)
    if passes is None:
        made = _MAKERS[case.op_argument](case, {**given, **more})
        return made if isinstance(made, Passed) else {**more, **made}
    names = {**given, **_FUNCTIONS}
    changed = {name: eval(text, {"__builtins__": {}}, names) for name, text in passes.items()}
    return {**more, **changed}


_FUNCTIONS = {"padded_heads": with_padded_heads, "uint8": torch.uint8}


def _fp8_query(case: Case, given: Arguments) -> Arguments:
    """Pass the query in FP8; of an op without a cache, key and value, too."""
    format = FORMATS[case.machine.fp8_e4m3]
    names = ("query", "q") if case.spec.cache_layout is not None else ("q", "k", "v")
    changed: Arguments = {
        name: format.encode(given[name], QUERY_SCALE).view(format.dtype)
        for name in names
        if name in given
    }
    scale = torch.tensor([QUERY_SCALE], device=next(iter(changed.values())).device)
    return {**changed, "q_descale": scale}


def _fp8_output(case: Case, given: Arguments) -> Passed:
    """Pass an FP8 output; :attr:`Passed.finish` decodes it.

    An element that no kernel writes keeps its number: the buffer is full of a NaN whose sign no kernel
    stores, if the format has two.
    """
    name = next(one for one in ("out", "output", "o") if one in given)
    scale = "fp8_out_scale" if name == "o" else "output_scale"
    format = FORMATS[case.machine.fp8_e4m3]
    stored = torch.full_like(given[name], float("nan")).neg().to(format.dtype)
    unwritten = stored.view(torch.uint8).flatten()[:1].clone()

    def finish(output: torch.Tensor) -> None:
        found = stored[: len(output)]
        is_unwritten = found.view(torch.uint8) == unwritten
        output.copy_(torch.where(is_unwritten, output.float(), found.float() * OUTPUT_SCALE))

    changed = {name: stored, scale: torch.tensor([OUTPUT_SCALE], device=stored.device)}
    return Passed(arguments={**given, **changed}, finish=finish)


def _block_pointers(case: Case, given: Arguments) -> Arguments:
    """Pass the address of each block in the key cache."""
    name = "block_table" if "block_table" in given else "b_loc"
    cache = given["key_cache" if "key_cache" in given else "k_cache"]
    stride = cache.stride(0) * cache.element_size()
    return {name: cache.data_ptr() + given[name].long() * stride, "is_block_table_ptr": True}


def _suffix_only(case: Case, given: Arguments) -> Arguments:
    """Pass the number of tokens before the last sequences without a context, and NaN as their prefix."""
    count, lengths = case.lengths.num_tokens, case.lengths
    for query_len, ctx_len in zip(lengths.query_lens[::-1], lengths.ctx_lens[::-1], strict=True):
        if ctx_len:
            break
        count -= query_len
    prefix, lse = given["prefix_output"].clone(), given["prefix_lse"].clone()
    prefix[count:], lse[:, count:] = float("nan"), float("nan")
    return {"prefill_tokens_with_context": count, "prefix_output": prefix, "prefix_lse": lse}


_VALUE_CACHES = {"value_cache", "flash_value_cache", "flat_values"}


def _other_strides(case: Case, given: Arguments) -> Arguments:
    """Pass tensors with gaps; those of values differ from those of keys.

    Caches of an op that has the argument spaced_values do not: that argument shows alone what they show.
    """
    is_apart = case.op in OP_ARGUMENTS["spaced_values"].ops
    values = {"value"} if is_apart else {"value"} | _VALUE_CACHES
    return {
        name: with_gaps(given[name], used, 2 if values & names_in(case.spec.arguments[name]) else 1)
        for name, used in case.spec.strides.items()
        if isinstance(given.get(name), torch.Tensor)
    }


def _fp8_tokens(case: Case, given: Arguments) -> Arguments:
    format = FORMATS[case.machine.fp8_e4m3]
    scales = {"key": case.k_scale, "value": case.v_scale}
    return {
        name: format.encode(given[name], scale).view(format.dtype) for name, scale in scales.items()
    }


def _head_major(case: Case, given: Arguments) -> Passed:
    """Pass the cache in the layout x-split; :attr:`Passed.finish` brings it into the form of the output."""
    is_packed = case.argument.base == "head_major_packed"
    key, value = given["key_cache"], given["value_cache"]
    x = 16 // key.element_size()
    split = key.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
    turned = value.permute(0, 2, 3, 1).contiguous()
    turned = interleaved(turned) if is_packed else turned
    turned = with_gaps(turned, 1) if case.op_argument.endswith("spaced_values") else turned
    changed = {"key_cache": split, "value_cache": turned}

    def finish(output: torch.Tensor) -> None:
        stored = interleaved(turned, back=True) if is_packed else turned
        keys = split.permute(0, 3, 1, 2, 4).flatten(3)
        output.copy_(written_cache(keys, stored.permute(0, 3, 1, 2)))

    packs = {"interleaved_v_pack_factor": x} if is_packed else {}
    return Passed(arguments={**given, **changed, **packs}, finish=finish)


def _padded_tokens(case: Case, given: Arguments) -> Passed:
    """Pass key and value with padded heads, in the format of the argument that this one is based on."""
    base = case.argument.base
    made = {} if base == NONE else _MAKERS[base](case, given)
    passed = made if isinstance(made, Passed) else Passed(arguments={**given, **made})
    padded = {name: with_padded_heads(passed.arguments[name]) for name in ("key", "value")}
    return replace(passed, arguments={**passed.arguments, **padded})


def _by_op(
    attend: Callable[[Case, Arguments], Arguments | Passed],
    write: Callable[[Case, Arguments], Passed],
) -> Callable[[Case, Arguments], Arguments | Passed]:
    """Return the maker of an argument of attention and of cache writes."""
    return lambda case, given: (write if case.spec.writes_cache else attend)(case, given)


_MAKERS: dict[str, Callable[[Case, Arguments], Arguments | Passed]] = {
    "fp8_query": _fp8_query,
    "fp8_output": _fp8_output,
    **{name: _by_op(scaled_cache, write_scaled) for name, one in OP_ARGUMENTS.items() if one.cache},
    **{name: _padded_tokens for name, one in OP_ARGUMENTS.items() if one.strided is not None},
    "diffkv": _by_op(diffkv, write_diffkv),
    "block_pointers": _block_pointers,
    "suffix_only_tokens": _suffix_only,
    "latent_cache": latent_cache,
    "gaps": _other_strides,
    "fp8_tokens": _fp8_tokens,
    "spaced_values": lambda case, given: {"value_cache": with_gaps(given["value_cache"], 1)},
    **{
        name: _head_major
        for name in OP_ARGUMENTS
        if name.startswith("head_major") and not name.endswith("padded_tokens")
    },
}
